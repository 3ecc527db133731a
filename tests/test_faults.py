"""Every error branch of the core, reached through the system-call table."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import loader
from loader import _ffi
from loader.errors import DirectIOError, MappingError, ReadError, ShortReadError
from loader.io import File
from loader.options import Access
from tests.build import random_bytes, random_model, write
from tests.conftest import Faults

SIZE = 300_001
DATA = random_bytes(SIZE)
FALLBACKS = [errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP]


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return write(direct_folder / "data", DATA)


# --- Opening ---


@pytest.mark.parametrize("call", ["open", "fstat", "fcntl"])
def test_an_open_that_fails_is_an_error(
    path: Path, faults: Faults, nothing_left: Callable[[], None], call: str
) -> None:
    faults.fail(call, errno.EIO)
    with pytest.raises(ReadError, match="EIO") as caught:
        File(path)
    assert caught.value.errno == errno.EIO
    nothing_left()


def test_no_memory_for_the_handle(
    path: Path, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    faults.fail("alloc", errno.ENOMEM)
    with pytest.raises(ReadError, match="ENOMEM"):
        File(path)
    nothing_left()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EMFILE, errno.EACCES])
def test_row_77_direct_refused_at_open(path: Path, faults: Faults, error: int) -> None:
    faults.fail("open", error, nth=2, times=1)
    with File(path) as file:
        assert not file.has_direct_io
        assert file.direct_errno == error
        assert file.memory_alignment is None
        assert file.read() == DATA


def test_the_alignment_of_an_old_kernel(path: Path, faults: Faults) -> None:
    """Without STATX_DIOALIGN, st_blksize is taken and proved by a read."""
    faults.fail("statx", errno.ENOSYS)
    with File(path) as file:
        assert file.offset_alignment == path.stat().st_blksize
        assert file.read() == DATA


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO])
def test_a_probe_that_fails_means_no_direct_io(path: Path, faults: Faults, error: int) -> None:
    faults.fail("pread_direct", error, times=1)
    with File(path) as file:
        assert file.direct_errno == error
        assert file.read() == DATA
        assert faults.count("pread_direct") == 1


def test_a_probe_that_is_interrupted_is_tried_again(path: Path, faults: Faults) -> None:
    faults.fail("pread_direct", errno.EINTR, times=3)
    with File(path) as file:
        assert file.has_direct_io


def test_no_memory_for_the_probe(path: Path, faults: Faults) -> None:
    faults.fail("alloc", errno.ENOMEM, nth=2, times=1)
    with File(path) as file:
        assert file.direct_errno == errno.ENOMEM
        assert file.read() == DATA


def test_another_inode_at_the_path_is_not_read(path: Path, faults: Faults) -> None:
    """No /proc, and the second open by path fails its check."""
    faults.fail("open", errno.ENOENT, nth=2, times=1)
    faults.fail("fstat", errno.EIO, nth=2, times=1)
    with File(path) as file:
        assert file.direct_errno == errno.ESTALE
        assert file.read() == DATA


# --- Falling back ---


@pytest.mark.parametrize("error", FALLBACKS)
@pytest.mark.parametrize("start", [0, 1, 4096, 5000])
def test_row_78_the_cursor_goes_on_where_it_stopped(
    path: Path, faults: Faults, error: int, start: int
) -> None:
    with File(path) as file:
        file.seek(start)
        first = file.read(100_000)
        faults.fail("pread_direct", error)
        assert first + file.read() == DATA[start:]
        assert file.tell() == SIZE
        assert not file.has_direct_io
        assert file.direct_errno == error
        assert file.offset_alignment is None
        faults.clear()
        file.seek(7)
        assert file.tell() == 7
        assert file.read(1000) == DATA[7:1007]
        assert not file.has_direct_io, "a cursor stays buffered for good"


@pytest.mark.parametrize("error", FALLBACKS)
def test_a_fallback_in_mid_read(path: Path, faults: Faults, error: int) -> None:
    """The first direct read of a call works, partly; the second is refused."""
    with File(path) as file:
        faults.shorten("pread_direct", 8192, times=1)
        faults.fail("pread_direct", error, nth=2)
        buffer = bytearray(SIZE)
        file.pread_into(buffer, 0)
        assert buffer == DATA


def test_efault_lasts_for_one_positional_read_and_einval_for_the_file(
    path: Path, faults: Faults
) -> None:
    with File(path) as file:
        faults.fail("pread_direct", errno.EFAULT, times=1)
        file.pread_into(bytearray(10), 0)
        assert file.has_direct_io
        faults.fail("pread_direct", errno.EINVAL, times=1)
        file.pread_into(bytearray(10), 0)
        assert not file.has_direct_io
        assert file.direct_errno == errno.EINVAL


@pytest.mark.parametrize("call", ["fopencookie"])
def test_the_stream_of_a_fallback_cannot_be_opened(path: Path, faults: Faults, call: str) -> None:
    with File(path) as file:
        faults.fail("pread_direct", errno.EFAULT)
        faults.fail(call, errno.ENOMEM, times=1)
        with pytest.raises(ReadError, match="ENOMEM"):
            file.read(10)
        assert file.tell() == 0
        assert file.read() == DATA, "and works when it is tried again"


def test_no_descriptor_for_a_fallback(path: Path, faults: Faults) -> None:
    with File(path) as file:
        faults.fail("pread_direct", errno.EINVAL)
        faults.fail("open", errno.EMFILE)
        faults.fail("fcntl", errno.EIO, times=1)
        with pytest.raises(ReadError, match="EMFILE"):
            file.pread_into(bytearray(10), 0)
        buffer = bytearray(SIZE)
        file.pread_into(buffer, 0)
        assert buffer == DATA, "the direct descriptor serves as a buffered one"
        assert file.read() == DATA


def test_a_cursor_without_a_descriptor_for_its_fallback(path: Path, faults: Faults) -> None:
    with File(path) as file:
        first = file.read(10_000)
        faults.fail("pread_direct", errno.EFAULT)
        faults.fail("open", errno.EMFILE)
        assert first + file.read() == DATA
        assert not file.has_direct_io


def test_the_cursor_is_not_shared_with_a_forked_process(path: Path) -> None:
    with File(path, direct=False) as file:
        first = file.read(100)
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(50_000) == DATA[100:50_100] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert first + file.read() == DATA


@pytest.mark.parametrize("call", ["fseek", "fread"])
def test_the_stream_fails(path: Path, faults: Faults, call: str) -> None:
    with File(path, direct=False) as file:
        file.seek(1000)
        faults.fail(call, errno.EIO, times=1)
        with pytest.raises(ReadError, match=r"offset 1000.*EIO"):
            file.read(10)
        assert file.tell() == 1000
        assert file.read() == DATA[1000:]


# --- Interruptions, short reads, errors ---


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_row_86_interruptions_are_retried(
    path: Path, faults: Faults, direct: bool, error: int
) -> None:
    with File(path, direct=direct) as file:
        for call in ("pread_direct", "pread", "fread"):
            faults.fail(call, error, times=3)
        buffer = bytearray(SIZE)
        file.pread_into(buffer, 0)
        assert buffer == DATA
        if error == errno.EINTR:
            assert file.read() == DATA


def test_eagain_for_ever_is_an_error_and_no_hang(path: Path, faults: Faults) -> None:
    with File(path) as file:
        faults.fail("pread_direct", errno.EAGAIN)
        with pytest.raises(ReadError, match="EAGAIN"):
            file.pread_into(bytearray(10), 0)


@pytest.mark.parametrize("limit", [1, 100, 511, 512, 513, 4096, 4097, 65537])
@pytest.mark.parametrize("shift", [0, 3])
def test_row_80_short_reads_of_odd_sizes(
    path: Path, faults: Faults, limit: int, shift: int
) -> None:
    """The fault scrambles what a short read didn't deliver."""
    for direct in (True, False):
        with File(path, direct=direct) as file:
            for call in ("pread_direct", "pread", "fread"):
                faults.shorten(call, limit)
            n = min(50_000, 100 * limit)
            buffer = bytearray(n)
            file.pread_into(buffer, shift)
            assert buffer == DATA[shift : shift + n]
            file.seek(shift)
            assert file.read(n) == DATA[shift : shift + n]
            faults.clear()


