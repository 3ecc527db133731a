"""Estimates of compute buffers: how much memory a graph needs beside weights and cache.

llama.cpp finds that by laying its graph out. Here it is bounded from above, by the
numbers (of 4 bytes) for each token of a batch that are alive at once in the
hungriest part of the graph: the logits, a feed-forward network, attention, or a
recurrent layer; beside them the masks, which live as long as there are layers.
The terms were found with llama.cpp itself, by changing one size at a time of
models of two dozen architectures, see ARCHITECTURE.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.fit.shape import Shape
from loader.io.ranges import align_up

CACHE_PADDING = 256  # llama.cpp rounds contexts up to this


@dataclass(frozen=True)
class Batch:
    """What is computed at once. n_ctx: tokens of the context, ubatch: of a batch."""

    n_ctx: int
    ubatch: int
    flash_attention: bool

    @property
    def tokens(self) -> int:
        return min(self.ubatch, self.n_ctx)


def window_cells(shape: Shape, n_ctx: int, ubatch: int) -> int:
    """Tokens that windowed layers keep: the window and one batch."""
    return min(n_ctx, align_up(shape.window + min(ubatch, n_ctx), CACHE_PADDING))


def device_compute(shape: Shape, batch: Batch) -> int:
    """Bytes on a device, from above."""
    if shape.unknown:
        return 0
    full, windowed = _cells(shape, batch)
    embedding = shape.n_embd + shape.streams
    states = [layer.state for layer in shape.layers if layer.state is not None]
    numbers = max(
        shape.n_vocab + 5 * shape.n_embd,
        shape.streams + _forward(shape),
        embedding + _attention(shape, full or windowed, batch),
        embedding + shape.n_embd + max((state.width for state in states), default=0),
    )
    # A mask is there in 4 bytes for each pair of tokens and, for flash attention, in 2.
    masks = 6 * (full + windowed)
    fixed = 2 * max((state.rest for state in states), default=0)
    if shape.pair_bias:  # what an encoder has made of a text, for the decoder
        fixed += shape.n_ctx_train * shape.n_embd
    return batch.tokens * (4 * numbers + masks) + 4 * fixed


def host_compute(shape: Shape, batch: Batch) -> int:
    """Bytes on the host, beside devices: the embeddings of a batch, and the masks."""
    if shape.unknown:
        return 0
    full, windowed = _cells(shape, batch)
    numbers = shape.n_embd + shape.streams + full + windowed
    if not batch.flash_attention:
        numbers += max((layer.keys + layer.values for layer in shape.layers), default=0)
    return 4 * batch.tokens * numbers


def _cells(shape: Shape, batch: Batch) -> tuple[int, int]:
    """Tokens that attention looks at: of layers that see all, and of those with a window."""
    caches = [layer for layer in shape.layers if layer.keys]
    if not caches and shape.n_head:
        return batch.tokens, 0  # without a cache, the batch itself
    full = batch.n_ctx if any(not layer.windowed for layer in caches) else 0
    has_windows = any(layer.windowed for layer in caches)
    return full, window_cells(shape, batch.n_ctx, batch.ubatch) if has_windows else 0


def _forward(shape: Shape) -> int:
    """Of a feed-forward network, the embedding included: two inner layers and their product, of a
    dense one or of all experts that are used; or what these experts give."""
    dense = 4 * shape.n_embd + 3 * shape.n_ff
    used = shape.n_expert_used if shape.n_expert else 0
    inner = shape.n_ff_expert * used
    given = min((2 * used + 6) * shape.n_embd, (used + 2) * shape.n_embd + 4 * inner)
    return max(dense, 5 * shape.n_embd + 3 * inner, given) if used else dense


def _attention(shape: Shape, cells: int, batch: Batch) -> int:
    """Queries before and after they are rotated, keys and values; without flash attention the
    scores of all heads, of which a bias for each pair of tokens makes three."""
    if shape.latent:
        key, value = max(((layer.keys, layer.values) for layer in shape.layers), default=(0, 0))
        numbers = shape.n_embd + shape.n_head * (key + 2 * value)
    else:
        kv_size = max((layer.keys + layer.values for layer in shape.layers), default=0)
        numbers = 2 * shape.n_embd + 2 * shape.query + kv_size
    if shape.pair_bias:
        return numbers + 10 * shape.n_embd + (3 * shape.n_head + 2) * cells
    return numbers if batch.flash_attention else numbers + shape.n_head * cells
