"""gguf.GGUFReader's face over our core, held against the original."""

from __future__ import annotations

import copy
import importlib
import operator
import pickle
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

import loader
from loader.compat.gguf_reader import GGUFReader
from tests import build
from tests.build import fixed, info, key, pad, scalar
from tests.conftest import CORPUS, mappings

_T = GGMLQuantizationType
DTYPES = {_T.F64: np.float64, _T.I8: np.int8, _T.I16: np.int16, _T.I32: np.int32, _T.I64: np.int64}


def every_type(path: Path) -> Path:
    """Every type of value, arrays of each, and tensors of many types, by gguf-py's writer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values: dict[GGUFValueType, Any] = {
        GGUFValueType.UINT8: 200, GGUFValueType.INT8: -100, GGUFValueType.UINT16: 60000,
        GGUFValueType.INT16: -30000, GGUFValueType.UINT32: 1 << 31, GGUFValueType.INT32: -1 << 31,
        GGUFValueType.FLOAT32: 0.1, GGUFValueType.UINT64: 1 << 63, GGUFValueType.INT64: -1 << 63,
        GGUFValueType.FLOAT64: 1e300, GGUFValueType.BOOL: True, GGUFValueType.STRING: "größe",
    }  # fmt: skip
    for kind, value in values.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"array.{kind.name}", [value] * 3, GGUFValueType.ARRAY, sub_type=kind)
    writer.add_string("text.empty", "")
    writer.add_array("array.texts", ["", "a", "bc", "日本"])
    writer.add_array("long.texts", [f"text {i}" for i in range(500)])
    writer.add_array("long.numbers", list(range(500)))
    random = np.random.default_rng(0)
    for blocks in (_T.Q4_0, _T.Q8_0, _T.Q6_K, _T.BF16, _T.IQ4_NL):
        elements, nbytes = gguf.GGML_QUANT_SIZES[blocks]
        raw = random.integers(0, 256, (3, 2 * 256 // elements * nbytes), np.uint8)
        writer.add_tensor(f"{blocks.name}.weight", raw, raw_dtype=blocks)
    writer.add_tensor("f32", random.random((2, 3, 4), np.float32))
    writer.add_tensor("f16", random.random((5, 7), np.float32).astype(np.float16))
    for plain, dtype in DTYPES.items():
        writer.add_tensor(plain.name, np.arange(6).astype(dtype).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_array(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> bool:
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.tobytes() == theirs.tobytes()
    )


def assert_same_field(ours: gguf.ReaderField, theirs: gguf.ReaderField) -> None:
    assert isinstance(ours, gguf.ReaderField)
    assert (ours.offset, ours.name, ours.types) == (theirs.offset, theirs.name, theirs.types)
    assert list(ours.data) == theirs.data
    assert ours.data == theirs.data
    assert len(ours.parts) == len(theirs.parts)
    for one, other in zip(ours.parts, theirs.parts, strict=True):
        assert same_array(one, other), ours.name
    found, expected = ours.contents(), theirs.contents()
    assert found == expected or repr(found) == repr(expected)  # there are NaNs
    assert type(found) is type(expected)
    if theirs.types[:1] == [GGUFValueType.ARRAY] and theirs.data:
        for index in (0, -1, slice(6), slice(None, None, -7), slice(5, 2)):
            assert repr(ours.contents(index)) == repr(theirs.contents(index))
        assert ours.data[-1] == theirs.data[-1]
        assert list(ours.data[2:4]) == theirs.data[2:4]
        assert same_array(ours.parts[ours.data[-1]], theirs.parts[theirs.data[-1]])


def assert_same(path: Path) -> None:
    ours, theirs = GGUFReader(path), gguf.GGUFReader(path)
    for name in ("alignment", "data_offset", "endianess", "byte_order"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert_same_field(ours.fields[name], field)
        assert ours.get_field(name) is ours.fields[name]
    assert ours.get_field("no such key") is None
    assert len(ours.tensors) == len(theirs.tensors)
    for index, other in enumerate(theirs.tensors):
        one = ours.get_tensor(index)
        for name in ("name", "tensor_type", "n_elements", "n_bytes", "data_offset"):
            assert getattr(one, name) == getattr(other, name), (other.name, name)
        assert same_array(one.shape, other.shape)
        assert same_array(one.data, other.data), other.name
        assert_same_field(one.field, other.field)


def test_every_type_of_value_and_many_of_tensors(tmp_path: Path) -> None:
    assert_same(every_type(tmp_path / "m.gguf"))


def test_what_gguf_py_does_not_write(tmp_path: Path) -> None:
    """Empty arrays, a scalar, empty tensors, version 2, no keys at all."""
    keys = [
        key("empty.numbers", build.ARRAY, build.array(build.F32, [])),
        key("empty.texts", build.ARRAY, build.array(build.STRING, [])),
        key("a", build.U8, scalar(build.U8, 1)),
    ]
    infos = info("scalar", [], 0, 0) + info("none", [0, 3], 0, 32) + info("t", [8], 0, 32)
    for version in (2, 3):
        header = pad(fixed(version, 3, len(keys)) + b"".join(keys) + infos)
        assert_same(build.write(tmp_path / "m.gguf", header + bytes(range(64))))
    assert_same(build.write(tmp_path / "m.gguf", build.T1))


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.glob("*.gguf")) or [""])
def test_the_corpus(name: str) -> None:
    if not name:
        pytest.skip("the corpus of real vocabularies isn't there")
    assert_same(CORPUS / name)


def test_the_real_model(gemma: Path) -> None:
    """Among it arrays of 262144 texts and numbers."""
    assert_same(gemma)


def output_of(
    script: str, reader: type[gguf.GGUFReader], words: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:  # fmt: skip
    """What a script of the gguf package prints when it has that reader."""
    module = importlib.import_module(f"gguf.scripts.{script}")
    monkeypatch.setattr(module, "GGUFReader", reader, raising=False)
    monkeypatch.setattr(gguf, "GGUFReader", reader)
    monkeypatch.setattr(sys, "argv", [script, *words])
    capsys.readouterr()
    module.main()
    return capsys.readouterr().out


SCRIPTS = [
    ("gguf_dump", []), ("gguf_dump", ["--json", "--json-array"]), ("gguf_dump", ["--markdown"]),
    ("gguf_dump", ["--no-tensors"]), ("gguf_dump", ["--data-offset"]),
    ("gguf_dump", ["--data-alignment"]), ("gguf_hash", []), ("gguf_hash", ["--no-layer"]),
    ("gguf_dump", ["--json"]),
]  # fmt: skip


@pytest.mark.parametrize(("script", "words"), SCRIPTS)
def test_scripts_of_gguf_py(
    script: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("tqdm", reason="the scripts of the gguf package need tqdm")
    original = gguf.GGUFReader
    opened: list[str] = []

    class Counted(GGUFReader):
        def __init__(self, path: Any, mode: Any = "r") -> None:
            opened.append(str(path))
            super().__init__(path, mode)

    paths = [every_type(tmp_path / "m.gguf")]
    if script == "gguf_dump" and CORPUS.is_dir():
        paths.append(CORPUS / "ggml-vocab-phi-3.gguf")
    for path in paths:
        arguments = [str(path), *words]
        expected = output_of(script, original, arguments, monkeypatch, capsys)
        found = output_of(script, Counted, arguments, monkeypatch, capsys)
        assert found == expected
        assert len(found) > 1
    assert opened == [str(path) for path in paths]


def test_gguf_new_metadata_copies_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads everything and writes it again."""
    pytest.importorskip("tqdm", reason="the scripts of the gguf package need tqdm")
    path = every_type(tmp_path / "m.gguf")
    written = []
    for reader in (gguf.GGUFReader, GGUFReader):
        target = tmp_path / f"{reader.__module__}.gguf"
        words = [str(path), str(target), "--general-name", "another", "--force"]
        output_of("gguf_new_metadata", reader, words, monkeypatch, capsys)
        written.append(target.read_bytes())
    assert written[0] == written[1]


