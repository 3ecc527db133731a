"""Mapped files: memory that is the page cache itself."""

from __future__ import annotations

import errno

from loader._ffi import Memory, NativeError
from loader.errors import MappingError, ReadError, ShortReadError
from loader.io.file import SLICE_BYTES, File, describe_errno


def map_file(file: File) -> Memory:
    """A read-only mapping of the whole file; nothing is read yet.

    It lives as long as any view of it. MappingError when the system refuses.
    """
    try:
        return file.map()
    except NativeError as error:
        raise MappingError(
            f"{file.path} can't be mapped: {describe_errno(error.errno)}",
            errno=error.errno,
            filename=file.path,
            access="mmap",
        ) from None


def prefetch(file: File, mapping: Memory, offset: int, length: int) -> None:
    """Reads a range of a mapping into memory, so that touching it can't fail for now.

    ShortReadError when the file has become shorter (the rest of its last page
    would be zeros, pages after it a SIGBUS); MappingError when the device fails.
    """
    for start in range(offset, offset + length, SLICE_BYTES):
        _prefetch_slice(file, mapping, start, min(SLICE_BYTES, offset + length - start))


def _prefetch_slice(file: File, mapping: Memory, offset: int, length: int) -> None:
    try:
        mapping.prefetch(offset, length)
    except NativeError as error:
        _check_size(file, offset, length)
        raise MappingError(
            f"{file.path}: {length} mapped bytes at offset {offset} can't be read: "
            f"{describe_errno(error.errno)}; does the device work?",
            errno=error.errno,
            filename=file.path,
            offset=offset,
            length=length,
            access="mmap",
        ) from None
    _check_size(file, offset, length)


def _check_size(file: File, offset: int, length: int) -> None:
    try:
        file.check_size()
    except NativeError as error:
        short = error.errno == errno.ENODATA
        why = (
            f"had {file.size} bytes when it was opened, and has fewer now"
            if short
            else (f"can't be examined: {describe_errno(error.errno)}")
        )
        kind = ShortReadError if short else ReadError
        raise kind(
            f"{file.path}: the file {why}; is something writing to it?",
            errno=error.errno,
            filename=file.path,
            offset=offset,
            length=length,
            access="mmap",
        ) from None
