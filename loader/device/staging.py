"""Staging: the buffers through which weights go to devices, and how a file is cut for them.

A ring of buffers in host memory, pinned where that can be had. A buffer is
filled by one read, its parts are copied to where they belong (several tensors
perhaps, on several devices), and it is filled again when all its copies, and the
checks of what is in it, are over. Reads of some buffers, copies of others and
checks go on at the same time.

A file is cut at whole blocks of its tensors, so that each part can be checked by
itself. A read begins and ends at multiples of the offset alignment: where a
block lies across a cut, the few bytes around it are read twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loader._closing import Closing
from loader.device.base import Device, PinnedMemory
from loader.errors import DeviceMemoryError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES, array_layout
from loader.io.ranges import GAP_BYTES, align_down, align_up

logger = logging.getLogger("loader")

# Tensors are aligned on a device as in their file, but no further than this.
_LARGEST_ALIGNMENT = 4096
_SMALLEST_BUFFER = 64 << 10
_BUFFERS_PER_READ = 2  # one is being read, one is being copied


@dataclass(frozen=True)
class Spot:
    """Where a tensor goes: `position` in the buffer of that number, of all of a load's devices."""

    info: TensorInfo
    buffer: int
    position: int


@dataclass(frozen=True)
class Piece:
    """Whole blocks of a tensor: `length` bytes from its byte `start` on."""

    spot: Spot
    start: int
    length: int

    @property
    def offset(self) -> int:
        """In the file."""
        return self.spot.info.offset + self.start

    @property
    def position(self) -> int:
        """In the device's buffer."""
        return self.spot.position + self.start


@dataclass(frozen=True)
class Copy:
    """`length` bytes, from `begin` in a staging buffer to `position` in a device's buffer."""

    buffer: int
    position: int
    begin: int
    length: int


@dataclass(frozen=True)
class Segment:
    """What one staging buffer is filled with: `length` bytes of the file at `offset`, in whole
    blocks up to `room`."""

    offset: int
    length: int
    room: int
    pieces: tuple[Piece, ...]

    def copies(self) -> Iterator[Copy]:
        """Pieces that are neighbours in the file and on the device go together."""
        held: Copy | None = None
        for piece in self.pieces:
            begin = piece.offset - self.offset
            copy = Copy(piece.spot.buffer, piece.position, begin, piece.length)
            if held is not None and _continues(held, copy):
                held = replace(held, length=begin + piece.length - held.begin)
                continue
            if held is not None:
                yield held
            held = copy
        if held is not None:
            yield held


def _continues(held: Copy, copy: Copy) -> bool:
    """Whether a copy goes on where the other one ends, but for padding that both sides have."""
    padding = copy.begin - held.begin - held.length
    return (
        copy.buffer == held.buffer
        and 0 <= padding < _LARGEST_ALIGNMENT
        and copy.position - held.position == copy.begin - held.begin
    )


def lay_out_buffers(
    tensors: Sequence[tuple[TensorInfo, int]], largest: int | None, name: str
) -> tuple[list[tuple[TensorInfo, int, int]], list[int]]:
    """Places tensors one after the other: (tensor, buffer, position), and the buffers' sizes.

    tensors: with the alignment of their file. Positions are multiples of it (up to
    4096) and of the size of the tensor's items. One buffer, or more where the
    device limits their size; DeviceMemoryError for a tensor that is larger.
    """
    placed: list[tuple[TensorInfo, int, int]] = []
    sizes = [0]
    for info, alignment in tensors:
        nbytes = info.nbytes or 0
        itemsize = array_layout(info.ggml_type, info.shape)[0].itemsize
        position = align_up(sizes[-1], max(min(alignment, _LARGEST_ALIGNMENT), itemsize))
        if largest is not None and position + nbytes > largest:
            if nbytes > largest:
                raise DeviceMemoryError(
                    f"{name}: tensor {quoted(info.name)} has {nbytes} bytes, a buffer there at "
                    f"most {largest}",
                    needed=nbytes,
                    available=largest,
                )
            position = 0
            sizes.append(0)
        placed.append((info, len(sizes) - 1, position))
        sizes[-1] = position + nbytes
    return placed, sizes


