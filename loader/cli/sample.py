"""A small model to try the loader with, made in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gguf
import numpy as np

from loader.cli.text import note
from loader.errors import FormatError, LoaderError
from loader.model import open as open_model

_ROWS, _COLUMNS, _LAYERS = 1024, 512, 4


def sample_model() -> Path:
    """The path of the sample; it is made when it isn't there."""
    path = _cache_folder() / "gguf-dio" / "sample.gguf"
    if _is_usable(path):
        note(f"no model was given; loading the sample {path}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path)
    note(f"no model was given; made the sample {path}")
    return path


def _cache_folder() -> Path:
    """By the XDG base directory specification: a relative path is to be ignored."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given
    try:
        return Path("~/.cache").expanduser()
    except RuntimeError:
        raise LoaderError(
            "there is no home folder for the sample model; name a model, or set XDG_CACHE_HOME"
        ) from None


def _is_usable(path: Path) -> bool:
    try:
        with open_model(path, access="buffered"):
            return True
    except (FormatError, FileNotFoundError):
        return False


def _write(path: Path) -> None:
    """Writes to a temporary file that takes the path's place when it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    temporary = Path(name)
    try:
        _write_model(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_model(path: Path) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("gguf-dio sample")
    writer.add_block_count(_LAYERS)
    writer.add_token_list([f"token{i}" for i in range(_ROWS)])
    for layer in range(_LAYERS):
        values = random.standard_normal((_ROWS, _COLUMNS), np.float32)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", values[0])
        writer.add_tensor(f"blk.{layer}.attn_q.weight", values.astype(np.float16))
        for name, kind in (
            ("ffn_up", gguf.GGMLQuantizationType.Q8_0),
            ("ffn_down", gguf.GGMLQuantizationType.Q4_0),
        ):
            data = gguf.quantize(values, kind)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
