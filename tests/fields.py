"""Files as lists of fields, so that a test can change each field by itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests import build
from tests.build import scalar

# What a field is, and its bytes.
Field = tuple[str, bytes]
Value = tuple[int, int | None, Any]  # type, type of the elements (None: no array), value
Keys = dict[bytes, Value]
Tensors = dict[bytes, tuple[list[int], bytes]]  # dims, ne[0] first, and data of type I8

I8 = 24
# Numbers that break arithmetic.
WILD = [0, 1, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def _text(what: str, value: bytes) -> list[Field]:
    return [(f"{what} length", struct.pack("<Q", len(value))), (what, value)]


def _value(what: str, kind: int, value: Any) -> list[Field]:
    return _text(what, value) if kind == build.STRING else [(what, scalar(kind, value))]


def _key(name: bytes, value: Value) -> list[Field]:
    kind, element, content = value
    fields = [*_text("key name", name), ("value type", struct.pack("<I", kind))]
    if element is None:
        return fields + _value("value", kind, content)
    fields.append(("element type", struct.pack("<I", element)))
    fields.append(("element count", struct.pack("<Q", len(content))))
    for item in content:
        fields += _value("element", element, item)
    return fields


def file_fields(
    version: int, keys: Keys, tensors: Tensors, *, alignment: int = 32, gap: int = 0
) -> list[Field]:
    """A valid file; gap: bytes between the tensors, beside padding."""
    fields = [
        ("magic", b"GGUF"),
        ("version", struct.pack("<I", version)),
        ("tensor count", struct.pack("<Q", len(tensors))),
        ("key count", struct.pack("<Q", len(keys))),
    ]
    for name, value in keys.items():
        fields += _key(name, value)
    data: list[Field] = []
    end = 0
    for name, (dims, content) in tensors.items():
        start = end + -end % alignment + gap
        data += [("padding", bytes(start - end)), ("data", content)]
        end = start + len(content)
        fields += [*_text("tensor name", name), ("n_dims", struct.pack("<I", len(dims)))]
        fields += [("dim", struct.pack("<Q", dim)) for dim in dims]
        fields.append(("tensor type", struct.pack("<I", I8)))
        fields.append(("tensor offset", struct.pack("<Q", start)))
    length = sum(len(raw) for _, raw in fields)
    return [*fields, ("padding", bytes(-length % alignment)), *data]


def join(fields: Sequence[Field]) -> bytes:
    return b"".join(raw for _, raw in fields)


def _replace(fields: list[Field], at: int, value: int) -> None:
    what, raw = fields[at]
    fields[at] = (what, struct.pack("<Q", value)[: len(raw)].ljust(len(raw), b"\xee"))


def _drop(fields: list[Field], at: int, _: int) -> None:
    del fields[at]


def _double(fields: list[Field], at: int, _: int) -> None:
    fields.insert(at, fields[at])


def _swap(fields: list[Field], at: int, value: int) -> None:
    other = value % len(fields)
    fields[at], fields[other] = fields[other], fields[at]


def _shorten(fields: list[Field], at: int, value: int) -> None:
    what, raw = fields[at]
    fields[at] = (what, raw[: value % (len(raw) + 1)])


def _cut(fields: list[Field], at: int, _: int) -> None:
    del fields[at:]


def _add(fields: list[Field], at: int, value: int) -> None:
    """A little more or less than what is there."""
    what, raw = fields[at]
    number = int.from_bytes(raw[:8], "little") + (value % 5) - 2
    fields[at] = (what, (number % (1 << 64)).to_bytes(8, "little")[: len(raw)] + raw[8:])


CHANGES: list[Callable[[list[Field], int, int], None]] = [
    _replace, _drop, _double, _swap, _shorten, _cut, _add,
]  # fmt: skip


def random_fields(random: Random) -> list[Field]:
    """A valid file with some of everything."""
    kinds = [kind for kind in range(13) if kind != build.ARRAY]

    def content(kind: int) -> Any:
        return random.randbytes(random.randrange(9)) if kind == build.STRING else 1

    keys: Keys = {}
    for i in range(random.randrange(4)):
        kind = random.choice(kinds)
        if random.random() < 0.5:
            keys[b"k%d" % i] = (kind, None, content(kind))
        else:
            items = [content(kind) for _ in range(random.randrange(5))]
            keys[b"k%d" % i] = (build.ARRAY, kind, items)
    if random.random() < 0.2:
        keys[b"general.alignment"] = (build.U32, None, 32)
    if random.random() < 0.2:
        keys[b"split.count"] = (build.U16, None, random.choice([0, 1, 3]))
    tensors: Tensors = {}
    for i in range(random.randrange(4)):
        dims = [random.randrange(1, 5) for _ in range(random.randrange(4))]
        size = 1
        for dim in dims:
            size *= dim
        tensors[b"t%d" % i] = (dims, random.randbytes(size))
    return file_fields(3, keys, tensors)
