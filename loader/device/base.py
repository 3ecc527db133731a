"""What a device is to the loader: memory that weights are copied to.

A device of one's own needs the methods of `Device` and nothing else. Sizes and
positions are bytes.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from loader._closing import Closing
from loader._ffi import Memory
from loader.device.memory import DeviceMemory
from loader.errors import DeviceUnavailableError
from loader.options import SettingError

_MIN_BATCH_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
_DEFAULT_MIN_BATCH = 32


class Event(Protocol):
    """The end of a copy that is under way."""

    def done(self) -> bool:
        """Whether the copy is over. DeviceError when it failed."""
        ...


class DeviceBuffer(Protocol):
    """Memory of a device. It is freed by `close`, or when nobody holds it any more. memory: that
    of the host that it lies in, where device and host share it; it gets its pages ahead."""

    nbytes: int
    memory: Memory | None

    @property
    def closed(self) -> bool: ...

    @property
    def span(self) -> tuple[int, int, int]:
        """Where it lies on the device: a memory object, and begin and end in it. Two buffers of
        one device overlap when their spans do."""
        ...

    def array(self, position: int, dtype: npt.DTypeLike, shape: tuple[int, ...], kind: int) -> Any:
        """The device's own array over a part of the buffer, without a copy. kind: the ggml type,
        for devices that know more types than numpy does."""
        ...

    def read(self, position: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A copy of a part of the buffer in host memory."""
        ...

    def close(self) -> None: ...


class PinnedMemory(Closing):
    """Host memory that a device copies from. why_pageable: why it isn't pinned; None when it is."""

    def __init__(
        self, memory: Memory, unpin: Callable[[], None] | None, why_pageable: str | None = None
    ) -> None:
        self.memory = memory
        self.why_pageable = why_pageable
        self._unpin = unpin

    def close(self) -> None:
        """Unpins it. The memory itself lives as long as anybody looks at it."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()


def import_package(module: str, package: str, extra: str, device: str) -> Any:
    """A module of a device's package; DeviceUnavailableError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeviceUnavailableError(
            f"device {device!r} needs the package {package} ({error}); install it with the extra: "
            f"pip install 'gguf-dio[{extra}]'"
        ) from None


@runtime_checkable
class Device(Protocol):
    """A device that tensors can be loaded to."""

    name: str
    largest_buffer: int | None  # the most that one buffer can have, if not the whole memory
    shares_host: bool  # whether its memory is the host's

    def memory(self) -> DeviceMemory:
        """What is free now, by the rule of `host.usable_memory`."""
        ...

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory of the device. DeviceMemoryError when it has too little."""
        ...

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Host memory to copy from; pageable, with the reason, where it can't be pinned."""
        ...

    def copy_async(
        self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]
    ) -> Event:
        """Begins to copy host memory to a buffer. The source stays as it is until it is done."""
        ...

    def synchronize(self) -> None:
        """Waits for all copies that were begun."""
        ...

    def adopt(self, owner: object) -> DeviceBuffer:
        """A buffer over memory of the caller's on this device, which isn't freed by it. ValueError
        for what is elsewhere or isn't contiguous, TypeError for what has no such memory."""
        ...

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        """Sets `count` F32 numbers (default: all up to the end) from `position` on."""
        ...

    def offloads(self, op: str, shape: Sequence[int]) -> bool:
        """Whether an operation on a batch is worth copying its weights here; see
        `is_worth_offloading`."""
        ...

    def close(self) -> None:
        """Lets go of the device. Buffers that are left are freed with it."""
        ...


# --- Rules that devices share -----------------------------------------------------


def offload_min_batch() -> int:
    """The least batch that is worth offloading: GGML_OP_OFFLOAD_MIN_BATCH, default 32 (llama.cpp).

    Read when a device is created. SettingError for what is no number.
    """
    text = os.environ.get(_MIN_BATCH_VARIABLE)
    if text is None:
        return _DEFAULT_MIN_BATCH
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text):
        raise SettingError(f"environment variable {_MIN_BATCH_VARIABLE}: {text!r} is not a number")
    return int(text)


class Offloading:
    """The part of a device that says whether a batch is worth it."""

    def __init__(self) -> None:
        self._min_batch = offload_min_batch()

    def offloads(self, op: str, shape: Sequence[int]) -> bool:
        return is_worth_offloading(self._min_batch, op, shape)


def is_worth_offloading(min_batch: int, op: str, shape: Sequence[int]) -> bool:
    """Whether the batch of an operation's result reaches `min_batch`.

    shape: of the result in ggml's order, ne[0] first. Never for GET_ROWS; the
    batch is ne[2] for MUL_MAT_ID, else ne[1] (llama.cpp's offload_op).
    """
    name = op.upper().removeprefix("GGML_OP_")
    if name == "GET_ROWS":
        return False
    axis = 2 if name == "MUL_MAT_ID" else 1
    return (shape[axis] if axis < len(shape) else 1) >= min_batch


def fill_range(buffer: DeviceBuffer, position: int, count: int | None) -> tuple[int, int]:
    """Position and count of a fill, checked. ValueError for what isn't inside the buffer."""
    if count is None:
        count = (buffer.nbytes - position) // 4
    if position < 0 or position % 4 or count < 0 or position + 4 * count > buffer.nbytes:
        raise ValueError(
            f"{count} F32 numbers from byte {position} on don't lie in a buffer of "
            f"{buffer.nbytes} bytes"
        )
    return position, count


class Over:
    """The event of a copy that was over when it began."""

    def done(self) -> bool:
        return True


def refuse_closed(buffer: DeviceBuffer, name: str) -> None:
    if buffer.closed:
        raise ValueError(f"memory of {name} is used after it was closed")
