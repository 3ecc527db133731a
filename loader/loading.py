"""Executes a load: reads what was planned, and makes tensors and a report of it."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory, NativeError
from loader.errors import DeviceUnavailableError, LoadCancelled, ReadError
from loader.gguf.checks import check_data
from loader.gguf.tensors import TensorInfo
from loader.io.arena import allocate_arena
from loader.io.file import describe_errno, log_fallback
from loader.io.mapping import prefetch
from loader.io.ranges import Extent, align_up, chunks, place
from loader.options import LoadOptions, Progress
from loader.planning import OpenModel, Part, fit_into_memory, plan, refuse_unknown, select
from loader.report import Fallback, FileReport, LoadReport
from loader.tensor import Tensor, Weights

logger = logging.getLogger("loader")

_PROGRESS_SECONDS = 0.05
_LOCK_BYTES = 64 << 20


class _Ticker:
    """Calls the progress callback: at the beginning, at the end, and in between not too often."""

    def __init__(self, callback: Progress | None, total: int) -> None:
        self._callback = callback
        self._total = total
        self._done = 0
        self._next = 0.0
        self._call()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done < self._total and time.monotonic() >= self._next:
            self._call()

    def finish(self) -> None:
        self._done = self._total
        self._call()

    def _call(self) -> None:
        if self._callback is None:
            return
        self._next = time.monotonic() + _PROGRESS_SECONDS
        if self._callback(self._done, self._total) is False:
            raise LoadCancelled(
                f"the load was cancelled by its progress callback after {self._done} of "
                f"{self._total} bytes"
            )


def load(model: OpenModel, options: LoadOptions) -> Weights:
    """Loads the chosen tensors of an open model."""
    started = time.perf_counter()
    if options.device != "cpu":
        raise DeviceUnavailableError(
            f"device {options.device!r} is not available; this version loads to 'cpu'"
        )
    wanted = select(model.tensors, options.names)
    refuse_unknown(model, wanted)
    parts, arena_size = plan(model, wanted)
    if options.no_alloc:
        return Weights({}, _report(model, parts, wanted, options, started, arena_size))
    arena_size = fit_into_memory(model, parts, arena_size)

    arena = allocate_arena(arena_size) if arena_size else None
    _read(parts, arena, options)
    loaded = {info.name: tensor for part in parts for info, tensor in _views(part, arena)}
    tensors = {info.name: loaded[info.name] for info in wanted}
    if options.check_tensors:
        check_data(model.name, ((t.info, t.numpy()) for t in tensors.values()))
    if options.mlock:
        _lock(parts, arena)
    return Weights(tensors, _report(model, parts, wanted, options, started, arena_size))


# --- Reading ---------------------------------------------------------------------


def _read(parts: Sequence[Part], arena: Memory | None, options: LoadOptions) -> None:
    ticker = _Ticker(options.progress, sum(part.bytes for part in parts))
    for part in parts:
        try:
            for extent in part.extents:
                _read_extent(part, extent, arena, ticker, options.chunk)
        except ReadError as error:
            raise error.in_tensor(_tensor_at(part.tensors, error.offset)) from None
        finally:
            log_fallback(part.source.file, part.transfer)
    ticker.finish()


def _read_extent(
    part: Part, extent: Extent, arena: Memory | None, ticker: _Ticker, chunk_bytes: int
) -> None:
    file = part.source.file
    for start, length in chunks(extent, align_up(chunk_bytes, file.alignments[1])):
        if part.mapping is not None:
            prefetch(file, part.mapping, start, length)
        elif arena is not None:
            into = start - extent.offset
            # Whole blocks may be written up to the end of the extent's room, and
            # no further than this chunk when there is another one.
            room = extent.room - into if start + length == extent.end else length
            address = arena.address + extent.position + into
            file.pread_to(address, room, length, start, part.transfer)
        ticker.advance(length)


def _tensor_at(tensors: Iterable[TensorInfo], offset: int | None) -> str | None:
    """The tensor that holds the byte at `offset`, or the first one after it."""
    if offset is None:
        return None
    after = [t for t in tensors if t.nbytes and t.offset + t.nbytes > offset]
    return min(after, key=lambda info: info.offset).name if after else None


# --- What comes out ----------------------------------------------------------------


def _views(part: Part, arena: Memory | None) -> Iterable[tuple[TensorInfo, Tensor]]:
    memory = part.mapping if part.mapping is not None else arena
    whole: npt.NDArray[np.uint8] = np.empty(0, np.uint8) if memory is None else np.asarray(memory)
    for info in part.tensors:
        start, nbytes = info.offset, info.nbytes or 0
        if nbytes == 0:
            start = 0  # an empty tensor has no place in memory
        elif part.mapping is None:
            start = place(part.extents, start)
        yield info, Tensor(info, whole[start : start + nbytes])


def _held(parts: Sequence[Part], arena: Memory | None) -> Iterator[tuple[Memory, int, int]]:
    """The memory of a load, as (memory, offset, length)."""
    if arena is not None:
        yield arena, 0, arena.nbytes
    for part in parts:
        if part.mapping is not None:
            for extent in part.extents:
                yield part.mapping, extent.offset, extent.length


def _lock(parts: Sequence[Part], arena: Memory | None) -> None:
    """Locks the weights into memory; a limit in the way is a warning, not an error."""
    try:
        for memory, offset, length in _held(parts, arena):
            for start in range(0, length, _LOCK_BYTES):
                memory.lock(offset + start, min(_LOCK_BYTES, length - start))
    except NativeError as error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        logger.warning(
            "the weights are loaded but can't be locked into memory: %s; the limit for locked "
            "memory (RLIMIT_MEMLOCK) is %s, raise it with 'ulimit -l' or LimitMEMLOCK=",
            describe_errno(error.errno),
            shown,
        )


def _report(
    model: OpenModel,
    parts: Sequence[Part],
    wanted: Sequence[TensorInfo],
    options: LoadOptions,
    started: float,
    arena_size: int,
) -> LoadReport:
    moved = not options.no_alloc
    transfers = [part.transfer for part in parts] + [part.header.transfer for part in parts]
    reads = any(part.mapping is None for part in parts)
    return LoadReport(
        model=model.name,
        files=tuple(_file_report(part) for part in parts),
        tensors=len(wanted),
        bytes=sum(info.nbytes or 0 for info in wanted),
        bytes_direct=sum(transfer.bytes_direct for transfer in transfers),
        bytes_buffered=sum(transfer.bytes_buffered for transfer in transfers),
        bytes_mapped=sum(p.bytes for p in parts if p.mapping is not None) if moved else 0,
        bytes_bounced=sum(transfer.bytes_bounced for transfer in transfers),
        open_seconds=model.open_seconds,
        seconds=time.perf_counter() - started,
        method="sync" if reads else None,
        depth=1 if reads else None,
        chunk_bytes=options.chunk if reads else None,
        device=options.device,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        memory_bytes=arena_size,
    )


def _file_report(part: Part) -> FileReport:
    fallback = None
    for used in (part.header.transfer, part.transfer):  # that of the load counts more
        if used.fallback_errno:
            fallback = Fallback(errno=used.fallback_errno, offset=used.fallback_offset)
    return FileReport(**asdict(part.source.access()), fallback=fallback)
