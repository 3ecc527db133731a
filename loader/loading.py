"""Executes a load: what to read, to which memory, in which mode, and the report of it.

The way: the tensors that were asked for -> extents per file, placed in one
arena (or the file's mapping) -> reads -> views. Nothing is read before
everything that can be known to be wrong has been refused.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory, NativeError, Transfer
from loader.device.host import available_memory
from loader.errors import (
    DeviceMemoryError,
    DeviceUnavailableError,
    LoadCancelled,
    MappingError,
    ReadError,
    UnsupportedFormatError,
    quoted,
)
from loader.gguf.checks import check_data
from loader.gguf.header import Header
from loader.gguf.tensors import TensorInfo, TensorTable
from loader.gguf.types import why_unknown
from loader.io.access import Decision
from loader.io.arena import allocate_arena
from loader.io.file import describe_errno, log_fallback
from loader.io.mapping import map_file, prefetch
from loader.io.ranges import Extent, align_up, chunks, lay_out, place
from loader.io.source import Source, decide
from loader.options import Access, LoadOptions, Progress, Selection
from loader.report import Fallback, FileReport, LoadReport
from loader.tensor import Tensor, Weights

logger = logging.getLogger("loader")

# Addresses are congruent to file offsets modulo this at least, so that tensors
# are aligned in memory as they are in the file.
_LEAST_MODULUS = 64
_LARGEST_MODULUS = 2 << 20  # the alignment of an arena
_PROGRESS_SECONDS = 0.05
_LOCK_BYTES = 64 << 20
_CLOSE, _MOST_ALIKE = 4, 2000  # where near matches of a wrong name are looked for


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A file of a model; sizes, offsets and alignments are bytes.

    requested, access, reason: which modes were asked for, which one was taken,
    and why; memory_alignment, offset_alignment: what direct reads need, None
    when the file isn't read directly; version: of the GGUF format;
    tensor_alignment: what the offsets of tensors are multiples of
    (general.alignment); data_offset: where the tensor data begins.
    """

    path: str
    size: int
    requested: tuple[Access, ...]
    access: Access
    reason: str
    memory_alignment: int | None
    offset_alignment: int | None
    version: int
    tensor_alignment: int
    data_offset: int


@dataclass(frozen=True)
class OpenFile:
    """One file of an open model."""

    source: Source
    header: Header

    def describe(self) -> ModelFile:
        """The file for users."""
        file, decision, header = self.source.file, self.source.decision, self.header
        memory_alignment, offset_alignment = file.alignments
        direct = decision.access == "direct"
        return ModelFile(
            path=file.path,
            size=file.size,
            requested=decision.requested,
            access=decision.access,
            reason=decision.reason,
            memory_alignment=memory_alignment if direct else None,
            offset_alignment=offset_alignment if direct else None,
            version=header.version,
            tensor_alignment=header.alignment,
            data_offset=header.data_offset,
        )


@dataclass(frozen=True)
class OpenModel:
    """What a load needs to know of the model. name: its path as it was given."""

    name: str
    files: tuple[OpenFile, ...]
    tensors: TensorTable
    open_seconds: float


