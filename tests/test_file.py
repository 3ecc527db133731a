"""`loader.io.File`: any range of a file, the same bytes whichever way they are read."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loader.errors import ReadError, ShortReadError
from loader.io import File
from tests.build import random_bytes, write
from tests.conftest import Faults, descriptors

BLOCK = 4096
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, 4096 * 5 + 1, 4096 * 5 + 511, 4096 * 5 + 4095]


@pytest.fixture(scope="module")
def data() -> bytes:
    return random_bytes(4096 * 1000 + 511)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> Path:
    return write(tmp_path_factory.mktemp("file") / "data", data)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, path: Path) -> File:
    opened = File(path, direct=request.param)
    if request.param and not opened.has_direct_io:
        pytest.skip(f"no direct I/O: errno {opened.direct_errno}")
    return opened


def aligned_buffer(size: int, shift: int = 0) -> memoryview:
    """Writable memory whose address is `shift` more than a multiple of 4096."""
    memory = mmap.mmap(-1, size + shift + BLOCK)
    return memoryview(memory)[shift : shift + size]


def test_says_what_it_is(file: File, path: Path, data: bytes) -> None:
    assert file.size == len(data)
    assert file.path == str(path)
    if file.has_direct_io:
        assert file.direct_errno is None
        for alignment in (file.memory_alignment, file.offset_alignment):
            assert alignment is not None
            assert alignment & (alignment - 1) == 0
    else:
        assert file.memory_alignment is None
        assert file.offset_alignment is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_whole_files_of_odd_sizes(tmp_path: Path, size: int, direct: bool) -> None:
    expected = random_bytes(size, seed=size)
    with File(write(tmp_path / "f", expected), direct=direct) as file:
        assert file.read() == expected
        assert file.read() == b""
        assert file.tell() == size
        buffer = bytearray(size)
        assert file.pread_into(buffer, 0) == size
        assert buffer == expected


@pytest.mark.parametrize("shift", [0, 1, 8, 511, 512])
def test_every_offset_of_a_block(file: File, data: bytes, shift: int) -> None:
    """Offsets 0 to 4095 and odd lengths, to aligned and unaligned memory."""
    for offset in (*range(64), *range(64, 4096, 61), 4095):
        length = 1 + (offset * 37) % 9001
        room = aligned_buffer(length + 16, shift)
        room[length:] = b"x" * 16
        file.pread_into(room[:length], BLOCK + offset)
        assert room[:length] == data[BLOCK + offset :][:length]
        assert room[length:] == b"x" * 16, "wrote past the end of the buffer"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_range(path: Path, data: bytes, draw: st.DataObject) -> None:
    offset = draw.draw(st.integers(0, len(data)))
    length = draw.draw(st.integers(0, min(len(data) - offset, 3 << 20)))
    buffer = aligned_buffer(length + 1, draw.draw(st.integers(0, 4095)))
    with File(path) as file:
        file.pread_into(buffer[:length], offset)
        file.seek(offset)
        assert file.read(length) == data[offset : offset + length]
        assert file.tell() == offset + length
    assert buffer[:length] == data[offset : offset + length]


def test_positional_reads_leave_the_cursor_alone(file: File, data: bytes) -> None:
    file.seek(1000)
    file.pread_into(bytearray(100), 3)
    assert file.tell() == 1000
    assert file.read(5) == data[1000:1005]


def test_the_cursor_counts_logical_bytes(file: File, data: bytes) -> None:
    expected = 0
    for n in (1, 511, 512, 4096, 4097, 70000, 1 << 20):
        assert file.read(n) == data[expected : expected + n]
        expected += n
        assert file.tell() == expected
    assert file.seek(-10, os.SEEK_END) == len(data) - 10
    assert file.read(100) == data[-10:], "short at the end, like a file"
    assert file.seek(-100, os.SEEK_CUR) == len(data) - 100
    assert file.seek(len(data) + 5) == len(data) + 5
    assert file.read(1) == b""


def test_seek_refuses_what_makes_no_sense(file: File) -> None:
    for offset, whence in ((-1, 0), (0, 3), (-(1 << 62), 1), (1 << 70, 0)):
        with pytest.raises(ValueError, match="seek"):
            file.seek(offset, whence)
    assert file.tell() == 0


def test_exact_reads_past_the_end_read_nothing(file: File, data: bytes) -> None:
    buffer = bytearray(b"x" * 100)
    file.seek(len(data) - 50)
    reads: list[Callable[[], int]] = [
        lambda: file.readinto(buffer),
        lambda: file.pread_into(buffer, len(data) - 50),
    ]
    for read in reads:
        with pytest.raises(ShortReadError, match="pass the end") as caught:
            read()
        assert (caught.value.offset, caught.value.length) == (len(data) - 50, 100)
    assert buffer == b"x" * 100
    assert file.tell() == len(data) - 50


def test_refuses_buffers_it_cannot_fill(file: File) -> None:
    with pytest.raises(ValueError, match="buffer"):
        file.readinto(memoryview(bytes(10)))
    with pytest.raises(TypeError):
        file.readinto("text")
    with pytest.raises(ValueError, match="contiguous"):
        file.readinto(np.zeros((10, 10), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="negative"):
        file.pread_into(bytearray(1), -1)


def test_fills_arrays_of_any_type(file: File, data: bytes) -> None:
    array = np.zeros((5, 7), np.float64)
    file.pread_into(array, 3)
    assert array.tobytes() == data[3 : 3 + array.nbytes]


def test_closed_files_say_so(path: Path) -> None:
    file = File(path)
    file.close()
    file.close()
    assert file.closed
    assert file.size > 0
    for call in (file.tell, file.read, lambda: file.seek(0), lambda: file.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_one_descriptor_after_open_and_none_after_close(
    path: Path, nothing_left: Callable[[], None]
) -> None:
    before = descriptors()
    file = File(path)
    assert len(descriptors() - before) == 1
    file.read(10)
    file.close()
    nothing_left()


def test_stays_with_the_inode_when_the_path_is_replaced(
    direct_folder: Path, faults: Faults
) -> None:
    """Also when the buffered descriptor is opened only after that."""
    old = random_bytes(100_000)
    path = write(direct_folder / "model", old)
    with File(path) as file:
        write(direct_folder / "new", bytes(100_000)).replace(path)
        faults.fail("pread_direct", errno.EINVAL)
        assert file.read() == old
        assert not file.has_direct_io


def test_without_proc_the_same_inode_is_opened_by_path(direct_folder: Path, faults: Faults) -> None:
    expected = random_bytes(10_000)
    path = write(direct_folder / "model", expected)
    faults.fail("open", errno.ENOENT, nth=2, times=1)
    with File(path) as file:
        assert file.has_direct_io
        faults.fail("open", errno.ENOENT)
        faults.fail("pread_direct", errno.EFAULT)
        assert file.read() == expected


def test_memory_for_an_unaligned_read_is_bounded(direct_folder: Path) -> None:
    """256 MiB into unaligned memory: the peak grows by the buffer and a few MiB."""
    import resource

    size = 256 << 20
    path = direct_folder / "large"
    with path.open("wb") as out:
        out.truncate(size)
        out.seek(size - 5)
        out.write(b"hello")
    buffer = aligned_buffer(size, shift=1)
    buffer[::4096] = bytes(len(buffer[::4096]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with File(path) as file:
        assert file.has_direct_io
        file.readinto(buffer)
    assert bytes(buffer[-5:]) == b"hello"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8 << 10


def test_reads_past_4_gib(direct_folder: Path) -> None:
    path = direct_folder / "sparse"
    with path.open("wb") as out:
        out.seek((5 << 30) + 123)
        out.write(b"far away")
    with File(path) as file:
        file.seek((5 << 30) + 123)
        assert file.read() == b"far away"
        buffer = bytearray(8)
        file.pread_into(buffer, (5 << 30) + 123)
        assert buffer == b"far away"


def test_many_threads_read_one_file(file: File, data: bytes) -> None:
    errors = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            offset = int(random.integers(0, len(data) - 100_000))
            buffer = bytearray(int(random.integers(1, 100_000)))
            file.pread_into(buffer, offset)
            if buffer != data[offset : offset + len(buffer)]:
                errors.append(offset)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_row_86_a_signal_storm_changes_nothing(file: File, data: bytes) -> None:
    ticks = 0

    def tick(*_: object) -> None:
        nonlocal ticks
        ticks += 1

    previous = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            file.seek(17)
            assert file.read() == data[17:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert ticks > 10


# --- What is no regular file ---


def test_row_103_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        File(tmp_path)


def test_missing_and_forbidden_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        File(tmp_path / "missing")
    assert str(caught.value.filename) == str(tmp_path / "missing")


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ReadError, match="a FIFO, not a regular file"):
        File(tmp_path / "fifo")


def test_a_socket_and_a_device_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(ReadError, match="a socket"):
            File(tmp_path / "s")
    with pytest.raises(ReadError, match="a character device"):
        File("/dev/zero")


def test_row_101_a_descriptor_path_is_read(path: Path, data: bytes) -> None:
    with path.open("rb") as held, File(f"/dev/fd/{held.fileno()}") as file:
        assert file.read() == data


@pytest.mark.parametrize("name", ["with space", "größe 模型", "line\nbreak", b"not utf-8 \xff"])
def test_row_105_unusual_names(tmp_path: Path, name: str | bytes) -> None:
    path = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
    with open(path, "wb") as out:  # noqa: PTH123 - pathlib takes no bytes
        out.write(b"content")
    with File(path) as file:
        assert file.read() == b"content"
        assert os.fsencode(file.path) == path


def test_row_104_a_read_only_file_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write(folder / "f", b"content")
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        with File(path) as file:
            assert file.read() == b"content"
    finally:
        folder.chmod(0o755)
