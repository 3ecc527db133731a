"""Hugging Face checkpoints: folders with config.json and safetensors, which models are made of.

Which tensor of a checkpoint is which of a GGUF model is in the gguf package's map
of names. Some values are changed by the conversion (llama.cpp's
convert_hf_to_gguf.py), and so they are here: heads of queries and keys are
reordered, some norms are stored with 1 added, experts are stacked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from loader._closing import Closing
from loader.comparison import Values
from loader.errors import FormatError, UnsupportedFormatError, VerifyError, quoted
from loader.io import File

_LARGEST_HEADER = 100_000_000  # of a safetensors file (its specification)
_LARGEST_JSON = 64 << 20
_MOST_LAYERS = 1000
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "<i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<u1",
}  # fmt: skip
# Architectures whose queries and keys are reordered, from the halves of a head one after the other
# to pairs.
_REORDERED = {
    "llama", "granite", "granitemoe", "deci", "minicpm", "mistral3", "smollm3", "arcee", "olmo",
    "chameleon",
}  # fmt: skip
# Those whose norms have 1 added, and the norms that haven't.
_NORMS_PLUS_ONE = {
    "gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next", "qwen35", "qwen35moe",
}  # fmt: skip
_NOT_PLUS_ONE = "linear_attn.norm.weight"
_TRANSPOSED = re.compile(r"\.(c_attn|c_fc|c_proj)\.weight$")  # gpt2
_EXPERT = re.compile(r"(?P<before>.*)\.experts\.(?P<number>[0-9]{1,4})\.(?P<after>.+)")
# Made by the conversion.
_MADE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")

_Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file. offset: of its data in the file, in bytes."""

    file: File
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, start: int, stop: int) -> _Floats:
        if self.kind not in _DTYPES:
            raise UnsupportedFormatError(
                f"{self.file.path}: tensor {quoted(self.name)} is of type {self.kind}, which isn't "
                "compared",
                path=self.file.path,
                offset=self.offset,
                field=self.name,
            )
        dtype = np.dtype(_DTYPES[self.kind])
        count = stop - start if self.shape else 1
        values = np.empty((count, *self.shape[1:]), dtype)
        row = values.nbytes // max(count, 1)
        self.file.pread_into(values.reshape(-1).view(np.uint8), self.offset + start * row)
        if self.kind == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


@dataclass(frozen=True)
class _Changed:
    """A tensor as the conversion makes it. rows: of `shape`, given those of `of`."""

    of: Values
    shape: tuple[int, ...]
    part: Callable[[Values, int, int], _Floats]

    @property
    def kind(self) -> str:
        return self.of.kind

    def rows(self, start: int, stop: int) -> _Floats:
        return self.part(self.of, start, stop)


@dataclass(frozen=True)
class _Stack:
    """Experts, one behind the other."""

    experts: list[Stored]

    @property
    def kind(self) -> str:
        return self.experts[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.experts), *self.experts[0].shape)

    def rows(self, start: int, stop: int) -> _Floats:
        chosen = self.experts[start:stop]
        return np.stack([expert.rows(0, expert.shape[0]) for expert in chosen])


