"""`--override-kv`: values in the place of those in a model's metadata, as llama.cpp takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loader.cli.parser import Parser, UsageError
from loader.options import MetadataValue

_TYPES = "int|float|bool|str"
_OVERRIDE = re.compile(rf"(?P<key>[^=]+)=(?P<type>{_TYPES}):(?P<value>.*)", re.DOTALL)
# A comma between two overrides, and not one inside of a text.
_BETWEEN = re.compile(rf",(?=[^=,]+=(?:{_TYPES}):)")
_LONGEST = 127  # of a key and of a text, in llama.cpp
_BOOL = {"true": True, "false": False}


def add_override_flag(parser: Parser) -> None:
    parser.add_argument(
        "--override-kv",
        action="append",
        metavar="KEY=TYPE:VALUE,...",
        help="use this value of the metadata; TYPE is int, float, bool or str; may be repeated",
    )


def metadata_overrides(texts: Sequence[str] | None) -> dict[str, MetadataValue]:
    """The values by key; the last one counts. UsageError, which shows the text, for a wrong one."""
    parts = (part for text in texts or () for part in _BETWEEN.split(text))
    return dict(map(_parse, parts))


def _parse(text: str) -> tuple[str, MetadataValue]:
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--override-kv: {text!r} is not KEY=TYPE:VALUE; TYPE is int, float, bool or str"
        )
    kind, value = match["type"], match["value"]
    if max(len(match["key"]), len(value)) > _LONGEST:
        raise UsageError(f"--override-kv: {text[:50]!r}...: more than {_LONGEST} characters")
    try:
        if kind == "str":
            return match["key"], value
        if kind == "bool":
            return match["key"], _BOOL[value]
        if not value.isascii() or "_" in value or value != value.strip():
            raise ValueError
        return match["key"], int(value) if kind == "int" else float(value)
    except (KeyError, ValueError):
        raise UsageError(f"--override-kv: {text!r}: {value!r} is no value of type {kind}") from None
