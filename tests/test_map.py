"""The page that shows which tensors lie where."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import loader
from loader.cli.map import _HEIGHT, _ROWS, _WIDTH, draw_map, pieces
from tests import build
from tests.build import split_model
from tests.conftest import Command
from tests.test_against import TENSORS, write


class Page(HTMLParser):
    """The rectangles of a page by their titles, and its text; every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.boxes: dict[str, list[dict[str, str]]] = defaultdict(list)
        self.words: list[str] = []
        self.tags: list[str] = []
        self.title = ""
        self.feed(text)
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect"):
            self.tags.append(tag)
        if tag == "rect":
            self.boxes[self.title].append({name: value or "" for name, value in attrs})

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.tags and self.tags[-1] == "title":
            self.title = data


def draw(path: Path, **devices: str) -> tuple[loader.Model, Page]:
    with loader.open(path) as model:
        names = dict.fromkeys(model.tensors, "cpu") | devices
        return model, Page(draw_map(model, names))


@given(begin=st.integers(0, 5000), length=st.integers(0, 5000), row_bytes=st.integers(1, 700))
def test_pieces_cover_a_range_exactly(begin: int, length: int, row_bytes: int) -> None:
    found = list(pieces(begin, begin + length, row_bytes))
    covered = 0.0
    for before, piece in zip([None, *found], found, strict=False):
        assert 0 <= piece.x < 1
        assert 0 < piece.width <= 1 - piece.x + 1e-9
        if before is not None:
            assert (piece.row, piece.x) == (before.row + 1, 0)
        covered += piece.width * row_bytes
    assert covered == pytest.approx(length)
    if found:
        assert (found[0].row, found[0].x) == (begin // row_bytes, begin % row_bytes / row_bytes)


def test_the_map_is_to_scale(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TENSORS)
    model, page = draw(path, **{"blk.0.ffn_up.weight": "cuda:0"})
    file_size = path.stat().st_size
    scale = _ROWS * _WIDTH / (-(-file_size // _ROWS) * _ROWS)  # pixels for a byte
    fills = {}
    for name, info in model.tensors.items():
        (title,) = (title for title in page.boxes if title.startswith(f"{name}: "))
        assert f"F32, {'x'.join(map(str, info.shape))}, " in title
        device = "cuda:0" if name == "blk.0.ffn_up.weight" else "cpu"
        assert title.endswith(f"at {info.offset}, on {device}")
        boxes = page.boxes[title]
        colours, stripes = boxes[::2], boxes[1::2]
        width = sum(float(box["width"]) for box in colours)
        assert width == pytest.approx((info.nbytes or 0) * scale, rel=0.01)
        first = float(colours[0]["y"]) / _HEIGHT * _WIDTH + float(colours[0]["x"])
        assert first == pytest.approx(info.offset * scale, rel=0.01)
        assert [box["x"] for box in stripes] == [box["x"] for box in colours]
        fills[name] = (colours[0]["fill"], stripes[0]["fill"])
    up = fills.pop("blk.0.ffn_up.weight")
    assert len(set(fills.values())) == 1
    (other,) = set(fills.values())
    assert (up[0] == other[0], up[1] == other[1]) == (True, False)
    text = " ".join(page.words)
    for what in ("main model", "architecture llama", "3 tensors", "By type", "By device", "cuda:0"):
        assert what in text
    assert re.search(r"2 tensors 24\.4 KiB 50\.\d%", text), "those on the host"


def test_every_file_of_a_split_model(tmp_path: Path) -> None:
    files = split_model(tmp_path, TENSORS, arch="llama")
    _, page = draw(files[0])
    headers = [title for title in page.boxes if title.startswith("header")]
    assert sum(len(page.boxes[title]) for title in headers) >= 3
    assert all(any(file.name in word for word in page.words) for file in files)


def test_names_are_harmless_and_odd_tensors_are_there(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", 'a"b&c', "\x1b[31m\u202ered"]
    infos = b"".join(build.info(name, [8], 0, 32 * i) for i, name in enumerate(names))
    infos += build.info("none", [0], 0, 96) + build.info("odd", [8], 99, 96)
    data = build.pad(build.fixed(3, 5, 0) + infos) + bytes(128)
    path = build.write(tmp_path / "<b>.gguf", data)
    with loader.open(path) as model:
        text = draw_map(model, dict.fromkeys(model.tensors, "cpu"))
    assert "<script" not in text
    assert "\x1b" not in text
    assert text.isascii()
    page = Page(text)
    shown = " ".join(page.words)
    assert names[0] in shown
    assert names[1] in shown
    assert "\\x1b[31m\\u202ered" in shown
    assert "type 99" in shown
    assert "http" not in text, "nothing comes from elsewhere"


def test_no_tensors_at_all(tmp_path: Path) -> None:
    _, page = draw(build.write(tmp_path / "m.gguf", build.fixed(3, 0, 0)))
    assert "vocabulary only" in " ".join(page.words)


def test_the_commands(tmp_path: Path, run: Command) -> None:
    path = write(tmp_path / "m.gguf", TENSORS)
    target = tmp_path / "map.html"
    status, out, err = run("inspect", path, "--map", target, "-ot", "ffn=CUDA1")
    assert (status, err, "3 tensors" in out) == (0, "", True)
    page = Page(target.read_text())
    assert any(title.endswith("on cuda:1") for title in page.boxes)
    before = path.read_bytes()
    for command in ("inspect", "fit"):
        status, _, err = run(command, path, "--map", path)
        assert (status, "is no .html file" in err, err.count("\n")) == (2, True, 1)
    assert path.read_bytes() == before, "a model isn't written over"
    disguised = build.write(tmp_path / "model.html", before)
    for command, model in (("inspect", disguised), ("fit", path)):
        status, _, err = run(command, model, "--map", disguised)
        assert (status, "File exists" in err) == (1, True)
    assert disguised.read_bytes() == before
    assert run("inspect", path, "--map", tmp_path / "none" / "map.html")[0] == 1
    assert run("inspect", path, "--map", target, "-ot", "(=cpu")[0] == 2


def test_where_a_fit_puts_the_real_model(gemma: Path, tmp_path: Path, run: Command) -> None:
    target = tmp_path / "map.html"
    devices = "CUDA0:900MiB/1GiB"
    status, out, _ = run("fit", gemma, "--devices", devices, "-fitt", "50", "--map", target)
    assert (status, out.startswith("-c ")) == (0, True)
    page = Page(target.read_text())
    on: dict[str, int] = defaultdict(int)
    for title in page.boxes:
        on[title.rpartition(" on ")[2]] += 1
    assert on["CPU"] == 1, "the token embedding"
    assert on["CUDA0"] == 235
    used: Any = {box["fill"] for boxes in page.boxes.values() for box in boxes}
    assert len(used) >= 6
