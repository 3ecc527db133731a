"""Split models: the rows of part A2 by number, and what is of the same kind."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.errors import FormatError, ReadError, ShardError, TruncatedFileError
from loader.gguf.shards import read_split
from loader.options import AccessRequest, PathLike
from tests import build
from tests.build import (
    T1,
    T1_DATA,
    Arrays,
    fixed,
    info,
    key,
    pad,
    random_tensors,
    scalar,
    shard,
    split_model,
    write,
)
from tests.conftest import Faults, descriptors, mappings


def same(weights: loader.Weights, expected: Arrays) -> bool:
    return {n: t.numpy().tobytes() for n, t in weights.items()} == {
        n: v.tobytes() for n, v in expected.items()
    }


# --- Part A2 ---


def test_row_60_every_missing_file_is_listed_before_any_read(
    tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    files = split_model(tmp_path, random_tensors(5))
    files[1].unlink()
    files[3].unlink()
    for given in (files[0], files[4]):
        with pytest.raises(ShardError) as caught:
            loader.open(given)
        for missing in (files[1], files[3]):
            assert f"{missing} is missing" in str(caught.value)
        assert str(files[2]) not in str(caught.value)
        assert caught.value.path == str(given)
        nothing_left()


@pytest.mark.parametrize("access", ["auto", "direct", "mmap", "buffered"])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_row_61_any_shard_gives_the_whole_set(
    direct_folder: Path, access: AccessRequest, given: int
) -> None:
    expected = random_tensors()
    files = split_model(direct_folder, expected)
    with loader.open(files[given], access=access) as model:
        assert model.path == str(files[given])
        assert [file.path for file in model.files] == list(map(str, files))
        assert [tensor.file for tensor in model.tensors.values()] == [0, 1, 2]
        assert model.metadata["general.architecture"] == "test"
        weights = model.load(check_tensors=True)
        assert list(weights) == list(expected)
        assert same(weights, expected)
        assert {n: t.numpy().tobytes() for n, t in model.stream()} == {
            n: v.tobytes() for n, v in expected.items()
        }
        assert model.read_rows("t2", 5, 9).numpy().tobytes() == expected["t2"][5:9].tobytes()
        assert same(model.load(into=model.empty()), expected)
    assert weights.report.model == str(files[given])
    assert len(weights.report.files) == 3


def test_row_63_shards_joined_with_cat(tmp_path: Path) -> None:
    for first in (False, True):
        folder = tmp_path / str(first)
        folder.mkdir()
        files = split_model(folder, random_tensors(), small_first_shard=first)
        joined = write(folder / "joined.gguf", b"".join(file.read_bytes() for file in files))
        with pytest.raises(ShardError, match=r"joined as bytes.*gguf-split --merge") as caught:
            loader.open(joined)
        assert caught.value.offset == files[0].stat().st_size
        shutil.copy(joined, files[0])
        with pytest.raises(ShardError, match=r"00001.*joined as bytes.*gguf-split --merge"):
            loader.open(files[1])


@pytest.mark.parametrize(
    "ending",
    [".part1of2", ".gguf.part2of2", ".gguf.part-00", ".gguf-part-a", ".gguf-split-b",
     ".gguf.001", ".gguf.aa", ".PART1OF2"],
)  # fmt: skip
def test_row_64_raw_byte_parts(tmp_path: Path, ending: str) -> None:
    for data in (T1[:-1], T1[20:], b""):
        path = write(tmp_path / f"m{ending}", data)
        with pytest.raises(ShardError, match="byte part of a larger file; join"):
            loader.open(path)
    assert loader.load(write(tmp_path / f"m{ending}", T1))["t"].numpy().tobytes() == T1_DATA


def test_row_65_an_empty_shard_is_named(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    files[1].write_bytes(b"")
    for given in (str(files[0]), [*files]):
        with pytest.raises(ShardError, match=r"m-00002-of-00003.gguf: the file is empty"):
            loader.open(given)


def test_row_67_shards_of_another_count_are_refused(tmp_path: Path) -> None:
    for number, count in enumerate((3, 4, 3)):
        data = shard(number, count, tensors=(f"t{number}",))
        write(tmp_path / f"m-{number + 1:05}-of-00003.gguf", data)
    with pytest.raises(ShardError, match=r"00002-of-00003.gguf is of a set of 4 files") as caught:
        loader.open(tmp_path / "m-00001-of-00003.gguf")
    assert caught.value.field == "split.count"
    with pytest.raises(ShardError, match=r"00004-of-00003.gguf is missing.*of a set of 3 files"):
        loader.open(tmp_path / "m-00002-of-00003.gguf")


def test_row_69_a_first_shard_without_tensors(tmp_path: Path) -> None:
    expected = random_tensors()
    files = split_model(tmp_path, expected, small_first_shard=True)
    assert len(files) == 4
    for given in files:
        with loader.open(given) as model:
            assert [tensor.file for tensor in model.tensors.values()] == [1, 2, 3]
            assert same(model.load(), expected)


def test_row_71_links_of_a_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    expected = random_tensors()
    links = []
    for number, file in enumerate(split_model(tmp_path, expected)):
        file.rename(blobs / f"{number:x}abc")
        links.append(snapshot / file.name)
        links[-1].symlink_to(Path("../../blobs") / f"{number:x}abc")
    for given in links:
        weights = loader.load(given)
        assert same(weights, expected)
        assert [file.path for file in weights.report.files] == list(map(str, links))


def test_row_73_metadata_wins_over_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "x-00001-of-00013.gguf", T1)
    assert loader.load(path)["t"].numpy().tobytes() == T1_DATA
    # Shards under each other's names, and a total in the names that isn't true.
    for name, number in (("00001", 2), ("00002", 0), ("00003", 1)):
        data = shard(number, 3, total=3, tensors=(f"t{number}",))
        write(tmp_path / f"y-{name}-of-00007.gguf", data)
    weights = loader.load(tmp_path / "y-00001-of-00007.gguf")
    assert {n: int(t.numpy().view(np.uint8)[0]) for n, t in weights.items()} == {
        "t0": 1, "t1": 2, "t2": 3,
    }  # fmt: skip
    assert list(weights) == ["t0", "t1", "t2"]


def test_row_76_a_projector_in_two_shards(tmp_path: Path) -> None:
    expected = {f"v.blk.{i}.attn_q.weight": np.full(64, i, np.float32) for i in range(2)}
    files = split_model(tmp_path, expected, arch="clip", name="mmproj")
    with loader.open(files[1]) as model:
        assert model.metadata["general.architecture"] == "clip"
        assert same(model.load(), expected)


# --- Of the same kind ---


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    name = "m-{:05}-of-00007.gguf"
    write(tmp_path / name.format(1), shard(0, 7, total=7))
    write(tmp_path / name.format(2), b"")
    write(tmp_path / name.format(4), shard(0, 7, total=7))
    write(tmp_path / name.format(5), T1)
    write(tmp_path / name.format(6), shard(5, 7, total=9))
    (tmp_path / name.format(7)).mkdir()
    with pytest.raises(ShardError) as caught:
        loader.open(tmp_path / name.format(1))
    message = str(caught.value)
    for part in (
        "00002-of-00007.gguf: the file is empty",
        "00003-of-00007.gguf is missing",
        "00004-of-00007.gguf is shard 1 of 7 (split.no), as ",
        "00005-of-00007.gguf is no shard",
        "00006-of-00007.gguf is of a set of 9 tensors",
        "00007-of-00007.gguf: Is a directory",
    ):
        assert part in message
    assert "\n" not in message


def test_a_damaged_shard_keeps_its_own_error(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-100])
    with pytest.raises(TruncatedFileError, match=r"00002-of-00003.*tensor 't1'"):
        loader.open(files[0])
    files[1].write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(loader.UnsupportedFormatError, match=r"00002-of-00003.*HTML"):
        loader.open(files[0])
    files[2].unlink()
    with pytest.raises(ShardError, match=r"00002-of-00003.*HTML.*00003-of-00003.gguf is missing"):
        loader.open(files[0])


def test_a_shard_that_cannot_be_read(tmp_path: Path, faults: Faults) -> None:
    files = split_model(tmp_path, random_tensors())
    with loader.open(files[0], access="buffered"):
        pass
    faults.fail("open", errno.EMFILE, nth=3)  # of both others
    with pytest.raises(ReadError, match="EMFILE") as caught:
        loader.open(files[0])
    assert caught.value.errno == errno.EMFILE


def test_tensors_that_do_not_add_up(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    write(first, shard(0, 2, total=3, tensors=("a",)))
    write(second, shard(1, 2, total=3, tensors=("b",)))
    with pytest.raises(ShardError, match=r"2 tensors together, but split.tensors.count is 3"):
        loader.open(first)
    write(first, shard(0, 2, tensors=("a",)))
    write(second, shard(1, 2, tensors=("c", "a")))
    with pytest.raises(ShardError, match=r"tensor 'a' is in .*00001-of-00002.gguf too"):
        loader.open(first)
    write(second, shard(1, 2, tensors=("c", "b")))
    assert list(loader.load(first)) == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (build.U32, 70_000, ShardError), (build.I32, -1, ShardError),
        (build.U64, (1 << 64) - 1, ShardError), (build.STRING, "3", FormatError),
        (build.F32, 3.0, FormatError), (build.BOOL, 1, FormatError),
    ],
)  # fmt: skip
def test_counts_that_cannot_be(
    tmp_path: Path, kind: int, value: object, error: type[FormatError]
) -> None:
    data = pad(
        fixed(3, 1, 1) + key("split.count", kind, scalar(kind, value)) + info("t", [8], 0, 0)
    )
    with pytest.raises(error, match=r"split\.count") as caught:
        loader.open(write(tmp_path / "m-00001-of-00003.gguf", data + T1_DATA))
    assert caught.value.field == "split.count"


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00002.gguf", shard(2, 2))
    with pytest.raises(ShardError, match=r"split.no is 2; it can be from 0 to 1"):
        loader.open(path)
    keys = key("split.count", build.I64, scalar(build.I64, 2))
    write(path, pad(fixed(3, 1, 1) + keys + info("t", [8], 0, 0)) + T1_DATA)
    with pytest.raises(ShardError, match=r"split.no is missing"):
        loader.open(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_set_of_one_is_a_model(tmp_path: Path, count: int) -> None:
    keys = key("split.count", build.U16, scalar(build.U16, count))
    data = pad(fixed(3, 1, 1) + keys + info("t", [8], 0, 0)) + T1_DATA
    with loader.open(write(tmp_path / "m.gguf", data)) as model:
        assert model.load()["t"].numpy().tobytes() == T1_DATA
        assert read_split("", model.metadata) is None


def test_a_name_that_does_not_lead_to_the_others(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    link = tmp_path / "model.gguf"
    link.symlink_to(files[0])
    with pytest.raises(ShardError, match=f"one of 3 files.*it is a link, open {files[0]} itself"):
        loader.open(link)
    link.unlink()
    files[0].rename(link)
    with pytest.raises(ShardError, match=r"one of 3 files.*-00001-of-00003.*give a list"):
        loader.open(link)
    files[1].rename(link)
    with pytest.raises(ShardError, match=r"should end in -00002-of-00003\.gguf"):
        loader.open(link)


def test_a_list_of_paths_works_for_any_names_in_any_order(tmp_path: Path) -> None:
    expected = random_tensors()
    files = split_model(tmp_path, expected)
    odd = [file.rename(tmp_path / name) for file, name in zip(files, "cab", strict=True)]
    lists: list[Sequence[PathLike]] = [[odd[2], str(odd[0]), os.fsencode(odd[1])], tuple(odd)]
    for given in lists:
        with loader.open(given) as model:
            assert same(model.load(), expected)
            assert [file.path for file in model.files] == list(map(str, odd))
            assert model.path == os.fsdecode(given[0])


def test_lists_that_are_no_set(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    whole = write(tmp_path / "whole.gguf", T1)
    for given, what in (
        (files[:2], "shard 3 of 3 is missing"),
        (files[:1], "shard 2 of 3 is missing; shard 3 of 3 is missing"),
        ([*files, files[0]], "00001-of-00003.gguf is shard 1 of 3"),
        ([*files, whole], "whole.gguf is no shard"),
        ([whole, *files], "whole.gguf is no shard"),
        ([whole, whole], "whole.gguf is no shard"),
    ):
        with pytest.raises(ShardError, match=what):
            loader.open(given)
    with pytest.raises(FileNotFoundError):
        loader.open([files[0], tmp_path / "nothing", files[2]])
    with pytest.raises(IsADirectoryError):
        loader.open([files[0], tmp_path, files[2]])
    with pytest.raises(ValueError, match="empty"):
        loader.open([])
    with pytest.raises(TypeError):
        loader.open([3])  # type: ignore[list-item]  # that is the test


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
@pytest.mark.parametrize("names", ["short", "a much longer name of a tensor"])
def test_shards_aligned_as_the_first_one_says(tmp_path: Path, alignment: int, names: str) -> None:
    """gguf-py's writer aligns every shard so, but only the first one says it."""
    random = np.random.default_rng(1)
    expected = {f"{names}{i}": random.integers(-128, 128, 100 + 13 * i, np.int8) for i in range(5)}
    files = split_model(tmp_path, expected, alignment=alignment, split_max_tensors=2)
    with loader.open(files[1]) as model:
        assert same(model.load(), expected)


