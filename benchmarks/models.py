"""A model of a given size that llama.cpp loads too: the shapes of Llama, random Q8_0 blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

_VOCABULARY = 512
_BLOCK_BYTES, _BLOCK = 34, 32


def _blocks(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random Q8_0 data with scales between 0.0625 and 0.125."""
    shape = (rows, columns // _BLOCK, _BLOCK_BYTES)
    data = random.integers(0, 256, shape, np.uint8)
    data[:, :, 1] = 0x2C
    return data.reshape(rows, -1)


def write_model(path: Path, nbytes: int) -> None:
    """Writes a model of about so many bytes."""
    large = nbytes >= 1 << 30
    width, hidden = (4096, 11008) if large else (512, 1408)
    shapes = {
        "attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width),
        "attn_output": (width, width), "ffn_gate": (hidden, width), "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
    }  # fmt: skip
    layer = sum(rows * columns for rows, columns in shapes.values()) * _BLOCK_BYTES // _BLOCK
    layers = max(nbytes // layer, 1)
    random = np.random.default_rng(0)
    data = {shape: _blocks(random, *shape) for shape in set(shapes.values())}

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(width // 128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCABULARY)
    writer.add_tokenizer_model("none")
    norm = np.ones(width, np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", _blocks(random, _VOCABULARY, width), raw_dtype=kind)
    for i in range(layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", data[shape], raw_dtype=kind)
        writer.add_tensor(f"blk.{i}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", norm)
    writer.add_tensor("output_norm.weight", norm)
    writer.add_tensor("output.weight", _blocks(random, _VOCABULARY, width), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
