"""Validation of tensor data: for each type, a block with each of its scales spoilt."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import loader
from loader._ffi import NativeError, first_invalid_block
from loader.gguf.types import BLOCK_SIZES
from tests.build import fixed, info, pad, write

HALF, BRAIN = struct.pack("<H", 0x7C00), struct.pack("<H", 0x7F80)
FLOAT, DOUBLE = struct.pack("<f", float("-inf")), struct.pack("<d", float("nan"))

# Where in a block which number has to be finite, by type id (ggml-common.h).
SCALES: dict[int, list[tuple[int, bytes]]] = {
    0: [(0, FLOAT)], 1: [(0, HALF)], 2: [(0, HALF)], 3: [(0, HALF), (2, HALF)], 6: [(0, HALF)],
    7: [(0, HALF), (2, HALF)], 8: [(0, HALF)], 10: [(80, HALF), (82, HALF)], 11: [(108, HALF)],
    12: [(0, HALF), (2, HALF)], 13: [(0, HALF), (2, HALF)], 14: [(208, HALF)], 15: [(0, FLOAT)],
    16: [(0, HALF)], 17: [(0, HALF)], 18: [(0, HALF)], 19: [(0, HALF)], 20: [(0, HALF)],
    21: [(0, HALF)], 22: [(0, HALF)], 23: [(0, HALF)], 24: [], 25: [], 26: [], 27: [],
    28: [(0, DOUBLE)], 29: [(52, b"\x00\xc0\x00\x70")], 30: [(0, BRAIN)], 34: [(52, HALF)],
    35: [(64, HALF)], 39: [(0, b"\xff")], 40: [], 41: [(0, HALF)], 42: [(0, HALF)],
}  # fmt: skip
WITHOUT_RULE = {9}  # Q8_1: only ever used for activations


def test_every_type_with_a_size_has_a_rule() -> None:
    assert set(SCALES) | WITHOUT_RULE == set(BLOCK_SIZES)


@pytest.mark.parametrize("kind", SCALES)
def test_each_scale_of_each_type(kind: int, tmp_path: Path) -> None:
    elements, nbytes = BLOCK_SIZES[kind]
    good = bytes(10 * nbytes)
    assert first_invalid_block(kind, good) is None
    for place, spoilt in SCALES[kind]:
        data = bytearray(good)
        start = 7 * nbytes + place
        data[start : start + len(spoilt)] = spoilt
        assert first_invalid_block(kind, bytes(data)) == 7
        path = write(
            tmp_path / "m.gguf",
            pad(fixed(3, 1, 0) + info("t", [10 * elements], kind, 0)) + bytes(data),
        )
        with pytest.raises(loader.TensorDataError, match=r"'t' \(first in block 7\)"):
            loader.load(path, check_tensors=True)
    if not SCALES[kind]:
        assert first_invalid_block(kind, b"\xff" * (10 * nbytes)) is None


def test_the_largest_finite_values_pass() -> None:
    for kind, dtype in ((0, np.float32), (1, np.float16), (28, np.float64)):
        limits = np.finfo(dtype)
        data = np.array([limits.max, limits.min, limits.tiny, 0, -0.0], dtype).tobytes()
        assert first_invalid_block(kind, data) is None
    assert first_invalid_block(30, struct.pack("<H", 0x7F7F)) is None
    assert first_invalid_block(39, b"\xfe" + b"\xff" * 16) is None


def test_real_quantised_data_passes_and_agrees_with_its_values() -> None:
    values = np.random.default_rng(0).standard_normal((8, 256), np.float32)
    for kind in (2, 3, 6, 7, 8, 34, 35):
        data = gguf.quantize(values, gguf.GGMLQuantizationType(kind))
        assert first_invalid_block(kind, data.tobytes()) is None


def test_types_without_a_rule_and_broken_blocks() -> None:
    for kind in (4, 9, 99):
        with pytest.raises(NativeError, match="ENOTSUP"):
            first_invalid_block(kind, bytes(40))
    with pytest.raises(NativeError, match="EINVAL"):
        first_invalid_block(12, bytes(143))