def test_shards_that_are_aligned_by_the_specification(tmp_path: Path) -> None:
    """llama.cpp's gguf-split aligns shards that say nothing to 32, whatever the first one says."""
    keys = key("general.alignment", build.U32, scalar(build.U32, 256))
    split = [
        key("split.no", build.U16, scalar(build.U16, n))
        + key("split.count", build.U16, scalar(build.U16, 2))
        for n in range(2)
    ]
    first = pad(fixed(3, 1, 3) + keys + split[0] + info("a", [8], 0, 0), 256) + T1_DATA
    for extra in (b"", b"x" * 100):
        second = pad(fixed(3, 1, 2) + split[1] + info("b", [8], 0, 0)) + T1_DATA[::-1] + extra
        assert len(second) % 256, "or it would be the same"
        write(tmp_path / "m-00001-of-00002.gguf", pad(first, 256))
        path = write(tmp_path / "m-00002-of-00002.gguf", second)
        weights = loader.load(path)
        assert weights["a"].numpy().tobytes() == T1_DATA
        assert weights["b"].numpy().tobytes() == T1_DATA[::-1]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_an_alignment_that_cannot_be_told_is_no_wrong_tensor(
    tmp_path: Path, alignment: int
) -> None:
    """gguf-py's shards with something missing or added at their ends: right, or refused."""
    expected = {f"t{i}": np.full(100, i + 1, np.int8) for i in range(3)}
    files = split_model(tmp_path, expected, alignment=alignment)
    whole = files[1].read_bytes()
    outcomes = set()
    for data in (
        whole, whole[:-1], whole.rstrip(b"\0"), whole + b"x", whole + bytes(1), whole + bytes(4096),
        whole + files[2].read_bytes(),
    ):  # fmt: skip
        files[1].write_bytes(data)
        try:
            weights = loader.load(files[0])
        except ShardError as error:
            assert error.path == str(files[1]) or "joined as bytes" in str(error)
            outcomes.add("refused")
        else:
            assert same(weights, expected)
            outcomes.add("right")
    assert "right" in outcomes
    assert alignment == 8 or outcomes == {"right", "refused"}


