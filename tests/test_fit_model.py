"""The memory that models need, from their headers, and fits of whole models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.device.memory import DeviceMemory
from loader.errors import FitError
from loader.fit import FitParams, fit_model
from loader.fit.devices import host_memory, machine_devices
from loader.fit.memory import Cache, ModelFigures
from loader.fit.shape import Layer, Shape, read_shape
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES
from tests import build, fake_cuda
from tests.build import fixed, info, key, pad, scalar, split_model
from tests.conftest import CORPUS, back

MIB, GIB = 1 << 20, 1 << 30
F32, Q8_0, Q4_K = 0, 8, 12
ONE = DeviceMemory("GPU0", 1 << 40, 1 << 40)
HOST = DeviceMemory("CPU", 64 * GIB, 64 * GIB)


def tensor(name: str, elements: int, kind: int) -> TensorInfo:
    block, nbytes = BLOCK_SIZES[kind]
    return TensorInfo(name, kind, (elements,), elements // block * nbytes, 0, 0)


def llama(
    layers: int, width: int, hidden: int, heads: tuple[int, int, int], vocabulary: int, kind: int,
    *, own_output: bool = True, experts: tuple[int, int] = (0, 0),
) -> tuple[Shape, list[TensorInfo]]:  # fmt: skip
    """A model of the llama architecture; heads: all, those of the cache, and their size."""
    n_head, n_kv, size = heads
    n_expert, used = experts
    tensors = [tensor("token_embd.weight", vocabulary * width, kind)]
    tensors.append(tensor("output_norm.weight", width, F32))
    if own_output:
        tensors.append(tensor("output.weight", vocabulary * width, kind))
    for i in range(layers):
        sizes = {
            "attn_q": width * n_head * size, "attn_k": width * n_kv * size,
            "attn_v": width * n_kv * size, "attn_output": width * n_head * size,
        }  # fmt: skip
        suffix = "_exps" if n_expert else ""
        for part in ("gate", "up", "down"):
            sizes[f"ffn_{part}{suffix}"] = width * hidden * max(n_expert, 1)
        tensors += [tensor(f"blk.{i}.{name}.weight", n, kind) for name, n in sizes.items()]
        tensors += [tensor(f"blk.{i}.{name}_norm.weight", width, F32) for name in ("attn", "ffn")]
        if n_expert:
            tensors.append(tensor(f"blk.{i}.ffn_gate_inp.weight", width * n_expert, F32))
    shape = Shape(
        architecture="llama", n_ctx_train=131072, n_embd=width, n_head=n_head,
        query=n_head * size, n_ff=hidden, n_ff_expert=hidden, n_vocab=vocabulary,
        n_expert=n_expert, n_expert_used=used, layers=(Layer(n_kv * size, n_kv * size),) * layers,
    )  # fmt: skip
    return shape, tensors


SHAPES = {
    "llama7b": llama(32, 4096, 11008, (32, 32, 128), 32000, Q8_0),
    "llama70b": llama(80, 8192, 28672, (64, 8, 128), 128256, Q4_K),
    "mixtral": llama(32, 4096, 14336, (32, 8, 128), 32000, Q4_K, experts=(8, 2)),
    "tiny1b": llama(16, 2048, 8192, (32, 8, 64), 128256, Q8_0, own_output=False),
}
DEFAULT, SMALL_CACHE = Cache(), Cache(type_k="q8_0", type_v="q8_0")
NO_FLASH, SMALL_BATCH = Cache(flash_attention=False), Cache(ubatch=128)
# What llama.cpp of January 2026 reports, in MiB: model, context, compute of a device that takes
# every layer, and model and compute of the host.
REPORTED: list[tuple[str, int, Cache, tuple[int, int, int, int, int]]] = [
    ("llama7b", 2048, DEFAULT, (6695, 1024, 100, 132, 12)),
    ("llama7b", 2048, SMALL_CACHE, (6695, 544, 100, 132, 12)),
    ("llama7b", 2048, NO_FLASH, (6695, 1024, 180, 132, 28)),
    ("llama7b", 2048, SMALL_BATCH, (6695, 1024, 25, 132, 3)),
    ("llama7b", 8192, DEFAULT, (6695, 4096, 96, 132, 24)),
    ("llama7b", 8192, SMALL_CACHE, (6695, 2176, 96, 132, 24)),
    ("llama7b", 8192, NO_FLASH, (6695, 4096, 576, 132, 40)),
    ("llama7b", 8192, SMALL_BATCH, (6695, 4096, 24, 132, 6)),
    ("llama7b", 32768, DEFAULT, (6695, 16384, 149, 132, 72)),
    ("llama7b", 32768, SMALL_CACHE, (6695, 8704, 149, 132, 72)),
    ("llama7b", 32768, NO_FLASH, (6695, 16384, 2160, 132, 88)),
    ("llama7b", 32768, SMALL_BATCH, (6695, 16384, 37, 132, 18)),
    ("llama70b", 2048, DEFAULT, (37288, 640, 266, 563, 20)),
    ("llama70b", 2048, SMALL_CACHE, (37288, 340, 266, 563, 20)),
    ("llama70b", 2048, NO_FLASH, (37288, 640, 328, 563, 24)),
    ("llama70b", 2048, SMALL_BATCH, (37288, 640, 66, 563, 5)),
    ("llama70b", 8192, DEFAULT, (37288, 2560, 266, 563, 32)),
    ("llama70b", 8192, SMALL_CACHE, (37288, 1360, 266, 563, 32)),
    ("llama70b", 8192, NO_FLASH, (37288, 2560, 1108, 563, 36)),
    ("llama70b", 8192, SMALL_BATCH, (37288, 2560, 66, 563, 8)),
    ("llama70b", 32768, DEFAULT, (37288, 10240, 362, 563, 80)),
    ("llama70b", 32768, SMALL_CACHE, (37288, 5440, 362, 563, 80)),
    ("llama70b", 32768, NO_FLASH, (37288, 10240, 4228, 563, 84)),
    ("llama70b", 32768, SMALL_BATCH, (37288, 10240, 90, 563, 20)),
    ("mixtral", 2048, DEFAULT, (24987, 256, 198, 70, 12)),
    ("mixtral", 8192, DEFAULT, (24987, 1024, 200, 70, 24)),
    ("tiny1b", 2048, DEFAULT, (1252, 64, 254, 266, 8)),
    ("tiny1b", 2048, SMALL_CACHE, (1252, 34, 254, 266, 8)),
    ("tiny1b", 2048, NO_FLASH, (1252, 64, 254, 266, 10)),
    ("tiny1b", 2048, SMALL_BATCH, (1252, 64, 63, 266, 2)),
    ("tiny1b", 8192, DEFAULT, (1252, 256, 278, 266, 20)),
    ("tiny1b", 8192, SMALL_CACHE, (1252, 136, 278, 266, 20)),
    ("tiny1b", 8192, NO_FLASH, (1252, 256, 546, 266, 22)),
    ("tiny1b", 8192, SMALL_BATCH, (1252, 256, 69, 266, 5)),
    ("tiny1b", 32768, DEFAULT, (1252, 1024, 306, 266, 68)),
    ("tiny1b", 32768, SMALL_CACHE, (1252, 544, 306, 266, 68)),
    ("tiny1b", 32768, NO_FLASH, (1252, 1024, 2130, 266, 70)),
    ("tiny1b", 32768, SMALL_BATCH, (1252, 1024, 76, 266, 17)),
]


def is_close(found: int, reported: int) -> bool:
    """Of a compute buffer: never below, and at most a quarter and 32 MiB above."""
    return reported <= found / MIB <= 1.25 * reported + 32


@pytest.mark.parametrize(("name", "n_ctx", "cache", "reported"), REPORTED)
def test_the_memory_that_llama_cpp_reports(
    name: str, n_ctx: int, cache: Cache, reported: tuple[int, int, int, int, int]
) -> None:
    shape, tensors = SHAPES[name]
    figures = ModelFigures(shape, tensors, ["GPU0"], [ONE.free], cache)
    device, host = figures.needs(FitParams(n_ctx=n_ctx))
    model, context, compute, host_model, host_compute = reported
    assert device.model // MIB == model
    assert device.context // MIB == context
    assert is_close(device.compute, compute)
    assert host.model // MIB == host_model
    assert is_close(host.compute, host_compute)
    assert host.context == 0


# What llama.cpp (llama-cpp-python 0.3.36) reports when everything is on the host, for models of two
# layers or a few more: by architecture the keys of the header, and rows of the vocabulary, n_ctx,
# ubatch, flash attention, and MiB of compute buffer and of context. It is newer than the one above:
# masks are in 2 bytes only, a compressed cache (MLA) is without values, and the recurrent layers of
# Qwen3-Next need less.
MEASURED = json.loads((Path(__file__).parent / "data" / "fit_reported.json").read_text("utf-8"))


@pytest.mark.parametrize("arch", MEASURED)
def test_the_memory_of_other_architectures(tmp_path: Path, arch: str) -> None:
    numbers = {k: v for k, v in MEASURED[arch]["keys"].items() if not isinstance(v, float)}
    path = write_model(tmp_path / "m.gguf", keys_of(arch, **numbers), 0)
    with loader.open(path) as model:
        read = read_shape(model.metadata, 1)
    assert read.unknown == ""
    for n_vocab, n_ctx, ubatch, flash, compute, context in MEASURED[arch]["rows"]:
        shape = replace(read, n_vocab=n_vocab)
        cache = Cache(ubatch=ubatch, flash_attention=flash)
        figures = ModelFigures(shape, [], ["GPU0"], [ONE.free], cache)
        need, _ = figures.needs(FitParams(n_ctx=n_ctx))
        masks = 4 * n_ctx * ubatch * flash
        assert compute <= need.compute / MIB
        if arch != "qwen3next" or n_vocab > 1000:
            assert need.compute / MIB <= 1.25 * compute + 32 + masks / MIB
        if shape.latent:
            states = 4 * sum(
                layer.state.convolution + layer.state.rest for layer in shape.layers if layer.state
            ) / MIB  # fmt: skip
            context = states + (context - states) * (576 + 512) / 576
        assert need.context / MIB == pytest.approx(context, abs=0.02)


def test_the_real_model(gemma: Path) -> None:
    """Its token embedding is tied, 15 of its 18 layers look at a window of 512 tokens."""
    with loader.open(gemma) as model:
        found = fit_model(model, [ONE], margins=0)
        assert found.status == "success"
        assert (found.n_ctx, found.n_gpu_layers) == (0, -1)
        assert found.to_args() == "-c 32768 -ngl 19"
        (device,) = found.devices
        assert device.need.model // MIB == 235
        assert device.need.context == (96 + 15) * MIB
        assert is_close(device.need.compute, 513)
        assert found.host.model // MIB == 170
        assert is_close(found.host.compute, 67)
        tight = fit_model(model, [DeviceMemory("CUDA0", 900 * MIB, GIB)], margins=0)
        assert tight.status == "success"
        assert 4096 <= tight.n_ctx < 32768
        assert tight.n_ctx % 256 == 0


# --- Files of our own ---


def keys_of(arch: str, **numbers: Any) -> list[bytes]:
    found = [key("general.architecture", build.STRING, scalar(build.STRING, arch))]
    for name, value in numbers.items():
        name = f"{arch}.{name.replace('__', '.')}"
        if isinstance(value, list):
            kind = build.BOOL if isinstance(value[0], bool) else build.I32
            found.append(key(name, build.ARRAY, build.array(kind, value)))
        else:
            found.append(key(name, build.U32, scalar(build.U32, value)))
    return found


def write_model(path: Path, keys: list[bytes], layers: int, extra: bytes = b"") -> Path:
    """F32 tensors of 64 KiB: an embedding and one for each layer."""
    names = ["token_embd.weight", *(f"blk.{i}.ffn_up.weight" for i in range(layers))]
    infos = b"".join(info(name, [128, 128], F32, 65536 * i) for i, name in enumerate(names))
    count = len(names) + (extra != b"")
    header = pad(fixed(3, count, len(keys)) + b"".join(keys) + infos + extra)
    path.write_bytes(header + bytes(65536 * (len(names) + 1)))
    return path


USUAL = {
    "block_count": 4, "context_length": 131072, "embedding_length": 128,
    "attention__head_count": 2, "feed_forward_length": 256,
}  # fmt: skip


def contexts(path: Path, n_ctx: int, **options: Any) -> int:
    with loader.open(path) as model:
        found = fit_model(model, [ONE], margins=0, n_ctx=n_ctx, **options)
        assert found.status == "success"
        assert found.notes == ()
        return found.devices[0].need.context


def test_row_122_windowed_layers_and_types_of_caches(tmp_path: Path) -> None:
    """A window of 128 in every other layer: the window and one batch, whatever the context."""
    keys = keys_of("gpt-oss", **USUAL, attention__sliding_window=128)
    path = write_model(tmp_path / "m.gguf", keys, 4)
    full, windowed = 131072, 768  # 128 and a batch of 512, rounded up to 256
    tokens = 2 * full + 2 * windowed
    assert contexts(path, 131072) == tokens * 128 * 2 * 2
    assert contexts(path, 131072, type_k="q8_0", type_v="q8_0") == tokens * 128 // 32 * 34 * 2
    assert contexts(path, 131072, type_k="q4_0") == tokens * 128 * (18 / 32 + 2)
    assert contexts(path, 300) == 4 * 512 * 128 * 2 * 2, "never more than the context, rounded up"


def test_caches_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    # Grouped queries, with sizes of heads of their own.
    keys = keys_of(
        "llama", **USUAL, attention__head_count_kv=1, attention__key_length=96,
        attention__value_length=80,
    )  # fmt: skip
    assert contexts(write_model(path, keys, 4), 1024) == 4 * 1024 * (96 + 80) * 2
    # Compressed (MLA): one head of the size that the keys say.
    keys = keys_of(
        "deepseek2", **USUAL, attention__head_count_kv=1, attention__key_length=576,
        attention__value_length=512,
    )  # fmt: skip
    assert contexts(write_model(path, keys, 4), 1024) == 4 * 1024 * (576 + 512) * 2
    # Windows by layer, as a key says.
    pattern = [True, True, True, False]
    keys = keys_of(
        "llama", **USUAL, attention__sliding_window=512,
        attention__sliding_window_pattern=pattern,
    )  # fmt: skip
    assert contexts(write_model(path, keys, 4), 8192) == (3 * 1024 + 8192) * 128 * 2 * 2
    # No key for the window: llama4's is known. No cache at all: an encoder.
    write_model(path, keys_of("llama4", **USUAL), 4)
    assert contexts(path, 32768) == (3 * (8192 + 512) + 32768) * 128 * 2 * 2
    assert contexts(write_model(path, keys_of("bert", **USUAL), 4), 512) == 0
    # A state instead of a cache.
    ssm = {"ssm__inner_size": 256, "ssm__state_size": 16, "ssm__conv_kernel": 4}
    keys = keys_of("mamba", **{**USUAL, "attention__head_count": 0}, **ssm)
    state = 4 * (3 * (256 + 0) + 16 * 256)
    assert contexts(write_model(path, keys, 4), 8192) == 4 * state
    # Some layers of each kind.
    keys = keys_of("jamba", **USUAL, attention__head_count_kv=[0, 0, 2, 0], **ssm)
    assert contexts(write_model(path, keys, 4), 1024) == 3 * state + 1024 * 128 * 2 * 2
    keys = keys_of("lfm2", **USUAL, attention__head_count_kv=[0, 0, 2, 0], shortconv__l_cache=3)
    cached = 1024 * 128 * 2 * 2
    assert contexts(write_model(path, keys, 4), 1024) == 3 * 4 * 128 * 2 + cached
    keys = keys_of("rwkv6", **{**USUAL, "attention__head_count": 0}, wkv__head_size=64)
    assert contexts(write_model(path, keys, 4), 1024) == 4 * 4 * (2 * 128 + 128 * 64)
    keys = keys_of(
        "rwkv6qwen2", **{**USUAL, "attention__head_count": 0}, wkv__head_size=64,
        token_shift_count=1,
    )  # fmt: skip
    assert contexts(write_model(path, keys, 4), 1024) == 4 * 4 * (128 + 128 * 64)
    # Every fourth layer has a cache, the last one.
    write_model(path, keys_of("qwen3next", **USUAL, **ssm), 4)
    assert contexts(path, 1024) == 3 * state + cached
    assert contexts(path, 1024, n_gpu_layers=2) == cached
    # Heads of windowed layers may have sizes of their own, and the last layers share a cache.
    keys = keys_of(
        "gemma4", **USUAL, attention__sliding_window=512, attention__shared_kv_layers=1,
        attention__sliding_window_pattern=[True, True, False, True], attention__key_length=96,
        attention__value_length=96, attention__key_length_swa=32, attention__value_length_swa=16,
    )  # fmt: skip
    windowed = 2 * 1024 * 2 * (32 + 16)
    assert contexts(write_model(path, keys, 4), 4096) == (2 * windowed + 4096 * 2 * 192 * 2)


def test_layers_that_are_not_loaded_or_have_other_names(tmp_path: Path) -> None:
    """Layers that predict further tokens have no cache, and llama.cpp doesn't load them; an encoder
    and a decoder have a layer each."""
    keys = keys_of("glm4moe", **USUAL, nextn_predict_layers=1)
    path = write_model(tmp_path / "m.gguf", keys, 4)
    with loader.open(path) as model:
        found = fit_model(model, [ONE], margins=0, n_ctx=1024)
        need = found.devices[0].need
        assert need.model == 3 * 65536 + 65536, "three layers and the tied embedding"
        assert need.context == 3 * 1024 * 128 * 2 * 2
        assert found.homes == {
            name: "CPU" if name in ("token_embd.weight", "blk.3.ffn_up.weight") else "GPU0"
            for name in model.tensors
        }
        # On the host, the tied embedding isn't there twice.
        host = fit_model(model, [ONE], margins=0, n_gpu_layers=0)
        assert (host.host.model, host.devices[0].need.total) == (4 * 65536, 0)
    shape = Shape(
        architecture="t5", n_ctx_train=512, n_embd=64, n_head=1, query=64, n_ff=64, n_vocab=1,
        layers=(Layer(64, 64),) * 4,
    )  # fmt: skip
    tensors = [
        tensor(f"{part}.blk.{i}.ffn_up.weight", 128, F32)
        for i in range(4)
        for part in ("enc", "dec")
    ]
    figures = ModelFigures(shape, tensors, ["GPU0"], [GIB])
    assert [figures.needs(FitParams(n_ctx=512, n_gpu_layers=n))[0].model for n in (1, 2, 3, 5)] == [
        0,
        1024,
        2048,
        4096,
    ]


def test_row_117_every_expert_is_counted() -> None:
    shape, tensors = SHAPES["mixtral"]
    figures = ModelFigures(shape, tensors, ["GPU0"], [ONE.free])
    everything, _ = figures.needs(FitParams(n_ctx=512))
    rule = (r"blk\.\d+\.ffn_(up|down|gate)_(ch|)exps", "CPU")
    dense, host = figures.needs(FitParams(n_ctx=512, overrides=(rule,)))
    experts = 32 * 3 * 8 * 4096 * 14336 // 256 * 144
    assert everything.model - dense.model == experts
    assert host.model > experts


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """Weights exact, the rest left out and noted, never a wrong number."""
    path = write_model(tmp_path / "m.gguf", keys_of("foobar9", **USUAL), 4)
    with loader.open(path) as model:
        found = fit_model(model, [ONE], margins=0)
    need = found.devices[0].need
    assert (need.model, need.context, need.compute) == (5 * 65536, 0, 0)
    assert "is unknown (the architecture 'foobar9')" in found.notes[0]
    keys = keys_of("llama", block_count=4, context_length=4096, embedding_length=128)
    with loader.open(write_model(path, keys, 4)) as model:
        found = fit_model(model, [ONE], margins=0)
    assert (found.devices[0].need.context, found.devices[0].need.compute) == (0, 0)
    assert "llama.attention.head_count" in found.notes[0]


def test_row_124_split_sets_unknown_types_and_mapped_weights(tmp_path: Path) -> None:
    extra = info("blk.1.odd.weight", [7], 99, 65536 * 3)
    path = write_model(
        tmp_path / "m.gguf", keys_of("llama", **{**USUAL, "block_count": 2}), 2, extra
    )
    with loader.open(path, access="mmap") as model:
        found = fit_model(model, [ONE], margins=0)
        assert found.devices[0].need.model == 3 * 65536 + 65536, "up to the end of the file"
        assert "unknown type" in found.notes[0]
        assert found.mapped_bytes == found.host.model == 65536
    arrays = {f"blk.{i}.ffn_up.weight": np.zeros((64, 64), np.float32) for i in range(3)}
    (tmp_path / "split").mkdir()
    files = split_model(tmp_path / "split", arrays, arch="llama")
    with loader.open(files[0]) as model:
        figures = ModelFigures(
            Shape(
                architecture="llama", n_ctx_train=512, n_embd=64, n_head=1, query=64, n_ff=64,
                n_vocab=1, layers=(Layer(64, 64),) * 3,
            ),
            list(model.tensors.values()), ["GPU0"], [GIB],
        )  # fmt: skip
        assert figures.needs(FitParams(n_ctx=512))[0].model == 3 * 64 * 64 * 4


def test_what_is_no_model_to_be_fitted(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", keys_of("clip", **USUAL), 4)
    with loader.open(path) as model, pytest.raises(FitError, match=r"projector.*main model"):
        fit_model(model, [ONE])
    path = write_model(tmp_path / "m.gguf", keys_of("llama"), 4)
    with loader.open(path) as model, pytest.raises(FitError, match="nothing to fit"):
        fit_model(model, [ONE])
    if CORPUS.is_dir():
        no_tensors = pytest.raises(FitError, match="nothing to fit: the file has no tensors")
        with loader.open(CORPUS / "ggml-vocab-phi-3.gguf") as model, no_tensors:
            fit_model(model, [ONE])


def test_margins_of_any_kind(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", keys_of("llama", **USUAL), 4)
    with loader.open(path) as model:
        for margins in (MIB, np.int64(MIB), [MIB], iter([MIB]), (MIB,)):
            found = fit_model(model, [ONE], margins=margins)  # type: ignore[arg-type]  # the test
            assert (found.status, found.devices[0].margin) == ("success", MIB)


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", keys_of("llama", **USUAL), 4)
    with loader.open(path) as model:
        for options in (
            {"type_k": "q9"}, {"ubatch": 0}, {"n_ctx": -1}, {"overrides": [("x", "CUDA5")]},
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"type|must be|no device"):
                fit_model(model, [ONE], **options)


# --- Where it goes ---


def test_a_placement_is_what_load_takes(tmp_path: Path, cuda: fake_cuda.FakeCuda) -> None:
    keys = keys_of("llama", **USUAL)
    path = write_model(tmp_path / "m.gguf", keys, 4)
    cuda.device(0, total=GIB)
    cuda.device(1, total=GIB)
    devices = [DeviceMemory(f"CUDA{i}", 3 * MIB, GIB) for i in range(2)]
    with loader.open(path) as model:
        expected = back(model.load())
        found = fit_model(model, devices, margins=0, n_ctx_min=256, ubatch=16)
        assert found.status == "success"
        placement = found.placement()
        assert set(placement) == set(model.tensors)
        assert set(placement.values()) <= {"cpu", "cuda:0", "cuda:1"}
        assert "cuda:1" in placement.values()
        with model.load(device=placement) as weights:
            assert back(weights) == expected
            assert {n: t.device for n, t in weights.items()} == placement
        made_up = fit_model(model, [ONE], margins=0)
        with pytest.raises(ValueError, match="unknown device 'GPU0'"):
            made_up.placement()
    del weights


def test_the_devices_of_this_machine(cuda: fake_cuda.FakeCuda) -> None:
    cuda.device(0, total=2 * GIB, reserved=GIB)
    cuda.device(1, total=GIB, integrated=True)
    found = machine_devices()
    assert found == [DeviceMemory("CUDA0", GIB, 2 * GIB)], "one that shares the host's is none"
    # Unless there is no other: then it has what the host has, once.
    cuda.device(0, total=GIB, integrated=True)
    (found_one,) = machine_devices()
    assert found_one.name == "CUDA0"
    assert found_one.free == pytest.approx(host_memory().free, rel=0.1)
    cuda.device_count(0)
    for device in machine_devices():
        assert not device.name.startswith("CUDA")
    host = host_memory()
    assert 0 < host.free <= host.total


# --- The command ---


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loader", "fit", *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_command_prints_a_line_for_llama_cpp(gemma: Path) -> None:
    done = run(gemma, "--devices", "CUDA0:700MiB/1GiB,CUDA1:1200MiB/2GiB", "-fitt", "50,100")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r'-c \d+ -ngl \d+ -ts \d+,\d+( -ot ".*")?\n', done.stdout)
    shown = run(gemma, "--devices", "CUDA0:24GiB/24GiB", "--print", "-c", "8192", "-ctk", "q8_0")
    assert shown.stdout.startswith("-c 8192 -ngl 19\nMiB")
    assert "#" * 19 in shown.stdout
    found = json.loads(run(gemma, "--devices", "CUDA0:24GiB/24GiB", "--json").stdout)
    assert found["args"] == "-c 32768 -ngl 19"
    assert found["devices"][0]["model"] // MIB == 235
    failed = run(gemma, "--devices", "CUDA0:100MiB/1GiB", "-ngl", "10")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "n_gpu_layers already set by user to 10, abort (" in failed.stderr
    assert re.search(r"\((\d{3,4}) MiB too little\)", failed.stderr)
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-fitt", "1,,2"], "''"), (["-fitt", "5x"], "'5x'"), (["-fitt", "1.5"], "'1.5'"),
        (["-fitt=-1"], "'-1'"), (["-c", "4k"], "'4k'"), (["-fitc", ""], "''"),
        (["-ngl", "all"], "'all'"),
        (["-ts", "1,a"], "'a'"), (["-ts", ",".join("1" * 17)], "17 values"), (["-ot", "x"], "'x'"),
        (["-ot", "(=CPU"], "'(=CPU'"), (["-ot", "a=CUDA7"], "'CUDA7'"), (["-ctk", "q9"], "'q9'"),
        (["-ts", "1,1"], "[1.0, 1.0]"), (["-fitt", "1,2"], "2 margins for 1 devices"),
        (["--devices", "A:1/1,A:1/1"], "A, A"), (["--devices", "CPU:1/1"], "CPU"),
        (["--devices", "A"], "'A'"), (["--devices", "A:1GiB"], "'A:1GiB'"),
        (["--devices", "A:2GiB/1GiB"], "'A:2GiB/1GiB'"), (["--devices", "A:1GB/2GiB"], "'1GB'"),
    ],
)  # fmt: skip
def test_lists_are_parsed_strictly(tmp_path: Path, words: list[str], shown: str) -> None:
    path = write_model(tmp_path / "m.gguf", keys_of("llama", **USUAL), 4)
    done = run(path, "--devices", "CUDA0:1GiB/1GiB", *words)
    assert done.returncode == 2
    assert shown in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embedding_length", float("inf")), ("embedding_length", float("nan")),
        ("embedding_length", 4.5), ("attention.head_count_kv", [-50, 1, 1, 1]),
        ("attention.head_count", "four"), ("expert_count", ["x"]), ("block_count", 1001),
        ("attention.head_count", [2, 2]),
    ],
)  # fmt: skip
def test_odd_numbers_are_errors_that_name_the_key(tmp_path: Path, name: str, value: Any) -> None:
    usual = {key: number for key, number in USUAL.items() if key.replace("__", ".") != name}
    if isinstance(value, list):
        kind = build.STRING if isinstance(value[0], str) else build.I32
        raw = key(f"llama.{name}", build.ARRAY, build.array(kind, value))
    else:
        kinds = {float: build.F32, str: build.STRING, int: build.U32}
        raw = key(f"llama.{name}", kinds[type(value)], scalar(kinds[type(value)], value))
    path = write_model(tmp_path / "m.gguf", [*keys_of("llama", **usual), raw], 4)
    with loader.open(path) as model:
        with pytest.raises(loader.FormatError) as caught:
            fit_model(model, [ONE], margins=0)
        assert caught.value.field == f"llama.{name}"
    done = run(path, "--devices", "CUDA0:1GiB/1GiB")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_no_length_of_a_context(tmp_path: Path) -> None:
    """The least one is taken, and counted."""
    usual = {name: number for name, number in USUAL.items() if name != "context_length"}
    path = write_model(tmp_path / "m.gguf", keys_of("llama", **usual), 4)
    with loader.open(path) as model:
        found = fit_model(model, [ONE], margins=0)
    assert found.n_ctx == 4096
    assert found.devices[0].need.context == 4 * 4096 * 128 * 2 * 2
    assert found.to_args().startswith("-c 4096 ")


def test_shapes_are_read_strictly(tmp_path: Path) -> None:
    keys = keys_of("llama", **{**USUAL, "block_count": (1 << 32) - 1})
    path = write_model(tmp_path / "m.gguf", keys, 1)
    with loader.open(path) as model, pytest.raises(loader.FormatError, match="no model has"):
        read_shape(model.metadata, 10)
