"""The pure parts: the choice of access, the plan of a read, options, memory figures, errors."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import loader
from loader import errors
from loader.device.host import available_memory
from loader.io.access import choose
from loader.io.ranges import Extent, align_up, chunks, lay_out, place
from loader.options import MODES, Access, parse_access, parse_size

# --- The choice ---


@given(
    st.permutations(MODES).flatmap(lambda m: st.integers(1, 3).map(lambda n: tuple(m[:n]))),
    st.sets(st.sampled_from(MODES)),
    st.none() | st.floats(0, 1),
)
def test_the_choice(
    requested: tuple[Access, ...], refused: set[Access], resident: float | None
) -> None:
    decision = choose(requested, {mode: f"no {mode}" for mode in refused}, resident=resident)
    left = [mode for mode in requested if mode not in refused]
    if not left:
        assert decision is None
        return
    assert decision is not None
    assert decision.requested == requested
    assert decision.access in left
    assert decision.reason
    cached = resident is not None and resident >= 0.9
    if cached and left[0] == "direct" and len(left) > 1:
        assert decision.access == left[1]
        assert "page cache" in decision.reason
    else:
        assert decision.access == left[0]
        for mode in requested[: requested.index(left[0])]:
            assert f"no {mode}" in decision.reason


def test_the_flags_of_llama_cpp() -> None:
    assert loader.access_from_flags(True, True) == ("direct", "mmap", "buffered")
    assert loader.access_from_flags(True, False) == ("mmap", "buffered")
    assert loader.access_from_flags(False, True) == ("direct", "buffered")
    assert loader.access_from_flags(False, False) == ("buffered",)


def test_direct_io_disables_mmap_only_where_mmap_was_welcome() -> None:
    both = choose(("direct", "mmap", "buffered"), {})
    assert both is not None
    assert both.reason == "direct I/O is enabled and available, so mmap is disabled"
    one = choose(("direct", "buffered"), {})
    assert one is not None
    assert "mmap" not in one.reason


def test_access_options() -> None:
    assert parse_access("auto") == MODES
    for n in (1, 2, 3):
        for modes in permutations(MODES, n):
            assert parse_access(modes) == parse_access(list(modes)) == modes
    for wrong in ((), "", "mmap,buffered", ("mmap", "mmap"), ("auto",), b"mmap", (1,)):
        with pytest.raises(ValueError, match="access"):
            parse_access(wrong)
    for kind in (None, 1, True):
        with pytest.raises(TypeError, match="access"):
            parse_access(kind)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("8MiB", 8 << 20), (" 64 kib ", 64 << 10), ("1GiB", 1 << 30),
     ("2TiB", 2 << 40), ("12B", 12)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5MiB", "8MB", "8 M", "0x10", "1e3", "٣"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


# --- The plan of a read ---


@st.composite
def files(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Ranges that don't overlap, in any order, and the size of their file."""
    gaps = st.sampled_from([0, 1, 32, 100, 4096, 60_000, 65_536, 100_000])
    position, ranges = draw(st.integers(0, 10_000)), []
    for _ in range(draw(st.integers(0, 12))):
        position += draw(gaps)
        length = draw(st.integers(0, 9000))
        ranges.append((position, length))
        position += length
    return draw(st.permutations(ranges)), position + draw(st.integers(0, 5000))


@given(
    files(),
    st.sampled_from([1, 512, 4096]),
    st.sampled_from([4096, 65536]),
    st.integers(0, 10_000),
)
def test_the_plan(
    file: tuple[list[tuple[int, int]], int], alignment: int, modulus: int, position: int
) -> None:
    ranges, file_size = file
    layout = lay_out(
        ranges, file_size=file_size, offset_alignment=alignment, modulus=modulus, position=position
    )
    for extent in layout.extents:
        assert extent.offset % alignment == 0
        assert extent.room % alignment == 0
        assert extent.position % modulus == extent.offset % modulus
        assert 0 < extent.length <= extent.room
        assert extent.end <= file_size
        assert extent.length == extent.room or extent.end == file_size
    for a, b in pairwise(layout.extents):
        assert a.offset + a.room < b.offset, "no block is read twice"
        assert a.position + a.room <= b.position, "no memory is used twice"
    if layout.extents:
        assert layout.extents[0].position >= position
        last = layout.extents[-1]
        assert layout.end == last.position + last.room
    for offset, length in ranges:
        if length:
            holding = [e for e in layout.extents if e.offset <= offset and offset + length <= e.end]
            assert len(holding) == 1
            where = place(layout.extents, offset)
            assert where - holding[0].position == offset - holding[0].offset
    read = sum(extent.length for extent in layout.extents)
    wanted = sum(length for _, length in ranges)
    assert read <= wanted + len(ranges) * (2 * alignment + (64 << 10))


