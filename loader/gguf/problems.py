"""Says in words what the scan of a header found wrong."""

from __future__ import annotations

from loader._ffi import Problem
from loader.errors import (
    FormatError,
    TensorLayoutError,
    TruncatedFileError,
    UnsupportedFormatError,
    quoted,
)

_REMEDY = "is the download complete?"

# How files begin that people take for GGUF.
_OTHER_FILES: tuple[tuple[bytes, str], ...] = (
    (b"FUGG", "a GGUF file with the wrong byte order (big-endian); convert it to little-endian"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model; fetch it with git lfs pull"),
    (b"vers", "a Git LFS pointer, not the model; fetch it with git lfs pull"),
    (b"<!DO", "an HTML page, not a model; was a login or error page downloaded?"),
    (b"<!do", "an HTML page, not a model; was a login or error page downloaded?"),
    (b"<htm", "an HTML page, not a model; was a login or error page downloaded?"),
    (b"tjgg", "an old GGJT model; convert it to GGUF with llama.cpp's converters"),
    (b"lmgg", "an old GGML model; convert it to GGUF with llama.cpp's converters"),
    (b"fmgg", "an old GGMF model; convert it to GGUF with llama.cpp's converters"),
    (b"algg", "an old GGLA adapter; convert it to GGUF with llama.cpp's converters"),
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint); unpack or convert it"),
    (b"PK", "a zip archive (perhaps a PyTorch checkpoint); unpack or convert it"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
    (b"\x80\x02", "a Python pickle (perhaps a PyTorch checkpoint); convert it to GGUF"),
)


# What each code of a scan's problem means, in words.
_EXPLANATIONS: dict[str, tuple[type[FormatError], str]] = {
    "TRUNCATED": (
        TruncatedFileError,
        "needs {value} bytes at offset {offset}, but only {limit} are left; " + _REMEDY,
    ),
    "TOO_MANY_KEYS": (
        TruncatedFileError,
        "claims {value} metadata keys, but at most {limit} are possible; " + _REMEDY,
    ),
    "TOO_MANY_TENSORS": (
        TruncatedFileError,
        "claims {value} tensors, but at most {limit} are possible; " + _REMEDY,
    ),
    "ARRAY_TOO_LONG": (
        TruncatedFileError,
        "at offset {offset} claims {value} elements, but at most {limit} are in the file; "
        + _REMEDY,
    ),
    "EMPTY_KEY": (FormatError, "at offset {offset} has an empty name"),
    "BAD_TYPE": (
        UnsupportedFormatError,
        "at offset {offset} has value type {value}, which is not one of 0 to {limit}",
    ),
    "NESTED_ARRAY": (
        UnsupportedFormatError,
        "at offset {offset} is an array of arrays, which is not read here",
    ),
    "TOO_MANY_DIMS": (
        TensorLayoutError,
        "at offset {offset} has {value} dimensions; at most {limit} are possible",
    ),
    "SIZE_OVERFLOW": (
        TensorLayoutError,
        "at offset {offset} has dimensions whose elements or bytes pass 2^63",
    ),
    "ROW_NOT_BLOCKS": (
        TensorLayoutError,
        "at offset {offset} has rows of {value} elements, not whole blocks of {limit}",
    ),
}


# The same codes, where it isn't the file's size that is the limit.
_TOO_MANY_FOR_US = (
    UnsupportedFormatError,
    "claims {value} entries, but more than {limit} are not read here; no model has so many",
)
_MOST_RECORDS = 1 << 20  # MOST_RECORDS of the scan


def _identify(path: str, beginning: bytes) -> FormatError | None:
    """An error for a file that isn't GGUF at all, or None for one that is."""
    if not beginning:
        return TruncatedFileError(f"{path}: the file is empty; {_REMEDY}", path=path, offset=0)
    if beginning[:4] == b"GGUF":
        return None
    for magic, what in _OTHER_FILES:
        if beginning.startswith(magic):
            return UnsupportedFormatError(
                f"{path}: this is {what}", path=path, offset=0, field="magic"
            )
    if beginning[8:9] == b"{" and beginning[4:8] == bytes(4):
        return UnsupportedFormatError(
            f"{path}: this is a safetensors file, not GGUF; convert it with llama.cpp's converters",
            path=path,
            offset=0,
            field="magic",
        )
    if b"GGUF".startswith(beginning):
        return TruncatedFileError(
            f"{path}: the file ends after {len(beginning)} bytes; {_REMEDY}", path=path, offset=0
        )
    return FormatError(
        f"{path}: this is no GGUF file: it begins with {beginning[:4]!r} instead of b'GGUF'",
        path=path,
        offset=0,
        field="magic",
    )


def _version_error(path: str, version: int) -> UnsupportedFormatError:
    if version == 1:
        what = (
            "GGUF version 1 (v1), which is not read here; convert it with a llama.cpp of 2023 "
            "(its quantize tool reads v1 and writes v2)"
        )
    elif version > 0xFFFF:
        what = (
            f"GGUF version {version:#010x}, which looks like the other byte order (big-endian); "
            "convert it to little-endian with gguf-py's gguf_convert_endian"
        )
    else:
        what = f"GGUF version {version}; versions 2 and 3 are read here"
    return UnsupportedFormatError(f"{path}: this is {what}", path=path, offset=4, field="version")


def _where(problem: Problem, name: str | None) -> str:
    if problem.number < 0:
        return "the fixed header"
    kind = "tensor" if problem.in_tensors else "metadata key"
    return f"{kind} {quoted(name)}" if name is not None else f"{kind} number {problem.number}"


def explain(path: str, problem: Problem, header: bytes | memoryview) -> FormatError:
    """The error for a problem; `header` holds the bytes of the file that were scanned."""
    other = _identify(path, bytes(header[:32]))
    if other is not None:
        return other
    if problem.code == "BAD_VERSION":
        return _version_error(path, problem.value)
    name = None
    if problem.name_length:
        end = problem.name_offset + problem.name_length
        name = str(header[problem.name_offset : end], "utf-8", "surrogateescape")
    where, offset = _where(problem, name), problem.offset
    kind, what = _EXPLANATIONS[problem.code]
    if problem.code in ("TOO_MANY_KEYS", "TOO_MANY_TENSORS") and problem.limit == _MOST_RECORDS:
        kind, what = _TOO_MANY_FOR_US
    text = what.format(offset=offset, value=problem.value, limit=problem.limit)
    return kind(f"{path}: {where} {text}", path=path, offset=offset, field=name)
