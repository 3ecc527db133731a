"""Plans a load: which tensors, from which ranges of which files, to which memory.

Whatever can be known to be wrong is refused here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from operator import index

import numpy as np
import numpy.typing as npt

from loader._ffi import Memory, WritableBuffer
from loader.device.host import available_memory
from loader.device.staging import Spot
from loader.errors import DeviceMemoryError, MappingError, UnsupportedFormatError, quoted
from loader.gguf.tensors import TensorInfo, TensorTable
from loader.gguf.types import BLOCK_SIZES, why_unknown
from loader.io.file import Moved
from loader.io.mapping import map_file
from loader.io.ranges import Extent, lay_out
from loader.io.source import Source, decide
from loader.options import AUTO, Selection
from loader.report import FileAccess

# Addresses are congruent to file offsets modulo this at least, so that tensors
# are aligned in memory as they are in the file.
_LEAST_MODULUS = 64
_WHOLE = 0.9
_LARGEST_MODULUS = 2 << 20  # the alignment of an arena
# Where near matches of a wrong name are looked for.
_CLOSE, _MOST_ALIKE, _LONGEST_COMPARED = 4, 2000, 200


@dataclass(frozen=True, kw_only=True)
class ModelFile(FileAccess):
    """A file of a model.

    version: of the GGUF format; tensor_alignment: what the offsets of tensors
    are multiples of (general.alignment); data_offset: where the tensor data
    begins; in bytes.
    """

    version: int
    tensor_alignment: int
    data_offset: int


@dataclass(frozen=True)
class OpenFile:
    """One file of an open model. version, tensor_alignment, data_offset: see ModelFile;
    moved: what was read of it when it was opened."""

    source: Source
    version: int
    tensor_alignment: int
    data_offset: int
    moved: Moved

    def describe(self) -> ModelFile:
        """The file for users."""
        return ModelFile(
            **asdict(self.source.access()),
            version=self.version,
            tensor_alignment=self.tensor_alignment,
            data_offset=self.data_offset,
        )


@dataclass(frozen=True)
class OpenModel:
    """What a load needs to know of the model. name: its path as it was given; header_seconds: of
    open_seconds."""

    name: str
    files: tuple[OpenFile, ...]
    tensors: TensorTable
    open_seconds: float
    header_seconds: float


@dataclass(frozen=True)
class Given:
    """A tensor that is read to memory of the caller's. source: the object that has the memory."""

    info: TensorInfo
    extent: Extent
    buffer: WritableBuffer
    source: object

    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as bytes."""
        empty: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        return np.frombuffer(self.source, np.uint8) if self.info.nbytes else empty  # type: ignore[call-overload]  # it has a buffer


@dataclass(eq=False)
class Part:
    """The part of a load that one file plays.

    number: of the file in its model; tensors: those in memory of the load, or in
    the mapping; extents: what is read of them; given: tensors in memory of the
    caller's; spots: those for devices, which go there through staging buffers;
    moved, bytes_mapped: what was read so far; buffered_only: don't read directly
    (any more); is_warm: a mapped file is in the page cache; is_whole: nearly all
    of the file is read.
    """

    number: int
    source: Source
    tensors: list[TensorInfo]
    extents: tuple[Extent, ...]
    given: list[Given]
    buffered_only: bool
    spots: Sequence[Spot] = ()
    moved: Moved = field(default_factory=Moved)
    bytes_mapped: int = 0
    is_warm: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        self.is_whole = self.bytes >= _WHOLE * self.source.file.size

    @property
    def bytes(self) -> int:
        """What there is to be read."""
        given = sum(given.extent.length for given in self.given)
        staged = sum(spot.info.nbytes or 0 for spot in self.spots)
        return given + staged + sum(extent.length for extent in self.extents)

    @property
    def direct_required(self) -> bool:
        return "buffered" not in self.source.decision.requested


def select(tensors: TensorTable, names: Selection | None) -> list[TensorInfo]:
    """The tensors that `names` chooses, in file order; ValueError for a name that isn't there."""
    if names is None:
        return list(tensors.values())
    if callable(names):
        return [info for info in tensors.values() if names(info)]
    chosen = set(names)
    for name in chosen:
        if name not in tensors:
            alike = [other for other in tensors if abs(len(other) - len(name)) < _CLOSE]
            if len(name) > _LONGEST_COMPARED:
                alike = []
            close = get_close_matches(name, alike[:_MOST_ALIKE], n=3)
            hint = f"; did you mean {', '.join(map(quoted, close))}?" if close else ""
            raise ValueError(f"the model has no tensor {quoted(name)}{hint}")
    return [tensors[name] for name in tensors.in_order(chosen)]


