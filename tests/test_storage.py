"""Storage that fails and files that change while a model is loaded: the right bytes or the right
error, never anything else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

import loader
from loader import _ffi
from loader.errors import DirectIOError, LoaderError, MappingError, ReadError, ShortReadError
from loader.model import Model
from loader.options import Access, Method
from tests.build import random_model, random_tensors, split_model
from tests.conftest import ACCESS, Faults, content

SIZE = 150_001
CHUNK = 16 << 10


# --- Any sequence of faults ---

# Negative numbers are lengths of short reads; all that can come in the middle of a chunk.
TRANSIENT = [errno.EINTR, errno.EAGAIN, -1, -511, -512, -4096, -5000]
REFUSALS = [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP]
CALLS = ["pread_direct", "pread", "uring_result", "uring_enter", "madvise"]
fault = st.tuples(
    st.sampled_from(CALLS),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([*TRANSIENT, *REFUSALS, errno.EIO]),
)
Fault = tuple[str, int, int, int]


def load_whole(model: Model, method: Method) -> dict[str, bytes]:
    return content(model.load(method=method, chunk_bytes=CHUNK, depth=3))


def load_into(model: Model, method: Method) -> dict[str, bytes]:
    """To memory that reads don't fit to: all of it is bounced."""
    names = list(model.tensors)
    memory = {name: bytearray(b"\xaa" * (model.tensors[name].nbytes or 0)) for name in names}
    model.load(method=method, chunk_bytes=CHUNK, into=memory)
    return {name: bytes(data) for name, data in memory.items()}


def stream(model: Model, method: Method) -> dict[str, bytes]:
    tensors = model.stream(method=method, chunk_bytes=CHUNK, memory_limit=1 << 20)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors}


def read_rows(model: Model, method: Method) -> dict[str, bytes]:
    found = {}
    for name, info in model.tensors.items():
        middle = info.shape[0] // 3
        parts = [(0, middle), (middle, info.shape[0])]
        found[name] = b"".join(
            model.read_rows(name, *part, method=method, chunk_bytes=CHUNK).numpy().tobytes()
            for part in parts
        )
    return found


WAYS = [load_whole, load_into, stream, read_rows]


def is_right(error: LoaderError, access: tuple[Access, ...], sequence: list[Fault]) -> bool:
    """Whether an error is one that the faults justify."""
    codes = {what for *_, what in sequence if what > 0}
    if "buffered" not in access and any(what < 0 and what % 512 for *_, what in sequence):
        codes.add(errno.EOPNOTSUPP)  # odd pieces can't be had directly
    if not isinstance(error, ReadError) or error.errno not in codes:
        return False
    if error.errno == errno.EIO:
        return True
    if isinstance(error, DirectIOError):  # only where there was no other way
        return error.errno in REFUSALS and "buffered" not in access
    if isinstance(error, MappingError):  # whatever madvise says that isn't a matter of time
        return "mmap" in access
    # A refusal of a buffered read is an error, and one by a ring's own call.
    refused = {what for call, _, _, what in sequence if call in ("pread", "uring_enter")}
    return error.errno in refused


@pytest.mark.parametrize("access", [("direct", "buffered"), ("direct",), ("buffered",), ("mmap",)])
def test_any_faults_give_the_right_bytes_or_the_right_error(
    direct_folder: Path,
    method: Method,
    access: tuple[Access, ...],
    nothing_left: Callable[[], None],
) -> None:
    """A set of three files, read in every way."""
    expected = {n: v.tobytes() for n, v in random_tensors(3, SIZE).items()}
    files = split_model(direct_folder, random_tensors(3, SIZE))
    outcomes = {"bytes": 0, "error": 0}

    @settings(max_examples=60, deadline=None)
    @example([(call, 2, 9, errno.EIO) for call in CALLS], load_whole)
    @given(st.lists(fault, max_size=6), st.sampled_from(WAYS))
    def check(sequence: list[Fault], way: Callable[[Model, Method], dict[str, bytes]]) -> None:
        _ffi.fault_clear()
        with loader.open(files[0], access=access) as model:
            for call, nth, times, what in sequence:
                _ffi.fault_add(call, nth=nth, times=times, error=max(what, 0), limit=max(-what, 0))
            try:
                found = way(model, method)
            except LoaderError as error:
                assert is_right(error, access, sequence), (error, sequence)
                outcomes["error"] += 1
            else:
                assert found == expected
                outcomes["bytes"] += 1
            finally:
                _ffi.fault_clear()

    check()
    assert outcomes["bytes"] > 10
    assert outcomes["error"] > 0
    nothing_left()


