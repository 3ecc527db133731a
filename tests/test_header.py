"""Files that broke other loaders (the rows that the names give), and files that must work."""

from __future__ import annotations

import errno
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

import loader
from loader.errors import (
    FormatError,
    TensorLayoutError,
    TruncatedFileError,
    UnsupportedFormatError,
)
from loader.gguf.header import FIRST_READ
from tests import build
from tests.build import T1, T1_DATA, array, fixed, info, key, model, pad, scalar, text, write
from tests.conftest import CORPUS, Faults


def load(path: Path, data: bytes) -> dict[str, bytes]:
    """The bytes of every tensor of a file with this content, the same in every mode."""
    write(path, data)
    found = [
        {name: t.numpy().tobytes() for name, t in loader.load(path, access=access).items()}
        for access in (("direct", "buffered"), "mmap", "buffered")
    ]
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def refuse(path: Path, data: bytes, kind: type[FormatError], match: str) -> FormatError:
    write(path, data)
    with pytest.raises(kind, match=match) as caught:
        loader.open(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    return caught.value


# --- Versions, byte order, other files ---


def test_row_1_version_1_is_refused_by_name(path: Path) -> None:
    data = b"GGUF" + struct.pack("<III", 1, 0, 0)
    error = refuse(path, data, UnsupportedFormatError, r"v1.*llama\.cpp")
    assert (error.offset, error.field) == (4, "version")


def test_row_2_version_2_is_read_as_version_3(path: Path) -> None:
    assert load(path, T1[:4] + struct.pack("<I", 2) + T1[8:]) == load(path, T1) == {"t": T1_DATA}


@pytest.mark.parametrize("version", [0, 4, 0xFFFF0003])
def test_row_4_other_versions(path: Path, version: int) -> None:
    hint = "byte order" if version > 0xFFFF else f"version {version};"
    refuse(path, fixed(version, 0, 0), UnsupportedFormatError, hint)


def test_row_5_big_endian(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "test", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("t", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    with pytest.raises(UnsupportedFormatError, match="byte order"):
        loader.open(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_row_7_reversed_magic(path: Path) -> None:
    refuse(path, b"FUGG" + T1[4:], UnsupportedFormatError, "byte order")


@pytest.mark.parametrize(
    ("beginning", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "Git LFS pointer"),
        (b"vers", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"<!DO", "HTML page"),
        (b"<html>", "HTML page"),
        (b"tjgg" + bytes(100), "GGJT"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"PK", "zip archive"),
        (b"\x1f\x8b\x08", "gzip"),
        (struct.pack("<Q", 100) + b'{"t": {"dtype"', "safetensors"),
        (b"ELF?", "no GGUF file"),
        (bytes(100), "no GGUF file"),
    ],
)
def test_row_53_files_of_another_kind(path: Path, beginning: bytes, what: str) -> None:
    assert refuse(path, beginning, FormatError, what).offset == 0


@pytest.mark.parametrize("data", [b"", b"G", b"GGU", b"GGUF", b"GGUF\3", T1[:23]])
def test_row_54_tiny_files(path: Path, data: bytes) -> None:
    refuse(path, data, TruncatedFileError, "empty|ends after|left")


# --- Alignment ---


@pytest.mark.parametrize("alignment", [1, 8, 16, 64, 4096])
def test_row_8_alignments(path: Path, alignment: int) -> None:
    for length in range(32):
        tensors = {f"t{i}": np.arange(4 * i, 4 * i + 4, dtype=np.int32) for i in range(3)}
        writer = gguf.GGUFWriter(path, "test")
        writer.add_custom_alignment(alignment)
        writer.add_string("filler", "x" * length)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        for access in ("auto", "mmap", "buffered"):
            with loader.load(path, access=access) as weights:
                for name, values in tensors.items():
                    assert np.array_equal(weights[name].numpy(), values)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (build.U32, 0),
        (build.U32, 3),
        (build.U32, 24),
        (build.I32, 32),
        (build.U64, 32),
        (build.STRING, "32"),
        (build.BOOL, 1),
        (build.F32, 32.0),
    ],
)
def test_rows_10_and_11_alignments_that_are_refused(path: Path, kind: int, value: object) -> None:
    data = fixed(3, 0, 1) + key("general.alignment", kind, scalar(kind, value))
    error = refuse(path, data, FormatError, "power of two")
    assert error.field == "general.alignment"
    assert error.offset == 24
    assert str(value) in str(error)


def test_an_alignment_that_is_an_array(path: Path) -> None:
    data = fixed(3, 0, 1) + key("general.alignment", build.ARRAY, array(build.U32, [32]))
    refuse(path, data, FormatError, "power of two")


def test_row_37_a_misaligned_tensor(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [4], 0, 8)) + bytes(64)
    error = refuse(path, data, TensorLayoutError, "'t'.*multiple of the alignment 32")
    assert (error.field, error.offset) == ("t", 24)