def refuse_unknown(model: OpenModel, wanted: Iterable[TensorInfo]) -> None:
    unknown = [info for info in wanted if info.nbytes is None]
    if not unknown:
        return
    info = unknown[0]
    more = f" ({len(unknown)} tensors are like that)" if len(unknown) > 1 else ""
    path = model.files[info.file].source.file.path
    raise UnsupportedFormatError(
        f"{path}: tensor {quoted(info.name)} has {why_unknown(info.ggml_type)}, so its size isn't "
        f"known and it can't be loaded{more}; load the others with names=lambda info: "
        "info.nbytes is not None (in the command: --tensors)",
        path=path,
        offset=info.offset,
        field=info.name,
    )


def rows(info: TensorInfo, start: int, stop: int) -> TensorInfo:
    """A part of a tensor on its outermost axis, as a tensor; ValueError when there is no such."""
    if not info.shape:
        raise ValueError(f"tensor {quoted(info.name)} is a scalar and has no rows")
    start, stop = index(start), index(stop)
    length, nbytes = info.shape[0], info.nbytes or 0
    if not 0 <= start <= stop <= length:
        raise ValueError(
            f"rows {start} to {stop} are not inside tensor {quoted(info.name)}, which has {length}"
        )
    # Rows are whole blocks; of a tensor with one axis, rows are elements.
    block = BLOCK_SIZES[int(info.ggml_type)][0] if len(info.shape) == 1 else 1
    if start % block or stop % block:
        raise ValueError(
            f"rows {start} to {stop} of tensor {quoted(info.name)} are not whole blocks of {block}"
        )
    begin, end = (nbytes * row // length if length else 0 for row in (start, stop))
    shape = (stop - start, *info.shape[1:])
    return replace(info, shape=shape, nbytes=end - begin, offset=info.offset + begin)


def plan(
    model: OpenModel,
    wanted: Sequence[TensorInfo],
    given: Mapping[str, object] | None = None,
    *,
    reuse: bool = False,
    mapped: bool = True,
) -> tuple[list[Part], int]:
    """A part for each file that has one of the tensors, and the bytes of the arena that the owned
    ones share.

    reuse: whether the arena is memory that is used again; mapped: whether a
    mapping may take the place of memory.

    given: memory of the caller's by name of tensor, all of them wanted. ValueError
    for memory that is read-only, of another size, or overlaps other memory;
    TypeError for what has none.
    """
    given = given or {}
    infos = {info.name: info for info in wanted}
    buffers = {name: _buffer(infos[name], source) for name, source in given.items()}
    _refuse_overlaps(buffers)
    parts, end = [], 0
    by_file: dict[int, list[TensorInfo]] = {}
    for info in wanted:
        by_file.setdefault(info.file, []).append(info)
    for number, tensors in sorted(by_file.items()):
        file = model.files[number]
        copied = bool(given) or reuse
        source = source_for_copies(file.source) if copied else _still_possible(file.source)
        if not mapped:
            source = Source(source.file, source.decision, None)
        part = _plan_part(number, source, file.tensor_alignment, tensors, end, buffers, given)
        if source.mapping is None and part.extents:
            last = part.extents[-1]
            end = last.position + last.room
        parts.append(part)
    return parts, end


def _plan_part(
    number: int,
    source: Source,
    tensor_alignment: int,
    tensors: Sequence[TensorInfo],
    position: int,
    buffers: Mapping[str, WritableBuffer],
    given: Mapping[str, object],
) -> Part:
    direct = source.decision.access == "direct"
    memory_alignment, offset_alignment = source.file.alignments if direct else (1, 1)
    modulus = max(memory_alignment, offset_alignment, tensor_alignment, _LEAST_MODULUS)
    owned = [info for info in tensors if info.name not in buffers]
    layout = lay_out(
        ((info.offset, info.nbytes or 0) for info in owned),
        file_size=source.file.size,
        offset_alignment=offset_alignment,
        modulus=min(modulus, _LARGEST_MODULUS),
        position=position,
    )
    return Part(
        number,
        source,
        owned,
        layout.extents,
        [
            Given(
                info,
                Extent(info.offset, info.nbytes or 0, info.nbytes or 0, 0),
                buffers[info.name],
                given[info.name],
            )
            for info in tensors
            if info.name in buffers
        ],
        buffered_only=not direct,
    )


def _buffer(info: TensorInfo, source: object) -> WritableBuffer:
    try:
        buffer = WritableBuffer(source)
    except (TypeError, ValueError) as error:
        raise type(error)(f"into: tensor {quoted(info.name)}: {error}") from None
    if buffer.nbytes != info.nbytes:
        raise ValueError(
            f"into: tensor {quoted(info.name)} has {info.nbytes} bytes, its buffer {buffer.nbytes}"
        )
    return buffer


def _refuse_overlaps(buffers: Mapping[str, WritableBuffer]) -> None:
    filled = sorted(
        (buffer.address, buffer.nbytes, name) for name, buffer in buffers.items() if buffer.nbytes
    )
    for (address, nbytes, name), (after, _, other) in pairwise(filled):
        if address + nbytes > after:
            raise ValueError(f"into: the buffers of {quoted(name)} and {quoted(other)} overlap")


def source_for_copies(source: Source) -> Source:
    """The file as it is read to memory that can't be a mapping, the caller's or a device's: that is
    better read to than copied to from a mapping, where mmap is only the second choice."""
    source = _still_possible(source)
    decision = source.decision
    if decision.access != "mmap" or decision.requested != AUTO:
        return source
    reason = f"{decision.reason}; but what isn't mapped is better read"
    return Source(source.file, replace(decision, access="buffered", reason=reason), None)


def _still_possible(source: Source) -> Source:
    """The file as it can be read now: an earlier load may have found that it can't be read
    directly after all. A demand is left as it is, and fails with the read's own error."""
    decision = source.decision
    if decision.access != "direct" or source.file.direct_for_loads or len(decision.requested) == 1:
        return source
    return decide(source.file, decision.requested)


def map_apart(parts: Sequence[Part]) -> None:
    """Gives mapped parts mappings of their own, one for each file, of which not all has to be
    kept."""
    mappings: dict[int, Memory] = {}
    for part in parts:
        if part.source.mapping is not None:
            if part.number not in mappings:
                mappings[part.number] = map_file(part.source.file)
            part.source = replace(part.source, mapping=mappings[part.number])


def fit_into_memory(
    model: OpenModel, parts: Sequence[Part], needed: int, *, beside: int = 0
) -> int:
    """The bytes of the arena; 0 after everything was mapped because it wouldn't fit. beside: what
    devices take of the host's memory.

    Where mmap isn't one of the requested modes that is a DeviceMemoryError.
    """
    available = available_memory() if needed else None
    if available is not None:
        available = max(available - beside, 0)
    if available is None or needed <= available:
        return needed
    why = f"{needed} bytes of memory are needed and {available} are available"
    for part in parts:
        if part.source.mapping is not None or not part.extents:
            continue
        decision = part.source.decision
        if "mmap" not in decision.requested:
            raise DeviceMemoryError(
                f"{model.name}: {why}; load fewer tensors (names=, in the command --tensors) or "
                "allow mmap",
                needed=needed,
                available=available,
            )
        try:
            mapping = map_file(part.source.file)
        except MappingError as error:
            raise DeviceMemoryError(
                f"{model.name}: {why}, and {error}", needed=needed, available=available
            ) from None
        decision = replace(decision, access="mmap", reason=f"{why}, so it is mapped")
        part.source = Source(part.source.file, decision, mapping)
    return 0
