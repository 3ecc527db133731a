"""How much memory the host has left for a load."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

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
        _, controllers, name = line.split(":", 2)
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