# --- Metadata ---


def test_row_15_a_file_without_tensors(path: Path) -> None:
    write(path, fixed(3, 0, 1) + key("a", build.U32, scalar(build.U32, 7)))
    for access in ("auto", "mmap", "buffered"):
        with loader.open(path, access=access) as opened:
            assert dict(opened.metadata) == {"a": 7}
            assert len(opened.tensors) == 0
            weights = opened.load()
            assert len(weights) == 0
            assert weights.report.bytes == 0
            assert weights.report.bytes_per_second is None


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of vocabulary files is not here")
@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.gguf")), ids=lambda path: path.stem)
def test_row_15_vocabulary_files(file: Path) -> None:
    reader = gguf.GGUFReader(file)
    with loader.open(file) as opened:
        fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(opened.metadata) == list(fields)
        for name, field in fields.items():
            value = opened.metadata[name]
            assert opened.metadata.value_type(name) == field.types[0]
            if field.types[0] == GGUFValueType.ARRAY:
                assert opened.metadata.element_type(name) == field.types[-1]
            assert (
                list(value) == field.contents()
                if len(field.types) > 1
                else value == (field.contents())
            )
        assert len(opened.load()) == 0


@pytest.mark.parametrize("kind", [kind for kind in range(13) if kind != build.ARRAY])
def test_row_16_an_empty_array_keeps_its_type(path: Path, kind: int) -> None:
    write(path, fixed(3, 0, 1) + key("k", build.ARRAY, array(kind, [])))
    with loader.open(path) as opened:
        value = opened.metadata["k"]
        assert len(value) == 0
        assert opened.metadata.value_type("k") == GGUFValueType.ARRAY
        assert opened.metadata.element_type("k") == kind
        if kind == build.I32:
            assert value.dtype == np.int32


@pytest.mark.parametrize("kind", [build.U8, build.STRING, build.F64])
@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 61, 5])
def test_row_18_an_array_that_cannot_be(path: Path, kind: int, count: int) -> None:
    data = fixed(3, 0, 1) + key("a", build.ARRAY, struct.pack("<IQ", kind, count))
    started = time.monotonic()
    error = refuse(path, data, TruncatedFileError, f"'a'.*claims {count} elements")
    assert time.monotonic() - started < 1
    assert len(data) in (49, 43 + 6)
    assert error.field == "a"


def test_row_19_lengths_that_pass_the_file(path: Path) -> None:
    long = struct.pack("<Q", 0xFFFFFFFFFFFF)
    error = refuse(path, fixed(3, 0, 1) + long + b"abcdef", TruncatedFileError, "0 needs|needs")
    assert error.offset == 32
    value = key("k", build.STRING, long + b"abc")
    error = refuse(path, fixed(3, 0, 1) + value, TruncatedFileError, "'k'.*only 3 are left")
    name = fixed(3, 1, 0) + long + bytes(30)
    refuse(path, name, TruncatedFileError, "tensor number 0")


@pytest.mark.parametrize("n", [1 << 40, (1 << 64) - 1])
def test_counts_that_cannot_be(path: Path, n: int) -> None:
    refuse(path, fixed(3, n, 0) + bytes(100), TruncatedFileError, f"claims {n} tensors")
    refuse(path, fixed(3, 0, n) + bytes(100), TruncatedFileError, f"claims {n} metadata keys")


def test_row_21_an_empty_key(path: Path) -> None:
    data = fixed(3, 0, 1) + key("", build.U8, b"\0") + bytes(8)
    assert refuse(path, data, FormatError, "empty name").offset == 24


