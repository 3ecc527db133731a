"""gguf.GGUFReader with this project's core below it: the same face, open in milliseconds.

What makes the original slow is an array of numpy views, and a Python number, for
each element of each array. Here they are made when they are touched.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, overload

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFEndian, GGUFValueType
from gguf.gguf_reader import ReaderTensor

from loader.errors import FormatError, UnsupportedFormatError, quoted
from loader.gguf.header import locate_data, read_header
from loader.gguf.metadata import StringArray
from loader.gguf.types import BLOCK_SIZES, PLAIN_DTYPES, ggml_type, why_unknown
from loader.io.file import File
from loader.io.mapping import map_file

_COUNTS = 8  # where the numbers of tensors and keys are in a file, after magic and version
_FEW = 256  # parts that aren't worth the trouble


class ReaderField(gguf.ReaderField):
    """A key of the metadata. `parts` and `data` of a long array are sequences whose elements are
    made when they are asked for; they equal the lists of the original, but aren't lists."""

    __slots__ = ()

    def contents(self, index_or_slice: int | slice = slice(None)) -> Any:
        """The value, or that part of an array, as Python objects. Text that isn't UTF-8 has
        surrogates."""
        if isinstance(self.parts, _ArrayParts):
            found = self.parts.values[index_or_slice]
            return found if isinstance(found, (str, list)) else found.tolist()
        if self.types[:1] == [GGUFValueType.STRING]:
            return str(self.parts[-1].tobytes(), "utf-8", "surrogateescape")
        return super().contents(index_or_slice)


class _Lazy(Sequence[Any]):
    """A list whose elements are made when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    @abstractmethod
    def _at(self, index: int) -> Any: ...

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, _Lazy)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def copy(self) -> list[Any]:
        return list(self)

    def __add__(self, other: list[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return f"<{len(self)} elements, made when they are touched>"

    def __reduce__(self) -> Any:
        """A pickle or a deep copy is a list."""
        return list, (list(self),)


class _Indices(_Lazy):
    """Which parts of an array are its elements."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _at(self, index: int) -> int:
        return self._numbers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)


class _ArrayParts(_Lazy):
    """The parts of an array: those before its elements, then each element; of strings, each
    element's length and bytes.

    values: the array; first: where its first element is in the file.
    """

    def __init__(
        self,
        data: npt.NDArray[np.uint8],
        before: list[npt.NDArray[Any]],
        values: StringArray | npt.NDArray[Any],
        first: int,
    ) -> None:
        self.values = values
        self._data = data
        self._before = before
        self._first = first
        self._per_element = 2 if isinstance(values, StringArray) else 1

    def __len__(self) -> int:
        return len(self._before) + self._per_element * len(self.values)

    @property
    def indices(self) -> _Indices:
        start = len(self._before) + self._per_element - 1
        return _Indices(range(start, len(self), self._per_element))

    def _at(self, index: int) -> npt.NDArray[Any]:
        index -= len(self._before)
        if index < 0:
            return self._before[index]
        if isinstance(self.values, StringArray):
            number, is_text = divmod(index, 2)
            start, end = self.values.span(number)
            if is_text:
                return self._data[start:end]
            return self._data[start - 8 : start].view(np.uint64)
        size = self.values.itemsize
        start = self._first + index * size
        return self._data[start : start + size].view(self.values.dtype)


