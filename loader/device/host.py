"""The host as a device, and how much memory it has left."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory, WritableBuffer
from loader.device.base import (
    Device,
    DeviceBuffer,
    Event,
    Over,
    PinnedMemory,
    fill_range,
    refuse_closed,
)
from loader.device.memory import DeviceMemory
from loader.io.arena import allocate_arena

logger = logging.getLogger("loader")

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without pushing others out, or None when it isn't known.

    The least of MemAvailable (proc(5)) and the room in each control group that
    the process is in: limit - usage + what can be reclaimed (cgroup v2: memory.max,
    memory.current, inactive_file of memory.stat; v1: the files of the memory
    controller). root: where to find /proc and /sys, for tests.
    """
    rooms = [room for room in _cgroup_rooms(root) if room is not None]
    meminfo = _fields(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        rooms.append(meminfo["MemAvailable:"] * 1024)
    return max(min(rooms), 0) if rooms else None


def peak_memory() -> int:
    """The most bytes of memory that the process ever held (VmHWM, proc(5))."""
    found = _fields(Path("/proc/self/status")).get("VmHWM:")
    if found is not None:
        return found * 1024
    # It counts the parent of a process that was forked, too.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory() -> int:
    """Bytes of memory that the host has (MemTotal, proc(5)); 0 when that isn't known."""
    return _fields(Path("/proc/meminfo")).get("MemTotal:", 0) * 1024


def usable_memory(name: str, free: int, total: int, *, shares_host: bool = False) -> DeviceMemory:
    """What can be used of the memory that a device reports.

    A device that reports 0 free of 0 can't tell: the host's memory stands in for
    it, with a warning. One that shares the host's memory reports too little,
    since the page cache counts as used: what the host has available counts.
    Free is never above total.
    """
    if free == 0 and total == 0:
        host = available_memory() or 0
        logger.warning("%s reports no memory; what the host has available is taken for it", name)
        return DeviceMemory(name, host, max(host, total_memory()))
    if shares_host:
        free = available_memory() or free
        total = max(total, free)
    return DeviceMemory(name, min(free, total), total)


class HostBuffer:
    """Memory of the host as a buffer."""

    memory: Memory | None = None

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.nbytes = data.nbytes
        self._data: npt.NDArray[np.uint8] | None = data

    @property
    def closed(self) -> bool:
        return self._data is None

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        refuse_closed(self, "the host")
        assert self._data is not None  # noqa: S101 - that was just seen
        return self._data

    @property
    def span(self) -> tuple[int, int, int]:
        address = self.data.ctypes.data
        return 0, address, address + self.nbytes

    def array(self, position: int, dtype: npt.DTypeLike, shape: tuple[int, ...], kind: int) -> Any:
        del kind
        return np.ndarray(shape, dtype, buffer=self.data, offset=position)

    def read(self, position: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.array(self.data[position : position + nbytes])

    def close(self) -> None:
        self._data = None


class HostDevice(Device):
    """The host. Loads to it don't go through here, they need no copy; see `Model.load`."""

    name = "cpu"
    largest_buffer: int | None = None
    shares_host = True

    def memory(self) -> DeviceMemory:
        total = total_memory()
        return DeviceMemory(self.name, min(available_memory() or 0, total), total)

    def allocate(self, nbytes: int) -> HostBuffer:
        return HostBuffer(np.asarray(allocate_arena(max(nbytes, 1)))[:nbytes])

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        return PinnedMemory(allocate_arena(nbytes), None, "the host copies from any memory")

    def copy_async(
        self, buffer: DeviceBuffer, position: int, source: npt.NDArray[np.uint8]
    ) -> Event:
        _host(buffer).data[position : position + source.nbytes] = source
        return Over()

    def synchronize(self) -> None:
        """Copies are over when they have begun."""

    def adopt(self, owner: object) -> HostBuffer:
        WritableBuffer(owner)
        return HostBuffer(np.frombuffer(owner, np.uint8))  # type: ignore[call-overload]  # it has a buffer

    def fill(
        self, buffer: DeviceBuffer, value: float, position: int = 0, count: int | None = None
    ) -> None:
        position, count = fill_range(buffer, position, count)
        np.ndarray(count, np.float32, buffer=_host(buffer).data, offset=position)[...] = value

    def offloads(self, op: str, shape: Sequence[int]) -> bool:
        """Never: what is on the host is computed on the host."""
        del op, shape
        return False

    def close(self) -> None:
        """There is nothing to let go of."""


def _host(buffer: DeviceBuffer) -> HostBuffer:
    if not isinstance(buffer, HostBuffer):
        raise TypeError(f"{buffer!r} is no memory of the host")
    return buffer


def _fields(path: Path) -> dict[str, int]:
    """A file of lines "name number ..." as a mapping; empty when it can't be read."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split()[:2] for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """A file of one number; None for "max" and for a file that can't be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_rooms(root: Path) -> Iterator[int | None]:
    """The room in each control group of the process and in the groups around it."""
    base = root / _CGROUPS.relative_to("/")
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        group = name.strip("/")
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            top = base
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = base / "memory"
        else:
            continue
        folder = top / group
        for here in (folder, *folder.parents):
            if not here.is_relative_to(top):
                break
            yield _room(here, *names)


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is None or usage is None:
        return None
    reclaimable = _fields(folder / "memory.stat").get(reclaimable_name, 0)
    return limit - usage + reclaimable
