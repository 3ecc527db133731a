"""The real Gemma model of the extra `real`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import loader

ACCESS = {
    "direct": ["-dio"],
    "mmap": ["--mmap"],
    "buffered": ["-ndio", "--no-mmap"],
}


def command(*words: str | Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "loader", *map(str, words)],
        check=True, capture_output=True, timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith(("GGUF_DIO", "LLAMA_ARG"))},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reference(gemma: Path) -> dict[str, str]:
    """Digests of each tensor by gguf-py's table of tensors and a plain read.

    GGUFReader's constructor takes 20 seconds for this vocabulary; its tensors
    are what is compared.
    """
    reader = gguf.GGUFReader(gemma)
    return {t.name: hashlib.sha256(t.data.tobytes()).hexdigest() for t in reader.tensors}


@pytest.mark.parametrize("access", ACCESS)
def test_each_access_is_reported_and_gives_the_bytes_of_gguf_py(
    gemma: Path, reference: dict[str, str], access: str
) -> None:
    report = command("load", gemma, "--json", "--check-tensors", *ACCESS[access])
    if access == "direct" and report["files"][0]["access"] != "direct":
        pytest.skip(f"no direct I/O here: {report['files'][0]['reason']}")
    assert report["files"][0]["access"] == access
    assert report["tensors"] == 236
    assert report["bytes"] == 246_587_904
    assert report["bytes_bounced"] == 0
    assert command("verify", gemma, "--json", *ACCESS[access])["tensors"] == reference


def test_values_are_those_of_gguf_py(gemma: Path) -> None:
    with loader.open(gemma) as model:
        names = ["blk.0.attn_k.weight", "blk.0.attn_output.weight", "blk.0.ffn_down.weight",
                 "blk.0.attn_v.weight", "output_norm.weight"]  # fmt: skip
        weights = model.load(names=names)
    kinds = {weights[name].info.ggml_type.name for name in names}  # type: ignore[union-attr]  # all known
    assert kinds == {"Q5_0", "Q4_K", "Q6_K", "Q8_0", "F32"}
    for name in names:
        tensor = weights[name]
        expected = gguf.dequantize(tensor.numpy(), gguf.GGMLQuantizationType(tensor.info.ggml_type))
        assert np.array_equal(tensor.dequantize(), expected)
        assert tensor.dequantize().shape == tensor.info.shape
        assert np.isfinite(expected).all()
    with loader.open(gemma) as model:
        assert model.metadata["general.architecture"] == "gemma3"
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 262_144
        assert model.metadata["tokenizer.ggml.tokens"][2] == "<bos>"


def test_a_cut_and_a_damaged_copy(gemma: Path, tmp_path: Path) -> None:
    data = gemma.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:-1])
    with pytest.raises(loader.TruncatedFileError, match="download"):
        loader.open(cut)
    with loader.open(gemma) as model:
        place = model.tensors["output_norm.weight"].offset
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :])
    with pytest.raises(loader.TensorDataError) as caught:
        loader.load(damaged, check_tensors=True)
    assert caught.value.tensors == ("output_norm.weight",)
