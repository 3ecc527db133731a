"""Memory lives as long as somebody looks at it, and no longer."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.errors import FormatError, LoadCancelled, LoaderError, TensorDataError
from loader.options import AccessRequest
from tests.build import T1, fixed, info, model, pad, write
from tests.conftest import Faults, mappings, memory

SIZE = 32 << 20
OWNED: list[AccessRequest] = ["direct", "buffered"]


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return model(
        direct_folder / "m.gguf",
        {"a": np.full(SIZE // 2, 1, np.int8), "b": np.full(SIZE // 2, 2, np.int8)},
    )


@pytest.mark.parametrize("access", OWNED)
def test_tensors_of_an_arena_outlive_everything(path: Path, access: AccessRequest) -> None:
    gc.collect()
    before = memory()
    with loader.open(path, access=access) as opened:
        weights = opened.load()
        tensor = weights["b"]
        array = weights["a"].numpy()
        weights.close()
    del opened, weights
    gc.collect()
    assert memory() - before >= SIZE, "kept by the tensor and the array"
    assert (array == 1).all()
    assert (tensor.numpy() == 2).all()
    view = array[100:200]
    del array, tensor
    gc.collect()
    assert (view == 1).all()
    del view
    gc.collect()
    assert memory() - before < SIZE - (4 << 20), "and gone with the last of them"


def test_tensors_of_a_mapping_outlive_everything(path: Path) -> None:
    with loader.open(path, access="mmap") as opened:
        weights = opened.load()
        tensor = weights["b"]
        array = np.asarray(weights["a"])
        weights.close()
    path.unlink()
    del opened, weights
    gc.collect()
    assert mappings(path) == 1
    assert (array == 1).all()
    assert (tensor.numpy() == 2).all()
    del array, tensor
    gc.collect()
    assert mappings(path) == 0


def test_closed_weights_say_so(path: Path) -> None:
    with loader.load(path) as weights:
        assert len(weights) == 2
    for use in (lambda: weights["a"], lambda: len(weights), lambda: list(weights)):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert weights.report.tensors == 2
    weights.close()


def test_metadata_outlives_the_model(direct_folder: Path) -> None:
    path = model(direct_folder / "m.gguf", {"a": np.zeros(8, np.float32)}, tokens=1000)
    with loader.open(path) as opened:
        metadata, tensors = opened.metadata, opened.tensors
    path.unlink()
    del opened
    gc.collect()
    assert list(metadata["tokenizer.ggml.tokens"]) == [f"token{i}" for i in range(1000)]
    assert tensors["a"].shape == (8,)


def test_a_closed_model_has_no_descriptor(path: Path, nothing_left: Callable[[], None]) -> None:
    for access in ("direct", "mmap", "buffered"):
        opened = loader.open(path, access=access)
        weights = opened.load()
        opened.close()
        nothing_left()
        del weights


BROKEN = {
    "empty": b"",
    "html": b"<!DOCTYPE html>",
    "cut": T1[:-1],
    "overlap": pad(fixed(3, 2, 0) + info("a", [8], 0, 0) + info("b", [8], 0, 0)) + bytes(32),
    "twice": pad(fixed(3, 2, 0) + info("a", [8], 0, 0) + info("a", [8], 0, 32)) + bytes(64),
    "count": fixed(3, 1 << 62, 0) + bytes(64),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("access", ["auto", "direct", "mmap", "buffered"])
def test_an_open_that_fails_leaves_nothing(
    tmp_path: Path, name: str, access: AccessRequest, nothing_left: Callable[[], None]
) -> None:
    """Although the error, and with it its traceback, is kept."""
    path = write(tmp_path / "m.gguf", BROKEN[name])
    before = memory()
    with pytest.raises(FormatError) as caught:
        loader.open(path, access=access)
    nothing_left()
    assert mappings(path) == 0
    assert memory() - before < 1 << 20
    assert caught.value.__traceback__ is not None


def cancel(done: int, _: int) -> bool:
    return done == 0


@pytest.mark.parametrize("access", ["direct", "mmap", "buffered"])
@pytest.mark.parametrize("how", ["error", "cancel", "data"])
def test_a_load_that_fails_leaves_nothing(
    direct_folder: Path,
    faults: Faults,
    access: AccessRequest,
    how: str,
    nothing_left: Callable[[], None],
) -> None:
    path = model(direct_folder / "m.gguf", {"a": np.full(SIZE // 4, np.nan, np.float32)})
    before = memory()
    with loader.open(path, access=access) as opened:
        if how == "error":
            faults.fail("pread_direct", errno.EIO, nth=3)
            faults.fail("pread", errno.EIO, nth=3)
            faults.fail("uring_result", errno.EIO, nth=3)
            faults.fail("madvise", errno.EFAULT, nth=1)
        with pytest.raises(LoaderError) as caught:
            opened.load(check_tensors=True, progress=cancel if how == "cancel" else None)
        assert memory() - before < 24 << 20, "the weights are gone, the header's memory is not"
    nothing_left()
    assert mappings(path) == 0
    kinds = {"cancel": LoadCancelled, "data": TensorDataError, "error": loader.ReadError}
    assert isinstance(caught.value, kinds[how])


def test_an_error_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    """Frames are cleared up to the call, not those of an error that is being handled."""
    path = write(tmp_path / "m.gguf", b"")

    def fail() -> None:
        precious = [1, 2, 3]
        raise RuntimeError(precious)

    try:
        fail()
    except RuntimeError as error:
        with pytest.raises(FormatError):
            loader.open(path)
        assert error.__traceback__ is not None
        assert error.__traceback__.tb_next is not None
        assert error.__traceback__.tb_next.tb_frame.f_locals["precious"] == [1, 2, 3]


def test_errors_of_a_callback_keep_what_is_the_callers(path: Path) -> None:
    """A context that goes round in a circle, and a generator that is suspended in a frame of it."""
    caught: list[ZeroDivisionError] = []

    def suspended() -> Iterator[str]:
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            caught.append(error)
        yield "a"
        yield "b"

    def fail(*_: int) -> None:
        precious = "kept"
        error, other = caught[0], ValueError(precious)
        error.__context__, other.__context__ = other, error
        raise error

    generator = suspended()
    next(generator)
    with pytest.raises(ZeroDivisionError) as found:
        loader.load(path, progress=fail)
    assert list(generator) == ["b"]
    frames = [entry.frame for entry in found.traceback if entry.frame.code.name == "fail"]
    assert frames[0].f_locals["precious"] == "kept"


def test_errors_of_a_callback_in_a_plain_script(path: Path, tmp_path: Path) -> None:
    """Its module has no package: __package__ is None there, as it never is under pytest."""
    script = tmp_path / "script.py"
    script.write_text(
        "import loader, sys\n"
        "def fail(*_):\n"
        "    raise ZeroDivisionError('mine')\n"
        "try:\n"
        "    loader.load(sys.argv[1], progress=fail)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, script, path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ZeroDivisionError mine\n"


def test_the_interpreter_shuts_down_with_live_tensors(path: Path) -> None:
    code = f"""
import loader
model = loader.open({str(path)!r})
weights = model.load()
array = loader.load({str(path)!r}, access="mmap")["a"].numpy()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""


def test_a_hundred_loads_leave_nothing(path: Path, nothing_left: Callable[[], None]) -> None:
    before = memory()
    for i in range(100):
        loader.load(path, access=("direct", "mmap", "buffered")[i % 3], names=["a"])
    gc.collect()
    nothing_left()
    assert mappings(path) == 0
    assert memory() - before < 4 << 20
