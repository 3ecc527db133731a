"""How much memory a placement of a model needs, from its header alone.

Weights and caches are exact, compute buffers are estimated (see `compute`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from loader.fit.compute import CACHE_PADDING, Batch, device_compute, host_compute, window_cells
from loader.fit.result import HOST_NAME, FitParams
from loader.fit.shape import Layer, Shape
from loader.gguf.tensors import TensorInfo
from loader.io.ranges import align_up

DEFAULT_UBATCH = 512
_TENSOR_PADDING = 128  # of tensors in a buffer, CUDA's
_LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]+)\.")
# Tensors of the input layer, which llama.cpp keeps on the host.
_INPUT = re.compile(
    r"(token_embd|token_embd_norm|token_types|position_embd|per_layer_token_embd)\."
)
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

# Types of caches by llama.cpp's names: elements and bytes of a block.
CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24),
    "q5_0": (32, 22), "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
}  # fmt: skip


@dataclass(frozen=True)
class Cache:
    """Options of a context. flash_attention: no matrix of all scores is made."""

    type_k: str = "f16"
    type_v: str = "f16"
    ubatch: int = DEFAULT_UBATCH
    flash_attention: bool = True


@dataclass(frozen=True)
class Need:
    """Bytes of a device, or of the host."""

    model: int = 0
    context: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.model + self.context + self.compute


@dataclass
class ModelFigures:
    """The memory that a model needs: what `plan` asks for.

    tensors: of the model; names, free: of the devices, and their free memory, by
    which layers are split when nothing else is said; sizes: bytes of tensors of
    unknown type, by name.
    """

    shape: Shape
    tensors: Sequence[TensorInfo]
    names: Sequence[str]
    free: Sequence[int]
    cache: Cache = field(default_factory=Cache)
    sizes: Mapping[str, int] = field(default_factory=dict)
    _layers: list[list[tuple[str, int]]] = field(init=False)
    _input: int = field(init=False)

    def __post_init__(self) -> None:
        """Sorts the tensors by layer; the output layer is the one after the last."""
        n_layer = self.shape.n_layer
        self._layers = [[] for _ in range(n_layer + 1)]
        self._input = 0
        has_output = any(info.name == _OUTPUT for info in self.tensors)
        for info in self.tensors:
            nbytes = align_up(self._size(info), _TENSOR_PADDING)
            match = _LAYER.match(info.name)
            if match is not None:
                layer = int(match[1])
                if not n_layer - self.shape.n_unused <= layer < n_layer:
                    # Layers past the last one are for other purposes than the model's own text.
                    self._layers[min(layer, n_layer)].append((info.name, nbytes))
            elif _INPUT.match(info.name):
                self._input += nbytes
                if info.name == _EMBEDDING and not has_output:
                    self._layers[n_layer].append((_EMBEDDING, nbytes))  # tied: a copy
            else:
                self._layers[n_layer].append((info.name, nbytes))

    def _size(self, info: TensorInfo) -> int:
        return info.nbytes if info.nbytes is not None else self.sizes.get(info.name, 0)

    def __call__(self, params: FitParams) -> list[tuple[int, int, int]]:
        """(model, context, compute) bytes of each device."""
        needs = self.needs(params)
        return [(need.model, need.context, need.compute) for need in needs[:-1]]

    def needs(self, params: FitParams) -> list[Need]:
        """What each device needs, and the host."""
        n_ctx = align_up(params.n_ctx or self.shape.n_ctx_train, CACHE_PADDING)
        rules = [(re.compile(pattern), device) for pattern, device in params.overrides]
        count = len(self.names)
        model, context = [0] * (count + 1), [0] * (count + 1)
        model[count] = self._input
        active = [False] * count
        for index, tensors in enumerate(self._layers):
            home = self._home(params, index)
            if home < count:
                active[home] = True
            if index < self.shape.n_layer:
                context[home] += self._context(self.shape.layers[index], n_ctx)
            for name, nbytes in tensors:
                where = next((device for rule, device in rules if rule.search(name)), None)
                place = home if where is None else self._place(where)
                if place == count and _INPUT.match(name):
                    continue  # tied, and the host has it already
                model[place] += nbytes
                if place < count:
                    active[place] = True
        batch = Batch(n_ctx, self.cache.ubatch, self.cache.flash_attention)
        compute = device_compute(self.shape, batch)
        host = host_compute(self.shape, batch) if any(active) else compute
        return [
            *(Need(model[i], context[i], compute if active[i] else 0) for i in range(count)),
            Need(model[count], context[count], host),
        ]

    def homes(self, params: FitParams) -> dict[str, str]:
        """The device of each tensor, by name. A tied token embedding is on the host, beside the
        copy that a device has of it."""
        rules = [(re.compile(pattern), device) for pattern, device in params.overrides]
        names = [*self.names, HOST_NAME]
        found = {info.name: HOST_NAME for info in self.tensors}
        for index, tensors in enumerate(self._layers):
            home = names[self._home(params, index)]
            for name, _ in tensors:
                if not _INPUT.match(name):
                    where = next((device for rule, device in rules if rule.search(name)), None)
                    found[name] = home if where is None else where
        return found

    def _place(self, device: str) -> int:
        return len(self.names) if device == HOST_NAME else list(self.names).index(device)

    def _home(self, params: FitParams, layer: int) -> int:
        """The device of a layer, or the number after the last one for the host (llama.cpp's
        get_layer_buft_list, in single precision as there)."""
        total = self.shape.n_layer + 1
        wanted = params.n_gpu_layers if params.n_gpu_layers >= 0 else total
        start, active = max(total - wanted, 0), min(wanted, total)
        if not self.names or layer < start or layer - start >= active:
            return len(self.names)
        given = params.tensor_split or ()
        parts = np.array(given if any(given) else self.free, np.float32)
        sums = np.cumsum(parts, dtype=np.float32)
        if sums[-1] <= 0:
            return len(self.names)
        above = np.flatnonzero(sums / sums[-1] > np.float32(layer - start) / np.float32(active))
        return int(above[0]) if above.size else len(self.names)

    def _context(self, layer: Layer, n_ctx: int) -> int:
        if self.shape.unknown:
            return 0
        cells = window_cells(self.shape, n_ctx, self.cache.ubatch) if layer.windowed else n_ctx
        cache = _cache_bytes(layer.keys * cells, self.cache.type_k)
        cache += _cache_bytes(layer.values * cells, self.cache.type_v)
        state = 0 if layer.state is None else 4 * (layer.state.convolution + layer.state.rest)
        return cache + state


def _cache_bytes(numbers: int, kind: str) -> int:
    elements, nbytes = CACHE_TYPES[kind]
    return numbers // elements * nbytes