def test_row_22_a_key_twice(path: Path) -> None:
    record = key("same", build.U8, b"\1")
    error = refuse(path, fixed(3, 0, 2) + 2 * record, FormatError, "'same' is in the file twice")
    assert (error.field, error.offset) == ("same", 24 + len(record))


def test_row_23_a_tensor_twice(path: Path) -> None:
    data = pad(fixed(3, 2, 0) + info("t", [8], 0, 0) + info("t", [8], 0, 32)) + bytes(64)
    assert refuse(path, data, FormatError, "'t' is in the file twice").field == "t"


def test_row_24_long_names(path: Path) -> None:
    names = ["x" * 63, "x" * 63 + "a", "x" * 63 + "b", "y" * 65, "z" * 200]
    infos = b"".join(info(name, [8], 0, 32 * i) for i, name in enumerate(names))
    data = pad(fixed(3, len(names), 0) + infos) + bytes(range(32 * len(names)))
    found = load(path, data)
    assert list(found) == names
    for i, name in enumerate(names):
        assert found[name] == bytes(range(32 * i, 32 * i + 32))


def test_row_26_bytes_that_are_not_utf_8(path: Path) -> None:
    tokens = key("tokens", build.ARRAY, array(build.STRING, [b"\x80", b"ok", b"\xff\xfe"]))
    value = key(b"k\xff", build.STRING, text(b"v\xfe"))
    data = pad(fixed(3, 1, 2) + tokens + value + info(b"t\xff", [8], 0, 0)) + T1_DATA
    found = load(path, data)
    assert [name.encode("utf-8", "surrogateescape") for name in found] == [b"t\xff"]
    with loader.open(path) as opened:
        got = [token.encode("utf-8", "surrogateescape") for token in opened.metadata["tokens"]]
        assert got == [b"\x80", b"ok", b"\xff\xfe"]
        assert opened.metadata["k\udcff"] == "v\udcfe"


def test_row_28_the_stored_type_is_kept(path: Path) -> None:
    counts = key("head_count", build.ARRAY, array(build.I32, [1, 2]))
    write(path, fixed(3, 0, 2) + counts + key("token_type", build.U64, scalar(build.U64, 5)))
    with loader.open(path) as opened:
        values = opened.metadata
        assert values["head_count"].dtype == np.int32
        assert values["head_count"].tolist() == [1, 2]
        assert not values["head_count"].flags.writeable
        assert values.value_type("token_type") == GGUFValueType.UINT64
        assert values.get_typed("token_type", GGUFValueType.UINT64) == 5
        assert values.get_typed("token_type", int) == 5
        with pytest.raises(FormatError, match="should be UINT32, but is UINT64") as caught:
            values.get_typed("token_type", GGUFValueType.UINT32)
        assert caught.value.field == "token_type"
        with pytest.raises(FormatError, match="should be int, but is ARRAY of INT32"):
            values.get_typed("head_count", int)


VALUES = {
    build.U8: 200, build.I8: -100, build.U16: 60000, build.I16: -30000, build.U32: 1 << 31,
    build.I32: -(1 << 31), build.F32: 1.5, build.BOOL: 2, build.STRING: "text",
    build.U64: 1 << 63, build.I64: -(1 << 63), build.F64: 1e300,
}  # fmt: skip


def test_row_30_a_key_of_each_type_before_a_tensor(path: Path) -> None:
    keys = b"".join(key(f"k{kind}", kind, scalar(kind, v)) for kind, v in VALUES.items())
    keys += key("k9", build.ARRAY, array(build.BOOL, [0, 1, 2, 255]))
    data = pad(fixed(3, 1, 13) + keys + info("t", [8], 0, 0)) + T1_DATA
    assert load(path, data) == {"t": T1_DATA}
    with loader.open(path) as opened:
        for kind, value in VALUES.items():
            found = opened.metadata[f"k{kind}"]
            assert found == (True if kind == build.BOOL else value)
            assert type(found) is (bool if kind == build.BOOL else type(value))
            assert opened.metadata.value_type(f"k{kind}") == kind
        assert opened.metadata["k9"].tolist() == [False, True, True, True]
        assert opened.metadata["k9"].dtype == np.bool_


