"""Loads with many requests in flight: each method, each kind of memory, streams and parts."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import loader
from loader import _ffi
from loader.errors import DirectIOError, LoadCancelled, MappingError, ReadError, TensorDataError
from loader.options import Access, Method
from tests import build
from tests.build import array, fixed, info, key, pad, random_model
from tests.conftest import ACCESS, METHODS, Faults, content, mappings, memory, threads

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 8 << 20]


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return direct_folder / "m.gguf"


@pytest.fixture
def expected(path: Path) -> dict[str, bytes]:
    return {name: array_.tobytes() for name, array_ in random_model(path, SIZES).items()}


# --- Methods ---


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("depth", [1, 3, 64])
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_every_method_gives_the_same_bytes(
    path: Path,
    expected: dict[str, bytes],
    method: Method,
    access: Access,
    depth: int,
    chunk_bytes: int,
) -> None:
    weights = loader.load(
        path, access=access, method=method, depth=depth, chunk_bytes=chunk_bytes, check_tensors=True
    )
    assert content(weights) == expected
    report = weights.report
    if access != "mmap":
        under_way = 1 if method == "sync" else depth
        assert (report.method, report.depth, report.chunk_bytes) == (method, under_way, chunk_bytes)
    assert report.bytes_bounced == 0
    if access != "mmap":
        assert report.phases.requests >= report.bytes // chunk_bytes
    assert 0 < report.phases.mean_in_flight <= depth + 0.01
    assert 0 < report.phases.header <= report.phases.open


def test_a_method_that_cannot_be_had(
    path: Path, expected: dict[str, bytes], faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """A container's rules say EPERM: a demand is an error, "auto" takes threads."""
    faults.fail("uring_setup", errno.EPERM)
    with pytest.raises(ReadError, match=r"'io_uring' can't be had.*EPERM"):
        loader.load(path, method="io_uring")
    weights = loader.load(path)
    assert weights.report.method == "threads"
    assert content(weights) == expected
    faults.fail("thread_create", errno.EAGAIN)
    weights = loader.load(path)
    assert weights.report.method == "sync"
    assert content(weights) == expected
    nothing_left()


def test_methods_of_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model(path, [1000])
    for name, text, wrong in (
        ("METHOD", "threads", "fast"),
        ("DEPTH", "3", "0"),
        ("MEMORY_LIMIT", "64MiB", "64MB"),
    ):
        monkeypatch.setenv(f"GGUF_DIO_{name}", text)
        report = loader.load(path).report
        monkeypatch.setenv(f"GGUF_DIO_{name}", wrong)
        with pytest.raises(ValueError, match=f"GGUF_DIO_{name}"):
            loader.load(path)
        monkeypatch.setenv(f"GGUF_DIO_{name}", text)
    assert (report.method, report.depth) == ("threads", 3)
    assert loader.load(path, method="threads", depth=5).report.depth == 5


# --- Faults, whichever way a request goes ---


def fail_reads(faults: Faults, error: int, nth: int) -> None:
    """Of every kind: what io_uring reports, a worker tries again and meets it too."""
    for call in ("uring_result", "pread_direct"):
        faults.fail(call, error, nth=nth)


