"""Loads to devices: PoCL is a real OpenCL device, torch has the processor, and the CUDA code runs
on a driver of the tests' own (tests/native/fake_cuda.c)."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader.device.host import HostDevice
from loader.device.registry import canonical_name, open_device
from loader.errors import (
    DeviceError,
    DeviceUnavailableError,
    TensorDataError,
)
from loader.gguf.tensors import TensorInfo
from loader.options import Access, Method
from loader.placement import parse_overrides
from tests import build, fake_cuda
from tests.build import fixed, info, pad, quantized, random_model, random_tensors, split_model
from tests.conftest import ACCESS, METHODS, back, total

SIZES = [3_000_001, 511, 4096, 0, 5_000_000, 1, 70_001, 2 << 20]
CHUNK = 256 << 10


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return direct_folder / "m.gguf"


@pytest.fixture
def expected(path: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in random_model(path, SIZES).items()}


# --- Loads ---


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_reading_gives_the_same_bytes(
    path: Path, expected: dict[str, bytes], device: str, access: Access, method: Method
) -> None:
    with loader.open(path, access=access) as model:
        for chunk_bytes, limit in ((4096, 1 << 20), (CHUNK, 1 << 20), (4 << 20, 64 << 20)):
            with model.load(
                device=device, method=method, chunk_bytes=chunk_bytes, memory_limit=limit
            ) as weights:
                assert list(weights) == list(expected)
                assert back(weights) == expected
                report = weights.report
                assert report.device == device
                assert report.memory_bytes == 0
                assert total(expected) <= report.device_bytes[device]
                assert report.device_bytes[device] < total(expected) + 8 * 4096
                assert report.staging is not None
                assert report.staging.buffers * report.staging.buffer_bytes <= limit
                assert report.bytes == total(expected)
                assert (report.bytes_mapped > 0) == (access == "mmap")


def test_shards_streams_and_rows(direct_folder: Path, device: str) -> None:
    arrays = random_tensors(5, 900_001)
    expected = {name: values.tobytes() for name, values in arrays.items()}
    files = split_model(direct_folder, arrays, split_max_tensors=2)
    with loader.open(files[1]) as model:
        assert back(model.load(device=device)) == expected
        found = {}
        for name, tensor in model.stream(device=device, chunk_bytes=CHUNK, memory_limit=2 << 20):
            assert tensor.device == device
            found[name] = tensor.to_host().numpy().tobytes()
        assert found == expected
        rows = model.read_rows("t3", 1000, 200_000, device=device)
        assert rows.to_host().numpy().tobytes() == expected["t3"][1000:200_000]


def test_leaving_a_stream_early(path: Path, expected: dict[str, bytes], device: str) -> None:
    with loader.open(path) as model:
        for name, tensor in model.stream(device=device, chunk_bytes=4096, memory_limit=1 << 20):
            assert tensor.to_host().numpy().tobytes() == expected[name]
            break
        del tensor


TYPES: dict[str, npt.NDArray[Any]] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float16": np.arange(8, dtype=np.float16).reshape(2, 2, 2),
    "float64": np.arange(3, dtype=np.float64),
    "int8": np.arange(-5, 5, dtype=np.int8),
    "int16": np.arange(7, dtype=np.int16),
    "int32": np.arange(7, dtype=np.int32),
    "int64": np.arange(3, dtype=np.int64),
}


def test_the_arrays_of_devices(direct_folder: Path, device: str) -> None:
    """Types and shapes as numpy's; BF16 is torch's own there and uint16 elsewhere."""
    path = direct_folder / "m.gguf"
    build.model(path, TYPES)
    with loader.load(path, device=device) as weights:
        for name, values in TYPES.items():
            tensor = weights[name]
            native = tensor.native()
            assert tuple(native.shape) == values.shape
            assert str(native.dtype).endswith(name)
            assert np.array_equal(tensor.to_host().numpy(), values)
            assert np.array_equal(tensor.dequantize(), values.astype(np.float32))
            assert np.array_equal(host_array(native, tensor), values)
            with pytest.raises(DeviceError, match="to_host"):
                tensor.numpy()
            with pytest.raises(DeviceError, match="to_host"):
                np.asarray(tensor)
            assert not hasattr(tensor, "__array_interface__")


def host_array(native: Any, tensor: loader.Tensor) -> npt.NDArray[Any]:
    """What the device's own array holds, by its own means."""
    if hasattr(native, "get"):
        found: npt.NDArray[Any] = native.get()
        return found
    if hasattr(native, "cpu"):
        native = native.cpu()
        found = native.numpy()
    else:
        found = tensor.to_host().numpy()
    return found


