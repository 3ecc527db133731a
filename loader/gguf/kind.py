"""What kind of file it is: not every GGUF file is a model that can be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["model", "projector", "adapter", "imatrix", "vocabulary"]

# What to do with each, for people.
DESCRIPTIONS: dict[Kind, str] = {
    "model": "main model",
    "projector": "projector (goes beside a main model, as llama.cpp's --mmproj, never as one)",
    "adapter": "adapter (goes on top of a main model, as llama.cpp's --lora or --control-vector)",
    "imatrix": "importance matrix (for llama-quantize, no model)",
    "vocabulary": "vocabulary only (it has no weights)",
}

_BY_ARCHITECTURE: dict[str, Kind] = {
    "clip": "projector", "controlvector": "adapter", "imatrix": "imatrix"
}  # fmt: skip
# general.type (GGUF specification).
_BY_TYPE: dict[str, Kind] = {"mmproj": "projector", "adapter": "adapter", "imatrix": "imatrix"}


def kind_of(metadata: Mapping[str, Any], n_tensors: int) -> Kind:
    """The kind of a file, by its architecture and type, and by whether it has tensors."""
    for key, kinds in (("general.architecture", _BY_ARCHITECTURE), ("general.type", _BY_TYPE)):
        value = metadata.get(key)
        if isinstance(value, str) and value in kinds:
            return kinds[value]
    return "model" if n_tensors else "vocabulary"
