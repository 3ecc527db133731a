"""How much memory devices have, what is pinned, and memory of the caller's on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.device.host import HostDevice, usable_memory
from loader.device.memory import DeviceMemory
from loader.device.registry import open_device
from loader.errors import (
    DeviceMemoryError,
)
from tests import build, fake_cuda
from tests.build import random_model
from tests.conftest import Faults, back, content

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 2 << 20]
CHUNK = 256 << 10


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return direct_folder / "m.gguf"


@pytest.fixture
def expected(path: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in random_model(path, SIZES).items()}


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


def test_row_110_integrated_devices(cuda: fake_cuda.FakeCuda) -> None:
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
