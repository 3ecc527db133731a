"""SHA-256 digests of a model's tensors, in memory for a few of them at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from loader.cli.lists import Digests
from loader.cli.progress import progress_bar
from loader.cli.text import note
from loader.errors import quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import why_unknown
from loader.model import open as open_model
from loader.options import Access
from loader.planning import ModelFile
from loader.tensor import Tensor

_BATCH_BYTES = 64 << 20
_HASH_BYTES = 8 << 20


def digest_model(
    path: str, access: tuple[Access, ...] | None
) -> tuple[tuple[ModelFile, ...], Digests]:
    """The SHA-256 of each tensor's bytes; None for a tensor whose size isn't known."""
    with open_model(path, access=access) as model, progress_bar("verifying") as progress:
        digests: Digests = dict.fromkeys(model.tensors)
        total = sum(info.nbytes or 0 for info in model.tensors.values())
        done = 0
        for batch in _batches(model.tensors.values()):
            with model.load(names=batch) as weights:
                for name, tensor in weights.items():
                    digest = hashlib.sha256()
                    for part in _slices(tensor):
                        digest.update(part)
                        done += len(part)
                        if progress is not None:
                            progress(done, total)
                    digests[name] = digest.hexdigest()
        return model.files, digests


def _batches(tensors: Iterable[TensorInfo]) -> Iterator[list[str]]:
    """Names to load together: as many as stay below a bound, or one that is above it."""
    batch: list[str] = []
    nbytes = 0
    for info in tensors:
        if info.nbytes is None:
            note(f"tensor {quoted(info.name)} has {why_unknown(info.ggml_type)}: it has no digest")
            continue
        if batch and nbytes + info.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(info.name)
        nbytes += info.nbytes
    if batch:
        yield batch


def _slices(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor; between two slices the interpreter looks at signals."""
    data = tensor.numpy().reshape(-1).view("u1").data
    for start in range(0, len(data), _HASH_BYTES):
        yield data[start : start + _HASH_BYTES]
