"""Many at once: threads, processes, forks, cancelled loads, and the end of the interpreter."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import loader
from loader.errors import LoadCancelled, ReadError
from loader.io.queue import open_queue
from loader.model import Model
from loader.options import Access, Method
from tests.build import random_model, random_tensors, split_model
from tests.conftest import ACCESS, METHODS, Faults, mappings, memory, threads

SIZE = 400_001
CHUNK = 32 << 10


@pytest.fixture
def expected() -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in random_tensors(6, SIZE).items()}


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return split_model(direct_folder, random_tensors(6, SIZE), split_max_tensors=2)[0]


def wait_for(condition: Callable[[], bool]) -> bool:
    """The kernel's own workers of a ring end a little after it."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def do_something(model: Model, method: Method, seed: int) -> dict[str, bytes]:
    """A load of some kind of some tensors; those that it finished."""
    random = Random(seed)
    names = random.sample(sorted(model.tensors), random.randint(1, 6))
    kind = random.randrange(5)
    if kind == 0:
        weights = model.load(names=names, method=method, chunk_bytes=CHUNK, check_tensors=True)
        return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
    if kind == 1:
        tensors = model.stream(names=names, method=method, chunk_bytes=CHUNK, memory_limit=1 << 20)
        found = {}
        for name, tensor in tensors:
            found[name] = tensor.numpy().tobytes()
            if random.random() < 0.2:
                tensors.close()  # type: ignore[attr-defined]  # a generator
                break
        return found
    if kind == 2:
        rows = {n: model.read_rows(n, 0, model.tensors[n].shape[0], method=method) for n in names}
        return {name: tensor.numpy().tobytes() for name, tensor in rows.items()}
    if kind == 3:
        buffers = model.empty(names)
        model.load(names=names, into=buffers, method=method)
        return {name: array.tobytes() for name, array in buffers.items()}
    calls = random.randrange(30)

    def progress(*_: int) -> bool:
        nonlocal calls
        calls -= 1
        return calls > 0

    try:
        weights = model.load(names=names, method=method, chunk_bytes=4096, progress=progress)
    except LoadCancelled:
        return {}
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.mark.parametrize("access", ACCESS)
def test_row_107_eight_threads_do_everything_on_one_model(
    path: Path,
    expected: dict[str, bytes],
    method: Method,
    access: Access,
    nothing_left: Callable[[], None],
) -> None:
    before = threads()
    with loader.open(path, access=access) as model, ThreadPoolExecutor(8) as pool:
        work = [pool.submit(do_something, model, method, seed) for seed in range(80)]
        for found in (future.result() for future in work):
            for name, data in found.items():
                assert data == expected[name]
    nothing_left()
    assert wait_for(lambda: threads() <= before)