@dataclass
class _Part:
    """The part of a load that one file plays."""

    file: OpenFile
    decision: Decision
    tensors: list[TensorInfo]
    extents: tuple[Extent, ...]
    mapping: Memory | None
    transfer: Transfer

    @property
    def bytes(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def path(self) -> str:
        return self.file.source.file.path


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
    _refuse_unknown(model, wanted)
    parts, arena_size = _plan(model, wanted)
    if options.no_alloc:
        return Weights({}, _report(model, parts, wanted, options, started, arena_size))
    arena_size = _fit_into_memory(model, parts, arena_size)

    arena = allocate_arena(arena_size) if arena_size else None
    _read(parts, arena, options)
    loaded = {info.name: tensor for part in parts for info, tensor in _views(part, arena)}
    tensors = {info.name: loaded[info.name] for info in wanted}
    if options.check_tensors:
        check_data(model.name, ((t.info, t.numpy()) for t in tensors.values()))
    if options.mlock:
        _lock(parts, arena)
    return Weights(tensors, _report(model, parts, wanted, options, started, arena_size))


def select(tensors: TensorTable, names: Selection | None) -> list[TensorInfo]:
    """The tensors that `names` chooses, in file order; ValueError for a name that isn't there."""
    if names is None:
        return list(tensors.values())
    if callable(names):
        return [info for info in tensors.values() if names(info)]
    chosen = set(names)
    for name in chosen:
        if name not in tensors:
            alike = [other for other in tensors if abs(len(other) - len(name)) < _CLOSE]
            close = get_close_matches(name, alike[:_MOST_ALIKE], n=3)
            hint = f"; did you mean {', '.join(map(quoted, close))}?" if close else ""
            raise ValueError(f"the model has no tensor {quoted(name)}{hint}")
    return [tensors[name] for name in tensors.in_order(chosen)]


def _refuse_unknown(model: OpenModel, wanted: Iterable[TensorInfo]) -> None:
    unknown = [info for info in wanted if info.nbytes is None]
    if not unknown:
        return
    info = unknown[0]
    more = f" ({len(unknown)} tensors are like that)" if len(unknown) > 1 else ""
    path = model.files[info.file].source.file.path
    raise UnsupportedFormatError(
        f"{path}: tensor {quoted(info.name)} has {why_unknown(info.ggml_type)}, so its size isn't "
        f"known and it can't be loaded{more}; load the others with names=lambda info: "
        "info.nbytes is not None (in the command: --tensors)",
        path=path,
        offset=info.offset,
        field=info.name,
    )


# --- Planning ------------------------------------------------------------------


def _plan(model: OpenModel, wanted: Sequence[TensorInfo]) -> tuple[list[_Part], int]:
    """One part per file, and the bytes of the arena that the owned ones share."""
    parts, end = [], 0
    for index, file in enumerate(model.files):
        source = _still_possible(file.source)
        decision = source.decision
        memory_alignment, offset_alignment = 1, 1
        if decision.access == "direct":
            memory_alignment, offset_alignment = source.file.alignments
        modulus = max(memory_alignment, offset_alignment, file.header.alignment, _LEAST_MODULUS)
        tensors = [info for info in wanted if info.file == index]
        layout = lay_out(
            ((info.offset, info.nbytes or 0) for info in tensors),
            file_size=source.file.size,
            offset_alignment=offset_alignment,
            modulus=min(modulus, _LARGEST_MODULUS),
            position=end,
        )
        if source.mapping is None:
            end = layout.end
        parts.append(
            _Part(
                file,
                decision,
                tensors,
                layout.extents,
                source.mapping,
                Transfer(
                    direct_required="buffered" not in decision.requested,
                    buffered_only=decision.access != "direct",
                ),
            )
        )
    return parts, end


def _still_possible(source: Source) -> Source:
    """The file as it can be read now: an earlier load may have found that it can't be read
    directly after all. A demand is left as it is, and fails with the read's own error."""
    decision = source.decision
    if decision.access != "direct" or source.file.direct_for_loads or len(decision.requested) == 1:
        return source
    return decide(source.file, decision.requested)


def _fit_into_memory(model: OpenModel, parts: Sequence[_Part], needed: int) -> int:
    """The bytes of the arena; 0 after everything was mapped because it wouldn't fit.

    Where mmap isn't one of the requested modes that is a DeviceMemoryError.
    """
    available = available_memory()
    if available is None or needed <= available:
        return needed
    why = f"{needed} bytes of memory are needed and {available} are available"
    for part in parts:
        if part.mapping is not None:
            continue
        if "mmap" not in part.decision.requested:
            raise DeviceMemoryError(
                f"{model.name}: {why}; load fewer tensors (names=, in the command --tensors) or "
                "allow mmap",
                needed=needed,
                available=available,
            )
        try:
            part.mapping = map_file(part.file.source.file)
        except MappingError as error:
            raise DeviceMemoryError(
                f"{model.name}: {why}, and {error}", needed=needed, available=available
            ) from None
        part.decision = replace(part.decision, access="mmap", reason=f"{why}, so it is mapped")
    return 0


# --- Reading ---------------------------------------------------------------------


def _read(parts: Sequence[_Part], arena: Memory | None, options: LoadOptions) -> None:
    ticker = _Ticker(options.progress, sum(part.bytes for part in parts))
    for part in parts:
        try:
            for extent in part.extents:
                _read_extent(part, extent, arena, ticker, options.chunk)
        except ReadError as error:
            raise error.in_tensor(_tensor_at(part.tensors, error.offset)) from None
        finally:
            log_fallback(part.file.source.file, part.transfer)
    ticker.finish()


def _read_extent(
    part: _Part, extent: Extent, arena: Memory | None, ticker: _Ticker, chunk_bytes: int
) -> None:
    file = part.file.source.file
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


def _views(part: _Part, arena: Memory | None) -> Iterable[tuple[TensorInfo, Tensor]]:
    memory = part.mapping if part.mapping is not None else arena
    whole: npt.NDArray[np.uint8] = np.empty(0, np.uint8) if memory is None else np.asarray(memory)
    for info in part.tensors:
        start, nbytes = info.offset, info.nbytes or 0
        if nbytes == 0:
            start = 0  # an empty tensor has no place in memory
        elif part.mapping is None:
            start = place(part.extents, start)
        yield info, Tensor(info, whole[start : start + nbytes])


def _held(parts: Sequence[_Part], arena: Memory | None) -> Iterator[tuple[Memory, int, int]]:
    """The memory of a load, as (memory, offset, length)."""
    if arena is not None:
        yield arena, 0, arena.nbytes
    for part in parts:
        if part.mapping is not None:
            for extent in part.extents:
                yield part.mapping, extent.offset, extent.length


def _lock(parts: Sequence[_Part], arena: Memory | None) -> None:
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
    parts: Sequence[_Part],
    wanted: Sequence[TensorInfo],
    options: LoadOptions,
    started: float,
    arena_size: int,
) -> LoadReport:
    moved = not options.no_alloc
    transfers = [part.transfer for part in parts] + [part.file.header.transfer for part in parts]
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


def _file_report(part: _Part) -> FileReport:
    file, transfer = part.file.describe(), part.transfer
    direct = part.decision.access == "direct"
    fallback = None
    for used in (part.file.header.transfer, transfer):  # that of the load counts more
        if used.fallback_errno:
            fallback = Fallback(errno=used.fallback_errno, offset=used.fallback_offset)
    return FileReport(
        path=file.path,
        size=file.size,
        requested=part.decision.requested,
        access=part.decision.access,
        reason=part.decision.reason,
        memory_alignment=file.memory_alignment if direct else None,
        offset_alignment=file.offset_alignment if direct else None,
        fallback=fallback,
    )