def test_row_50_keys_of_other_tools_are_not_applied(path: Path) -> None:
    shape = key("comfy.gguf.orig_shape.t", build.ARRAY, array(build.I32, [2, 4]))
    write(path, pad(fixed(3, 1, 1) + shape + info("t", [8], 0, 0)) + T1_DATA)
    with loader.open(path) as opened:
        assert opened.metadata["comfy.gguf.orig_shape.t"].tolist() == [2, 4]
        assert opened.tensors["t"].shape == (8,)


def test_row_59_no_architecture(path: Path) -> None:
    assert load(path, T1) == {"t": T1_DATA}


def test_nested_arrays_name_the_key(path: Path) -> None:
    data = fixed(3, 0, 1) + key("outer", build.ARRAY, struct.pack("<IQ", 9, 1) + bytes(12))
    assert refuse(path, data, UnsupportedFormatError, "'outer'.*array of arrays").field == "outer"


@pytest.mark.parametrize("kind", [13, 99, (1 << 32) - 1])
def test_unknown_value_types_name_the_key(path: Path, kind: int) -> None:
    data = fixed(3, 0, 1) + key("k", kind, bytes(8))
    refuse(path, data, UnsupportedFormatError, f"'k'.*value type {kind}")
    data = fixed(3, 0, 1) + key("k", build.ARRAY, struct.pack("<IQ", kind, 1) + bytes(8))
    refuse(path, data, UnsupportedFormatError, f"'k'.*value type {kind}")


# --- Tensors ---


@pytest.mark.parametrize(
    ("kind", "elements", "nbytes"), [(39, 32, 17), (40, 64, 36), (41, 128, 18), (42, 64, 18)]
)
def test_row_31_newer_types(path: Path, kind: int, elements: int, nbytes: int) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [elements, 3], kind, 0)) + bytes(range(3 * nbytes))
    assert load(path, data) == {"t": bytes(range(3 * nbytes))}
    with loader.load(path) as weights:
        assert weights["t"].numpy().shape == (3, nbytes)
        assert weights["t"].info.nbytes == 3 * nbytes
        assert int(weights["t"].info.ggml_type) == kind


@pytest.mark.parametrize("kind", [4, 5, 31, 32, 33, 36, 37, 38, 99, (1 << 32) - 1])
def test_row_32_unknown_and_removed_types(path: Path, kind: int) -> None:
    infos = info("known", [8], 0, 0) + info("odd", [256], kind, 32)
    write(path, pad(fixed(3, 2, 0) + infos) + T1_DATA + bytes(256))
    with loader.open(path) as opened:
        odd = opened.tensors["odd"]
        assert odd.nbytes is None
        assert odd.ggml_type == kind
        assert odd.shape == (256,)
        for names in (None, ["odd"], lambda _: True):
            with pytest.raises(UnsupportedFormatError, match="'odd'") as caught:
                opened.load(names=names)
            assert "names=" in str(caught.value)
            assert f"type {kind}" in str(caught.value)
            assert ("removed" in str(caught.value)) == (kind < 99)
        assert opened.load(names=["known"])["known"].numpy().tobytes() == T1_DATA


def test_row_35_overlapping_tensors(path: Path) -> None:
    infos = info("a", [64], 0, 0) + info("b", [8], 0, 128)
    data = pad(fixed(3, 2, 0) + infos) + bytes(256)
    error = refuse(path, data, TensorLayoutError, "'a' and 'b' overlap")
    assert error.field == "b"


def test_an_overlap_across_a_third_tensor(path: Path) -> None:
    infos = info("big", [64], 0, 0) + info("in", [8], 0, 32) + info("in2", [8], 0, 96)
    refuse(path, pad(fixed(3, 3, 0) + infos) + bytes(256), TensorLayoutError, "'big' and 'in' ")


def test_gaps_and_any_order_are_fine(path: Path) -> None:
    infos = info("b", [8], 0, 96) + info("a", [8], 0, 0)
    data = pad(fixed(3, 2, 0) + infos) + bytes(range(128)) + b"bytes after the last tensor"
    assert load(path, data) == {"b": bytes(range(96, 128)), "a": bytes(range(32))}
    with loader.open(path) as opened:
        assert list(opened.tensors) == list(opened.load()) == ["b", "a"]


