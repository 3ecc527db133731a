"""The examples of the README and the guides run, and their links lead somewhere."""

from __future__ import annotations

import gc
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import loader
import loader.fit
import loader.io
from tests import fake_cuda

ROOT = Path(loader.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="the documents are in the source, not in a wheel"
)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text("utf-8")) if kind == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the model of the examples."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, number in {
        "block_count": 2, "context_length": 8192, "embedding_length": 64,
        "feed_forward_length": 128, "attention.head_count": 4,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", number)
    random = np.random.default_rng(0)
    names = ["token_embd", *(f"blk.{i}.{n}" for i in range(2) for n in ("attn_q", "ffn_up"))]
    for name in names:
        values = random.standard_normal((64, 64)).astype(np.float32)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.1.attn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_in_python(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a page one after the other, as a reader would type them."""
    monkeypatch.setattr(gguf, "GGUFReader", gguf.GGUFReader)  # one of them replaces it
    found = blocks(page, "python")
    if any("compat.torch" in text for text in found):
        pytest.importorskip("torch", reason="needs the extra torch")
    if any("cuda:0" in text or "fit_model" in text for text in found):
        cuda: fake_cuda.FakeCuda = request.getfixturevalue("cuda")
        cuda.device(0, total=24 << 30)
    names: dict[str, object] = {}
    for number, text in enumerate(found, 1):
        exec(compile(text, f"{page.name}, example {number}", "exec"), names)  # noqa: S102 - ours
    assert len(found) > 0 or page.name == "command.md"
    names.clear()
    gc.collect()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_the_command(page: Path, folder: Path) -> None:
    """What begins with gguf-dio; the two commands that install are run by the gate."""
    for text in blocks(page, "sh"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["gguf-dio"]:
                assert words[:3] == ["python3", "-m", "venv"], line
                continue
            done = subprocess.run(
                [sys.executable, "-m", "loader", *words[1:]],
                capture_output=True, text=True, check=False, timeout=120, cwd=folder,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}: {done.stderr}"
            assert done.stdout or "--write" in words or "--map" in words


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("[A-Z]*.md")}), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_ten_lines_of_python_and_memory_of_ones_own_come_early() -> None:
    """Within the first screens of the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    first, second, *_ = blocks(ROOT / "README.md", "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    assert "into=" in second
    assert text[: text.index("into=")].count("\n") < 90


def test_everything_public_has_a_docstring() -> None:
    """The reference is made of them."""
    modules = [loader, loader.io, loader.fit]
    for module in modules:
        assert module.__doc__
        for name in module.__all__:
            if name.startswith("__"):
                continue
            value = getattr(module, name)
            assert inspect.getdoc(value), f"{module.__name__}.{name}"
            if not inspect.isclass(value):
                continue
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and callable(member):
                    assert inspect.getdoc(member), f"{module.__name__}.{name}.{attribute}"
