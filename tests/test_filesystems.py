"""Real file systems, mounted for the test: what they allow, and the same bytes on each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.errors import DirectIOError
from loader.io import File
from loader.measure import evict
from loader.options import Access
from tests.build import model, random_bytes, write

SIZES = [4096 * 3 + 1, 511, 4095, 100_000]


def run(*words: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


def need(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def check_bytes(folder: Path, expected: bytes, name: str = "data") -> File:
    """The same bytes by cursor and by position, at odd places."""
    file = File(folder / name)
    assert file.read() == expected
    for offset in (0, 1, 511, 4097):
        buffer = bytearray(len(expected) - offset)
        file.pread_into(buffer, offset)
        assert buffer == expected[offset:]
    return file


RANDOM = np.random.default_rng(5)
DATA = RANDOM.integers(0, 3, 4096 * 30 + 511, np.uint8).tobytes()  # a compressor can do with it
IMAGE_BYTES = 512 << 20  # sparse; the least that xfs takes is 300 MB


class Mounts:
    """Mounts file systems for a test, or skips it where the system doesn't allow that. All of
    them hold DATA as `data` and the same model as `m.gguf`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: dict[str, bytes] = {}
        self._undo: list[list[str | Path]] = []

    def new(self, name: str) -> Path:
        path = self.folder / f"{name}{len(list(self.folder.iterdir()))}"
        path.mkdir()
        return path

    def content(self, folder: Path) -> Path:
        write(folder / "data", DATA)
        tensors = {f"t{i}": RANDOM.integers(0, 3, n, np.int8) for i, n in enumerate(SIZES)}
        model(folder / "m.gguf", tensors)
        self.expected = {name: values.tobytes() for name, values in tensors.items()}
        return folder

    def call(self, *words: str | Path) -> str:
        try:
            return run(*words)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{words[0]} doesn't work here: {error.stderr.strip()}")

    def mount(self, kind: str, *words: str | Path) -> Path:
        target = self.new(kind)
        self.call("mount", "-t", kind, *words, target)
        self._undo.append(["umount", target])
        return target

    def image(self, *make: str) -> Path:
        """A file with a file system in it, made by a command."""
        image = self.folder / f"image{len(list(self.folder.iterdir()))}"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        self.call(*make, image)
        return image

    def loop_device(self, image: Path, sector: int) -> str:
        device = self.call("losetup", "-f", "--show", "-b", str(sector), "--direct-io=on", image)
        self._undo.append(["losetup", "-d", device])
        return device

    def undo(self) -> None:
        for words in reversed(self._undo):
            run(*words)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    found = Mounts(tmp_path)
    yield found
    found.undo()


def ext4(mounts: Mounts) -> Path:
    return mounts.content(mounts.mount("ext4", "-o", "loop", mounts.image("mkfs.ext4", "-q")))


def ext4_on_sectors_of_4096(mounts: Mounts) -> Path:
    device = mounts.loop_device(mounts.image("true"), 4096)
    mounts.call("mkfs.ext4", "-q", device)
    return mounts.content(mounts.mount("ext4", device))


def xfs(mounts: Mounts) -> Path:
    return mounts.content(mounts.mount("xfs", "-o", "loop", mounts.image("mkfs.xfs", "-q")))


def btrfs(mounts: Mounts) -> Path:
    return mounts.content(mounts.mount("btrfs", "-o", "loop", mounts.image("mkfs.btrfs", "-q")))


def btrfs_compressed(mounts: Mounts) -> Path:
    image = mounts.image("mkfs.btrfs", "-q")
    return mounts.content(mounts.mount("btrfs", "-o", "loop,compress-force=zstd", image))


def tmpfs(mounts: Mounts) -> Path:
    return mounts.content(mounts.mount("tmpfs", "none"))


def ramfs(mounts: Mounts) -> Path:
    return mounts.content(mounts.mount("ramfs", "none"))


def erofs(mounts: Mounts, *options: str) -> Path:
    content = mounts.content(mounts.new("content"))
    image = mounts.folder / "image"
    mounts.call("mkfs.erofs", *options, image, content)
    return mounts.mount("erofs", "-o", "loop,ro", image)


def erofs_compressed(mounts: Mounts) -> Path:
    return erofs(mounts, "-zlz4")


def overlay(mounts: Mounts, below: Path) -> Path:
    """As in a container: the files are in the layer below."""
    lower = below / "lower"
    lower.mkdir()
    upper, work = mounts.new("upper"), mounts.new("work")
    mounts.content(lower)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    return mounts.mount("overlay", "-o", options, "overlay")


