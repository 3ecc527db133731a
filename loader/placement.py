"""Which tensors go to which device, and where in its memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loader.device.base import Device, DeviceBuffer, Event
from loader.device.host import HostDevice
from loader.device.registry import HOST, canonical_name, open_device
from loader.device.staging import Spot, lay_out_buffers
from loader.errors import DeviceMemoryError, quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import array_layout
from loader.planning import OpenModel, Part, source_for_copies


class Overrides:
    """Devices by patterns on names: the first one that is found in a name counts (llama.cpp's
    --override-tensor)."""

    def __init__(self, rules: Sequence[tuple[re.Pattern[str], str]], default: str) -> None:
        self._rules = tuple(rules)
        self._default = default

    def __call__(self, info: TensorInfo) -> str:
        found = (device for pattern, device in self._rules if pattern.search(info.name))
        return next(found, self._default)


def parse_overrides(text: str, default: str = HOST) -> Overrides:
    """Overrides from "PATTERN=DEVICE,...", each pattern a regular expression.

    default: for names in which no pattern is found. ValueError that shows what
    can't be understood.
    """
    rules = []
    for part in text.split(","):
        pattern, found, device = part.partition("=")
        if not found or not pattern:
            raise ValueError(f"override {part!r} is not PATTERN=DEVICE")
        try:
            rules.append((re.compile(pattern), canonical_name(device)))
        except re.error as error:
            raise ValueError(f"override {part!r}: the pattern is wrong: {error}") from None
    return Overrides(rules, canonical_name(default))


@dataclass
class Placement:
    """host: tensors for the host; devices: those for others, by device in order of first use."""

    host: list[TensorInfo] = field(default_factory=list)
    devices: list[tuple[Device, list[TensorInfo]]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of all devices that have a part."""
        host = [HOST] if self.host or not self.devices else []
        return host + [device.name for device, _ in self.devices]

    def add(self, device: Device) -> list[TensorInfo]:
        tensors: list[TensorInfo] = []
        self.devices.append((device, tensors))
        return tensors

    @cached_property
    def _where(self) -> dict[str, Device]:
        return {info.name: device for device, infos in self.devices for info in infos}

    def part(self, tensors: Sequence[TensorInfo]) -> Placement:
        """The same for some of the tensors."""
        result = Placement()
        groups: dict[int, list[TensorInfo]] = {}
        for info in tensors:
            device = self._where.get(info.name)
            if device is None:
                result.host.append(info)
                continue
            if id(device) not in groups:
                groups[id(device)] = result.add(device)
            groups[id(device)].append(info)
        return result


def place(wanted: Sequence[TensorInfo], request: object, known: Mapping[str, Device]) -> Placement:
    """Resolves the option `device` for the tensors that are wanted.

    known: devices by name that are open already; others that are named are opened.
    """
    placement = Placement()
    groups: dict[str | int, list[TensorInfo]] = {HOST: placement.host}

    def group(chosen: object) -> list[TensorInfo]:
        key: str | int
        if isinstance(chosen, str):
            key = canonical_name(chosen)
        elif isinstance(chosen, HostDevice):
            key = HOST
        elif isinstance(chosen, Device):
            key = id(chosen)
        else:
            raise TypeError(f"a device is a name or a Device, not {chosen!r}")
        if key not in groups:
            device = known.get(key) if isinstance(key, str) else chosen
            if device is None:
                device = open_device(str(key))
            groups[key] = placement.add(device)  # type: ignore[arg-type]  # a name or a Device
        return groups[key]

    choose = _chooser(request)
    if choose is None:
        group(request).extend(wanted)
    else:
        for info in wanted:
            group(choose(info)).append(info)
    return placement


def _chooser(request: object) -> Callable[[TensorInfo], object] | None:
    """How a device is chosen for each tensor; None when all go to the same."""
    if isinstance(request, Mapping):
        return lambda info: request.get(info.name, HOST)
    if isinstance(request, str):
        return parse_overrides(request) if "=" in request else None
    return None if isinstance(request, Device) else request  # type: ignore[return-value]  # LoadOptions looked


# --- Where in the memory of the devices -------------------------------------------


@dataclass
class DeviceArena:
    """Memory of a device for tensors of a load. buffer: None until it is allocated."""

    device: Device
    nbytes: int
    buffer: DeviceBuffer | None = None

    def copy(self, position: int, source: npt.NDArray[np.uint8]) -> Event:
        """Begins to copy to `position` of it."""
        return self.device.copy_async(self.memory, position, source)

    @property
    def memory(self) -> DeviceBuffer:
        if self.buffer is None:
            raise RuntimeError(f"the memory on {self.device.name} wasn't allocated")
        return self.buffer


