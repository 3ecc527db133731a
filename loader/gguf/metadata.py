"""The metadata of a GGUF file as a mapping; a value is decoded when it is first touched."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType

from loader._ffi import string_offsets
from loader.errors import FormatError, quoted
from loader.options import MetadataValue, SettingError

# struct ld_gguf_key
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("name_offset", "<u8"),
        ("name_length", "<u8"),
        ("value_offset", "<u8"),
        ("value_length", "<u8"),
        ("count", "<u8"),
        ("type", "<u4"),
        ("element_type", "<u4"),
    ]
)

_V = GGUFValueType
_FORMATS = {
    _V.UINT8: "<B",
    _V.INT8: "<b",
    _V.UINT16: "<H",
    _V.INT16: "<h",
    _V.UINT32: "<I",
    _V.INT32: "<i",
    _V.FLOAT32: "<f",
    _V.UINT64: "<Q",
    _V.INT64: "<q",
    _V.FLOAT64: "<d",
}
_PYTHON_TYPES: dict[type, frozenset[GGUFValueType]] = {
    bool: frozenset({_V.BOOL}),
    int: frozenset(_FORMATS) - {_V.FLOAT32, _V.FLOAT64},
    float: frozenset({_V.FLOAT32, _V.FLOAT64}),
    str: frozenset({_V.STRING}),
    list: frozenset({_V.ARRAY}),
}


_AT_ONCE = 1 << 16  # strings whose places are Python numbers at the same time


def _text(data: memoryview) -> str:
    return str(data, "utf-8", "surrogateescape")


class StringArray(Sequence[str]):
    """The strings of an array, decoded one by one as they are asked for.

    Text is UTF-8; bytes that aren't come as surrogates, so that
    `text.encode("utf-8", "surrogateescape")` gives back what is in the file.
    """

    def __init__(self, header: memoryview, offset: int, count: int) -> None:
        self._header = header
        self._offsets = np.empty(count + 1, np.uint64)
        string_offsets(header, offset, count, self._offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def span(self, index: int) -> tuple[int, int]:
        """Where the text of a string begins and ends in its file, in bytes."""
        return int(self._offsets[index]) + 8, int(self._offsets[index + 1])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self.span(range(len(self))[index])
        return _text(self._header[start:end])

    def __iter__(self) -> Iterator[str]:
        header = self._header
        for first in range(0, len(self), _AT_ONCE):
            bounds = self._offsets[first : first + _AT_ONCE + 1].tolist()
            for start, end in pairwise(bounds):
                yield _text(header[start + 8 : end])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (StringArray, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"


class Metadata(Mapping[str, Any]):
    """The metadata of a model, in file order. It may be used after the model is closed.

    Scalars are Python values, numeric arrays read-only numpy arrays of the
    stored type, string arrays a lazy sequence (`StringArray`).
    """

    def __init__(self, path: str, records: npt.NDArray[Any], header: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._records = records
        self._bytes = header
        self._header = header.data
        self._values: dict[str, Any] = {}
        self._overridden: dict[str, GGUFValueType] = {}
        self._indices: dict[str, int] = {}
        starts, lengths = records["name_offset"].tolist(), records["name_length"].tolist()
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            name = _text(self._header[start : start + length])
            if name in self._indices:
                raise FormatError(
                    f"{path}: the metadata key {quoted(name)} is in the file twice",
                    path=path,
                    offset=int(records["offset"][index]),
                    field=name,
                )
            self._indices[name] = index

    def override(self, values: Mapping[str, MetadataValue]) -> None:
        """Puts values in the place of stored ones, which keep their type, or adds them.

        ValueError for a value that the stored type can't hold, for an array, and
        for keys that say how the file is laid out.
        """
        for key, value in values.items():
            if key == "general.alignment" or key.startswith("split."):
                raise SettingError(f"{key!r} says how the file is laid out and can't be overridden")
            kind = self.value_type(key) if key in self else _type_of(value)
            self._values[key] = _fit(key, value, kind)
            self._overridden[key] = kind

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._decode(self._records[self._indices[key]])
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._indices or key in self._overridden

    def __iter__(self) -> Iterator[str]:
        yield from self._indices
        yield from (key for key in self._overridden if key not in self._indices)

    def __len__(self) -> int:
        return len(self._indices) + sum(key not in self._indices for key in self._overridden)

    def __repr__(self) -> str:
        return f"<{len(self)} metadata keys>"

    @property
    def records(self) -> npt.NDArray[Any]:
        """Where the stored keys and their values are in the file: see RECORD."""
        return self._records

    def value_type(self, key: str) -> GGUFValueType:
        """The stored type of a value; ARRAY for every array. KeyError for an unknown key."""
        if key in self._overridden:
            return self._overridden[key]
        return GGUFValueType(int(self._records["type"][self._indices[key]]))

    def element_type(self, key: str) -> GGUFValueType | None:
        """The stored type of an array's elements; None for what is no array."""
        if self.value_type(key) != GGUFValueType.ARRAY:
            return None
        return GGUFValueType(int(self._records["element_type"][self._indices[key]]))

    def offset(self, key: str) -> int | None:
        """Where in the file a key's record begins, in bytes; None for one that isn't stored."""
        index = self._indices.get(key)
        return None if index is None else int(self._records["offset"][index])

    def get_typed(self, key: str, type: GGUFValueType | type) -> Any:  # noqa: A002 - the contract's name
        """The value of a key that must be of a type.

        type: a gguf.GGUFValueType, or one of bool, int, float, str, list (any
        array). KeyError for an unknown key; FormatError, which says what was
        found, for another type.
        """
        if isinstance(type, GGUFValueType):
            wanted, name = frozenset({type}), type.name
        elif type in _PYTHON_TYPES:
            wanted, name = _PYTHON_TYPES[type], type.__name__
        else:
            raise TypeError(f"{type!r} is no GGUFValueType and none of bool, int, float, str, list")
        found = self.value_type(key)
        if found not in wanted:
            element = self.element_type(key)
            shown = found.name if element is None else f"ARRAY of {element.name}"
            raise FormatError(
                f"{self._path}: metadata key {quoted(key)} should be {name}, but is {shown}",
                path=self._path,
                offset=self.offset(key),
                field=key,
            )
        return self[key]

    def _decode(self, record: Any) -> Any:
        kind = GGUFValueType(int(record["type"]))
        start, length = int(record["value_offset"]), int(record["value_length"])
        if kind == GGUFValueType.ARRAY:
            return self._decode_array(record, start, length)
        if kind == GGUFValueType.STRING:
            return _text(self._header[start : start + length])
        if kind == GGUFValueType.BOOL:
            return self._header[start] != 0
        return struct.unpack_from(_FORMATS[kind], self._header, start)[0]

    def _decode_array(self, record: Any, start: int, length: int) -> Any:
        kind = GGUFValueType(int(record["element_type"]))
        if kind == GGUFValueType.STRING:
            return StringArray(self._header, start, int(record["count"]))
        data = self._bytes[start : start + length]
        values = data != 0 if kind == GGUFValueType.BOOL else np.frombuffer(data, _FORMATS[kind])
        values.flags.writeable = False
        return values


def _type_of(value: MetadataValue) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.INT64
    return GGUFValueType.FLOAT64 if isinstance(value, float) else GGUFValueType.STRING


def _fit(key: str, value: MetadataValue, kind: GGUFValueType) -> MetadataValue:
    """The value as it would come out of a file that stores it as `kind`."""
    fits = {GGUFValueType.BOOL: bool, GGUFValueType.STRING: str}.get(kind)
    if fits is not None and isinstance(value, fits):
        return value
    if kind in _FORMATS and not isinstance(value, (bool, str)):
        try:
            stored: MetadataValue = struct.unpack(
                _FORMATS[kind], struct.pack(_FORMATS[kind], value)
            )[0]
        except (struct.error, OverflowError):
            pass
        else:
            return stored
    raise SettingError(
        f"metadata override {key!r}: {value!r} doesn't fit the stored type {kind.name}"
    )
