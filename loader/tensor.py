"""A tensor in host memory, and the weights of a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from loader._closing import Closing
from loader._ffi import Memory
from loader.errors import UnsupportedFormatError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import PLAIN_DTYPES, array_layout, type_name
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

    A context manager: `close` lets go of the tensors. Those that somebody still
    holds stay valid.
    """

    def __init__(
        self, tensors: dict[str, Tensor], report: LoadReport, arena: Memory | None = None
    ) -> None:
        self._tensors: dict[str, Tensor] | None = tensors
        self._arena = arena
        self.report = report

    @property
    def arena(self) -> Memory | None:
        """The memory of the load, to be used again; None when it was mapped or has none."""
        self._open_tensors()
        return self._arena

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
        self._tensors = self._arena = None

    def __repr__(self) -> str:
        state = "closed" if self._tensors is None else f"{len(self._tensors)} tensors"
        return f"<Weights: {state}>"
