"""What a model's header says that decides how much memory it needs beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.errors import FitError, FormatError
from loader.gguf.metadata import Metadata

# Every how many layers one looks at the whole context, the others at a window, for
# architectures that don't say it in a key (llama.cpp's set_swa_pattern).
_PATTERNS = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma-embedding": 6, "cohere2": 4, "gpt-oss": 2,
    "olmo2": 4, "exaone4": 4, "smallthinker": 4, "afmoe": 4, "mimo2": 6,
}  # fmt: skip
# Architectures whose layers keep a state of fixed size instead of a cache, all of them or those
# without KV heads.
_RECURRENT = {
    "mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe",
    "plamo2", "lfm2", "lfm2moe", "qwen3next", "kimi-linear", "rwkv6", "rwkv6qwen2", "rwkv7",
    "arwkv7",
}  # fmt: skip
# Of these only the state of Mamba's kind is known here.
_KNOWN_STATES = {"mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h"}


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
    n_embd, n_head = keys.number("embedding_length"), keys.each("attention.head_count", n_layer)
    n_head_kv = keys.each("attention.head_count_kv", n_layer) or n_head
    unknown = "" if n_head and n_embd else f"{architecture}.attention.head_count"
    size = n_embd // max(n_head[0] if n_head else 1, 1)
    window, pattern = keys.number("attention.sliding_window"), keys.windowed(n_layer)
    if architecture in _RECURRENT - _KNOWN_STATES:
        unknown = f"the state of {architecture}'s layers"
    layers = []
    for index in range(n_layer):
        heads = n_head_kv[index] if n_head_kv else 0
        windowed = bool(window) and pattern[index]
        layers.append(
            Layer(
                heads * (keys.number("attention.key_length") or size),
                heads * (keys.number("attention.value_length") or size),
                windowed,
                keys.state() if architecture in _RECURRENT and not heads else None,
            )
        )
    if architecture in ("mamba", "mamba2"):
        layers = [Layer(0, 0, False, keys.state())] * n_layer
        unknown = ""
    elif architecture == "falcon-h1":  # both in each layer
        layers = [Layer(layer.keys, layer.values, False, keys.state()) for layer in layers]
    return Shape(
        architecture=architecture,
        n_ctx_train=keys.number("context_length"),
        n_embd=n_embd,
        n_head=max(n_head, default=0),
        n_ff=max(keys.each("feed_forward_length", n_layer), default=0)
        or keys.number("expert_feed_forward_length"),
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
        if value is None or isinstance(value, (str, bool)):
            return 0
        if isinstance(value, np.ndarray):
            return int(value.max(initial=0))
        return _plain(f"{self._architecture}.{name}", value)

    def each(self, name: str, n_layer: int) -> list[int]:
        """A number for each layer; empty when it isn't there."""
        value = self.value(name)
        if isinstance(value, np.ndarray) and len(value) >= n_layer:
            return [int(item) for item in value[:n_layer]]
        number = self.number(name)
        return [number] * n_layer if number else []

    def windowed(self, n_layer: int) -> Sequence[bool]:
        """Whether each layer looks at a window only."""
        value = self.value("attention.sliding_window_pattern")
        if isinstance(value, np.ndarray) and len(value) >= n_layer:
            return [bool(item) for item in value[:n_layer]]
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
    number = int(value)
    if not 0 <= number < 1 << 31:
        raise FormatError(f"{key} is {number}, which no model has", field=key)
    return number
