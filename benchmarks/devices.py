"""Measures loads to a device: reading alone, copying alone, and both at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

import loader
from loader.device.base import Device
from loader.measure import evict

_PIECE, _PIECES = 4 << 20, 16


@dataclass
class Figures:
    """Seconds of each round; nbytes: of the tensors."""

    nbytes: int
    read: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    checked: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """A load, by the longer of reading alone and copying alone."""
        return median(self.both) / max(median(self.read), median(self.copy))

    def rows(self) -> list[tuple[str, str]]:
        named = {
            "read alone": self.read,
            "copy alone": self.copy,
            "load": self.both,
            "load, checked": self.checked,
        }
        return [
            (name, f"{self.nbytes / median(runs) / 1e9:.2f} GB/s, {median(runs):.3f} s")
            for name, runs in named.items()
        ]


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_alone(device: Device, nbytes: int) -> Callable[[], None]:
    """Copies so many bytes as a load does: from a ring of pinned pieces of 4 MiB to memory that is
    as large as all of them, and waits for it."""
    count = -(-nbytes // _PIECE)
    buffer = device.allocate(count * _PIECE)
    pinned = device.allocate_pinned(_PIECES * _PIECE)
    ring = np.asarray(pinned.memory)
    ring[:] = 1

    def copy() -> None:
        events = []
        for number in range(count):
            at = number % _PIECES * _PIECE
            events.append(device.copy_async(buffer, number * _PIECE, ring[at : at + _PIECE]))
        while not all(event.done() for event in events):
            time.sleep(0.0005)

    return copy


def measure(path: Path, device: Device, rounds: int, slow_down: Callable[[float], None]) -> Figures:
    """Alternating rounds, cold, into memory that is used again. slow_down: told how fast reading
    is, in bytes per second, before the rounds."""
    with loader.open(path, access="direct") as model:
        host = model.load()
        weights = model.load(device=device)
        figures = Figures(host.report.bytes)
        evict(str(path))
        slow_down(figures.nbytes / timed(lambda: model.load(into=host)))
        copy = copy_alone(device, figures.nbytes)
        copy()  # the memory has its pages
        for _ in range(rounds):
            evict(str(path))
            figures.read.append(timed(lambda: model.load(into=host)))
            figures.copy.append(timed(copy))
            for check, taken in ((False, figures.both), (True, figures.checked)):
                evict(str(path))
                before = time.perf_counter()
                weights = model.load(device=device, into=weights, check_tensors=check)
                taken.append(time.perf_counter() - before)
        weights.close()
    return figures


def digests(weights: loader.Weights) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, read back from where it is."""
    return {
        name: hashlib.sha256(tensor.to_host().numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
    }