@pytest.mark.parametrize("direct", [True, False])
def test_row_85_eio_names_path_and_offset(path: Path, faults: Faults, direct: bool) -> None:
    with File(path, direct=direct) as file:
        call = "pread_direct" if direct else "pread"
        faults.shorten(call, 8192, times=1)
        faults.fail(call, errno.EIO, nth=2)
        buffer = bytearray(SIZE)
        with pytest.raises(ReadError) as caught:
            file.pread_into(buffer, 0)
        assert faults.count(call) == 2, "no endless retry"
    error = caught.value
    assert type(error) is ReadError
    assert (error.errno, error.filename, error.offset) == (errno.EIO, str(path), 8192)
    assert error.access == ("direct" if direct else "buffered")


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_became_shorter(path: Path, direct: bool) -> None:
    with File(path, direct=direct) as file:
        with path.open("r+b") as out:
            out.truncate(100_000)
        buffer = bytearray(SIZE)
        for read in (lambda: file.pread_into(buffer, 0), file.read):
            with pytest.raises(ShortReadError) as caught:
                read()
            assert caught.value.offset == 100_000
        file.seek(0)
        assert file.read(100_000) == DATA[:100_000]


def test_a_file_that_grew_keeps_its_bounds(path: Path) -> None:
    with File(path) as file:
        with path.open("ab") as out:
            out.write(b"more")
        assert file.read() == DATA
        assert file.size == SIZE


