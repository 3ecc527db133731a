"""Text for people: what comes from a file made printable, sizes, and JSON."""

from __future__ import annotations

import json
import sys

_LONGEST = 4096


def printable(text: str) -> str:
    """One line of harmless text, whatever is in a name or a path.

    Every string from a file or a path goes through here on its way to a
    terminal. What isn't printable (control characters, and with them escape
    sequences, line ends, marks that turn the direction of text) is escaped as
    \\xNN or \\uNNNN; a byte that isn't UTF-8 appears as its surrogate, \\udcNN. Of a
    long text the beginning is shown (JSON has all of it).
    """
    if len(text) > _LONGEST:
        return f"{printable(text[:_LONGEST])}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else escaped(char) for char in text)


def escaped(char: str) -> str:
    """The escape of a character."""
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def size(nbytes: float) -> str:
    """Bytes in a unit that fits: "1.9 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def print_json(value: object) -> None:
    """One JSON object on stdout, in ASCII, so that every string in it is exact."""
    print_line(json.dumps(value, allow_nan=False))


def print_line(text: str = "") -> None:
    """A line of a result, on stdout."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A remark, on stderr, made printable."""
    sys.stderr.write(f"gguf-dio: {printable(text)}\n")