@dataclass
class Spread:
    """The tensors of a load that go to devices: one part for each file, and the memory for them.
    The spots of the parts count the arenas. taken: memory of an earlier load among them."""

    parts: list[Part] = field(default_factory=list)
    arenas: list[DeviceArena] = field(default_factory=list)
    taken: list[DeviceArena] = field(default_factory=list)


def spread(
    model: OpenModel,
    placement: Placement,
    given: Mapping[str, object],
    earlier: Sequence[DeviceArena],
) -> Spread:
    """Where each tensor goes. given: memory of the caller's by name; earlier: memory that is used
    again, as far as it is of devices in the placement.

    ValueError or TypeError for memory that doesn't fit.
    """
    result = Spread()
    spots: dict[int, list[Spot]] = {}
    left = list(earlier)
    for device, tensors in placement.devices:
        owned = [info for info in tensors if info.name not in given]
        aligned = [(info, model.files[info.file].tensor_alignment) for info in owned]
        placed, sizes = lay_out_buffers(aligned, device.largest_buffer, device.name)
        first = len(result.arenas)
        # Devices refuse to allocate nothing: empty tensors get a byte.
        arenas = [DeviceArena(device, max(size, 1)) for size in sizes if placed]
        result.taken += _use_again(arenas, left)
        result.arenas += arenas
        for info, buffer, position in placed:
            spots.setdefault(info.file, []).append(Spot(info, first + buffer, position))
        for info in tensors:
            if info.name in given:
                spots.setdefault(info.file, []).append(Spot(info, len(result.arenas), 0))
                result.arenas.append(_adopt(device, info, given[info.name]))
    _refuse_overlaps(result.arenas)
    for number, found in sorted(spots.items()):
        source = source_for_copies(model.files[number].source)
        direct = source.decision.access == "direct"
        part = Part(number, source, [], (), [], buffered_only=not direct, spots=found)
        result.parts.append(part)
    return result


def _use_again(arenas: Sequence[DeviceArena], left: list[DeviceArena]) -> Iterator[DeviceArena]:
    """Takes memory of an earlier load for these arenas, where there is any of the device."""
    for arena in arenas:
        mine = next((old for old in left if old.device is arena.device), None)
        if mine is None:
            continue
        left.remove(mine)
        if mine.nbytes < arena.nbytes:
            raise ValueError(
                f"into: {arena.nbytes} bytes are needed on {arena.device.name}, the weights' "
                f"memory there has {mine.nbytes}"
            )
        arena.nbytes, arena.buffer = mine.nbytes, mine.buffer
        yield mine


def check_room(model: OpenModel, arenas: Sequence[DeviceArena]) -> int:
    """Whether what has to be allocated has room: DeviceMemoryError, with what is needed and what is
    free, where a device has too little. Returns the bytes that come out of the host's memory,
    which devices may share."""
    shared = 0
    needs: dict[int, int] = {}
    devices = {id(arena.device): arena.device for arena in arenas}
    for arena in arenas:
        if arena.buffer is None:
            needs[id(arena.device)] = needs.get(id(arena.device), 0) + arena.nbytes
    for key, needed in needs.items():
        device = devices[key]
        if device.shares_host:
            needed = shared = shared + needed
        free = device.memory().free
        if needed > free:
            raise DeviceMemoryError(
                f"{model.name}: {needed} bytes are needed on {device.name} and {free} are free; "
                "load fewer tensors (names=), or put some elsewhere (device= takes a mapping)",
                needed=needed,
                available=free,
            )
    return shared


def _refuse_overlaps(arenas: Sequence[DeviceArena]) -> None:
    """Memory of the caller's that two tensors would be written to."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for arena in arenas:
        if arena.buffer is not None and arena.nbytes:
            spans.setdefault(id(arena.device), []).append(arena.buffer.span)
    for found in spans.values():
        for (where, _, end), (other, begin, _) in pairwise(sorted(found)):
            if where == other and begin < end:
                raise ValueError("into: buffers of two tensors overlap on their device")


def _adopt(device: Device, info: TensorInfo, owner: object) -> DeviceArena:
    try:
        buffer = device.adopt(owner)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"into: tensor {quoted(info.name)} goes to {device.name}: {error}"
        ) from None
    if buffer.nbytes != info.nbytes:
        raise ValueError(
            f"into: tensor {quoted(info.name)} has {info.nbytes} bytes, its buffer {buffer.nbytes}"
        )
    itemsize = array_layout(info.ggml_type, info.shape)[0].itemsize
    if buffer.nbytes and buffer.span[1] % itemsize:
        raise ValueError(
            f"into: tensor {quoted(info.name)} has items of {itemsize} bytes, its buffer isn't "
            "aligned to that"
        )
    return DeviceArena(device, buffer.nbytes, buffer)
