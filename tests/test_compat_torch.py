"""torch tensors from GGUF files."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import loader
from tests.conftest import content, mappings
from tests.test_compat_reader import every_type

torch = pytest.importorskip("torch", reason="torch isn't installed: pip install '.[torch]'")
compat = pytest.importorskip("loader.compat.torch")

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
QUANTISED = ("Q4_0", "Q8_0", "Q6_K", "IQ4_NL")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return every_type(tmp_path / "m.gguf")


def raw(tensor: Any) -> bytes:
    """The bytes of a torch tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found: bytes = flat.view(torch.uint8).numpy().tobytes()
    return found


def test_all_types_have_torch_s_own(path: Path) -> None:
    with loader.open(path) as model:
        expected = content(model.load())
        infos = dict(model.tensors)
    found = compat.load_file(path)
    assert list(found) == list(infos)
    assert {name: raw(tensor) for name, tensor in found.items()} == expected
    types = {
        "BF16.weight": torch.bfloat16, "f16": torch.float16, "f32": torch.float32,
        "F64": torch.float64, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
        "I64": torch.int64, "Q4_0.weight": torch.uint8, "Q6_K.weight": torch.uint8,
    }  # fmt: skip
    for name, dtype in types.items():
        assert found[name].dtype == dtype
        if dtype != torch.uint8:
            assert tuple(found[name].shape) == infos[name].shape
    bf16 = loader.load(path)["BF16.weight"].dequantize()
    assert np.array_equal(found["BF16.weight"].float().numpy(), bf16, equal_nan=True)
    assert found["Q8_0.weight"].shape == (3, 2 * 8 * 34)


def test_memory_is_torch_s_to_write_to_and_to_keep(path: Path) -> None:
    found = compat.load_file(path)["f32"]
    gc.collect()
    found += 1  # the other tensors and the weights are gone
    assert found.mean() > 1
    mapped = compat.load_file(path, access="mmap")["f32"]
    assert mappings(path) == 1
    assert torch.equal(mapped + 1, found)


def test_devices_of_torch(path: Path) -> None:
    here = compat.load_file(path)
    for device in ("cpu", torch.device("cpu"), None):
        for name, tensor in compat.load_file(path, device=device).items():
            assert torch.equal(tensor, here[name]) or raw(tensor) == raw(here[name])
    meta = compat.load_file(path, device="meta")
    assert meta["f32"].device.type == "meta"
    assert meta["f32"].shape == here["f32"].shape
    with pytest.raises(loader.DeviceUnavailableError, match="foo"):
        compat.load_file(path, device="foo")
    if not torch.cuda.is_available():
        with pytest.raises(loader.DeviceUnavailableError, match="torch:cuda:1"):
            compat.load_file(path, device=1)


def test_a_tensor_that_is_not_torch_s(path: Path) -> None:
    opencl = pytest.importorskip("pyopencl", reason="pyopencl isn't installed")
    try:
        opencl.get_platforms()
    except opencl.Error as error:
        pytest.skip(f"there is no OpenCL device: {error}")
    elsewhere = pytest.raises(TypeError, match="opencl:0, not on a device of torch")
    with loader.load(path, device="opencl:0", names=["f32"]) as weights, elsewhere:
        compat.as_torch(weights["f32"])


def reference(path: Path, names: dict[str, str] | None) -> dict[str, bytes]:
    """What a server's own loop over gguf-py's reader gives: the names, and the bytes or type."""
    found: dict[str, bytes] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if names is not None and tensor.name not in names:
            continue
        name = tensor.name if names is None else names[tensor.name]
        if tensor.tensor_type.name in QUANTISED:
            found[name.replace("weight", "qweight_type")] = bytes([tensor.tensor_type])
            name = name.replace("weight", "qweight")
        found[name] = tensor.data.tobytes()
    return found


@pytest.mark.parametrize("mapped", [False, True])
def test_pairs_for_inference_servers(path: Path, mapped: bool) -> None:
    names = {
        "Q4_0.weight": "model.layers.0.weights.weight", "f32": "model.norm.weight",
        "none.weight": "model.nothing.weight", "BF16.weight": "lm_head.weight",
        "Q8_0.weight": "plain", "Q6_K.weight": "a.weight_v",
    }  # fmt: skip
    pairs = list(compat.gguf_quant_weights_iterator(path, names if mapped else None))
    found = dict(pairs)
    expected = reference(path, names if mapped else None)
    if mapped:  # only the ending of a name is changed
        expected["model.layers.0.weights.qweight"] = expected.pop("model.layers.0.qweights.qweight")
        kind = expected.pop("model.layers.0.qweight_types.qweight_type")
        expected["model.layers.0.weights.qweight_type"] = kind
        expected["plain.qweight_type"] = bytes([gguf.GGMLQuantizationType.Q8_0])
        expected["plain.qweight"] = expected.pop("plain")
    assert len(pairs) == len(found)
    assert set(found) == set(expected)
    for name, tensor in found.items():
        if "qweight_type" in name:
            assert (tensor.dim(), bytes([int(tensor)])) == (0, expected[name])
        else:
            assert raw(tensor) == expected[name]
    kinds = ["qweight_type" in name for name in found]
    assert kinds == sorted(kinds, reverse=True), "all types come before the first tensor"
    with pytest.raises(TypeError, match="gguf_to_hf_name_map"):
        next(compat.gguf_quant_weights_iterator(path, names=["f32"]))


