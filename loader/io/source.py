"""One file of a model: opened, with the decision how it is read, and its mapping if it has one."""

from __future__ import annotations

from dataclasses import dataclass

from loader._ffi import Memory
from loader.errors import DirectIOError, MappingError
from loader.io.access import Decision, choose
from loader.io.file import File, describe_errno
from loader.io.mapping import map_file
from loader.options import Access, PageCache
from loader.report import FileAccess


@dataclass(frozen=True)
class Source:
    """A file of a model and how it is read; mapping: only when it is mapped."""

    file: File
    decision: Decision
    mapping: Memory | None

    def access(self) -> FileAccess:
        """The decision, for users."""
        direct = self.decision.access == "direct"
        memory_alignment, offset_alignment = self.file.alignments
        return FileAccess(
            path=self.file.path,
            size=self.file.size,
            requested=self.decision.requested,
            access=self.decision.access,
            reason=self.decision.reason,
            memory_alignment=memory_alignment if direct else None,
            offset_alignment=offset_alignment if direct else None,
        )


def decide(file: File, requested: tuple[Access, ...], page_cache: PageCache = "ignore") -> Source:
    """Decides how an open file is read, and maps it if that is the decision.

    page_cache="reuse": what is in the page cache is taken from there.
    DirectIOError or MappingError when none of the requested modes can be had.
    """
    refusals: dict[Access, str] = {}
    number = file.direct_errno
    if number is not None:
        refusals["direct"] = describe_errno(number)
    mapping_error: MappingError | None = None
    reuse = page_cache == "reuse" and len(requested) > 1 and requested[0] == "direct"
    resident = file.resident_fraction() if reuse else None
    while True:
        decision = choose(requested, refusals, resident=resident)
        if decision is None:
            raise _nothing_left(file, requested, mapping_error)
        if decision.access != "mmap":
            break
        try:
            return Source(file, decision, map_file(file))
        except MappingError as error:
            mapping_error = error
            refusals["mmap"] = describe_errno(error.errno or 0)
    return Source(file, decision, None)


def _nothing_left(
    file: File, requested: tuple[Access, ...], mapping_error: MappingError | None
) -> DirectIOError | MappingError:
    if mapping_error is not None and requested[0] == "mmap":
        return mapping_error
    number = file.direct_errno or 0
    return DirectIOError(
        f"{file.path} can't be read directly: {describe_errno(number)}; allow another mode too, "
        'for example access="auto"',
        errno=number,
        filename=file.path,
        access="direct",
    )
