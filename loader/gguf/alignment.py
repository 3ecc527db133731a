"""How the tensors of a file are aligned when the file doesn't say it itself.

By the specification it is 32 bytes then, and so llama.cpp's tools write the later
files of a split model. gguf-py's writer aligns all of them as the first one, and
says so only there. Which of the two wrote a file has to be found out, since the
data begins at another place.
"""

from __future__ import annotations

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT

from loader.errors import ShardError
from loader.gguf.header import Header
from loader.gguf.tensors import data_length
from loader.io.file import File
from loader.io.ranges import align_up

_MOST_COMPARED = 4096


def alignment_of(file: File, header: Header, first: int | None) -> int:
    """The alignment of a file in bytes; first: what the first file of the model says, None when it
    says nothing. ShardError when it can't be told: a guess would give wrong tensors."""
    standard = int(GGUF_DEFAULT_ALIGNMENT)
    if header.alignment is not None:
        return header.alignment
    if first is None or not header.records.names:
        return standard
    small, large = sorted((first, standard))
    if align_up(header.end, small) == align_up(header.end, large):
        return small  # the data begins at the same place
    return _found_out(file, header, small, large)


def _found_out(file: File, header: Header, small: int, large: int) -> int:
    """Which of two alignments a file has."""
    offsets, length = header.records.table["data_offset"], data_length(header.records)
    begin = {choice: align_up(header.end, choice) for choice in (small, large)}
    if (offsets % np.uint64(large)).any() or begin[large] + length > file.size:
        return small
    # Up to where the data begins by the larger one there are zeros, if it is that.
    between = bytearray(min(begin[large] - begin[small], _MOST_COMPARED))
    file.pread_into(between, begin[small])
    if any(between):
        return small
    # A file ends with its last tensor, which mostly is padded, too.
    for padding in (True, False):
        ends = {
            choice: start + (align_up(length, choice) if padding else length)
            for choice, start in begin.items()
        }
        fitting = [choice for choice, end in ends.items() if end == file.size]
        if len(fitting) == 1:
            return fitting[0]
    raise ShardError(
        f"{file.path}: it can't be told where its data begins, at offset {begin[small]} or "
        f"{begin[large]}: the first file of the model says general.alignment, this one doesn't, "
        f"and its size fits neither. Download it again, or have "
        "llama.cpp's llama-gguf-split --merge make one file of the model",
        path=file.path,
        offset=begin[small],
        field="general.alignment",
    )
