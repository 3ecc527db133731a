"""Headers that hypothesis builds, whole, changed and cut."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import loader
from loader.errors import FormatError
from tests import build
from tests.build import array, fixed, info, key, pad, scalar

names = st.binary(min_size=1, max_size=20)
SCALARS = {
    build.U8: st.integers(0, 255),
    build.I8: st.integers(-128, 127),
    build.U16: st.integers(0, 65535),
    build.I16: st.integers(-32768, 32767),
    build.U32: st.integers(0, (1 << 32) - 1),
    build.I32: st.integers(-(1 << 31), (1 << 31) - 1),
    build.F32: st.floats(width=32),
    build.BOOL: st.integers(0, 255),
    build.STRING: st.binary(max_size=20),
    build.U64: st.integers(0, (1 << 64) - 1),
    build.I64: st.integers(-(1 << 63), (1 << 63) - 1),
    build.F64: st.floats(),
}
Value = tuple[int, int | None, Any]  # type, type of the elements, value


@st.composite
def values(draw: st.DrawFn) -> Value:
    kind = draw(st.sampled_from([*SCALARS, build.ARRAY]))
    if kind != build.ARRAY:
        return kind, None, draw(SCALARS[kind])
    element = draw(st.sampled_from(list(SCALARS)))
    return kind, element, draw(st.lists(SCALARS[element], max_size=6))


@st.composite
def files(
    draw: st.DrawFn,
) -> tuple[bytes, dict[bytes, Value], dict[bytes, tuple[list[int], bytes]]]:
    """A file, the metadata and the tensors (dims and bytes) in it."""
    keys = draw(
        st.dictionaries(names.filter(lambda n: n != b"general.alignment"), values(), max_size=5)
    )
    alignment = draw(st.sampled_from([None, 1, 8, 32, 256]))
    if alignment is not None:
        keys[b"general.alignment"] = (build.U32, None, alignment)
    tensors: dict[bytes, tuple[list[int], bytes]] = {}
    infos, data = b"", b""
    for name in draw(st.lists(names, max_size=5, unique=True)):
        dims = draw(st.lists(st.integers(0, 5), max_size=4))
        content = draw(
            st.binary(
                min_size=int(np.prod(dims, dtype=int)), max_size=int(np.prod(dims, dtype=int))
            )
        )
        data = pad(data, alignment or 32) + bytes(draw(st.sampled_from([0, alignment or 32])))
        infos += info(name, dims, 24, len(data))
        tensors[name] = (dims, content)
        data += content
    raw = fixed(draw(st.sampled_from([2, 3])), len(tensors), len(keys))
    for name, (kind, element, value) in keys.items():
        raw += key(name, kind, scalar(kind, value) if element is None else array(element, value))
    return pad(raw + infos, alignment or 32) + data, keys, tensors


def decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def same(found: Any, kind: int, element: int | None, value: Any) -> bool:
    if element is not None:
        assert len(found) == len(value)
        return all(same(f, element, None, v) for f, v in zip(found, value, strict=True))
    if kind == build.STRING:
        return bool(found == decode(value))
    if kind == build.BOOL:
        return bool(found) == bool(value)
    return bool(found == value) or (value != value and found != found)


fixture = HealthCheck.function_scoped_fixture


@settings(max_examples=300, deadline=None, suppress_health_check=[fixture])
@given(files())
def test_what_is_written_is_read(
    tmp_path: Path,
    file: tuple[bytes, dict[bytes, Value], dict[bytes, tuple[list[int], bytes]]],
) -> None:
    data, keys, tensors = file
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with loader.open(path, access=("direct", "buffered")) as model:
        assert list(model.metadata) == [decode(name) for name in keys]
        for name, (kind, element, value) in keys.items():
            assert model.metadata.value_type(decode(name)) == kind
            assert model.metadata.element_type(decode(name)) == element
            assert same(model.metadata[decode(name)], kind, element, value)
        weights = model.load()
        assert list(weights) == [decode(name) for name in tensors]
        for name, (dims, content) in tensors.items():
            array_ = weights[decode(name)].numpy()
            assert array_.shape == tuple(reversed(dims))
            assert array_.tobytes() == content


WILD = [0, 1, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@settings(max_examples=500, deadline=None, suppress_health_check=[fixture])
@given(files(), st.data())
def test_any_change_is_an_error_or_another_file(
    tmp_path: Path,
    file: tuple[bytes, dict[bytes, Value], dict[bytes, tuple[list[int], bytes]]],
    draw: st.DataObject,
) -> None:
    """No crash, no other exception, and what opens can be loaded from inside the file."""
    data = bytearray(file[0])
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data) - 1))
        value = struct.pack("<Q", draw.draw(st.sampled_from(WILD) | st.integers(0, (1 << 64) - 1)))
        n = draw.draw(st.sampled_from([1, 4, 8]))
        data[at : at + n] = value[: min(n, len(data) - at)]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        model = loader.open(path, access=("direct", "buffered"))
    except FormatError as error:
        assert str(path) in str(error)
        return
    with model:
        for name in model.metadata:
            assert model.metadata[name] is not None
        known = model.load(names=lambda info: info.nbytes is not None)
        for tensor in known.values():
            start, nbytes = tensor.info.offset, tensor.info.nbytes
            assert nbytes is not None
            assert tensor.numpy().tobytes() == data[start : start + nbytes]


@settings(max_examples=50, deadline=None, suppress_health_check=[fixture])
@given(files(), st.data())
def test_a_cut_file_is_refused_or_has_lost_nothing(
    tmp_path: Path,
    file: tuple[bytes, dict[bytes, Value], dict[bytes, tuple[list[int], bytes]]],
    draw: st.DataObject,
) -> None:
    data, _, tensors = file
    cut = draw.draw(st.integers(0, len(data)))
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:cut])
    try:
        weights = loader.load(path, access="buffered")
    except FormatError:
        return
    found = {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
    assert found == {decode(name): content for name, (_, content) in tensors.items()}


def test_claims_cost_no_memory(tmp_path: Path) -> None:
    """Counts in a small file that would need terabytes: an error with the peak unmoved."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    huge = struct.pack("<IQ", build.STRING, 1 << 40)
    for data in (
        fixed(3, 1 << 40, 0),
        fixed(3, 0, 1 << 40),
        fixed(3, 0, 1) + key("k", build.ARRAY, huge),
        fixed(3, 0, 1) + key("k", build.STRING, struct.pack("<Q", 1 << 40)),
    ):
        path = build.write(tmp_path / "m.gguf", data + bytes(1000))
        with pytest.raises(FormatError):
            loader.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20 << 10
