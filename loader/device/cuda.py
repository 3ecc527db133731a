"""CUDA devices, through the driver API of NVIDIA's cuda-bindings: no CUDA toolkit, no C of ours.

Each device uses its primary context, which is the one that other libraries in the
process use, so their arrays and ours are of the same device. The context is
current in the calling thread only while a call needs it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
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

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class CudaError(DeviceError):
    """A call of the driver failed. code: its CUresult as a number."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class _Driver:
    """The calls of the driver, with their errors as exceptions."""

    def __init__(self, device: str) -> None:
        self._api = import_package("cuda.bindings.driver", "cuda-bindings", "cuda", device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._api, name)

        def call(*arguments: Any) -> Any:
            result, *values = function(*arguments)
            if int(result):
                raise CudaError(f"{name} failed: {self._describe(result)}", int(result))
            return values[0] if len(values) == 1 else values

        return call

    def _describe(self, result: Any) -> str:
        name = getattr(result, "name", str(result))
        failed, text = self._api.cuGetErrorString(result)
        return f"{text.decode()} ({name})" if not int(failed) and text else name

    def constant(self, enumeration: str, name: str) -> Any:
        return getattr(getattr(self._api, enumeration), name)

    def is_not_ready(self, error: CudaError) -> bool:
        return error.code == int(self.constant("CUresult", "CUDA_ERROR_NOT_READY"))


