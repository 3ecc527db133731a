"""A file that is read directly where it can be, and buffered where it can't."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from dataclasses import dataclass

from loader._closing import Closing
from loader._ffi import (
    FileInfo,
    Memory,
    NativeError,
    NativeFile,
    Queue,
    Transfer,
    WritableBuffer,
)
from loader.errors import DirectIOError, ReadError, ShortReadError
from loader.options import Access, PathLike

logger = logging.getLogger("loader")

# The most that one call of the core reads: between two calls the interpreter
# looks at signals, so this bounds how late a Ctrl-C is noticed.
SLICE_BYTES = 4 << 20

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def describe_errno(number: int) -> str:
    """An errno as people read it: "Invalid argument (EINVAL)"."""
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


class File(Closing):
    """A regular file, opened once for direct and buffered reads of the same inode.

    path: where it is; direct: whether to read directly where that is possible.
    Positions and lengths are bytes, of any value: alignment is taken care of.
    The size is fixed when the file is opened. `seek`, `tell`, `read` and
    `readinto` share one cursor and are for one thread at a time (they take
    turns); `pread_into` may be called from many.

    Raises FileNotFoundError, PermissionError or IsADirectoryError as `open`
    does, and ReadError for anything else that isn't a regular file. That direct
    I/O can't be had is no error: see `has_direct_io` and `direct_errno`.
    """

    def __init__(self, path: PathLike, *, direct: bool = True) -> None:
        path = os.fspath(path)  # once: it may be another one the next time
        self.path = os.fsdecode(path)
        _refuse_irregular(path, self.path)
        try:
            self._native: NativeFile | None = NativeFile(os.fsencode(path), direct=direct)
        except NativeError as error:
            raise _open_error(error.errno, self.path) from None
        self._info = self._native.info()
        self._cursor_lock = threading.Lock()

    # --- What it is ---

    @property
    def size(self) -> int:
        """Bytes, as of when the file was opened."""
        return self._info.size

    @property
    def has_direct_io(self) -> bool:
        """Whether the next `read` goes past the page cache."""
        return self._fresh_info().has_direct

    @property
    def memory_alignment(self) -> int | None:
        """What a direct read's address must be a multiple of, in bytes; None without direct I/O."""
        info = self._fresh_info()
        return info.memory_alignment if info.has_direct else None

    @property
    def offset_alignment(self) -> int | None:
        """What a direct read's offset and length must be a multiple of; None without direct I/O."""
        info = self._fresh_info()
        return info.offset_alignment if info.has_direct else None

    @property
    def direct_errno(self) -> int | None:
        """The errno that keeps direct I/O away, from opening or from a read; None without one."""
        return self._fresh_info().direct_errno or None

    @property
    def direct_for_loads(self) -> bool:
        """Whether positional reads can be direct, whatever happened to the cursor."""
        return self._fresh_info().has_direct_descriptor

    @property
    def alignments(self) -> tuple[int, int]:
        """Memory and offset alignment of direct positional reads in bytes, as found at open;
        1 and 1 when there are none."""
        return max(self._info.memory_alignment, 1), max(self._info.offset_alignment, 1)

    # --- The cursor ---

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the cursor and returns its position. ValueError before the beginning."""
        native = self._open_native()
        with self._cursor_lock:
            try:
                return native.seek(offset, whence)
            except (NativeError, OverflowError):
                raise ValueError(
                    f"can't seek to {offset} from whence {whence} in {self.path}"
                ) from None

    def tell(self) -> int:
        """The cursor's position in bytes."""
        native = self._open_native()
        with self._cursor_lock:
            return native.tell()

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes from the cursor (all that are left when negative or None).

        Fewer only at the end of the file. For large reads `readinto` saves a copy.
        """
        self._open_native()
        with self._cursor_lock:
            left = max(self.size - self._open_native().tell(), 0)
            buffer = bytearray(left if size is None or size < 0 else min(size, left))
            self._read_exact(WritableBuffer(buffer))
        return bytes(buffer)

    def readinto(self, buffer: object) -> int:
        """Fills `buffer` from the cursor and returns its length in bytes.

        ShortReadError, with nothing read, when fewer bytes are left.
        """
        destination = WritableBuffer(buffer)
        with self._cursor_lock:
            self._check_range(self._open_native().tell(), destination.nbytes)
            self._read_exact(destination)
        return destination.nbytes

    def _read_exact(self, destination: WritableBuffer) -> None:
        native = self._open_native()
        done = 0
        while done < destination.nbytes:
            n = min(SLICE_BYTES, destination.nbytes - done)
            try:
                done += native.read(destination.address + done, n)
            except NativeError as error:
                if error.errno != errno.EINTR:
                    raise self.error(error.errno, native.cursor(), n) from None

    # --- Positional reads ---

    def pread_into(self, buffer: object, offset: int) -> int:
        """Fills `buffer` with the bytes from `offset` on and returns its length in bytes.

        Doesn't touch the cursor. ShortReadError, with nothing read, when the
        file has fewer bytes there.
        """
        destination = WritableBuffer(buffer)
        if offset < 0:
            raise ValueError(f"offset must not be negative, not {offset}")
        self._check_range(offset, destination.nbytes)
        n = destination.nbytes
        self.pread_to(destination.address, n, n, offset, Transfer())
        return n

    def pread_to(
        self,
        address: int,
        room: int,
        length: int,
        offset: int,
        transfer: Transfer,
    ) -> None:
        """Reads `length` bytes at `offset` to memory that the caller keeps alive.

        Up to `room` bytes of it may be written to, so that whole blocks can go
        there; `transfer` counts, and says how long a fallback lasts. The range
        lies inside the file. ReadError or one of its kinds when it can't be read.
        """
        native = self._open_native()
        done = 0
        while done < length:
            n = min(SLICE_BYTES, length - done)
            here = room - done if n == length - done else n
            try:
                done += native.pread(address + done, here, n, offset + done, transfer)
            except NativeError as error:
                if error.errno != errno.EINTR:
                    raise self.error(error.errno, transfer, length - done) from None

    def submit(
        self,
        queue: Queue,
        address: int,
        room: int,
        length: int,
        offset: int,
        tag: int,
        *,
        direct_required: bool,
        buffered_only: bool,
    ) -> None:
        """As pread_to, through a queue. The file may be closed meanwhile; it is released after."""
        native = self._open_native()
        queue.read(
            native, address, room, length, offset, tag,
            direct_required=direct_required, buffered_only=buffered_only,
        )  # fmt: skip

    # --- The rest ---

    def map(self) -> Memory:
        """A read-only mapping of the whole file. NativeError when the system refuses."""
        return self._open_native().map()

    def stay_buffered(self) -> None:
        """Gives up direct reads for good, so that the file takes one descriptor. Before other
        threads use it."""
        self._open_native().stay_buffered()

    def read_ahead(self) -> None:
        """Advises the system that the mapping is going to be read from one end to the other."""
        self._open_native().read_ahead()

    def resident_fraction(self) -> float | None:
        """How much of the file is in the page cache, from 0 to 1; None when that isn't known."""
        try:
            resident = self._open_native().resident()
        except NativeError:
            return None
        return resident / self.size if self.size else 1.0

    def check_size(self) -> None:
        """NativeError with ENODATA when the file has become shorter than it was at open."""
        self._open_native().check_size()

    def close(self) -> None:
        """Closes the file, once reads that other threads have begun are over."""
        self._info = self._fresh_info()
        self._native = None

    @property
    def closed(self) -> bool:
        return self._native is None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}, {self.size} bytes>"

    def _open_native(self) -> NativeFile:
        if self._native is None:
            raise ValueError(f"{self.path} is closed")
        return self._native

    def _fresh_info(self) -> FileInfo:
        native = self._native
        return self._info if native is None else native.info()

    def _check_range(self, offset: int, length: int) -> None:
        if length > self.size - offset:
            raise ShortReadError(
                f"{self.path}: {length} bytes at offset {offset} pass the end of the file "
                f"at {self.size}",
                errno=errno.ENODATA,
                filename=self.path,
                offset=offset,
                length=length,
            )

    def error(self, number: int, transfer: Transfer, length: int) -> ReadError:
        """The error for a read that failed with this errno."""
        offset = transfer.stop_offset
        direct = self._fresh_info().has_direct_descriptor and transfer.wants_direct
        access: Access = "direct" if direct else "buffered"
        kind: type[ReadError] = ReadError
        message = f"{self.path}: {access} read failed at offset {offset}: {describe_errno(number)}"
        if number == errno.ENODATA:
            kind = ShortReadError
            message = (
                f"{self.path}: the file ends at offset {offset} or before, but had {self.size} "
                "bytes when it was opened; is something writing to it?"
            )
        elif number in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP) and transfer.direct_required:
            kind = DirectIOError
            message += "; direct I/O was demanded, allow buffered reads to go on without it"
        return kind(
            message,
            errno=number,
            filename=self.path,
            offset=offset,
            length=length,
            access=access,
        )


