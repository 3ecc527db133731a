"""Executes a load: reads what was planned, and makes tensors and a report of it."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from loader._ffi import Memory, NativeError
from loader.batch import Batch
from loader.destinations import check_size, destinations, fits, places
from loader.device.base import Device
from loader.device.staging import Ring, ring_shape
from loader.errors import LoadCancelled
from loader.gguf.checks import invalid_data
from loader.gguf.tensors import TensorInfo
from loader.io.arena import allocate_arena
from loader.io.file import describe_errno
from loader.io.mapping import keep_only
from loader.io.queue import open_queue
from loader.options import LoadOptions, Progress, Tuning
from loader.placement import Placement, check_room, place, spread
from loader.planning import (
    OpenModel,
    Part,
    fit_into_memory,
    map_apart,
    plan,
    refuse_unknown,
    select,
)
from loader.reading import Reading
from loader.results import Outcome, host_views, views
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
    """Loads the chosen tensors of an open model, and says so in one line of the log."""
    weights = load_tensors(model, choose(model, options), options)
    if not options.no_alloc:
        logger.info("%s", weights.report)
    return weights


def choose(model: OpenModel, options: LoadOptions) -> list[TensorInfo]:
    """The tensors that the options ask for, all of which can be loaded."""
    wanted = select(model.tensors, options.names)
    refuse_unknown(model, wanted)
    if isinstance(options.device, Mapping):
        select(model.tensors, options.device)  # its names have to be right
    return wanted


def load_tensors(model: OpenModel, wanted: Sequence[TensorInfo], options: LoadOptions) -> Weights:
    """Loads tensors, which may be parts of those in the file."""
    into = options.into
    placement = place(wanted, options.device, _devices_of(into))
    started = time.perf_counter()  # that a device's library starts is no part of the load
    given = destinations(placement, into)
    host, arena = given.host, given.arena
    parts, size = plan(model, placement.host, host, reuse=arena is not None)
    if arena is not None and isinstance(into, Weights) and size > arena.nbytes:
        # Those of its files that were mapped stay so.
        parts, size = plan(model, placement.host)
    elif arena is not None and not fits(parts, arena, into):
        # The file is mapped, or can't be read as when the buffers were made.
        host, arena = places(model, placement.host, into, arena), None
        parts, size = plan(model, placement.host, host)
    if arena is not None:
        check_size(size, arena)
    devices = spread(model, placement, given.devices, given.arenas)
    outcome = Outcome(model, wanted, options, started, placement.names, devices.arenas, size)
    if options.no_alloc:
        return Weights({}, outcome.report(parts + devices.parts, None, None))
    if isinstance(into, Weights) and given.arena is None and not devices.taken:
        raise ValueError("into: these weights have no memory on any device that is loaded to")
    shared = check_room(model, devices.arenas)
    if arena is None:
        outcome.size = fit_into_memory(model, parts, size, beside=shared)
    if devices.parts:
        map_apart(parts + devices.parts)
    batch = Batch(parts + devices.parts, outcome.size, arena, devices.arenas)
    with _ring(model, placement, options.tuning) as ring:
        reading = _read(batch, ring, model, options)
    if devices.parts:
        _unmap_the_rest(parts)
    if options.mlock:
        _lock(parts, batch.arena)
    by_name = dict(views(batch.parts, batch.arena, batch.devices))
    tensors = {info.name: by_name[info.name] for info in wanted}
    report = outcome.report(batch.parts, reading, ring)
    if isinstance(into, Weights):
        into.hand_over(tensors, devices.taken)
    return Weights(tensors, report, given.arena or batch.arena, devices.arenas)


def _unmap_the_rest(parts: Sequence[Part]) -> None:
    """Of mapped files only what the host's tensors need stays mapped: the others are on devices."""
    for part in parts:
        if part.source.mapping is not None:
            keep_only(part.source.mapping, part.extents)


def _devices_of(into: object) -> dict[str, Device]:
    """The devices of weights whose memory is used again."""
    arenas = into.devices if isinstance(into, Weights) else ()
    return {arena.device.name: arena.device for arena in arenas}


def _read(batch: Batch, ring: Ring | None, model: OpenModel, options: LoadOptions) -> Reading:
    """Reads all of a batch, and sees to it that it is valid."""
    ticker = _Ticker(options.progress, sum(part.bytes for part in batch.parts))
    reading = _open_reading([batch], options, ring)
    ready = [tensor for _, tensor in reading.run(ticker.advance)]
    ticker.finish()
    invalid = {t.info.name: t.invalid for t in ready if t.invalid is not None}
    if invalid:
        raise invalid_data(model.name, {n: invalid[n] for n in model.tensors.in_order(invalid)})
    return reading


def stream(
    model: OpenModel, wanted: Sequence[TensorInfo], options: LoadOptions
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors as they become ready, in memory that goes when they go."""
    limit, started = options.tuning.memory_limit, time.perf_counter()
    placement = place(wanted, options.device, {})
    groups = _groups(wanted, limit // _STREAM_SHARE)
    batches = (_batch(model, placement.part(group)) for group in groups)
    total = sum(info.nbytes or 0 for info in wanted)
    ticker = _Ticker(options.progress, total)
    with _ring(model, placement, options.tuning) as ring:
        reading = _open_reading(batches, options, ring)
        found: dict[Batch, dict[str, Tensor]] = {}
        # Closed before the ring is, however this ends.
        with closing(reading.run(ticker.advance)) as tensors:
            for batch, ready in tensors:
                name = ready.info.name
                if ready.invalid is not None:
                    raise invalid_data(model.name, {name: ready.invalid})
                if batch not in found:
                    found[batch] = dict(views(batch.parts, batch.arena, batch.devices))
                tensor = found[batch].pop(name)
                if not found[batch]:
                    del found[batch]
                    batch.let_go()
                yield name, tensor
                del tensor
    ticker.finish()
    logger.info(
        "%s: streamed %d tensors, %.1f MiB, in %.3f s to %s",
        model.name, len(wanted), total / (1 << 20), time.perf_counter() - started,
        ", ".join(placement.names),
    )  # fmt: skip


def _batch(model: OpenModel, placement: Placement) -> Batch:
    parts, size = plan(model, placement.host)
    devices = spread(model, placement, {}, ())
    check_room(model, devices.arenas)
    return Batch(parts + devices.parts, size, devices=devices.arenas)


def empty(model: OpenModel, wanted: Sequence[TensorInfo]) -> Buffers:
    """Memory for tensors, laid out as a load would do it."""
    parts, size = plan(model, wanted, mapped=False)
    arena = allocate_arena(size) if size else None
    by_name = dict(host_views(parts, arena))
    return Buffers({info.name: by_name[info.name] for info in wanted}, arena)


# --- Reading ---------------------------------------------------------------------


@contextmanager
def _ring(model: OpenModel, placement: Placement, tuning: Tuning) -> Iterator[Ring | None]:
    """Staging buffers for what goes to devices; None when nothing does."""
    nbytes = sum(info.nbytes or 0 for _, tensors in placement.devices for info in tensors)
    if not nbytes:
        yield None
        return
    shape = ring_shape(
        nbytes,
        chunk_bytes=tuning.chunk_bytes,
        depth=tuning.depth,
        memory_limit=tuning.memory_limit,
        offset_alignment=max(file.source.file.alignments[1] for file in model.files),
    )
    with Ring([device for device, tensors in placement.devices if tensors], shape) as ring:
        yield ring


def _open_reading(batches: Iterable[Batch], options: LoadOptions, ring: Ring | None) -> Reading:
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
        ring=ring,
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


# --- Locking -----------------------------------------------------------------------


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