# --- Files that change during a load ---


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x" * 100_000)


def replace(path: Path) -> None:
    """By a file of the same size with other bytes, as a download does."""
    other = path.with_suffix(".new")
    random_model(other, [SIZE] * 20, seed=9)
    other.replace(path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("change", [truncate, grow, replace, remove])
def test_a_file_that_changes_during_a_load(
    direct_folder: Path,
    method: Method,
    access: Access,
    change: Callable[[Path], None],
    nothing_left: Callable[[], None],
) -> None:
    """The size is that at open and the file is that at open, whatever its name leads to now."""
    path = direct_folder / "m.gguf"
    expected = {n: v.tobytes() for n, v in random_model(path, [SIZE] * 20).items()}
    changed = False

    def progress(*_: int) -> None:
        nonlocal changed
        if not changed:
            changed = True
            change(path)

    with loader.open(path, access=access) as model:
        if change is truncate:
            with pytest.raises(ShortReadError) as caught:
                model.load(method=method, chunk_bytes=CHUNK, progress=progress)
            assert caught.value.access == access
            assert caught.value.tensor is not None
        else:
            weights = model.load(method=method, chunk_bytes=CHUNK, progress=progress)
            assert content(weights) == expected
            assert content(model.load(method=method)) == expected
            del weights
    assert changed
    nothing_left()


@pytest.mark.parametrize("access", ["direct", "buffered"])
def test_a_file_that_is_truncated_during_a_stream(
    direct_folder: Path, method: Method, access: Access
) -> None:
    path = direct_folder / "m.gguf"
    expected = {n: v.tobytes() for n, v in random_model(path, [SIZE] * 20).items()}
    found: dict[str, bytes] = {}

    def take(tensors: Iterable[tuple[str, loader.Tensor]]) -> None:
        for name, tensor in tensors:
            found[name] = tensor.numpy().tobytes()
            if len(found) == 4:
                os.truncate(path, path.stat().st_size // 4)

    with loader.open(path, access=access) as model, pytest.raises(ShortReadError):
        take(model.stream(method=method, chunk_bytes=CHUNK, memory_limit=1 << 20))
    assert 4 <= len(found) < 20
    assert found.items() <= expected.items()


CHILD = """
import os, sys, loader
access, path = sys.argv[1:]
with loader.open(path, access=access) as model:
    weights = model.load() if access == "mmap" else None
    os.truncate(path, os.path.getsize(path) // 2)
    try:
        weights = weights or model.load()
        print(sum(int(tensor.numpy().sum()) for tensor in weights.values()))
    except loader.ShortReadError as error:
        print(error)
"""


@pytest.mark.parametrize("access", ACCESS)
def test_sigbus_is_of_mappings_only(direct_folder: Path, access: Access) -> None:
    """Mapped tensors of a truncated file can't be read any more: the system ends the process, as
    SECURITY.md says. Memory that is read to has no such risk: the load raises."""
    path = direct_folder / "m.gguf"
    random_model(path, [SIZE] * 20)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, access, path],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if access == "mmap":
        assert done.returncode == -signal.SIGBUS
    else:
        assert done.returncode == 0, done.stderr
        assert "the file ends at offset" in done.stdout
        assert "is something writing to it?" in done.stdout


def test_an_error_of_one_shard_names_it(direct_folder: Path, faults: Faults) -> None:
    files = split_model(direct_folder, random_tensors(3, SIZE))
    with loader.open(files[0]) as model:
        truncate(files[1])
        with pytest.raises(ShortReadError) as caught:
            model.load()
        assert (caught.value.filename, caught.value.tensor) == (str(files[1]), "t1")
        assert set(model.load(names=["t0", "t2"])) == {"t0", "t2"}
    faults.clear()
