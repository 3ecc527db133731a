"""What kind of file a model is, in words."""

from __future__ import annotations

from pathlib import Path

from loader.gguf.kind import DESCRIPTIONS
from loader.model import Model


def describe_kind(model: Model) -> str:
    """Such as "main model, in 3 files, of which this is shard 2"."""
    text = DESCRIPTIONS[model.kind]
    if len(model.files) == 1:
        return text
    paths = [Path(file.path) for file in model.files]
    text += f", in {len(paths)} files"
    given = Path(model.path)
    return f"{text}, of which this is shard {paths.index(given) + 1}" if given in paths else text
