"""A batch of tensors that share one memory, cut into chunks in rising order of offsets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from loader._ffi import Memory
from loader.gguf.tensors import TensorInfo
from loader.io.access import RESIDENT
from loader.io.arena import allocate_arena
from loader.io.ranges import align_up, chunks, place
from loader.planning import Part

# So much memory gets its pages at a time; smaller memory gets them while it is
# read. See ARCHITECTURE.md for what was measured.
_POPULATE_BYTES = 16 << 20
# A mapping is prefetched in so many chunks at once.
_PREFETCH_CHUNKS = 32


@dataclass(slots=True, eq=False)
class Wanted:
    """A tensor that is being read to `address`; outstanding: its chunks, and then its checks, that
    aren't done; invalid: the first block found invalid."""

    info: TensorInfo
    address: int
    outstanding: int = 0
    invalid: int | None = None


@dataclass(slots=True, eq=False)
class Chunk:
    """One read: `length` bytes at `offset` of a part's file, to `room` bytes at `address`, once
    the batch's memory has its pages up to the address `needs`."""

    part: Part
    address: int
    room: int
    length: int
    offset: int
    needs: int
    tensors: tuple[Wanted, ...]
    copy: Callable[[int, int], None] | None = None  # from a mapping to memory that was given


@dataclass(eq=False)
class Batch:
    """Tensors that share one memory. arena: memory that is used again; else it is allocated."""

    parts: list[Part]
    size: int
    arena: Memory | None = None
    left: int = 0  # tensors that aren't ready
    chunks: list[Chunk] = field(default_factory=list)
    empty: list[Wanted] = field(default_factory=list)
    steps: range = range(0)  # addresses at which populating begins
    populated: set[int] = field(default_factory=set)  # those of them that are done
    frontier: int = 0  # the address up to which the memory has its pages

    def start(self, chunk_bytes: int) -> None:
        """Gets the memory and cuts the work into chunks."""
        if self.size and self.arena is None:
            self.arena = allocate_arena(self.size)
            if self.size >= _POPULATE_BYTES:
                begin = self.frontier = self.arena.address
                self.steps = range(begin, begin + self.size, _POPULATE_BYTES)
        for part in self.parts:
            step = align_up(chunk_bytes, part.source.file.alignments[1])
            if part.source.mapping is not None:
                step *= _PREFETCH_CHUNKS
                part.is_warm = (part.source.file.resident_fraction() or 0) >= RESIDENT
                if part.is_whole:
                    part.source.file.read_ahead()
            self._cut_owned(part, step)
            self._cut_given(part, step)

    def _cut_owned(self, part: Part, step: int) -> None:
        mapping = part.source.mapping
        memory = self.arena if mapping is None else mapping
        base = 0 if memory is None else memory.address
        tensors: deque[Wanted] = deque()
        for info in sorted(part.tensors, key=lambda info: info.offset):
            self.left += 1
            if info.nbytes:
                position = place(part.extents, info.offset) if mapping is None else info.offset
                tensors.append(Wanted(info, base + position))
            else:
                self.empty.append(Wanted(info, 0))
        for extent in part.extents:
            for start, length in chunks(extent, step):
                into = start - extent.offset
                # Whole blocks may be written up to the end of the extent's room,
                # and no further than this chunk when there is another one.
                room = extent.room - into if start + length == extent.end else length
                address = base + extent.position + into
                needs = address + room if self.steps and mapping is None else 0
                inside = _overlapping(tensors, start, start + length)
                if not inside:  # all of it lies between two tensors
                    continue
                self.chunks.append(Chunk(part, address, room, length, start, needs, inside))

    def _cut_given(self, part: Part, step: int) -> None:
        mapping = part.source.mapping
        for given in part.given:
            self.left += 1
            tensor = Wanted(given.info, given.buffer.address)
            if not given.info.nbytes:
                self.empty.append(tensor)
                continue
            copy = None if mapping is None else given.copier(mapping)
            for start, length in chunks(given.extent, step):
                tensor.outstanding += 1
                address = tensor.address + start - given.extent.offset
                inside = (tensor,)
                self.chunks.append(Chunk(part, address, length, length, start, 0, inside, copy))

    def step_length(self, address: int) -> int:
        """Bytes of the step that begins there."""
        return min(_POPULATE_BYTES, self.steps.start + self.size - address)

    def populate_done(self, address: int) -> None:
        self.populated.add(address)
        while self.frontier in self.populated:
            self.frontier += _POPULATE_BYTES


def _overlapping(tensors: deque[Wanted], start: int, end: int) -> tuple[Wanted, ...]:
    """The tensors, in order of offsets, with bytes from start to end; those before are dropped."""
    while tensors and tensors[0].info.offset + (tensors[0].info.nbytes or 0) <= start:
        tensors.popleft()
    found = []
    for tensor in tensors:
        if tensor.info.offset >= end:
            break
        tensor.outstanding += 1
        found.append(tensor)
    return tuple(found)