@given(
    st.integers(0, 100).map(lambda k: k * 512),
    st.integers(1, 100_000),
    st.sampled_from([4096, 12288, 16384]),
)
def test_chunks(offset: int, length: int, chunk_bytes: int) -> None:
    extent = Extent(offset, length, align_up(length, 512), 0)
    pieces = list(chunks(extent, chunk_bytes))
    assert pieces[0][0] == offset
    assert sum(n for _, n in pieces) == length
    for (start, n), (after, _) in pairwise(pieces):
        assert start + n == after
        assert after % chunk_bytes == 0
    assert all(0 < n <= chunk_bytes for _, n in pieces)


# --- Memory figures ---


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\nHugePages_Total: 0\n"}


def test_available_memory_without_control_groups(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, MEMINFO)) == 1000 * 1024
    assert available_memory(tmp_path / "nothing") is None
    found = available_memory()
    assert found is None or found > 0


def test_available_memory_in_a_control_group(tmp_path: Path) -> None:
    """The tightest group on the way up counts: max - current + reclaimable."""
    group = "sys/fs/cgroup/a"
    files = MEMINFO | {
        "proc/self/cgroup": "odd\n0::/a/b\n",
        f"{group}/memory.max": "500000\n",
        f"{group}/memory.current": "400000\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 50000\n",
        f"{group}/b/memory.max": "max\n",
        f"{group}/b/memory.current": "400000\n",
    }
    assert available_memory(tree(tmp_path, files)) == 150_000
    tree(tmp_path, {f"{group}/memory.current": "900000"})
    assert available_memory(tmp_path) == 0


def test_available_memory_in_a_control_group_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a"
    files = MEMINFO | {
        "proc/self/cgroup": "4:cpu,cpuacct:/x\n5:memory:/a\n0::/\n",
        f"{group}/memory.limit_in_bytes": "500000\n",
        f"{group}/memory.usage_in_bytes": "100000\n",
        f"{group}/memory.stat": "total_inactive_file 1000\n",
    }
    assert available_memory(tree(tmp_path, files)) == 401_000


# --- Errors ---

EXAMPLES: list[errors.LoaderError] = [
    errors.LoaderError("m"),
    errors.FormatError("m", path="p", offset=3, field="f"),
    errors.TruncatedFileError("m", path="p"),
    errors.UnsupportedFormatError("m"),
    errors.TensorLayoutError("m"),
    errors.ShardError("m"),
    errors.ReadError("m", errno=5, filename="f", offset=1, length=2, access="direct", tensor="t"),
    errors.ShortReadError("m", errno=61),
    errors.DirectIOError("m", errno=22, filename="f"),
    errors.MappingError("m", errno=19),
    errors.TensorDataError("m", tensors=["a", "b"]),
    errors.DeviceError("m"),
    errors.DeviceUnavailableError("m"),
    errors.DeviceMemoryError("m", needed=1, available=2),
    errors.FitError("m"),
    errors.VerifyError("m"),
    errors.LoadCancelled("m"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: errors.LoaderError) -> None:
    def fields(e: errors.LoaderError) -> dict[str, object]:
        names = ("errno", "filename", "strerror")
        return e.__dict__ | {name: getattr(e, name) for name in names if hasattr(e, name)}

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for other in (
            pickle.loads(pickle.dumps(error, protocol)),  # noqa: S301 - our own
            copy.copy(error),
            copy.deepcopy(error),
        ):
            assert type(other) is type(error)
            assert str(other) == str(error) == "m"
            assert other.args == error.args
            assert fields(other) == fields(error)


def test_every_error_is_exported_and_has_its_bases() -> None:
    assert {type(error) for error in EXAMPLES} == {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.LoaderError)
    }
    for error in EXAMPLES:
        assert getattr(loader, type(error).__name__) is type(error)
    bases = {
        errors.FormatError: ValueError,
        errors.ReadError: OSError,
        errors.TensorDataError: ValueError,
        errors.DeviceMemoryError: MemoryError,
        errors.ShortReadError: errors.ReadError,
        errors.ShardError: errors.FormatError,
        errors.DeviceMemoryError: errors.DeviceError,
    }
    for kind, base in bases.items():
        assert issubclass(kind, base)
    assert os.strerror(5)