@pytest.mark.parametrize("error", [errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_parallel_load_falls_back(
    path: Path, expected: dict[str, bytes], method: Method, error: int, faults: Faults
) -> None:
    with loader.open(path, access=("direct", "buffered")) as model:
        fail_reads(faults, error, 5)
        weights = model.load(method=method, chunk_bytes=1 << 20)
        assert content(weights) == expected
        fallback = weights.report.files[0].fallback
        assert fallback is not None
        assert fallback.errno == error
        assert weights.report.bytes_buffered > 0
    faults.clear()
    with loader.open(path, access="direct") as model:
        fail_reads(faults, error, 5)
        with pytest.raises(DirectIOError):
            model.load(method=method, chunk_bytes=1 << 20)


def test_an_error_in_a_parallel_load_names_the_place_and_releases_everything(
    path: Path,
    expected: dict[str, bytes],
    method: Method,
    faults: Faults,
    nothing_left: Callable[[], None],
) -> None:
    assert expected
    gc.collect()
    running, before = threads(), memory()
    with loader.open(path) as model:
        fail_reads(faults, errno.EIO, 6)
        with pytest.raises(ReadError) as caught:
            model.load(method=method, chunk_bytes=1 << 20)
        error = caught.value
        assert (error.errno, error.filename) == (errno.EIO, str(path))
        assert error.tensor is not None
        found = model.tensors[error.tensor]
        assert error.offset is not None
        assert found.nbytes is not None
        assert error.offset < found.offset + found.nbytes
        assert error.offset >= found.offset - (1 << 20)
        assert memory() - before < 24 << 20
    nothing_left()
    # The kernel's own workers of a ring end a little after it.
    deadline = time.monotonic() + 10
    while threads() > running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= running


fault = st.tuples(
    st.sampled_from(["pread_direct", "pread", "uring_result", "uring_enter"]),
    st.integers(1, 12),
    st.sampled_from(
        [errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EFAULT, errno.EIO, -1, -511, -4096]
    ),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(fault, max_size=6))
def test_any_faults_give_the_bytes_or_the_error(
    path: Path, expected: dict[str, bytes], method: Method, sequence: list[tuple[str, int, int]]
) -> None:
    _ffi.fault_clear()
    with loader.open(path, access=("direct", "buffered")) as model:
        for call, nth, what in sequence:
            _ffi.fault_add(call, nth=nth, times=1, error=max(what, 0), limit=max(-what, 0))
        try:
            found = content(model.load(method=method, chunk_bytes=1 << 20))
        except ReadError as error:
            # A ring whose first call fails can't be had; else only what no retry helps.
            possible = {what for call, _, what in sequence if call == "uring_enter"}
            possible |= {errno.EIO, errno.EINVAL, errno.EFAULT}
            assert error.errno in possible & {what for _, _, what in sequence}
        else:
            assert found == expected
        finally:
            _ffi.fault_clear()


@pytest.mark.parametrize("access", ACCESS)
def test_a_cancelled_load_releases_everything(
    path: Path,
    expected: dict[str, bytes],
    method: Method,
    access: Access,
    nothing_left: Callable[[], None],
) -> None:
    for stop in range(0, 10, 3):
        calls = 0

        def progress(*_: int, stop: int = stop) -> bool:
            nonlocal calls
            calls += 1
            return calls <= stop

        with loader.open(path, access=access) as model:
            try:
                weights = model.load(method=method, chunk_bytes=4096, progress=progress)
            except LoadCancelled:
                pass
            else:
                assert content(weights) == expected
                del weights
    nothing_left()
    assert mappings(path) == 0


def test_populating_that_fails_is_no_harm(direct_folder: Path, faults: Faults) -> None:
    path = direct_folder / "m.gguf"
    expected = random_model(path, [40 << 20])
    for error in (errno.EINVAL, errno.EFAULT, errno.ENOMEM):
        with loader.open(path, access="direct") as model:
            faults.fail("madvise", error, nth=2)
            assert content(model.load())["t0"] == expected["t0"].tobytes()
            faults.clear()


# --- Memory of the caller's ---


@pytest.mark.parametrize("access", ACCESS)
def test_buffers_made_by_the_model_are_read_to_straight(
    path: Path, expected: dict[str, bytes], method: Method, access: Access
) -> None:
    with loader.open(path, access=access) as model:
        buffers = model.empty()
        assert {name: array_.nbytes for name, array_ in buffers.items()} == {
            name: len(data) for name, data in expected.items()
        }
        weights = model.load(into=buffers, method=method)
        assert content(weights) == expected
        for name, array_ in buffers.items():
            assert array_.tobytes() == expected[name]
            assert not array_.size or (weights[name].numpy().ctypes.data == array_.ctypes.data)
        if access == "direct":
            assert weights.report.bytes_bounced == 0
        some = model.load(into=model.empty(["t0", "t4"]), names=["t0", "t4"], method=method)
        assert content(some) == {name: expected[name] for name in ("t0", "t4")}


@pytest.mark.parametrize("access", [*ACCESS, "auto"])
def test_buffers_of_any_kind(
    path: Path, expected: dict[str, bytes], method: Method, access: Any
) -> None:
    buffers: dict[str, Any] = {
        "t0": bytearray(SIZES[0]),
        "t1": memoryview(bytearray(SIZES[1])),
        "t3": np.empty(0, np.int8),
        "t4": np.empty((1000, 5000), np.int8),
        "t6": np.empty(SIZES[6] + 1, np.uint8)[1:],
    }
    with loader.open(path, access=access) as model:
        weights = model.load(into=buffers, method=method, chunk_bytes=1 << 20)
        assert content(weights) == expected
        for name, buffer in buffers.items():
            assert bytes(buffer) == expected[name]
            assert weights[name].numpy().flags.writeable
        report = weights.report
        if access in ("direct", "auto"):
            assert 0 < report.bytes_bounced <= sum(SIZES)
            assert report.files[0].access == "direct"


def test_auto_rather_reads_buffered_than_copies_from_a_mapping(
    path: Path, expected: dict[str, bytes], faults: Faults
) -> None:
    faults.fail("pread_direct", errno.EINVAL)
    with loader.open(path) as model:
        assert model.files[0].access == "mmap"
        weights = model.load(into={"t0": bytearray(SIZES[0])})
        assert weights.report.files[0].access == "buffered"
        assert content(weights) == expected


def test_wrong_destinations_are_refused_before_anything_is_read(
    path: Path, expected: dict[str, bytes], faults: Faults
) -> None:
    assert expected
    shared = bytearray(8192)
    wrong: list[tuple[object, str]] = [
        ({"nope": bytearray(1)}, "'nope' is not loaded"),
        ({"t1": bytearray(510)}, "'t1' has 511 bytes, its buffer 510"),
        ({"t1": bytes(511)}, "'t1'.*read"),
        ({"t2": np.zeros((64, 128), np.int8)[:, ::2]}, "'t2'.*contiguous"),
        (
            {"t2": memoryview(shared)[:4096], "t1": memoryview(shared)[4095:4606]},
            "'t2' and 't1' overlap",
        ),
    ]
    with loader.open(path) as model:
        for call in ("pread_direct", "pread", "uring_result"):
            faults.fail(call, errno.EIO)
        for into, what in wrong:
            with pytest.raises(ValueError, match=what):
                model.load(into=into)
        with pytest.raises(ValueError, match="'t2' is not loaded"):
            model.load(into={"t2": bytearray(4096)}, names=["t1"])
        for strange in (3, [1], "t0", {"t1": 3}):
            with pytest.raises(TypeError):
                model.load(into=strange)


@pytest.mark.parametrize("access", ["direct", "buffered"])
def test_the_memory_of_an_earlier_load_is_used_again(
    path: Path, expected: dict[str, bytes], method: Method, access: Access, direct_folder: Path
) -> None:
    other = direct_folder / "other.gguf"
    second = random_model(other, SIZES[::-1][:4], seed=7)
    with loader.open(path, access=access) as model, loader.open(other, access=access) as swapped:
        first = model.load(method=method)
        address = first["t0"].numpy().ctypes.data
        assert first.arena is not None
        again = swapped.load(into=first, method=method)
        assert content(again) == {name: array_.tobytes() for name, array_ in second.items()}
        back = model.load(into=again, method=method)
        assert back["t0"].numpy().ctypes.data == address
        assert content(back) == expected
        assert back.arena is again.arena is first.arena
        small = swapped.load(names=["t3"])
        with pytest.raises(ValueError, match="bytes are needed"):
            model.load(into=small)
        with loader.open(path, access="mmap") as mapping:
            copied = mapping.load(into=back, method=method)
            assert content(copied) == expected
            place = copied["t0"].numpy().ctypes.data - first.arena.address
            assert 0 <= place < first.arena.nbytes
            assert copied["t0"].numpy().flags.writeable
            assert copied.arena is first.arena
        mapped = loader.load(path, access="mmap")
        with pytest.raises(ValueError, match="mapped"):
            model.load(into=mapped)
        back.close()
        with pytest.raises(ValueError, match="closed"):
            model.load(into=back)


# --- Streams and parts ---


@pytest.mark.parametrize("access", ACCESS)
def test_a_stream_gives_every_tensor(
    path: Path, expected: dict[str, bytes], method: Method, access: Access
) -> None:
    with loader.open(path, access=access) as model:
        found = {
            name: tensor.numpy().tobytes()
            for name, tensor in model.stream(
                method=method, memory_limit=1 << 20, check_tensors=True
            )
        }
        assert found == expected
        some = dict(model.stream(names=["t4", "t1"], method=method))
        assert set(some) == {"t4", "t1"}
    kept = some["t4"].numpy()
    del some
    assert kept.tobytes() == expected["t4"]


def test_a_stream_keeps_only_what_is_held(direct_folder: Path) -> None:
    """512 MiB go by in 32 MiB; what is held stays valid."""
    path = direct_folder / "m.gguf"
    size, n = 8 << 20, 64
    tensors = {f"t{i}": np.full(size, i, np.int8) for i in range(n)}
    build.model(path, tensors)
    del tensors
    gc.collect()
    before, most, held = memory(), 0, {}
    with loader.open(path) as model:
        for name, tensor in model.stream(memory_limit=32 << 20):
            most = max(most, memory() - before)
            if name == "t5":
                held[name] = tensor
    assert most < 120 << 20
    assert (held["t5"].numpy() == 5).all()


def test_leaving_a_stream_early_ends_what_is_under_way(
    path: Path, expected: dict[str, bytes], method: Method, nothing_left: Callable[[], None]
) -> None:
    assert expected
    gc.collect()
    before = memory()
    with loader.open(path) as model:
        for name, _ in model.stream(method=method, chunk_bytes=4096):
            assert name
            break
        stream = model.stream(method=method)
        next(stream)
    del stream, _
    gc.collect()
    nothing_left()
    assert memory() - before < 24 << 20


def test_a_stream_of_invalid_data_and_of_errors(direct_folder: Path, faults: Faults) -> None:
    values = {f"t{i}": np.ones(1000, np.float32) for i in range(3)}
    values["t1"][7] = np.nan
    path = build.model(direct_folder / "m.gguf", values)
    with loader.open(path) as model:
        stream = model.stream(check_tensors=True)
        with pytest.raises(TensorDataError, match="'t1'"):
            list(stream)
        fail_reads(faults, errno.EIO, 1)
        with pytest.raises(ReadError, match="EIO"):
            list(model.stream())
        options: list[dict[str, Any]] = [{"into": {}}, {"mlock": True}, {"no_alloc": True}]
        for option in options:
            with pytest.raises(TypeError, match=next(iter(option))):
                model.stream(**option)
        with pytest.raises(ValueError, match="nope"):
            model.stream(names=["nope"])
    with pytest.raises(ValueError, match="closed"):
        model.stream()


@pytest.mark.parametrize("access", ACCESS)
def test_rows(direct_folder: Path, access: Access, method: Method) -> None:
    experts = np.random.default_rng(0).standard_normal((8, 30, 64), np.float32)
    path = build.model(direct_folder / "m.gguf", {"exps": experts, "flat": experts[0, 0]})
    with loader.open(path, access=access) as model:
        part = model.read_rows("exps", 2, 5, method=method)
        assert part.info.shape == (3, 30, 64)
        assert np.array_equal(part.numpy(), experts[2:5])
        assert np.array_equal(part.dequantize(), experts[2:5])
        assert model.read_rows("exps", 8, 8).numpy().shape == (0, 30, 64)
        assert np.array_equal(model.read_rows("flat", 3, 4).numpy(), experts[0, 0, 3:4])
        for start, stop in ((-1, 2), (3, 2), (0, 9)):
            with pytest.raises(ValueError, match="not inside"):
                model.read_rows("exps", start, stop)
        with pytest.raises(ValueError, match="nope"):
            model.read_rows("nope", 0, 1)
        with pytest.raises(TypeError, match="one name"):
            model.read_rows("exps", 0, 1, names=["flat"])


def test_rows_read_only_what_is_asked_for(direct_folder: Path, faults: Faults) -> None:
    path = build.model(direct_folder / "m.gguf", {"t": np.arange(1 << 20, dtype=np.int64)})
    with loader.open(path, access="direct") as model:
        faults.fail("mlock", errno.EPERM)
        model.read_rows("t", 1000, 2000, method="sync")
        assert faults.count("pread_direct") == 1


def test_rows_of_block_types_are_whole_blocks(tmp_path: Path) -> None:
    data = bytes(range(34)) * 8
    head = pad(fixed(3, 3, 0) + info("flat", [256], 8, 0) + info("two", [128, 2], 8, 288)
               + info("scalar", [], 0, 576))  # fmt: skip
    path = build.write(tmp_path / "m.gguf", head + data + bytes(16) + data + bytes(16) + bytes(4))
    with loader.open(path) as model:
        assert model.read_rows("two", 1, 2).numpy().tobytes() == data[136:]
        assert model.read_rows("flat", 32, 96).numpy().tobytes() == data[34:102]
        with pytest.raises(ValueError, match="whole blocks of 32"):
            model.read_rows("flat", 1, 33)
        with pytest.raises(ValueError, match="scalar"):
            model.read_rows("scalar", 0, 1)


# --- What it costs ---


def test_signals_are_noticed_while_reads_are_under_way(direct_folder: Path) -> None:
    """A storm of signals wakes the interpreter from its queue, and changes nothing."""
    import signal

    path = direct_folder / "m.gguf"
    expected = {"t0": random_model(path, [64 << 20])["t0"].tobytes()}
    seen: list[float] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for method in METHODS:
            weights = loader.load(path, method=method)
            assert len(weights) == 1
            assert content(weights) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert len(seen) > 5


def test_mappings_that_fail_in_parallel(path: Path, expected: dict[str, bytes], method: Method,
                                        faults: Faults) -> None:  # fmt: skip
    assert expected
    with loader.open(path, access="mmap") as model:
        faults.fail("madvise", errno.EFAULT, nth=2)
        with pytest.raises(MappingError):
            model.load(method=method, chunk_bytes=128 << 10)


def test_a_list_of_strings_costs_nothing_to_load(tmp_path: Path) -> None:
    keys = key("k", build.ARRAY, array(build.STRING, ["a"] * 10))
    path = build.write(tmp_path / "m.gguf", fixed(3, 0, 1) + keys)
    buffers: dict[str, npt.NDArray[Any]] = {}
    with loader.open(path) as model:
        assert len(model.empty()) == 0
        assert len(model.load(into=buffers)) == 0
        assert list(model.stream()) == []


@pytest.mark.parametrize("access", ACCESS)
def test_many_small_tensors_cost_no_more_each(tmp_path: Path, access: Access) -> None:
    """Four times the tensors take about four times the processor time, not sixteen."""
    seconds = []
    for count in (1500, 6000):
        records = b"".join(info(f"{i:x}", [8], 0, i * 32) for i in range(count))
        path = tmp_path / "m.gguf"
        path.write_bytes(pad(fixed(3, count, 0) + records) + bytes(32 * count))
        with loader.open(path, access=access) as model:
            into = {name: np.empty(8, np.float32) for name in model.tensors}
            before = time.process_time()
            model.load(into=into)
            seconds.append(time.process_time() - before)
    assert seconds[1] < 9 * seconds[0] + 0.2


def test_row_93_a_mapping_is_copied_in_large_pieces(path: Path, faults: Faults) -> None:
    """Memory of the caller's, and mmap demanded: as many pieces as chunks, not as pages."""
    expected = random_model(path, [8 << 20])["t0"].tobytes()
    buffer = bytearray(8 << 20)
    with loader.open(path, access="mmap") as model:
        faults.fail("mlock", errno.EPERM)  # begins the counting
        report = model.load(into={"t0": buffer}, chunk_bytes=4 << 20).report
        assert faults.count("madvise") <= 2 * 3, "two calls for each chunk"
    assert buffer == expected
    assert report.bytes_mapped >= len(expected)


def test_row_97_a_small_limit_for_locked_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As nobody, since root may lock what it wants: one warning, and the load goes on."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    random_model(path, [1 << 20])
    with loader.open(path) as model:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                weights = model.load(mlock=True)
                said = [r.getMessage() for r in caplog.records]
                one = len(said) == 1 and "4096 bytes" in said[0] and "ulimit -l" in said[0]
                status = 0 if one and len(weights) == 1 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_row_107_eight_processes_on_one_file(path: Path, expected: dict[str, bytes]) -> None:
    code = (
        "import hashlib, loader, sys; w = loader.load(sys.argv[1]);"
        "print(hashlib.sha256(b''.join(t.numpy().tobytes() for t in w.values())).hexdigest())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    digest = hashlib.sha256(b"".join(expected.values())).hexdigest()
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert out.strip() == digest


def test_a_stream_reads_nothing_to_memory_that_is_gone(direct_folder: Path, method: Method) -> None:
    """Gaps that are read over, in chunks of their own: no chunk is left when a batch is ready."""
    path = direct_folder / "m.gguf"
    expected = random_model(path, [100, 48 << 10] * 60)
    with loader.open(path, access="direct") as model:
        names = [name for name in expected if int(name[1:]) % 2 == 0]
        for name, tensor in model.stream(
            names=names, method=method, chunk_bytes=4096, depth=64, memory_limit=1 << 20
        ):
            assert tensor.numpy().tobytes() == expected[name].tobytes()
            del tensor


def test_many_checks_and_one_read_at_once(direct_folder: Path, method: Method) -> None:
    sizes = [1000] * 40 + [80 << 20]
    path = direct_folder / "m.gguf"
    expected = random_model(path, sizes)
    weights = loader.load(path, method=method, depth=1, check_tensors=True)
    assert weights["t40"].numpy().tobytes() == expected["t40"].tobytes()


def test_a_fork_during_a_stream_harms_neither(
    path: Path, expected: dict[str, bytes], method: Method
) -> None:
    with loader.open(path) as model:
        stream = model.stream(method=method, chunk_bytes=64 << 10, memory_limit=1 << 20)
        name, tensor = next(stream)
        found = {name: tensor.numpy().tobytes()}
        child = os.fork()
        if child == 0:
            status = 1
            try:
                next(stream)
            except ReadError as error:
                status = 0 if error.errno == errno.ECHILD or method == "sync" else 2
            finally:
                del stream
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found |= {name: tensor.numpy().tobytes() for name, tensor in stream}
    assert found == expected


def test_rows_to_memory_of_the_callers(direct_folder: Path) -> None:
    values = np.arange(6000, dtype=np.float32).reshape(60, 100)
    path = build.model(direct_folder / "m.gguf", {"t": values})
    with loader.open(path) as model:
        buffer = np.empty((3, 100), np.float32)
        part = model.read_rows("t", np.int32(5), np.uint16(8), into={"t": buffer})
        assert np.array_equal(buffer, values[5:8])
        assert part.info.shape == (3, 100)
        assert type(part.info.shape[0]) is int
        with pytest.raises(ValueError, match="1200 bytes, its buffer 24000"):
            model.read_rows("t", 5, 8, into=model.empty())
        with pytest.raises(TypeError, match="no_alloc"):
            model.read_rows("t", 5, 8, no_alloc=True)
        with pytest.raises(TypeError):
            model.read_rows("t", 1.5, 3)  # type: ignore[arg-type]  # that is the test


def test_a_queue_that_fails_is_a_read_error(path: Path, faults: Faults) -> None:
    random_model(path, [1000])
    with loader.open(path) as model:
        faults.fail("poll", errno.ENOMEM)
        with pytest.raises(ReadError, match=r"queue.*ENOMEM"):
            model.load(method="threads")
