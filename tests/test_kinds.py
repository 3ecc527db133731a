"""Kinds of files, values of the metadata that are replaced, and the log of a load."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loader
from loader.cli.override_kv import metadata_overrides
from loader.cli.parser import UsageError
from tests import build
from tests.build import T1_DATA, fixed, info, key, pad, random_tensors, scalar, split_model


def write(path: Path, *, tensors: int = 1, **texts: str) -> Path:
    """A file with these keys (__ for a dot) of text, and tensors."""
    keys = b"".join(
        key(name.replace("__", "."), build.STRING, scalar(build.STRING, value))
        for name, value in texts.items()
    )
    infos = b"".join(info(f"t{i}", [8], 0, 32 * i) for i in range(tensors))
    return build.write(path, pad(fixed(3, tensors, len(texts)) + keys + infos) + T1_DATA * tensors)


KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"general__architecture": "llama"}, "main model"),
    ("model", {"general__architecture": "llama", "general__type": "model"}, "main model"),
    ("model", {}, "main model"),
    ("projector", {"general__architecture": "clip"}, "--mmproj, never as one"),
    ("projector", {"general__architecture": "x", "general__type": "mmproj"}, "projector"),
    ("adapter", {"general__architecture": "llama", "general__type": "adapter"}, "--lora"),
    ("adapter", {"general__architecture": "controlvector"}, "--control-vector"),
    ("imatrix", {"general__type": "imatrix"}, "llama-quantize"),
    ("vocabulary", {"general__architecture": "llama", "tensors": 0}, "vocabulary only"),
]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loader", *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "text"), KINDS)
def test_kinds_of_files(kind: str, keys: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", **keys)
    with loader.open(path) as model:
        assert model.kind == kind
    shown = run("inspect", path)
    assert re.search(rf"  kind: .*{text}", shown.stdout)
    assert json.loads(run("inspect", path, "--json").stdout)["kind"] == kind
    loaded = run("load", path)
    assert (loaded.returncode, text in loaded.stdout) == (0, True)
    assert (text in loaded.stderr) == (kind != "model")
    report = run("load", path, "--json")
    assert "kind" not in json.loads(report.stdout)
    assert report.stderr == loaded.stderr


def test_one_shard_of_a_set(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors(3))
    for number, path in enumerate(files, 1):
        for command in ("inspect", "load"):
            expected = f"kind: main model, in 3 files, of which this is shard {number}"
            assert expected in run(command, path).stdout


def test_values_in_place_of_those_in_the_metadata(tmp_path: Path) -> None:
    found = metadata_overrides(
        ["a=int:-5,b.c=float:1e-3", "d=bool:true,e=str:x,y=z,f=bool:false", "a=int:7", "g=str:"]
    )
    assert found == {"a": 7, "b.c": 0.001, "d": True, "e": "x,y=z", "f": False, "g": ""}
    assert metadata_overrides(None) == {}
    for wrong in (
        "a", "a=5", "=int:5", "a=int:", "a=int:5x", "a=int:1_0", "a=int: 5", "a=int:0.5",
        "a=float:x", "a=bool:True", "a=bool:1", "a=u32:5", "", "a=int:5,", "a=int:1,b=long:2",
        "a=int:\u0661\u0662", "k" * 128 + "=int:5", "a=str:" + "x" * 128,
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            metadata_overrides([wrong])
        assert "--override-kv" in str(caught.value)
        assert wrong.split(",")[0][:40] in str(caught.value)
    path = write(tmp_path / "m.gguf", general__architecture="llama", general__name="old")
    words = ["--override-kv", "general.name=str:new", "--override-kv", "x.y=int:3"]
    shown = json.loads(run("inspect", path, "--json", *words).stdout)["metadata"]
    assert shown["general.name"]["value"] == "new"
    assert shown["x.y"] == {"type": "INT64", "value": 3}
    assert run("load", path, *words).returncode == 0
    wrong_type = run("load", path, "--override-kv", "general.name=int:3")
    assert (wrong_type.returncode, wrong_type.stderr.count("\n")) == (2, 1)
    assert run("inspect", path, "--override-kv", "general.alignment=int:64").returncode == 2
    assert "general.name" in wrong_type.stderr
    malformed = run("fit", path, "--override-kv", "general.name=3")
    assert (malformed.returncode, "KEY=TYPE:VALUE" in malformed.stderr) == (2, True)
    as_clip = run("fit", path, "--override-kv", "general.architecture=str:clip")
    assert "projector" in as_clip.stderr


def test_one_line_of_the_log_for_a_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "m.gguf", tensors=3)
    with loader.open(path, access="buffered") as model:
        caplog.set_level(logging.DEBUG, "loader")
        weights = model.load()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        line = caplog.records[0].getMessage()
        assert line == str(weights.report)
        assert line.startswith(f"{path}: loaded 3 tensors, 0.0 MiB, in ")
        assert line.endswith("to cpu, access buffered")
        caplog.clear()
        model.load(no_alloc=True)
        model.read_rows("t0", 0, 1)
        assert not caplog.records
        assert len(list(model.stream())) == 3
        assert [record.levelname for record in caplog.records] == ["INFO"]
        line = caplog.records[0].getMessage()
        assert line.startswith(f"{path}: streamed 3 tensors, 0.0 MiB, in ")
        assert line.endswith(" s to cpu")
    assert capfd.readouterr() == ("", "")