class GGUFReader(gguf.GGUFReader):
    """Reads a GGUF file as `gguf.GGUFReader` does: change the import, and keep the rest.

    path: of the file; of a split model it reads that file alone, as the original.
    mode: only "r"; ValueError for others, for which gguf has its own. The
    attributes are the original's; `fields` and `tensors` are made when they are
    first touched, arrays element by element. The data of tensors is mapped and
    read-only, and stays valid for as long as anybody holds it. Files of big-endian
    machines and arrays of arrays, which no model has, aren't read here. Raises
    FormatError (a ValueError) or its kinds for what is no valid file,
    FileNotFoundError and the like.
    """

    def __init__(self, path: os.PathLike[str] | str, mode: Literal["r"] = "r") -> None:
        if mode != "r":
            raise ValueError(
                f"mode {mode!r}: files are only read here; gguf.GGUFReader opens them for writing"
            )
        with File(path) as file:
            self._header, self._metadata = read_header(file)
            self.alignment = self._header.alignment or GGUF_DEFAULT_ALIGNMENT
            self.data_offset = locate_data(file, self._header, self.alignment).begin
            self._path = file.path
            # Not a memmap: the mapping is that of the file that was checked.
            self.data = np.asarray(map_file(file))  # type: ignore[assignment]
        self.endianess = GGUFEndian.LITTLE

    @cached_property
    def fields(self) -> OrderedDict[str, gguf.ReaderField]:  # type: ignore[override]  # read-only
        """The metadata: first version and counts of the file, then its keys in file order."""
        counts = self._view(_COUNTS, np.uint64, 2)
        first = (
            (4, "version", self._view(4, np.uint32), GGUFValueType.UINT32),
            (8, "tensor_count", counts[:1], GGUFValueType.UINT64),
            (16, "kv_count", counts[1:], GGUFValueType.UINT64),
        )
        found: OrderedDict[str, gguf.ReaderField] = OrderedDict()
        for offset, name, value, kind in first:
            found[f"GGUF.{name}"] = ReaderField(offset, f"GGUF.{name}", [value], [0], [kind])
        for name, record in zip(self._metadata, self._metadata.records, strict=True):
            if name in found:
                raise FormatError(
                    f"{self._path}: the metadata key {quoted(name)} is the name of a field that "
                    "every file has",
                    path=self._path,
                    offset=int(record["offset"]),
                    field=name,
                )
            found[name] = self._field(name, record)
        return found

    @cached_property
    def tensors(self) -> list[ReaderTensor]:  # type: ignore[override]  # read-only
        """The tensors in file order. UnsupportedFormatError for one of a type whose size nobody
        knows."""
        records = self._header.records
        return [
            self._tensor(name, record)
            for name, record in zip(records.names, records.table, strict=True)
        ]

    def _view(self, offset: int, dtype: npt.DTypeLike, count: int = 1) -> npt.NDArray[Any]:
        size = np.dtype(dtype).itemsize * count
        return self.data[offset : offset + size].view(dtype)

    def _field(self, name: str, record: Any) -> ReaderField:
        offset, name_offset = int(record["offset"]), int(record["name_offset"])
        name_length, value = int(record["name_length"]), int(record["value_offset"])
        kind = GGUFValueType(int(record["type"]))
        after_name = name_offset + name_length
        parts = [
            self._view(name_offset - 8, np.uint64),
            self._view(name_offset, np.uint8, name_length),
            self._view(after_name, np.uint32),
        ]
        if kind == GGUFValueType.ARRAY:
            parts += [self._view(after_name + 4, np.uint32), self._view(after_name + 8, np.uint64)]
            array = _ArrayParts(self.data, parts, self._metadata[name], value)
            element = GGUFValueType(int(record["element_type"]))
            types: list[GGUFValueType] = [kind, element] if len(array.values) else [kind]
            if len(array) <= _FEW:
                return ReaderField(offset, name, list(array), list(array.indices), types)
            return ReaderField(offset, name, array, array.indices, types)  # type: ignore[arg-type]
        if kind == GGUFValueType.STRING:
            parts += [
                self._view(value - 8, np.uint64),
                self._view(value, np.uint8, int(record["value_length"])),
            ]
        else:
            parts.append(self._view(value, self.gguf_scalar_to_np[kind]))
        return ReaderField(offset, name, parts, [len(parts) - 1], [kind])

    def _tensor(self, name: str, record: Any) -> ReaderTensor:
        type_id = int(record["type"])
        if type_id not in BLOCK_SIZES:
            raise UnsupportedFormatError(
                f"{self._path}: tensor {quoted(name)} is of {why_unknown(type_id)}",
                path=self._path,
                offset=int(record["offset"]),
                field=name,
            )
        field = self._tensor_field(name, record)
        dims, shape = field.parts[3], tuple(field.parts[3].tolist()[::-1])
        nbytes, offset = int(record["nbytes"]), self.data_offset + int(record["data_offset"])
        dtype = PLAIN_DTYPES.get(type_id)
        if dtype is None or type_id == gguf.GGMLQuantizationType.BF16:
            elements, size = BLOCK_SIZES[type_id]
            dtype = np.dtype(np.uint8)
            shape = (*shape[:-1], shape[-1] // elements * size) if shape else (size,)
        return ReaderTensor(
            name=name,
            tensor_type=ggml_type(type_id),  # type: ignore[arg-type]  # an int where gguf has none
            shape=dims,
            n_elements=int(np.prod(dims, dtype=np.uint64)),
            n_bytes=nbytes,
            data_offset=offset,
            data=self.data[offset : offset + nbytes].view(dtype).reshape(shape),
            field=field,
        )

    def _tensor_field(self, name: str, record: Any) -> ReaderField:
        offset, name_offset = int(record["offset"]), int(record["name_offset"])
        name_length, n_dims = int(record["name_length"]), int(record["n_dims"])
        dims = name_offset + name_length + 4
        kind = dims + 8 * n_dims
        parts = [
            self._view(name_offset - 8, np.uint64),
            self._view(name_offset, np.uint8, name_length),
            self._view(dims - 4, np.uint32),
            self._view(dims, np.uint64, n_dims),
            self._view(kind, np.uint32),
            self._view(kind + 4, np.uint64),
        ]
        return ReaderField(offset, name, parts, [1, 3, 4, 5])