def test_no_memory_for_a_bounce_buffer(path: Path, faults: Faults) -> None:
    with File(path) as file:
        faults.fail("alloc", errno.ENOMEM, times=1)
        with pytest.raises(ReadError, match="ENOMEM"):
            file.pread_into(bytearray(100), 1)
        file.pread_into(bytearray(100), 1)


def test_wrong_faults_are_refused(faults: Faults) -> None:
    with pytest.raises(_ffi.NativeError):
        _ffi.fault_add("pread", nth=0, error=errno.EIO)
    for _ in range(64):
        faults.fail("mmap", errno.ENOMEM)
    with pytest.raises(_ffi.NativeError, match="ENOSPC"):
        faults.fail("mmap", errno.ENOMEM)


fault = st.tuples(
    st.sampled_from(["pread_direct", "pread", "fread"]),
    st.integers(1, 6),
    st.sampled_from(
        [errno.EINTR, errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.EIO, -1, -511, -4096]
    ),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(fault, max_size=6), st.integers(0, 5000), st.booleans())
def test_any_sequence_of_faults_gives_the_bytes_or_the_error(
    path: Path, sequence: list[tuple[str, int, int]], offset: int, cursor: bool
) -> None:
    """A negative number is the length of a short read."""
    _ffi.fault_clear()
    with File(path) as file:
        for call, nth, what in sequence:
            _ffi.fault_add(call, nth=nth, times=1, error=max(what, 0), limit=max(-what, 0))
        try:
            if cursor:
                file.seek(offset)
                found = file.read()
            else:
                buffer = bytearray(SIZE - offset)
                file.pread_into(buffer, offset)
                found = bytes(buffer)
        except ReadError as error:
            # EIO anywhere; what only means "not directly" is an error of a buffered read.
            causes = {what for call, _, what in sequence if call != "pread_direct"}
            assert error.errno in causes | {errno.EIO}
            assert error.errno in {what for _, _, what in sequence}
        else:
            assert found == DATA[offset:]
        finally:
            _ffi.fault_clear()


# --- Loads ---


def test_a_load_that_falls_back_says_so(
    direct_folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    path = direct_folder / "m.gguf"
    expected = random_model(path, [200_000, 300_000])
    for error in FALLBACKS:
        with loader.open(path, access=("direct", "buffered")) as model:
            faults.shorten("pread_direct", 8192, times=1)
            faults.fail("pread_direct", error, nth=2)
            weights = model.load(method="sync")
            faults.clear()
            fallback = weights.report.files[0].fallback
            assert fallback is not None
            assert fallback.errno == error
            begin = model.tensors["t0"].offset // 512 * 512
            assert fallback.offset == begin + 8192
            assert {n: t.numpy().tobytes() for n, t in weights.items()} == {
                n: v.tobytes() for n, v in expected.items()
            }
            again = model.load(method="sync").report.files[0]
            assert again.access == ("direct" if error == errno.EFAULT else "buffered")
    assert len([r for r in caplog.records if "direct reads stopped" in r.message]) == len(FALLBACKS)


def test_every_load_that_a_fallback_meets_reports_it(direct_folder: Path, faults: Faults) -> None:
    """EINVAL is found by one of several loads; the others go on buffered and say so."""
    path = direct_folder / "m.gguf"
    expected = random_model(path, [4 << 20] * 3)["t2"].tobytes()
    with loader.open(path) as model, ThreadPoolExecutor(4) as pool:
        faults.fail("pread_direct", errno.EINVAL, nth=6)
        loads = [pool.submit(model.load, chunk_bytes=65536) for _ in range(4)]
        for weights in [load.result() for load in loads]:
            file, moved = weights.report.files[0], weights.report.bytes_buffered
            assert (file.fallback is not None) == (file.access == "direct" and moved > 0)
            assert file.access != "direct" or file.offset_alignment == 512
            assert weights["t2"].numpy().tobytes() == expected


def test_a_fallback_in_the_header_is_reported(
    direct_folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [1000])
    faults.fail("pread_direct", errno.EFAULT, nth=2, times=1)
    report = loader.load(path).report
    assert report.files[0].fallback == loader.Fallback(errno=errno.EFAULT, offset=0)
    assert report.files[0].access == "direct"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("access", [("direct",), ("direct", "mmap")])
def test_a_demand_is_not_met_by_odd_pieces(
    direct_folder: Path, faults: Faults, access: tuple[Access, ...]
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [200_000])
    with loader.open(path, access=access) as model:
        faults.shorten("pread_direct", 100)
        with pytest.raises(DirectIOError):
            model.load(method="sync")


@pytest.mark.parametrize("access", ["direct", "mmap", "buffered"])
@pytest.mark.parametrize("lost", [1, 100, 100_000])
def test_a_model_that_became_shorter(direct_folder: Path, access: Access, lost: int) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [300_001])
    with loader.open(path, access=access) as model:
        os.truncate(path, path.stat().st_size - 31 - lost)
        with pytest.raises(ShortReadError) as caught:
            model.load()
        assert caught.value.access == access
        assert caught.value.tensor == "t0"


