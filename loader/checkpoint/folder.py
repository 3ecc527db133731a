"""A checkpoint: its folder, opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loader._closing import Closing
from loader.checkpoint.conversion import KNOWN, Converter
from loader.checkpoint.files import Stored, read_json, read_safetensors
from loader.comparison import Values
from loader.errors import FormatError, VerifyError, quoted
from loader.io import File


class Checkpoint(Closing):
    """The tensors of a folder by name. VerifyError when it has no checkpoint, FormatError for a
    file that isn't what it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[File] = []
        self.config = read_json(folder / "config.json")
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
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Values], list[str]]:
        """The tensors that a model should have, by its names, and names of the checkpoint that the
        map doesn't know. metadata, shapes: of the model and its tensors. VerifyError for an
        architecture that the gguf package doesn't know, and for two tensors of one name."""
        converter = Converter(metadata, self.config)
        mapped, unknown = converter.map(self.tensors)
        is_tied = bool(self.config.get("tie_word_embeddings")) or "output.weight" not in mapped
        if is_tied and "token_embd.weight" in mapped:
            if "output.weight" in shapes:
                mapped.setdefault("output.weight", mapped["token_embd.weight"])
            else:
                mapped.pop("output.weight", None)
        for name, shape in shapes.items():
            if name in mapped:
                mapped[name] = converter.cut(name, mapped[name], shape)
        return mapped, unknown

    def hint(self, metadata: Mapping[str, Any]) -> str | None:
        """What to say when tensors differ: that the checkpoint is of a newer transformers than the
        one that is installed, or that not all of the conversion is known here; else None."""
        arch = str(metadata.get("general.architecture", ""))
        written = self.config.get("transformers_version")
        try:
            installed = version("transformers")
        except PackageNotFoundError:
            installed = ""
        if installed and isinstance(written, str) and _numbers(written) > _numbers(installed):
            return (
                f"the checkpoint was written by transformers {written}, and {installed} is "
                "installed: that is the likely cause if it was converted here; install the newer "
                "one and convert again"
            )
        if arch not in KNOWN:
            return (
                f"what the conversion of {quoted(arch)} models changes isn't all known here, so "
                "tensors may differ although it was right"
            )
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 4.57.0.dev0 is (4, 57, 0)."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(part) for part in match[0].split(".")[:4]) if match else ()


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all of the model."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index).get("weight_map")
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
