"""Models beside other models: by bytes, and by value."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as T

import loader
from loader.comparison import ModelValues, compare, rounding
from tests import build
from tests.build import split_model
from tests.conftest import Command

Arrays = dict[str, npt.NDArray[Any]]


def values(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write(
    path: Path,
    tensors: Arrays,
    kind: T = T.F32,
    arch: str = "llama",
    numbers: dict[str, int] | None = None,
) -> Path:
    """A model with these tensors, those of two axes and more quantised."""
    writer = gguf.GGUFWriter(path, arch)
    for key, number in (numbers or {}).items():
        add = writer.add_array if isinstance(number, list) else writer.add_uint32
        add(f"{arch}.{key}", number)
    for name, array in tensors.items():
        if kind == T.F32 or array.ndim < 2:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def nmse(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Plainly, to hold the product against."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a - b) ** 2).sum() / (b**2).sum())


TENSORS: Arrays = {
    "token_embd.weight": values(64, 96), "blk.0.ffn_up.weight": values(3, 32, 64, seed=1),
    "output_norm.weight": values(96, seed=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0, T.BF16, T.F16])
def test_the_error_of_another_quantisation(tmp_path: Path, kind: T, run: Command) -> None:
    path = write(tmp_path / "q.gguf", TENSORS, kind)
    other = write(tmp_path / "f.gguf", TENSORS)
    status, out, _ = run("verify", path, "--against", other, "--json")
    found = json.loads(out)["against"]
    assert status == 0
    assert (found["different"], found["missing"], found["unexpected"]) == ([], [], [])
    by_name = {one["name"]: one for one in found["compared"]}
    assert set(by_name) == {"token_embd.weight", "blk.0.ffn_up.weight"}
    weights = loader.load(path)
    for name, one in by_name.items():
        expected = nmse(weights[name].dequantize(), TENSORS[name])
        assert one["nmse"] == pytest.approx(expected, rel=1e-9)
        assert 0 < one["nmse"] < 0.02
        assert (one["type"], one["other_type"], one["why"]) == (kind.name, "F32", "")
    errors = [one["nmse"] for one in found["compared"]]
    assert errors == sorted(errors, reverse=True), "worst first"
    status, out, _ = run("verify", path, "--against", other)
    assert status == 0
    first, second, *_, last = out.splitlines()
    assert first.split() == ["NMSE", "type", "against", "tensor"]
    assert second.split() == [f"{errors[0]:.3g}", kind.name, "F32", found["compared"][0]["name"]]
    assert last.endswith("3 tensors are as in " + str(other) + ", 2 of them by value: 0 equal, 2 "
                         "but for rounding")  # fmt: skip


def test_what_is_not_rounding(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tensor, another shape, zeros, NaN, one byte of the same type."""
    monkeypatch.setattr("loader.comparison._PIECE", 1000)  # several pieces
    nan = TENSORS["token_embd.weight"].copy()
    nan[3, 5] = np.nan
    infinite = values(8, 32)
    infinite[0, 0] = np.inf
    wrong: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any], str | None]] = {
        "same": (values(8, 32), values(8, 32), None),
        "rounded": (values(64, 96), values(64, 96) + np.float64(1e-7), None),
        "another": (values(64, 96), values(64, 96, seed=5), "other"),
        "shape": (values(64, 96), values(96, 64), "their shapes differ: 64x96 and 96x64"),
        "zeros": (values(8, 32), np.zeros((8, 32), np.float32), "the reference is all zeros"),
        "none": (np.zeros((8, 32), np.float32), values(8, 32), "gone"),
        "nan": (TENSORS["token_embd.weight"], nan, "values that aren't finite differ"),
        "nans": (nan, nan, None),
        "infinite": (infinite, infinite + np.float64(1e-7), None),
        "empty": (values(0, 32), values(0, 32), None),
    }
    path = write(tmp_path / "q.gguf", {name: one for name, (one, _, _) in wrong.items()})
    kinds = {name: other for name, (_, other, _) in wrong.items()}
    other = tmp_path / "o.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    for name, array in kinds.items():
        writer.add_tensor(name, array.astype(np.float64) if name != "same" else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    status, out, err = run("verify", path, "--against", other, "--json")
    found = json.loads(out)["against"]
    by_name = {one["name"]: one for one in found["compared"]}
    bad = {name for name, (_, _, why) in wrong.items() if why is not None}
    assert status == 1
    assert set(found["different"]) == bad
    assert f"{len(bad)} tensors different" in err
    assert "same" not in by_name
    for name in ("nans", "empty"):
        assert by_name[name]["nmse"] == 0
    assert by_name["rounded"]["nmse"] == pytest.approx(1e-14, rel=0.2)
    assert by_name["another"]["nmse"] == pytest.approx(nmse(values(64, 96), kinds["another"]))
    assert by_name["none"]["nmse"] == 1
    for name in ("shape", "zeros", "nan"):
        assert (by_name[name]["nmse"], by_name[name]["why"]) == (None, wrong[name][2])
    assert [one["nmse"] for one in found["compared"]][:3] == [None] * 3, "worst first"
    assert by_name["infinite"]["nmse"] == pytest.approx(1e-14, rel=0.3)


def test_another_split(tmp_path: Path, run: Command) -> None:
    whole = write(tmp_path / "w.gguf", TENSORS)
    (tmp_path / "s").mkdir()
    files = split_model(tmp_path / "s", TENSORS, arch="llama")
    status, out, _ = run("verify", files[1], "--against", whole)
    assert (status, "3 tensors are as in" in out) == (0, True)


def test_types_that_cannot_be_dequantized(tmp_path: Path, run: Command) -> None:
    paths = []
    for number in range(2):
        infos = build.info("t", [128, 2], 41 - number, 0)  # Q1_0 and NVFP4, which gguf may lack
        data = build.pad(build.fixed(3, 1, 0) + infos) + build.random_bytes(256, number)
        paths.append(build.write(tmp_path / f"{number}.gguf", data))
    status, out, err = run("verify", paths[0], "--against", paths[1])
    assert (status, err.count("\n")) == (1, 1)
    assert "can't be dequantized" in out


def test_what_rounding_to_a_type_may_cost() -> None:
    """Above what quantising costs, values with an outlier in each block among them, and far below
    what another tensor does."""
    array = values(64, 256)
    outliers = array.copy()
    outliers[:, ::32] *= 20
    for kind in (T.Q8_0, T.Q5_0, T.Q5_1, T.Q4_0, T.Q4_1, T.F16, T.BF16):
        for one in (array, outliers):
            back = gguf.quants.dequantize(gguf.quants.quantize(one, kind), kind)
            assert nmse(back, one) < rounding(kind.name) < 0.1
    limits = [rounding(name) for name in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q4_K", "IQ1_S")]
    assert limits == sorted(limits)
    assert limits[-1] == 0.5
    assert rounding("I32") == rounding("F64") == rounding("nothing of ours") == limits[0] < 1e-10


def test_shapes_that_are_the_same_for_ggml(tmp_path: Path, run: Command) -> None:
    data = [
        build.pad(build.fixed(3, 1, 0) + build.info("t", dims, 8, 0)) + build.random_bytes(64)
        for dims in ([32], [32, 1])
    ]
    paths = [build.write(tmp_path / f"{i}.gguf", one) for i, one in enumerate(data)]
    assert run("verify", paths[0], "--against", paths[1])[0] == 0
    for number, path in enumerate(paths):  # and by value
        with loader.open(path) as model:
            found = ModelValues(model, model.tensors["t"])
            assert found.rows(0, 32).shape == (32,), number


def test_pieces_are_small_whatever_the_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.comparison._PIECE", 256)
    asked: list[int] = []
    read_part = loader.Model.read_part

    def counted(self: loader.Model, info: Any, start: int, stop: int) -> Any:
        asked.append(int(np.prod(info.shape[1:])) * (stop - start))
        return read_part(self, info, start, stop)

    monkeypatch.setattr(loader.Model, "read_part", counted)
    tensors: Arrays = {
        "a": values(4, 8, 64),
        "b": values(1, 2048),
        "c": values(2048),
        "d": values(1, 4, 1, 256),
    }
    path, other = write(tmp_path / "a.gguf", tensors, T.Q8_0), write(tmp_path / "b.gguf", tensors)
    with loader.open(path) as model, loader.open(other) as reference:
        for name, info in model.tensors.items():
            ours = ModelValues(model, info)
            theirs = ModelValues(reference, reference.tensors[name])
            assert compare(name, ours, theirs, lambda _: None).is_close
    assert max(asked) <= 256
    with loader.open(path) as model, pytest.raises(ValueError, match="number of elements"):
        model.read_part(replace(model.tensors["a"], shape=(5,)), 0, 1)
    with loader.open(path) as model, pytest.raises(ValueError, match="no tensor of"):
        model.read_part(replace(model.tensors["a"], offset=0), 0, 1)


def test_other_is_looked_at_before_the_model_is_read(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", TENSORS)
    monkeypatch.setattr("loader.cli.verify.digest_model", lambda *_: pytest.fail("it was read"))
    (tmp_path / "empty").mkdir()
    for other in ("none.gguf", "empty"):
        status, _, err = run("verify", path, "--against", tmp_path / other)
        assert (status, err.count("\n")) == (1, 1)


def test_both_comparisons_are_told(tmp_path: Path, run: Command) -> None:
    path, listed = write(tmp_path / "m.gguf", TENSORS), tmp_path / "list"
    other = write(tmp_path / "o.gguf", {"output_norm.weight": values(96)})
    assert run("verify", other, "--write", listed)[0] == 0
    status, out, err = run("verify", path, "--check", listed, "--against", other)
    assert (status, err.count("\n")) == (1, 1)
    assert f"not what {listed} says: " in err
    assert f"not what {other} says: " in err
    assert "output_norm.weight" in out


def test_the_real_model_against_itself(gemma: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loader", "verify", str(gemma), "--against", str(gemma)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "236 tensors are as in" in done.stdout
