"""The errors of this package. All of them say what, where, and what to do.

Every error can be pickled and copied with its fields. A caller's mistake is a
TypeError or a ValueError of Python; a path that is missing, forbidden or a
directory stays FileNotFoundError, PermissionError or IsADirectoryError.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LONGEST_NAME = 200


def _restore(kind: type[LoaderError], message: str, fields: dict[str, object]) -> LoaderError:
    error = kind(message)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class LoaderError(Exception):
    """Base class of the errors of this package."""

    _slots: tuple[str, ...] = ()  # fields that live outside __dict__

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        fields = self.__dict__ | {name: getattr(self, name) for name in self._slots}
        return _restore, (type(self), str(self), fields)


class FormatError(LoaderError, ValueError):
    """A file is not the GGUF file that it should be.

    path: the file; offset: the byte where the fault is (None: nowhere in
    particular); field: the metadata key, tensor or header field.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.field = field


class TruncatedFileError(FormatError):
    """A file is too short for what its header claims."""


class UnsupportedFormatError(FormatError):
    """A file, or a part of it, is of a kind that can't be read here."""


class TensorLayoutError(FormatError):
    """Tensors are misaligned, overlap, or have an impossible shape."""


class ShardError(FormatError):
    """The files of a split model are incomplete or don't belong together."""


class ReadError(LoaderError, OSError):
    """Reading failed.

    errno, filename: as in OSError; offset, length: the bytes that were wanted
    (None when no bytes were); access: "direct", "mmap" or "buffered"; tensor:
    the tensor that was being read.
    """

    _slots = ("errno", "filename", "strerror")

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        filename: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        access: str | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.filename = filename
        self.strerror = message
        self.offset = offset
        self.length = length
        self.access = access
        self.tensor = tensor

    def in_tensor(self, name: str | None) -> ReadError:
        """This error, with the tensor that was being read."""
        if name is not None:
            self.tensor = name
            self.args = (f"{self} (tensor {quoted(name)})",)
            self.strerror = str(self)
        return self


class ShortReadError(ReadError):
    """A file ended before the bytes that it had when it was opened."""


class DirectIOError(ReadError):
    """Direct I/O was demanded and can't be had."""


class MappingError(ReadError):
    """A mapping was demanded and can't be had, or its pages can't be read."""


class TensorDataError(LoaderError, ValueError):
    """Tensors hold NaN or infinite values or block scales.

    tensors: the names of all tensors in which that was found.
    """

    def __init__(self, message: str, *, tensors: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class DeviceError(LoaderError):
    """A device doesn't do what was asked of it."""


class DeviceUnavailableError(DeviceError):
    """A device, or the package or library that drives it, isn't there."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device (the host included) has too little memory.

    needed, available: bytes; available is None when it isn't known.
    """

    def __init__(
        self, message: str, *, needed: int | None = None, available: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class FitError(LoaderError):
    """A model can't be fitted to the memory that there is."""


class VerifyError(LoaderError):
    """The tensors of a model aren't the expected ones."""


class LoadCancelled(LoaderError):  # noqa: N818 - the contract's name: a wish granted, not a fault
    """The progress callback ended the load."""


def quoted(name: str) -> str:
    """A name from a file for a message: quoted, on one line, and not too long."""
    return repr(name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "...")


@contextmanager
def frames_released() -> Iterator[None]:
    """An error that leaves this block holds no files or memory.

    An exception keeps the local variables of the frames that it passed, for as
    long as somebody keeps the exception: descriptors and mappings of a load that
    failed would stay with it. Put the work into a function of its own that is
    called inside the block; its frames, and those below in this package, are
    cleared.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and link is not before and id(link) not in seen:
            seen.add(id(link))
            for frame, _ in traceback.walk_tb(link.__traceback__):
                _clear(frame)
            link = link.__context__
        raise


def _clear(frame: FrameType) -> None:
    package = frame.f_globals.get("__package__") or ""  # None in a plain script
    if package.partition(".")[0] != __package__:
        return
    with suppress(RuntimeError):  # a frame that is still running keeps its variables
        frame.clear()