def test_block_types_bf16_scalars_and_empty_tensors(direct_folder: Path, device: str) -> None:
    data = build.random_bytes(4096)
    infos = (
        info("q8", [64, 2], 8, 0)
        + info("bf16", [5], 30, 160)
        + info("scalar", [], 0, 192)
        + info("empty", [0, 3], 0, 224)
        + info("q6", [256], 14, 224)
    )
    path = direct_folder / "m.gguf"
    path.write_bytes(pad(fixed(3, 5, 0) + infos) + data)
    expected = back(loader.load(path))
    with loader.load(path, device=device) as weights:
        assert back(weights) == expected
        assert tuple(weights["q8"].native().shape) == (2, 68)
        assert str(weights["q8"].native().dtype).endswith("uint8")
        kind = "bfloat16" if device.startswith("torch") else "uint16"
        assert str(weights["bf16"].native().dtype).endswith(kind)
        assert tuple(weights["scalar"].native().shape) == ()
        assert tuple(weights["empty"].native().shape) == (3, 0)
        assert tuple(weights["q6"].native().shape) == (210,)


def test_a_model_without_alignment_is_aligned_on_a_device(direct_folder: Path, device: str) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {"a": np.arange(3, dtype=np.int8)}
    arrays["b"] = np.arange(5, dtype=np.float64)
    path = build.model(direct_folder / "m.gguf", arrays, alignment=1)
    with loader.load(path, device=device) as weights:
        assert np.array_equal(weights["b"].to_host().numpy(), arrays["b"])
        assert np.array_equal(host_array(weights["b"].native(), weights["b"]), arrays["b"])


def test_interfaces(direct_folder: Path, device: str) -> None:
    path = build.model(direct_folder / "m.gguf", {"t": np.arange(6, dtype=np.float32)})
    with loader.load(path, device=device) as weights:
        tensor = weights["t"]
        if device.startswith("cuda"):
            interface = tensor.__cuda_array_interface__  # type: ignore[attr-defined]  # on CUDA
            assert interface["shape"] == (6,)
            assert interface["typestr"] == "<f4"
            assert interface["version"] == 3
            assert interface["data"][0] % 32 == 0
        else:
            assert not hasattr(tensor, "__cuda_array_interface__")
        if device.startswith("torch"):
            import torch

            shared = torch.from_dlpack(tensor)  # type: ignore[attr-defined]  # torch has it
            assert shared.data_ptr() == tensor.native().data_ptr()
            assert tensor.__dlpack_device__() == (1, 0)
        else:
            with pytest.raises(BufferError):
                tensor.__dlpack__()
            with pytest.raises(BufferError):
                tensor.__dlpack_device__()


# --- Where to ---


def all_devices() -> list[str]:
    names = ["cpu", "cuda:0", "cuda:1"]
    for name, package in (("torch:cpu", "torch"), ("opencl:0", "pyopencl")):
        try:
            __import__(package)
            open_device(name).close()
        except (ImportError, DeviceUnavailableError):
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("access", ACCESS)
def test_several_devices_at_once(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda, access: Access
) -> None:
    names = all_devices()
    where = {name: names[i % len(names)] for i, name in enumerate(expected)}
    requests: list[Any] = [
        where,
        lambda info: where[info.name],
        {name: device for name, device in where.items() if device != "cpu"},
        ",".join(f"^{name}$={device}" for name, device in where.items()),
    ]
    with loader.open(path, access=access) as model:
        for request in requests:
            with model.load(device=request, chunk_bytes=CHUNK, check_tensors=True) as weights:
                assert back(weights) == expected
                assert list(weights) == list(expected)
                assert {name: tensor.device for name, tensor in weights.items()} == where
                assert weights.report.device == tuple(names)
                assert weights.report.to_dict()["device"] == names
                assert set(weights.report.device_bytes) == set(names) - {"cpu"}
    assert cuda.alive() == {}


