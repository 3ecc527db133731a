"""Builds, loads and controls the fake CUDA driver of tests/native/fake_cuda.c.

`cuda.bindings` loads libcuda.so.1 by that name at its first call. A library of that soname that
the process already has is what it gets, so a FakeCuda has to exist before the first call; another
process can be given the library's folder in LD_LIBRARY_PATH instead.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SONAME = "libcuda.so.1"
_SOURCE = Path(__file__).parent / "native" / "fake_cuda.c"
_NONE = 2**64 - 1  # what the library answers for a name it doesn't know


class NoCompilerError(Exception):
    """There is no C compiler to build the library with."""


def build(folder: Path, *flags: str) -> Path:
    """Compiles the library into a folder, with further flags for the compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError("the fake CUDA driver needs a C compiler named cc")
    path = folder / SONAME
    command = [compiler, "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared"]
    command += ["-pthread", f"-Wl,-soname,{SONAME}", *flags, "-o", str(path), str(_SOURCE)]
    subprocess.run(command, check=True)
    return path


def _load(path: Path) -> ctypes.CDLL:
    """The process's libcuda.so.1, or the one at `path` if it has none yet."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class FakeCuda:
    """The fake driver of this process.

    A process has one, whatever the path: more objects are the same driver, as `cuda.bindings`
    never changes the library it has found. Names of functions are without a version
    ("cuMemAlloc").
    """

    def __init__(self, path: Path) -> None:
        library = _load(path)
        if not hasattr(library, "fake_reset"):
            raise RuntimeError(f"the process has loaded a real {SONAME} already")
        u64, name = ctypes.c_uint64, ctypes.c_char_p
        library.fake_device.argtypes = [ctypes.c_int, u64, u64, ctypes.c_int]
        library.fake_device_count.argtypes = [ctypes.c_int]
        library.fake_speed.argtypes = [u64]
        library.fake_speed.restype = None
        library.fake_fail.argtypes = [name, u64, u64, ctypes.c_int]
        library.fake_calls.argtypes = library.fake_live.argtypes = [name]
        library.fake_calls.restype = library.fake_live.restype = u64
        library.fake_misuse.restype = name
        self._library = library

    def reset(self) -> None:
        """Forgets failures, counts and settings; an error while resources are alive."""
        if self._library.fake_reset() != 0:
            raise RuntimeError(f"there are resources alive: {self.alive()}")

    def alive(self) -> dict[str, int]:
        """What is alive now, without zeros."""
        kinds = ("contexts", "allocations", "registrations", "streams", "events", "threads")
        return {kind: n for kind in kinds if (n := self.live(kind)) != 0}

    def device(
        self, index: int, *, total: int, reserved: int = 0, integrated: bool = False
    ) -> None:
        """Sets a device's memory (0: unknown, without limit) and what others use of it."""
        if self._library.fake_device(index, total, reserved, integrated) != 0:
            raise ValueError(f"no such device: {index}")

    def device_count(self, n: int) -> None:
        """From now on there are `n` devices, at most 8."""
        if self._library.fake_device_count(n) != 0:
            raise ValueError(f"cannot have {n} devices")

    def speed(self, bytes_per_second: int) -> None:
        """Of each stream, also for what it is doing; 0 is no limit."""
        self._library.fake_speed(bytes_per_second)

    def fail(self, name: str, error: int, nth: int = 1, times: int = 1 << 62) -> None:
        """The nth call from now on and those after it, `times` in all, fail."""
        if self._library.fake_fail(name.encode(), nth, times, int(error)) != 0:
            raise ValueError(f"no such function or too many rules: {name}")

    def calls(self, name: str) -> int:
        """Calls of a function since the reset, failed ones included."""
        return self._known(name, self._library.fake_calls(name.encode()))

    def live(self, what: str) -> int:
        """How much is alive of: contexts, allocations, bytes, registrations,
        registered_bytes, streams, events, threads; and since the reset:
        peak_registered_bytes, misuse."""
        return self._known(what, self._library.fake_live(what.encode()))

    def misuse(self) -> str:
        """The last misuse since the reset, or ""."""
        text: bytes = self._library.fake_misuse()
        return text.decode()

    @staticmethod
    def _known(name: str, value: int) -> int:
        if value == _NONE:
            raise ValueError(f"no such name: {name}")
        return value
