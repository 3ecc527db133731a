"""The ggml tensor types: names, block sizes, and how numpy sees them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from loader._ffi import TypeTable

GGMLType: TypeAlias = GGMLQuantizationType | int

# Sizes (elements, bytes of a block) of ids that the gguf package may lack, from
# ggml.h and ggml-common.h.
_LATER: dict[int, tuple[int, int]] = {39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18)}
_LATER_NAMES = {39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}

# Types that ggml once had and gave up, by id (ggml.h).
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Elements and bytes of a block, by type id.
BLOCK_SIZES: dict[int, tuple[int, int]] = _LATER | {
    int(kind): size for kind, size in GGML_QUANT_SIZES.items() if int(kind) not in _REMOVED
}

TYPE_TABLE = TypeTable(BLOCK_SIZES)

_T = GGMLQuantizationType
PLAIN_DTYPES: dict[int, np.dtype[Any]] = {
    _T.F16: np.dtype("<f2"),
    _T.F32: np.dtype("<f4"),
    _T.F64: np.dtype("<f8"),
    _T.I8: np.dtype("i1"),
    _T.I16: np.dtype("<i2"),
    _T.I32: np.dtype("<i4"),
    _T.I64: np.dtype("<i8"),
    _T.BF16: np.dtype("<u2"),  # numpy has no bfloat16: the raw bits
}


_MEMBERS = {int(kind): kind for kind in GGMLQuantizationType}


def ggml_type(type_id: int) -> GGMLType:
    """The type of an id: a member of gguf's enumeration, or the id where it has none."""
    return _MEMBERS.get(type_id, type_id)


def type_name(kind: GGMLType) -> str:
    """A name for people: "Q4_K", or "type 99" for an id that nobody knows."""
    if isinstance(kind, GGMLQuantizationType):
        return kind.name
    return _LATER_NAMES.get(kind) or _REMOVED.get(kind) or f"type {kind}"


def why_unknown(kind: GGMLType) -> str:
    """For a message about a type without a size: "type 4 (Q4_2), which was removed from ggml"."""
    removed = _REMOVED.get(int(kind))
    if removed is not None:
        return f"type {int(kind)} ({removed}), which was removed from ggml"
    return f"type {int(kind)}, which is not known here"


def array_layout(kind: GGMLType, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of the numpy view of a tensor.

    Plain types have their own dtype (BF16 the uint16 of its bits) and the
    logical shape. Block types are uint8, with the last axis in bytes.
    """
    plain = PLAIN_DTYPES.get(int(kind))
    if plain is not None:
        return plain, shape
    elements, nbytes = BLOCK_SIZES[int(kind)]
    return np.dtype("u1"), (*shape[:-1], shape[-1] // elements * nbytes)