def test_devices_by_patterns() -> None:
    rules = parse_overrides(r"ffn_.*_exps=CPU,blk\.1\.=CUDA1,output=OpenCL0", "torch:cpu")

    def device(name: str) -> str:
        return rules(TensorInfo(name, 0, (), 0, 0, 0))

    assert device("blk.1.ffn_up_exps.weight") == "cpu", "the first pattern counts"
    assert device("blk.1.attn_q.weight") == "cuda:1"
    assert device("blk.11.attn_q.weight") == "torch:cpu"
    assert device("output_norm.weight") == "opencl:0"
    for wrong in ("", "x", "=cpu", "x=", "x=tpu", "x=cpu,", "(=cpu", "a=cpu,b"):
        with pytest.raises(ValueError, match=r"override|unknown device"):
            parse_overrides(wrong)


def test_names_of_devices(path: Path, expected: dict[str, bytes]) -> None:
    assert expected
    assert [canonical_name(n) for n in ("CPU", "CUDA3", "cuda", "OpenCL:1", "torch:mps")] == [
        "cpu", "cuda:3", "cuda:0", "opencl:1", "torch:mps",
    ]  # fmt: skip
    for wrong in ("", "tpu", "cpu:1", "cuda:x", "cuda:-1", "torch", "torch:", "GPU0"):
        with pytest.raises(ValueError, match="unknown device"):
            loader.load(path, device=wrong)
    with pytest.raises(ValueError, match="no tensor 'tt0'; did you mean"):
        loader.load(path, device={"tt0": "cpu"})
    with pytest.raises(TypeError, match="device"):
        loader.load(path, device=3)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError, match="device"):
        loader.load(path, device=lambda info: info.nbytes)


