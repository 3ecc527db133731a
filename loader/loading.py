"""Executes a load: reads what was planned, and makes tensors and a report of it."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from loader._ffi import Memory, NativeError
from loader.batch import Batch
from loader.device.host import peak_memory
from loader.errors import DeviceUnavailableError, LoadCancelled, quoted
from loader.gguf.checks import invalid_data
from loader.gguf.tensors import TensorInfo
from loader.io.arena import allocate_arena
from loader.io.file import describe_errno
from loader.io.queue import open_queue
from loader.io.ranges import place
from loader.options import LoadOptions, Progress
from loader.planning import OpenModel, Part, fit_into_memory, plan, refuse_unknown, select
from loader.reading import Figures, Reading
from loader.report import Fallback, FileReport, LoadReport, Phases
from loader.tensor import Buffers, Tensor, Weights

logger = logging.getLogger("loader")

_PROGRESS_SECONDS = 0.05
_LOCK_BYTES = 64 << 20
_STREAM_SHARE = 4  # a stream reads so many batches ahead


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
    wanted = choose(model, options)
    return load_tensors(model, wanted, options)


def choose(model: OpenModel, options: LoadOptions) -> list[TensorInfo]:
    """The tensors that the options ask for, all of which can be loaded."""
    if options.device != "cpu":
        raise DeviceUnavailableError(
            f"device {options.device!r} is not available; this version loads to 'cpu'"
        )
    wanted = select(model.tensors, options.names)
    refuse_unknown(model, wanted)
    return wanted


def load_tensors(model: OpenModel, wanted: Sequence[TensorInfo], options: LoadOptions) -> Weights:
    """Loads tensors, which may be parts of those in the file."""
    started = time.perf_counter()
    given, arena = _destinations(wanted, options.into)
    kept = arena
    parts, size = plan(model, wanted, given, reuse=arena is not None)
    if arena is not None and not _fits(parts, arena, options.into):
        # The file is mapped, or can't be read as when the buffers were made.
        given, arena = _places(model, wanted, options.into, arena), None
        parts, size = plan(model, wanted, given)
    if arena is not None:
        _check_room(size, arena)
    if options.no_alloc:
        report = _report(model, parts, wanted, options, started, size, None)
        return Weights({}, report)
    if arena is None:
        size = fit_into_memory(model, parts, size)
    batch = Batch(parts, size, arena)
    ticker = _Ticker(options.progress, sum(part.bytes for part in parts))
    reading = _open_reading([batch], options)
    ready = [tensor for _, tensor in reading.run(ticker.advance)]
    ticker.finish()
    invalid = {t.info.name: t.invalid for t in ready if t.invalid is not None}
    if invalid:
        raise invalid_data(model.name, {n: invalid[n] for n in model.tensors.in_order(invalid)})
    if options.mlock:
        _lock(parts, batch.arena)
    views = dict(_views(batch))
    tensors = {info.name: views[info.name] for info in wanted}
    report = _report(model, parts, wanted, options, started, size, reading)
    return Weights(tensors, report, kept or batch.arena)


def stream(
    model: OpenModel, wanted: Sequence[TensorInfo], options: LoadOptions
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors as they become ready, in memory that goes when they go."""
    limit = options.tuning.memory_limit
    batches = (Batch(*plan(model, group)) for group in _groups(wanted, limit // _STREAM_SHARE))
    ticker = _Ticker(options.progress, sum(info.nbytes or 0 for info in wanted))
    reading = _open_reading(batches, options)
    views: dict[Batch, dict[str, Tensor]] = {}
    for batch, wanted_tensor in reading.run(ticker.advance):
        name = wanted_tensor.info.name
        if wanted_tensor.invalid is not None:
            raise invalid_data(model.name, {name: wanted_tensor.invalid})
        if batch not in views:
            views[batch] = dict(_views(batch))
        tensor = views[batch].pop(name)
        if not views[batch]:
            del views[batch]
            batch.arena = None
        yield name, tensor
        del tensor
    ticker.finish()


def empty(model: OpenModel, wanted: Sequence[TensorInfo]) -> Buffers:
    """Memory for tensors, laid out as a load would do it."""
    parts, size = plan(model, wanted, mapped=False)
    arena = allocate_arena(size) if size else None
    views = dict(_views(Batch(parts, size, arena)))
    return Buffers({info.name: views[info.name] for info in wanted}, arena)


# --- Reading ---------------------------------------------------------------------


def _open_reading(batches: Iterable[Batch], options: LoadOptions) -> Reading:
    tuning = options.tuning
    queue, method = open_queue(tuning.method, tuning.depth)
    return Reading(
        batches,
        queue,
        method=method,
        depth=tuning.depth,
        chunk_bytes=tuning.chunk_bytes,
        check=options.check_tensors,
        read_ahead=tuning.memory_limit,
    )


def _groups(wanted: Sequence[TensorInfo], most: int) -> Iterator[list[TensorInfo]]:
    """Tensors in the order in which they lie in their files, in groups of up to `most` bytes, or
    one that has more."""
    group: list[TensorInfo] = []
    nbytes = 0
    for info in sorted(wanted, key=lambda info: (info.file, info.offset)):
        if group and (nbytes + (info.nbytes or 0) > most or info.file != group[0].file):
            yield group
            group, nbytes = [], 0
        group.append(info)
        nbytes += info.nbytes or 0
    if group:
        yield group


def _destinations(
    wanted: Sequence[TensorInfo], into: object
) -> tuple[Mapping[str, object], Memory | None]:
    """Memory of the caller's by name, or an arena that is used again as a whole."""
    if into is None:
        return {}, None
    names = {info.name for info in wanted}
    if isinstance(into, Weights):
        if into.arena is None:
            raise ValueError(
                "into: these weights have no memory of their own; they were mapped, or read to "
                "other memory"
            )
        return {}, into.arena
    if isinstance(into, Buffers) and _sizes(into) == {i.name: i.nbytes for i in wanted}:
        return {}, into.arena
    if not isinstance(into, Mapping):
        raise TypeError(f"into must be a mapping from name to buffer, or Weights, not {into!r}")
    if strange := [name for name in into if name not in names]:
        raise ValueError(f"into: tensor {quoted(str(strange[0]))} is not loaded")
    return into, None


def _sizes(buffers: Buffers) -> dict[str, int | None]:
    return {name: array.nbytes for name, array in buffers.items()}


def _fits(parts: Sequence[Part], arena: Memory, into: object) -> bool:
    """Whether all that is planned is read to the arena, and, for buffers, to their places."""
    if any(part.source.mapping is not None and part.extents for part in parts):
        return False
    if not isinstance(into, Buffers):
        return True
    expected = {name: array.ctypes.data for name, array in into.items() if array.size}
    return expected == _addresses(parts, arena)


def _places(
    model: OpenModel, wanted: Sequence[TensorInfo], into: object, arena: Memory
) -> Mapping[str, object]:
    """Where the tensors go in memory that can't be read to as a whole, by name."""
    if isinstance(into, Buffers):
        return into
    parts, size = plan(model, wanted, mapped=False)
    _check_room(size, arena)
    views = _views(Batch(parts, size, arena))
    return {name: tensor.numpy() for name, tensor in views}


def _check_room(size: int, arena: Memory) -> None:
    if arena.nbytes < size:
        raise ValueError(f"into: {size} bytes are needed, the weights' memory has {arena.nbytes}")


def _addresses(parts: Iterable[Part], arena: Memory) -> dict[str, int]:
    return {
        info.name: arena.address + place(part.extents, info.offset)
        for part in parts
        if part.source.mapping is None
        for info in part.tensors
        if info.nbytes
    }


# --- What comes out ----------------------------------------------------------------


def _views(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for part in batch.parts:
        mapping = part.source.mapping
        memory = batch.arena if mapping is None else mapping
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


def _held(parts: Sequence[Part], arena: Memory | None) -> Iterator[tuple[Memory, int, int]]:
    """The memory of a load, as (memory, offset, length)."""
    if arena is not None:
        yield arena, 0, arena.nbytes
    for part in parts:
        if part.source.mapping is not None:
            for extent in part.extents:
                yield part.source.mapping, extent.offset, extent.length


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
    size: int,
    reading: Reading | None,
) -> LoadReport:
    moved = [part.moved for part in parts] + [file.moved for file in model.files]
    sources = [part.source for part in parts] or [file.source for file in model.files]
    used = reading if any(source.mapping is None for source in sources) else None
    seconds = time.perf_counter() - started
    return LoadReport(
        model=model.name,
        files=_file_reports(model, parts),
        tensors=len(wanted),
        bytes=sum(info.nbytes or 0 for info in wanted),
        bytes_direct=sum(part.bytes_direct for part in moved),
        bytes_buffered=sum(part.bytes_buffered for part in moved),
        bytes_mapped=sum(part.bytes_mapped for part in parts),
        bytes_bounced=sum(part.bytes_bounced for part in moved),
        open_seconds=model.open_seconds,
        seconds=seconds,
        method=None if used is None else used.method,
        depth=None if used is None else used.depth,
        chunk_bytes=None if used is None else options.tuning.chunk_bytes,
        device=options.device,
        peak_rss_bytes=peak_memory(),
        memory_bytes=size,
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
    by_number = {part.number: part for part in parts}
    reports = []
    for number, file in enumerate(model.files):
        part = by_number.get(number)
        source = file.source if part is None else part.source
        # What the load met counts more than what reading the header did.
        found = (part.moved.fallback if part is not None else None) or file.moved.fallback
        fallback = None if found is None else Fallback(errno=found[0], offset=found[1])
        reports.append(FileReport(**asdict(source.access()), fallback=fallback))
    return tuple(reports)
