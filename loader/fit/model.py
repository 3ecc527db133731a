"""Fits an open model to devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Any, Protocol

from loader.device.memory import DeviceMemory
from loader.device.registry import canonical_name
from loader.errors import FitError
from loader.fit.devices import host_memory, machine_devices
from loader.fit.memory import CACHE_TYPES, Cache, ModelFigures, Need
from loader.fit.planner import DEFAULT_MARGIN, DEFAULT_N_CTX_MIN, plan
from loader.fit.result import FitParams, FitResult
from loader.fit.shape import read_shape
from loader.gguf.metadata import Metadata
from loader.gguf.tensors import TensorInfo


class _File(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def access(self) -> str: ...


class FitModel(Protocol):
    """What is looked at of a loader.Model."""

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> Sequence[_File]: ...


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What a device has, in bytes, what is to stay free, and what it needs."""

    name: str
    free: int
    total: int
    margin: int
    need: Need

    @property
    def used(self) -> int:
        return self.need.total


@dataclass(frozen=True, kw_only=True)
class ModelFit(FitResult):
    """A FitResult for a model on devices.

    devices: what each has and needs; host: what the host needs; mapped_bytes: of
    its weights, those that are mapped and so can be given up by the system;
    homes: the device of each tensor by name; notes: what isn't known or was
    guessed.
    """

    devices: tuple[DeviceUse, ...]
    host: Need
    mapped_bytes: int
    n_layer: int
    n_ctx_train: int
    homes: Mapping[str, str]
    notes: tuple[str, ...]

    def placement(self) -> dict[str, str]:
        """The device of each tensor, for `load(device=...)`: CUDA0 is cuda:0. ValueError for a
        device that there can't be."""
        names = {device: canonical_name(device) for device in set(self.homes.values())}
        return {name: names[device] for name, device in self.homes.items()}

    def to_args(self) -> str:
        """The arguments for llama.cpp, on one line."""
        layers = self.n_layer + 1 if self.n_gpu_layers < 0 else self.n_gpu_layers
        words = ["-c", str(self.n_ctx or self.n_ctx_train), "-ngl", str(layers)]
        if any(self.tensor_split):
            words += ["-ts", ",".join(map(_shortest, self.tensor_split))]
        if self.overrides:
            rules = ",".join(f"{pattern}={device}" for pattern, device in self.overrides)
            words += ["-ot", f'"{rules}"']
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """The result as an object for JSON."""
        return {
            "status": self.status,
            "reason": self.reason,
            "shortfall": self.shortfall,
            "n_ctx": self.n_ctx or self.n_ctx_train,
            "n_gpu_layers": self.n_gpu_layers,
            "tensor_split": list(self.tensor_split),
            "overrides": [list(override) for override in self.overrides],
            "devices": [
                {
                    "name": device.name,
                    "free": device.free,
                    "total": device.total,
                    "margin": device.margin,
                    **asdict(device.need),
                }
                for device in self.devices
            ],
            "host": asdict(self.host),
            "mapped_bytes": self.mapped_bytes,
            "notes": list(self.notes),
            "args": self.to_args(),
        }


