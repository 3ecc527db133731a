"""Measures loads of a model: access modes and methods in alternating rounds, beside the ceiling.

The ceiling is what plain direct reads of the same files give, 8 MiB at a time,
into memory that has its pages already. A run is cold when the files were out of
the page cache before it; that is looked up, not assumed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from loader._ffi import Memory
from loader.errors import LoaderError
from loader.io import File
from loader.io.arena import allocate_arena
from loader.io.queue import open_queue
from loader.io.ranges import align_down, align_up
from loader.model import Model, open as open_model
from loader.options import Access, Method
from loader.report import LoadReport

CONFIGURATIONS: tuple[tuple[Access, Method | None], ...] = (
    ("direct", "io_uring"),
    ("direct", "threads"),
    ("direct", "sync"),
    ("buffered", "threads"),
    ("buffered", "sync"),
    ("mmap", None),
)
COLD = 0.01  # a file is out of the page cache when less of it is in there
_CEILING_CHUNK = 8 << 20
_CEILING_MEMORY = 256 << 20


@dataclass
class Run:
    """The runs of one configuration. Times are seconds; cold: whether each run was."""

    access: str
    method: str | None
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    cold: list[bool] = field(default_factory=list)
    failed: str | None = None

    @property
    def bytes_per_second(self) -> float | None:
        return self.nbytes / median(self.seconds) if self.seconds else None

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        known = self.cpu_seconds and self.nbytes
        return 1e9 * median(self.cpu_seconds) / self.nbytes if known else None

    @property
    def spread(self) -> float | None:
        """(slowest - fastest) / median."""
        if not self.seconds:
            return None
        return (max(self.seconds) - min(self.seconds)) / median(self.seconds)

    def to_dict(self, ceiling: float | None) -> dict[str, object]:
        speed = self.bytes_per_second
        return {
            "access": self.access,
            "method": self.method,
            "seconds": self.seconds,
            "bytes_per_second": speed,
            "spread": self.spread,
            "fraction_of_ceiling": speed / ceiling if speed and ceiling else None,
            "cpu_seconds_per_gb": self.cpu_seconds_per_gb,
            "cold": self.cold,
            "failed": self.failed,
        }


def evict(path: str) -> bool:
    """Drops a file from the page cache; whether it is out of it then."""
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return is_cold(path)


def is_cold(path: str) -> bool:
    with File(path) as file:
        found = file.resident_fraction()
    return found is not None and found < COLD


def measure(
    path: str,
    *,
    rounds: int,
    warm: bool,
    configurations: tuple[tuple[Access, Method | None], ...] = CONFIGURATIONS,
) -> tuple[Run, list[Run]]:
    """The ceiling, and a Run for each configuration, in alternating rounds."""
    with open_model(path, access="buffered") as model:  # what is no model is an error here
        paths = [file.path for file in model.files]
    ceiling = Run("ceiling", None, 0)
    runs = [Run(access, method, 0) for access, method in configurations]
    with ExitStack() as stack:
        files = [stack.enter_context(File(path)) for path in paths]
        read = _ceiling_reader(files)
        for _ in range(rounds):
            if read is not None and ceiling.failed is None:
                ceiling.nbytes = sum(file.size for file in files)
                _try(ceiling, paths, read, warm)
            for run, (access, method) in zip(runs, configurations, strict=True):
                if run.failed is None:
                    _measure_load(run, path, paths, access, method, warm)
    return ceiling, runs


def _ceiling_reader(files: Sequence[File]) -> Callable[[], object] | None:
    """Reads whole files directly into memory that is there; None where that can't be done."""
    if not all(file.has_direct_io for file in files):
        return None
    largest = max(file.size for file in files)
    memory = allocate_arena(min(align_up(largest, _CEILING_CHUNK), _CEILING_MEMORY))
    np.asarray(memory)[:: 1 << 12] = 0

    def read() -> None:
        for file in files:
            read_plainly(file, memory)

    return read