def test_row_38_one_byte_is_missing(path: Path) -> None:
    error = refuse(path, T1[:-1], TruncatedFileError, "32 bytes.*only 31")
    assert (error.field, error.offset) == ("t", 64 + 32 - 32)
    data = pad(fixed(3, 1, 0) + info("t", [1 << 20], 0, 0))
    data += bytes(200 - len(data))
    refuse(path, data, TruncatedFileError, f"'t' should have {4 << 20} bytes")


@pytest.mark.parametrize(
    "dims",
    [
        [1 << 32, 1 << 32],
        [1 << 62, 4],
        [(1 << 63) - 1, 1],
        [1 << 63],
        [(1 << 64) - 1, (1 << 64) - 1],
        [4194305, 4194305, 211106198978564],
        [0, 1 << 63],
        [1 << 61, 0, 1 << 61],
    ],
)
def test_rows_39_and_42_sizes_that_wrap(path: Path, dims: list[int]) -> None:
    data = pad(fixed(3, 1, 0) + info("t", dims, 0, 0)) + bytes(64)
    error = refuse(path, data, TensorLayoutError, r"'t'.*2\^63")
    assert error.field == "t"


def test_row_42_a_million_dimensions(path: Path) -> None:
    data = fixed(3, 1, 0) + text("t") + struct.pack("<I", 10**6) + bytes(100)
    refuse(path, data, TensorLayoutError, "'t'.*1000000 dimensions; at most 8")


def test_an_offset_that_wraps(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [8], 0, (1 << 64) - 32)) + T1_DATA
    refuse(path, data, TruncatedFileError, "'t' should have 32 bytes")


def test_row_43_five_dimensions(path: Path) -> None:
    load(path, pad(fixed(3, 1, 0) + info("t", [2, 2, 2, 2, 2], 0, 0)) + bytes(range(128)))
    with loader.load(path) as weights:
        assert weights["t"].numpy().shape == (2, 2, 2, 2, 2)


def test_zero_and_eight_dimensions(path: Path) -> None:
    infos = info("scalar", [], 0, 0) + info("eight", [1, 2, 1, 2, 1, 2, 1, 1], 0, 32)
    load(path, pad(fixed(3, 2, 0) + infos) + struct.pack("<f28x8f", 2.5, *range(8)))
    with loader.load(path) as weights:
        assert weights["scalar"].numpy().shape == ()
        assert weights["scalar"].numpy() == 2.5
        assert weights["scalar"].dequantize() == 2.5
        assert weights["eight"].numpy().shape == (1, 1, 2, 1, 2, 1, 2, 1)


def test_row_45_an_empty_tensor(path: Path, faults: Faults) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [1, 0], 0, 0))
    assert len(data) == 96
    assert load(path, data) == {"t": b""}
    for access in ("auto", "mmap", "buffered"):
        with loader.open(path, access=access) as opened:
            for call in ("pread", "pread_direct", "mmap"):
                faults.fail(call, errno.EIO)
            weights = opened.load()
            faults.clear()
            assert weights["t"].numpy().shape == (0, 1)
            assert weights["t"].numpy().dtype == np.float32
            assert weights["t"].dequantize().shape == (0, 1)
    assert load(path, data[:-20]) == {"t": b""}, "nothing has to be where nothing is"


def test_an_empty_tensor_behind_a_last_one_without_padding(path: Path) -> None:
    infos = info("t", [3], 0, 0) + info("z", [0], 0, 32)
    assert load(path, pad(fixed(3, 2, 0) + infos) + b"x" * 12) == {"t": b"x" * 12, "z": b""}


def test_an_empty_tensor_with_the_largest_dimensions(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [0, 1 << 29, 1 << 30], 1, 0))
    assert load(path, data) == {"t": b""}
    assert loader.load(path)["t"].dequantize().shape == (1 << 30, 1 << 29, 0)


def test_records_without_end_cost_little(path: Path) -> None:
    """A sparse file of zeros is full of tensors without a name."""
    path.write_bytes(fixed(3, (1 << 20) + 1, 0))
    os.truncate(path, 1 << 30)
    with pytest.raises(UnsupportedFormatError, match="more than 1048576 are not read here"):
        loader.open(path)


def test_an_empty_tensor_and_one_of_unknown_type_past_the_end(path: Path) -> None:
    for dims, kind in (([0], 0), ([8], 99)):
        data = pad(fixed(3, 1, 0) + info("t", dims, kind, 1 << 33))
        refuse(path, data, TruncatedFileError, "should begin at offset 8589934")