def test_a_last_tensor_of_unknown_type_is_no_wrong_alignment(tmp_path: Path) -> None:
    keys = key("general.alignment", build.U32, scalar(build.U32, 256))
    split = [
        key("split.no", build.U16, scalar(build.U16, n))
        + key("split.count", build.U16, scalar(build.U16, 2))
        for n in range(2)
    ]
    first = pad(pad(fixed(3, 1, 3) + keys + split[0] + info("a", [8], 0, 0), 256) + T1_DATA, 256)
    infos = info("b", [8], 0, 0) + info("unknown", [8], 99, 256)
    second = pad(fixed(3, 2, 2) + split[1] + infos, 256) + pad(b"b" * 32, 256) + b"?" * 300
    assert len(pad(fixed(3, 2, 2) + split[1] + infos)) % 256, "or it would be the same"
    write(tmp_path / "m-00001-of-00002.gguf", first)
    path = write(tmp_path / "m-00002-of-00002.gguf", second)
    with pytest.raises(ShardError, match="can't be told where its data begins"):
        loader.open(path)


def test_an_offset_that_wraps_is_not_taken_for_joined_shards(tmp_path: Path) -> None:
    data = shard(0, 2, tensors=())
    keys = data[24 : data.index(b"split.count") + 17]
    broken = pad(fixed(3, 1, 2) + keys + info("t", [16], 0, 2**64 - 32)) + bytes(32) + b"GGUF"
    first = write(tmp_path / "m-00001-of-00002.gguf", broken)
    write(tmp_path / "m-00002-of-00002.gguf", shard(1, 2, tensors=("u",)))
    with pytest.raises(TruncatedFileError, match="tensor 't'"):
        loader.open(first)


