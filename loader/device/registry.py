"""Devices by name."""

from __future__ import annotations

import re

from loader.device.base import Device
from loader.device.host import HostDevice
from loader.errors import DeviceUnavailableError

HOST = "cpu"
_FORMS = "cpu, cuda:N, opencl:N or torch:DEVICE (such as torch:cuda:0)"


def canonical_name(name: str) -> str:
    """The name of a device as it is used here: llama.cpp's "CUDA0", "GPUOpenCL" and "CPU" are
    cuda:0, opencl:0 and cpu, a missing number is 0. ValueError for what is no name of a device."""
    if name.startswith("torch:") and len(name) > len("torch:"):
        return name
    match = re.fullmatch(r"(cpu|cuda|(?:gpu)?opencl)(?::?([0-9]{1,4}))?", name.lower())
    if match is None or (match[1] == HOST and match[2] is not None):
        raise ValueError(f"unknown device {name!r}; a device is {_FORMS}")
    return HOST if match[1] == HOST else f"{match[1].removeprefix('gpu')}:{int(match[2] or 0)}"


def open_device(name: str) -> Device:
    """Opens a device. ValueError for what is no name of one, DeviceUnavailableError, which says
    what to install, where its package, its library or the device itself isn't there."""
    name = canonical_name(name)
    kind, _, rest = name.partition(":")
    try:
        # Packages of devices are imported when a device is asked for, and not before.
        if kind == "cuda":
            from loader.device.cuda import CudaDevice

            return CudaDevice(int(rest))
        if kind == "opencl":
            from loader.device.opencl import OpenCLDevice

            return OpenCLDevice(int(rest))
        if kind == "torch":
            from loader.device.torch import TorchDevice

            return TorchDevice(rest)
    except OSError as error:  # a library that can't be loaded
        raise DeviceUnavailableError(f"device {name!r} can't be opened: {error}") from None
    return HostDevice()
