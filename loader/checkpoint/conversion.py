"""What llama.cpp's convert_hf_to_gguf.py does to the tensors of a checkpoint.

Which tensor is which is in the gguf package's map of names. Some are changed:
heads of queries and keys are reordered, some norms are stored with 1 added,
experts are stacked, and more; by architecture, since nothing is to be guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gguf
import numpy as np

from loader.checkpoint.files import Floats, Stored
from loader.comparison import Values, as_matrix
from loader.errors import VerifyError, quoted

_MOST_LAYERS = 1000
# Architectures whose queries and keys are reordered, from the halves of a head one after the other
# to pairs.
_REORDERED = {
    "llama", "llama-embed", "granite", "granitemoe", "granitehybrid", "deci", "minicpm", "mistral3",
    "smollm3", "arcee", "olmo", "chameleon", "xverse", "arctic", "llada",
}  # fmt: skip
# Those whose norms have 1 added, and the norms that haven't.
_NORMS_PLUS_ONE = {
    "gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next", "qwen35", "qwen35moe",
}  # fmt: skip
_NOT_PLUS_ONE = "linear_attn.norm.weight"
# Those whose vocabulary is cut to the tokens that the tokenizer has.
_CUT_VOCABULARY = {"gemma3", "gemma3n"}
# Those of which everything that the conversion does is here.
KNOWN = {
    "apertus", "arcee", "bert", "deci", "deepseek2", "ernie4_5", "exaone4", "gemma",
    "gemma-embedding", "gemma2", "gemma3", "glm4", "glm4moe", "gpt2", "granite", "granitemoe",
    "hunyuan-dense", "jamba", "lfm2", "llama", "llama-embed", "mamba", "mamba2", "mistral3",
    "nemotron", "olmo", "olmo2", "olmoe", "phi2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip
_TRANSPOSED = re.compile(r"\.(c_attn|c_fc|c_proj)\.weight$")  # gpt2
_EXPERT = re.compile(r"(?P<before>.*)\.experts\.(?P<number>[0-9]{1,4})\.(?P<after>.+)")
_GATE_UP = re.compile(
    r"model\.layers\.(?P<layer>[0-9]{1,4})\.(?P<part>block_sparse_moe|shared_mlp)"
    r"\.input_linear\.weight"
)
# Left out by the conversion, and made by it.
_SKIPPED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
_MADE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
# Names that are changed before they are looked for.
_ENDINGS = {
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".dt_bias": ".dt_proj.bias",
}
_PREFIXES = ("language_model.", "bert.", "roberta.")


def is_made_by_conversion(name: str) -> bool:
    """Whether a tensor of a model has no counterpart in a checkpoint."""
    return _MADE.fullmatch(name) is not None


class Converter:
    """What the conversion to an architecture does (llama.cpp's convert_hf_to_gguf.py)."""

    def __init__(self, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._arch = str(metadata.get("general.architecture", ""))
        self._config = config
        found = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch]
        if not found:
            raise VerifyError(
                f"the installed gguf package doesn't know the architecture {quoted(self._arch)}, "
                "so names can't be mapped"
            )
        blocks = min(_largest(metadata.get(f"{self._arch}.block_count", 0)), _MOST_LAYERS)
        self._names = gguf.get_tensor_name_map(found[0], blocks)
        heads = metadata.get(f"{self._arch}.attention.head_count", 0)
        self._heads = _for_layers(heads, blocks)
        kv_heads = metadata.get(f"{self._arch}.attention.head_count_kv", heads)
        self._kv_heads = _for_layers(kv_heads, blocks)

    def map(self, tensors: Mapping[str, Stored]) -> tuple[dict[str, Values], list[str]]:
        mapped: dict[str, Values] = {}
        sources: dict[str, str] = {}
        unknown: list[str] = []
        experts: dict[str, list[tuple[int, Stored]]] = {}
        for name, tensor in tensors.items():
            if name.endswith(_SKIPPED):
                continue
            target, match = self._target(name), _EXPERT.fullmatch(name)
            halves = self._halves(name, tensor)
            if target is None and match is not None:
                target = self._stack_target(match)
                if target is not None:
                    experts.setdefault(target, []).append((int(match["number"]), tensor))
                    continue
            found = halves or ({} if target is None else self._changed(name, target, tensor))
            if not found:
                unknown.append(name)
            for one in found:
                if one in sources:
                    raise VerifyError(
                        f"two tensors of the checkpoint are {quoted(one)}: {quoted(sources[one])} "
                        f"and {quoted(name)}"
                    )
                sources[one] = name
            mapped.update(found)
        for target, numbered in experts.items():
            stack = [expert for _, expert in sorted(numbered, key=_first)]
            if any(expert.shape != stack[0].shape for expert in stack):
                raise VerifyError(f"the experts of {quoted(target)} have different shapes")
            mapped[target] = _Stack(stack)
        return mapped, unknown

    def cut(self, name: str, values: Values, shape: tuple[int, ...]) -> Values:
        """With as many rows as the model has, where the conversion leaves some out: tokens that the
        tokenizer hasn't, positions before the first one (RoBERTa)."""
        if len(values.shape) != 2 or len(shape) != 2 or values.shape[1] != shape[1]:
            return values
        surplus = values.shape[0] - shape[0]
        is_vocabulary = name in ("token_embd.weight", "output.weight")
        if surplus > 0 and is_vocabulary and self._arch in _CUT_VOCABULARY:
            return _Changed(values, shape, lambda of, a, b: of.rows(a, b))
        if surplus > 0 and name == "position_embd.weight":
            return _Changed(values, shape, lambda of, a, b: of.rows(a + surplus, b + surplus))
        return values

    def _target(self, name: str) -> str | None:
        """The model's name for one of the checkpoint, whose text part may have a prefix."""
        plain = name.replace("model.language_model.", "model.", 1)
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        if plain.endswith((".gamma", ".beta")):
            plain = plain.removesuffix(".gamma").removesuffix(".beta")
            plain += ".weight" if name.endswith(".gamma") else ".bias"
        for ending, other in _ENDINGS.items():
            if plain.endswith(ending):
                plain = plain.removesuffix(ending) + other
        target: str | None = self._names.get_name(plain, try_suffixes=(".weight", ".bias"))
        is_bare = target is not None and plain.endswith((".experts.down_proj", ".experts.up_proj"))
        return f"{target}.weight" if is_bare else target

    def _stack_target(self, match: re.Match[str]) -> str | None:
        merged = self._target(f"{match['before']}.experts.{match['after']}")
        layer = re.search(r"\.layers\.([0-9]+)\.", match["before"])
        if merged is None and layer is not None:  # Mixtral
            merged = self._target(f"layers.{layer[1]}.feed_forward.experts.{match['after']}")
        return merged

    def _changed(self, name: str, target: str, tensor: Stored) -> dict[str, Values]:
        """What a tensor becomes, by names of the model; nothing when that isn't known."""
        shape = tensor.shape
        if target.endswith(".attn_kv_b.weight"):
            return self._split_kv_b(target, tensor)
        if self._arch == "gpt2" and _TRANSPOSED.search(name) and len(shape) == 2:
            return {target: _Remade(tensor, shape[::-1], np.transpose)}
        if self._arch in _REORDERED and (match := re.search(r"\.attn_([qk])\.", target)):
            layer = re.match(r"blk\.([0-9]+)\.", target)
            heads = self._heads if match[1] == "q" else self._kv_heads
            count = heads.get(int(layer[1]) if layer else 0, 0)
            if count and shape and shape[0] % (2 * count) == 0:
                return {target: _Changed(tensor, shape, _reordered(shape[0] // count))}
        plus_one = self._arch in _NORMS_PLUS_ONE and name.endswith("norm.weight")
        if plus_one and not name.endswith(_NOT_PLUS_ONE):
            return {target: _Changed(tensor, shape, lambda of, a, b: of.rows(a, b) + 1)}
        if target.endswith(".ssm_a"):
            return {target: _Changed(tensor, shape, lambda of, a, b: -np.exp(of.rows(a, b)))}
        return {target: tensor}

    def _halves(self, name: str, tensor: Stored) -> dict[str, Values]:
        """Granite's: gate and up in one, of experts or of the network that all tokens share."""
        match = _GATE_UP.fullmatch(name)
        if match is None or len(tensor.shape) < 2 or tensor.shape[-2] % 2:
            return {}
        is_shared = match["part"] == "shared_mlp"
        has_experts = bool(self._config.get("num_local_experts"))
        kind = "_exps" if not is_shared else "_shexp" if has_experts else ""
        size = tensor.shape[-2] // 2
        shape = (*tensor.shape[:-2], size, tensor.shape[-1])
        return {
            f"blk.{match['layer']}.ffn_{part}{kind}.weight": _Changed(
                tensor, shape, _half(size, number)
            )
            for number, part in enumerate(("gate", "up"))
        }

    def _split_kv_b(self, target: str, tensor: Stored) -> dict[str, Values]:
        """DeepSeek's: of each head, a part for keys, transposed, and one for values."""
        head = [self._config.get(f"{part}_head_dim") for part in ("qk_nope", "v")]
        heads = self._config.get("num_attention_heads")
        if not all(type(size) is int and size > 0 for size in (*head, heads)):
            return {}
        (keys, values), heads = (int(size or 0) for size in head), int(heads or 0)
        if len(tensor.shape) != 2 or tensor.shape[0] != heads * (keys + values):
            return {}
        rank = tensor.shape[1]

        def parts(whole: Floats) -> Floats:
            return whole.reshape(heads, keys + values, rank)

        return {
            target.replace("attn_kv_b", "attn_k_b"): _Remade(
                tensor, (heads, rank, keys), lambda whole: parts(whole)[:, :keys].swapaxes(1, 2)
            ),
            target.replace("attn_kv_b", "attn_v_b"): _Remade(
                tensor, (heads, values, rank), lambda whole: parts(whole)[:, keys:]
            ),
        }


def _first(pair: tuple[int, Stored]) -> int:
    return pair[0]


def _blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Which blocks of `size` rows some rows are in, and from where to where in each."""
    while start < stop:
        block, first = divmod(start, size)
        last = min(size, first + stop - start)
        yield block, first, last
        start += last - first


def _joined(parts: Iterable[Floats]) -> Floats:
    """Rows one after the other; none for no parts."""
    found = list(parts)
    return np.concatenate(found) if found else np.empty(0, np.float32)


def _half(size: int, number: int) -> Callable[[Values, int, int], Floats]:
    """Rows of the first or second half, where each 2 * size rows are two halves."""

    def part(of: Values, start: int, stop: int) -> Floats:
        return _joined(
            of.rows((2 * block + number) * size + first, (2 * block + number) * size + last)
            for block, first, last in _blocks(start, stop, size)
        )

    return part


def _reordered(size: int) -> Callable[[Values, int, int], Floats]:
    """Rows of heads that have `size` of them: (2, size / 2) becomes (size / 2, 2)."""

    def part(of: Values, start: int, stop: int) -> Floats:
        first, last = start // size, -(-stop // size)
        rows = of.rows(first * size, last * size)
        heads = rows.reshape(last - first, 2, size // 2, *rows.shape[1:])
        ordered: Floats = heads.swapaxes(1, 2).reshape(rows.shape)
        return ordered[start - first * size : stop - first * size]

    return part


def _for_layers(value: Any, layers: int) -> dict[int, int]:
    """A number of the metadata for each layer: one for all, or an array."""
    found = np.asarray(value)
    if found.dtype.kind not in "iu":
        return {}
    each = found.tolist() if found.ndim == 1 else [int(found)] * layers
    return dict(enumerate(each))


def _largest(value: Any) -> int:
    """A number of the metadata, of an array the largest; 0 for what is none."""
    found = np.asarray(value)
    return max(int(found.max(initial=0)), 0) if found.dtype.kind in "iu" else 0


@dataclass(frozen=True)
class _Changed:
    """A tensor whose rows the conversion changes. part: gives some of them, of those of `of`."""

    of: Values
    shape: tuple[int, ...]
    part: Callable[[Values, int, int], Floats]

    @property
    def kind(self) -> str:
        return self.of.kind

    def rows(self, start: int, stop: int) -> Floats:
        return self.part(self.of, start, stop)


class _Remade:
    """A tensor that the conversion makes of the whole of another one, which is read once."""

    def __init__(
        self, of: Stored, shape: tuple[int, ...], make: Callable[[Floats], Floats]
    ) -> None:
        self.kind = of.kind
        self.shape = shape
        self._of = of
        self._make = make

    @cached_property
    def _values(self) -> Floats:
        return self._make(self._of.whole()).reshape(as_matrix(self.shape))

    def rows(self, start: int, stop: int) -> Floats:
        return self._values[start:stop]


@dataclass(frozen=True)
class _Stack:
    """Experts, one behind the other, of one shape and type."""

    experts: list[Stored]

    @property
    def kind(self) -> str:
        return self.experts[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.experts), *self.experts[0].shape)

    def rows(self, start: int, stop: int) -> Floats:
        each = as_matrix(self.shape)[0] // len(self.experts)
        return _joined(
            self._of_one(self.experts[number], first, last)
            for number, first, last in _blocks(start, stop, each)
        )

    def _of_one(self, expert: Stored, first: int, last: int) -> Floats:
        """Rows of one expert, as they are counted in the stack."""
        if as_matrix(expert.shape)[0] == as_matrix(self.shape)[0] // len(self.experts):
            return expert.rows(first, last)
        return expert.whole().reshape(-1)  # of one axis, that is one row of the stack
