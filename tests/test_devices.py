"""Loads to devices: PoCL is a real OpenCL device, torch has the processor, and the CUDA code runs
on a driver of the tests' own (tests/native/fake_cuda.c)."""

from __future__ import annotations

import errno
import gc
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

import loader
from loader.device.base import Device, DeviceBuffer, PinnedMemory
from loader.device.host import HostBuffer, HostDevice, usable_memory
from loader.device.memory import DeviceMemory
from loader.device.registry import canonical_name, open_device
from loader.device.staging import Spot, cut, lay_out_buffers, ring_shape
from loader.errors import (
    DeviceError,
    DeviceMemoryError,
    DeviceUnavailableError,
    LoadCancelled,
    ReadError,
    TensorDataError,
)
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES
from loader.io.arena import allocate_arena
from loader.options import Access, Method
from loader.placement import parse_overrides
from tests import build, fake_cuda
from tests.build import fixed, info, pad, random_model, random_tensors, split_model
from tests.conftest import ACCESS, METHODS, Faults, content

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 2 << 20]
CHUNK = 256 << 10


@pytest.fixture(scope="module")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda.FakeCuda]:
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra cuda")
    try:
        driver = fake_cuda.FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("cuda")))
    except fake_cuda.NoCompilerError as error:
        pytest.skip(str(error))
    driver.reset()
    yield driver
    driver.device_count(0)


@pytest.fixture
def cuda(cuda_driver: fake_cuda.FakeCuda) -> Iterator[fake_cuda.FakeCuda]:
    """The driver, with nothing alive before and after."""
    gc.collect()
    cuda_driver.reset()
    yield cuda_driver
    gc.collect()
    assert cuda_driver.alive() == {}
    assert cuda_driver.live("misuse") == 0, cuda_driver.misuse()
    cuda_driver.reset()