def test_the_environment_is_higher_than_the_default(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loader")
    monkeypatch.delenv("GGUF_DIO_ACCESS", raising=False)
    compat.load_file(path)
    assert caplog.messages[-1].endswith(("access direct", "access buffered"))
    monkeypatch.setenv("GGUF_DIO_ACCESS", "buffered")
    compat.load_file(path)
    assert caplog.messages[-1].endswith("access buffered")
    compat.load_file(path, access="mmap")
    assert caplog.messages[-1].endswith("access mmap")
    caplog.clear()
    with compat.safe_open(path) as file:
        assert file._model.files[0].access == "buffered"
        for name in file.keys():  # noqa: SIM118 - no mapping
            file.get_tensor(name)
    assert not caplog.messages, "a line for each tensor is too much"


def test_an_empty_map_gives_nothing(path: Path) -> None:
    assert list(compat.gguf_quant_weights_iterator(path, {})) == []


def test_leaving_the_pairs_early(path: Path, nothing_left: Callable[[], None]) -> None:
    pairs = compat.gguf_quant_weights_iterator(path, memory_limit=1 << 20)
    for _ in range(6):
        next(pairs)
    pairs.close()
    nothing_left()


def test_safe_open(path: Path, nothing_left: Callable[[], None]) -> None:
    whole = compat.load_file(path)
    with compat.safe_open(path, framework="pt", device="cpu") as file:
        assert file.keys() == file.offset_keys() == list(whole)
        assert file.metadata()["general.architecture"] == "llama"
        assert file.metadata()["one.UINT8"] == "200"
        assert "array.UINT8" not in file.metadata()
        for name, tensor in whole.items():
            assert raw(file.get_tensor(name)) == raw(tensor)
        part = file.get_slice("f32")
        assert (part.get_shape(), part.get_dtype()) == ([2, 3, 4], "F32")
        for index in (
            0, -1, slice(1, 2), slice(None), slice(None, None, 2), slice(2, 1), (0, 1), (1, ..., 2),
            (slice(0, 1), slice(1, 3)), ..., (..., 0), None, [1, 0], (), (0, slice(None), 1),
        ):  # fmt: skip
            expected = whole["f32"][index]
            assert torch.equal(part[index], expected), index
            assert part[index].shape == expected.shape
        assert raw(file.get_slice("Q8_0.weight")[1:3]) == raw(whole["Q8_0.weight"][1:3])
        for name, tensor in whole.items():
            assert file.get_slice(name).get_shape() == list(tensor.shape)
        with pytest.raises(IndexError, match=r"2 is outside of tensor 'f32', \[2, 3, 4\]"):
            part[2]
        assert part[True].shape == whole["f32"][True].shape
        with pytest.raises(ValueError, match="only positive"):
            part[::-1]
        for read in (file.get_tensor, file.get_slice):
            with pytest.raises(ValueError, match="did you mean 'f32'"):
                read("f23")
    with pytest.raises(ValueError, match="closed"):
        file.get_tensor("f32")
    with pytest.raises(ValueError, match=r"loader\.open gives numpy"):
        compat.safe_open(path, framework="np")
    del whole
    nothing_left()


def test_slices_read_only_their_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    read_rows = loader.Model.read_rows

    def counted(self: loader.Model, name: str, start: int, stop: int, **options: Any) -> Any:
        asked.append((start, stop))
        return read_rows(self, name, start, stop, **options)

    monkeypatch.setattr(loader.Model, "read_rows", counted)
    with compat.safe_open(path) as file:
        part = file.get_slice("f32")
        _ = part[1], part[0:1, 2], part[-1:]
    assert asked == [(1, 2), (0, 1), (1, 2)]


def test_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import loader\n"
        "try:\n    import loader.compat.torch\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'gguf-dio[torch]'" in done.stdout


def test_the_real_model(gemma: Path) -> None:
    found = compat.load_file(gemma)
    with loader.open(gemma) as model:
        assert {name: raw(tensor) for name, tensor in found.items()} == content(model.load())
    streamed = dict(compat.gguf_quant_weights_iterator(gemma))
    assert raw(streamed["token_embd.qweight"]) == raw(found["token_embd.weight"])
    assert int(streamed["token_embd.qweight_type"]) == gguf.GGMLQuantizationType.Q8_0
