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
    "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
    "modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1",
}  # fmt: skip
# The first layers only have a cache.
_CACHED_LAYERS = {"gemma3n": 20}
# Architectures whose layers keep a state of fixed size instead of a cache, all of them or those
# without KV heads.
_RECURRENT = {
    "mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe",
    "plamo2", "lfm2", "lfm2moe", "qwen3next", "kimi-linear", "rwkv6", "rwkv6qwen2", "rwkv7",
    "arwkv7",
}  # fmt: skip
# Of these only the state of Mamba's kind is known here.
_KNOWN_STATES = {"mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h"}
# An encoder and a decoder, whose layers have other names.
_OTHER_LAYERS = {"t5", "t5encoder"}
_KNOWN = set(MODEL_ARCH_NAMES.values()) - _OTHER_LAYERS - (_RECURRENT - _KNOWN_STATES)


@dataclass(frozen=True)
class State:
    """The state of a recurrent layer in numbers of 4 bytes: of the convolution and the rest."""

    convolution: int
    rest: int


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
    """A model in numbers. layers: without the output layer; window: tokens that windowed layers
    look back on, 0 when there are none; unknown: what couldn't be found out, "" when all was."""

    architecture: str
    n_ctx_train: int
    n_embd: int
    n_head: int
    n_ff: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    window: int
    layers: tuple[Layer, ...]
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
    n_head_kv = keys.each("attention.head_count_kv", n_layer) or n_head
    unknown = "" if n_head and n_embd else f"{architecture}.attention.head_count"
    size = n_embd // max(n_head[0] if n_head else 1, 1)
    window, pattern = keys.window(), keys.windowed(n_layer)
    if architecture not in _KNOWN:
        unknown = f"the architecture {quoted(architecture)}"
    cached = _CACHED_LAYERS.get(architecture, n_layer - keys.number("nextn_predict_layers"))
    n_ff = keys.each("feed_forward_length", n_layer)
    layers = []
    for index in range(n_layer):
        heads = n_head_kv[index] if n_head_kv and index < cached else 0
        if architecture in _NO_CACHE:
            heads = 0
        recurrent = architecture in _RECURRENT and not heads
        if architecture == "nemotron_h" and n_ff and n_ff[index]:
            recurrent = False  # a feed-forward layer
        windowed = bool(window) and pattern[index]
        layers.append(
            Layer(
                heads * (keys.number("attention.key_length") or size),
                heads * (keys.number("attention.value_length") or size),
                windowed,
                keys.state() if recurrent else None,
            )
        )
    if architecture in ("mamba", "mamba2"):
        layers = [Layer(0, 0, False, keys.state())] * n_layer
        unknown = ""  # they have no heads
    elif architecture == "falcon-h1":  # both in each layer
        layers = [Layer(layer.keys, layer.values, False, keys.state()) for layer in layers]
    return Shape(
        architecture=architecture,
        n_ctx_train=keys.number("context_length"),
        n_embd=n_embd,
        n_head=max(n_head, default=0),
        n_ff=max(n_ff, default=0) or keys.number("expert_feed_forward_length"),
        n_vocab=n_vocab,
        n_expert=keys.number("expert_count"),
        n_expert_used=keys.number("expert_used_count"),
        window=window if any(layer.windowed for layer in layers) else 0,
        layers=tuple(layers),
        unknown=unknown,
    )


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

    def state(self) -> State:
        """Of Mamba's kind (llama.cpp's n_embd_r and n_embd_s)."""
        inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
        groups = self.number("ssm.group_count")
        convolution = max(self.number("ssm.conv_kernel") - 1, 0) * (inner + 2 * groups * size)
        return State(convolution, size * inner)


def _plain(key: str, value: Any) -> int:
    """A number from a file; FormatError for one that can't be."""
    if isinstance(value, bool) or not 0 <= value < 1 << 31 or value != int(value):
        raise FormatError(f"{key} is {value}, which no model has", field=key)
    return int(value)
