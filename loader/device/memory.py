"""How much memory a device has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device in bytes: what is free of the total."""

    name: str
    free: int
    total: int
