"""What a model's header says that decides how much memory it needs beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES

from loader.errors import FitError, FormatError, quoted
from loader.gguf.metadata import Metadata

_MOST_LAYERS = 1000

# Every how many layers one looks at the whole context, the others at a window, for
# architectures that don't say it in a key (llama.cpp's set_swa_pattern).
_PATTERNS = {
    "llama4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma-embedding": 6, "cohere2": 4,
    "gpt-oss": 2,
    "olmo2": 4, "exaone4": 4, "afmoe": 4, "mimo2": 6,
}  # fmt: skip
# Windows that aren't in the file, but in llama.cpp.
_WINDOWS = {"llama4": 8192, "gemma2": 4096}
# Those that keep nothing of earlier tokens.
_NO_CACHE = {
    "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1", "t5encoder",
    "wavtokenizer-dec",
}  # fmt: skip
# The first layers only have a cache.
_CACHED_LAYERS = {"gemma3n": 20}
# Layers that keep a state of fixed size: all of them; all, beside a cache; those without KV heads;
# all but every fourth (full_attention_interval).
_ALL_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
_BESIDE = {"falcon-h1"}
_WITHOUT_HEADS = {
    "jamba", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2", "lfm2", "lfm2moe",
    "kimi-linear",
}  # fmt: skip
_ALL_BUT_FOURTHS = {"qwen3next", "qwen35", "qwen35moe"}
# Attention with a bias for each pair of tokens, for which llama.cpp has no flash attention.
_PAIR_BIAS = {"t5", "t5encoder"}
# llama.cpp has caches of these, whose size isn't known here.
_OTHER_CACHES = {"glm-dsa"}
_KNOWN = set(MODEL_ARCH_NAMES.values()) - _OTHER_CACHES


@dataclass(frozen=True)
class State:
    """The state of a recurrent layer in numbers of 4 bytes: of the convolution and the rest.
    width: numbers for each token of a batch that are alive while it is computed."""

    convolution: int
    rest: int
    width: int = 0


@dataclass(frozen=True)
class Layer:
    """The cache of a layer. keys, values: numbers for each token; windowed: whether only the last
    tokens count; state: instead of both, or beside them."""

    keys: int
    values: int
    windowed: bool = False
    state: State | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model in numbers.

    layers: without the output layer; the last n_unused of them aren't loaded by
    llama.cpp (they predict further tokens); n_head, query: heads of a layer, and numbers of
    their queries; latent: whether caches are compressed (MLA); n_ff_expert: of one
    expert; streams: numbers for each token that go from layer to layer beside the
    embedding; pair_bias: no flash attention, and a bias for each pair of tokens;
    window: tokens that windowed layers look back on, 0 when there are none;
    unknown: what couldn't be found out, "" when all was.
    """

    architecture: str
    n_ctx_train: int
    n_embd: int
    n_head: int
    query: int
    n_ff: int
    n_vocab: int
    layers: tuple[Layer, ...]
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    n_unused: int = 0
    window: int = 0
    streams: int = 0
    latent: bool = False
    pair_bias: bool = False
    unknown: str = ""

    @property
    def n_layer(self) -> int:
        return len(self.layers)


def read_shape(metadata: Metadata, n_vocab: int) -> Shape:
    """The shape of a main model. n_vocab: rows of the token embedding.

    FitError for what is no model to be placed: a projector, a vocabulary.
    """
    architecture = str(metadata.get("general.architecture", ""))
    if architecture == "clip":
        raise FitError(
            "this is a projector (architecture clip): it goes beside a main model, "
            "as llama.cpp's --mmproj; fit the main model"
        )
    keys = _Keys(metadata, architecture)
    n_layer = keys.number("block_count")
    if not n_layer:
        raise FitError(
            "there is nothing to fit: the header has no layers "
            f"({architecture or 'general'}.block_count); is this only a vocabulary?"
        )
    if n_layer > _MOST_LAYERS:
        raise FormatError(
            f"{architecture}.block_count is {n_layer}; at most {_MOST_LAYERS} are supported",
            field=f"{architecture}.block_count",
        )
    n_embd, n_head = keys.number("embedding_length"), keys.each("attention.head_count", n_layer)
    n_ff = keys.each("feed_forward_length", n_layer)
    layers = _read_layers(architecture, keys, n_head, n_ff, n_layer)
    size = n_embd // max(max(n_head, default=0), 1)
    has_heads = bool(n_head) or architecture in _ALL_RECURRENT
    unknown = "" if has_heads and n_embd else f"{architecture}.attention.head_count"
    if architecture not in _KNOWN:
        unknown = f"the architecture {quoted(architecture)}"
    streams = 2 * keys.number("altup.num_inputs") * n_embd
    return Shape(
        architecture=architecture,
        n_ctx_train=keys.number("context_length"),
        n_embd=n_embd,
        n_head=max(n_head, default=0),
        query=max(n_head, default=0) * (keys.number("attention.key_length") or size),
        n_ff=max(n_ff, default=0),
        n_vocab=n_vocab,
        layers=layers,
        n_expert=keys.number("expert_count"),
        n_expert_used=keys.number("expert_used_count"),
        n_ff_expert=keys.number("expert_feed_forward_length") or max(n_ff, default=0),
        n_unused=min(keys.number("nextn_predict_layers"), n_layer),
        window=keys.window() if any(layer.windowed for layer in layers) else 0,
        streams=streams + keys.number("embedding_length_per_layer_input") * n_layer,
        latent=keys.number("attention.key_length_mla") > 0,
        pair_bias=architecture in _PAIR_BIAS,
        unknown=unknown,
    )