def overlay_on_disk(mounts: Mounts) -> Path:
    return overlay(mounts, mounts.new("below"))


def overlay_on_ramfs(mounts: Mounts) -> Path:
    return overlay(mounts, mounts.mount("ramfs", "none"))


def fuse(mounts: Mounts) -> Path:
    content, target = mounts.content(mounts.new("content")), mounts.new("fuse")
    mounts.call("bindfs", content, target)
    mounts._undo.append(["umount", target])
    return target


# How each is read: the memory and offset alignment of direct reads (None: what the kernel says
# of the disk below), or why there are none.
Decision = tuple[int, int] | int | None
FILE_SYSTEMS: list[tuple[Callable[[Mounts], Path], list[str], Decision]] = [
    (ext4, ["mkfs.ext4", "losetup"], None),
    (ext4_on_sectors_of_4096, ["mkfs.ext4", "losetup"], (512, 4096)),
    (xfs, ["mkfs.xfs", "losetup"], None),
    (btrfs, ["mkfs.btrfs", "losetup"], (4096, 4096)),
    (btrfs_compressed, ["mkfs.btrfs", "losetup"], (4096, 4096)),
    (tmpfs, [], (4096, 4096)),
    (ramfs, [], errno.EINVAL),
    (erofs, ["mkfs.erofs", "losetup"], None),
    (erofs_compressed, ["mkfs.erofs", "losetup"], errno.EINVAL),
    (overlay_on_disk, [], None),
    (overlay_on_ramfs, [], errno.EINVAL),
    (fuse, ["bindfs"], (4096, 4096)),
]


def names(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("make", "programs", "decision"), FILE_SYSTEMS, ids=names)
def test_row_77_each_file_system(
    mounts: Mounts,
    make: Callable[[Mounts], Path],
    programs: list[str],
    decision: Decision,
    nothing_left: Callable[[], None],
) -> None:
    """The decision, the alignments and the bytes, in every mode that can be had."""
    need("mount", *programs)
    folder = make(mounts)
    with check_bytes(folder, DATA) as file:
        found = (file.memory_alignment, file.offset_alignment)
        if isinstance(decision, int):
            assert not file.has_direct_io
            assert file.direct_errno == decision
            assert found == (None, None)
        elif decision is None:
            assert found[0] in (4, 512, 4096)
            assert found[1] in (512, 4096)
        else:
            assert found == decision
        direct = file.has_direct_io
    accesses: list[Access] = ["direct", "mmap", "buffered"]
    for access in accesses:
        if access == "direct" and not direct:
            with pytest.raises(DirectIOError, match="EINVAL"):
                loader.open(folder / "m.gguf", access="direct")
            continue
        with loader.open(folder / "m.gguf", access=access) as opened:
            assert opened.files[0].access == access
            weights = opened.load()
            assert content(weights) == mounts.expected
            assert weights.report.files[0].fallback is None
            assert content(dict(opened.stream())) == mounts.expected
            del weights
    with loader.open(folder / "m.gguf") as opened:
        assert opened.files[0].access == ("direct" if direct else "mmap")
        assert direct or "EINVAL" in opened.files[0].reason
    with loader.open(folder / "m.gguf", access=("direct", "buffered")) as opened:
        assert opened.files[0].access == ("direct" if direct else "buffered")
    nothing_left()


def content(tensors: Mapping[str, loader.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_sectors_of_4096_bytes_refuse_smaller_reads(mounts: Mounts) -> None:
    """What the alignment is for: asked for less, the device says EINVAL."""
    need("mount", "mkfs.ext4", "losetup")
    folder = ext4_on_sectors_of_4096(mounts)
    fd = os.open(folder / "data", os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4096) as memory:
            with pytest.raises(OSError, match="Invalid argument"):
                os.preadv(fd, [memoryview(memory)[:512]], 512)
            assert os.preadv(fd, [memory], 4096) == 4096
    finally:
        os.close(fd)
    assert loader.load(folder / "m.gguf", access="direct").report.bytes_bounced == 0


@pytest.mark.parametrize("make", [overlay_on_disk, ext4], ids=names)
def test_what_is_in_the_page_cache_is_known(mounts: Mounts, make: Callable[[Mounts], Path]) -> None:
    """On overlayfs too, where the pages belong to the file below."""
    need("mount", "mkfs.ext4", "losetup")
    path = make(mounts) / "data"
    path.read_bytes()
    with File(path) as file:
        assert file.resident_fraction() == 1
    if evict(str(path)):
        with File(path) as file:
            assert file.resident_fraction() == 0


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
