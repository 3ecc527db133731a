"""Devices of PyTorch: tensors that torch owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from loader._ffi import Memory
from loader.device.base import (
    Device,
    DeviceBuffer,
    Event,
    Offloading,
    Over,
    PinnedMemory,
    fill_range,
    import_package,
    refuse_closed,
)
from loader.device.host import available_memory, total_memory, usable_memory
from loader.device.memory import DeviceMemory
from loader.errors import DeviceError, DeviceMemoryError, DeviceUnavailableError
from loader.io.arena import allocate_arena


class TorchBuffer:
    """Bytes in a torch tensor. Views that somebody else holds keep the memory alive, as torch
    does."""

    def __init__(self, torch: Any, tensor: Any, memory: Memory | None = None) -> None:
        self._torch = torch
        self.memory = memory
        self._tensor = tensor
        self.nbytes = int(tensor.numel())

    @property
    def closed(self) -> bool:
        return self._tensor is None

    @property
    def tensor(self) -> Any:
        refuse_closed(self, "a torch device")
        return self._tensor

    @property
    def span(self) -> tuple[int, int, int]:
        address = int(self.tensor.data_ptr())
        return 0, address, address + self.nbytes

    def array(self, position: int, dtype: npt.DTypeLike, shape: tuple[int, ...], kind: int) -> Any:
        wanted = np.dtype(dtype)
        name = "bfloat16" if kind == GGMLQuantizationType.BF16 else wanted.name
        count = int(np.prod(shape, dtype=object))
        part = self.tensor[position : position + count * wanted.itemsize]
        return part.view(getattr(self._torch, name)).reshape(shape)

    def read(self, position: int, nbytes: int) -> npt.NDArray[np.uint8]:
        part = self.tensor[position : position + nbytes]
        if part.device.type == "meta":
            raise DeviceError("tensors on torch's meta device have no data")
        found: npt.NDArray[np.uint8] = part.cpu().numpy()
        return found.copy() if part.device.type == "cpu" else found

    def close(self) -> None:
        self._tensor = self.memory = None


class _CudaEvent:
    """The end of a copy on a stream. source: what is copied, kept until then."""

    def __init__(self, event: Any, source: Any) -> None:
        self._event = event
        self._source = source

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise DeviceError(f"a copy to a torch device failed: {error}") from None


class TorchDevice(Offloading, Device):
    """A device as torch names it: "cpu", "cuda:0", "mps", "meta", ..."""

    largest_buffer: int | None = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = f"torch:{name}"
        self._torch = import_package("torch", "torch", "torch", self.name)
        self._device = self._find(name)
        self._stream = (
            self._torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        )
        self.shares_host = self._device.type == "cpu"

    def _find(self, name: str) -> Any:
        """The device, proved by an allocation."""
        try:
            device = self._torch.device(name)
            self._torch.empty(1, dtype=self._torch.uint8, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DeviceUnavailableError(f"device {self.name!r}: {reason}") from None
        if device.type == "cuda" and device.index is None:
            device = self._torch.device("cuda", self._torch.cuda.current_device())
        return device

    def memory(self) -> DeviceMemory:
        kind = self._device.type
        if kind == "cuda":
            free, total = self._torch.cuda.mem_get_info(self._device)
            return usable_memory(self.name, free, total)
        if kind in ("cpu", "meta"):
            total = total_memory()
            return DeviceMemory(self.name, min(available_memory() or 0, total), total)
        return usable_memory(self.name, 0, 0)

    def allocate(self, nbytes: int) -> TorchBuffer:
        torch = self._torch
        if self._device.type == "cpu":  # in huge pages of ours, kept by the tensor
            arena = allocate_arena(nbytes)
            return TorchBuffer(torch, torch.from_numpy(np.asarray(arena)[:nbytes]), arena)
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._follow_torch()
            return TorchBuffer(torch, tensor)
        except (RuntimeError, MemoryError) as error:
            memory = self.memory()
            raise DeviceMemoryError(
                f"{self.name}: {nbytes} bytes can't be allocated, {memory.free} are free: "
                f"{str(error).partition(chr(10))[0]}",
                needed=nbytes,
                available=memory.free,
            ) from None

    def _follow_torch(self) -> None:
        """Copies wait for what torch has begun with memory that it gives out, or gives again."""
        if self._stream is not None:
            self._stream.wait_stream(self._torch.cuda.current_stream(self._device))

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Registered with CUDA rather than allocated by it: direct reads need our alignment."""
        memory = allocate_arena(nbytes)
        if self._stream is None:
            return PinnedMemory(memory, None, f"torch pins no memory for {self._device.type}")
        runtime, failed = self._torch.cuda.cudart(), 0
        with self._torch.cuda.device(self._device):
            failed = int(runtime.cudaHostRegister(memory.address, memory.nbytes, 0))
        if failed:
            return PinnedMemory(memory, None, f"cudaHostRegister gave error {failed}")
        return PinnedMemory(memory, lambda: runtime.cudaHostUnregister(memory.address))

    def copy_async(
        self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]
    ) -> Event:
        torch = self._torch
        target = _torch_buffer(buffer).tensor[position : position + source.nbytes]
        if self._stream is None:
            target.copy_(torch.from_numpy(source))
            return Over()
        with torch.cuda.stream(self._stream):
            target.copy_(torch.from_numpy(source), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaEvent(event, source)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def adopt(self, owner: object) -> TorchBuffer:
        torch = self._torch
        if not isinstance(owner, torch.Tensor):
            raise TypeError(f"{type(owner).__name__} is no torch tensor")
        here = (self._device.type, self._device.index or 0)
        if (owner.device.type, owner.device.index or 0) != here:
            raise ValueError(f"it is on {owner.device}, not on {self._device}")
        if not owner.is_contiguous() or owner.is_conj() or owner.is_neg():
            raise ValueError("it isn't contiguous, or a view that is computed when it is read")
        self._follow_torch()
        return TorchBuffer(torch, owner.detach().reshape(-1).view(torch.uint8))

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        position, count = fill_range(buffer, position, count)
        part = _torch_buffer(buffer).tensor[position : position + 4 * count]
        part.view(self._torch.float32).fill_(value)

    def close(self) -> None:
        """Torch owns its devices; there is nothing to let go of."""


def _torch_buffer(buffer: DeviceBuffer) -> TorchBuffer:
    if not isinstance(buffer, TorchBuffer):
        raise TypeError(f"{buffer!r} is no memory of torch")
    return buffer
