"""How far the tensors of a model are from those of another one: the normalised mean squared error.

NMSE is the sum of the squared differences by the sum of the squares of the
reference, after dequantization: 0 for the same values, about 2e-5 for Q8_0, 0.005
for Q4_K, 0.1 for two bits, 1 for zeros, 2 for another tensor of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loader.errors import UnsupportedFormatError
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES, ggml_type, type_name
from loader.model import Model

_PIECE = 1 << 20  # elements that are compared at once; whole blocks of every type
# What rounding to a type may cost. Plain types cost nothing, but a value that the conversion has
# computed (exp) may differ in its last place; 16 bits are a relative error of 2^-11 and 2^-9.
_EXACT = 1e-12
_ROUNDED = {"F16": 1e-6, "BF16": 1e-5}
_MOST = 0.5  # more isn't rounding, whatever the type


def rounding(kind: str) -> float:
    """The largest NMSE that rounding to a type explains.

    Of a block type with b bits for a value, steps of 2 max / 2^b, so an error of
    max^2 / (3 4^b), where max^2 is at most the 32 squares of a block.
    """
    size = _SIZES.get(kind)
    if size is None or size[0] == 1:
        return _ROUNDED.get(kind, _EXACT)
    bits = (size[1] * 16 // size[0] - 1) // 2  # but for half a bit or more, those of the scales
    return min(32 / (3 * float(1 << 2 * bits)), _MOST)


_SIZES = {type_name(ggml_type(kind)): size for kind, size in BLOCK_SIZES.items()}


class Values(Protocol):
    """The values of a tensor. kind: its type, for people; shape: in numpy's order."""

    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Some of the rows of `as_matrix(self.shape)`, as many elements in whatever shape.
        UnsupportedFormatError for a type that can't be converted."""
        ...


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of one element: those are the same tensor."""
    return tuple(size for size in shape if size != 1)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor whose last axis is a row; of one with one axis, its elements are
    the rows. Axes of one element don't count."""
    shape = squeezed(shape)
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


class ModelValues:
    """Of a tensor of an open model."""

    def __init__(self, model: Model, info: TensorInfo) -> None:
        self.kind = type_name(info.ggml_type)
        self.shape = info.shape
        self._model = model
        rows, columns = as_matrix(info.shape)
        self._info = replace(info, shape=(rows, columns) if columns > 1 else (rows,))

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return self._model.read_part(self._info, start, stop).dequantize()


@dataclass(frozen=True)
class Comparison:
    """A tensor beside its reference. nmse: None when they couldn't be compared, or are too far
    apart for a number; why says what it was. is_compared: whether their values were."""

    name: str
    type: str
    other_type: str
    nmse: float | None
    why: str = ""
    is_compared: bool = True

    @property
    def limit(self) -> float:
        """What the rounding of another type explains."""
        if self.type == self.other_type:
            return _EXACT
        return max(rounding(self.type), rounding(self.other_type))

    @property
    def is_close(self) -> bool:
        """Whether it is the same tensor, but for that rounding."""
        return self.nmse is not None and self.nmse <= self.limit

    @property
    def badness(self) -> tuple[bool, float]:
        """What to sort by: what isn't rounding is worst."""
        return (not self.is_close, math.inf if self.nmse is None else self.nmse)


def compare(
    name: str, found: Values, reference: Values, advance: Callable[[int], None]
) -> Comparison:
    """Compares a tensor with its reference, piece by piece. advance: is told elements done."""

    def result(nmse: float | None, why: str = "", *, is_compared: bool = True) -> Comparison:
        return Comparison(name, found.kind, reference.kind, nmse, why, is_compared)

    if squeezed(found.shape) != squeezed(reference.shape):
        shapes = " and ".join("x".join(map(str, v.shape)) for v in (found, reference))
        return result(None, f"their shapes differ: {shapes}")
    try:
        error, energy = _errors(found, reference, advance)
    except UnsupportedFormatError as unsupported:
        return result(None, str(unsupported), is_compared=False)
    if not math.isfinite(error):
        return result(None, "values that aren't finite differ")
    if error and not energy:
        return result(None, "the reference is all zeros")
    return result(error / energy if error else 0.0)


def _errors(
    found: Values, reference: Values, advance: Callable[[int], None]
) -> tuple[float, float]:
    """The sums of the squared differences, and of the squares of the reference."""
    error = energy = 0.0
    count, width = as_matrix(found.shape)
    step = max(_PIECE // max(width, 1), 1)
    for start in range(0, count if width else 0, step):
        stop = min(start + step, count)
        ours = found.rows(start, stop).reshape(-1).astype(np.float64)
        theirs = reference.rows(start, stop).reshape(-1).astype(np.float64)
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, ours - theirs)
        theirs[~np.isfinite(theirs)] = 0
        error += float(difference @ difference)
        energy += float(theirs @ theirs)
        advance((stop - start) * width)
    return error, energy
