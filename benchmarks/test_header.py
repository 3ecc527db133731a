"""Opening a model: ours, gguf-py's reader and llama.cpp's C parser, in alternating rounds.

The time is CPU time (user and system) of the process, import excluded; the
header is in the page cache for those who read through it. Run one after the
other in each round, so that a change of the machine meets all of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gguf
import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

import loader
from loader.compat.gguf_reader import GGUFReader


def open_with_loader(path: Path) -> int:
    with loader.open(path) as model:
        return len(model.tensors)


def open_with_compat(path: Path) -> int:
    """Through the face of gguf-py's reader, its fields and tensors touched."""
    reader = GGUFReader(path)
    assert reader.fields
    return len(reader.tensors)


def open_with_gguf_py(path: Path) -> int:
    return len(gguf.GGUFReader(path).tensors)


def llama_cpp_parser() -> Callable[[Path], int] | None:
    """gguf_init_from_file of llama-cpp-python's libraries, where that is installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))

    class Params(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]

    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_get_n_tensors.argtypes = [ctypes.c_void_p]
    library.gguf_get_n_tensors.restype = ctypes.c_int64
    library.gguf_free.argtypes = [ctypes.c_void_p]

    def parse(path: Path) -> int:
        context = library.gguf_init_from_file(str(path).encode(), Params(True, None))
        count = int(library.gguf_get_n_tensors(context))
        library.gguf_free(context)
        return count

    return parse


def cpu_seconds(call: Callable[[Path], int], path: Path) -> float:
    started = time.process_time()
    call(path)
    return time.process_time() - started


def test_open_a_large_vocabulary(gemma: Path, benchmark: BenchmarkFixture) -> None:
    """Medians of 5 alternating rounds (of one for gguf-py) in extra_info, in milliseconds."""
    peers = {
        "gguf-dio": open_with_loader,
        "gguf-dio as GGUFReader": open_with_compat,
        "llama.cpp": llama_cpp_parser(),
    }
    calls = {name: call for name, call in peers.items() if call is not None}
    for call in calls.values():
        assert call(gemma) == 236
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            rounds[name].append(cpu_seconds(call, gemma))
    cpu = {name: round(1000 * median(times), 2) for name, times in rounds.items()}
    cpu["gguf-py"] = round(1000 * cpu_seconds(open_with_gguf_py, gemma), 2)
    benchmark.extra_info["cpu_milliseconds"] = cpu
    benchmark.extra_info["missing"] = [name for name, call in peers.items() if call is None]
    print(f"\nCPU milliseconds to open {gemma.name}: {cpu}")
    benchmark(open_with_loader, gemma)


def test_open_a_thousand_tensors(tmp_path: Path, benchmark: BenchmarkFixture) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test")
    for i in range(1000):
        writer.add_tensor(f"blk.{i // 10}.part{i % 10}.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_with_loader(path) == 1000
    times = [cpu_seconds(open_with_loader, path) for _ in range(20)]
    benchmark.extra_info["cpu_milliseconds"] = round(1000 * median(times), 2)
    print(f"\nCPU milliseconds to open 1000 tensors: {1000 * median(times):.2f}")
    benchmark(open_with_loader, path)
