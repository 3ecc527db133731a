"""Cold and warm loads of a synthetic model: ours by mode and method, and the peers.

Each table is printed as it is measured: medians of alternating rounds. `--model-size`
says how large the model is (3GiB), `--rounds` how many rounds there are (5).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import loader
from benchmarks.worker import LOADERS, MISSING
from loader import _ffi
from loader.io import File
from loader.measure import CONFIGURATIONS, Run, evict, measure, read_plainly, warm_up

WORKER = Path(__file__).with_name("worker.py")
Row = tuple[str, str]


def table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def describe(run: Run, ceiling: float | None) -> str:
    if run.failed is not None or not run.seconds:
        return run.failed or "not possible here"
    speed = run.bytes_per_second or 0
    share = f", {speed / ceiling:.2f} of the ceiling" if ceiling else ""
    cold = "" if all(run.cold) else ", not cold"
    return (
        f"{speed / 1e9:.2f} GB/s{share}, {run.cpu_seconds_per_gb:.3f} CPU s/GB, "
        f"spread {run.spread:.0%}{cold}"
    )


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_modes_and_methods(
    model: Path, rounds: int, benchmark: BenchmarkFixture, warm: bool
) -> None:
    ceiling, runs = measure(str(model), rounds=rounds, warm=warm)
    top = ceiling.bytes_per_second
    rows = [("ceiling", describe(ceiling, None))]
    rows += [(f"{run.access} {run.method or ''}", describe(run, top)) for run in runs]
    table(f"fresh memory, {'warm' if warm else 'cold'}", rows)
    benchmark.extra_info["runs"] = [run.to_dict(top) for run in [ceiling, *runs]]
    benchmark(lambda: loader.load(model, names=[]))
    assert len(runs) == len(CONFIGURATIONS)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    cpu, started = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - started, time.process_time() - cpu


def test_memory_used_again(model: Path, rounds: int, benchmark: BenchmarkFixture) -> None:
    """into= an earlier Weights, beside plain direct reads into the same kind of memory."""
    size = model.stat().st_size
    taken: dict[str, list[tuple[float, float]]] = {"ceiling": [], "into=weights": []}
    with loader.open(model, access="direct") as opened, File(model) as file:
        weights = opened.load()
        memory = _ffi.allocate(size + (8 << 20))
        np.asarray(memory)[::4096] = 0

        for _ in range(rounds):
            evict(str(model))
            taken["ceiling"].append(timed(lambda: read_plainly(file, memory)))
            taken["into=weights"].append(timed(lambda: opened.load(into=weights)))
    top = median(seconds for seconds, _ in taken["ceiling"])
    rows = []
    for name, runs in taken.items():
        seconds, cpu = (median(values) for values in zip(*runs, strict=True))
        speed, share = size / seconds / 1e9, top / seconds
        text = f"{speed:.2f} GB/s, {share:.2f} of the ceiling, {cpu / size * 1e9:.3f} CPU s/GB"
        rows.append((name, text))
    table("memory used again, cold", rows)
    benchmark.extra_info["rows"] = rows
    benchmark(lambda: None)  # the figures are in extra_info


def test_populating_beside_reading(model: Path, rounds: int, benchmark: BenchmarkFixture) -> None:
    """A load into fresh memory, beside populating alone and reading alone."""
    size = model.stat().st_size
    step = 16 << 20

    def populate() -> None:
        memory = _ffi.allocate(size)
        queue = _ffi.Queue("threads", capacity=64, workers=2)
        under_way, steps = 0, iter(range(0, size, step))
        try:
            while True:
                while under_way < 32 and (at := next(steps, None)) is not None:
                    queue.populate(memory.address + at, min(step, size - at), 0)
                    under_way += 1
                if under_way == 0:
                    return
                under_way -= queue.wait(50) is not None
        finally:
            queue.close()

    taken: dict[str, list[float]] = {"populating alone": [], "reading alone": [], "both": []}
    with loader.open(model, access="direct") as opened:
        weights = opened.load()
        for _ in range(rounds):
            evict(str(model))
            taken["populating alone"].append(timed(populate)[0])
            taken["reading alone"].append(timed(lambda: opened.load(into=weights))[0])
            taken["both"].append(timed(lambda: opened.load())[0])
    medians = {name: median(seconds) for name, seconds in taken.items()}
    longer = max(medians["populating alone"], medians["reading alone"])
    rows = [(name, f"{seconds:.2f} s") for name, seconds in medians.items()]
    rows.append(("both / the longer", f"{medians['both'] / longer:.2f}"))
    table("fresh memory", rows)
    benchmark.extra_info["rows"] = rows
    benchmark(lambda: None)  # the figures are in extra_info


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_peers(model: Path, rounds: int, benchmark: BenchmarkFixture, warm: bool) -> None:
    """Each load in a process of its own, into fresh memory, in alternating rounds."""
    nbytes = model.stat().st_size
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        for name in LOADERS:
            if name in notes:
                continue
            if warm:
                warm_up(str(model))
            elif not evict(str(model)):
                notes[name] = "not cold"
            done = subprocess.run(
                [sys.executable, WORKER, name, model], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            else:
                missing = done.returncode == MISSING
                notes[name] = "not installed" if missing else done.stderr.strip()[-200:]
    rows = []
    speeds: dict[str, float] = {}
    for name, results in runs.items():
        if name in notes or not results:
            rows.append((name, notes.get(name, "")))
            continue
        seconds, cpu, peak = (median(r[key] for r in results) for key in ("seconds", "cpu", "peak"))
        beside = (peak - nbytes) / (1 << 20)
        speeds[name] = nbytes / seconds / 1e9
        text = f"{nbytes / seconds / 1e9:.2f} GB/s, {seconds:.2f} s, {cpu:.2f} CPU s"
        rows.append((name, f"{text}, peak {beside:+.0f} MiB beside the weights"))
    table(f"peers, {'warm' if warm else 'cold'}", rows)
    benchmark.extra_info["rows"] = rows
    benchmark.extra_info["gb_per_second"] = speeds
    benchmark(lambda: None)  # the figures are in extra_info


def test_one_tensor(model: Path, rounds: int, benchmark: BenchmarkFixture) -> None:
    """A single tensor by name, beside a plain aligned read of that many bytes."""
    taken: dict[str, list[float]] = {"plain read": [], "one tensor": []}
    with loader.open(model, access="direct") as opened, File(model) as file:
        info = max(opened.tensors.values(), key=lambda info: info.nbytes or 0)
        nbytes = info.nbytes or 0
        begin = info.offset // 4096 * 4096
        for _ in range(5 * rounds):
            evict(str(model))

            def plain() -> None:
                memory = _ffi.allocate(nbytes)
                file.pread_to(memory.address, nbytes, nbytes, begin, _ffi.Transfer())

            taken["plain read"].append(timed(plain)[0])
            taken["one tensor"].append(timed(lambda: opened.load(names=[info.name]))[0])
    medians = {name: median(seconds) for name, seconds in taken.items()}
    rows = [(name, f"{1000 * seconds:.1f} ms") for name, seconds in medians.items()]
    rows.append(("ratio", f"{medians['one tensor'] / medians['plain read']:.2f}"))
    table(f"one tensor of {nbytes >> 20} MiB, fresh memory", rows)
    benchmark.extra_info["rows"] = rows
    benchmark(lambda: None)  # the figures are in extra_info


def test_chunks_and_depths(model: Path, rounds: int, benchmark: BenchmarkFixture) -> None:
    """Throughput by chunk size and depth, into memory used again."""
    size = model.stat().st_size
    sweep = [(chunk << 20, depth) for chunk in (1, 4, 16) for depth in (1, 2, 8, 32)]
    taken: dict[tuple[int, int], list[float]] = {key: [] for key in sweep}
    with loader.open(model, access="direct") as opened:
        weights = opened.load()
        for _ in range(rounds):
            for chunk, depth in sweep:
                evict(str(model))
                call = lambda c=chunk, d=depth: opened.load(into=weights, chunk_bytes=c, depth=d)  # noqa: E731
                taken[chunk, depth].append(timed(call)[0])
    rows = [
        (f"{chunk >> 20} MiB, depth {depth}", f"{size / median(seconds) / 1e9:.2f} GB/s")
        for (chunk, depth), seconds in taken.items()
    ]
    table("chunk and depth", rows)
    benchmark.extra_info["rows"] = rows
    benchmark(lambda: None)  # the figures are in extra_info
