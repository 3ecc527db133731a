"""`gguf-dio load`: load a model and say how it went."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from loader.cli.access import add_access_flags, requested_access
from loader.cli.kind import describe_kind
from loader.cli.override_kv import add_override_flag, metadata_overrides
from loader.cli.parser import Parser
from loader.cli.placement import add_placement_flags, requested_placement
from loader.cli.progress import progress_bar
from loader.cli.sample import sample_model
from loader.cli.text import note, print_json, print_line, printable, size
from loader.gguf.tensors import TensorInfo
from loader.model import open as open_model
from loader.report import LoadReport


def configure(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, or any file of a split model; without it, a small sample is made",
    )
    add_access_flags(parser)
    parser.add_argument("--mlock", action="store_true", help="lock the weights into memory")
    parser.add_argument(
        "--check-tensors", action="store_true", help="look for NaN and infinite values and scales"
    )
    add_placement_flags(parser)
    parser.add_argument(
        "--tensors",
        action="append",
        metavar="GLOB",
        help="load only tensors whose name matches, such as 'blk.0.*'; may be repeated",
    )
    add_override_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    access = requested_access(arguments.access_flags, os.environ)
    device = requested_placement(arguments)
    overrides = metadata_overrides(arguments.override_kv)
    path = arguments.model if arguments.model is not None else sample_model()
    with open_model(path, access=access, metadata_overrides=overrides) as model:
        if model.kind != "model":
            note(f"{model.path}: {describe_kind(model)}")
        names = _matching(arguments.tensors)
        if names is not None and not any(names(info) for info in model.tensors.values()):
            raise ValueError(
                f"{model.path}: no tensor matches {' or '.join(arguments.tensors)}; "
                "gguf-dio inspect --tensors lists them"
            )
        with progress_bar("loading") as progress:
            weights = model.load(
                names=names,
                device=device,
                check_tensors=arguments.check_tensors,
                mlock=arguments.mlock,
                progress=progress,
            )
    if arguments.json:
        print_json(weights.report.to_dict())
    else:
        _print_report(weights.report, describe_kind(model))


def _matching(globs: Sequence[str] | None) -> Callable[[TensorInfo], bool] | None:
    if not globs:
        return None
    return lambda info: any(fnmatchcase(info.name, glob) for glob in globs)


def _print_report(report: LoadReport, kind: str) -> None:
    speed = report.bytes_per_second
    rate = f" ({size(speed)}/s)" if speed else ""
    print_line(
        f"{printable(report.model)}: {report.tensors} tensors, {size(report.bytes)} "
        f"in {report.seconds:.3f} s{rate}, opened in {report.open_seconds:.3f} s"
    )
    print_line(f"  kind: {kind}")
    for file in report.files:
        print_line(f"  {printable(file.path)}, {size(file.size)}")
        print_line(f"    access: {file.access}: {printable(file.reason)}")
        if file.memory_alignment is not None:
            print_line(
                f"    alignment: memory {file.memory_alignment} B, offset {file.offset_alignment} B"
            )
        if file.fallback is not None:
            print_line(
                f"    fell back to buffered reads at offset {file.fallback.offset}: "
                f"{os.strerror(file.fallback.errno)}"
            )
    print_line(
        f"  moved: direct {size(report.bytes_direct)}, buffered {size(report.bytes_buffered)}, "
        f"mapped {size(report.bytes_mapped)}, of these bounced {size(report.bytes_bounced)}"
    )
    for name, nbytes in report.device_bytes.items():
        print_line(f"  on {printable(name)}: {size(nbytes)}")
    if report.staging is not None:
        staging = report.staging
        how = "pinned" if staging.why_pageable is None else f"pageable ({staging.why_pageable})"
        print_line(
            f"  staging: {staging.buffers} buffers of {size(staging.buffer_bytes)}, "
            f"{printable(how)}"
        )
    print_line(f"  peak memory of the process: {size(report.peak_rss_bytes)}")
