"""`gguf-dio fit`: which layers go to which device, and how long the context can be."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable
from typing import TypeVar

from loader.cli.access import requested_access
from loader.cli.map import check_map_path, write_map
from loader.cli.override_kv import add_override_flag, metadata_overrides
from loader.cli.parser import Parser, UsageError
from loader.cli.text import note, print_json, print_line, printable
from loader.device.memory import DeviceMemory
from loader.errors import FormatError
from loader.fit.model import ModelFit, fit_model, require
from loader.fit.planner import DEFAULT_N_CTX_MIN, MOST_DEVICES
from loader.model import open as open_model
from loader.options import parse_size

logger = logging.getLogger("loader")

_T = TypeVar("_T")
_MIB = 1 << 20
_DEFAULT_MARGIN_MIB = 1024


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any file of a split model")
    parser.add_argument(
        "-c", "--ctx-size", default="0", metavar="N", help="the context in tokens, 0: what fits"
    )
    parser.add_argument(
        "-fitt", "--fit-target",
        default=str(_DEFAULT_MARGIN_MIB), metavar="MiB0,MiB1,...",
        help="what is to stay free, for each device or one for all (1024)",
    )  # fmt: skip
    parser.add_argument(
        "-fitc",
        "--fit-ctx",
        default=str(DEFAULT_N_CTX_MIN),
        metavar="N",
        help="the least context (4096)",
    )
    parser.add_argument(
        "-ngl", "--gpu-layers", metavar="N", help="layers on devices, as you set it"
    )
    parser.add_argument(
        "-ts", "--tensor-split", metavar="N0,N1,...", help="proportions, as you set"
    )
    parser.add_argument(
        "-ot",
        "--override-tensor",
        metavar="PATTERN=DEVICE,...",
        help="where tensors go, as you set",
    )
    parser.add_argument("-ctk", "--cache-type-k", default="f16", metavar="T", help="f16, q8_0, ...")
    parser.add_argument("-ctv", "--cache-type-v", default="f16", metavar="T", help="f16, q8_0, ...")
    parser.add_argument(
        "--devices", metavar="NAME:FREE/TOTAL,...",
        help="made-up devices, sizes such as 24GiB; without it, those of this machine",
    )  # fmt: skip
    parser.add_argument(
        "--print", action="store_true", help="show a table and where the layers are"
    )
    parser.add_argument(
        "--map", metavar="FILE.html", help="draw which tensors lie where, by type and device"
    )
    add_override_flag(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    numbers = _each("-fitt", arguments.fit_target, _number)
    split, rules = arguments.tensor_split, arguments.override_tensor
    n_ctx = _number("-c", arguments.ctx_size)
    n_ctx_min = _number("-fitc", arguments.fit_ctx)
    layers = -1 if arguments.gpu_layers is None else _number("-ngl", arguments.gpu_layers)
    tensor_split = None if split is None else _each("-ts", split, _proportion)
    overrides = () if rules is None else _each("-ot", rules, _override)
    made_up = arguments.devices
    if arguments.map is not None:
        check_map_path(arguments.map)
    devices = None if made_up is None else _each("--devices", made_up, _device)
    values = metadata_overrides(arguments.override_kv)
    access = requested_access(None, os.environ)
    with open_model(arguments.model, access=access, metadata_overrides=values) as model:
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # what it warns of is the error below
        try:
            result = fit_model(
                model,
                devices,
                margins=[number * _MIB for number in numbers],
                n_ctx=n_ctx,
                n_ctx_min=n_ctx_min,
                n_gpu_layers=layers,
                tensor_split=tensor_split,
                overrides=overrides,
                type_k=arguments.cache_type_k,
                type_v=arguments.cache_type_v,
            )
        except FormatError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None
        finally:
            logger.setLevel(level)
        if arguments.map is not None:
            write_map(arguments.map, model, result.homes)
    for text in result.notes:
        note(text)
    if arguments.json:
        print_json({"model": arguments.model, **result.to_dict()})
    if result.status == "error":
        raise UsageError(result.reason)
    require(result)
    if arguments.json:
        return
    if arguments.print:
        _print_table(result)
    else:
        print_line(result.to_args())


# --- Options, parsed strictly ------------------------------------------------------


def _each(option: str, text: str, parse: Callable[[str, str], _T]) -> list[_T]:
    parts = text.split(",")
    if len(parts) > MOST_DEVICES and option != "-ot":
        raise UsageError(f"{option}: {len(parts)} values in {text!r}, at most {MOST_DEVICES}")
    return [parse(option, part) for part in parts]


def _number(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{option}: {text!r} is not a number from 0 on")
    return int(text)


def _proportion(option: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise UsageError(f"{option}: {text!r} is not a number from 0 on")
    return float(text)


def _override(option: str, text: str) -> tuple[str, str]:
    pattern, found, device = text.partition("=")
    if not found or not pattern or not device:
        raise UsageError(f"{option}: {text!r} is not PATTERN=DEVICE")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option}: {text!r}: the pattern is wrong: {error}") from None
    return pattern, device


def _device(option: str, text: str) -> DeviceMemory:
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9_.-]*):([^/:]+)/([^/:]+)", text)
    if match is None:
        raise UsageError(f"{option}: {text!r} is not NAME:FREE/TOTAL")
    try:
        free, total = parse_size(match[2]), parse_size(match[3])
    except ValueError as error:
        raise UsageError(f"{option}: {text!r}: {error}") from None
    if free > total:
        raise UsageError(f"{option}: {text!r} has more free than there is in total")
    return DeviceMemory(match[1], free, total)


# --- Text ----------------------------------------------------------------------------


def _print_table(result: ModelFit) -> None:
    print_line(printable(result.to_args()))
    rows = [("MiB", "free", "margin", "model", "context", "compute", "left")]
    for device in result.devices:
        need, left = device.need, device.free - device.used
        figures = (device.free, device.margin, need.model, need.context, need.compute, left)
        rows.append((printable(device.name), *(f"{round(n / _MIB)}" for n in figures)))  # type: ignore[arg-type]  # six of them
    host = (result.host.model, result.host.context, result.host.compute)
    rows.append(("CPU", "", "", *(f"{round(n / _MIB)}" for n in host), ""))  # type: ignore[arg-type]  # three of them
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    for row in rows:
        first = f"{row[0]:<{widths[0]}}"
        rest = "  ".join(
            f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True)
        )
        print_line(f"{first}  {rest}".rstrip())
    _print_layers(result)


def _print_layers(result: ModelFit) -> None:
    """A row for each device, a sign for each layer: # all of it, + some of it, . nothing."""
    layers: list[dict[str, int]] = [{} for _ in range(result.n_layer + 1)]
    for name, device in result.homes.items():
        match = re.match(r"blk\.([0-9]+)\.", name)
        index = min(int(match[1]), result.n_layer) if match else result.n_layer
        if match or name.startswith("output"):
            layers[index][device] = layers[index].get(device, 0) + 1
    print_line(f"layers 0 to {result.n_layer} (the last one is the output): # all, + a part")
    names = [*(device.name for device in result.devices), "CPU"]
    width = max(map(len, names))
    for name in names:
        signs = (
            "." if name not in counts else "#" if len(counts) == 1 else "+" for counts in layers
        )
        print_line(f"{printable(name):<{width}}  {''.join(signs)}")
