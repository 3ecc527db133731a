"""What comes out of a load: tensors, and a report of how it went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter

import numpy as np

from loader._ffi import Memory
from loader.device.host import peak_memory
from loader.device.staging import Ring
from loader.gguf.tensors import TensorInfo
from loader.io.ranges import place
from loader.options import LoadOptions
from loader.placement import DeviceArena
from loader.planning import OpenModel, Part
from loader.reading import Figures, Reading
from loader.report import Fallback, FileReport, LoadReport, Phases, StagingReport
from loader.tensor import DeviceTensor, Tensor


def views(
    parts: Sequence[Part], arena: Memory | None, arenas: Sequence[DeviceArena]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a load: in the host's arena or the mapping, in memory of the caller's, and on
    devices."""
    yield from host_views(parts, arena)
    for part in parts:
        for spot in part.spots:
            on = arenas[spot.buffer]
            yield (
                spot.info.name,
                DeviceTensor(spot.info, on.device.name, on.memory, spot.position),
            )


def host_views(parts: Sequence[Part], arena: Memory | None) -> Iterator[tuple[str, Tensor]]:
    """Those on the host."""
    for part in parts:
        mapping = part.source.mapping
        memory = arena if mapping is None else mapping
        whole = np.empty(0, np.uint8) if memory is None else np.asarray(memory)
        for info in part.tensors:
            start, nbytes = info.offset, info.nbytes or 0
            if nbytes == 0:
                start = 0  # an empty tensor has no place in memory
            elif mapping is None:
                start = place(part.extents, start)
            yield info.name, Tensor(info, whole[start : start + nbytes])
        for given in part.given:
            yield given.info.name, Tensor(given.info, given.array())


@dataclass
class Outcome:
    """What a report tells of, beside what was read. started: when the load began (of
    time.perf_counter); size: bytes of the arena; names: of the devices."""

    model: OpenModel
    wanted: Sequence[TensorInfo]
    options: LoadOptions
    started: float
    names: Sequence[str]
    arenas: Sequence[DeviceArena]
    size: int

    def report(
        self, parts: Sequence[Part], reading: Reading | None, ring: Ring | None
    ) -> LoadReport:
        """The report. reading, ring: None when nothing was read, or nothing went to a device."""
        model, options = self.model, self.options
        moved = [part.moved for part in parts] + [file.moved for file in model.files]
        sources = [part.source for part in parts] or [file.source for file in model.files]
        used = reading if any(source.mapping is None for source in sources) else None
        seconds = time.perf_counter() - self.started
        device_bytes: dict[str, int] = {}
        for arena in self.arenas:
            name = arena.device.name
            device_bytes[name] = device_bytes.get(name, 0) + arena.nbytes
        return LoadReport(
            model=model.name,
            files=_file_reports(model, parts),
            tensors=len(self.wanted),
            bytes=sum(info.nbytes or 0 for info in self.wanted),
            bytes_direct=sum(part.bytes_direct for part in moved),
            bytes_buffered=sum(part.bytes_buffered for part in moved),
            bytes_mapped=sum(part.bytes_mapped for part in parts),
            bytes_bounced=sum(part.bytes_bounced for part in moved),
            open_seconds=model.open_seconds,
            seconds=seconds,
            method=None if used is None else used.method,
            depth=None if used is None else used.depth,
            chunk_bytes=None if used is None else options.tuning.chunk_bytes,
            device=self.names[0] if len(self.names) == 1 else tuple(self.names),
            peak_rss_bytes=peak_memory(),
            memory_bytes=self.size,
            device_bytes=device_bytes,
            staging=None
            if ring is None
            else StagingReport(
                buffers=ring.buffers,
                buffer_bytes=ring.buffer_bytes,
                why_pageable=ring.why_pageable,
            ),
            phases=_phases(model, seconds, Figures() if reading is None else reading.figures),
        )


def _phases(model: OpenModel, seconds: float, figures: Figures) -> Phases:
    return Phases(
        open=model.open_seconds,
        header=model.header_seconds,
        plan=max(seconds - figures.reading, 0),
        read=figures.reading,
        wait=figures.waiting,
        populate=figures.populating,
        validate=figures.checking,
        requests=figures.requests,
        mean_in_flight=figures.in_flight / figures.reading if figures.reading else 0.0,
    )


def _file_reports(model: OpenModel, parts: Sequence[Part]) -> tuple[FileReport, ...]:
    """Of all files, also of those that had no part in the load."""
    by_number: dict[int, list[Part]] = {}
    for part in parts:
        by_number.setdefault(part.number, []).append(part)
    reports = []
    for number, file in enumerate(model.files):
        mine = by_number.get(number, [])
        source = mine[0].source if mine else file.source
        # What the load met counts more than what reading the header did.
        met = [part.moved.fallback for part in mine if part.moved.fallback is not None]
        found = min(met, key=itemgetter(1)) if met else file.moved.fallback
        fallback = None if found is None else Fallback(errno=found[0], offset=found[1])
        reports.append(FileReport(**asdict(source.access()), fallback=fallback))
    return tuple(reports)
