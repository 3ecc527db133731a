"""Loads: the same tensors in every mode, and a true report."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import loader
from loader import io
from loader.errors import (
    DeviceMemoryError,
    DeviceUnavailableError,
    LoadCancelled,
    TensorDataError,
    UnsupportedFormatError,
)
from loader.options import AccessRequest
from tests import build
from tests.build import fixed, info, key, model, pad, random_bytes, write
from tests.conftest import Faults

MODES: list[AccessRequest] = ["direct", "mmap", "buffered"]


@pytest.fixture
def path(direct_folder: Path) -> Path:
    random = np.random.default_rng(0)
    return model(
        direct_folder / "m.gguf",
        {
            "f32": random.standard_normal((3, 5), np.float32),
            "f16": random.standard_normal((7, 9), np.float32).astype(np.float16),
            "f64": random.standard_normal((2, 2)),
            "i8": random.integers(-128, 128, (100_001,), np.int8),
            "i16": random.integers(-100, 100, (11,), np.int16),
            "i32": random.integers(-100, 100, (11,), np.int32),
            "i64": random.integers(-100, 100, (1 << 18,), np.int64),
        },
    )


@pytest.fixture
def reference(path: Path) -> dict[str, bytes]:
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}


def content(weights: loader.Weights) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.mark.parametrize("access", MODES)
def test_each_mode_gives_the_bytes_of_gguf_py(
    path: Path, reference: dict[str, bytes], access: AccessRequest
) -> None:
    weights = loader.load(path, access=access)
    assert content(weights) == reference
    assert list(weights) == list(reference)
    file = weights.report.files[0]
    assert file.access == access
    assert file.requested == (access,)
    assert file.fallback is None


@pytest.mark.parametrize("access", MODES)
@pytest.mark.parametrize("tail", [1, 511, 512, 4095, 4096])
@pytest.mark.parametrize("seal", [True, False])
def test_row_81_the_last_tensor_ends_at_the_end_of_the_file(
    direct_folder: Path, access: AccessRequest, tail: int, seal: bool
) -> None:
    """File sizes of 4096k + something, with and without padding."""
    path = direct_folder / "m.gguf"
    keys = key("fill", build.STRING, build.text(b""))
    header = pad(fixed(3, 1, 1) + keys + info("t", [0], 24, 0))
    size = 8192 + tail - len(header) % 4096
    header = header.replace(info("t", [0], 24, 0), info("t", [size], 24, 0))
    expected = random_bytes(size)
    data = header + expected
    write(path, pad(data) if seal else data)
    if not seal:
        assert path.stat().st_size % 4096 == tail % 4096
    assert content(loader.load(path, access=access)) == {"t": expected}


def test_dtypes_and_shapes(path: Path) -> None:
    weights = loader.load(path)
    for name, kind in (("f16", np.float16), ("f32", np.float32), ("f64", np.float64)):
        assert weights[name].numpy().dtype == kind
    for bits in (8, 16, 32, 64):
        assert weights[f"i{bits}"].numpy().dtype == np.dtype(f"int{bits}")
    assert weights["f16"].numpy().shape == weights["f16"].info.shape == (7, 9)


def test_block_types_and_bf16(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test")
    kind = gguf.GGMLQuantizationType
    for name, t in (("q8", kind.Q8_0), ("q4", kind.Q4_0), ("bf16", kind.BF16)):
        writer.add_tensor(name, gguf.quantize(values, t), raw_dtype=t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for access in MODES:
        weights = loader.load(tmp_path / "m.gguf", access=access)
        assert weights["q8"].numpy().dtype == np.uint8
        assert weights["q8"].numpy().shape == (4, 68)
        assert weights["q8"].info.shape == (4, 64)
        assert weights["bf16"].numpy().dtype == np.uint16
        assert weights["bf16"].numpy().shape == (4, 64)
        for name, t in (("q8", kind.Q8_0), ("q4", kind.Q4_0), ("bf16", kind.BF16)):
            expected = gguf.dequantize(gguf.quantize(values, t), t)
            found = weights[name].dequantize()
            assert found.dtype == np.float32
            assert np.array_equal(found, expected)


def test_scalars_of_bf16(tmp_path: Path) -> None:
    data = pad(fixed(3, 1, 0) + info("t", [], 30, 0)) + b"\xc0\x3f"
    values = loader.load(write(tmp_path / "m.gguf", data))["t"].dequantize()
    assert isinstance(values, np.ndarray)
    assert values.shape == ()
    assert values == 1.5


def test_a_type_that_gguf_cannot_dequantize(tmp_path: Path) -> None:
    kinds = {9: (32, 40, "Q8_1"), 42: (64, 18, "Q2_0")}
    for kind, (elements, nbytes, name) in kinds.items():
        data = pad(fixed(3, 1, 0) + info("t", [elements], kind, 0)) + bytes(nbytes)
        weights = loader.load(write(tmp_path / "m.gguf", data))
        with pytest.raises(UnsupportedFormatError, match=name):
            weights["t"].dequantize()


def test_owned_memory_is_writable_and_mapped_memory_is_not(path: Path) -> None:
    before = path.read_bytes()
    for access in MODES:
        weights = loader.load(path, access=access)
        array = weights["f32"].numpy()
        assert array.flags.writeable == (access != "mmap")
        if access != "mmap":
            array[:] = 7
            assert (weights["f32"].numpy() == 7).all(), "a view, not a copy"
        else:
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
    assert path.read_bytes() == before


def test_array_interfaces(path: Path) -> None:
    for access in MODES:
        tensor = loader.load(path, access=access)["f32"]
        array = np.asarray(tensor)
        assert array.ctypes.data == tensor.numpy().ctypes.data
        assert array.shape == (3, 5)
        assert tensor.__dlpack_device__() == (1, 0)
        if access != "mmap":
            assert np.from_dlpack(tensor).ctypes.data == array.ctypes.data
        assert "f32" in repr(tensor)


@pytest.mark.parametrize("access", MODES)
def test_tensors_are_aligned_in_memory_as_in_the_file(
    direct_folder: Path, access: AccessRequest
) -> None:
    path = model(
        direct_folder / "m.gguf",
        {f"t{i}": np.full(1000 + i, i, np.float64) for i in range(20)},
        alignment=256,
    )
    weights = loader.load(path, access=access)
    for tensor in weights.values():
        address = tensor.numpy().ctypes.data
        assert address % 256 == 0
        assert address % 512 == tensor.info.offset % 512 or access == "buffered"


def test_direct_loads_bounce_nothing(direct_folder: Path) -> None:
    path = model(direct_folder / "m.gguf", {"t": np.zeros(1_000_003, np.int8)}, seal=False)
    report = loader.load(path, access="direct").report
    assert report.bytes_bounced == 0
    assert report.bytes_buffered == 0
    assert report.bytes_direct >= report.bytes


# --- Selections ---


def test_names(path: Path, reference: dict[str, bytes]) -> None:
    with loader.open(path) as opened:
        assert content(opened.load(names=["i64", "f16"])) == {
            name: reference[name] for name in ("f16", "i64")
        }
        assert list(opened.load(names=lambda info: info.name.startswith("f"))) == [
            "f32", "f16", "f64",
        ]  # fmt: skip
        assert list(opened.load(names=iter(["i8"]))) == ["i8"]
        assert list(loader.load(path, names=iter(["i8"]))) == ["i8"]
        assert len(opened.load(names=[])) == 0


def test_only_what_is_asked_for_is_read(path: Path) -> None:
    with loader.open(path) as opened:
        info = opened.tensors["i64"]
        report = opened.load(names=["i64"]).report
        header = opened.load(names=[]).report.bytes_direct
        assert info.nbytes is not None
        assert report.tensors == 1
        assert report.bytes == info.nbytes
        assert info.nbytes <= report.bytes_direct - header <= info.nbytes + 1024


def test_wrong_options(path: Path) -> None:
    with loader.open(path) as opened:
        with pytest.raises(ValueError, match=r"'f23'.*did you mean 'f32'"):
            opened.load(names=["f23"])
        with pytest.raises(TypeError, match=r"names=\['f32'\]"):
            opened.load(names="f32")
        wrong: Any = {"unknown": 1}
        with pytest.raises(TypeError, match="unknown"):
            opened.load(**wrong)
        with pytest.raises(TypeError, match="strings"):
            opened.load(names=[1])  # type: ignore[list-item]  # that is the test
        with pytest.raises(TypeError, match="device"):
            opened.load(device=0)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(TypeError, match="progress"):
            opened.load(progress=1)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(TypeError, match="check_tensors"):
            opened.load(check_tensors="no")  # type: ignore[arg-type]  # that is the test
        for chunk in (0, 100, 12345, 1 << 40, -4096):
            with pytest.raises(ValueError, match="multiple of 4096"):
                opened.load(chunk_bytes=chunk)
        with pytest.raises(DeviceUnavailableError, match="cuda:0"):
            opened.load(device="cuda:0")
    with pytest.raises(TypeError, match="unknown"):
        loader.load(path, **wrong)
    with pytest.raises(TypeError, match="unknown"):
        loader.open(path, **wrong)
    with pytest.raises(ValueError, match="fast"):
        loader.open(path, access="fast")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError):
        loader.open(3)  # type: ignore[arg-type]  # that is the test


def test_paths_of_every_kind(path: Path, reference: dict[str, bytes]) -> None:
    for given in (str(path), path, os.fsencode(path), [path]):
        assert content(loader.load(given)) == reference


# --- The choice ---


def test_row_84_mmap_asked_for_is_mmap_used(path: Path) -> None:
    with loader.open(path, access="mmap") as opened:
        file = opened.files[0]
        assert (file.access, file.requested, file.reason) == (
            "mmap", ("mmap",), "mmap was asked for",
        )  # fmt: skip
        assert file.memory_alignment is None
        report = opened.load().report
    assert report.bytes_mapped >= report.bytes
    assert (report.method, report.depth, report.chunk_bytes) == (None, None, None)
    assert report.memory_bytes == 0


def test_direct_io_disables_mmap_and_says_so_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loader")
    with loader.open(path, access=loader.access_from_flags(True, True)) as opened:
        assert opened.files[0].access == "direct"
        assert "mmap is disabled" in opened.files[0].reason
        opened.load()
        opened.load()
    assert [r.levelname for r in caplog.records if "mmap is disabled" in r.message] == ["INFO"]


def test_the_environment_is_below_an_argument(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUF_DIO_ACCESS", "mmap, buffered")
    with loader.open(path) as opened:
        assert opened.files[0].requested == ("mmap", "buffered")
    with loader.open(path, access="buffered") as opened:
        assert opened.files[0].access == "buffered"
    for value in ("fast", "", "direct,", "mmap,mmap", "auto,mmap"):
        monkeypatch.setenv("GGUF_DIO_ACCESS", value)
        with pytest.raises(ValueError, match="GGUF_DIO_ACCESS"):
            loader.open(path)
    monkeypatch.setenv("GGUF_DIO_ACCESS", "buffered")
    for text, nbytes in (("64KiB", 65536), ("8MiB", 8 << 20), ("12288", 12288)):
        monkeypatch.setenv("GGUF_DIO_CHUNK", text)
        assert loader.load(path).report.chunk_bytes == nbytes
    assert loader.load(path, chunk_bytes=4096).report.chunk_bytes == 4096
    monkeypatch.setenv("GGUF_DIO_CHUNK", "many")
    with pytest.raises(ValueError, match="GGUF_DIO_CHUNK"):
        loader.load(path)


def test_row_91_opening_a_mapped_model_reads_nothing(direct_folder: Path) -> None:
    import mmap

    size = 64 << 20
    path = direct_folder / "m.gguf"
    path.write_bytes(pad(fixed(3, 1, 0) + info("t", [size], 24, 0)) + bytes(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def resident() -> int:
        import ctypes

        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            address = np.frombuffer(view, np.uint8).ctypes.data
            pages = -(-len(view) // 4096)
            flags = (ctypes.c_ubyte * pages)()
            libc = ctypes.CDLL(None)
            assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), flags) == 0
            return sum(flag & 1 for flag in flags)

    if resident():
        pytest.skip("the page cache can't be emptied here")
    with loader.open(path, access="mmap") as opened:
        assert resident() == 0, "not even the header: it is read directly"
        opened.load()
        assert resident() == -(-path.stat().st_size // 4096)


def test_too_little_memory_maps_or_says_how_much(
    path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    monkeypatch.setattr("loader.planning.available_memory", lambda: 1000)
    weights = loader.load(path, access="auto")
    file = weights.report.files[0]
    assert file.access == "mmap"
    assert "1000 are available" in file.reason
    assert content(weights) == reference
    for access in ("direct", "buffered", ("direct", "buffered")):
        with loader.open(path, access=access) as opened:
            with pytest.raises(MemoryError, match="1000 are available") as caught:
                opened.load()
            assert isinstance(caught.value, DeviceMemoryError)
            assert caught.value.available == 1000
            assert caught.value.needed is not None
            assert caught.value.needed > 1000


def test_too_little_memory_and_no_mapping(
    path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    monkeypatch.setattr("loader.planning.available_memory", lambda: 1000)
    with loader.open(path, access="auto") as opened:
        faults.fail("mmap", 19)
        with pytest.raises(MemoryError, match="ENODEV"):
            opened.load()


# --- Options ---


def test_progress(path: Path) -> None:
    for access in MODES:
        calls: list[tuple[int, int]] = []
        thread = threading.get_ident()

        def note(
            done: int, total: int, calls: list[tuple[int, int]] = calls, thread: int = thread
        ) -> None:
            assert threading.get_ident() == thread
            calls.append((done, total))

        loader.load(path, access=access, progress=note, chunk_bytes=4096)
        total = calls[0][1]
        assert calls[0] == (0, total)
        assert calls[-1] == (total, total)
        assert total >= path.stat().st_size - 8192
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    empty: list[tuple[int, int]] = []
    loader.load(path, names=[], progress=lambda *call: empty.append(call))
    assert empty[0] == empty[-1] == (0, 0)


def test_only_false_cancels(path: Path) -> None:
    answers: Iterator[object] = itertools.cycle((None, 0, "", True, ()))
    loader.load(path, progress=lambda *_: next(answers), chunk_bytes=4096)
    loader.load(path, progress=lambda *_: next(answers))
    with pytest.raises(LoadCancelled, match="cancelled"):
        loader.load(path, progress=lambda *_: False)
    with pytest.raises(LoadCancelled):
        loader.load(path, progress=lambda done, total: done < total)

    def fail(*_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loader.load(path, progress=fail)


def test_no_alloc_reads_nothing(path: Path, faults: Faults, reference: dict[str, bytes]) -> None:
    with loader.open(path) as opened:
        for call in ("pread_direct", "pread", "mmap"):
            faults.fail(call, 5)
        weights = opened.load(no_alloc=True)
    assert len(weights) == 0
    report = weights.report
    assert report.tensors == len(reference)
    assert report.bytes == sum(map(len, reference.values()))
    assert report.bytes <= report.memory_bytes < report.bytes + 8192


def test_check_tensors_names_every_invalid_tensor(direct_folder: Path) -> None:
    values = {f"t{i}": np.ones(1000, np.float32) for i in range(4)}
    values["t1"][999] = np.nan
    values["t3"][0] = np.inf
    path = model(direct_folder / "m.gguf", values)
    for access in MODES:
        loader.load(path, access=access)
        loader.load(path, access=access, names=["t0", "t2"], check_tensors=True)
        with pytest.raises(TensorDataError, match=r"'t1' \(first in block 999\)") as caught:
            loader.load(path, access=access, check_tensors=True)
        assert caught.value.tensors == ("t1", "t3")


@pytest.mark.parametrize("access", MODES)
def test_mlock_that_is_refused_is_a_warning(
    path: Path, faults: Faults, caplog: pytest.LogCaptureFixture, access: AccessRequest
) -> None:
    loader.load(path, access=access, mlock=True)
    assert not caplog.records
    faults.fail("mlock", 12)
    loader.load(path, access=access, mlock=True)
    assert len(caplog.records) == 1
    assert "RLIMIT_MEMLOCK" in caplog.text
    assert "ulimit -l" in caplog.text


def test_metadata_overrides(path: Path) -> None:
    with loader.open(path, metadata_overrides={"general.architecture": "other", "new": 3}) as m:
        assert m.metadata["general.architecture"] == "other"
        assert m.metadata["new"] == 3
        assert list(m.metadata) == ["general.architecture", "new"]
        assert len(m.metadata) == 2
        assert m.metadata.value_type("new").name == "INT64"
    for wrong in ({"general.architecture": 3}, {"general.alignment": 64}, {"split.count": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            loader.open(path, metadata_overrides=wrong)
    with pytest.raises(TypeError):
        loader.open(path, metadata_overrides={"a": [1]})  # type: ignore[dict-item]  # the test


def test_report_as_json(path: Path) -> None:
    for access in MODES:
        report = loader.load(path, access=access).report
        found = json.loads(json.dumps(report.to_dict()))
        assert set(found) == {
            "model", "files", "tensors", "bytes", "bytes_direct", "bytes_buffered",
            "bytes_mapped", "bytes_bounced", "open_seconds", "seconds", "bytes_per_second",
            "method", "depth", "chunk_bytes", "device", "peak_rss_bytes",
        }  # fmt: skip
        assert set(found["files"][0]) == {
            "path", "size", "requested", "access", "reason", "memory_alignment",
            "offset_alignment", "fallback",
        }  # fmt: skip
        assert found["files"][0]["requested"] == [access]
        assert found["model"] == found["files"][0]["path"] == str(path)
        assert found["bytes_per_second"] == pytest.approx(found["bytes"] / found["seconds"])


# --- Many at once, and interruptions ---


def test_row_107_many_threads_load_one_model(path: Path, reference: dict[str, bytes]) -> None:
    for access in MODES:
        with loader.open(path, access=access) as opened, ThreadPoolExecutor(8) as pool:
            loads = [pool.submit(opened.load) for _ in range(16)]
            assert all(content(load.result()) == reference for load in loads)


def test_closing_a_model_during_a_load_lets_it_finish(
    path: Path, reference: dict[str, bytes]
) -> None:
    opened = loader.open(path)
    weights = opened.load(progress=lambda *_: opened.close())
    assert content(weights) == reference
    with pytest.raises(ValueError, match="closed"):
        opened.load()
    assert opened.metadata["general.architecture"] == "test"
    assert "f32" in opened.tensors


def test_ctrl_c_ends_a_load(direct_folder: Path) -> None:
    """A load in slow small chunks is interrupted by SIGINT, soon and cleanly."""
    path = model(direct_folder / "m.gguf", {"t": np.zeros(64 << 20, np.int8)})
    code = f"""
import loader, sys, time
with loader.open({str(path)!r}) as model:
    print("ready", flush=True)
    try:
        while True:
            model.load(chunk_bytes=4096)
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    word, when = process.stdout.readline().split()
    process.stdout.close()
    assert process.wait(10) == 0
    assert word == "interrupted"
    assert float(when) - sent < 5


def test_row_96_memory_stays_within_the_weights(direct_folder: Path) -> None:
    """64 MiB of weights under an RLIMIT_AS that leaves them and 48 MiB."""
    size = 64 << 20
    path = direct_folder / "m.gguf"
    path.write_bytes(pad(fixed(3, 1, 0) + info("t", [size], 24, 0)) + bytes(size))
    code = f"""
import resource, loader
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + {size} + (48 << 20),) * 2)
loader.load({str(path)!r}, access="direct")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_exports_what_it_promises() -> None:
    for name in loader.__all__:
        assert hasattr(loader, name)
    assert io.__all__ == ["File"]