def test_arrays_are_made_when_they_are_touched(tmp_path: Path) -> None:
    path = every_type(tmp_path / "m.gguf")
    reader = GGUFReader(path)
    assert "fields" not in vars(reader)
    assert "tensors" not in vars(reader)
    assert isinstance(reader.fields["array.texts"].parts, list), "of a few, it's no trouble"
    field = reader.fields["long.texts"]
    assert not isinstance(field.parts, list)
    assert field.data[1:4] == [8, 10, 12]
    texts = [f"text {i}" for i in range(500)]
    assert [str(bytes(field.parts[i]), "utf-8") for i in field.data] == texts
    assert field.parts[-1].tobytes().decode() == "text 499"
    with pytest.raises(IndexError):
        field.parts[len(field.parts)]
    with pytest.raises(TypeError):
        hash(field.parts)
    # What lists do, and lazy ones can, too.
    assert operator.add(field.data, [1]) == [*field.data, 1]
    assert operator.add([1], field.data) == [1, *field.data]
    assert isinstance(field.data.copy(), list)
    assert "1005 elements" in repr(field.parts)


@pytest.mark.parametrize("name", ["long.texts", "long.numbers", "array.texts", "one.UINT8"])
def test_fields_are_copied_and_pickled_alone(tmp_path: Path, name: str) -> None:
    """And not with the whole file that they are views of."""
    data = every_type(tmp_path / "m.gguf").read_bytes()
    path = build.write(tmp_path / "m.gguf", data)
    field = GGUFReader(path).fields[name]
    stored = pickle.dumps(field)
    assert len(stored) < 200_000
    for other in (pickle.loads(stored), copy.deepcopy(field)):  # noqa: S301 - our own
        assert other.contents() == field.contents()
        assert list(other.data) == list(field.data)
        assert len(other.parts) == len(field.parts)
        assert all(map(same_array, other.parts, field.parts))