def test_row_107_eight_processes_that_were_forked(path: Path, expected: dict[str, bytes]) -> None:
    """From a process that has the model open and loads from it meanwhile."""
    with loader.open(path) as model, ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(do_something, model, "threads", seed) for seed in range(20)]
        children = []
        for number in range(8):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    method = METHODS[number % 3]
                    weights = model.load(method="auto" if method == "io_uring" else method)
                    found = {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
                    status = 0 if found == expected else 2
                finally:
                    os._exit(status)
            children.append(child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for future in busy:
            for name, data in future.result().items():
                assert data == expected[name]
        assert {n: t.numpy().tobytes() for n, t in model.load().items()} == expected


def _digest(path: str, queue: multiprocessing.Queue[int]) -> None:
    queue.put(sum(int(t.numpy().view(np.uint8).sum()) for t in loader.load(path).values()))


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_every_way_to_start_a_process(path: Path, expected: dict[str, bytes], start: str) -> None:
    context: Any = multiprocessing.get_context(start)  # its kinds have no common Process
    queue = context.Queue()
    process = context.Process(target=_digest, args=(str(path), queue))
    process.start()
    found = queue.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert found == sum(sum(data) for data in expected.values())


@pytest.mark.parametrize("access", ACCESS)
def test_loads_cancelled_at_random_points(
    path: Path,
    expected: dict[str, bytes],
    method: Method,
    access: Access,
    nothing_left: Callable[[], None],
) -> None:
    """By the callback, by an error of it, by leaving a stream; and the next load is right."""
    random = Random(5)
    gc.collect()
    before = memory()
    outcomes: set[type] = set()

    class Left(Exception):  # noqa: N818 - not an error of the loader
        pass

    for _ in range(30):
        calls = random.randrange(60)
        with_error = random.random() < 0.5

        def progress(*_: int, with_error: bool = with_error) -> bool:
            nonlocal calls
            calls -= 1
            if calls < 0 and with_error:
                raise Left
            return calls >= 0

        with loader.open(path, access=access) as model:
            try:
                weights = model.load(method=method, chunk_bytes=4096, depth=5, progress=progress)
            except (LoadCancelled, Left) as error:
                outcomes.add(type(error))
            else:
                outcomes.add(loader.Weights)
                assert {n: t.numpy().tobytes() for n, t in weights.items()} == expected
                del weights
            for number, _ in enumerate(model.stream(method=method, chunk_bytes=4096)):
                if number == random.randrange(6):
                    break
    assert len(outcomes) > 1
    nothing_left()
    assert mappings(path) == 0
    gc.collect()
    assert memory() - before < 8 << 20


def test_a_model_closed_by_one_thread_while_others_load(
    path: Path, expected: dict[str, bytes], method: Method, nothing_left: Callable[[], None]
) -> None:
    """Each load gives the bytes, or says that the model is closed."""
    closed = 0
    for number in range(10):
        model = loader.open(path)
        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(model.load, method=method, chunk_bytes=CHUNK) for _ in range(4)]
            time.sleep(number / 2000)
            model.close()
            for load in loads:
                try:
                    weights = load.result()
                except ValueError as error:
                    assert "closed" in str(error)
                    closed += 1
                else:
                    assert {n: t.numpy().tobytes() for n, t in weights.items()} == expected
        del loads, load, model
    nothing_left()
    assert closed < 40


AT_THE_END = {
    "tensors": "weights = model.load(); arrays = [t.numpy() for t in weights.values()]",
    "a stream": "stream = model.stream(chunk_bytes=4096); first = next(stream)",
    "an open file": "file = loader.io.File(sys.argv[1]); file.read(10)",
    "a load in a thread": (
        "threading.Thread(target=lambda: [model.load(chunk_bytes=4096) for _ in range(10000)],"
        " daemon=True).start(); time.sleep(0.2)"
    ),
    "a load at exit": "atexit.register(lambda: print(len(model.load())))",
    "an error that is kept": (
        "errors = []\n"
        "try: model.load(progress=lambda *_: False)\n"
        "except loader.LoadCancelled as error: errors.append(error)"
    ),
}


@pytest.mark.parametrize("what", AT_THE_END)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("access", ["direct", "mmap"])
def test_the_interpreter_ends_with(path: Path, what: str, method: str, access: str) -> None:
    if method == "io_uring":
        try:
            open_queue("io_uring", 1)[0].close()
        except ReadError as error:
            pytest.skip(str(error))
    code = (
        "import atexit, loader, loader.io, sys, threading, time\n"
        f"model = loader.open(sys.argv[1], access={access!r})\n{AT_THE_END[what]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, path],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "GGUF_DIO_METHOD": method},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_hundred_loads_in_a_row_leave_everything_as_it_was(
    path: Path, faults: Faults, method: Method, nothing_left: Callable[[], None]
) -> None:
    """Descriptors, threads, mappings and memory; with an error or a cancelled one now and then."""
    with loader.open(path, access="direct") as model:
        model.load(method=method)
    gc.collect()
    before, running = memory(), threads()
    for number in range(100):
        with loader.open(path, access=ACCESS[number % 3]) as model:
            if number % 10 == 5:
                for call in ("pread_direct", "pread", "uring_result"):
                    faults.fail(call, errno.EIO)
                faults.fail("madvise", errno.EIO)
                with pytest.raises(ReadError):
                    model.load(method=method)
                faults.clear()
            elif number % 10 == 8:
                with pytest.raises(LoadCancelled):
                    model.load(method=method, progress=lambda *_: False)
            else:
                model.load(method=method)
    gc.collect()
    nothing_left()
    assert mappings(path) == 0
    assert memory() - before < 4 << 20
    assert wait_for(lambda: threads() <= running)


def test_files_of_one_process_are_independent(direct_folder: Path) -> None:
    """Cursors and queues of many models at once, each read a bit by turns."""
    paths = [direct_folder / f"m{i}.gguf" for i in range(8)]
    contents = [random_model(path, [200_001] * 4, seed=i) for i, path in enumerate(paths)]
    streams = [loader.open(path).stream(chunk_bytes=4096) for path in paths]
    for _ in range(4):
        for stream, values in zip(streams, contents, strict=True):
            name, tensor = next(stream)
            assert tensor.numpy().tobytes() == values[name].tobytes()
