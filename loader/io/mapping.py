"""Mapped files: memory that is the page cache itself."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory, NativeError
from loader.errors import MappingError, ReadError, ShortReadError
from loader.io.file import File, describe_errno
from loader.io.ranges import Extent

logger = logging.getLogger("loader")


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


def copier(
    mapping: Memory, target: npt.NDArray[np.uint8], begin: int
) -> Callable[[int, int], None]:
    """Copies bytes of a mapped file, by their offset and length, to memory that holds the file from
    `begin` on."""
    whole = np.asarray(mapping)

    def copy(offset: int, length: int) -> None:
        target[offset - begin : offset - begin + length] = whole[offset : offset + length]

    return copy


def keep_only(mapping: Memory, extents: Sequence[Extent]) -> None:
    """Unmaps all but these ranges (in rising order) and what shares a page with them."""
    begin = 0
    for extent in (*extents, Extent(mapping.nbytes, 0, 0, 0)):
        try:
            mapping.release(begin, extent.offset - begin)
        except NativeError as error:  # it stays mapped: no harm
            logger.warning("a part of a mapping can't be given up: %s", describe_errno(error.errno))
        begin = extent.end


def prefetch_error(file: File, number: int, offset: int, length: int) -> ReadError | None:
    """The error for a range of a mapping that was prefetched, with 0 or an errno; None for none.

    ShortReadError when the file has become shorter (the rest of its last page is
    then zeros, and touching pages after it a SIGBUS); MappingError when the
    device failed.
    """
    kind: type[ReadError] = MappingError
    why = f"can't be read: {describe_errno(number)}; does the device work?"
    try:
        file.check_size()
    except NativeError as error:
        number = error.errno
        if number == errno.ENODATA:
            kind = ShortReadError
            why = f"are not all there any more: the file had {file.size} bytes when it was opened"
        else:
            why = f"can't be trusted: {describe_errno(number)} when the file was examined"
    if number == 0:
        return None
    return kind(
        f"{file.path}: {length} mapped bytes at offset {offset} {why}",
        errno=number,
        filename=file.path,
        offset=offset,
        length=length,
        access="mmap",
    )
