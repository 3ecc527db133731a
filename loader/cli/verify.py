"""`gguf-dio verify`: digests of a model's tensors, and comparison with a list or another model."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from loader.cli.access import add_access_flags, requested_access
from loader.cli.parser import Parser, UsageError
from loader.cli.progress import progress_bar
from loader.cli.text import decode_name, encode_name, note, print_json, print_line, printable
from loader.errors import FormatError, VerifyError
from loader.gguf.types import why_unknown
from loader.loading import ModelFile
from loader.model import open_model
from loader.options import Access

# Stands for the digest of a tensor whose size isn't known.
_NO_DIGEST = "-" * 64

Digests = dict[str, str | None]
_MOST_NAMED = 5


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
            f"{len(names)} tensors {what} ({', '.join(map(repr, names[:_MOST_NAMED]))}"
            f"{', ...' if len(names) > _MOST_NAMED else ''})"
            for what, names in kinds.items()
            if names
        ]
        return "; ".join(parts)


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    add_access_flags(parser)
    parser.add_argument("--against", metavar="OTHER", help="compare with another GGUF file")
    parser.add_argument("--check", metavar="FILE", help="compare with a list made by --write")
    parser.add_argument("--write", metavar="FILE", help="write the list to a new file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    if arguments.check is not None and arguments.write is not None:
        raise UsageError("--check and --write exclude each other")
    access = requested_access(arguments, os.environ)
    listed = None if arguments.check is None else _read_list(arguments.check)
    files, digests = _digest_model(arguments.model, access)
    compared: dict[str, _Differences | None] = {"check": None, "against": None}
    if listed is not None:
        compared["check"] = _compare(digests, listed, arguments.check)
    if arguments.against is not None:
        other = _digest_model(arguments.against, access)[1]
        compared["against"] = _compare(digests, other, arguments.against)
    if arguments.write is not None:
        _write_list(arguments.write, digests)

    differences = [found for found in compared.values() if found is not None]
    if arguments.json:
        objects = {key: None if found is None else asdict(found) for key, found in compared.items()}
        print_json(
            {
                "model": files[0].path,
                "files": [asdict(file) for file in files],
                "tensors": digests,
                **objects,
            }
        )
    elif not differences and arguments.write is None:
        for name, digest in digests.items():
            print_line(_list_line(name, digest))
    for found in differences:
        if found:
            raise VerifyError(f"{files[0].path} is not what {found.other} says: {found}")
        if not arguments.json:
            print_line(
                f"{printable(files[0].path)}: {len(digests)} tensors are as in "
                f"{printable(found.other)}"
            )


def _digest_model(
    path: str, access: tuple[Access, ...] | None
) -> tuple[tuple[ModelFile, ...], Digests]:
    """The SHA-256 of each tensor's bytes; None for a tensor whose size isn't known."""
    digests: Digests = {}
    with open_model(path, access=access) as model, progress_bar("verifying") as progress:
        total = sum(info.nbytes or 0 for info in model.tensors.values())
        done = 0
        for name, info in model.tensors.items():
            if info.nbytes is None:
                note(f"tensor {name!r} has {why_unknown(info.ggml_type)}: it has no digest")
                digests[name] = None
                continue
            with model.load(names=[name]) as weights:
                data = weights[name].numpy().reshape(-1).view("u1")
                digests[name] = hashlib.sha256(data.data).hexdigest()
            done += info.nbytes
            if progress is not None:
                progress(done, total)
        return model.files, digests


def _compare(found: Digests, expected: Digests, other: str) -> _Differences:
    """A digest that isn't known equals nothing."""
    common = found.keys() & expected.keys()
    return _Differences(
        other,
        [
            name
            for name in found
            if name in common and (found[name] is None or found[name] != expected[name])
        ],
        [name for name in expected if name not in common],
        [name for name in found if name not in common],
    )


# --- Lists -----------------------------------------------------------------------


def _list_line(name: str, digest: str | None) -> str:
    return f"{digest or _NO_DIGEST}  {encode_name(name)}"


def _read_list(path: str) -> Digests:
    """A list of `hex  tensor` lines; FormatError, with the line's number, for any other."""
    digests: Digests = {}
    text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-f]{64}|-{64})  (.*)", line)
        if match is None:
            raise FormatError(
                f"{path}: line {number} is not of the form 'sha256  tensor'", path=path
            )
        digests[decode_name(match[2])] = None if match[1] == _NO_DIGEST else match[1]
    return digests


def _write_list(path: str, digests: Digests) -> None:
    """Writes a new file, whole or not at all, and never over one that is there."""
    text = "".join(_list_line(name, digest) + "\n" for name, digest in digests.items())
    target = Path(path)
    with target.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            target.unlink()
            raise
