"""The option `into`: memory that is given for a load, or used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loader._ffi import Memory
from loader.errors import quoted
from loader.gguf.tensors import TensorInfo
from loader.io.ranges import place
from loader.placement import DeviceArena, Placement
from loader.planning import OpenModel, Part, plan
from loader.results import host_views
from loader.tensor import Buffers, Weights


@dataclass(frozen=True)
class Destinations:
    """host, devices: memory by name of tensor; arena, arenas: memory that is used again as a
    whole, on the host and on devices."""

    host: Mapping[str, object]
    devices: Mapping[str, object]
    arena: Memory | None
    arenas: Sequence[DeviceArena] = ()


def destinations(placement: Placement, into: object) -> Destinations:
    """Reads the option. TypeError or ValueError for what can't be used."""
    host = {info.name for info in placement.host}
    elsewhere = {info.name for _, tensors in placement.devices for info in tensors}
    if into is None:
        return Destinations({}, {}, None)
    if isinstance(into, Weights):
        if into.arena is None and not into.devices:
            raise ValueError(
                "into: these weights have no memory of their own; they were mapped, or read to "
                "other memory"
            )
        return Destinations({}, {}, into.arena if host else None, into.devices)
    if isinstance(into, Buffers) and not elsewhere:
        sizes = {name: array.nbytes for name, array in into.items()}
        if sizes == {info.name: info.nbytes for info in placement.host}:
            return Destinations({}, {}, into.arena)
    if not isinstance(into, Mapping):
        raise TypeError(f"into must be a mapping from name to buffer, or Weights, not {into!r}")
    if strange := [name for name in into if name not in host and name not in elsewhere]:
        raise ValueError(f"into: tensor {quoted(str(strange[0]))} is not loaded")
    return Destinations(
        {name: into[name] for name in into if name in host},
        {name: into[name] for name in into if name in elsewhere},
        None,
    )


def fits(parts: Sequence[Part], arena: Memory, into: object) -> bool:
    """Whether all that is planned is read to the arena, and, for buffers, to their places."""
    if any(part.source.mapping is not None and part.extents for part in parts):
        return False
    if not isinstance(into, Buffers):
        return True
    expected = {name: array.ctypes.data for name, array in into.items() if array.size}
    return expected == _addresses(parts, arena)


def places(
    model: OpenModel, wanted: Sequence[TensorInfo], into: object, arena: Memory
) -> Mapping[str, object]:
    """Where the tensors go in memory that can't be read to as a whole, by name."""
    if isinstance(into, Buffers):
        return into
    parts, size = plan(model, wanted, mapped=False)
    check_size(size, arena)
    views = host_views(parts, arena)
    return {name: tensor.numpy() for name, tensor in views}


def check_size(size: int, arena: Memory) -> None:
    if arena.nbytes < size:
        raise ValueError(f"into: {size} bytes are needed, the weights' memory has {arena.nbytes}")


def _addresses(parts: Iterable[Part], arena: Memory) -> dict[str, int]:
    return {
        info.name: arena.address + place(part.extents, info.offset)
        for part in parts
        if part.source.mapping is None
        for info in part.tensors
        if info.nbytes
    }
