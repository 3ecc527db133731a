"""Devices that fail, loads that are interrupted, and how long memory of devices lives."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader.device.base import Device, DeviceBuffer, PinnedMemory
from loader.device.host import HostBuffer
from loader.device.memory import DeviceMemory
from loader.errors import (
    DeviceError,
    DeviceMemoryError,
    DeviceUnavailableError,
    LoadCancelled,
    ReadError,
    TensorDataError,
)
from loader.io.arena import allocate_arena
from tests import build, fake_cuda
from tests.build import quantized, random_model
from tests.conftest import Faults, back, total

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 2 << 20]
CHUNK = 256 << 10


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return direct_folder / "m.gguf"


@pytest.fixture
def expected(path: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in random_model(path, SIZES).items()}


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
    assert cuda.live("bytes") >= total(expected)
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


# --- Failures, everywhere ---


CALLS = [
    "cuCtxPushCurrent", "cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery",
    "cuStreamCreate", "cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemAlloc",
]  # fmt: skip
# Those that give something back are tried again.
GIVING_BACK = ["cuMemFree", "cuMemHostUnregister", "cuEventDestroy", "cuStreamDestroy"]


@pytest.mark.parametrize("call", CALLS + GIVING_BACK)
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
    assert cuda.calls(call) >= nth
    assert outcomes.count("error") == (call not in GIVING_BACK) or call == "cuCtxPushCurrent"
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
        self.threads.append(thread)

        class Copying:
            def done(self) -> bool:
                return not thread.is_alive()

        return Copying()

    def synchronize(self) -> None:
        for thread in self.threads:
            thread.join()

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
