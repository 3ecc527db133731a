"""Text for people: what comes from a file made printable, sizes, and JSON."""

from __future__ import annotations

import json
import re
import sys

_ESCAPE = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def printable(text: str) -> str:
    """One line of harmless text, whatever is in a name or a path.

    Every string from a file or a path goes through here on its way to a
    terminal. What isn't printable (control characters, and with them escape
    sequences, line ends, marks that turn the direction of text) is escaped as
    \\xNN or \\uNNNN; a byte that isn't UTF-8 appears as its surrogate, \\udcNN.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def encode_name(name: str) -> str:
    """A name for a list of `hex  name` lines. One that isn't printable as it is, or holds a
    backslash, begins with a backslash and is escaped (as sha256sum does with newlines)."""
    shown = printable(name.replace("\\", "\\\\"))
    return name if shown == name else "\\" + shown


def decode_name(shown: str) -> str:
    """The name that `encode_name` made this of."""
    if not shown.startswith("\\"):
        return shown

    def restore(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        return chr(int(digits, 16)) if digits else "\\"

    return _ESCAPE.sub(restore, shown[1:])


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
