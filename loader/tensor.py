"""Tensors, on the host and on devices, and the weights of a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from loader._closing import Closing
from loader._ffi import Memory
from loader.device.base import DeviceBuffer
from loader.device.registry import HOST
from loader.errors import DeviceError, UnsupportedFormatError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import PLAIN_DTYPES, array_layout, type_name
from loader.placement import DeviceArena
from loader.report import LoadReport


class Tensor:
    """A tensor in host memory. It keeps its memory alive, whatever is closed.

    A tensor of `load()` keeps the whole memory of that load alive, not only its
    own part: to keep one tensor of many, load it by name or copy it.
    """

    __slots__ = ("_data", "info")

    def __init__(self, info: TensorInfo, data: npt.NDArray[np.uint8]) -> None:
        self.info = info
        self._data = data

    @property
    def device(self) -> str:
        """The name of the device that it is on; "cpu" is the host."""
        return HOST

    def native(self) -> Any:
        """The tensor as its device has it, without a copy: a numpy array here, on a device a torch
        tensor, a pyopencl array, or an array with `__cuda_array_interface__`."""
        return self.numpy()

    def to_host(self) -> Tensor:
        """The tensor in host memory: itself, or a copy of one that is on a device."""
        return self

    def is_in(self, held: Sequence[DeviceArena], taken: Sequence[DeviceArena]) -> bool:
        """Whether it lies in memory of a device that is held and wasn't taken."""
        del held, taken
        return False

    def is_same(self, other: Tensor) -> bool:
        """Whether both are the same tensor in the same memory."""
        place = self._data.ctypes.data
        return self.info == other.info and place == other._data.ctypes.data

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as a numpy array, without a copy.

        Plain types (F16, F32, F64, I8 to I64) have their dtype and `info.shape`,
        BF16 is the uint16 of its bits, block types are uint8 with the last axis
        in bytes. Loaded memory is writable, mapped memory read-only.
        """
        dtype, shape = array_layout(self.info.ggml_type, self.info.shape)
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=self._data)
        return array

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values as a new float32 array of `info.shape`.

        Block types by the routines of the gguf package. UnsupportedFormatError,
        which names the type, for one that it has none for.
        """
        kind, array = self.info.ggml_type, self.numpy()
        if kind == gguf.GGMLQuantizationType.BF16:
            bits = array.reshape(-1).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.info.shape)
        if int(kind) in PLAIN_DTYPES:
            return array.astype(np.float32)
        if array.size == 0:
            return np.empty(self.info.shape, np.float32)
        try:
            values: npt.NDArray[np.float32] = gguf.dequantize(
                array, gguf.GGMLQuantizationType(kind)
            )
        except (NotImplementedError, ValueError, KeyError):
            raise UnsupportedFormatError(
                f"tensor {quoted(self.info.name)}: type {type_name(kind)} can't be dequantized by "
                "the installed gguf package; its raw blocks are in numpy()",
                field=self.info.name,
            ) from None
        return values.reshape(self.info.shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.numpy().__array_interface__
        return interface

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule, by numpy; read-only memory needs a consumer of DLPack 1.0."""
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.numpy().__dlpack_device__()
        return int(kind), int(number)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.info.shape)) or "scalar"
        return f"<Tensor {self.info.name!r} {type_name(self.info.ggml_type)} {shape}>"


class DeviceTensor(Tensor):
    """A tensor on a device. It is of use while its weights are open: ValueError after that."""

    __slots__ = ("_buffer", "_device", "_position")

    def __init__(self, info: TensorInfo, device: str, buffer: DeviceBuffer, position: int) -> None:
        super().__init__(info, _NOTHING)
        self._device = device
        self._buffer = buffer
        self._position = position

    @property
    def device(self) -> str:
        return self._device

    def is_in(self, held: Sequence[DeviceArena], taken: Sequence[DeviceArena]) -> bool:
        gone = {id(arena.buffer) for arena in taken}
        return id(self._buffer) in {id(arena.buffer) for arena in held} - gone

    def is_same(self, other: Tensor) -> bool:
        return (
            isinstance(other, DeviceTensor)
            and self.info == other.info
            and self._buffer is other._buffer
            and self._position == other._position
        )

    def native(self) -> Any:
        dtype, shape = array_layout(self.info.ggml_type, self.info.shape)
        return self._buffer.array(self._position, dtype, shape, int(self.info.ggml_type))

    def to_host(self) -> Tensor:
        return Tensor(self.info, self._buffer.read(self._position, self.info.nbytes or 0))

    def numpy(self) -> npt.NDArray[Any]:
        """DeviceError: what is on a device is no numpy array; `to_host` copies it."""
        raise DeviceError(
            f"tensor {quoted(self.info.name)} is on {self._device}; to_host() copies it to the host"
        )

    def __array__(self, *_: object, **__: object) -> npt.NDArray[Any]:
        """DeviceError, as `numpy`: else numpy would make an array of one object."""
        return self.numpy()

    def dequantize(self) -> npt.NDArray[np.float32]:
        return self.to_host().dequantize()

    def _own(self, name: str) -> Any:
        """An attribute of the native array: AttributeError where it has none."""
        return getattr(self.native(), name)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise AttributeError(f"tensor {quoted(self.info.name)} is on {self._device}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Of CUDA and of torch's CUDA devices; AttributeError on others."""
        interface: dict[str, Any] = self._own("__cuda_array_interface__")
        return interface

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule where the device's library makes one: torch does."""
        try:
            make = self._own("__dlpack__")
        except AttributeError:
            raise BufferError(f"{self._device} gives no DLPack capsules") from None
        return make(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        try:
            kind, number = self._own("__dlpack_device__")()
        except AttributeError:
            raise BufferError(f"{self._device} gives no DLPack capsules") from None
        return int(kind), int(number)


_NOTHING: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class Buffers(Mapping[str, npt.NDArray[Any]]):
    """Memory for tensors, by name, that direct reads can fill: for `load(into=...)`."""

    def __init__(self, tensors: dict[str, Tensor], arena: Memory | None) -> None:
        self._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self.arena = arena

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<Buffers for {len(self)} tensors>"


class Weights(Mapping[str, Tensor], Closing):
    """The tensors of a load by name, in file order, and its report.

    A context manager: `close` lets go of the tensors. Those on the host that
    somebody still holds stay valid; the memory of devices is freed at once, and
    tensors there can't be used any more (what torch owns lives on with torch's
    own tensors).
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        report: LoadReport,
        arena: Memory | None = None,
        devices: Sequence[DeviceArena] = (),
    ) -> None:
        self._tensors: dict[str, Tensor] | None = tensors
        self._arena = arena
        self._devices = tuple(devices)
        self.report = report

    @property
    def arena(self) -> Memory | None:
        """The memory of the load, to be used again; None when it was mapped or has none."""
        self._open_tensors()
        return self._arena

    @property
    def devices(self) -> tuple[DeviceArena, ...]:
        """The memory on devices, to be used again."""
        self._open_tensors()
        return self._devices

    def hand_over(self, later: Mapping[str, Tensor], taken: Sequence[DeviceArena]) -> None:
        """The memory belongs to later weights: of these only the tensors are left that are where
        they were, or whose memory wasn't taken. taken: of devices, isn't freed with these."""
        tensors = self._open_tensors()
        self._tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if (name in later and tensor.is_same(later[name])) or tensor.is_in(self._devices, taken)
        }
        gone = {id(arena.buffer) for arena in taken}
        self._devices = tuple(arena for arena in self._devices if id(arena.buffer) not in gone)

    def _open_tensors(self) -> dict[str, Tensor]:
        if self._tensors is None:
            raise ValueError("these weights are closed")
        return self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._open_tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_tensors())

    def __len__(self) -> int:
        return len(self._open_tensors())

    def close(self) -> None:
        """Lets go of the tensors, and frees the memory of devices."""
        self._tensors = self._arena = None
        devices, self._devices = self._devices, ()
        for arena in devices:
            arena.memory.close()

    def __repr__(self) -> str:
        state = "closed" if self._tensors is None else f"{len(self._tensors)} tensors"
        return f"<Weights: {state}>"
