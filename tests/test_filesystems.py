"""Real file systems, mounted for the test: what they allow, and the same bytes on each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.errors import DirectIOError
from loader.io import File
from tests.build import random_bytes, random_model, write

SIZES = [4096 * 3 + 1, 511, 4095, 100_000]


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=60)


def need(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something for the test, or skips it where the system doesn't allow that."""
    mounted: list[Path] = []

    def do(kind: str, *words: str | Path) -> Path:
        target = tmp_path / f"mount{len(mounted)}"
        target.mkdir()
        try:
            run("mount", "-t", kind, *words, target)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{kind} can't be mounted here: {error.stderr.decode().strip()}")
        mounted.append(target)
        return target

    yield do
    for target in reversed(mounted):
        run("umount", target)


def check_bytes(folder: Path, expected: bytes, name: str = "data") -> File:
    """The same bytes by cursor and by position, at odd places."""
    file = File(folder / name)
    assert file.read() == expected
    for offset in (0, 1, 511, 4097):
        buffer = bytearray(len(expected) - offset)
        file.pread_into(buffer, offset)
        assert buffer == expected[offset:]
    return file


DATA = random_bytes(4096 * 30 + 511)


def test_row_77_ramfs_refuses_direct_io(mount: Callable[..., Path]) -> None:
    need("mount")
    folder = mount("ramfs", "none")
    write(folder / "data", DATA)
    file = check_bytes(folder, DATA)
    assert not file.has_direct_io
    assert file.direct_errno == errno.EINVAL
    expected = random_model(folder / "m.gguf", SIZES)
    with loader.open(folder / "m.gguf", access=("direct", "buffered")) as model:
        assert model.files[0].access == "buffered"
        assert "EINVAL" in model.files[0].reason
        for name, tensor in model.load().items():
            assert np.array_equal(tensor.numpy(), expected[name])
    with pytest.raises(DirectIOError, match="EINVAL"):
        loader.open(folder / "m.gguf", access="direct")
    with loader.open(folder / "m.gguf") as model:
        assert model.files[0].access == "mmap"


def test_row_77_erofs_refuses_direct_io(tmp_path: Path, mount: Callable[..., Path]) -> None:
    need("mount", "mkfs.erofs", "losetup")
    content = tmp_path / "content"
    content.mkdir()
    write(content / "data", DATA)
    expected = random_model(content / "m.gguf", SIZES)
    run("mkfs.erofs", tmp_path / "image", content)
    folder = mount("erofs", "-o", "loop,ro", tmp_path / "image")
    file = check_bytes(folder, DATA)
    assert file.direct_errno in (None, errno.EINVAL, errno.EOPNOTSUPP)
    assert file.has_direct_io == (file.direct_errno is None)
    weights = loader.load(folder / "m.gguf")
    for name, tensor in weights.items():
        assert np.array_equal(tensor.numpy(), expected[name])


def test_tmpfs(mount: Callable[..., Path]) -> None:
    need("mount")
    folder = mount("tmpfs", "none")
    write(folder / "data", DATA)
    check_bytes(folder, DATA)


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[str]:
    """A loop device with sectors of 4096 bytes."""
    need("losetup", "mkfs.ext4")
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    try:
        device = subprocess.run(
            ["losetup", "-f", "--show", "-b", "4096", "--direct-io=on", image],  # noqa: S607
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout.strip()  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device with 4096-byte sectors here: {error.stderr.strip()}")
    yield device
    run("losetup", "-d", device)


def test_ext4_on_sectors_of_4096_bytes(loop_device: str, mount: Callable[..., Path]) -> None:
    run("mkfs.ext4", "-q", loop_device)
    folder = mount("ext4", loop_device)
    write(folder / "data", DATA)
    file = check_bytes(folder, DATA)
    assert file.offset_alignment == 4096
    expected = random_model(folder / "m.gguf", SIZES)
    weights = loader.load(folder / "m.gguf", access="direct")
    for name, tensor in weights.items():
        assert np.array_equal(tensor.numpy(), expected[name])
    assert weights.report.bytes_bounced == 0


# --- Memory that direct reads can't reach ---


@pytest.fixture
def secret_memory() -> Iterator[mmap.mmap]:
    """Memory from memfd_secret(2), which no device may write to."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(447, 0)
    if fd < 0:
        pytest.skip(f"memfd_secret(2) is not available: {os.strerror(ctypes.get_errno())}")
    size = 1 << 20
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    os.close(fd)
    yield memory
    memory.close()


@pytest.mark.parametrize("start", [0, 1000])
def test_row_82_memory_that_dma_cannot_reach(
    direct_folder: Path, secret_memory: mmap.mmap, start: int
) -> None:
    data = random_bytes(2 << 20)
    with File(write(direct_folder / "data", data)) as file:
        whole = memoryview(secret_memory)[: 512 << 10]
        file.pread_into(whole, 4096)
        assert whole == data[4096 : 4096 + len(whole)]
        assert file.has_direct_io, "this read only"

        first = file.read(8192)
        assert file.has_direct_io
        view = memoryview(secret_memory)[start : start + 200_000]
        assert file.readinto(view) == 200_000
        assert first + view == data[: 8192 + 200_000]
        assert file.tell() == 8192 + 200_000
        if start == 0:
            assert not file.has_direct_io
            assert file.direct_errno == errno.EFAULT
        assert file.read(1000) == data[208_192:209_192]
        assert file.seek(-1000, os.SEEK_CUR) == 208_192
        assert file.read() == data[208_192:]
        del whole, view
