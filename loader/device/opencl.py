"""OpenCL devices, through pyopencl."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory
from loader.device.base import (
    Device,
    DeviceBuffer,
    Offloading,
    PinnedMemory,
    fill_range,
    import_package,
    refuse_closed,
)
from loader.device.host import usable_memory
from loader.device.memory import DeviceMemory
from loader.errors import DeviceError, DeviceMemoryError, DeviceUnavailableError
from loader.io.arena import allocate_arena

_FILL = "__kernel void fill(__global float *out, ulong first, float value) {"
_FILL += " out[first + get_global_id(0)] = value; }"


@contextmanager
def _errors(cl: Any, what: str) -> Iterator[None]:
    """pyopencl's errors as ours."""
    try:
        yield
    except (cl.Error, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{what} failed: {reason}") from None


class OpenCLBuffer:
    """An OpenCL memory object. memory: that of the host that it lies in, on a device that shares
    it.

    It is freed when nobody holds it any more: arrays that were handed out keep it,
    since pyopencl would crash on one that was released.
    """

    def __init__(
        self, device: OpenCLDevice, handle: Any, nbytes: int, memory: Memory | None = None
    ) -> None:
        self._device = device
        self._handle = handle
        self.memory = memory
        self.nbytes = nbytes

    @property
    def span(self) -> tuple[int, int, int]:
        return int(self.handle.int_ptr), 0, self.nbytes

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def handle(self) -> Any:
        refuse_closed(self, self._device.name)
        return self._handle

    def array(self, position: int, dtype: npt.DTypeLike, shape: tuple[int, ...], kind: int) -> Any:
        """A pyopencl array."""
        del kind
        array = importlib.import_module("pyopencl.array")
        return array.Array(
            self._device.queue, shape, np.dtype(dtype), data=self.handle, offset=position
        )

    def read(self, position: int, nbytes: int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        self._device.copy(found, self.handle, src_offset=position)
        return found

    def close(self) -> None:
        self._handle = self.memory = None


class _CopyEvent:
    def __init__(self, cl: Any, event: Any) -> None:
        self._cl = cl
        self._event = event

    def done(self) -> bool:
        with _errors(self._cl, "a copy to an OpenCL device"):
            status = self._event.command_execution_status
        if status < 0:
            raise DeviceError(f"a copy to an OpenCL device failed with status {status}")
        return bool(status == self._cl.command_execution_status.COMPLETE)


class OpenCLDevice(Offloading, Device):
    """The device of that number, counted over all platforms. queue: a pyopencl.CommandQueue to
    be used, so that its context has the buffers; without it, one is made."""

    def __init__(self, number: int = 0, queue: Any = None) -> None:
        super().__init__()
        self.name = f"opencl:{number}"
        self._cl = cl = import_package("pyopencl", "pyopencl", "opencl", self.name)
        self._device = _find(cl, number) if queue is None else queue.device
        with _errors(cl, f"opening {self.name}"):
            self._context = cl.Context([self._device]) if queue is None else queue.context
            self.queue = cl.CommandQueue(self._context) if queue is None else queue
            self._fill = cl.Kernel(cl.Program(self._context, _FILL).build(), "fill")
            self.shares_host = bool(self._device.host_unified_memory)
            self.is_gpu = bool(self._device.type & cl.device_type.GPU)
            self.largest_buffer: int | None = int(self._device.max_mem_alloc_size)

    def memory(self) -> DeviceMemory:
        """OpenCL tells only the total: what others use of a card isn't known."""
        with _errors(self._cl, self.name):
            total = int(self._device.global_mem_size)
        return usable_memory(self.name, total, total, shares_host=self.shares_host)

    def allocate(self, nbytes: int) -> OpenCLBuffer:
        """On a device that shares the host's memory, in huge pages of ours."""
        flags = self._cl.mem_flags
        memory = allocate_arena(nbytes) if self.shares_host else None
        try:
            if memory is None:
                handle = self._cl.Buffer(self._context, flags.READ_WRITE, nbytes)
            else:
                handle = self._cl.Buffer(
                    self._context,
                    flags.READ_WRITE | flags.USE_HOST_PTR,
                    hostbuf=np.asarray(memory)[:nbytes],
                )
        except self._cl.Error as error:
            free = self.memory().free
            raise DeviceMemoryError(
                f"{self.name}: {nbytes} bytes can't be allocated, {free} are free: {error}",
                needed=nbytes,
                available=free,
            ) from None
        return OpenCLBuffer(self, handle, nbytes, memory)

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Our memory as the host pointer of a buffer that stays mapped: so drivers pin it."""
        memory, flags = allocate_arena(nbytes), self._cl.mem_flags
        whole = np.asarray(memory)
        try:
            handle = self._cl.Buffer(
                self._context, flags.READ_ONLY | flags.USE_HOST_PTR, hostbuf=whole
            )
            mapped, _ = self._cl.enqueue_map_buffer(
                self.queue, handle, self._cl.map_flags.WRITE, 0, whole.shape, whole.dtype
            )
        except self._cl.Error as error:
            return PinnedMemory(memory, None, f"the OpenCL driver says: {error}")
        if mapped.ctypes.data != memory.address:
            mapped.base.release(self.queue)
            handle.release()
            return PinnedMemory(memory, None, "the OpenCL driver maps it elsewhere")

        def unpin() -> None:
            with _errors(self._cl, f"unpinning memory for {self.name}"):
                mapped.base.release(self.queue)
                self.queue.finish()
                handle.release()

        return PinnedMemory(memory, unpin)

    def copy_async(
        self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]
    ) -> _CopyEvent:
        event = self.copy(
            _opencl_buffer(buffer).handle, source, dst_offset=position, is_blocking=False
        )
        self.queue.flush()
        return _CopyEvent(self._cl, event)

    def synchronize(self) -> None:
        with _errors(self._cl, f"waiting for {self.name}"):
            self.queue.finish()

    def copy(self, target: Any, source: Any, **options: Any) -> Any:
        with _errors(self._cl, f"a copy to or from {self.name}"):
            return self._cl.enqueue_copy(self.queue, target, source, **options)

    def adopt(self, owner: object) -> OpenCLBuffer:
        array = importlib.import_module("pyopencl.array")
        if isinstance(owner, self._cl.Buffer):
            handle, nbytes = owner, int(owner.size)
        elif isinstance(owner, array.Array):
            if not owner.flags.c_contiguous or owner.offset:
                raise ValueError("it isn't contiguous from the beginning of its buffer")
            handle, nbytes = owner.base_data, int(owner.nbytes)
        else:
            raise TypeError(f"{type(owner).__name__} is no OpenCL buffer or array")
        if handle.context != self._context:
            raise ValueError(
                f"it is of another context than {self.name}; give a Device with the queue of that "
                "context: loader.device.opencl.OpenCLDevice(queue=...)"
            )
        return OpenCLBuffer(self, handle, nbytes)

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        position, count = fill_range(buffer, position, count)
        if count:
            handle = _opencl_buffer(buffer).handle
            arguments = (handle, np.uint64(position // 4), np.float32(value))
            with _errors(self._cl, f"filling memory of {self.name}"):
                self._fill(self.queue, (count,), None, *arguments)
                self.queue.finish()

    def close(self) -> None:
        """The context goes with the last buffer in it."""
        self.queue.finish()


def _opencl_buffer(buffer: DeviceBuffer) -> OpenCLBuffer:
    if not isinstance(buffer, OpenCLBuffer):
        raise TypeError(f"{buffer!r} is no memory of an OpenCL device")
    return buffer


def _find(cl: Any, number: int) -> Any:
    try:
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        raise DeviceUnavailableError(
            f"there is no OpenCL platform ({error}); install the driver of the device, or PoCL "
            "for the processor (Debian: pocl-opencl-icd)"
        ) from None
    if not 0 <= number < len(devices):
        names = ", ".join(f"opencl:{i} ({device.name})" for i, device in enumerate(devices))
        raise DeviceUnavailableError(
            f"there is no OpenCL device {number}; there are: {names or 'none'}"
        )
    return devices[number]