class Checkpoint(Closing):
    """The tensors of a folder by name. VerifyError when it has no checkpoint, FormatError for a
    file that isn't what it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[File] = []
        self.config = _read_json(folder / "config.json")
        self.tensors: dict[str, Stored] = {}
        for path in _files_of(folder):
            file = File(path)
            self._files.append(file)
            for tensor in read_safetensors(file):
                if tensor.name in self.tensors:
                    raise FormatError(
                        f"{path}: the tensor {quoted(tensor.name)} is in another file of the "
                        "checkpoint, too",
                        path=str(path),
                        field=tensor.name,
                    )
                self.tensors[tensor.name] = tensor

    def close(self) -> None:
        for file in self._files:
            file.close()

    def as_converted(
        self, metadata: Mapping[str, Any], names: Iterable[str]
    ) -> tuple[dict[str, Values], list[str]]:
        """The tensors that a model should have, by its names, and names of the checkpoint that the
        map doesn't know. metadata, names: of the model."""
        converter = _Converter(metadata)
        mapped, unknown = converter.map(self.tensors)
        wanted = set(names)
        is_tied = bool(self.config.get("tie_word_embeddings")) or "output.weight" not in mapped
        if is_tied and "token_embd.weight" in mapped:
            if "output.weight" in wanted:
                mapped.setdefault("output.weight", mapped["token_embd.weight"])
            else:
                mapped.pop("output.weight", None)
        return mapped, unknown

    def version_hint(self) -> str | None:
        """What to say when tensors differ: that the checkpoint is of a newer transformers than the
        one that is installed, None when it isn't."""
        written = self.config.get("transformers_version")
        try:
            installed = version("transformers")
        except PackageNotFoundError:
            return None
        if not isinstance(written, str) or _numbers(written) <= _numbers(installed):
            return None
        return (
            f"the checkpoint was written by transformers {written}, and {installed} is installed: "
            "that is the likely cause if it was converted here; install the newer one and convert "
            "again"
        )


def is_made_by_conversion(name: str) -> bool:
    """Whether a tensor of a model has no counterpart in a checkpoint."""
    return _MADE.fullmatch(name) is not None