@pytest.fixture(params=["torch:cpu", "opencl:0", "cuda:0"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name.startswith("cuda"):
        request.getfixturevalue("cuda")
    elif name.startswith("torch"):
        pytest.importorskip("torch", reason="needs the extra torch")
    else:
        pytest.importorskip("pyopencl", reason="needs the extra opencl")
        try:
            open_device(name).close()
        except DeviceUnavailableError as error:
            pytest.skip(str(error))
    return name


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return direct_folder / "m.gguf"


@pytest.fixture
def expected(path: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in random_model(path, SIZES).items()}


def back(tensors: Any) -> dict[str, bytes]:
    """The bytes of tensors by name, wherever they are."""
    return content({name: tensor.to_host() for name, tensor in tensors.items()})


# --- Loads ---


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_reading_gives_the_same_bytes(
    path: Path, expected: dict[str, bytes], device: str, access: Access, method: Method
) -> None:
    with loader.open(path, access=access) as model:
        for chunk_bytes, limit in ((4096, 1 << 20), (CHUNK, 1 << 20), (4 << 20, 64 << 20)):
            with model.load(
                device=device, method=method, chunk_bytes=chunk_bytes, memory_limit=limit
            ) as weights:
                assert list(weights) == list(expected)
                assert back(weights) == expected
                report = weights.report
                assert report.device == device
                assert report.memory_bytes == 0
                assert sum(expected_bytes(expected)) <= report.device_bytes[device]
                assert report.device_bytes[device] < sum(expected_bytes(expected)) + 8 * 4096
                assert report.staging is not None
                assert report.staging.buffers * report.staging.buffer_bytes <= limit
                assert report.bytes == sum(expected_bytes(expected))
                assert (report.bytes_mapped > 0) == (access == "mmap")


def expected_bytes(expected: dict[str, bytes]) -> list[int]:
    return [len(data) for data in expected.values()]


def test_shards_streams_and_rows(direct_folder: Path, device: str) -> None:
    arrays = random_tensors(5, 900_001)
    expected = {name: values.tobytes() for name, values in arrays.items()}
    files = split_model(direct_folder, arrays, split_max_tensors=2)
    with loader.open(files[1]) as model:
        assert back(model.load(device=device)) == expected
        found = {}
        for name, tensor in model.stream(device=device, chunk_bytes=CHUNK, memory_limit=2 << 20):
            assert tensor.device == device
            found[name] = tensor.to_host().numpy().tobytes()
        assert found == expected
        rows = model.read_rows("t3", 1000, 200_000, device=device)
        assert rows.to_host().numpy().tobytes() == expected["t3"][1000:200_000]


def test_leaving_a_stream_early(path: Path, expected: dict[str, bytes], device: str) -> None:
    with loader.open(path) as model:
        for name, tensor in model.stream(device=device, chunk_bytes=4096, memory_limit=1 << 20):
            assert tensor.to_host().numpy().tobytes() == expected[name]
            break
        del tensor


TYPES: dict[str, npt.NDArray[Any]] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float16": np.arange(8, dtype=np.float16).reshape(2, 2, 2),
    "float64": np.arange(3, dtype=np.float64),
    "int8": np.arange(-5, 5, dtype=np.int8),
    "int16": np.arange(7, dtype=np.int16),
    "int32": np.arange(7, dtype=np.int32),
    "int64": np.arange(3, dtype=np.int64),
}


def test_the_arrays_of_devices(direct_folder: Path, device: str) -> None:
    """Types and shapes as numpy's; BF16 is torch's own there and uint16 elsewhere."""
    path = direct_folder / "m.gguf"
    build.model(path, TYPES)
    with loader.load(path, device=device) as weights:
        for name, values in TYPES.items():
            tensor = weights[name]
            native = tensor.native()
            assert tuple(native.shape) == values.shape
            assert str(native.dtype).endswith(name)
            assert np.array_equal(tensor.to_host().numpy(), values)
            assert np.array_equal(tensor.dequantize(), values.astype(np.float32))
            assert np.array_equal(host_array(native, tensor), values)
            with pytest.raises(DeviceError, match="to_host"):
                tensor.numpy()
            with pytest.raises(DeviceError, match="to_host"):
                np.asarray(tensor)
            assert not hasattr(tensor, "__array_interface__")


def host_array(native: Any, tensor: loader.Tensor) -> npt.NDArray[Any]:
    """What the device's own array holds, by its own means."""
    if hasattr(native, "get"):
        found: npt.NDArray[Any] = native.get()
        return found
    if hasattr(native, "cpu"):
        native = native.cpu()
        found = native.numpy()
    else:
        found = tensor.to_host().numpy()
    return found


def test_block_types_bf16_scalars_and_empty_tensors(direct_folder: Path, device: str) -> None:
    data = build.random_bytes(4096)
    infos = (
        info("q8", [64, 2], 8, 0)
        + info("bf16", [5], 30, 160)
        + info("scalar", [], 0, 192)
        + info("empty", [0, 3], 0, 224)
        + info("q6", [256], 14, 224)
    )
    path = direct_folder / "m.gguf"
    path.write_bytes(pad(fixed(3, 5, 0) + infos) + data)
    expected = back(loader.load(path))
    with loader.load(path, device=device) as weights:
        assert back(weights) == expected
        assert tuple(weights["q8"].native().shape) == (2, 68)
        assert str(weights["q8"].native().dtype).endswith("uint8")
        kind = "bfloat16" if device.startswith("torch") else "uint16"
        assert str(weights["bf16"].native().dtype).endswith(kind)
        assert tuple(weights["scalar"].native().shape) == ()
        assert tuple(weights["empty"].native().shape) == (3, 0)
        assert tuple(weights["q6"].native().shape) == (210,)


def test_a_model_without_alignment_is_aligned_on_a_device(direct_folder: Path, device: str) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {"a": np.arange(3, dtype=np.int8)}
    arrays["b"] = np.arange(5, dtype=np.float64)
    path = build.model(direct_folder / "m.gguf", arrays, alignment=1)
    with loader.load(path, device=device) as weights:
        assert np.array_equal(weights["b"].to_host().numpy(), arrays["b"])
        assert np.array_equal(host_array(weights["b"].native(), weights["b"]), arrays["b"])


def test_interfaces(direct_folder: Path, device: str) -> None:
    path = build.model(direct_folder / "m.gguf", {"t": np.arange(6, dtype=np.float32)})
    with loader.load(path, device=device) as weights:
        tensor = weights["t"]
        if device.startswith("cuda"):
            interface = tensor.__cuda_array_interface__  # type: ignore[attr-defined]  # on CUDA
            assert interface["shape"] == (6,)
            assert interface["typestr"] == "<f4"
            assert interface["version"] == 3
            assert interface["data"][0] % 32 == 0
        else:
            assert not hasattr(tensor, "__cuda_array_interface__")
        if device.startswith("torch"):
            import torch

            shared = torch.from_dlpack(tensor)  # type: ignore[attr-defined]  # torch has it
            assert shared.data_ptr() == tensor.native().data_ptr()
            assert tensor.__dlpack_device__() == (1, 0)
        else:
            with pytest.raises(BufferError):
                tensor.__dlpack__()
            with pytest.raises(BufferError):
                tensor.__dlpack_device__()


# --- Life ---


def test_closed_weights_are_freed_at_once_and_say_so(
    path: Path, expected: dict[str, bytes], device: str
) -> None:
    assert expected
    weights = loader.load(path, device=device)
    tensor = weights["t0"]
    weights.close()
    for use in (tensor.native, tensor.to_host, tensor.dequantize):
        if device.startswith("cuda") and use == tensor.native:
            continue  # its address is asked for when it is used
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        weights["t0"]
    weights.close()


def test_cuda_memory_is_freed_by_close_and_by_the_garbage_collector(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    weights = loader.load(path, device="cuda:0")
    tensor, native = weights["t0"], weights["t0"].native()
    assert cuda.live("bytes") >= sum(expected_bytes(expected))
    assert cuda.live("registrations") == cuda.live("events") == 0, "the ring is gone"
    weights.close()
    assert cuda.live("bytes") == 0
    with pytest.raises(ValueError, match="closed"):
        _ = native.__cuda_array_interface__
    del weights, tensor, native
    assert cuda.alive() == {}
    kept = loader.load(path, device="cuda:0")["t0"]
    assert cuda.live("allocations") == 1, "a tensor keeps the memory of its load"
    assert kept.to_host().numpy().tobytes() == expected["t0"]
    del kept
    assert cuda.alive() == {}


def test_torch_tensors_outlive_the_weights(path: Path, expected: dict[str, bytes]) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    weights = loader.load(path, device="torch:cpu")
    native = weights["t0"].native()
    weights.close()
    del weights
    gc.collect()
    assert native.numpy().tobytes() == expected["t0"]


def test_torch_devices_without_data(path: Path, expected: dict[str, bytes]) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    weights = loader.load(path, device="torch:meta")
    assert weights["t0"].native().device.type == "meta"
    assert weights["t0"].native().numel() == len(expected["t0"])
    with pytest.raises(DeviceError, match="no data"):
        weights["t0"].to_host()


# --- Where to ---


def all_devices() -> list[str]:
    names = ["cpu", "cuda:0", "cuda:1"]
    for name, package in (("torch:cpu", "torch"), ("opencl:0", "pyopencl")):
        try:
            __import__(package)
            open_device(name).close()
        except (ImportError, DeviceUnavailableError):
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("access", ACCESS)
def test_several_devices_at_once(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda, access: Access
) -> None:
    names = all_devices()
    where = {name: names[i % len(names)] for i, name in enumerate(expected)}
    requests: list[Any] = [
        where,
        lambda info: where[info.name],
        {name: device for name, device in where.items() if device != "cpu"},
        ",".join(f"^{name}$={device}" for name, device in where.items()),
    ]
    with loader.open(path, access=access) as model:
        for request in requests:
            with model.load(device=request, chunk_bytes=CHUNK, check_tensors=True) as weights:
                assert back(weights) == expected
                assert list(weights) == list(expected)
                assert {name: tensor.device for name, tensor in weights.items()} == where
                assert weights.report.device == tuple(names)
                assert weights.report.to_dict()["device"] == names
                assert set(weights.report.device_bytes) == set(names) - {"cpu"}
    assert cuda.alive() == {}


def test_devices_by_patterns() -> None:
    rules = parse_overrides(r"ffn_.*_exps=CPU,blk\.1\.=CUDA1,output=OpenCL0", "torch:cpu")

    def device(name: str) -> str:
        return rules(TensorInfo(name, 0, (), 0, 0, 0))

    assert device("blk.1.ffn_up_exps.weight") == "cpu", "the first pattern counts"
    assert device("blk.1.attn_q.weight") == "cuda:1"
    assert device("blk.11.attn_q.weight") == "torch:cpu"
    assert device("output_norm.weight") == "opencl:0"
    for wrong in ("", "x", "=cpu", "x=", "x=tpu", "x=cpu,", "(=cpu", "a=cpu,b"):
        with pytest.raises(ValueError, match=r"override|unknown device"):
            parse_overrides(wrong)


def test_names_of_devices(path: Path, expected: dict[str, bytes]) -> None:
    assert expected
    assert [canonical_name(n) for n in ("CPU", "CUDA3", "cuda", "OpenCL:1", "torch:mps")] == [
        "cpu", "cuda:3", "cuda:0", "opencl:1", "torch:mps",
    ]  # fmt: skip
    for wrong in ("", "tpu", "cpu:1", "cuda:x", "cuda:-1", "torch", "torch:", "GPU0"):
        with pytest.raises(ValueError, match="unknown device"):
            loader.load(path, device=wrong)
    with pytest.raises(ValueError, match="no tensor 'tt0'; did you mean"):
        loader.load(path, device={"tt0": "cpu"})
    with pytest.raises(TypeError, match="device"):
        loader.load(path, device=3)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError, match="device"):
        loader.load(path, device=lambda info: info.nbytes)


def test_devices_that_are_not_there(
    path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected
    for package, name in (("torch", "torch:cpu"), ("pyopencl", "opencl:0"), ("cuda", "cuda:0")):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            patch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
            with pytest.raises(DeviceUnavailableError, match="pip install 'gguf-dio"):
                loader.load(path, device=name)
    pytest.importorskip("torch", reason="needs the extra torch")
    for name in ("torch:nonsense", "torch:cuda:99"):
        with pytest.raises(DeviceUnavailableError, match=name):
            loader.load(path, device=name)


def test_numbers_that_are_out_of_range(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    assert expected
    with pytest.raises(DeviceUnavailableError, match="no CUDA device 7; there are 2"):
        loader.load(path, device="cuda:7")
    with pytest.raises(DeviceUnavailableError):
        loader.load(path, device={"t0": "cuda:0", "t1": "cuda:2"})
    assert cuda.alive() == {}


# --- Memory ---


def test_too_little_memory_is_found_before_anything_is_read(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda, faults: Faults
) -> None:
    assert expected
    cuda.device(0, total=8 << 20, reserved=2 << 20)
    with loader.open(path) as model:
        faults.shorten("pread_direct", 1 << 40)  # counts
        with pytest.raises(DeviceMemoryError, match="cuda:0 and 6291456 are free") as caught:
            model.load(device="cuda:0")
        assert caught.value.available == 6 << 20
        assert caught.value.needed is not None
        assert caught.value.needed > 10_000_000
        assert isinstance(caught.value, MemoryError)
        assert faults.count("pread_direct") == 0
        assert cuda.alive() == {}
        with model.load(device=lambda info: "cuda:0" if info.name == "t0" else "cpu") as weights:
            assert weights["t0"].device == "cuda:0"


def test_memory_that_turns_out_to_be_too_little(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda, nothing_left: Any
) -> None:
    assert expected
    cuda.fail("cuMemAlloc", 2)
    with loader.open(path) as model:
        with pytest.raises(DeviceMemoryError, match="can't be allocated"):
            model.load(device="cuda:0")
        assert cuda.alive() == {}
    nothing_left()


def test_row_99_memory_that_cannot_be_pinned(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    """Pageable memory does, and the report says so."""
    cuda.fail("cuMemHostRegister", 2)
    with loader.load(path, device="cuda:0", chunk_bytes=CHUNK) as weights:
        assert back(weights) == expected
        assert weights.report.staging is not None
        assert "cuMemHostRegister failed" in (weights.report.staging.why_pageable or "")
    with loader.load(path, device="cuda:1", chunk_bytes=CHUNK) as weights:
        assert back(weights) == expected


def test_pinned_memory_stays_within_its_limit(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    with loader.open(path) as model:
        for limit in (1 << 20, 3 << 20, 64 << 20):
            with model.load(device="cuda:0", memory_limit=limit) as weights:
                assert back(weights) == expected
            assert 0 < cuda.live("peak_registered_bytes") <= limit


def test_what_devices_report(cuda: fake_cuda.FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.device(0, total=1 << 30, reserved=1 << 20)
    device = open_device("cuda:0")
    assert device.memory() == DeviceMemory("cuda:0", (1 << 30) - (1 << 20), 1 << 30)
    cuda.device(0, total=0)
    host = HostDevice().memory()
    found = device.memory()
    assert abs(found.free - host.free) < 1 << 30
    assert "reports no memory" in caplog.text
    device.close()


def test_rules_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.device.host.available_memory", lambda: 60 << 30)
    assert usable_memory("d", 5, 10).free == 5
    assert usable_memory("d", 15, 10).free == 10
    shared = usable_memory("d", 3 << 29, 64 << 30, shares_host=True)
    assert (shared.free, shared.total) == (60 << 30, 64 << 30)
    unknown = usable_memory("d", 0, 0)
    assert unknown.free == 60 << 30
    assert unknown.total >= unknown.free


def test_integrated_devices(cuda: fake_cuda.FakeCuda) -> None:
    cuda.device(0, total=1 << 20, integrated=True)
    device = open_device("cuda:0")
    assert device.memory().free > 1 << 20
    device.close()


# --- Memory of the caller's ---


def test_the_memory_of_earlier_weights_is_used_again(
    path: Path, expected: dict[str, bytes], device: str
) -> None:
    with loader.open(path) as model:
        first = model.load(device=device)
        buffer = first.devices[0].buffer
        second = model.load(device=device, into=first)
        assert second.devices[0].buffer is buffer
        first.close()
        assert back(second) == expected
        mixed = model.load(device=lambda info: device if info.name == "t0" else "cpu", into=second)
        assert back(mixed) == expected
        assert mixed.devices[0].buffer is buffer
        small = model.load(names=["t1"], device=device)
        with pytest.raises(ValueError, match="bytes are needed on"):
            model.load(device=device, into=small)
        for weights in (small, mixed, second):
            weights.close()


def test_memory_of_the_callers_on_a_device(
    path: Path, expected: dict[str, bytes], device: str, cuda_driver: fake_cuda.FakeCuda
) -> None:
    del cuda_driver  # so that there is a device that is the wrong one
    wanted = ["t0", "t4"]
    with loader.open(path) as model:
        chosen, memory = caller_memory(device, [len(expected[name]) for name in wanted])
        into = dict(zip(wanted, memory, strict=True))
        weights = model.load(device=chosen, into=into, chunk_bytes=CHUNK)
        assert back(weights) == expected
        weights.close()
        with pytest.raises(ValueError, match="its buffer"):
            model.load(device=chosen, into={"t1": memory[0]})
        with pytest.raises(TypeError, match="into: tensor 't0' goes to"):
            model.load(device=chosen, into={"t0": np.zeros(10)})
        with pytest.raises(ValueError, match="'nope' is not loaded"):
            model.load(device=chosen, into={"nope": memory[0]})


def caller_memory(device: str, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """A device, and memory on it as its users have it."""
    if device.startswith("torch"):
        import torch

        return device, [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    if device.startswith("opencl"):
        import pyopencl as cl
        import pyopencl.array

        from loader.device.opencl import OpenCLDevice

        queue = cl.CommandQueue(cl.Context(cl.get_platforms()[0].get_devices()[:1]))
        return (
            OpenCLDevice(queue=queue),
            [pyopencl.array.zeros(queue, size, np.uint8) for size in sizes],
        )
    found = open_device(device)
    buffers = [found.allocate(size) for size in sizes]
    pairs = zip(buffers, sizes, strict=True)
    return found, [buffer.array(0, np.uint8, (size,), 0) for buffer, size in pairs]


def test_memory_on_another_device(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    first, (memory,) = caller_memory("cuda:0", [len(expected["t0"])])
    with loader.open(path) as model:
        with pytest.raises(ValueError, match="it is on cuda:0, not on cuda:1"):
            model.load(device="cuda:1", into={"t0": memory})
        with pytest.raises(ValueError, match=r"into: .*cpu|can't read into|buffer"):
            model.load(device="cpu", into={"t0": bytes(len(expected["t0"]))})
    del memory, first
    assert cuda.alive() == {}


def test_overlapping_memory_is_refused(
    path: Path, device: str, cuda_driver: fake_cuda.FakeCuda, faults: Faults
) -> None:
    del cuda_driver
    random_model(path, [300_000, 300_000])
    chosen, (memory, other) = caller_memory(device, [300_000, 300_000])
    with loader.open(path) as model:
        faults.shorten("pread_direct", 1 << 40)  # counts
        with pytest.raises(ValueError, match="overlap on their device"):
            model.load(device=chosen, into={"t0": memory, "t1": memory})
        assert faults.count("pread_direct") == 0
        model.load(device=chosen, into={"t0": memory, "t1": other}).close()


def test_odd_tensors_of_torch_are_refused(direct_folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    path = build.model(direct_folder / "m.gguf", {"t": np.zeros(6, np.float32)})
    for memory, what in (
        (torch.zeros(25, dtype=torch.uint8)[1:], "isn't aligned"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "a view that is computed"),
        (torch.zeros(6, 2)[:, 0], "isn't contiguous"),
        (torch.zeros(6, device="meta"), "it is on meta, not on cpu"),
    ):
        with pytest.raises(ValueError, match=what):
            loader.load(path, device="torch:cpu", into={"t": memory})
    loader.load(path, device="torch:cpu:0", into={"t": torch.zeros(6)}).close()


def test_work_in_the_stream_of_an_array_comes_first(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    """Version 3 of the interface: the consumer waits for the stream that it names."""
    from cuda.bindings import driver

    device, (memory,) = caller_memory("cuda:0", [len(expected["t0"])])
    context = device._handles.context  # the primary one, as any library has it
    driver.cuCtxPushCurrent(context)
    _, stream = driver.cuStreamCreate(0)
    cuda.speed(20 << 20)
    driver.cuMemsetD32Async(memory._buffer.address, 0, len(expected["t0"]) // 4, stream)

    interface = {**memory.__cuda_array_interface__, "stream": int(stream)}

    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return interface

    with loader.open(path) as model:
        weights = model.load(names=["t0"], device=device, into={"t0": Array()})
    driver.cuStreamSynchronize(stream)
    assert content({"t0": weights["t0"].to_host()})["t0"] == expected["t0"]
    driver.cuStreamDestroy(stream)
    driver.cuCtxPopCurrent()
    weights.close()
    del weights, memory, device


def test_memory_that_is_not_there_is_not_used_again(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    """An error rather than silence, and the earlier weights stay as they are."""
    pytest.importorskip("torch", reason="needs the extra torch")
    with loader.open(path) as model:
        for before, after in (
            ("cuda:0", "cpu"), ("cuda:0", "cuda:1"), ("torch:cpu", "cuda:0"), ("torch:cpu", "cpu"),
        ):  # fmt: skip
            first = model.load(device=before)
            with pytest.raises(ValueError, match="no memory"):
                model.load(device=after, into=first)
            assert back(first) == expected
            first.close()
        both = model.load(device={"t0": "cuda:0", "t4": "cuda:1"})
        kept, taken = both["t4"], both["t0"]
        later = model.load(names=["t0"], device="cuda:0", into=both)
        assert list(both) == ["t0", "t4"], "one is the same, the other wasn't taken"
        both.close()
        with pytest.raises(ValueError, match="closed"):
            kept.to_host()
        assert taken.to_host().numpy().tobytes() == expected["t0"]
        later.close()
        assert cuda.live("bytes") == 0
        del both, later, kept, taken, first


# --- Validation ---


def quantized(path: Path, rows: int, wrong: dict[str, int]) -> None:
    """Q6_K tensors (210 bytes a block: cuts lie inside of blocks), some with a NaN scale."""
    infos, data = b"", b""
    for number in range(4):
        blocks = np.zeros((rows, 210), np.uint8)
        if (block := wrong.get(f"t{number}")) is not None:
            blocks[block, 208:] = np.array([np.nan], np.float16).view(np.uint8)
        infos += info(f"t{number}", [256, rows], 14, len(data))
        data += pad(blocks.tobytes())
    path.write_bytes(pad(fixed(3, 4, 0) + infos) + data)


@pytest.mark.parametrize("chunk_bytes", [4096, CHUNK])
def test_validation_on_the_way(direct_folder: Path, device: str, chunk_bytes: int) -> None:
    path = direct_folder / "m.gguf"
    quantized(path, 5000, {})
    loader.load(path, device=device, check_tensors=True, chunk_bytes=chunk_bytes).close()
    wrong = {"t1": 4999, "t3": 312}
    quantized(path, 5000, wrong)
    with pytest.raises(TensorDataError) as caught:
        loader.load(path, device=device, check_tensors=True, chunk_bytes=chunk_bytes)
    assert caught.value.tensors == ("t1", "t3")
    for name, block in wrong.items():
        assert f"'{name}' (first in block {block})" in str(caught.value)
    with pytest.raises(TensorDataError, match="t1"):
        for _ in loader.open(path).stream(device=device, check_tensors=True):
            pass


# --- Failures, everywhere ---


CALLS = [
    "cuCtxPushCurrent", "cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery",
    "cuStreamCreate", "cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemAlloc",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_a_call_of_the_driver_that_fails(
    path: Path,
    expected: dict[str, bytes],
    cuda: fake_cuda.FakeCuda,
    call: str,
    nth: int,
    nothing_left: Callable[[], None],
) -> None:
    """An error of the device, or the right bytes; and nothing is left alive."""
    cuda.fail(call, 999, nth=nth, times=1)  # CUDA_ERROR_UNKNOWN
    outcomes = []
    with loader.open(path) as model:
        for _ in range(nth + 1):
            try:
                weights = model.load(device="cuda:0", chunk_bytes=CHUNK, memory_limit=1 << 20)
            except DeviceError as error:
                assert f"{call} failed: unknown error" in str(error)
                outcomes.append("error")
            else:
                assert back(weights) == expected
                weights.close()
                del weights
                outcomes.append("bytes")
            assert cuda.alive() == {}
    assert outcomes.count("error") == 1
    assert outcomes[-1] == "bytes"
    nothing_left()


@pytest.mark.parametrize("how", ["error", "cancel", "data"])
def test_a_load_that_fails_leaves_nothing_on_the_device(
    direct_folder: Path, cuda: fake_cuda.FakeCuda, faults: Faults, how: str,
    nothing_left: Callable[[], None],
) -> None:  # fmt: skip
    path = direct_folder / "m.gguf"
    quantized(path, 20_000, {"t2": 7})
    cuda.speed(200 << 20)  # copies are under way when it happens
    with loader.open(path) as model:
        if how == "error":
            for call in ("pread_direct", "uring_result"):
                faults.fail(call, errno.EIO, nth=6)
        calls = 0

        def progress(*_: int) -> bool:
            nonlocal calls
            calls += 1
            return how != "cancel" or calls < 2

        kinds = {"error": ReadError, "cancel": LoadCancelled, "data": TensorDataError}
        with pytest.raises(kinds[how]):
            model.load(
                device="cuda:0", chunk_bytes=CHUNK, check_tensors=how == "data", progress=progress
            )
        assert cuda.alive() == {}
    nothing_left()


def test_staging_buffers_are_not_filled_again_too_early(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    """Copies far slower than reads, through few buffers: the driver reads its source late."""
    cuda.speed(100 << 20)
    with loader.load(path, device="cuda:0", chunk_bytes=CHUNK, memory_limit=1 << 20) as weights:
        assert back(weights) == expected


class OwnDevice(Device):
    """A device of somebody's own: copies in a thread, after a while."""

    name = "own"
    largest_buffer: int | None = 1 << 20
    shares_host = False

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.allocated: list[int] = []

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.name, 1 << 30, 1 << 30)

    def allocate(self, nbytes: int) -> HostBuffer:
        self.allocated.append(nbytes)
        return HostBuffer(np.zeros(nbytes, np.uint8))

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        return PinnedMemory(allocate_arena(nbytes), None, "own device")

    def copy_async(self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]) -> Any:
        assert isinstance(buffer, HostBuffer)
        data = buffer.data

        def copy() -> None:
            time.sleep(0.001)
            data[position : position + source.nbytes] = source

        thread = threading.Thread(target=copy)
        thread.start()

        class Copying:
            def done(self) -> bool:
                return not thread.is_alive()

        return Copying()

    def adopt(self, owner: object) -> DeviceBuffer:
        raise TypeError(f"{owner!r} can't be adopted")

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        raise NotImplementedError

    def offloads(self, op: str, shape: Sequence[int]) -> bool:
        return bool(op and not shape)

    def close(self) -> None:
        pass


def test_a_device_of_ones_own_with_a_limit_for_buffers(direct_folder: Path) -> None:
    path = direct_folder / "m.gguf"
    arrays = random_model(path, [400_000] * 7)
    device = OwnDevice()
    with loader.open(path) as model:
        weights = model.load(device=device, chunk_bytes=64 << 10)
        assert back(weights) == {name: values.tobytes() for name, values in arrays.items()}
        assert len(device.allocated) == 4
        assert max(device.allocated) <= 1 << 20
        assert weights.report.device_bytes == {"own": sum(device.allocated)}
    random_model(path, [2 << 20])
    with pytest.raises(DeviceMemoryError, match="'t0' has 2097152 bytes, a buffer there at most"):
        loader.load(path, device=device)


CTRL_C = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.fake_cuda import FakeCuda
import loader
fake = FakeCuda(Path({driver!r}))
fake.speed(20 << 20)
stop = threading.Event()
def press():
    while not stop.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)
caught = 0
try:
    threading.Timer(0.3, lambda: threading.Thread(target=press, daemon=True).start()).start()
    loader.load({path!r}, device="cuda:0", chunk_bytes=1 << 20, memory_limit=16 << 20)
except KeyboardInterrupt:
    caught = 1
finally:
    while True:
        try:
            stop.set()
            time.sleep(0.2)
            break
        except KeyboardInterrupt:
            continue
print(caught, fake.live("misuse"), fake.live("registrations"), fake.live("events"))
"""


def test_one_ctrl_c_after_the_other(
    direct_folder: Path, cuda_driver: fake_cuda.FakeCuda, tmp_path: Path
) -> None:
    """What is being copied ends before its memory goes."""
    del cuda_driver
    path = direct_folder / "m.gguf"
    random_model(path, [8 << 20] * 6)
    driver = fake_cuda.build(tmp_path)
    root = str(Path(build.__file__).parents[1])
    code = CTRL_C.format(root=root, driver=str(driver), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "1 0 0 0\n", done.stderr


AT_THE_END = {
    "weights": "weights = loader.load(path, device='cuda:0')",
    "a stream": "s = loader.open(path).stream(device='cuda:0', chunk_bytes=65536); first = next(s)",
    "a device": "device = open_device('cuda:1'); buffer = device.allocate(100)",
}


@pytest.mark.parametrize("what", AT_THE_END)
def test_the_interpreter_ends_with_device_memory(
    path: Path,
    expected: dict[str, bytes],
    cuda_driver: fake_cuda.FakeCuda,
    tmp_path: Path,
    what: str,
) -> None:
    assert expected
    del cuda_driver
    driver = fake_cuda.build(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom tests.fake_cuda import FakeCuda\n"
        "import loader\nfrom loader.device.registry import open_device\n"
        "fake, path = FakeCuda(Path(sys.argv[2])), sys.argv[3]\nfake.speed(10 << 20)\n"
        + AT_THE_END[what]
    )
    root = Path(build.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, root, driver, path],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_of_opencl_keep_their_memory(path: Path, expected: dict[str, bytes]) -> None:
    """pyopencl would crash on memory that was released under an array."""
    pytest.importorskip("pyopencl", reason="needs the extra opencl")
    try:
        weights = loader.load(path, device="opencl:0")
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    native = weights["t0"].native()
    weights.close()
    del weights
    gc.collect()
    assert native.get().tobytes() == expected["t0"]


def test_the_device_that_can_pin_pins(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    with loader.load(
        path, device=lambda info: "torch:cpu" if info.name == "t0" else "cuda:0"
    ) as weights:
        assert weights.report.staging is not None
        assert weights.report.staging.why_pageable is None
        assert back(weights) == expected
    del weights
    assert cuda.live("misuse") == 0


def test_devices_that_share_the_hosts_memory_share_it(
    path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    assert expected
    where = {"t0": "torch:cpu"}
    need = sum(len(data) for data in expected.values())
    for available, fits in ((need + 100_000, True), (need - 1_000_000, False)):
        for module in ("device.host", "device.torch", "planning"):
            monkeypatch.setattr(f"loader.{module}.available_memory", lambda n=available: n)
        with loader.open(path, access=("direct", "buffered")) as model:
            if fits:
                model.load(device=where).close()
                continue
            with pytest.raises(DeviceMemoryError, match=r"are available|are free"):
                model.load(device=where)


def test_other_errors_of_an_allocation_are_no_want_of_memory(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    assert expected
    cuda.fail("cuMemAlloc", 999, times=1)
    with pytest.raises(DeviceError, match="cuMemAlloc failed") as caught:
        loader.load(path, device="cuda:0")
    assert not isinstance(caught.value, MemoryError)


# --- mmap, mlock, no_alloc ---


def test_only_what_the_host_needs_stays_mapped(
    path: Path, expected: dict[str, bytes], device: str
) -> None:
    weights = loader.load(
        path, access="mmap", device=lambda info: "cpu" if info.name in ("t1", "t6") else device
    )
    assert back(weights) == expected
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            mapped += end - start
    assert 70_001 + 511 <= mapped < 70_001 + 511 + 4 * 4096
    assert weights["t6"].numpy().tobytes() == expected["t6"]
    weights.close()
    del weights
    with loader.open(path, access="mmap") as model:
        weights = model.load(device=device)
        assert back(weights) == expected
        assert resident(path) == 0, "nothing of it is on the host"
        weights.close()


def resident(path: Path) -> int:
    """Bytes of a file that are in page tables of this process."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = str(path) in line
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_locking_what_is_left_on_the_host(
    path: Path, expected: dict[str, bytes], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with loader.open(path) as model:
        for choose in (lambda _: device, lambda i: "cpu" if i.name == "t6" else device):
            with model.load(device=choose, mlock=True) as weights:
                assert back(weights) == expected
    assert not caplog.records


def test_no_alloc_tells_what_each_device_needs(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    with loader.open(path) as model:
        report = model.load(device={"t0": "cuda:0", "t4": "cuda:1"}, no_alloc=True).report
    assert report.device_bytes == {"cuda:0": len(expected["t0"]), "cuda:1": len(expected["t4"])}
    assert report.memory_bytes > 0
    assert report.staging is None
    cuda.device(0, total=1 << 20)
    with loader.open(path) as model:
        assert model.load(device="cuda:0", no_alloc=True).report.device_bytes["cuda:0"] > 1 << 20
    assert cuda.calls("cuMemAlloc") == 0


# --- Policy and fill ---


def test_offloading(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """llama.cpp's rule; the variable is read once, when a device is created."""
    monkeypatch.delenv("GGML_OP_OFFLOAD_MIN_BATCH", raising=False)
    found = open_device(device)
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "4")
    assert found.offloads("MUL_MAT", (4096, 32, 1, 1))
    assert not found.offloads("MUL_MAT", (4096, 31, 100, 1))
    assert found.offloads("MUL_MAT_ID", (4096, 8, 32))
    assert not found.offloads("GGML_OP_MUL_MAT_ID", (4096, 512, 31))
    assert not found.offloads("GET_ROWS", (4096, 512, 512))
    assert not found.offloads("ADD", (4096,))
    found.close()
    later = open_device(device)
    assert later.offloads("MUL_MAT", (1, 4))
    later.close()
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "many")
    with pytest.raises(ValueError, match="GGML_OP_OFFLOAD_MIN_BATCH: 'many'"):
        open_device(device)
    assert not HostDevice().offloads("MUL_MAT", (1, 1000))


def test_fill(device: str) -> None:
    found = open_device(device)
    buffer = found.allocate(64)
    found.fill(buffer, 1.5)
    found.fill(buffer, -2.0, position=8, count=3)
    values = buffer.read(0, 64).view(np.float32)
    assert values.tolist() == [1.5] * 2 + [-2.0] * 3 + [1.5] * 11
    for position, count in ((2, 1), (-4, 1), (60, 2), (0, 17), (0, -1)):
        with pytest.raises(ValueError, match="don't lie in a buffer"):
            found.fill(buffer, 0.0, position, count)
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        found.fill(buffer, 0.0)
    found.close()


def test_the_host_as_a_device(path: Path, expected: dict[str, bytes]) -> None:
    host = open_device("cpu")
    assert back(loader.load(path, device=host)) == expected
    buffer = host.allocate(16)
    host.fill(buffer, 2.0, 4, 2)
    assert buffer.read(0, 16).view(np.float32).tolist() == [0, 2, 2, 0]
    assert host.memory().free > 0
    adopted = host.adopt(bytearray(8))
    assert host.copy_async(adopted, 2, np.arange(3, dtype=np.uint8)).done()
    assert adopted.read(0, 8).tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


# --- Arithmetic ---


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 2, 8, 14, 24, 28]), st.integers(0, 3000), st.integers(0, 9)),
        max_size=12,
    ),
    st.sampled_from([1, 512, 4096]),
    st.sampled_from([8192, 12288, 65536]),
    st.sampled_from([1, 8, 32, 256]),
    st.sampled_from([None, 1 << 20]),
)
def test_any_cut_covers_every_byte_once(
    tensors: list[tuple[int, int, int]], alignment: int, size: int, file_alignment: int,
    largest: int | None,
) -> None:  # fmt: skip
    """Segments fit the buffers, begin aligned, hold whole blocks, and copies don't meet."""
    infos, end = [], 777 // file_alignment * file_alignment
    for number, (kind, blocks, gap) in enumerate(tensors):
        elements, nbytes = BLOCK_SIZES[kind]
        end += -end % file_alignment + gap * gap * 3000 // file_alignment * file_alignment
        infos.append(TensorInfo(f"t{number}", kind, (elements * blocks,), nbytes * blocks, end, 0))
        end += nbytes * blocks
    placed, sizes = lay_out_buffers([(i, file_alignment) for i in infos], largest, "d")
    spots = [Spot(*entry) for entry in placed]
    for spot in spots:
        item = (
            1
            if BLOCK_SIZES[int(spot.info.ggml_type)][0] > 1
            else (BLOCK_SIZES[int(spot.info.ggml_type)][1])
        )
        assert spot.position % max(file_alignment, item) == 0
        assert spot.position + (spot.info.nbytes or 0) <= sizes[spot.buffer]
    segments = cut(spots, file_size=end, offset_alignment=alignment, buffer_bytes=size)
    written = [np.zeros(n, np.uint8) for n in sizes]
    file = np.random.default_rng(1).integers(1, 256, max(end, 1), np.uint8)
    for segment in segments:
        assert segment.offset % alignment == 0
        assert segment.room <= size
        assert segment.length <= segment.room
        assert segment.offset + segment.length <= end
        for piece in segment.pieces:
            block = BLOCK_SIZES[int(piece.spot.info.ggml_type)][1]
            assert piece.start % block == piece.length % block == 0
        read = file[segment.offset : segment.offset + segment.length]
        for copy in segment.copies():
            assert copy.begin + copy.length <= segment.length
            target = written[copy.buffer][copy.position : copy.position + copy.length]
            target[...] = read[copy.begin : copy.begin + copy.length]
    for spot in spots:
        nbytes = spot.info.nbytes or 0
        found = written[spot.buffer][spot.position : spot.position + nbytes]
        assert np.array_equal(found, file[spot.info.offset : spot.info.offset + nbytes])


def test_neighbours_are_copied_together() -> None:
    infos = [TensorInfo(f"t{i}", 24, (100,), 100, 128 * i, 0) for i in range(50)]
    placed, sizes = lay_out_buffers([(i, 32) for i in infos], None, "d")
    assert sizes == [49 * 128 + 100]
    spots = [Spot(*entry) for entry in placed]
    (segment,) = cut(spots, file_size=6400, offset_alignment=512, buffer_bytes=65536)
    assert len(list(segment.copies())) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 1 << 40), st.integers(1, 1 << 18), st.integers(1, 128),
    st.integers(1 << 20, 1 << 32), st.sampled_from([1, 512, 4096, 65536]),
)  # fmt: skip
def test_any_ring_stays_within_its_limit(
    nbytes: int, units: int, depth: int, limit: int, alignment: int
) -> None:
    shape = ring_shape(
        nbytes,
        chunk_bytes=4096 * units,
        depth=depth,
        memory_limit=limit,
        offset_alignment=alignment,
    )
    assert shape.buffers >= 1
    assert shape.buffers * shape.buffer_bytes <= limit
    assert shape.buffer_bytes % alignment == 0
    assert shape.buffer_bytes > 2 * max(b for _, b in BLOCK_SIZES.values()) + alignment


def test_one_info_line_and_nothing_printed(
    path: Path, expected: dict[str, bytes], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert expected
    caplog.set_level(logging.WARNING, "loader")
    loader.load(path, device=device).close()
    assert not caplog.records