def read_plainly(file: File, memory: Memory) -> None:
    """Reads a file directly, one read of 8 MiB after the other, to memory that has room for whole
    ones of them; it is used from its beginning again when the file is larger."""
    room = align_down(memory.nbytes, _CEILING_CHUNK)
    queue, _ = open_queue("sync", 1)
    try:
        for offset in range(0, file.size, _CEILING_CHUNK):
            length = min(_CEILING_CHUNK, file.size - offset)
            address = memory.address + offset % room
            file.submit(
                queue, address, _CEILING_CHUNK, length, offset, 0,
                direct_required=True, buffered_only=False,
            )  # fmt: skip
            done = queue.wait(0)
            if done is not None and done.result < 0:
                raise file.error(-done.result, done.transfer, length)
    finally:
        queue.close()


def _measure_load(
    run: Run, path: str, paths: list[str], access: Access, method: Method | None, warm: bool
) -> None:
    def load(model: Model) -> None:
        weights = model.load(method=method or "auto")
        run.nbytes = weights.report.bytes
        weights.close()

    def opened() -> None:
        with open_model(path, access=access) as model:
            load(model)

    _try(run, paths, opened, warm)


def _try(run: Run, paths: list[str], call: Callable[[], object], warm: bool) -> None:
    try:
        _time(run, paths, call, warm)
    except LoaderError as error:
        run.failed = str(error)


def _time(run: Run, paths: list[str], call: Callable[[], object], warm: bool) -> None:
    for path in paths:
        if warm:
            warm_up(path)
        else:
            evict(path)
    cold = all(is_cold(path) for path in paths)
    cpu, started = time.process_time(), time.perf_counter()
    call()
    run.seconds.append(time.perf_counter() - started)
    run.cpu_seconds.append(time.process_time() - cpu)
    run.cold.append(cold)


def warm_up(path: str) -> None:
    """Reads a file into the page cache."""
    with Path(path).open("rb") as file:
        while file.read(_CEILING_CHUNK):
            continue


def fraction_of_ceiling(report: LoadReport) -> float | None:
    """The speed of a load as a fraction of what plain direct reads of the same files give now.

    Reads the files once more, past the page cache. None where they can't be read
    directly, and for a load of nothing.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(File(entry.path)) for entry in report.files]
        read = _ceiling_reader(files)
        if read is None:
            return None
        started = time.perf_counter()
        read()
        seconds = time.perf_counter() - started
        nbytes = sum(file.size for file in files)
    speed = report.bytes_per_second
    return speed / (nbytes / seconds) if speed and nbytes else None


def check_plot(target: Path) -> None:
    """LoaderError, before anything is measured, when the picture couldn't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LoaderError(
            "drawing needs matplotlib; install it with the extra: pip install 'gguf-dio[plot]'"
        )
    if target.suffix.lower() != ".png":
        raise LoaderError(f"{target}: a picture is drawn as a PNG; name it .png")
    if not os.access(target.parent, os.W_OK):
        raise LoaderError(f"{target}: its folder can't be written to")


def plot(target: Path, title: str, ceiling: Run, runs: list[Run]) -> None:
    """Draws throughput against the ceiling, and CPU time per GB, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    done = [run for run in runs if run.seconds]
    names = [f"{run.access}\n{run.method or ''}" for run in done]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    speed, cpu = figure.subplots(1, 2)
    speed.bar(names, [(run.bytes_per_second or 0) / 1e9 for run in done], color="#3b6ea8")
    if ceiling.bytes_per_second:
        speed.axhline(ceiling.bytes_per_second / 1e9, color="#c0392b", linestyle="--")
        speed.text(
            0.99, ceiling.bytes_per_second / 1e9, "ceiling", color="#c0392b",
            ha="right", va="bottom", transform=speed.get_yaxis_transform(),
        )  # fmt: skip
    speed.set_title("throughput, GB/s")
    cpu.bar(names, [run.cpu_seconds_per_gb or 0 for run in done], color="#7f8c8d")
    cpu.set_title("CPU seconds per GB")
    for axes in (speed, cpu):
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(target, dpi=120)
