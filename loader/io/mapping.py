"""Mapped files: memory that is the page cache itself."""

from __future__ import annotations

import errno

from loader._ffi import Memory, NativeError
from loader.errors import MappingError
from loader.io.file import File, describe_errno


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
    """Reads a range of a mapping into memory, so that touching it later can't fail.

    MappingError when the device fails, or when the file has become shorter.
    """
    while True:
        try:
            mapping.prefetch(offset, length)
        except NativeError as error:
            if error.errno == errno.EINTR:
                continue
            raise MappingError(
                f"{file.path}: {length} mapped bytes at offset {offset} can't be read: "
                f"{describe_errno(error.errno)}; the device failed or the file has become shorter",
                errno=error.errno,
                filename=file.path,
                offset=offset,
                length=length,
                access="mmap",
            ) from None
        return
