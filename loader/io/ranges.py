"""Which parts of a file are read, and where in memory they go: pure arithmetic.

Tensors become extents: ranges of a file in rising offset order, widened to the
offset alignment, neighbours and small gaps merged. Each extent has a place in
one arena, congruent to its offset modulo `modulus`, so that every byte of it
can be read straight to where it belongs, and a tensor in memory is aligned as
it is in the file. Nothing is read twice: an edge block that two tensors share
is in one extent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

# A gap that is smaller is read over rather than left out: two requests cost more.
GAP_BYTES = 64 << 10


def align_down(value: int, alignment: int) -> int:
    """The largest multiple of `alignment` (a power of two) that isn't above `value`."""
    return value & -alignment


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` (a power of two) that isn't below `value`."""
    return (value + alignment - 1) & -alignment


@dataclass(frozen=True)
class Extent:
    """A range of a file that is read as one.

    offset: where it begins in the file; length: bytes of the file in it; room:
    bytes of memory that it may fill (whole blocks, so up to one block past the
    end of the file); position: where it begins in the arena.
    """

    offset: int
    length: int
    room: int
    position: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Layout:
    """Extents of one file in rising order, and where the memory after them begins."""

    extents: tuple[Extent, ...]
    end: int


def lay_out(
    ranges: Iterable[tuple[int, int]],
    *,
    file_size: int,
    offset_alignment: int,
    modulus: int,
    position: int = 0,
) -> Layout:
    """Extents for the (offset, length) ranges of one file, placed from `position` on.

    The ranges lie inside the file; empty ones are left out. offset_alignment and
    modulus are powers of two, modulus a multiple of offset_alignment.
    """
    extents = []
    for start, end in _merged(ranges, offset_alignment):
        position += (start - position) % modulus
        length = min(end, file_size) - start
        extents.append(Extent(start, length, end - start, position))
        position += end - start
    return Layout(tuple(extents), position)


def _merged(ranges: Iterable[tuple[int, int]], alignment: int) -> list[tuple[int, int]]:
    """Start and end of whole blocks, sorted, those that touch or nearly so made one."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges, key=itemgetter(0)):
        if length == 0:
            continue
        start = align_down(offset, alignment)
        end = align_up(offset + length, alignment)
        if merged and start - merged[-1][1] < GAP_BYTES:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def place(extents: Sequence[Extent], offset: int) -> int:
    """Where in the arena the byte at `offset` of the file is. It lies in one of the extents."""
    extent = extents[bisect_right(extents, offset, key=attrgetter("offset")) - 1]
    return extent.position + offset - extent.offset


def chunks(extent: Extent, chunk_bytes: int) -> Iterable[tuple[int, int]]:
    """Start and length of the pieces in which an extent is read, cut at multiples of chunk_bytes.

    The first one is shortened, so that all later ones begin on such a multiple;
    chunk_bytes is a multiple of the offset alignment.
    """
    start = extent.offset
    while start < extent.end:
        end = min((start // chunk_bytes + 1) * chunk_bytes, extent.end)
        yield start, end - start
        start = end
