"""Lists of digests, in the manner of sha256sum: lines of `hex  tensor`.

A name that isn't printable, or holds a backslash, begins with a backslash, and
is escaped after it; so every name can be got back exactly.
"""

from __future__ import annotations

import re

from loader.cli.new_file import write_new
from loader.cli.text import escaped
from loader.errors import FormatError
from loader.io import File

Digests = dict[str, str | None]

# Stands for the digest of a tensor whose size isn't known.
_NO_DIGEST = "-" * 64
_LINE = re.compile(r"([0-9a-fA-F]{64}|-{64}) [ *](.*)")
_ESCAPE = re.compile(r"\\(?:(\\)|x([0-9a-f]{2})|u([0-9a-f]{4})|U(0010[0-9a-f]{4}|000[0-9a-f]{5}))?")


def list_line(name: str, digest: str | None, encoding: str = "utf-8") -> str:
    """A line of a list, without its end. encoding: of where it is written to."""
    return f"{digest or _NO_DIGEST}  {encode_name(name, encoding)}"


def encode_name(name: str, encoding: str = "utf-8") -> str:
    """A name as it stands in a list."""
    escapes = {ord(char): _encoded(char, encoding) for char in set(name)}
    shown = name.translate(escapes)
    return name if shown == name else "\\" + shown


def _encoded(char: str, encoding: str) -> str:
    if char == "\\":
        return "\\\\"
    if not char.isprintable():
        return escaped(char)
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return escaped(char)
    return char


def decode_name(shown: str) -> str:
    """The name that `encode_name` made this of. ValueError for a wrong escape."""
    if not shown.startswith("\\"):
        return shown

    def restore(match: re.Match[str]) -> str:
        if match[1]:
            return "\\"
        digits = match[2] or match[3] or match[4]
        if not digits:
            raise ValueError("wrong escape")
        return chr(int(digits, 16))

    return _ESCAPE.sub(restore, shown[1:])


def read_list(path: str) -> Digests:
    """The digests of a list; FormatError, with the line's number, for what is none."""
    with File(path, direct=False) as file:
        text = file.read().decode("utf-8-sig", "surrogateescape")
    digests: Digests = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line:
            continue
        match = _LINE.fullmatch(line)
        try:
            if match is None:
                raise ValueError("not of the form 'sha256  tensor'")
            name = decode_name(match[2])
            if name in digests:
                raise ValueError("for a tensor that the list has already")
        except ValueError as error:
            raise FormatError(f"{path}: line {number} is {error}", path=path) from None
        digests[name] = None if match[1] == _NO_DIGEST else match[1].lower()
    return digests


def write_list(path: str, digests: Digests) -> None:
    """Writes a new file, whole or not at all, and never over one that is there."""
    write_new(path, "".join(list_line(name, digest) + "\n" for name, digest in digests.items()))