def test_devices_that_are_not_there(
    path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected
    for package, name in (("torch", "torch:cpu"), ("pyopencl", "opencl:0"), ("cuda", "cuda:0")):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            patch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
            with pytest.raises(DeviceUnavailableError, match="pip install 'gguf-dio"):
                loader.load(path, device=name)
    pytest.importorskip("torch", reason="needs the extra torch")
    for name in ("torch:nonsense", "torch:cuda:99"):
        with pytest.raises(DeviceUnavailableError, match=name):
            loader.load(path, device=name)


def test_numbers_that_are_out_of_range(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    assert expected
    with pytest.raises(DeviceUnavailableError, match="no CUDA device 7; there are 2"):
        loader.load(path, device="cuda:7")
    with pytest.raises(DeviceUnavailableError):
        loader.load(path, device={"t0": "cuda:0", "t1": "cuda:2"})
    assert cuda.alive() == {}


# --- Validation ---


@pytest.mark.parametrize("chunk_bytes", [4096, CHUNK])
def test_validation_on_the_way(direct_folder: Path, device: str, chunk_bytes: int) -> None:
    path = direct_folder / "m.gguf"
    quantized(path, 5000, {})
    loader.load(path, device=device, check_tensors=True, chunk_bytes=chunk_bytes).close()
    wrong = {"t1": 4999, "t3": 312}
    quantized(path, 5000, wrong)
    with pytest.raises(TensorDataError) as caught:
        loader.load(path, device=device, check_tensors=True, chunk_bytes=chunk_bytes)
    assert caught.value.tensors == ("t1", "t3")
    for name, block in wrong.items():
        assert f"'{name}' (first in block {block})" in str(caught.value)
    with pytest.raises(TensorDataError, match="t1"):
        for _ in loader.open(path).stream(device=device, check_tensors=True):
            pass


# --- mmap, mlock, no_alloc ---


def test_only_what_the_host_needs_stays_mapped(
    path: Path, expected: dict[str, bytes], device: str
) -> None:
    weights = loader.load(
        path, access="mmap", device=lambda info: "cpu" if info.name in ("t1", "t6") else device
    )
    assert back(weights) == expected
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            mapped += end - start
    assert 70_001 + 511 <= mapped < 70_001 + 511 + 4 * 4096
    assert weights["t6"].numpy().tobytes() == expected["t6"]
    weights.close()
    del weights
    with loader.open(path, access="mmap") as model:
        weights = model.load(device=device)
        assert back(weights) == expected
        assert resident(path) == 0, "nothing of it is on the host"
        weights.close()


def resident(path: Path) -> int:
    """Bytes of a file that are in page tables of this process."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = str(path) in line
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_locking_what_is_left_on_the_host(
    path: Path, expected: dict[str, bytes], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with loader.open(path) as model:
        for choose in (lambda _: device, lambda i: "cpu" if i.name == "t6" else device):
            with model.load(device=choose, mlock=True) as weights:
                assert back(weights) == expected
    assert not caplog.records


def test_no_alloc_tells_what_each_device_needs(
    path: Path, expected: dict[str, bytes], cuda: fake_cuda.FakeCuda
) -> None:
    with loader.open(path) as model:
        report = model.load(device={"t0": "cuda:0", "t4": "cuda:1"}, no_alloc=True).report
    assert report.device_bytes == {"cuda:0": len(expected["t0"]), "cuda:1": len(expected["t4"])}
    assert report.memory_bytes > 0
    assert report.staging is None
    cuda.device(0, total=1 << 20)
    with loader.open(path) as model:
        assert model.load(device="cuda:0", no_alloc=True).report.device_bytes["cuda:0"] > 1 << 20
    assert cuda.calls("cuMemAlloc") == 0


# --- Policy and fill ---


def test_offloading(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """llama.cpp's rule; the variable is read once, when a device is created."""
    monkeypatch.delenv("GGML_OP_OFFLOAD_MIN_BATCH", raising=False)
    found = open_device(device)
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "4")
    assert found.offloads("MUL_MAT", (4096, 32, 1, 1))
    assert not found.offloads("MUL_MAT", (4096, 31, 100, 1))
    assert found.offloads("MUL_MAT_ID", (4096, 8, 32))
    assert not found.offloads("GGML_OP_MUL_MAT_ID", (4096, 512, 31))
    assert not found.offloads("GET_ROWS", (4096, 512, 512))
    assert not found.offloads("ADD", (4096,))
    found.close()
    later = open_device(device)
    assert later.offloads("MUL_MAT", (1, 4))
    later.close()
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "many")
    with pytest.raises(ValueError, match="GGML_OP_OFFLOAD_MIN_BATCH: 'many'"):
        open_device(device)
    assert not HostDevice().offloads("MUL_MAT", (1, 1000))


def test_fill(device: str) -> None:
    found = open_device(device)
    buffer = found.allocate(64)
    found.fill(buffer, 1.5)
    found.fill(buffer, -2.0, position=8, count=3)
    values = buffer.read(0, 64).view(np.float32)
    assert values.tolist() == [1.5] * 2 + [-2.0] * 3 + [1.5] * 11
    for position, count in ((2, 1), (-4, 1), (60, 2), (0, 17), (0, -1)):
        with pytest.raises(ValueError, match="don't lie in a buffer"):
            found.fill(buffer, 0.0, position, count)
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        found.fill(buffer, 0.0)
    found.close()


def test_the_host_as_a_device(path: Path, expected: dict[str, bytes]) -> None:
    host = open_device("cpu")
    assert back(loader.load(path, device=host)) == expected
    buffer = host.allocate(16)
    host.fill(buffer, 2.0, 4, 2)
    assert buffer.read(0, 16).view(np.float32).tolist() == [0, 2, 2, 0]
    assert host.memory().free > 0
    adopted = host.adopt(bytearray(8))
    assert host.copy_async(adopted, 2, np.arange(3, dtype=np.uint8)).done()
    assert adopted.read(0, 8).tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


def test_one_info_line_and_nothing_printed(
    path: Path, expected: dict[str, bytes], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert expected
    caplog.set_level(logging.WARNING, "loader")
    loader.load(path, device=device).close()
    assert not caplog.records
