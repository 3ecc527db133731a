"""Loads a model once with one loader, in a process of its own, and prints what that cost.

Usage: python worker.py LOADER MODEL. Prints a JSON object: seconds and CPU seconds of
the load (imports excluded), peak (bytes that the process's memory grew to at the most).
Exit status 77 when the loader isn't installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from loader.device.host import peak_memory

MISSING = 77
Load = Callable[[], Any]


def gguf_dio(path: str, access: str) -> Load:
    import loader

    return lambda: loader.load(path, access=access)  # type: ignore[arg-type]  # one of the modes


def llama_cpp(path: str, mode: int) -> Load:
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.load_mode = mode
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # no repacking: only the load

    def load() -> Any:
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise SystemExit("llama.cpp did not load the model")
        return model, callback

    return load


def runai(path: str, strategy: str) -> Load:
    os.environ["RUNAI_STREAMER_FS_STRATEGY"] = strategy
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
    os.environ["RUNAI_STREAMER_LOG_LEVEL"] = "ERROR"
    from runai_model_streamer import FileStreamer
    from runai_model_streamer.file_streamer.requests_iterator import FileChunks

    import loader

    with loader.open(path, access="buffered") as model:
        infos = sorted(model.tensors.values(), key=lambda info: info.offset)
    chunks = FileChunks(0, path, [i.offset for i in infos], [i.nbytes or 0 for i in infos])

    def load() -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([chunks], owned=False)
            return [tensor for _, _, tensor in streamer.get_chunks()]

    return load


LOADERS: dict[str, Callable[[str], Load]] = {
    "gguf-dio direct": lambda path: gguf_dio(path, "direct"),
    "gguf-dio buffered": lambda path: gguf_dio(path, "buffered"),
    "gguf-dio mmap": lambda path: gguf_dio(path, "mmap"),
    "llama.cpp direct": lambda path: llama_cpp(path, 4),
    "llama.cpp buffered": lambda path: llama_cpp(path, 0),
    "llama.cpp mmap": lambda path: llama_cpp(path, 1),
    "runai io_uring_direct": lambda path: runai(path, "io_uring_direct"),
}


def main() -> None:
    name, path = sys.argv[1:]
    try:
        load = LOADERS[name](path)
    except ImportError as error:
        print(error)
        sys.exit(MISSING)
    before = peak_memory()
    cpu, started = time.process_time(), time.perf_counter()
    kept = load()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak_memory() - before}), flush=True)
    del kept
    os._exit(0)  # without the peers' ways of ending


if __name__ == "__main__":
    main()
