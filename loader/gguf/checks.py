"""Validation of tensor data: no value and no block scale may be NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from loader._ffi import NativeError, first_invalid_block
from loader.errors import TensorDataError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES

# So much is checked in one call: between two the interpreter looks at signals.
_SLICE_BYTES = 16 << 20
_MOST_NAMED = 5


def check_data(model: str, tensors: Iterable[tuple[TensorInfo, npt.NDArray[Any]]]) -> None:
    """Checks the data of each tensor (contiguous, as `Tensor.numpy` gives it).

    The rule for each type is in _native/rows.c. Raises TensorDataError, which
    names every tensor in which something was found.
    """
    invalid = [
        (info.name, block)
        for info, data in tensors
        if (block := _first_invalid(info, data)) is not None
    ]
    if not invalid:
        return
    shown = ", ".join(
        f"{quoted(name)} (first in block {block})" for name, block in invalid[:_MOST_NAMED]
    )
    more = f" and {len(invalid) - _MOST_NAMED} more" if len(invalid) > _MOST_NAMED else ""
    raise TensorDataError(
        f"{model}: NaN or infinite values or scales in {shown}{more}; the file is damaged or was "
        "converted wrongly",
        tensors=[name for name, _ in invalid],
    )


def _first_invalid(info: TensorInfo, data: npt.NDArray[Any]) -> int | None:
    """The first invalid block of a tensor, or None. Types without a rule pass."""
    block_bytes = BLOCK_SIZES[int(info.ggml_type)][1]
    flat = data.reshape(-1).view("u1")
    step = _SLICE_BYTES // block_bytes * block_bytes
    for start in range(0, flat.size, step):
        try:
            block = first_invalid_block(int(info.ggml_type), flat[start : start + step])
        except NativeError:
            return None
        if block is not None:
            return start // block_bytes + block
    return None
