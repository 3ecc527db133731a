"""What is in the page cache: found out in three ways, left alone by direct loads, used again."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import loader
from loader.io import File
from loader.options import Access
from tests.build import random_model
from tests.conftest import Faults, direct_io_works

SIZES = [4 << 20, 8 << 20, 1000]


@pytest.fixture
def path() -> Iterator[Path]:
    """A model in a folder that others can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if not direct_io_works(folder):
        shutil.rmtree(folder)
        pytest.skip(f"no direct I/O in {folder}; set TMPDIR to a disk that has it")
    random_model(folder / "m.gguf", SIZES)
    yield folder / "m.gguf"
    shutil.rmtree(folder)


def evict(path: Path) -> None:
    """Drops the file from the page cache, or skips the test where that can't be done."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path) > 0.02:
        pytest.skip("the page cache can't be emptied here")


def resident(path: Path) -> float:
    with File(path) as file:
        found = file.resident_fraction()
    assert found is not None
    return found


WAYS = {"cachestat": [], "mincore": ["cachestat"], "sample": ["cachestat", "mincore"]}


@pytest.mark.parametrize("way", WAYS)
def test_residency_is_found_out(path: Path, faults: Faults, way: str) -> None:
    evict(path)
    for call in WAYS[way]:
        faults.fail(call, errno.ENOSYS)
    # The kernel may read ahead a little for a sample.
    assert resident(path) < 0.75 if way == "sample" else resident(path) == 0
    size = path.stat().st_size
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        file.read(size // 2)
    assert way == "sample" or 0.4 < resident(path) < 0.8
    path.read_bytes()
    assert resident(path) > 0.98


def test_residency_that_cannot_be_found_out(path: Path, faults: Faults) -> None:
    for call in ("cachestat", "mincore", "pread_nowait"):
        faults.fail(call, errno.EOPNOTSUPP)
    with File(path) as file:
        assert file.resident_fraction() is None
    path.read_bytes()
    with loader.open(path, page_cache="reuse") as model:
        assert model.files[0].access == "direct", "unknown counts as not resident"


def test_reuse_takes_a_warm_file_from_the_cache(path: Path) -> None:
    path.read_bytes()
    with loader.open(path, page_cache="reuse") as model:
        assert model.files[0].access == "mmap"
        assert "page cache" in model.files[0].reason
    with loader.open(path, page_cache="reuse", access=("direct", "buffered")) as model:
        assert model.files[0].access == "buffered"
    with loader.open(path, page_cache="reuse", access="direct") as model:
        assert model.files[0].access == "direct", "a demand beats it"
    with loader.open(path) as model:
        assert model.files[0].access == "direct"
    assert loader.load(path, page_cache="reuse").report.files[0].access == "mmap"
    evict(path)
    with loader.open(path, page_cache="reuse") as model:
        assert model.files[0].access == "direct"
    with pytest.raises(ValueError, match="page_cache"):
        loader.open(path, page_cache="use")  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("ways", [[], ["cachestat"], ["cachestat", "mincore"]])
def test_row_126_a_cold_file_of_somebody_else(path: Path, faults: Faults, ways: list[str]) -> None:
    """As nobody, to whom mincore says that everything is resident."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    evict(path)
    for call in ways:
        faults.fail(call, errno.EPERM)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with loader.open(path, page_cache="reuse") as model:
                status = 0 if model.files[0].access == "direct" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("warm", [False, True])
def test_row_95_a_direct_load_leaves_the_page_cache_alone(path: Path, warm: bool) -> None:
    evict(path)
    if warm:
        path.read_bytes()
    before = resident(path)
    with loader.open(path, access="direct") as model:
        assert resident(path) == before, "the header too"
        model.load()
        list(model.stream())
        model.read_rows("t0", 5, 1000)
    assert resident(path) == before


def test_mapped_loads_prefetch_only_what_is_wanted(path: Path) -> None:
    evict(path)
    wanted: Access = "mmap"
    with loader.open(path, access=wanted) as model:
        model.load(names=["t2"])
    assert resident(path) < 0.1
