"""The devices that this machine has, and the memory of its host."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from loader.device.base import Device
from loader.device.host import available_memory, total_memory
from loader.device.memory import DeviceMemory
from loader.device.registry import open_device
from loader.errors import DeviceError
from loader.fit.planner import MOST_DEVICES
from loader.fit.result import HOST_NAME


def host_memory() -> DeviceMemory:
    """The host's: what is available (also to the control group), of what there is."""
    total = total_memory()
    return DeviceMemory(HOST_NAME, min(available_memory() or 0, total), total)


def machine_devices() -> list[DeviceMemory]:
    """The graphics processors, under llama.cpp's names (CUDA0, ...).

    The same card is there once: CUDA's devices, or, where there are none, those of
    OpenCL. One that shares the host's memory counts only where there is none with
    memory of its own, as in llama.cpp, and then only the first: they have one memory.
    """
    found = list(_devices("cuda", "cuda.bindings", "CUDA{}")) or list(
        _devices("opencl", "pyopencl", "GPUOpenCL{}")
    )
    own = [memory for memory, shares_host in found if not shares_host]
    return own or [memory for memory, _ in found[:1]]


def _devices(kind: str, package: str, name: str) -> Iterator[tuple[DeviceMemory, bool]]:
    """Memory, and whether it is the host's."""
    if not _is_installed(package):
        return
    for number in range(MOST_DEVICES):
        try:
            device: Device = open_device(f"{kind}:{number}")
        except DeviceError:  # there are no more
            return
        if getattr(device, "is_gpu", True):  # OpenCL has processors among its devices
            memory = device.memory()
            yield DeviceMemory(name.format(number), memory.free, memory.total), device.shares_host
        device.close()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
