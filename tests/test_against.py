"""Models beside other models, and beside the checkpoints that they were made of."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as T

import loader
from loader.checkpoint import Checkpoint, folder as folders
from loader.checkpoint.files import read_safetensors
from loader.comparison import ModelValues, compare, rounding
from loader.io import File
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


def test_one_type_has_to_have_the_same_bytes(tmp_path: Path, run: Command) -> None:
    """However close it is: the sign of a zero, a little error."""
    for one, other in ((0.0, -0.0), (1.0, 1.0 + 1e-6)):
        array = values(8, 32)
        array[2, 3] = one
        path = write(tmp_path / "a.gguf", {"t": array})
        array[2, 3] = other
        changed = write(tmp_path / "b.gguf", {"t": array})
        status, out, err = run("verify", path, "--against", changed)
        assert (status, "1 tensors different ('t')" in err) == (1, True)
        assert len(out.splitlines()) == 2
    # Nor may a checkpoint of that type be a little different.
    embedding = values(50, 64)
    source = folder(tmp_path / "hf", {"model.embed_tokens.weight": embedding})
    path = write(tmp_path / "m.gguf", {"token_embd.weight": embedding * (1 + 1e-5)}, numbers=HEADS)
    status, _, err = run("verify", path, "--against", source)
    assert (status, "'token_embd.weight'" in err) == (1, True)


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


# --- Checkpoints ---

_NAMES = {np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype("u2"): "BF16"}


def safetensors(path: Path, tensors: Arrays) -> Path:
    """A file of the format; uint16 is BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype], "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def folder(path: Path, *files: Arrays, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if len(files) == 1:
        safetensors(path / "model.safetensors", files[0])
        return path
    weights = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        safetensors(path / name, tensors)
        weights.update(dict.fromkeys(tensors, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return path


def bf16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    found: npt.NDArray[np.uint16] = (array.view(np.uint32) >> 16).astype(np.uint16)
    return found


def reordered(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head: first those of the first half and of the second, by turns. As a loop, to
    hold the product against."""
    size = array.shape[0] // heads
    order = [
        head * size + half * size // 2 + i
        for head in range(heads) for i in range(size // 2) for half in range(2)
    ]  # fmt: skip
    return array[order]


LLAMA: Arrays = {
    "model.embed_tokens.weight": values(50, 64), "model.norm.weight": values(64, seed=1),
    "model.layers.0.self_attn.q_proj.weight": values(64, 64, seed=2),
    "model.layers.0.self_attn.k_proj.weight": values(32, 64, seed=3),
    "model.layers.0.self_attn.v_proj.weight": values(32, 64, seed=4),
    "model.layers.0.mlp.gate_proj.weight": values(128, 64, seed=5),
    "lm_head.weight": values(50, 64, seed=6),
}  # fmt: skip
LLAMA_GGUF: Arrays = {
    "token_embd.weight": LLAMA["model.embed_tokens.weight"],
    "output_norm.weight": LLAMA["model.norm.weight"],
    "blk.0.attn_q.weight": reordered(LLAMA["model.layers.0.self_attn.q_proj.weight"], 4),
    "blk.0.attn_k.weight": reordered(LLAMA["model.layers.0.self_attn.k_proj.weight"], 2),
    "blk.0.attn_v.weight": LLAMA["model.layers.0.self_attn.v_proj.weight"],
    "blk.0.ffn_gate.weight": LLAMA["model.layers.0.mlp.gate_proj.weight"],
    "output.weight": LLAMA["lm_head.weight"],
    "rope_freqs.weight": values(8, seed=7),
}
HEADS = {"block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 2}


def test_a_checkpoint(tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are mapped, heads reordered; what the conversion made is no surprise."""
    monkeypatch.setattr("loader.comparison._PIECE", 500)  # pieces that cut through heads
    names = list(LLAMA)
    source = folder(
        tmp_path / "hf", {n: LLAMA[n] for n in names[:3]}, {n: LLAMA[n] for n in names[3:]},
        transformers_version="4.50.0",
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", LLAMA_GGUF, numbers=HEADS)
    status, out, err = run("verify", path, "--against", source, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)["against"]
    assert {one["name"]: one["nmse"] for one in found["compared"]} == dict.fromkeys(
        LLAMA_GGUF.keys() - {"rope_freqs.weight"}, 0.0
    )
    assert (found["missing"], found["unexpected"], found["hint"]) == ([], [], None)
    quantised = write(tmp_path / "q.gguf", LLAMA_GGUF, T.Q8_0, numbers=HEADS)
    status, out, _ = run("verify", quantised, "--against", source)
    assert (status, "7 of them by value: 1 equal, 6 but for rounding" in out) == (0, True)


def test_a_conversion_that_forgot_to_reorder(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "hf", LLAMA, transformers_version="5.1.0")
    forgot = LLAMA_GGUF | {"blk.0.attn_q.weight": LLAMA["model.layers.0.self_attn.q_proj.weight"]}
    del forgot["blk.0.attn_v.weight"]
    forgot["surplus.weight"] = values(4, 4)
    path = write(tmp_path / "m.gguf", forgot, numbers=HEADS)

    def installed(version: str | None) -> None:
        def find(name: str) -> str:
            assert name == "transformers"
            if version is None:
                raise PackageNotFoundError(name)
            return version

        monkeypatch.setattr(folders, "version", find)

    for version, is_older in (("4.57.1", True), ("5.1.0", False), ("10.0.0", False), (None, False)):
        installed(version)
        status, _, err = run("verify", path, "--against", source)
        assert (status, err.count("\n")) == (1, 1)
        for what in (
            "1 tensors different ('blk.0.attn_q.weight')",
            "1 tensors missing ('blk.0.attn_v.weight')",
            "1 tensors not expected ('surplus.weight')",
        ):
            assert what in err
        assert (f"written by transformers 5.1.0, and {version} is installed" in err) == is_older


def test_tied_embeddings_and_bfloat16(tmp_path: Path, run: Command) -> None:
    embedding = values(50, 64)
    tensors: Arrays = {
        "model.embed_tokens.weight": bf16(embedding),
        "lm_head.weight": bf16(embedding),
    }
    source = folder(tmp_path / "hf", tensors, tie_word_embeddings=True)
    exact = (bf16(embedding).astype(np.uint32) << 16).view(np.float32)
    for output in ({}, {"output.weight": exact}):
        path = write(tmp_path / "m.gguf", {"token_embd.weight": exact} | output, numbers=HEADS)
        status, out, _ = run("verify", path, "--against", source, "--json")
        found = json.loads(out)["against"]
        assert (status, found["missing"], found["unexpected"]) == (0, [], [])
        assert {one["nmse"] for one in found["compared"]} == {0.0}
        assert found["compared"][0]["other_type"] == "BF16"


def test_other_changes_of_the_conversion(tmp_path: Path, run: Command) -> None:
    """Norms with 1 added, stacked experts, transposed matrices, convolutions, logarithms."""
    norm, experts = values(32, seed=1), values(4, 48, 32, seed=2)
    cases: list[tuple[str, Arrays, Arrays]] = [
        (
            "gemma3", {"language_model.model.layers.0.input_layernorm.weight": norm},
            {"blk.0.attn_norm.weight": norm + 1},
        ),
        (
            "qwen3next",
            {
                "model.layers.0.input_layernorm.weight": norm,
                "model.layers.0.linear_attn.norm.weight": norm,
            },
            {"blk.0.attn_norm.weight": norm + 1, "blk.0.ssm_norm.weight": norm},
        ),
        (
            "qwen2moe",
            {f"model.layers.0.mlp.experts.{i}.up_proj.weight": experts[i] for i in (2, 0, 3, 1)},
            {"blk.0.ffn_up_exps.weight": experts},
        ),
        (
            "llama",
            {
                f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight": experts[i]
                for i in range(4)
            },
            {"blk.0.ffn_down_exps.weight": experts},
        ),
        (
            "gpt2", {"transformer.h.0.mlp.c_fc.weight": values(32, 128)},
            {"blk.0.ffn_up.weight": np.ascontiguousarray(values(32, 128).T)},
        ),
        (
            "mamba",
            {
                "backbone.layers.0.mixer.conv1d.weight": values(64, 1, 4),
                "backbone.layers.0.mixer.A_log": values(64, 16, seed=3),
            },
            {
                "blk.0.ssm_conv1d.weight": values(64, 4),
                "blk.0.ssm_a": -np.exp(values(64, 16, seed=3)),
            },
        ),
    ]  # fmt: skip
    for arch, stored, converted in cases:
        source = folder(tmp_path / "hf", stored)
        path = write(tmp_path / "m.gguf", converted, arch=arch, numbers=HEADS)
        status, out, err = run("verify", path, "--against", source, "--json")
        assert status == 0, (arch, err, out)
        found = json.loads(out)["against"]["compared"]
        assert {one["name"] for one in found} == set(converted)
        assert max(one["nmse"] for one in found) < 1e-12


def mismatch(
    tmp_path: Path, run: Command, arch: str, stored: Arrays,
    converted: Arrays, numbers: dict[str, Any] = HEADS, **config: Any,
) -> str:  # fmt: skip
    """What is said of a model beside a checkpoint; nothing when they agree."""
    source = folder(tmp_path / "hf", stored, **config)
    path = write(tmp_path / "m.gguf", converted, arch=arch, numbers=numbers)
    status, out, err = run("verify", path, "--against", source)
    assert (status == 0) == (err == ""), (out, err)
    assert "internal error" not in err
    return err


def test_what_rounding_does_not_explain(tmp_path: Path, run: Command) -> None:
    """A norm without its 1, a scale, rows that are gone: of types whose rounding is small."""
    norm = (np.abs(values(32, seed=1)) * 5 + 3).astype(np.float32)
    names = ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight")
    exact = (bf16(norm).astype(np.uint32) << 16).view(np.float32)
    assert "different" in mismatch(
        tmp_path, run, "gemma3", {names[0]: bf16(norm)}, {names[1]: exact}
    )
    assert not mismatch(tmp_path, run, "gemma3", {names[0]: bf16(norm)}, {names[1]: exact + 1})
    up = values(64, 96)
    gone = up.copy()
    gone[40:] = 0
    for wrong in (up * 1.2, gone, up * 1.01):
        stored = {"model.layers.0.mlp.up_proj.weight": up.astype(np.float16)}
        assert "different" in mismatch(
            tmp_path, run, "qwen2", stored, {"blk.0.ffn_up.weight": wrong}
        )


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


def test_a_little_difference_between_values_of_one_type(tmp_path: Path, run: Command) -> None:
    norm = (bf16(values(64)).astype(np.uint32) << 16).view(np.float32)
    stored = {"model.embed_tokens.weight": bf16(np.stack([norm] * 4))}
    off = np.stack([norm * np.float32(1.002)] * 4)
    source = folder(tmp_path / "hf", stored)
    path = write(tmp_path / "m.gguf", {"token_embd.weight": off}, T.BF16, numbers=HEADS)
    status, out, _ = run("verify", path, "--against", source, "--json")
    (found,) = json.loads(out)["against"]["compared"]
    assert (status, found["type"], found["other_type"]) == (1, "BF16", "BF16")
    assert 0 < found["nmse"] < 1e-4


def test_pieces_of_stacked_experts(tmp_path: Path) -> None:
    experts = values(5, 6, 16)
    source = folder(
        tmp_path / "hf",
        {f"model.layers.0.mlp.experts.{i}.up_proj.weight": experts[i] for i in range(5)},
    )
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.block_count": 1}
    with Checkpoint(source) as checkpoint:
        found, _ = checkpoint.as_converted(metadata, {})
        stack = found["blk.0.ffn_up_exps.weight"]
        assert stack.shape == (5, 6, 16)
        flat = experts.reshape(30, 16)
        for start, stop in ((0, 30), (0, 1), (5, 7), (4, 25), (29, 30), (7, 7), (6, 12)):
            assert np.array_equal(stack.rows(start, stop).reshape(-1, 16), flat[start:stop])


def test_more_of_what_conversions_do(tmp_path: Path, run: Command) -> None:
    embedding = values(40, 64)
    heads, keys, rank = 2, 3, 8
    kv_b = values(heads * (keys + 4), rank, seed=4)
    each = kv_b.reshape(heads, keys + 4, rank)
    experts = [values(32, seed=i) for i in range(3)]
    q_proj = values(64, 64, seed=8)
    cases: list[tuple[str, Arrays, Arrays, dict[str, Any]]] = [
        # Left out.
        (
            "llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": values(8),
                      "model.norm.weight": values(64)}, {"output_norm.weight": values(64)}, {},
        ),
        # Rows of a padded vocabulary, and positions before the first one.
        (
            "gemma3", {"model.embed_tokens.weight": embedding},
            {"token_embd.weight": embedding[:37]}, {},
        ),
        (
            "bert", {"roberta.embeddings.position_embeddings.weight": embedding,
                     "roberta.embeddings.LayerNorm.gamma": values(64),
                     "roberta.embeddings.LayerNorm.beta": values(64, seed=1)},
            {"position_embd.weight": embedding[2:], "token_embd_norm.weight": values(64),
             "token_embd_norm.bias": values(64, seed=1)}, {},
        ),
        # Keys and values apart.
        (
            "deepseek2", {"model.layers.0.self_attn.kv_b_proj.weight": kv_b,
                          "model.layers.0.mlp.gate.e_score_correction_bias": values(6)},
            {"blk.0.attn_k_b.weight": np.ascontiguousarray(each[:, :keys].swapaxes(1, 2)),
             "blk.0.attn_v_b.weight": np.ascontiguousarray(each[:, keys:]),
             "blk.0.exp_probs_b.bias": values(6)},
            {"qk_nope_head_dim": keys, "v_head_dim": 4, "num_attention_heads": heads},
        ),
        # Shapes with axes of one element.
        (
            "mamba2", {"backbone.layers.0.mixer.A_log": values(8),
                       "backbone.layers.0.mixer.D": values(8)},
            {"blk.0.ssm_a": -np.exp(values(8, 1)), "blk.0.ssm_d": values(8, 1)}, {},
        ),
        (
            "mamba", {"backbone.layers.0.mixer.conv1d.weight": values(1, 64, 4),
                      "backbone.layers.0.mixer.out_proj.weight": values(8, 8)},
            {"blk.0.ssm_conv1d.weight": values(64, 4), "blk.0.ssm_out.weight": values(8, 8)}, {},
        ),
        (
            "qwen2moe", {"model.layers.0.mlp.shared_expert_gate.weight": values(1, 32)},
            {"blk.0.ffn_gate_inp_shexp.weight": values(32)}, {},
        ),
        # Experts of one axis.
        (
            "gpt-oss",
            {f"model.layers.0.mlp.experts.{i}.down_proj.bias": experts[i] for i in range(3)},
            {"blk.0.ffn_down_exps.bias": np.stack(experts)}, {},
        ),
        # Gate and up in one.
        (
            "granitemoe", {
                "model.layers.0.block_sparse_moe.input_linear.weight": values(3, 8, 16),
                "model.layers.0.shared_mlp.input_linear.weight": values(12, 16, seed=1),
            },
            {
                "blk.0.ffn_gate_exps.weight": np.ascontiguousarray(values(3, 8, 16)[:, :4]),
                "blk.0.ffn_up_exps.weight": np.ascontiguousarray(values(3, 8, 16)[:, 4:]),
                "blk.0.ffn_gate_shexp.weight": values(12, 16, seed=1)[:6],
                "blk.0.ffn_up_shexp.weight": values(12, 16, seed=1)[6:],
            }, {"num_local_experts": 3},
        ),
        (
            "mamba2", {"backbone.layers.0.mixer.dt_bias": values(8)},
            {"blk.0.ssm_dt.bias": values(8)}, {},
        ),
        # Heads by layer.
        (
            "deci", {"model.layers.1.self_attn.k_proj.weight": q_proj[:32]},
            {"blk.1.attn_k.weight": reordered(q_proj[:32], 1)}, {},
        ),
        (
            "granitehybrid", {"model.layers.0.self_attn.q_proj.weight": q_proj},
            {"blk.0.attn_q.weight": reordered(q_proj, 4)}, {},
        ),
    ]  # fmt: skip
    by_layer = {"block_count": 2, "attention.head_count": [4, 4], "attention.head_count_kv": [2, 1]}
    for arch, stored, converted, config in cases:
        numbers = by_layer if arch == "deci" else HEADS
        said = mismatch(tmp_path, run, arch, stored, converted, numbers, **config)
        assert not said, (arch, said)


def test_architectures_whose_conversion_is_not_known(tmp_path: Path, run: Command) -> None:
    said = mismatch(
        tmp_path, run, "arctic", {"model.norm.weight": values(64)},
        {"output_norm.weight": values(64, seed=1)},
    )  # fmt: skip
    assert "isn't all known here" in said


def test_tensors_that_cannot_be_compared_are_no_agreement(tmp_path: Path, run: Command) -> None:
    plain = build.pad(build.fixed(3, 1, 0) + build.info("t", [8], 0, 0)) + bytes(32)
    odd = build.pad(build.fixed(3, 1, 0) + build.info("t", [8], 99, 0)) + bytes(32)
    paths = [build.write(tmp_path / f"{i}.gguf", data) for i, data in enumerate((plain, odd))]
    for path, other in (paths, paths[::-1]):
        status, _, err = run("verify", path, "--against", other)
        assert status == 1
        assert "1 tensors that can't be compared ('t')" in err.splitlines()[-1]
    source = folder(tmp_path / "hf", {"model.norm.weight": values(8)})
    f8 = (source / "model.safetensors").read_bytes().replace(b'"F32"', b'"F8X"')
    (source / "model.safetensors").write_bytes(f8)
    path = write(tmp_path / "m.gguf", {"output_norm.weight": values(8)}, numbers=HEADS)
    status, out, err = run("verify", path, "--against", source, "--json")
    assert (status, json.loads(out)["against"]["uncompared"]) == (1, ["output_norm.weight"])


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


def test_odd_checkpoints_are_one_clear_line(tmp_path: Path, run: Command) -> None:
    one, up = np.float32(1).reshape(()), "model.layers.0.mlp.experts.{}.up_proj.weight"
    cases: list[tuple[str, Arrays, Arrays, str]] = [
        (
            "llama", {"model.layers.0.self_attn.q_proj.weight": one},
            {"blk.0.attn_q.weight": values(4, 4)}, "different",
        ),
        (
            "gpt2", {"transformer.h.0.mlp.c_fc.weight": one},
            {"blk.0.ffn_up.weight": values(4, 4)}, "different",
        ),
        (
            "qwen2moe", {up.format(i): values(4 + i, 4) for i in range(2)},
            {"blk.0.ffn_up_exps.weight": values(2, 4, 4)}, "different shapes",
        ),
        (
            "qwen2moe", {up.format(i): one for i in range(2)},
            {"blk.0.ffn_up_exps.weight": values(2, 4, 4)}, "different",
        ),
        (
            "llama",
            {"model.embed_tokens.weight": values(4, 4), "embed_tokens.weight": values(4, 4)},
            {"token_embd.weight": values(4, 4)}, "two tensors of the checkpoint are 'token_embd",
        ),
    ]  # fmt: skip
    for arch, stored, converted, what in cases:
        said = mismatch(tmp_path, run, arch, stored, converted)
        assert what in said
        assert said.count("\n") == 1


def test_names_that_the_map_does_not_know(tmp_path: Path, run: Command) -> None:
    source = folder(tmp_path / "hf", {**LLAMA, "vision.\x1bpatch": values(2, 2)})
    path = write(tmp_path / "m.gguf", LLAMA_GGUF, numbers=HEADS)
    status, _, err = run("verify", path, "--against", source)
    assert status == 0
    assert "1 tensors of" in err
    assert "\\x1bpatch" in err
    odd = write(tmp_path / "odd.gguf", LLAMA_GGUF, arch="nobody", numbers=HEADS)
    status, _, err = run("verify", odd, "--against", source)
    assert (status, "doesn't know the architecture 'nobody'" in err) == (1, True)


WRONG: list[tuple[dict[str, bytes | None], str]] = [
    ({"config.json": None}, "config.json"),
    ({"config.json": b"{"}, "no valid JSON"),
    ({"config.json": b"[]"}, "no JSON object"),
    ({"config.json": b"[" * 100000}, "no valid JSON"),
    ({"model.safetensors": None}, "has no safetensors files"),
    ({"model.safetensors": b""}, "it has no header"),
    ({"model.safetensors": b"\xff" * 8 + b"{}"}, "its header would have"),
    ({"model.safetensors": struct.pack("<Q", 2) + b"{]"}, "no valid JSON"),
    ({"model.safetensors": struct.pack("<Q", 9) + b'{"a":[1]}'}, "tensor 'a' is wrong"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "none.safetensors"}}'}, "none.saf"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "x.safetens"),
    ({"model.safetensors.index.json": b'{"weight_map": 3}'}, "weight_map is no map"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "what"), WRONG)
def test_broken_checkpoints_are_one_clear_line(
    files: dict[str, bytes | None], what: str, tmp_path: Path,
    run: Command, nothing_left: Callable[[], None],
) -> None:  # fmt: skip
    source = folder(tmp_path / "hf", LLAMA)
    for name, data in files.items():
        if data is None:
            (source / name).unlink()
        else:
            (source / name).write_bytes(data)
    safetensors(tmp_path / "x.safetensors", LLAMA)
    path = write(tmp_path / "m.gguf", LLAMA_GGUF, numbers=HEADS)
    status, _, err = run("verify", path, "--against", source)
    assert (status, err.count("\n")) == (1, 1)
    assert what in err
    nothing_left()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 17]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2, 2.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "22", "data_offsets": [0, 16]},
        {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 400]},
        {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [8, 0]},
        {"dtype": "\x1b]0;owned\x07F32", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F" * 17, "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1] * 8 + [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2]}, {"dtype": 5, "shape": [4], "data_offsets": [0, 16]}, 7,
    ],
)  # fmt: skip
def test_entries_of_safetensors_are_checked(entry: Any, tmp_path: Path) -> None:
    text = json.dumps({"t": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with File(path) as file, pytest.raises(loader.FormatError, match="tensor 't'") as caught:
        read_safetensors(file)
    assert (caught.value.path, caught.value.field) == (str(path), "t")


def test_types_of_safetensors(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "f8": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
            "i8": {"dtype": "I8", "shape": [4], "data_offsets": [4, 8]},
            "one": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]},
        }
    ).encode()
    path = tmp_path / "hf" / "model.safetensors"
    folder(path.parent, LLAMA)
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + bytes([0, 0, 0, 0, 1, 2, 3, 255]) + b"\0\0\x80\x3f"
    )
    with Checkpoint(path.parent) as checkpoint:
        assert checkpoint.tensors["i8"].rows(1, 4).reshape(-1).tolist() == [2, 3, -1]
        assert checkpoint.tensors["one"].rows(0, 1).reshape(-1).tolist() == [1]
        with pytest.raises(loader.UnsupportedFormatError, match="F8_E4M3"):
            checkpoint.tensors["f8"].rows(0, 1)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf", LLAMA)
    safetensors(source / "model2.safetensors", {"lm_head.weight": values(2, 2)})
    with pytest.raises(loader.FormatError, match=r"lm_head.*in another file"):
        Checkpoint(source)


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors isn't installed")
    path = tmp_path / "x.safetensors"
    library.save_file(LLAMA, path)
    with File(path) as file:
        for tensor in read_safetensors(file):
            assert np.array_equal(tensor.whole(), LLAMA[tensor.name])


def test_the_real_model_against_itself(gemma: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loader", "verify", str(gemma), "--against", str(gemma)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "236 tensors are as in" in done.stdout
