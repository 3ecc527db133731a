"""What a load did: which access each file had and why, how many bytes went
which way, and how long it took. `to_dict` is what `gguf-dio load --json` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from loader.options import Access

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Where and why a load went over from direct to buffered reads."""

    errno: int
    offset: int  # bytes, in the file


@dataclass(frozen=True, kw_only=True)
class FileAccess:
    """How a file is read. size and alignments are bytes.

    requested, access, reason: which modes were asked for, which one was taken,
    and why; memory_alignment, offset_alignment: what direct reads need, None
    when the file isn't read directly.
    """

    path: str
    size: int
    requested: tuple[Access, ...]
    access: Access
    reason: str
    memory_alignment: int | None
    offset_alignment: int | None


@dataclass(frozen=True, kw_only=True)
class FileReport(FileAccess):
    """How a file was read by a load."""

    fallback: Fallback | None


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where the time of a load went, in seconds.

    open: opening the model; header: of that, reading and checking the header;
    plan: all of the load that isn't reading; read: from the first request to the
    last; wait: of that, asleep. populate, validate: the sums of the times that
    memory was given its pages and data was checked, on other threads. requests:
    reads; mean_in_flight: of them at once.
    """

    open: float
    header: float
    plan: float
    read: float
    wait: float
    populate: float
    validate: float
    requests: int
    mean_in_flight: float


@dataclass(frozen=True, kw_only=True)
class StagingReport:
    """The host memory through which tensors went to devices. why_pageable: why it wasn't pinned;
    None when it was."""

    buffers: int
    buffer_bytes: int
    why_pageable: str | None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did. Sizes are bytes, times are seconds.

    tensors: how many were loaded; bytes: the sum of their sizes;
    bytes_direct, bytes_buffered, bytes_mapped: what was moved each way, slack
    and header included; bytes_bounced: how many of them went through a bounce
    buffer; memory_bytes: what the weights hold in memory of their own (0 when
    mapped); device: the name of the device, or the names of several; device_bytes:
    what they hold on each that isn't the host; staging: None when nothing went to
    one. method, depth and chunk_bytes are None for mmap.
    """

    model: str
    files: tuple[FileReport, ...]
    tensors: int
    bytes: int
    bytes_direct: int
    bytes_buffered: int
    bytes_mapped: int
    bytes_bounced: int
    open_seconds: float
    seconds: float
    method: str | None
    depth: int | None
    chunk_bytes: int | None
    device: str | tuple[str, ...]
    peak_rss_bytes: int
    memory_bytes: int
    device_bytes: dict[str, int]
    staging: StagingReport | None
    phases: Phases

    def __str__(self) -> str:
        """One line for people and logs."""
        access = ", ".join(sorted({file.access for file in self.files}))
        where = self.device if isinstance(self.device, str) else ", ".join(self.device)
        speed = f" ({self.bytes_per_second / _MIB:.0f} MiB/s)" if self.bytes_per_second else ""
        return (
            f"{self.model}: loaded {self.tensors} tensors, {self.bytes / _MIB:.1f} MiB, in "
            f"{self.seconds:.3f} s{speed} to {where}, access {access}"
        )

    @property
    def bytes_per_second(self) -> float | None:
        """None when nothing was loaded."""
        loaded = self.bytes and self.phases.requests and self.seconds > 0
        return self.bytes / self.seconds if loaded else None

    def to_dict(self) -> dict[str, object]:
        """The report as an object for JSON."""
        fields = asdict(self)
        for name in ("memory_bytes", "device_bytes", "staging", "phases"):
            del fields[name]
        for file in fields["files"]:
            file["requested"] = list(file["requested"])
        fields["files"] = list(fields["files"])
        if not isinstance(self.device, str):
            fields["device"] = list(self.device)
        fields["bytes_per_second"] = self.bytes_per_second
        return fields
