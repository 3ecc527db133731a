"""`gguf-dio verify`: digests of a model's tensors, and comparison with a list or another model."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from loader.cli.access import add_access_flags, requested_access
from loader.cli.lists import Digests, list_line, read_list, write_list
from loader.cli.parser import Parser, UsageError
from loader.cli.progress import progress_bar
from loader.cli.text import note, print_json, print_line, printable
from loader.errors import VerifyError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import why_unknown
from loader.model import open as open_model
from loader.options import Access
from loader.planning import ModelFile
from loader.tensor import Tensor

_MOST_NAMED = 5
_BATCH_BYTES = 64 << 20
_HASH_BYTES = 8 << 20


@dataclass(frozen=True)
class _Differences:
    """How the tensors of a model differ from what `other` says they are."""

    other: str
    different: list[str]
    missing: list[str]  # in the model
    unexpected: list[str]  # only in the model

    def __bool__(self) -> bool:
        return bool(self.different or self.missing or self.unexpected)

    def __str__(self) -> str:
        kinds = {
            "different": self.different,
            "missing": self.missing,
            "not expected": self.unexpected,
        }
        parts = [
            f"{len(names)} tensors {what} ({', '.join(map(quoted, names[:_MOST_NAMED]))}"
            f"{', ...' if len(names) > _MOST_NAMED else ''})"
            for what, names in kinds.items()
            if names
        ]
        return "; ".join(parts)


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any file of a split model")
    add_access_flags(parser)
    parser.add_argument("--against", metavar="OTHER", help="compare with another GGUF file")
    parser.add_argument("--check", metavar="FILE", help="compare with a list made by --write")
    parser.add_argument("--write", metavar="FILE", help="write the list to a new file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    if arguments.check is not None and arguments.write is not None:
        raise UsageError("--check and --write exclude each other")
    access = requested_access(arguments.access_flags, os.environ)
    listed = None if arguments.check is None else read_list(arguments.check)
    if arguments.write is not None and os.path.lexists(arguments.write):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), arguments.write)
    files, digests = _digest_model(arguments.model, access)
    compared: dict[str, _Differences | None] = {"check": None, "against": None}
    if listed is not None:
        compared["check"] = _compare(digests, listed, arguments.check)
    if arguments.against is not None:
        other = _digest_model(arguments.against, access)[1]
        compared["against"] = _compare(digests, other, arguments.against)
    if arguments.write is not None:
        write_list(arguments.write, digests)

    differences = [found for found in compared.values() if found is not None]
    if arguments.json:
        objects = {key: None if found is None else asdict(found) for key, found in compared.items()}
        print_json(
            {
                "model": arguments.model,
                "files": [asdict(file) for file in files],
                "tensors": digests,
                **objects,
            }
        )
    elif not differences and arguments.write is None:
        for name, digest in digests.items():
            print_line(list_line(name, digest, sys.stdout.encoding))
    for found in differences:
        if found:
            raise VerifyError(f"{arguments.model} is not what {found.other} says: {found}")
        if not arguments.json:
            print_line(
                f"{printable(arguments.model)}: {len(digests)} tensors are as in "
                f"{printable(found.other)}"
            )


def _digest_model(
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


def _compare(found: Digests, expected: Digests, other: str) -> _Differences:
    """Tensors without a digest on both sides can't be compared; a note has said so."""
    return _Differences(
        other,
        [name for name in found if name in expected and found[name] != expected[name]],
        [name for name in expected if name not in found],
        [name for name in found if name not in expected],
    )
