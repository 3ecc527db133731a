"""How files are cut for staging buffers, and how many of these there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from loader.device.staging import Spot, cut, lay_out_buffers, ring_shape
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import BLOCK_SIZES

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 2 << 20]
CHUNK = 256 << 10


# --- Arithmetic ---


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 2, 8, 14, 24, 28]), st.integers(0, 3000), st.integers(0, 9)),
        max_size=12,
    ),
    st.sampled_from([1, 512, 4096]),
    st.sampled_from([8192, 12288, 65536]),
    st.sampled_from([1, 8, 32, 256]),
    st.sampled_from([None, 1 << 20]),
)
def test_any_cut_covers_every_byte_once(
    tensors: list[tuple[int, int, int]], alignment: int, size: int, file_alignment: int,
    largest: int | None,
) -> None:  # fmt: skip
    """Segments fit the buffers, begin aligned, hold whole blocks, and copies don't meet."""
    infos, end = [], 777 // file_alignment * file_alignment
    for number, (kind, blocks, gap) in enumerate(tensors):
        elements, nbytes = BLOCK_SIZES[kind]
        end += -end % file_alignment + gap * gap * 3000 // file_alignment * file_alignment
        infos.append(TensorInfo(f"t{number}", kind, (elements * blocks,), nbytes * blocks, end, 0))
        end += nbytes * blocks
    placed, sizes = lay_out_buffers([(i, file_alignment) for i in infos], largest, "d")
    spots = [Spot(*entry) for entry in placed]
    for spot in spots:
        item = (
            1
            if BLOCK_SIZES[int(spot.info.ggml_type)][0] > 1
            else (BLOCK_SIZES[int(spot.info.ggml_type)][1])
        )
        assert spot.position % max(file_alignment, item) == 0
        assert spot.position + (spot.info.nbytes or 0) <= sizes[spot.buffer]
    segments = cut(spots, file_size=end, offset_alignment=alignment, buffer_bytes=size)
    written = [np.zeros(n, np.uint8) for n in sizes]
    file = np.random.default_rng(1).integers(1, 256, max(end, 1), np.uint8)
    for segment in segments:
        assert segment.offset % alignment == 0
        assert segment.room <= size
        assert segment.length <= segment.room
        assert segment.offset + segment.length <= end
        for piece in segment.pieces:
            block = BLOCK_SIZES[int(piece.spot.info.ggml_type)][1]
            assert piece.start % block == piece.length % block == 0
        read = file[segment.offset : segment.offset + segment.length]
        for copy in segment.copies():
            assert copy.begin + copy.length <= segment.length
            target = written[copy.buffer][copy.position : copy.position + copy.length]
            target[...] = read[copy.begin : copy.begin + copy.length]
    for spot in spots:
        nbytes = spot.info.nbytes or 0
        found = written[spot.buffer][spot.position : spot.position + nbytes]
        assert np.array_equal(found, file[spot.info.offset : spot.info.offset + nbytes])


def test_neighbours_are_copied_together() -> None:
    infos = [TensorInfo(f"t{i}", 24, (100,), 100, 128 * i, 0) for i in range(50)]
    placed, sizes = lay_out_buffers([(i, 32) for i in infos], None, "d")
    assert sizes == [49 * 128 + 100]
    spots = [Spot(*entry) for entry in placed]
    (segment,) = cut(spots, file_size=6400, offset_alignment=512, buffer_bytes=65536)
    assert len(list(segment.copies())) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 1 << 40), st.integers(1, 1 << 18), st.integers(1, 128),
    st.integers(1 << 20, 1 << 32), st.sampled_from([1, 512, 4096, 65536]),
)  # fmt: skip
def test_any_ring_stays_within_its_limit(
    nbytes: int, units: int, depth: int, limit: int, alignment: int
) -> None:
    shape = ring_shape(
        nbytes,
        chunk_bytes=4096 * units,
        depth=depth,
        memory_limit=limit,
        offset_alignment=alignment,
    )
    assert shape.buffers >= 1
    assert shape.buffers * shape.buffer_bytes <= limit
    assert shape.buffer_bytes % alignment == 0
    assert shape.buffer_bytes > 2 * max(b for _, b in BLOCK_SIZES.values()) + alignment
