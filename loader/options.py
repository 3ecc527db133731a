"""What callers can ask for, checked when it is asked.

An argument beats an environment variable, which beats the default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypedDict, TypeVar, get_args

Access: TypeAlias = Literal["direct", "mmap", "buffered"]
AccessRequest: TypeAlias = Literal["auto", "direct", "mmap", "buffered"] | Sequence[Access]
Method: TypeAlias = Literal["io_uring", "threads", "sync"]
PageCache: TypeAlias = Literal["ignore", "reuse"]
MethodRequest: TypeAlias = Literal["auto", "io_uring", "threads", "sync"]
MetadataValue: TypeAlias = bool | int | float | str
Progress: TypeAlias = Callable[[int, int], object]
# Names, or a predicate that takes a TensorInfo.
Selection: TypeAlias = Iterable[str] | Callable[..., object]

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_T = TypeVar("_T")


class AnyDevice(Protocol):
    """A device; what it has to be able to do is in loader.device.base.Device."""

    name: str


# A name, a device, or a mapping from names of tensors, or a function of a TensorInfo, to these.
DeviceRequest: TypeAlias = (
    str | AnyDevice | Mapping[str, str | AnyDevice] | Callable[..., str | AnyDevice]
)

METHODS: tuple[MethodRequest, ...] = get_args(MethodRequest)
MODES: tuple[Access, ...] = get_args(Access)
AUTO: tuple[Access, ...] = ("direct", "mmap", "buffered")

DEFAULT_CHUNK_BYTES = 4 << 20
LARGEST_CHUNK_BYTES = 1 << 30
CHUNK_UNIT = 4096
DEFAULT_DEPTH = 8
LARGEST_DEPTH = 128
DEFAULT_MEMORY_LIMIT = 256 << 20
SMALLEST_MEMORY_LIMIT = 1 << 20

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def access_from_flags(use_mmap: bool, use_direct_io: bool) -> tuple[Access, ...]:
    """The modes, in order of preference, for the two flags that llama.cpp has.

    Direct I/O takes precedence over mmap; a flag that is off takes its mode
    out; buffered reads are always the last resort.
    """
    wanted = {"direct": use_direct_io, "mmap": use_mmap, "buffered": True}
    return tuple(mode for mode in AUTO if wanted[mode])


def parse_access(value: object) -> tuple[Access, ...]:
    """A request for access as a sequence of modes; "auto" is all of them.

    Raises TypeError for what is neither a mode nor a sequence of modes, and
    ValueError for an unknown, doubled or missing mode.
    """
    if isinstance(value, (str, bytes)):
        value = AUTO if value == "auto" else [value]
    if not isinstance(value, Sequence):
        raise TypeError(f"access must be a mode or a sequence of modes, not {value!r}")
    modes: list[Access] = []
    for item in value:
        mode = next((known for known in MODES if known == item), None)
        if mode is None:
            raise ValueError(f"unknown access mode {item!r}; choose from auto, {', '.join(MODES)}")
        if mode in modes:
            raise ValueError(f"access mode {mode!r} is given twice")
        modes.append(mode)
    if not modes:
        raise ValueError(f"access names no mode; choose from auto, {', '.join(MODES)}")
    return tuple(modes)


def parse_size(text: str) -> int:
    """Bytes from a text such as "8MiB", "512 KiB" or "4096"; ValueError otherwise."""
    match = re.fullmatch(r"\s*([0-9]{1,19})\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 8MiB or 4096")
    return int(match[1]) * _UNITS[match[2].upper()]


def _from_environment(name: str, parse: Callable[[str], _T], default: _T) -> _T:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise SettingError(f"environment variable {name}: {error}") from None


def _parse_access_list(text: str) -> tuple[Access, ...]:
    parts = [part.strip() for part in text.split(",")]
    return parse_access(parts[0] if len(parts) == 1 else parts)


def resolve_access(access: AccessRequest | None) -> tuple[Access, ...]:
    """The modes asked for by an argument, GGUF_DIO_ACCESS, or the default "auto"."""
    if access is not None:
        return parse_access(access)
    return _from_environment("GGUF_DIO_ACCESS", _parse_access_list, AUTO)


def _check_chunk_bytes(value: object) -> int:
    size = _check_int("chunk_bytes", value)
    if not 0 < size <= LARGEST_CHUNK_BYTES or size % CHUNK_UNIT:
        raise ValueError(f"chunk_bytes must be a multiple of 4096 up to 1 GiB, not {size}")
    return size


def _check_depth(value: object) -> int:
    depth = _check_int("depth", value)
    if not 0 < depth <= LARGEST_DEPTH:
        raise ValueError(f"depth must be from 1 to {LARGEST_DEPTH}, not {depth}")
    return depth


def _check_memory_limit(value: object) -> int:
    limit = _check_int("memory_limit", value)
    if limit < SMALLEST_MEMORY_LIMIT:
        raise ValueError(f"memory_limit must be at least 1 MiB, not {limit} bytes")
    return limit


def _check_method(value: object) -> MethodRequest:
    method = next((known for known in METHODS if known == value), None)
    if method is None:
        raise ValueError(f"unknown method {value!r}; choose from {', '.join(METHODS)}")
    return method


def _check_int(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{option} must be an int, not {value!r}")
    return value


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options of `loader.open`."""

    access: AccessRequest | None = None
    page_cache: PageCache = "ignore"
    metadata_overrides: Mapping[str, MetadataValue] = field(default_factory=dict)
    modes: tuple[Access, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", resolve_access(self.access))
        if self.page_cache not in get_args(PageCache):
            raise ValueError(f"page_cache must be 'ignore' or 'reuse', not {self.page_cache!r}")
        if not isinstance(self.metadata_overrides, Mapping):
            raise TypeError("metadata_overrides must be a mapping from key to value")
        for key, value in self.metadata_overrides.items():
            if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
                raise TypeError(f"metadata_overrides: {key!r}: {value!r} is no scalar of a str key")


class SettingError(ValueError):
    """What comes from outside of the program makes no sense: an environment variable, or a value
    that is to take the place of one in the metadata."""


class ReadKeywords(TypedDict, total=False):
    """Those keywords of `model.load` that don't say to which device, for type checkers."""

    names: Selection | None
    check_tensors: bool
    mlock: bool
    no_alloc: bool
    progress: Progress | None
    method: MethodRequest | None
    depth: int | None
    chunk_bytes: int | None
    memory_limit: int | None
    into: object


class LoadKeywords(ReadKeywords, total=False):
    """The keywords of `model.load`, for type checkers; see LoadOptions."""

    device: DeviceRequest


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How reads are done. depth: reads under way at once; chunk_bytes: of one read; memory_limit:
    bytes of read-ahead of a stream."""

    method: MethodRequest
    depth: int
    chunk_bytes: int
    memory_limit: int


@dataclass(frozen=True)
class _Setting:
    """An option that the environment can give."""

    variable: str
    default: object
    check: Callable[[object], object]
    parse: Callable[[str], object]

    def resolve(self) -> object:
        """What the environment says, or the default."""
        return _from_environment(
            self.variable, lambda text: self.check(self.parse(text)), self.default
        )


_SETTINGS = {
    "method": _Setting("GGUF_DIO_METHOD", "auto", _check_method, str),
    "depth": _Setting("GGUF_DIO_DEPTH", DEFAULT_DEPTH, _check_depth, _parse_int),
    "chunk_bytes": _Setting("GGUF_DIO_CHUNK", DEFAULT_CHUNK_BYTES, _check_chunk_bytes, parse_size),
    "memory_limit": _Setting(
        "GGUF_DIO_MEMORY_LIMIT", DEFAULT_MEMORY_LIMIT, _check_memory_limit, parse_size
    ),
}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `model.load`, checked; those that the environment can give are filled in."""

    names: Selection | None = None
    device: DeviceRequest = "cpu"
    check_tensors: bool = False
    mlock: bool = False
    no_alloc: bool = False
    progress: Progress | None = None
    method: MethodRequest | None = None
    depth: int | None = None
    chunk_bytes: int | None = None
    memory_limit: int | None = None
    into: object = None

    def __post_init__(self) -> None:
        if isinstance(self.names, (str, bytes)):
            raise TypeError(f"names must be an iterable of names: write names=[{self.names!r}]")
        if self.names is not None and not callable(self.names):
            if not isinstance(self.names, Iterable):
                raise TypeError(f"names must be an iterable or a predicate, not {self.names!r}")
            names = tuple(self.names)
            if wrong := [name for name in names if not isinstance(name, str)]:
                raise TypeError(f"names must be strings, not {wrong[0]!r}")
            object.__setattr__(self, "names", names)
        for option in ("check_tensors", "mlock", "no_alloc"):
            if not isinstance(getattr(self, option), bool):
                raise TypeError(f"{option} must be True or False, not {getattr(self, option)!r}")
        is_device = hasattr(self.device, "copy_async")
        if not (isinstance(self.device, (str, Mapping)) or callable(self.device) or is_device):
            raise TypeError(
                "device must be a name such as 'cuda:0', a Device, or a mapping or function from "
                f"tensors to these, not {self.device!r}"
            )
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"progress must be callable, not {self.progress!r}")
        for option, setting in _SETTINGS.items():
            given = getattr(self, option)
            value = setting.resolve() if given is None else setting.check(given)
            object.__setattr__(self, option, value)

    @property
    def tuning(self) -> Tuning:
        """How reads are done, with nothing left open."""
        return Tuning(
            method=_check_method(self.method),
            depth=_check_depth(self.depth),
            chunk_bytes=_check_chunk_bytes(self.chunk_bytes),
            memory_limit=_check_memory_limit(self.memory_limit),
        )
