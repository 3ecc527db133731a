"""Models beside the checkpoints that they were made of."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as T

import loader
from loader.checkpoint import Checkpoint, folder as folders
from loader.checkpoint.files import read_safetensors
from loader.io import File
from tests import build
from tests.conftest import Command
from tests.test_against import Arrays, values, write


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
