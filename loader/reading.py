"""Reads batches of tensors through a queue: many requests in flight, memory populated ahead
of them, tensors checked while later ones are still being read.

The pages of fresh memory are given to it in steps, on other threads, and a chunk
is submitted when its pages are there, so that zeroing them and reading overlap. A
tensor is ready when its last chunk is there and, if that was asked for, checked.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from time import perf_counter

from loader._ffi import Done, Memory, NativeError, Queue
from loader.batch import Batch, Chunk, Step, Wanted
from loader.device.base import Event
from loader.device.staging import Ring, Segment
from loader.errors import ReadError
from loader.gguf.checks import check_slices
from loader.io.file import SLICE_BYTES, describe_errno, log_fallback
from loader.io.mapping import copier, prefetch_error
from loader.io.queue import MOST_CHECKING, MOST_POPULATING
from loader.options import LARGEST_DEPTH, Method
from loader.planning import Part

# A mapping is prefetched one piece after the other: the kernel's reading ahead is
# best when one thread goes through the file. When the file is in the page cache
# already, only page tables are made, and two threads are faster.
_MOST_PREFETCHING, _MOST_PREFETCHING_WARM = 1, 2
_MOST_BUFFERED = 2  # so too for buffered reads; while one is copied the next one is read
# How long we sleep at most before we look at signals.
_WAIT_MILLISECONDS = 40
# How long at most before we look whether copies to a device are over.
_COPY_MILLISECONDS, _COPY_SECONDS = 1, 0.0002


@dataclass
class Figures:
    """What a reading cost. Times are seconds. requests: reads; reading: from the first request
    to the last one done; waiting: of that, asleep; in_flight, populating, checking: the sums of
    the times that reads, populating and checks were under way."""

    requests: int = 0
    reading: float = 0.0
    waiting: float = 0.0
    in_flight: float = 0.0
    populating: float = 0.0
    checking: float = 0.0


@dataclass(slots=True, eq=False)
class _Check:
    """Data of a tensor that is checked, from block `first_block` of it on. chunk: what holds it
    when it is in a staging buffer."""

    batch: Batch
    tensor: Wanted
    address: int
    length: int
    first_block: int
    chunk: Chunk | None = None


@dataclass(slots=True, eq=False)
class _Leaving:
    """A staging buffer that is being copied to devices. checks: of what is in it, that aren't
    done."""

    batch: Batch
    chunk: Chunk
    events: list[Event]
    checks: int = 0

    def is_over(self) -> bool:
        while self.events and self.events[0].done():
            self.events.pop(0)
        return not self.events and self.checks == 0


@dataclass(slots=True, eq=False)
class _Request:
    """What is in the queue under a tag. memory: kept until it is done."""

    since: float
    batch: Batch
    memory: Memory | None
    chunk: Chunk | None = None
    populate: Step | None = None
    check: _Check | None = None


class Reading:
    """Reads batches and tells which tensors are ready.

    read_ahead: bytes of batches that may be under way at once (one always may);
    ring: staging buffers, where anything goes to devices. The queue is closed, and
    nothing is under way any more, when `run` ends, in whichever way.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        queue: Queue,
        *,
        method: Method,
        depth: int,
        chunk_bytes: int,
        check: bool,
        read_ahead: int,
        ring: Ring | None = None,
    ) -> None:
        self.figures = Figures()
        self.method = method
        self._batches = iter(batches)
        self._queue = queue
        self.depth = 1 if method == "sync" else depth
        self._chunk_bytes = chunk_bytes
        self._check = check
        self._read_ahead = read_ahead
        self._held: Batch | None = None  # the next one, until there is room for it
        self._under_way = 0  # bytes
        self._unread: deque[tuple[Batch, Chunk]] = deque()
        self._unpopulated: deque[tuple[Batch, Step]] = deque()
        self._unchecked: deque[_Check] = deque()
        self._ring = ring
        self._leaving: dict[Chunk, _Leaving] = {}
        self._ready: deque[tuple[Batch, Wanted]] = deque()
        self._requests: dict[int, _Request] = {}
        self._warned = self._unreachable = False
        self._reads = self._populates = self._checks = 0
        self._tag = 0

    def run(self, advance: Callable[[int], None]) -> Generator[tuple[Batch, Wanted]]:
        """Yields each tensor as it becomes ready; tells `advance` of bytes as they arrive."""
        started = perf_counter()
        try:
            while True:
                self._finish_copies()
                self._submit()
                while self._ready:
                    batch, tensor = self._ready.popleft()
                    yield batch, tensor
                    batch.left -= 1
                    if batch.left == 0:
                        self._under_way -= batch.nbytes
                if self._requests:
                    self._wait(advance)
                elif self._leaving:
                    time.sleep(_COPY_SECONDS)
                elif self._held is None and not self._unread:
                    break
        except NativeError as error:
            raise ReadError(
                f"the queue of reads failed: {describe_errno(error.errno)}; try another method=",
                errno=error.errno,
            ) from None
        finally:
            try:
                self._queue.close()
            finally:  # also after one more Ctrl-C
                self._drain()
            self.figures.reading += perf_counter() - started

    # --- Submitting ---

    def _submit(self) -> None:
        self._start_batches()
        while self._unpopulated and self._populates < MOST_POPULATING:
            batch, step = self._unpopulated.popleft()
            tag = self._enter(_Request(perf_counter(), batch, step.memory, populate=step))
            self._queue.populate(step.address, step.length, tag)
            self._populates += 1
        while self._unchecked and self._checks < MOST_CHECKING:
            check = self._unchecked.popleft()
            request = _Request(perf_counter(), check.batch, check.batch.arena, check=check)
            kind = int(check.tensor.info.ggml_type)
            self._queue.check(kind, check.address, check.length, self._enter(request))
            self._checks += 1
        while self._unread and self._reads < self.depth:
            batch, chunk = self._unread[0]
            if self._reads >= _most_at_once(chunk.part):
                break
            if chunk.needs > batch.frontier:
                break
            if not self._has_memory(chunk):
                break
            self._unread.popleft()
            self._read(batch, chunk)

    def _has_memory(self, chunk: Chunk) -> bool:
        """Finds a staging buffer for a chunk that needs one; False when none is free."""
        if chunk.segment is None or chunk.staging is not None:
            return True
        staging = None if self._ring is None else self._ring.take()
        if staging is None:
            return False
        chunk.staging, chunk.address = staging, staging.address
        if chunk.part.source.mapping is not None:
            chunk.copy = copier(chunk.part.source.mapping, staging.data, chunk.offset)
        return True

    def _read(self, batch: Batch, chunk: Chunk) -> None:
        part, mapping = chunk.part, chunk.part.source.mapping
        tag = self._enter(_Request(perf_counter(), batch, batch.arena, chunk=chunk))
        if mapping is not None:
            exact = not part.is_whole
            self._queue.prefetch(mapping, chunk.offset, chunk.length, tag, exact=exact)
        else:
            if self._unreachable and not part.buffered_only and not part.direct_required:
                part.buffered_only = True
                part.moved.fall_back(errno.EFAULT, chunk.offset)
            part.source.file.submit(
                self._queue,
                chunk.address,
                chunk.room,
                chunk.length,
                chunk.offset,
                tag,
                direct_required=part.direct_required,
                buffered_only=part.buffered_only,
            )
        self._reads += 1
        self.figures.requests += 1

    def _enter(self, request: _Request) -> int:
        self._tag += 1
        self._requests[self._tag] = request
        return self._tag

    def _start_batches(self) -> None:
        """Starts batches while there is work for the queue to be had and room for their memory."""
        while len(self._unread) < self.depth:
            if self._held is None:
                self._held = next(self._batches, None)
            batch = self._held
            if batch is None:
                return
            if self._under_way and self._under_way + batch.nbytes > self._read_ahead:
                return
            self._held = None
            self._under_way += batch.nbytes
            batch.start(self._chunk_bytes, 0 if self._ring is None else self._ring.buffer_bytes)
            self._unread += ((batch, chunk) for chunk in batch.chunks)
            self._unpopulated += ((batch, step) for step in batch.steps)
            self._ready += ((batch, tensor) for tensor in batch.empty)

    # --- What is done ---

    def _wait(self, advance: Callable[[int], None]) -> None:
        before = perf_counter()
        # The queue doesn't tell of copies: while reads wait for one to end, look often.
        starved = self._leaving and self._ring is not None and self._ring.is_starved
        done = self._queue.wait(_COPY_MILLISECONDS if starved else _WAIT_MILLISECONDS)
        now = perf_counter()
        self.figures.waiting += now - before
        if done is None:
            return
        request = self._requests.pop(done.tag)
        taken = now - request.since
        if request.chunk is not None:
            self._reads -= 1
            self.figures.in_flight += taken
            advance(self._read_done(request.batch, request.chunk, done))
        elif request.populate is not None:
            # That it failed is no harm: the pages come when they are written to.
            self._populates -= 1
            self.figures.populating += taken
            request.batch.populate_done(request.populate)
        elif request.check is not None:
            self._checks -= 1
            self.figures.checking += taken
            self._check_done(request.check, done)

    def _read_done(self, batch: Batch, chunk: Chunk, done: Done) -> int:
        """How many bytes arrived."""
        part = chunk.part
        if part.source.mapping is not None:
            self._check_mapped(chunk, -done.result)
        elif (arrived := self._check_read(batch, chunk, done)) < chunk.length:
            return arrived
        if chunk.segment is not None:
            self._leave(batch, chunk, chunk.segment)
            return chunk.length
        for tensor in chunk.tensors:
            tensor.outstanding -= 1
            if tensor.outstanding == 0:
                self._arrived(batch, tensor)
        return chunk.length

    # --- To devices ---

    def _leave(self, batch: Batch, chunk: Chunk, segment: Segment) -> None:
        """Begins to copy what is in a staging buffer, and to check it at the same time."""
        staging = chunk.staging
        if staging is None:
            raise RuntimeError("a segment was read to no staging buffer")
        leaving = self._leaving[chunk] = _Leaving(batch, chunk, [])
        for copy in segment.copies():
            arena = batch.devices[copy.buffer]
            source = staging.data[copy.begin : copy.begin + copy.length]
            leaving.events.append(arena.copy(copy.position, source))
        if not self._check:
            return
        for tensor, piece in zip(chunk.tensors, segment.pieces, strict=True):
            address = staging.address + piece.offset - segment.offset
            for start, length, first in check_slices(tensor.info, piece.start, piece.length):
                leaving.checks += 1
                check = _Check(batch, tensor, address + start, length, first, chunk)
                self._unchecked.append(check)

    def _finish_copies(self) -> None:
        for chunk in [chunk for chunk, leaving in self._leaving.items() if leaving.is_over()]:
            batch = self._leaving.pop(chunk).batch
            if self._ring is not None and chunk.staging is not None:
                self._ring.give(chunk.staging)
            for tensor in chunk.tensors:
                tensor.outstanding -= 1
                if tensor.outstanding == 0:
                    self._ready.append((batch, tensor))

    def _drain(self) -> None:
        """Waits for the copies that are still under way, after a failure and whatever else comes:
        the memory that they read is about to go."""
        interruption: BaseException | None = None
        while self._leaving:
            try:
                for chunk, leaving in list(self._leaving.items()):
                    if all(map(_is_over, leaving.events)):
                        del self._leaving[chunk]
                if self._leaving:
                    time.sleep(_COPY_SECONDS)
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    # --- What arrived ---

    def _check_mapped(self, chunk: Chunk, number: int) -> None:
        error = prefetch_error(chunk.part.source.file, number, chunk.offset, chunk.length)
        if error is not None:
            raise error.in_tensor(_name_at(chunk.tensors, error.offset))
        chunk.part.bytes_mapped += chunk.length
        if chunk.copy is not None:
            end = chunk.offset + chunk.length
            for start in range(chunk.offset, end, SLICE_BYTES):
                chunk.copy(start, min(SLICE_BYTES, end - start))

    def _check_read(self, batch: Batch, chunk: Chunk, done: Done) -> int:
        part = chunk.part
        part.moved.add(done.transfer)
        if done.transfer.fallback_errno:
            self._fallen_back(part, done.transfer.fallback_errno, done.transfer.fallback_offset)
        if done.result < 0:
            error = part.source.file.error(-done.result, done.transfer, chunk.length)
            raise error.in_tensor(_name_at(chunk.tensors, error.offset))
        if done.result < chunk.length:  # a signal came: the rest once more
            n = done.result
            rest = replace(
                chunk,
                address=chunk.address + n,
                room=chunk.room - n,
                length=chunk.length - n,
                offset=chunk.offset + n,
            )
            self._unread.appendleft((batch, rest))
        return done.result

    def _fallen_back(self, part: Part, number: int, offset: int) -> None:
        """Nothing more of the file is read directly, nor, where it is the memory that can't be
        reached (EFAULT), of any other file. One warning for all of it."""
        if not self._warned:
            log_fallback(part.source.file, number, offset)
        self._warned = part.buffered_only = True
        self._unreachable |= number == errno.EFAULT

    def _arrived(self, batch: Batch, tensor: Wanted) -> None:
        slices = list(check_slices(tensor.info)) if self._check else []
        if not slices:
            self._ready.append((batch, tensor))
            return
        tensor.outstanding = len(slices)
        for start, length, first_block in slices:
            check = _Check(batch, tensor, tensor.address + start, length, first_block)
            self._unchecked.append(check)

    def _check_done(self, check: _Check, done: Done) -> None:
        tensor = check.tensor
        if done.result == 1:
            block = check.first_block + done.block
            tensor.invalid = block if tensor.invalid is None else min(block, tensor.invalid)
        if check.chunk is not None:
            self._leaving[check.chunk].checks -= 1
            return
        tensor.outstanding -= 1
        if tensor.outstanding == 0:
            self._ready.append((check.batch, tensor))


def _is_over(event: Event) -> bool:
    """Whether a copy is over; one that failed is, and an error is on its way already."""
    try:
        return event.done()
    except Exception:
        return True


def _most_at_once(part: Part) -> int:
    """How many reads of a file are under way at the most, whatever the depth."""
    if part.source.mapping is not None:
        return _MOST_PREFETCHING_WARM if part.is_warm else _MOST_PREFETCHING
    return _MOST_BUFFERED if part.buffered_only else LARGEST_DEPTH


def _name_at(tensors: Iterable[Wanted], offset: int | None) -> str | None:
    """The tensor that holds the byte at `offset`, or the first one after it."""
    for tensor in tensors:
        info = tensor.info
        if offset is None or info.offset + (info.nbytes or 0) > offset:
            return info.name
    return None
