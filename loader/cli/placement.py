"""The flags that say which tensors go to which device."""

from __future__ import annotations

import argparse

from loader.cli.parser import Parser, UsageError
from loader.device.registry import HOST, canonical_name
from loader.placement import Overrides, parse_overrides


def add_placement_flags(parser: Parser) -> None:
    parser.add_argument(
        "--device",
        default=HOST,
        metavar="D",
        help="where to load to: cpu, cuda:N, opencl:N or torch:DEVICE",
    )
    parser.add_argument(
        "-ot",
        "--override-tensor",
        action="append",
        metavar="PATTERN=DEVICE,...",
        help="tensors in whose names a pattern is found go to that device instead; may be repeated",
    )


def requested_placement(arguments: argparse.Namespace) -> Overrides | str:
    """For `load(device=...)`. UsageError for what is no device or no pattern."""
    overrides = arguments.override_tensor
    try:
        if overrides:
            return parse_overrides(",".join(overrides), arguments.device)
        return canonical_name(arguments.device)
    except ValueError as error:
        raise UsageError(str(error)) from None
