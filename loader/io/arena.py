"""Memory of our own for headers and weights."""

from __future__ import annotations

from loader._ffi import Memory, NativeError, allocate
from loader.errors import DeviceMemoryError
from loader.io.file import describe_errno


def allocate_arena(size: int) -> Memory:
    """Zeroed memory of `size` bytes, aligned to 2 MiB, in huge pages where there are any.

    It lives as long as any view of it. DeviceMemoryError (a MemoryError) when
    the system has none.
    """
    try:
        return allocate(size)
    except NativeError as error:
        raise DeviceMemoryError(
            f"can't allocate {size} bytes of host memory: {describe_errno(error.errno)}; "
            "free some, or load less at once",
            needed=size,
        ) from None
