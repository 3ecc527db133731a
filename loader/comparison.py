"""How far the tensors of a model are from those of another one: the normalised mean squared error.

NMSE is the sum of the squared differences by the sum of the squares of the
reference, after dequantization: 0 for the same values, about 1e-5 for Q8_0, 0.005
for Q4_K, 0.1 for two bits, 1 for zeros, 2 for another tensor of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loader.errors import UnsupportedFormatError
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import type_name
from loader.model import Model

# What is more isn't rounding: quantisation to a bit and a half gives 0.3.
MOST_NMSE = 0.5
_PIECE = 4 << 20  # elements that are compared at once


class Values(Protocol):
    """The values of a tensor. kind: its type, for people; shape: in numpy's order."""

    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """A part along the outermost axis; of a scalar, all of it. UnsupportedFormatError for a
        type that can't be converted."""
        ...


class ModelValues:
    """Of a tensor of an open model."""

    def __init__(self, model: Model, info: TensorInfo) -> None:
        self.kind = type_name(info.ggml_type)
        self.shape = info.shape
        self._model = model
        self._name = info.name

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        if len(self.shape) < 2:  # its blocks may not be cut
            whole = self._model.load(names=[self._name])[self._name].dequantize()
            return whole[start:stop] if self.shape else whole
        return self._model.read_rows(self._name, start, stop).dequantize()


@dataclass(frozen=True)
class Comparison:
    """A tensor beside its reference. nmse: None when they couldn't be compared, for the reason
    that `why` gives."""

    name: str
    type: str
    other_type: str
    nmse: float | None
    why: str = ""

    @property
    def is_close(self) -> bool:
        """Whether it is the same tensor, but for the rounding of another type."""
        if self.nmse is None:
            return False
        return self.nmse == 0 or (self.type != self.other_type and self.nmse <= MOST_NMSE)

    @property
    def badness(self) -> float:
        """What to sort by: those that couldn't be compared are worst."""
        return math.inf if self.nmse is None else self.nmse


def compare(
    name: str, found: Values, reference: Values, advance: Callable[[int], None]
) -> Comparison:
    """Compares a tensor with its reference, piece by piece. advance: is told elements done."""

    def result(nmse: float | None, why: str = "") -> Comparison:
        return Comparison(name, found.kind, reference.kind, nmse, why)

    if found.shape != reference.shape:
        shapes = " and ".join("x".join(map(str, v.shape)) for v in (found, reference))
        return result(None, f"their shapes differ: {shapes}")
    try:
        error, energy = _errors(found, reference, advance)
    except UnsupportedFormatError as unsupported:
        return result(None, str(unsupported))
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
    count = found.shape[0] if found.shape else 1
    row = math.prod(found.shape[1:])
    step = max(_PIECE // max(row, 1), 1)
    for start in range(0, count if row else 0, step):
        stop = min(start + step, count)
        ours = found.rows(start, stop).reshape(-1).astype(np.float64)
        theirs = reference.rows(start, stop).reshape(-1).astype(np.float64)
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, ours - theirs)
        theirs[~np.isfinite(theirs)] = 0
        error += float(difference @ difference)
        energy += float(theirs @ theirs)
        advance((stop - start) * row)
    return error, energy
