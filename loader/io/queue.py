"""Which way many requests are in flight: io_uring, threads, or one after the other."""

from __future__ import annotations

import errno
import os

from loader._ffi import NativeError, Queue
from loader.errors import ReadError
from loader.io.file import describe_errno
from loader.options import Method, MethodRequest

# What "auto" tries, and the methods' names in the core.
_AUTO: tuple[Method, ...] = ("io_uring", "threads", "sync")
_NAMES: dict[Method, str] = {"io_uring": "uring", "threads": "threads", "sync": "sync"}

# Workers do everything but reads through io_uring: they populate memory, check
# data, and finish reads that can't be direct.
_MOST_HELPERS = 4
_MOST_READERS = 32

# So many requests other than reads may be in a queue at once.
MOST_POPULATING = 4
MOST_CHECKING = 8


def open_queue(method: MethodRequest, depth: int) -> tuple[Queue, Method]:
    """A queue for `depth` reads and the other requests, and the method that it has.

    A named method is a demand: ReadError where it can't be had. "auto" takes
    the first that can: container rules forbid io_uring in many places.
    """
    wanted = _AUTO if method == "auto" else (method,)
    helpers = min(os.cpu_count() or 1, _MOST_HELPERS)
    for name in wanted:
        workers = {"io_uring": helpers, "threads": min(depth, _MOST_READERS) + helpers, "sync": 0}[
            name
        ]
        try:
            capacity = depth + MOST_POPULATING + MOST_CHECKING
            return Queue(_NAMES[name], capacity=capacity, workers=workers), name
        except NativeError as error:
            failed = error.errno
    raise ReadError(
        f"method {method!r} can't be had: {describe_errno(failed)}; method='auto' takes another",
        errno=failed or errno.EINVAL,
    )
