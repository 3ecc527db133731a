"""Validation of tensor data: no value and no block scale may be NaN or infinite.

The rule for each type is in _native/rows.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loader.errors import TensorDataError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES

# So much is checked by one request.
_SLICE_BYTES = 8 << 20
_MOST_NAMED = 5


def check_slices(
    info: TensorInfo, begin: int = 0, length: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """The pieces in which a tensor, or whole blocks of it, are checked: start (from `begin` on) and
    length in bytes, and the first block."""
    block_bytes = BLOCK_SIZES[int(info.ggml_type)][1]
    step = _SLICE_BYTES // block_bytes * block_bytes
    nbytes = (info.nbytes or 0) - begin if length is None else length
    for start in range(0, nbytes, step):
        yield start, min(step, nbytes - start), (begin + start) // block_bytes


def invalid_data(model: str, findings: Mapping[str, int]) -> TensorDataError:
    """The error for tensors in which something was found: by name, the first invalid block."""
    shown = [f"{quoted(name)} (first in block {block})" for name, block in findings.items()]
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return TensorDataError(
        f"{model}: NaN or infinite values or scales in {', '.join(shown[:_MOST_NAMED])}{more}; the "
        "file is damaged or was converted wrongly",
        tensors=findings,
    )