@dataclass
class Moved:
    """Bytes that were read, by the way they took, and the first place where reading went over
    from direct to buffered (errno and offset)."""

    bytes_direct: int = 0
    bytes_buffered: int = 0
    bytes_bounced: int = 0
    fallback: tuple[int, int] | None = None

    def add(self, transfer: Transfer) -> None:
        self.bytes_direct += transfer.bytes_direct
        self.bytes_buffered += transfer.bytes_buffered
        self.bytes_bounced += transfer.bytes_bounced
        if transfer.fallback_errno:
            self.fall_back(transfer.fallback_errno, transfer.fallback_offset)

    def fall_back(self, number: int, offset: int) -> None:
        if self.fallback is None or offset < self.fallback[1]:
            self.fallback = (number, offset)


def log_fallback(file: File, number: int, offset: int) -> None:
    """The warning that a reading went over to buffered reads."""
    logger.warning(
        "%s: direct reads stopped being possible at offset %d (%s); the rest is read buffered",
        file.path,
        offset,
        describe_errno(number),
    )


def _refuse_irregular(path: PathLike, shown: str) -> None:
    """Before it is opened: opening a FIFO hangs, and opening a device may do things."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - pathlib takes no bytes
    except OSError as error:
        raise _open_error(error.errno or errno.EIO, shown) from None
    if stat.S_ISDIR(mode):
        raise _open_error(errno.EISDIR, shown)
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ReadError(
            f"{shown} is {kind}, not a regular file; copy the model to a file first",
            errno=errno.EINVAL,
            filename=shown,
        )


def _open_error(number: int, path: str) -> OSError:
    error = OSError(number, os.strerror(number), path)  # of the subclass for its errno
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        return error
    return ReadError(
        f"{path} can't be opened: {describe_errno(number)}", errno=number, filename=path
    )