def cut(
    spots: Sequence[Spot], *, file_size: int, offset_alignment: int, buffer_bytes: int
) -> list[Segment]:
    """Cuts the tensors of one file for buffers of that size, a multiple of the alignment.

    Empty tensors are in no segment. ValueError for buffers that don't hold a block
    wherever it begins.
    """
    segments: list[Segment] = []
    pieces: list[Piece] = []
    begin = 0

    def finish() -> None:
        if pieces:
            end = align_up(pieces[-1].offset + pieces[-1].length, offset_alignment)
            length = min(end, file_size) - begin
            segments.append(Segment(begin, length, end - begin, tuple(pieces)))
            pieces.clear()

    for spot in sorted(spots, key=lambda spot: spot.info.offset):
        block = BLOCK_SIZES[int(spot.info.ggml_type)][1]
        start, nbytes = 0, spot.info.nbytes or 0
        while start < nbytes:
            at = spot.info.offset + start
            room = (begin + buffer_bytes - at) // block * block
            far = bool(pieces) and at - pieces[-1].offset - pieces[-1].length >= GAP_BYTES
            if not pieces or far or room <= 0:
                finish()
                begin = align_down(at, offset_alignment)
                room = (begin + buffer_bytes - at) // block * block
                if room <= 0:
                    raise ValueError(f"staging buffers of {buffer_bytes} bytes are too small")
            length = min(room, nbytes - start)
            pieces.append(Piece(spot, start, length))
            start += length
    finish()
    return segments


# --- The ring --------------------------------------------------------------------


@dataclass(frozen=True)
class RingShape:
    """How many buffers there are, and of how many bytes."""

    buffers: int
    buffer_bytes: int


def ring_shape(
    nbytes: int, *, chunk_bytes: int, depth: int, memory_limit: int, offset_alignment: int
) -> RingShape:
    """Buffers of `chunk_bytes`, two for each read under way; fewer, and then smaller ones, where
    the limit is below that, and no more than `nbytes` to be moved are in need of."""
    unit = max(offset_alignment, _LARGEST_ALIGNMENT)
    size = align_up(max(chunk_bytes, _SMALLEST_BUFFER), unit)
    if 2 * size > memory_limit:
        size = align_down(memory_limit // 2, unit)
    size = max(size, 2 * unit)  # so that a block fits in, wherever it begins
    count = max(min(_BUFFERS_PER_READ * depth, memory_limit // size, nbytes // size + 2), 1)
    return RingShape(count, size)


class StagingBuffer:
    """A buffer of a ring."""

    __slots__ = ("address", "data")

    def __init__(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        self.address = address
        self.data = data


def _pinned(devices: Sequence[Device], nbytes: int) -> PinnedMemory:
    """Memory that one of the devices has pinned, or pageable memory when none can."""
    for device in devices:
        found = device.allocate_pinned(nbytes)
        if found.why_pageable is None:
            break
    return found


class Ring(Closing):
    """The staging buffers of a load to these devices, pinned by the first one that can."""

    def __init__(self, devices: Sequence[Device], shape: RingShape) -> None:
        self._devices = devices
        self.buffers = shape.buffers
        self.buffer_bytes = shape.buffer_bytes
        self._pinned = _pinned(devices, shape.buffers * shape.buffer_bytes)
        memory, size = self._pinned.memory, shape.buffer_bytes
        whole = np.asarray(memory)
        self._free = [
            StagingBuffer(memory.address + start, whole[start : start + size])
            for start in range(0, shape.buffers * size, size)
        ]

    @property
    def why_pageable(self) -> str | None:
        """Why the buffers aren't pinned; None when they are."""
        return self._pinned.why_pageable

    def take(self) -> StagingBuffer | None:
        """A buffer that is free, if there is one."""
        return self._free.pop() if self._free else None

    def give(self, buffer: StagingBuffer) -> None:
        """Nobody writes to it or reads from it any more."""
        self._free.append(buffer)

    @property
    def is_starved(self) -> bool:
        return not self._free

    def close(self) -> None:
        """Unpins the memory, when the copies from it are over: also one that was begun when an
        interruption came, so that nobody knows of it, and whatever comes meanwhile."""
        self._free.clear()
        interruption: BaseException | None = None
        waiting = list(self._devices)
        while waiting:
            try:
                waiting[-1].synchronize()
                waiting.pop()
            except Exception as error:
                logger.warning("%s: %s", waiting.pop().name, error)
            except BaseException as error:
                interruption = error
        self._pinned.close()
        if interruption is not None:
            raise interruption
