"""The files of a checkpoint: safetensors and JSON, of which nothing is believed unseen."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.comparison import as_matrix
from loader.errors import FormatError, UnsupportedFormatError, quoted
from loader.io import File

_LARGEST_HEADER = 100_000_000  # of a safetensors file (its specification)
_LARGEST_JSON = 64 << 20
_MOST_AXES = 8
_DTYPE = re.compile(r"[A-Z0-9_]{1,16}")
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "<i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<u1",
}  # fmt: skip

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file. offset: of its data in the file, in bytes."""

    file: File
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, start: int, stop: int) -> Floats:
        if self.kind not in _DTYPES:
            raise UnsupportedFormatError(
                f"{self.file.path}: tensor {quoted(self.name)} is of type {self.kind}, which isn't "
                "compared",
                path=self.file.path,
                offset=self.offset,
                field=self.name,
            )
        _, columns = as_matrix(self.shape)
        values = np.empty((stop - start, columns), _DTYPES[self.kind])
        row = columns * values.itemsize
        self.file.pread_into(values.reshape(-1).view(np.uint8), self.offset + start * row)
        if self.kind == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            return values.astype(np.float32)

    def whole(self) -> Floats:
        """All of it, in its shape."""
        return self.rows(0, as_matrix(self.shape)[0]).reshape(self.shape)


def read_safetensors(file: File) -> list[Stored]:
    """The tensors of a safetensors file, whose places are checked. FormatError for a wrong one."""

    def wrong(what: str, field: str | None = None) -> FormatError:
        return FormatError(f"{file.path}: {what}", path=file.path, offset=8, field=field)

    if file.size < 8:
        raise wrong("no safetensors file: it has no header")
    length = int.from_bytes(_at(file, 0, 8), "little")
    if length > min(_LARGEST_HEADER, file.size - 8):
        raise wrong(f"no safetensors file: its header would have {length} bytes")
    header = _parse_object(file.path, _at(file, 8, length), 8)
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            numbers = (*shape, begin, end)
            valid = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in numbers)
        except (TypeError, KeyError, ValueError):
            valid = False
        valid = valid and len(shape) <= _MOST_AXES and _DTYPE.fullmatch(kind) is not None
        if not valid or begin > end or 8 + length + end > file.size:
            raise wrong(f"the entry of tensor {quoted(name)} is wrong or past the end", name)
        size = np.dtype(_DTYPES[kind]).itemsize if kind in _DTYPES else None
        if size is not None and math.prod(shape) * size != end - begin:
            raise wrong(f"tensor {quoted(name)} has another size than its shape says", name)
        tensors.append(Stored(file, name, kind, shape, 8 + length + begin))
    return tensors


def _at(file: File, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    file.pread_into(buffer, offset)
    return bytes(buffer)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file of a sensible size."""
    with File(path, direct=False) as file:
        if file.size > _LARGEST_JSON:
            raise FormatError(f"{path} has {file.size} bytes, too many", path=str(path))
        return _parse_object(str(path), file.read(), 0)


def _parse_object(path: str, data: bytes, offset: int) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no valid JSON: {error}", path=path, offset=offset) from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: no JSON object", path=path, offset=offset)
    return found
