"""What a header says of its tensors, and whether that can be true."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.errors import FormatError, TensorLayoutError, TruncatedFileError, quoted
from loader.gguf.types import GGMLType, ggml_type

# struct ld_gguf_tensor
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("name_offset", "<u8"),
        ("name_length", "<u8"),
        ("dims", "<u8", (8,)),
        ("data_offset", "<u8"),
        ("nbytes", "<u8"),
        ("n_dims", "<u4"),
        ("type", "<u4"),
        ("known", "<u4"),
        ("empty", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it.

    shape: logical, in numpy's order (ggml's reversed); nbytes: bytes of its
    data, None when the type is unknown; offset: of the data in its file, in
    bytes; file: index into `model.files`.
    """

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int
    file: int


@dataclass(frozen=True)
class Records:
    """The tensors of one file as its header has them: their names, and the scan's table."""

    names: list[str]
    table: npt.NDArray[Any]

    @property
    def lengths(self) -> npt.NDArray[np.uint64]:
        """Bytes of each tensor's data; one for a tensor of unknown type."""
        lengths = np.where(self.table["known"] == 0, np.uint64(1), self.table["nbytes"])
        lengths[self.table["empty"] != 0] = 0
        return lengths


def data_length(records: Records) -> int:
    """Bytes from the beginning of the data section to the end of its last tensor."""
    offsets, lengths = records.table["data_offset"], records.lengths
    ends = offsets + lengths
    if (ends < offsets).any():
        return 1 << 64  # past the end of whatever file
    return int(ends.max(initial=0))


def read_records(path: str, table: npt.NDArray[Any], header: memoryview) -> Records:
    """Decodes the names. FormatError when one comes twice."""
    starts = table["name_offset"].tolist()
    ends = (table["name_offset"] + table["name_length"]).tolist()
    names = [
        str(header[start:end], "utf-8", "surrogateescape")
        for start, end in zip(starts, ends, strict=True)
    ]
    if len(set(names)) != len(names):
        seen: set[str] = set()
        for index, name in enumerate(names):
            if name in seen:
                raise FormatError(
                    f"{path}: the tensor {quoted(name)} is in the file twice",
                    path=path,
                    offset=int(table["offset"][index]),
                    field=name,
                )
            seen.add(name)
    return Records(names, table)


class TensorTable(Mapping[str, TensorInfo]):
    """The tensors of a model by name, in file order; infos are made when they are asked for.

    files: the records of each file, and where its tensor data begins. No name
    comes twice.
    """

    def __init__(self, files: Sequence[tuple[Records, int]]) -> None:
        self._files = files
        self._begins: list[int] = []  # of each file, the index of its first tensor
        self._indices: dict[str, int] = {}
        self._infos: dict[str, TensorInfo] = {}
        for records, _ in files:
            self._begins.append(len(self._indices))
            self._indices.update(zip(records.names, count(len(self._indices)), strict=False))

    def __getitem__(self, name: str) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = self._make(name, self._indices[name])
        return info

    def _make(self, name: str, index: int) -> TensorInfo:
        # The last one that begins there: files before it have no tensors.
        file = bisect_right(self._begins, index) - 1
        records, begin = self._files[file]
        # All fields at once: this is done for each tensor of a load.
        record = records.table[index - self._begins[file]].item()
        _, _, _, dims, data_offset, nbytes, n_dims, type_id, known, _ = record
        return TensorInfo(
            name=name,
            ggml_type=ggml_type(type_id),
            shape=tuple(dims[:n_dims][::-1].tolist()),
            nbytes=nbytes if known else None,
            offset=begin + data_offset,
            file=file,
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        """These names, which are all in the table, in file order."""
        return sorted(names, key=self._indices.__getitem__)

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"


def check_layout(
    path: str, records: Records, *, alignment: int, data_offset: int, file_size: int
) -> None:
    """Holds the places of the tensors against the file and against each other.

    Each is aligned, inside the file, and overlaps no other. Gaps, any order, and
    missing padding at the end are fine. A tensor of unknown type counts as one
    byte long, an empty one as nothing. Raises TensorLayoutError, or
    TruncatedFileError for data past the end of the file.
    """
    offsets, names = records.table["data_offset"], records.names
    if (odd := np.flatnonzero(offsets % np.uint64(alignment))).size:
        index = int(odd[0])
        raise TensorLayoutError(
            f"{path}: tensor {quoted(names[index])} begins at {offsets[index]} of the data "
            f"section, which is no multiple of the alignment {alignment}",
            path=path,
            offset=int(records.table["offset"][index]),
            field=names[index],
        )
    _check_end(path, records, data_offset, file_size, alignment)
    _check_overlaps(path, records, data_offset)


def _check_end(
    path: str, records: Records, data_offset: int, file_size: int, alignment: int
) -> None:
    names, lengths = records.names, records.lengths
    room = np.uint64(max(file_size - data_offset, 0))
    offsets = records.table["data_offset"]
    # In this order, so that nothing wraps.
    outside = (offsets > room) | (lengths > room - np.minimum(offsets, room))
    # Behind a last tensor without padding an empty one begins past the end.
    outside &= (lengths != 0) | (offsets > room + np.uint64(alignment))
    if not outside.any():
        return
    index = int(np.flatnonzero(outside)[0])
    start = data_offset + int(offsets[index])
    expected = int(lengths[index])
    what = f"should have {expected} bytes at offset {start}"
    found = f"has only {min(max(file_size - start, 0), expected)} of them"
    if expected == 0 or not records.table["known"][index]:
        what, found = f"should begin at offset {start}", "ends before that"
    raise TruncatedFileError(
        f"{path}: tensor {quoted(names[index])} {what}, but the file, of {file_size} bytes, "
        f"{found}; is the download complete?",
        path=path,
        offset=start,
        field=names[index],
    )


def _check_overlaps(path: str, records: Records, data_offset: int) -> None:
    names, lengths, offsets = records.names, records.lengths, records.table["data_offset"]
    filled = np.flatnonzero(lengths)
    if filled.size < 2:
        return
    order = filled[np.argsort(offsets[filled], kind="stable")]
    starts = offsets[order]
    ends = np.maximum.accumulate(starts + lengths[order])
    overlapping = np.flatnonzero(starts[1:] < ends[:-1])
    if not overlapping.size:
        return
    second = int(overlapping[0]) + 1
    first = int(np.argmax((starts + lengths[order])[:second]))
    a, b = sorted((int(order[first]), int(order[second])))
    raise TensorLayoutError(
        f"{path}: the tensors {quoted(names[a])} and {quoted(names[b])} overlap at offset "
        f"{data_offset + int(starts[second])}",
        path=path,
        offset=data_offset + int(starts[second]),
        field=names[b],
    )