def test_a_long_name_makes_no_long_message(path: Path) -> None:
    name = "x" * 100_000
    error = refuse(path, fixed(3, 0, 1) + key(name, 99, b""), UnsupportedFormatError, "xxx")
    assert len(str(error)) < 1000
    assert error.field == name


def test_row_47_rows_that_are_not_whole_blocks(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [8, 64], 14, 0)) + bytes(4096)
    refuse(path, data, TensorLayoutError, "'t'.*rows of 8 elements.*blocks of 256")


def test_row_48_shapes_are_reversed(path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with loader.load(model(path, {"t": values})) as weights:
        assert weights["t"].info.shape == (2, 3)
        assert np.array_equal(weights["t"].numpy(), values)
    assert struct.pack("<IQQ", 2, 3, 2) in path.read_bytes()


def test_row_49_half_a_tensor(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [64], 8, 0)) + bytes(34)
    refuse(path, data, TruncatedFileError, "68 bytes.*only 34")


def test_row_52_no_padding_after_the_last_tensor(path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [3], 0, 0)) + b"123456789012"
    assert load(path, data) == {"t": b"123456789012"}


def test_row_56_a_large_vocabulary_takes_a_few_reads(tmp_path: Path, faults: Faults) -> None:
    path = model(tmp_path / "m.gguf", {"t": np.zeros(8, np.float32)}, tokens=256 * 1024)
    faults.fail("mlock", errno.EPERM)  # begins the counting
    with loader.open(path) as opened:
        assert faults.count("pread_direct") + faults.count("pread") < 10
        tokens = opened.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == 256 * 1024
        assert tokens[-1] == tokens[256 * 1024 - 1] == "token262143"
        assert tokens[1:3] == ["token1", "token2"]
        with pytest.raises(IndexError):
            tokens[256 * 1024]


def test_row_57_a_tensor_past_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = pad(fixed(3, 2, 0) + info("a", [8], 0, 0) + info("far", [8], 0, 5 << 30))
    with path.open("wb") as out:
        out.write(head + bytes(range(32)))
        out.seek(len(head) + (5 << 30))
        out.write(T1_DATA[::-1])
    for access in ("auto", "mmap", "buffered"):
        weights = loader.load(path, access=access)
        assert weights["far"].numpy().tobytes() == T1_DATA[::-1]
        assert weights["a"].numpy().tobytes() == T1_DATA
        assert weights.report.memory_bytes < 1 << 20, "the gap is not read"


@pytest.mark.parametrize("border", [FIRST_READ, 2 * FIRST_READ])
@pytest.mark.parametrize("shift", [-9, -8, -7, -4, -1, 0, 1, 3])
def test_records_that_cross_the_end_of_a_read(path: Path, border: int, shift: int) -> None:
    """A header is read in pieces; a record that is cut is found in the next one."""
    first = fixed(3, 2, 3)
    filler = border + shift - len(first) - len(key("a", build.STRING, text("")))
    keys = key("a", build.STRING, text("x" * filler)) + key("b", build.U64, bytes(8))
    keys += key("c", build.ARRAY, array(build.STRING, ["one", "two"]))
    data = pad(first + keys + info("t", [8], 0, 0) + info("u", [2, 2], 0, 32))
    assert load(path, data + T1_DATA + T1_DATA[:16]) == {"t": T1_DATA, "u": T1_DATA[:16]}
    with loader.open(path) as opened:
        assert len(opened.metadata["a"]) == filler
        assert list(opened.metadata["c"]) == ["one", "two"]


def test_many_keys_and_tensors(path: Path) -> None:
    n = 3000
    keys = b"".join(key(f"k{i}", build.U32, scalar(build.U32, i)) for i in range(n))
    infos = b"".join(info(f"t{i}", [8], 0, 32 * i) for i in range(n))
    content = os.urandom(32 * n)
    found = load(path, pad(fixed(3, n, n) + keys + infos) + content)
    assert list(found) == [f"t{i}" for i in range(n)]
    assert b"".join(found.values()) == content
    with loader.open(path) as opened:
        assert [opened.metadata[f"k{i}"] for i in range(n)] == list(range(n))