def _read_layers(
    architecture: str, keys: _Keys, n_head: Sequence[int], n_ff: Sequence[int], n_layer: int
) -> tuple[Layer, ...]:
    n_head_kv = keys.each("attention.head_count_kv", n_layer) or n_head or [0] * n_layer
    windowed = keys.windowed(n_layer) if keys.window() else [False] * n_layer
    without_cache = max(
        keys.number("nextn_predict_layers"), keys.number("attention.shared_kv_layers")
    )
    cached = min(n_layer - without_cache, _CACHED_LAYERS.get(architecture, n_layer))
    interval = keys.number("full_attention_interval") or 4
    size = keys.number("embedding_length") // max(max(n_head, default=0), 1)
    layers = []
    for index in range(n_layer):
        heads = n_head_kv[index] if index < cached and architecture not in _NO_CACHE else 0
        if architecture in _WITHOUT_HEADS:
            # Neither heads nor, where that says so, a feed-forward network of its own.
            is_forward = architecture.startswith("nemotron_h") and n_ff and n_ff[index]
            recurrent = not n_head_kv[index] and not is_forward
        elif architecture in _ALL_BUT_FOURTHS:
            recurrent = (index + 1) % interval != 0
        else:
            recurrent = architecture in _ALL_RECURRENT | _BESIDE
        if recurrent and architecture not in _BESIDE:
            heads = 0
        layers.append(
            Layer(
                heads * keys.head_size("key", size, windowed=windowed[index]),
                heads * keys.head_size("value", size, windowed=windowed[index]),
                windowed[index],
                keys.state(n_head[index] if n_head else 0) if recurrent else None,
            )
        )
    return tuple(layers)


class _Keys:
    """Keys of an architecture, of whatever integer type."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def value(self, name: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}")

    def number(self, name: str) -> int:
        """0 when it isn't there; of an array, the largest."""
        value = self.value(name)
        if value is None:
            return 0
        key = f"{self._architecture}.{name}"
        if isinstance(value, (int, float)):
            return _plain(key, value)
        return max(self._array(key, value), default=0)

    def each(self, name: str, n_layer: int) -> list[int]:
        """A number for each layer; empty when it isn't there."""
        value, key = self.value(name), f"{self._architecture}.{name}"
        if value is not None and not isinstance(value, (int, float)):
            found = self._array(key, value)
            if len(found) < n_layer:
                raise FormatError(f"{key} has {len(found)} numbers for {n_layer} layers", field=key)
            return found[:n_layer]
        number = self.number(name)
        return [number] * n_layer if number else []

    def _array(self, key: str, value: Any) -> list[int]:
        if not isinstance(value, np.ndarray):
            raise FormatError(f"{key} should be a number, not {value!r:.50}", field=key)
        return [_plain(key, item) for item in value.tolist()]

    def window(self) -> int:
        """Tokens that windowed layers look back on."""
        if self.value("attention.sliding_window") is None:
            return _WINDOWS.get(self._architecture, 0)
        return self.number("attention.sliding_window")

    def windowed(self, n_layer: int) -> Sequence[bool]:
        """Whether each layer looks at a window only."""
        value = self.value("attention.sliding_window_pattern")
        if isinstance(value, np.ndarray) and len(value) >= n_layer:
            return [bool(item) for item in value[:n_layer]]
        if self._architecture == "smallthinker":
            return [index % 4 != 0 for index in range(n_layer)]
        step = self.number("attention.sliding_window_pattern") or _PATTERNS.get(
            self._architecture, 0
        )
        return [step > 0 and index % step < step - 1 for index in range(n_layer)]

    def head_size(self, part: str, usual: int, *, windowed: bool) -> int:
        """Numbers of a head's key or value; windowed layers may have others."""
        name = f"attention.{part}_length"
        return (windowed and self.number(f"{name}_swa")) or self.number(name) or usual

    def state(self, n_head: int) -> State:
        """Of a recurrent layer (llama.cpp's n_embd_r and n_embd_s)."""
        n_embd, head_size = self.number("embedding_length"), self.number("wkv.head_size")
        if head_size:  # RWKV
            shifts = self.value("token_shift_count")
            shifts = 2 if shifts is None else self.number("token_shift_count")
            return State(shifts * n_embd, n_embd * head_size, 17 * n_embd)
        short = self.number("shortconv.l_cache")
        if short:  # LFM2
            return State(n_embd * (short - 1), 0, 4 * n_embd)
        kernel = self.number("ssm.conv_kernel")
        kda = self.number("kda.head_dim") * n_head
        if kda:  # Kimi: a convolution each of queries, keys and values
            rest = self.number("kda.head_dim") * kda
            return State(3 * (kernel - 1 if kernel else 3) * kda, rest, 12 * kda)
        inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
        mixed = inner + 2 * self.number("ssm.group_count") * size
        if self._architecture in _ALL_BUT_FOURTHS:  # gated delta rule, in chunks
            width = 16 * mixed
        else:  # Mamba
            width = inner + 3 * mixed + 2 * inner + self.number("ssm.time_step_rank")
        return State(max(kernel - 1, 0) * mixed, size * inner, width)


def _plain(key: str, value: Any) -> int:
    """A number from a file; FormatError for one that can't be."""
    if isinstance(value, bool) or not 0 <= value < 1 << 31 or value != int(value):
        raise FormatError(f"{key} is {value}, which no model has", field=key)
    return int(value)