def test_a_false_count_is_about_missing_files_not_about_limits(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00002.gguf", shard(0, 65535))
    with pytest.raises(ShardError, match=r"m-00002-of-00002.gguf is missing.*and \d+ more"):
        loader.open(path)


def test_shards_that_are_named_like_byte_parts(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    odd = [file.rename(tmp_path / f"m.gguf.00{i}") for i, file in enumerate(files, 1)]
    assert len(loader.load(odd)) == 3
    with pytest.raises(ShardError, match="one of 3 files"):
        loader.open(odd[0])
    with pytest.raises(ShardError, match="shard 3 of 3 is missing"):
        loader.open(odd[:2])
    with pytest.raises(loader.UnsupportedFormatError, match="HTML"):
        loader.open(write(tmp_path / "m.gguf.001", b"<!DOCTYPE html>"))


def test_a_set_without_a_prefix(tmp_path: Path) -> None:
    for number in range(2):
        data = shard(number, 2, tensors=(f"t{number}",))
        write(tmp_path / f"0000{number + 1}-of-00002.gguf", data)
    assert len(loader.load(tmp_path / "00002-of-00002.gguf")) == 2


@pytest.mark.parametrize("access", ["direct", "mmap", "buffered"])
def test_every_file_takes_one_descriptor(direct_folder: Path, access: AccessRequest) -> None:
    files = split_model(direct_folder, random_tensors(20))
    before = len(descriptors())
    with loader.open(files[0], access=access, page_cache="reuse") as model:
        model.load().close()
        assert len(descriptors()) - before == 20


def test_weights_of_mixed_access_are_used_again(direct_folder: Path, faults: Faults) -> None:
    expected = random_tensors(3, 200_000)
    files = split_model(direct_folder, expected)
    faults.fail("open", errno.EINVAL, nth=4, times=1)
    with loader.open(files[0]) as model:
        assert [file.access for file in model.files] == ["direct", "mmap", "direct"]
        first = model.load()
        address = first["t2"].numpy().ctypes.data
        weights = model.load(into=first)
        assert same(weights, expected)
        assert weights["t2"].numpy().ctypes.data == address


def test_weights_that_were_used_again_keep_no_false_tensors(direct_folder: Path) -> None:
    expected = random_tensors(3, 200_000)
    files = split_model(direct_folder, expected)
    with loader.open(files[0], access="direct") as model:
        first = model.load()
        second = model.load(into=first)
        assert same(first, expected), "the same tensors in the same places"
        third = model.load(names=["t1"], into=second)
        assert same(third, {"t1": expected["t1"]})
        assert list(second) == [], "what was elsewhere before"


def test_names_of_odd_bytes_lead_to_the_others(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    for number in range(2):
        name = b"\xff m\n-%05d-of-00002.GGUF" % (number + 1)
        Path(os.fsdecode(os.path.join(folder, name))).write_bytes(  # noqa: PTH118 - bytes
            shard(number, 2, tensors=(f"t{number}",))
        )
    assert list(loader.load(os.path.join(folder, name))) == ["t0", "t1"]  # noqa: PTH118 - bytes


# --- Access, descriptors, reading ---


def test_the_access_of_each_shard_is_its_own(
    direct_folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loader")
    expected = random_tensors(3, 200_000)
    files = split_model(direct_folder, expected)
    faults.fail("open", errno.EINVAL, nth=4, times=1)  # the second shard's second descriptor
    with loader.open(files[0], access=("direct", "mmap", "buffered")) as model:
        assert [file.access for file in model.files] == ["direct", "mmap", "direct"]
        assert [file.offset_alignment for file in model.files] == [512, None, 512]
        weights = model.load()
    assert same(weights, expected)
    report = weights.report
    assert report.bytes_direct > 400_000
    assert 200_000 < report.bytes_mapped < 210_000
    assert report.method is not None
    assert len([r for r in caplog.records if "mmap is disabled" in r.message]) == 1
    faults.fail("open", errno.EINVAL, nth=4, times=1)
    with pytest.raises(loader.DirectIOError, match=r"00002-of-00003"):
        loader.open(files[0], access="direct")


def test_a_selection_touches_only_its_shards(direct_folder: Path, faults: Faults) -> None:
    expected = random_tensors(3, 300_000)
    files = split_model(direct_folder, expected)
    for access in ("direct", "mmap", "buffered"):
        with loader.open(files[0], access=access) as model:
            faults.shorten("pread_direct", 1 << 62)  # counts
            before = faults.count("open")
            weights = model.load(names=["t1"], method="sync")
            assert faults.count("open") - before <= 1, "the buffered one of its shard"
            assert same(weights, {"t1": expected["t1"]})
            moved = weights.report.bytes_direct + weights.report.bytes_buffered
            assert moved + weights.report.bytes_mapped < 3 * (1 << 20) + 400_000
            assert weights.report.memory_bytes < 310_000
            assert len(weights.report.files) == 3
            faults.clear()


def test_shards_are_read_as_one_plan(direct_folder: Path) -> None:
    """Reads of several shards are under way at once, into one memory."""
    expected = random_tensors(8, 1 << 20)
    files = split_model(direct_folder, expected)
    weights = loader.load(files[0], access="direct")
    assert same(weights, expected)
    starts = sorted(t.numpy().ctypes.data for t in weights.values())
    assert starts[-1] - starts[0] < 9 << 20
    assert weights.report.phases.mean_in_flight > 1.5


def test_memory_that_dma_cannot_reach_is_so_for_all_shards(
    direct_folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """EFAULT lasts for the rest of the load, in whichever file; said once, and in the report."""
    expected = random_tensors(4, 100_000)
    files = split_model(direct_folder, expected)
    with loader.open(files[0]) as model:
        faults.fail("pread_direct", errno.EFAULT, times=1)
        weights = model.load(method="sync", depth=1)
        assert faults.count("pread_direct") == 1
        assert same(weights, expected)
        assert all(file.fallback is not None for file in weights.report.files)
        assert {f.fallback.errno for f in weights.report.files if f.fallback} == {errno.EFAULT}
        assert len([r for r in caplog.records if "direct reads stopped" in r.message]) == 1
        assert model.load().report.bytes_buffered == 0


def test_refusals_of_several_shards_are_logged_once(
    direct_folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    expected = random_tensors(4, 100_000)
    files = split_model(direct_folder, expected)
    with loader.open(files[0]) as model:
        faults.fail("pread_direct", errno.EINVAL)
        weights = model.load(method="sync")
    assert same(weights, expected)
    assert [file.fallback and file.fallback.errno for file in weights.report.files] == (
        [errno.EINVAL] * 4
    )
    assert len([r for r in caplog.records if "direct reads stopped" in r.message]) == 1
    with loader.open(files[0]) as model:
        pass
    faults.clear()
    faults.fail("pread_direct", errno.EFAULT, nth=2, times=7)  # while the headers are read
    with loader.open(files[0]) as model:
        assert same(model.load(), expected)
    assert len([r for r in caplog.records if "direct reads stopped" in r.message]) == 2


def test_a_thousand_shards(direct_folder: Path) -> None:
    tensors = tuple(f"t{i}" for i in range(1000))
    for number in range(1000):
        write(
            direct_folder / f"m-{number + 1:05}-of-01000.gguf",
            shard(number, 1000, total=1000, tensors=tensors[number : number + 1]),
        )
    given = direct_folder / "m-00500-of-01000.gguf"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"the limit for descriptors can't be raised over {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    try:
        before = len(descriptors())
        with loader.open(given) as model:
            assert len(descriptors()) - before == 1000
            weights = model.load()
            assert [int(t.numpy().view(np.uint8)[0]) for t in weights.values()] == [
                (i + 1) % 256 for i in range(1000)
            ]
            assert len(list(model.stream())) == 1000
        assert len(descriptors()) == before
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
        for set_ in (given, sorted(direct_folder.glob("m-*.gguf"))):
            with pytest.raises(ReadError, match=r"needs 1\d\d\d file.*limit .* is 900") as caught:
                loader.open(set_)
            assert caught.value.errno == errno.EMFILE
            assert len(descriptors()) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_set_that_fails_leaves_nothing(
    direct_folder: Path, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    files = split_model(direct_folder, random_tensors(3, 1 << 20))
    for access in ("direct", "mmap", "buffered"):
        with loader.open(files[0], access=access) as model:
            faults.fail("pread_direct", errno.EIO, nth=2)
            faults.fail("pread", errno.EIO, nth=2)
            faults.fail("uring_result", errno.EIO, nth=2)
            faults.fail("madvise", errno.EFAULT, nth=2)
            with pytest.raises(ReadError) as caught:
                model.load()
            assert caught.value.filename in list(map(str, files))
            assert caught.value.tensor is not None
            faults.clear()
        nothing_left()
        assert mappings(files[0]) == 0


def test_the_command_takes_any_shard(tmp_path: Path) -> None:
    files = split_model(tmp_path, random_tensors())
    for words in (["load"], ["inspect"], ["verify", "--against", str(files[0])], ["bench"]):
        done = subprocess.run(
            [sys.executable, "-m", "loader", words[0], files[2], *words[1:], "--json"],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert found["model"] == str(files[2])
        if words[0] != "bench":
            assert [file["path"] for file in found["files"]] == list(map(str, files))
        else:
            assert not any(run["failed"] for run in found["runs"])
    files[1].unlink()
    done = subprocess.run(
        [sys.executable, "-m", "loader", "load", files[0]],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "00002-of-00003.gguf is missing" in done.stderr