def fit_model(
    model: FitModel,
    devices: Sequence[DeviceMemory] | None = None,
    *,
    margins: Sequence[int] | int = DEFAULT_MARGIN,
    n_ctx: int = 0,
    n_ctx_min: int = DEFAULT_N_CTX_MIN,
    n_gpu_layers: int = -1,
    tensor_split: Sequence[float] | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    type_k: str = "f16",
    type_v: str = "f16",
    ubatch: int = 512,
    flash_attention: bool = True,
    host: DeviceMemory | None = None,
) -> ModelFit:
    """Finds how much of an open model fits on devices, and how long its context can be.

    devices: their names and memory in bytes, by default the machine's; margins:
    bytes to stay free, one for each device or one for all; n_ctx: the context in
    tokens, 0 for as long as fits, but not below n_ctx_min; n_gpu_layers,
    tensor_split, overrides: as in FitParams; type_k, type_v: of the cache
    ("f16", "q8_0", ...). FitError for what can't be fitted at all (a projector, a
    vocabulary), ValueError for options that make no sense; that it doesn't fit is
    a status of the result.
    """
    for kind in (type_k, type_v):
        if kind not in CACHE_TYPES:
            raise ValueError(
                f"unknown type of cache {kind!r}; choose from {', '.join(CACHE_TYPES)}"
            )
    if ubatch < 1 or n_ctx < 0 or n_ctx_min < 1:
        raise ValueError("ubatch and n_ctx_min must be positive, n_ctx not negative")
    each = list(margins) if isinstance(margins, Iterable) else [index(margins)]
    found = machine_devices() if devices is None else list(devices)
    here = host_memory() if host is None else host
    if not model.tensors:
        raise FitError("there is nothing to fit: the file has no tensors, only a vocabulary or so")
    embedding = model.tensors.get("token_embd.weight")
    if n_ctx == 0 and not model.metadata.get(_context_key(model)):
        n_ctx = n_ctx_min  # the file doesn't say how long a context it was made for
    n_vocab = embedding.shape[0] if embedding is not None and embedding.shape else 0
    shape = read_shape(model.metadata, n_vocab)
    sizes = _unknown_sizes(model)
    memory = [here if device.free == device.total == 0 else device for device in found]
    figures = ModelFigures(
        shape,
        list(model.tensors.values()),
        [device.name for device in found],
        [device.free for device in memory],
        Cache(type_k, type_v, ubatch, flash_attention),
        sizes,
    )
    names = [device.name for device in found]
    if len(set(names)) != len(names) or "CPU" in names:
        raise ValueError(f"the names of devices must differ, and from CPU: {', '.join(names)}")
    if tensor_split is not None and len(tensor_split) != len(found):
        raise ValueError(
            f"{len(tensor_split)} proportions for {len(found)} devices: {tensor_split}"
        )
    for _, device in overrides:
        if device != "CPU" and device not in figures.names:
            raise ValueError(f"there is no device {device!r} for an override")
    result = plan(
        figures,
        devices=found,
        host=here,
        n_layer=shape.n_layer,
        n_expert=shape.n_expert,
        n_ctx_train=shape.n_ctx_train or n_ctx_min,
        margins=each,
        n_ctx_min=n_ctx_min,
        params=FitParams(
            n_ctx=n_ctx,
            n_gpu_layers=n_gpu_layers,
            tensor_split=None if tensor_split is None else tuple(tensor_split),
            overrides=tuple(overrides),
        ),
    )
    chosen = FitParams(
        n_ctx=result.n_ctx or shape.n_ctx_train,
        n_gpu_layers=result.n_gpu_layers,
        tensor_split=result.tensor_split or None,
        overrides=result.overrides,
    )
    needs = figures.needs(chosen)
    each = each * len(found) if len(each) == 1 else each
    uses = (
        DeviceUse(name=d.name, free=m.free, total=m.total, margin=margin, need=need)
        for d, m, margin, need in zip(found, memory, each, needs, strict=False)
    )
    is_mapped = all(file.access == "mmap" for file in model.files)
    return ModelFit(
        **asdict(result) | {"overrides": result.overrides, "tensor_split": result.tensor_split},
        devices=tuple(uses),
        host=needs[-1],
        mapped_bytes=needs[-1].model if is_mapped else 0,
        n_layer=shape.n_layer,
        n_ctx_train=shape.n_ctx_train or n_ctx_min,
        homes=figures.homes(chosen),
        notes=tuple(_notes(shape.unknown, sizes)),
    )


def _shortest(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _context_key(model: FitModel) -> str:
    return f"{model.metadata.get('general.architecture', '')}.context_length"


def _unknown_sizes(model: FitModel) -> dict[str, int]:
    """Bytes of tensors of unknown type, by what lies between them and the next ones."""
    unknown = [info for info in model.tensors.values() if info.nbytes is None]
    if not unknown:
        return {}
    starts: dict[int, list[int]] = {}
    for info in model.tensors.values():
        starts.setdefault(info.file, []).append(info.offset)
    sizes = {}
    for info in unknown:
        after = [start for start in starts[info.file] if start > info.offset]
        sizes[info.name] = min(after, default=model.files[info.file].size) - info.offset
    return sizes


def _notes(unknown: str, sizes: Mapping[str, int]) -> list[str]:
    notes = []
    if unknown:
        notes.append(
            f"the memory of context and computation is unknown ({unknown}): only the weights are "
            "counted"
        )
    if sizes:
        notes.append(
            f"{len(sizes)} tensors are of unknown type; their sizes are taken from where the next "
            "ones begin"
        )
    return notes


def require(result: ModelFit) -> None:
    """FitError for a result that isn't a success."""
    if result.status != "success":
        short = f" ({-(-result.shortfall >> 20)} MiB too little)" if result.shortfall else ""
        raise FitError(result.reason + short)
