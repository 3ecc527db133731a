"""A batch of tensors that share one memory, cut into chunks in rising order of offsets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loader._ffi import Memory
from loader.device.staging import Segment, StagingBuffer, cut
from loader.gguf.tensors import TensorInfo
from loader.io.access import RESIDENT
from loader.io.arena import allocate_arena
from loader.io.mapping import copier
from loader.io.ranges import align_up, chunks, place
from loader.placement import DeviceArena
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
    the batch's memory has its pages up to the address `needs`. segment: what is done with it when
    it goes to a staging buffer, which is found for it then."""

    part: Part
    address: int
    room: int
    length: int
    offset: int
    needs: int
    tensors: tuple[Wanted, ...]
    copy: Callable[[int, int], None] | None = None  # from a mapping to other memory
    segment: Segment | None = None
    staging: StagingBuffer | None = None


@dataclass(slots=True, frozen=True)
class Step:
    """Fresh memory that gets its pages at once."""

    memory: Memory
    address: int
    length: int


@dataclass(eq=False)
class Batch:
    """Tensors that share one memory. arena: memory that is used again; else it is allocated;
    devices: the memory of devices for those that go there; nbytes: of memory that it takes, here
    and there, also when it has let go of it."""

    parts: list[Part]
    size: int
    arena: Memory | None = None
    devices: Sequence[DeviceArena] = ()
    nbytes: int = field(init=False)
    left: int = 0  # tensors that aren't ready
    chunks: list[Chunk] = field(default_factory=list)
    empty: list[Wanted] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # of populating
    populated: set[int] = field(default_factory=set)  # where those that are done begin
    frontier: int = 0  # the address up to which the arena has its pages

    def __post_init__(self) -> None:
        self.nbytes = self.size + sum(arena.nbytes for arena in self.devices)

    def start(self, chunk_bytes: int, staging_bytes: int) -> None:
        """Gets the memory and cuts the work into chunks; staging_bytes: of a staging buffer."""
        for arena in self.devices:
            if arena.buffer is None:
                arena.buffer = arena.device.allocate(arena.nbytes)
                if arena.buffer.memory is not None:
                    self._populate(arena.buffer.memory, arena.nbytes)
        if self.size and self.arena is None:
            self.arena = allocate_arena(self.size)
            self.frontier = self.arena.address
            self._populate(self.arena, self.size)
        for part in self.parts:
            step = align_up(chunk_bytes, part.source.file.alignments[1])
            if part.source.mapping is not None:
                step *= _PREFETCH_CHUNKS
                part.is_warm = (part.source.file.resident_fraction() or 0) >= RESIDENT
                if part.is_whole:
                    part.source.file.read_ahead()
            self._cut_owned(part, step)
            self._cut_given(part, step)
            self._cut_staged(part, staging_bytes)

    def _populate(self, memory: Memory, nbytes: int) -> None:
        """Plans to give fresh memory its pages, if there is enough of it to make that worth it."""
        if nbytes < _POPULATE_BYTES:
            return
        for start in range(0, nbytes, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, nbytes - start)
            self.steps.append(Step(memory, memory.address + start, length))

    def _cut_owned(self, part: Part, step: int) -> None:
        mapping = part.source.mapping
        memory = self.arena if mapping is None else mapping
        base = 0 if memory is None else memory.address
        populated = any(step.memory is memory for step in self.steps)
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
                needs = address + room if populated and mapping is None else 0
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
            copy = None if mapping is None else copier(mapping, given.array(), given.extent.offset)
            for start, length in chunks(given.extent, step):
                tensor.outstanding += 1
                address = tensor.address + start - given.extent.offset
                inside = (tensor,)
                self.chunks.append(Chunk(part, address, length, length, start, 0, inside, copy))

    def _cut_staged(self, part: Part, staging_bytes: int) -> None:
        tensors = {spot: Wanted(spot.info, 0) for spot in part.spots}
        self.left += len(tensors)
        self.empty += (tensor for tensor in tensors.values() if not tensor.info.nbytes)
        alignment = 1 if part.buffered_only else part.source.file.alignments[1]
        segments = cut(
            part.spots,
            file_size=part.source.file.size,
            offset_alignment=alignment,
            buffer_bytes=staging_bytes,
        )
        for segment in segments:
            inside = tuple(tensors[piece.spot] for piece in segment.pieces)
            for tensor in inside:
                tensor.outstanding += 1
            chunk = Chunk(part, 0, segment.room, segment.length, segment.offset, 0, inside)
            chunk.segment = segment
            self.chunks.append(chunk)

    def let_go(self) -> None:
        """Keeps no memory any more: it goes when the tensors in it go."""
        self.arena, self.devices = None, ()

    def populate_done(self, step: Step) -> None:
        self.populated.add(step.address)
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