@pytest.mark.parametrize("error", FALLBACKS)
def test_a_demand_raises_instead_of_falling_back(
    direct_folder: Path, faults: Faults, error: int
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [200_000, 300_000])
    with loader.open(path, access="direct") as model:
        faults.fail("pread_direct", error)
        with pytest.raises(DirectIOError, match="demanded") as caught:
            model.load(method="sync")
        assert caught.value.errno == error
        assert caught.value.tensor == "t0"


def test_row_85_eio_in_the_second_tensor_names_it(
    direct_folder: Path, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [8 << 20, 8 << 20])
    with loader.open(path) as model:
        faults.fail("pread_direct", errno.EIO, nth=4)
        with pytest.raises(ReadError, match="'t1'") as caught:
            model.load(method="sync")
        error = caught.value
        assert error.tensor == "t1"
        assert error.errno == errno.EIO
        assert error.filename == str(path)
        info = model.tensors["t1"]
        assert error.offset is not None
        assert info.offset <= error.offset < info.offset + (8 << 20)
    nothing_left()


def test_row_90_mmap_says_enodev(direct_folder: Path, faults: Faults) -> None:
    path = direct_folder / "m.gguf"
    expected = random_model(path, [1000])
    # The header's memory is the first mmap; the file's mapping comes after it.
    faults.fail("mmap", errno.ENODEV, nth=2, times=1)
    with loader.open(path, access=("mmap", "buffered")) as model:
        assert model.files[0].access == "buffered"
        assert "ENODEV" in model.files[0].reason
        assert model.load()["t0"].numpy().tobytes() == expected["t0"].tobytes()


def test_a_demanded_mapping_that_fails(
    direct_folder: Path, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [1000])
    faults.fail("mmap", errno.ENODEV, nth=2, times=1)
    with pytest.raises(MappingError, match="ENODEV") as caught:
        loader.open(path, access="mmap")
    assert caught.value.errno == errno.ENODEV
    nothing_left()


def test_a_demanded_direct_mode_that_is_refused(
    direct_folder: Path, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [1000])
    faults.fail("pread_direct", errno.EINVAL, times=1)
    with pytest.raises(DirectIOError, match="EINVAL") as caught:
        loader.open(path, access="direct")
    assert caught.value.errno == errno.EINVAL
    nothing_left()


def test_mapped_pages_that_cannot_be_read(direct_folder: Path, faults: Faults) -> None:
    path = direct_folder / "m.gguf"
    random_model(path, [1000, 8 << 20])
    with loader.open(path, access="mmap") as model:
        faults.fail("madvise", errno.EFAULT, nth=3)
        with pytest.raises(MappingError, match="mapped bytes") as caught:
            model.load(chunk_bytes=128 << 10, method="sync")
        assert caught.value.tensor == "t1"


def test_an_old_kernel_prefetches_without_waiting(direct_folder: Path, faults: Faults) -> None:
    path = direct_folder / "m.gguf"
    expected = random_model(path, [1000, 100_000])
    with loader.open(path, access="mmap") as model:
        for nth, names in ((1, None), (2, ["t0"])):
            faults.fail("madvise", errno.EINVAL, nth=nth, times=1)
            found = model.load(names=names)["t0"].numpy().tobytes()
            assert found == expected["t0"].tobytes()
            faults.clear()


@pytest.mark.parametrize("nth", range(1, 6))
def test_no_memory_anywhere_in_a_load(
    direct_folder: Path, faults: Faults, nothing_left: Callable[[], None], nth: int
) -> None:
    """The nth allocation or arena fails: a MemoryError or a ReadError, or nothing noticed it."""
    path = direct_folder / "m.gguf"
    random_model(path, [1000])
    for call in ("mmap", "alloc"):
        faults.fail(call, errno.ENOMEM, nth=nth, times=1)
        try:
            loader.load(path, access="buffered")
        except (MemoryError, ReadError) as error:
            assert "ENOMEM" in str(error) or "memory" in str(error)
        faults.clear()
        nothing_left()