def test_other_modes_and_wrong_files(tmp_path: Path) -> None:
    path = build.write(tmp_path / "m.gguf", build.T1)
    for mode in ("r+", "c", "w"):
        with pytest.raises(ValueError, match=r"gguf\.GGUFReader opens them for writing"):
            GGUFReader(path, mode)  # type: ignore[arg-type]  # that is what is tried
    with pytest.raises(loader.FormatError):
        GGUFReader(build.write(tmp_path / "x", b"nothing of the kind"))
    with pytest.raises(loader.TruncatedFileError):
        GGUFReader(build.write(tmp_path / "x", build.T1[:-8]))
    with pytest.raises(FileNotFoundError):
        GGUFReader(tmp_path / "none")
    unknown = pad(fixed(3, 1, 0) + info("odd", [8], 99, 0)) + bytes(64)
    reader = GGUFReader(build.write(tmp_path / "x", unknown))
    assert reader.fields["GGUF.tensor_count"].contents() == 1
    with pytest.raises(loader.UnsupportedFormatError, match=r"'odd' is of type 99"):
        _ = reader.tensors
    double = key("GGUF.version", build.U32, scalar(build.U32, 9))
    reader = GGUFReader(build.write(tmp_path / "x", pad(fixed(3, 0, 1) + double)))
    with pytest.raises(loader.FormatError, match="every file has"):
        _ = reader.fields
    not_text = pad(fixed(3, 0, 1) + key(b"k", build.STRING, build.text(b"\xff\xfe")))
    reader = GGUFReader(build.write(tmp_path / "x", not_text))
    assert reader.fields["k"].contents() == "\udcff\udcfe"


def test_types_that_gguf_py_lacks(tmp_path: Path) -> None:
    """A type that only ggml knows is its number, and has its bytes."""
    q1 = pad(fixed(3, 1, 0) + info("q1", [128, 2], 41, 0)) + bytes(range(64))
    (tensor,) = GGUFReader(build.write(tmp_path / "m.gguf", q1)).tensors
    assert int(tensor.tensor_type) == 41
    assert (tensor.n_bytes, tensor.data.shape) == (36, (2, 18))
    assert tensor.data.tobytes() == bytes(range(36))


def test_data_lives_as_long_as_it_is_held(tmp_path: Path) -> None:
    path = build.write(tmp_path / "m.gguf", build.T1)
    data = GGUFReader(path).tensors[0].data
    path.unlink()
    assert data.tobytes() == build.T1_DATA
    assert not data.flags.writeable
    assert mappings(path) == 1
    del data
    assert mappings(path) == 0


def test_one_shard_is_read_alone(tmp_path: Path) -> None:
    files = build.split_model(tmp_path, build.random_tensors(3))
    for path in files:
        assert_same(path)
