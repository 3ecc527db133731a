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
    """Devices with memory of their own, under llama.cpp's names (CUDA0, ...).

    The same card is there once: CUDA's devices, or, where there are none, those of
    OpenCL. What shares the host's memory isn't a device of its own.
    """
    return list(_devices("cuda", "cuda.bindings", "CUDA")) or list(
        _devices("opencl", "pyopencl", "GPUOpenCL")
    )


def _devices(kind: str, package: str, name: str) -> Iterator[DeviceMemory]:
    if not _is_installed(package):
        return
    for number in range(MOST_DEVICES):
        try:
            device: Device = open_device(f"{kind}:{number}")
        except DeviceError:  # there are no more
            return
        if not device.shares_host:
            memory = device.memory()
            yield DeviceMemory(f"{name}{number}", memory.free, memory.total)
        device.close()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
