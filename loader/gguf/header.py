"""Reads the header of a GGUF file, in a few large reads through the file's own handle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGUFValueType

from loader._ffi import Memory, NativeError, Problem, Scan, Transfer
from loader.errors import DeviceMemoryError, FormatError, UnsupportedFormatError, quoted
from loader.gguf import metadata, tensors
from loader.gguf.metadata import Metadata
from loader.gguf.problems import explain
from loader.gguf.tensors import Records, check_layout, read_records
from loader.gguf.types import TYPE_TABLE
from loader.io.arena import allocate_arena
from loader.io.file import File, Moved, describe_errno
from loader.io.ranges import align_up

# The first read; the memory that is set aside for a header (what isn't read into
# isn't used); and the most that a header may have. That of a model with a large
# vocabulary has some 10 MB.
FIRST_READ = 1 << 20
RESERVED = 16 << 20
LARGEST_HEADER = 1 << 30


@dataclass(frozen=True)
class Header:
    """What the header of one file says beside its metadata. alignment: the file's own, None when
    it says nothing; end: where the header ends; bytes. moved counts what was read."""

    version: int
    alignment: int | None
    end: int
    records: Records
    moved: Moved


@dataclass(frozen=True)
class DataSection:
    """Where a file has the data of its tensors: from `begin` on, at multiples of `alignment`."""

    alignment: int
    begin: int


def read_header(file: File) -> tuple[Header, Metadata]:
    """Reads and checks the header of a file; where the data is comes from `locate_data`.

    Raises FormatError or one of its kinds; ReadError when reading fails.
    """
    transfer = Transfer()
    scan, memory = _scan(file, transfer)
    moved = Moved()
    moved.add(transfer)
    header = np.asarray(memory)
    header.flags.writeable = False
    path = file.path
    values = Metadata(path, np.frombuffer(scan.keys(), metadata.RECORD), header)
    table = np.frombuffer(scan.tensors(), tensors.RECORD)
    records = read_records(path, table, header.data)
    return Header(scan.version, _alignment(path, values), scan.end, records, moved), values


def locate_data(file: File, header: Header, alignment: int) -> DataSection:
    """Where the data of a file's tensors is; TensorLayoutError when it can't be there."""
    begin = align_up(header.end, alignment)
    if header.records.names:
        check_layout(
            file.path,
            header.records,
            alignment=alignment,
            data_offset=begin,
            file_size=file.size,
        )
    return DataSection(alignment, begin)


def _scan(file: File, transfer: Transfer) -> tuple[Scan, Memory]:
    """Reads ever more of the file, twice as much each time, until the header is complete."""
    memory = allocate_arena(align_up(max(min(RESERVED, file.size), 1), FIRST_READ))
    have, wanted = 0, min(FIRST_READ, file.size)
    try:
        scan = Scan(file.size)
        while True:
            memory = _read(file, memory, have, wanted, transfer)
            have = wanted
            needed = _needed(file, scan, memory, have)
            if needed == 0:
                return scan, memory
            wanted = max(2 * have, align_up(needed, FIRST_READ))
            wanted = min(wanted, LARGEST_HEADER, file.size)
    except NativeError as error:
        raise DeviceMemoryError(
            f"{file.path}: no memory for the tables of the header: {describe_errno(error.errno)}"
        ) from None


def _needed(file: File, scan: Scan, memory: Memory, have: int) -> int:
    """0 when the header is complete, else how many bytes of the file it needs at least."""
    result = scan.run(memory, have, TYPE_TABLE)
    if isinstance(result, Problem):
        raise explain(file.path, result, np.asarray(memory).data[:have])
    if result > LARGEST_HEADER:
        raise UnsupportedFormatError(
            f"{file.path}: the header passes {LARGEST_HEADER} bytes; no model needs that",
            path=file.path,
            offset=scan.end,
        )
    return result


def _read(file: File, memory: Memory, have: int, wanted: int, transfer: Transfer) -> Memory:
    """Reads on to `wanted` bytes of the file, in memory that holds the first `have` of them, or
    in larger memory with a copy of them."""
    if wanted > memory.nbytes:
        larger = allocate_arena(align_up(2 * wanted, FIRST_READ))
        np.asarray(larger)[:have] = np.asarray(memory)[:have]
        memory = larger
    room = memory.nbytes - have
    file.pread_to(memory.address + have, room, wanted - have, have, transfer)
    return memory


def _alignment(path: str, values: Metadata) -> int | None:
    """general.alignment, which has to be a u32 and a power of two (GGUF specification)."""
    key = "general.alignment"
    if key not in values:
        return None
    kind, value = values.value_type(key), values[key]
    if kind != GGUFValueType.UINT32 or value == 0 or value & (value - 1):
        shown = quoted(value) if isinstance(value, str) else repr(value)
        raise FormatError(
            f"{path}: {key} is {shown} of type {kind.name}; it must be a power of two of type "
            "UINT32",
            path=path,
            offset=values.offset(key),
            field=key,
        )
    return int(value)
