"""`gguf-dio inspect`: what a model's header says."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType

from loader.cli.access import requested_access
from loader.cli.kind import describe_kind
from loader.cli.map import check_map_path, write_map
from loader.cli.override_kv import add_override_flag, metadata_overrides
from loader.cli.parser import Parser
from loader.cli.placement import add_placement_flags, requested_placement
from loader.cli.text import print_json, print_line, printable, size
from loader.gguf.metadata import Metadata, StringArray
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import type_name
from loader.model import Model, open as open_model
from loader.placement import Overrides

# In JSON, longer arrays are shown by their length only, unless the metadata is asked for; in
# text, the first elements are shown.
_SHORT_ARRAY = 16
_FIRST = 8


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any file of a split model")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--metadata", action="store_true", help="list the metadata (with --json, long arrays whole)"
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors")
    parser.add_argument(
        "--map", metavar="FILE.html", help="draw which tensors lie where, by type and device"
    )
    add_placement_flags(parser)
    add_override_flag(parser)


def execute(arguments: argparse.Namespace) -> None:
    overrides = metadata_overrides(arguments.override_kv)
    placement = requested_placement(arguments)
    if arguments.map is not None:
        check_map_path(arguments.map)
    access = requested_access(None, os.environ)
    with open_model(arguments.model, access=access, metadata_overrides=overrides) as model:
        if arguments.map is not None:
            write_map(arguments.map, model, _devices(model, placement))
        if arguments.json:
            print_json(_as_object(model, whole=arguments.metadata))
            return
        _print_summary(model)
        if arguments.metadata:
            for key in model.metadata:
                print_line(f"{printable(key)} = {_shown(model.metadata, key)}")
        if arguments.tensors:
            _print_tensors(model)


def _devices(model: Model, placement: Overrides | str) -> dict[str, str]:
    """The device of each tensor."""
    return {
        name: placement if isinstance(placement, str) else placement(info)
        for name, info in model.tensors.items()
    }


def _bytes_by_type(model: Model) -> dict[str, dict[str, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in model.tensors.values():
        counts[type_name(info.ggml_type)] += 1
        sizes[type_name(info.ggml_type)] += info.nbytes or 0
    return {name: {"tensors": counts[name], "bytes": sizes[name]} for name in sorted(counts)}


# --- JSON --------------------------------------------------------------------


def _as_object(model: Model, *, whole: bool) -> dict[str, object]:
    return {
        "model": model.path,
        "kind": model.kind,
        "files": [asdict(file) for file in model.files],
        "bytes": sum(info.nbytes or 0 for info in model.tensors.values()),
        "types": _bytes_by_type(model),
        "metadata": {key: _value_object(model.metadata, key, whole) for key in model.metadata},
        "tensors": [_tensor_object(info) for info in model.tensors.values()],
    }


def _tensor_object(info: TensorInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "type": type_name(info.ggml_type),
        "type_id": int(info.ggml_type),
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "offset": info.offset,
        "file": info.file,
    }


def _value_object(metadata: Metadata, key: str, whole: bool) -> dict[str, object]:
    kind = metadata.value_type(key)
    if kind != GGUFValueType.ARRAY:
        return {"type": kind.name, "value": _plain(metadata[key])}
    values, element = metadata[key], metadata.element_type(key)
    shown = whole or len(values) <= _SHORT_ARRAY
    return {
        "type": kind.name,
        "element_type": element.name if element is not None else None,
        "count": len(values),
        "value": [_plain(item) for item in _items(values)] if shown else None,
    }


def _items(values: Sequence[str] | npt.NDArray[Any]) -> list[Any]:
    """The elements of an array as Python values."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _plain(value: Any) -> object:
    """JSON has no NaN and no infinity: they become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- Text ----------------------------------------------------------------------


def _print_summary(model: Model) -> None:
    total = sum(info.nbytes or 0 for info in model.tensors.values())
    for file in model.files:
        print_line(f"{printable(file.path)}: GGUF version {file.version}, {size(file.size)}")
        print_line(f"  access: {file.access}: {printable(file.reason)}")
        print_line(
            f"  tensor data from offset {file.data_offset}, aligned to {file.tensor_alignment} B"
        )
    print_line(f"  kind: {describe_kind(model)}")
    print_line(f"  {len(model.metadata)} metadata keys")
    for key in ("general.architecture", "general.name"):
        if key in model.metadata:
            print_line(f"    {key} = {_shown(model.metadata, key)}")
    print_line(f"  {len(model.tensors)} tensors, {size(total)}")
    for name, row in _bytes_by_type(model).items():
        print_line(f"    {name}: {row['tensors']} tensors, {size(row['bytes'])}")


def _shown(metadata: Metadata, key: str) -> str:
    value = metadata[key]
    if not isinstance(value, (StringArray, np.ndarray)):
        return printable(value if isinstance(value, str) else repr(value))
    element = metadata.element_type(key)
    kind = element.name if element is not None else ""
    first = ", ".join(map(repr, _items(value[:_FIRST])))
    more = ", ..." if len(value) > _FIRST else ""
    return printable(f"{len(value)} x {kind}: [{first}{more}]")


def _print_tensors(model: Model) -> None:
    rows = [
        (
            str(info.offset),
            "?" if info.nbytes is None else str(info.nbytes),
            type_name(info.ggml_type),
            "x".join(map(str, info.shape)) or "scalar",
            printable(info.name),
            str(info.file + 1),
        )
        for info in model.tensors.values()
    ]
    rows.insert(0, ("offset", "bytes", "type", "shape", "name", "file"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for offset, nbytes, kind, shape, name, file in rows:
        which = f"{file:>{widths[5]}}  " if len(model.files) > 1 else ""
        print_line(
            f"{which}{offset:>{widths[0]}}  {nbytes:>{widths[1]}}  {kind:<{widths[2]}}  "
            f"{shape:<{widths[3]}}  {name}"
        )