class _Converter:
    """What the conversion to an architecture does."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._arch = str(metadata.get("general.architecture", ""))
        found = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch]
        if not found:
            raise VerifyError(
                f"the installed gguf package doesn't know the architecture {quoted(self._arch)}, "
                "so names can't be mapped"
            )
        blocks = _largest(metadata.get(f"{self._arch}.block_count", 0))
        self._names = gguf.get_tensor_name_map(found[0], min(blocks, _MOST_LAYERS))
        heads = metadata.get(f"{self._arch}.attention.head_count", 0)
        kv_heads = metadata.get(f"{self._arch}.attention.head_count_kv", heads)
        self._heads, self._kv_heads = _largest(heads), _largest(kv_heads)

    def map(self, tensors: Mapping[str, Stored]) -> tuple[dict[str, Values], list[str]]:
        mapped: dict[str, Values] = {}
        unknown: list[str] = []
        experts: dict[str, list[tuple[int, Stored]]] = {}
        for name, tensor in tensors.items():
            target = self._target(name)
            match = _EXPERT.fullmatch(name)
            if target is not None:
                mapped[target] = self._changed(name, target, tensor)
            elif match is not None and (target := self._stack_target(match)) is not None:
                experts.setdefault(target, []).append((int(match["number"]), tensor))
            else:
                unknown.append(name)
        for target, numbered in experts.items():
            mapped[target] = _Stack([expert for _, expert in sorted(numbered, key=_first)])
        return mapped, unknown

    def _target(self, name: str) -> str | None:
        """The model's name for one of the checkpoint, whose text part may have a prefix."""
        plain = name.replace("model.language_model.", "model.", 1)
        plain = plain.removeprefix("language_model.")
        return self._names.get_name(plain, try_suffixes=(".weight", ".bias"))

    def _stack_target(self, match: re.Match[str]) -> str | None:
        merged = self._target(f"{match['before']}.experts.{match['after']}")
        layer = re.search(r"\.layers\.([0-9]+)\.", match["before"])
        if merged is None and layer is not None:  # Mixtral
            merged = self._target(f"layers.{layer[1]}.feed_forward.experts.{match['after']}")
        return merged

    def _changed(self, name: str, target: str, tensor: Stored) -> Values:
        values: Values = tensor
        if 1 in tensor.shape and len(tensor.shape) > 2:  # convolutions
            shape = tuple(size for size in tensor.shape if size != 1)
            values = _Changed(values, shape, lambda of, a, b: of.rows(a, b).reshape(-1, *shape[1:]))
        if self._arch == "gpt2" and _TRANSPOSED.search(name):
            values = _Changed(values, values.shape[::-1], _transposed)
        if self._arch in _REORDERED and (match := re.search(r"\.attn_([qk])\.", target)):
            heads = self._heads if match[1] == "q" else self._kv_heads
            if heads and values.shape[0] % (2 * heads) == 0:
                values = _Changed(values, values.shape, _reordered(values.shape[0] // heads))
        plus_one = self._arch in _NORMS_PLUS_ONE and name.endswith("norm.weight")
        if plus_one and not name.endswith(_NOT_PLUS_ONE):
            values = _Changed(values, values.shape, lambda of, a, b: of.rows(a, b) + 1)
        if target.endswith(".ssm_a"):
            values = _Changed(values, values.shape, lambda of, a, b: -np.exp(of.rows(a, b)))
        return values


def _first(pair: tuple[int, Stored]) -> int:
    return pair[0]


def _transposed(of: Values, start: int, stop: int) -> _Floats:
    whole: _Floats = of.rows(0, of.shape[0]).T
    return whole[start:stop]


def _reordered(size: int) -> Callable[[Values, int, int], _Floats]:
    """Rows of heads that have `size` of them: (2, size / 2) becomes (size / 2, 2)."""

    def part(of: Values, start: int, stop: int) -> _Floats:
        first, last = start // size, -(-stop // size)
        rows = of.rows(first * size, last * size)
        heads = rows.reshape(last - first, 2, size // 2, *rows.shape[1:])
        ordered: _Floats = heads.swapaxes(1, 2).reshape(rows.shape)
        return ordered[start - first * size : stop - first * size]

    return part


def _largest(value: Any) -> int:
    """A number of the metadata, of an array the largest; 0 for what is none."""
    found = np.asarray(value)
    return max(int(found.max(initial=0)), 0) if found.dtype.kind in "iu" else 0


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 4.57.0.dev0 is (4, 57, 0)."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(part) for part in match[0].split(".")[:4]) if match else ()


# --- Files -----------------------------------------------------------------------


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all of the model."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(n, str) for n in listed.values()):
            raise FormatError(f"{index}: weight_map is no map of names to files", path=str(index))
        paths = [folder / name for name in sorted(set(listed.values()))]
        missing = [path.name for path in paths if path.parent != folder or not path.exists()]
        if missing:
            raise VerifyError(f"{folder}: its index names files that aren't there: {missing[:5]}")
        return paths
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        raise VerifyError(f"{folder} has no safetensors files; is it a checkpoint?")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file of a sensible size."""
    with File(path, direct=False) as file:
        if file.size > _LARGEST_JSON:
            raise FormatError(f"{path} has {file.size} bytes, too many", path=str(path))
        return _parse_object(str(path), file.read(), 0)


def _parse_object(path: str, data: bytes, offset: int) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no valid JSON: {error}", path=path, offset=offset) from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: no JSON object", path=path, offset=offset)
    return found


def read_safetensors(file: File) -> list[Stored]:
    """The tensors of a safetensors file, whose places are checked. FormatError for a wrong one."""

    def wrong(what: str, field: str | None = None) -> FormatError:
        return FormatError(f"{file.path}: {what}", path=file.path, offset=8, field=field)

    if file.size < 8:
        raise wrong("no safetensors file: it has no header")
    length = int.from_bytes(_at(file, 0, 8), "little")
    if length > min(_LARGEST_HEADER, file.size - 8):
        raise wrong(f"no safetensors file: its header would have {length} bytes")
    header = _parse_object(file.path, _at(file, 8, length), 8)
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            numbers = (*shape, begin, end)
            valid = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in numbers)
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid or begin > end or 8 + length + end > file.size:
            raise wrong(f"the entry of tensor {quoted(name)} is wrong or past the end", name)
        size = np.dtype(_DTYPES[kind]).itemsize if kind in _DTYPES else None
        if size is not None and math.prod(shape) * size != end - begin:
            raise wrong(f"tensor {quoted(name)} has another size than its shape says", name)
        tensors.append(Stored(file, name, kind, shape, 8 + length + begin))
    return tensors


def _at(file: File, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    file.pread_into(buffer, offset)
    return bytes(buffer)