class CudaBuffer:
    """Memory of a CUDA device. free: how it is given back when it is ours; owner: who has it when
    it isn't."""

    memory: Memory | None = None

    def __init__(
        self,
        device: CudaDevice,
        address: int,
        nbytes: int,
        free: Callable[[int], object] = lambda _: None,
        owner: object = None,
    ) -> None:
        self._device = device  # stays open as long as its buffers
        self._owner = owner
        self.nbytes = nbytes
        self._address = address
        self._free = weakref.finalize(self, free, address)
        self._free.atexit = False  # streams may still be open then; the driver frees it all

    @property
    def closed(self) -> bool:
        return not self._free.alive

    @property
    def address(self) -> int:
        refuse_closed(self, self._device.name)
        return self._address

    @property
    def span(self) -> tuple[int, int, int]:
        return 0, self.address, self.address + self.nbytes

    def array(
        self, position: int, dtype: npt.DTypeLike, shape: tuple[int, ...], kind: int
    ) -> CudaArray:
        del kind
        return CudaArray(self, position, np.dtype(dtype), shape)

    def read(self, position: int, nbytes: int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        if nbytes:
            self._device.read(found, self.address + position)
        return found

    def close(self) -> None:
        self._owner = None
        self._free()


class CudaArray:
    """An array in CUDA memory, for whoever takes `__cuda_array_interface__` (CuPy, Numba, torch).

    It is for use while the weights are open: consumers don't keep them open.
    """

    def __init__(
        self, buffer: CudaBuffer, position: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._buffer = buffer
        self._position = position
        self.dtype = dtype
        self.shape = shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        empty = 0 in self.shape
        return {
            "version": 3,
            "typestr": self.dtype.str,
            "shape": self.shape,
            "data": (0 if empty else self._buffer.address + self._position, False),
            "strides": None,
            "stream": None,  # all copies are over when a load returns
        }


class _CopyEvent:
    """The end of a copy. source: what is copied, kept until then."""

    def __init__(self, device: CudaDevice, event: Any, source: object) -> None:
        self._device = device
        self._event = event
        self._source: object = source

    def done(self) -> bool:
        if self._event is None:
            return True
        reached = True
        try:
            reached = self._device.is_reached(self._event)
        finally:  # an event that failed is over, too
            if reached:
                event, self._event, self._source = self._event, None, None
                self._device.destroy_event(event)
        return reached


class _Handles:
    """What a device has to give back: buffers, the stream, and the context, in this order, in
    whichever order those who hold them go."""

    def __init__(self, driver: _Driver, device: Any) -> None:
        self.driver = driver
        self.device = device
        self.stream: Any = None
        self.context: Any = driver.cuDevicePrimaryCtxRetain(device)
        self._buffers = 0
        self._is_closed = False
        self._lock = threading.RLock()  # a collection may free buffers while one is allocated

    @contextmanager
    def current(self) -> Iterator[_Driver]:
        """With the context current in this thread."""
        if self.context is None:
            raise ValueError("this CUDA device is closed")
        self.driver.cuCtxPushCurrent(self.context)
        try:
            yield self.driver
        finally:
            self.driver.cuCtxPopCurrent()

    def allocate(self, nbytes: int) -> int:
        with self.current() as driver:
            address = int(driver.cuMemAlloc(nbytes))
        with self._lock:
            self._buffers += 1
        return address

    def give(self, call: str, handle: Any) -> None:
        """Gives something back to the driver; tried again once, since nobody else will."""
        for is_last in (False, True):
            try:
                with self.current() as driver:
                    getattr(driver, call)(handle)
                return
            except CudaError:
                if is_last:
                    raise

    def free(self, address: int) -> None:
        try:
            self.give("cuMemFree", address)
        finally:
            with self._lock:
                self._buffers -= 1
                self._give_back()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._give_back()

    def _give_back(self) -> None:
        if not self._is_closed or self._buffers or self.context is None:
            return
        try:
            if self.stream is not None:
                self.give("cuStreamDestroy", self.stream)
        finally:
            self.context = self.stream = None
            self.driver.cuDevicePrimaryCtxRelease(self.device)


class CudaDevice(Offloading, Device):
    """The CUDA device of that number."""

    largest_buffer: int | None = None

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.name = f"cuda:{number}"
        driver = _Driver(self.name)
        device = self._find(driver, number)
        self._handles = handles = _Handles(driver, device)
        self._close = weakref.finalize(self, handles.close)
        self._close.atexit = False
        self._out_of_memory = int(driver.constant("CUresult", "CUDA_ERROR_OUT_OF_MEMORY"))
        self._buffers: weakref.WeakSet[CudaBuffer] = weakref.WeakSet()
        try:
            with handles.current():
                handles.stream = driver.cuStreamCreate(_NON_BLOCKING)
                attribute = driver.constant("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_INTEGRATED")
                self.shares_host = bool(driver.cuDeviceGetAttribute(attribute, device))
        except CudaError:
            self._close()
            raise

    def _find(self, driver: _Driver, number: int) -> Any:
        try:
            driver.cuInit(0)
            count = driver.cuDeviceGetCount()
        except (CudaError, RuntimeError) as error:
            raise DeviceUnavailableError(
                f"device {self.name!r}: there is no CUDA driver that works ({error}); install "
                "NVIDIA's driver"
            ) from None
        if not 0 <= number < count:
            raise DeviceUnavailableError(
                f"there is no CUDA device {number}; there are {count}, counted from 0"
            )
        return driver.cuDeviceGet(number)

    def memory(self) -> DeviceMemory:
        with self._handles.current() as driver:
            free, total = driver.cuMemGetInfo()
        return usable_memory(self.name, free, total, shares_host=self.shares_host)

    def allocate(self, nbytes: int) -> CudaBuffer:
        try:
            address = self._handles.allocate(nbytes)
        except CudaError as error:
            if error.code != self._out_of_memory:
                raise
            free = self.memory().free
            raise DeviceMemoryError(
                f"{self.name}: {nbytes} bytes can't be allocated, {free} are free: {error}",
                needed=nbytes,
                available=free,
            ) from None
        buffer = CudaBuffer(self, address, nbytes, self._handles.free)
        self._buffers.add(buffer)
        return buffer

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Ours, registered, rather than the driver's: direct reads need our alignment."""
        memory = allocate_arena(nbytes)
        try:
            with self._handles.current() as driver:
                driver.cuMemHostRegister(memory.address, memory.nbytes, _PORTABLE)
        except CudaError as error:
            return PinnedMemory(memory, None, str(error))

        def unpin() -> None:
            self._handles.give("cuMemHostUnregister", memory.address)

        return PinnedMemory(memory, unpin)

    def copy_async(
        self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]
    ) -> _CopyEvent:
        target = _cuda_buffer(buffer).address + position
        with self._handles.current() as driver:
            event, stream = driver.cuEventCreate(_NO_TIMING), self._handles.stream
            try:
                driver.cuMemcpyHtoDAsync(target, source.ctypes.data, source.nbytes, stream)
                driver.cuEventRecord(event, stream)
            except CudaError:
                try:
                    driver.cuStreamSynchronize(stream)  # the copy may have begun
                finally:
                    driver.cuEventDestroy(event)
                raise
        return _CopyEvent(self, event, source)

    def synchronize(self) -> None:
        with self._handles.current() as driver:
            driver.cuStreamSynchronize(self._handles.stream)

    def is_reached(self, event: Any) -> bool:
        with self._handles.current() as driver:
            try:
                driver.cuEventQuery(event)
            except CudaError as error:
                if driver.is_not_ready(error):
                    return False
                raise
        return True

    def destroy_event(self, event: Any) -> None:
        self._handles.give("cuEventDestroy", event)

    def read(self, target: npt.NDArray[np.uint8], address: int) -> None:
        """Copies from the device."""
        with self._handles.current() as driver:
            driver.cuMemcpyDtoH(target.ctypes.data, address, target.nbytes)

    def adopt(self, owner: object) -> CudaBuffer:
        interface = getattr(owner, "__cuda_array_interface__", None)
        if interface is None:
            raise TypeError(f"{type(owner).__name__} has no __cuda_array_interface__")
        address, read_only = interface["data"]
        if read_only:
            raise ValueError("it is read-only")
        shape, dtype = interface["shape"], np.dtype(interface["typestr"])
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if interface.get("strides") not in (None, _strides(shape, dtype.itemsize)):
            raise ValueError("it isn't contiguous")
        if nbytes and (number := self._number_of(address)) != int(self._handles.device):
            raise ValueError(f"it is on cuda:{number}, not on {self.name}")
        if (stream := interface.get("stream")) is not None:
            # What its owner has begun with it there comes first (version 3 of the interface).
            with self._handles.current() as driver:
                driver.cuStreamSynchronize(stream)
        return CudaBuffer(self, address, nbytes, owner=owner)

    def _number_of(self, address: int) -> int:
        with self._handles.current() as driver:
            attribute = driver.constant(
                "CUpointer_attribute", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"
            )
            return int(driver.cuPointerGetAttribute(attribute, address))

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        position, count = fill_range(buffer, position, count)
        bits = int(np.float32(value).view(np.uint32))
        if count:
            with self._handles.current() as driver:
                target = _cuda_buffer(buffer).address + position
                driver.cuMemsetD32Async(target, bits, count, self._handles.stream)
                driver.cuStreamSynchronize(self._handles.stream)

    def close(self) -> None:
        for buffer in list(self._buffers):
            buffer.close()
        self._close()


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Of a contiguous array in C order."""
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def _cuda_buffer(buffer: DeviceBuffer) -> CudaBuffer:
    if not isinstance(buffer, CudaBuffer):
        raise TypeError(f"{buffer!r} is no memory of CUDA")
    return buffer
