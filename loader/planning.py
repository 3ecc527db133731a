"""Plans a load: which tensors, from which ranges of which files, to which memory.

Whatever can be known to be wrong is refused here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

from loader._ffi import Memory, Transfer
from loader.device.host import available_memory
from loader.errors import DeviceMemoryError, MappingError, UnsupportedFormatError, quoted
from loader.gguf.header import Header
from loader.gguf.tensors import TensorInfo, TensorTable
from loader.gguf.types import why_unknown
from loader.io.mapping import map_file
from loader.io.ranges import Extent, lay_out
from loader.io.source import Source, decide
from loader.options import Selection
from loader.report import FileAccess

# Addresses are congruent to file offsets modulo this at least, so that tensors
# are aligned in memory as they are in the file.
_LEAST_MODULUS = 64
_LARGEST_MODULUS = 2 << 20  # the alignment of an arena
_CLOSE, _MOST_ALIKE = 4, 2000  # where near matches of a wrong name are looked for


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
    """One file of an open model."""

    source: Source
    header: Header

    def describe(self) -> ModelFile:
        """The file for users."""
        return ModelFile(
            **asdict(self.source.access()),
            version=self.header.version,
            tensor_alignment=self.header.alignment,
            data_offset=self.header.data_offset,
        )


@dataclass(frozen=True)
class OpenModel:
    """What a load needs to know of the model. name: its path as it was given."""

    name: str
    files: tuple[OpenFile, ...]
    tensors: TensorTable
    open_seconds: float


@dataclass
class Part:
    """The part of a load that one file plays. mapping: when the file is read through one."""

    source: Source
    header: Header
    tensors: list[TensorInfo]
    extents: tuple[Extent, ...]
    transfer: Transfer

    @property
    def mapping(self) -> Memory | None:
        return self.source.mapping

    @property
    def bytes(self) -> int:
        return sum(extent.length for extent in self.extents)


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


def plan(model: OpenModel, wanted: Sequence[TensorInfo]) -> tuple[list[Part], int]:
    """One part per file, and the bytes of the arena that the owned ones share."""
    parts, end = [], 0
    for index, file in enumerate(model.files):
        source = _still_possible(file.source)
        decision = source.decision
        memory_alignment, offset_alignment = 1, 1
        if decision.access == "direct":
            memory_alignment, offset_alignment = source.file.alignments
        modulus = max(memory_alignment, offset_alignment, file.header.alignment, _LEAST_MODULUS)
        tensors = [info for info in wanted if info.file == index]
        layout = lay_out(
            ((info.offset, info.nbytes or 0) for info in tensors),
            file_size=source.file.size,
            offset_alignment=offset_alignment,
            modulus=min(modulus, _LARGEST_MODULUS),
            position=end,
        )
        if source.mapping is None:
            end = layout.end
        parts.append(
            Part(
                source,
                file.header,
                tensors,
                layout.extents,
                Transfer(
                    direct_required="buffered" not in decision.requested,
                    buffered_only=decision.access != "direct",
                ),
            )
        )
    return parts, end


def _still_possible(source: Source) -> Source:
    """The file as it can be read now: an earlier load may have found that it can't be read
    directly after all. A demand is left as it is, and fails with the read's own error."""
    decision = source.decision
    if decision.access != "direct" or source.file.direct_for_loads or len(decision.requested) == 1:
        return source
    return decide(source.file, decision.requested)


def fit_into_memory(model: OpenModel, parts: Sequence[Part], needed: int) -> int:
    """The bytes of the arena; 0 after everything was mapped because it wouldn't fit.

    Where mmap isn't one of the requested modes that is a DeviceMemoryError.
    """
    available = available_memory()
    if available is None or needed <= available:
        return needed
    why = f"{needed} bytes of memory are needed and {available} are available"
    for part in parts:
        if part.mapping is not None:
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
