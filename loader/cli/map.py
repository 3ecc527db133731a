"""A page that shows which tensors lie where in a model's files, by type and by device, to scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path

from loader.cli.kind import describe_kind
from loader.cli.new_file import refuse_existing, write_new
from loader.cli.parser import UsageError
from loader.cli.text import printable, size
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import type_name
from loader.io.ranges import align_up
from loader.model import Model

_ROWS, _WIDTH, _HEIGHT, _STRIPE = 32, 1000, 18, 5  # of a file, and of a row in pixels
# Paul Tol's and Okabe and Ito's colours, which are told apart by the colour-blind.
_TYPE_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e69f00", "#009e73",
    "#0072b2", "#d55e00", "#cc79a7", "#999933",
)  # fmt: skip
_DEVICE_COLOURS = ("#222222", "#f0a000", "#00a0d0", "#d04080", "#60b040", "#8060d0")
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1060px; color: #222; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin-top: 1.6em; }
table { border-collapse: collapse; } td, th { padding: .1em .8em .1em 0; text-align: right; }
td:first-child, th:first-child, td.text { text-align: left; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .9em; height: .9em; margin-right: .5em; }
.bar { display: inline-block; height: .7em; } svg { background: #eee; } rect:hover { opacity: .6; }
details { margin-top: 1.6em; }
"""
_EXPLANATION = (
    "Below, each row is a part of the file, from left to right and from top to bottom. The colour "
    "of a tensor is its type, the stripe under it its device. Dark grey is the header, light grey "
    "nothing. Point at a tensor to see what it is."
)


@dataclass(frozen=True)
class Piece:
    """A part of a row: from x, so wide, in parts of the row."""

    row: int
    x: float
    width: float


def pieces(begin: int, end: int, row_bytes: int) -> Iterator[Piece]:
    """The parts of rows that a range of bytes covers."""
    while begin < end:
        row, start = divmod(begin, row_bytes)
        stop = min(end - row * row_bytes, row_bytes)
        yield Piece(row, start / row_bytes, (stop - start) / row_bytes)
        begin = row * row_bytes + stop


def check_map_path(path: str) -> None:
    """UsageError for a file that isn't HTML by its name, FileExistsError for one that is there."""
    if not path.lower().endswith((".html", ".htm")):
        raise UsageError(f"--map: {path!r} is no .html file")
    refuse_existing(path)


def write_map(path: str, model: Model, devices: Mapping[str, str]) -> None:
    """Writes the page to a new file. devices: by name of a tensor, the device that it goes to."""
    text = draw_map(model, devices)
    write_new(path, text.encode("ascii", "xmlcharrefreplace").decode())


def draw_map(model: Model, devices: Mapping[str, str]) -> str:
    """The page as HTML, without anything from elsewhere."""
    infos = list(model.tensors.values())
    types = _colours([type_name(info.ggml_type) for info in infos], _TYPE_COLOURS)
    places = _colours([devices[info.name] for info in infos], _DEVICE_COLOURS)
    title = _text(Path(model.path).name)
    total = sum(info.nbytes or 0 for info in infos)
    architecture = model.metadata.get("general.architecture", "unknown")
    about = (
        f"{_text(describe_kind(model))}; architecture {_text(str(architecture))}; "
        f"{len(infos)} tensors, {size(total)}"
    )
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{about}</p>",
        "<h2>By type</h2>",
        _shares(infos, {info.name: type_name(info.ggml_type) for info in infos}, types, total),
        "<h2>By device</h2>",
        _shares(infos, devices, places, total),
        f"<p>{_EXPLANATION}</p>",
    ]
    for number, file in enumerate(model.files):
        parts.append(f"<h2>{_text(Path(file.path).name)}, {size(file.size)}</h2>")
        here = [info for info in infos if info.file == number]
        parts.append(_strip(here, file.size, file.data_offset, devices, types, places))
    parts += [_listing(infos, devices), "</body></html>", ""]
    return "\n".join(parts)


def _text(text: str) -> str:
    return escape(printable(text))


def _colours(names: Sequence[str], palette: Sequence[str]) -> dict[str, str]:
    return dict(zip(sorted(set(names)), cycle(palette), strict=False))


def _shares(
    infos: Sequence[TensorInfo], groups: Mapping[str, str], colours: Mapping[str, str], total: int
) -> str:
    """A table of what belongs to each group, with bars to scale, largest first."""
    counts: defaultdict[str, int] = defaultdict(int)
    sizes: defaultdict[str, int] = defaultdict(int)
    for info in infos:
        counts[groups[info.name]] += 1
        sizes[groups[info.name]] += info.nbytes or 0
    rows = []
    for name in sorted(counts, key=lambda name: (-sizes[name], name)):
        share = sizes[name] / max(total, 1)
        swatch = f'<span class="swatch" style="background:{colours[name]}"></span>'
        bar = f'<span class="bar" style="background:{colours[name]};width:{400 * share:.1f}px">'
        cells = (f"{swatch}{_text(name)}", f"{counts[name]} tensors", size(sizes[name]))
        numbers = "".join(f"<td>{cell}</td>" for cell in (*cells, f"{share:.1%}"))
        rows.append(f'<tr>{numbers}<td class="text">{bar}</span></td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _strip(
    infos: Sequence[TensorInfo],
    file_size: int,
    data_offset: int,
    devices: Mapping[str, str],
    types: Mapping[str, str],
    places: Mapping[str, str],
) -> str:
    """A file as rows of rectangles."""
    row_bytes = max(align_up(file_size, _ROWS) // _ROWS, 1)
    shapes = []

    def rectangle(begin: int, end: int, colour: str, title: str, stripe: str = "") -> None:
        boxes = []
        for piece in pieces(begin, min(end, file_size), row_bytes):
            x, width, y = piece.x * _WIDTH, piece.width * _WIDTH, piece.row * _HEIGHT
            box = f'<rect x="{x:.3f}" width="{width:.3f}" y='
            boxes.append(f'{box}"{y}" height="{_HEIGHT - 2}" fill="{colour}"/>')
            if stripe:
                lower = y + _HEIGHT - 2 - _STRIPE
                boxes.append(f'{box}"{lower}" height="{_STRIPE}" fill="{stripe}"/>')
        shapes.append(f"<g><title>{title}</title>{''.join(boxes)}</g>")

    rectangle(0, data_offset, "#888888", f"header, {size(data_offset)}")
    for info in infos:
        device, kind = devices[info.name], type_name(info.ggml_type)
        title = _text(
            f"{info.name}: {kind}, {_shape(info)}, {size(info.nbytes or 0)} at {info.offset}, "
            f"on {device}"
        )
        end = info.offset + (info.nbytes or 0)
        rectangle(info.offset, end, types[kind], title, places[device])
    return f'<svg width="{_WIDTH}" height="{_ROWS * _HEIGHT}" role="img">{"".join(shapes)}</svg>'


def _shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _listing(infos: Sequence[TensorInfo], devices: Mapping[str, str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("tensor", "type", "shape", "bytes", "offset",
                                                   "file", "device"))  # fmt: skip
    rows = [f"<tr>{head}</tr>"]
    for info in infos:
        cells = (
            info.name, type_name(info.ggml_type), _shape(info),
            "unknown" if info.nbytes is None else str(info.nbytes), str(info.offset),
            str(info.file + 1), devices[info.name],
        )  # fmt: skip
        rows.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    table = f"<table>{''.join(rows)}</table>"
    return f"<details><summary>All {len(infos)} tensors</summary>{table}</details>"
