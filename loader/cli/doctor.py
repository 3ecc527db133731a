"""`gguf-dio doctor`: what a file system and the machine can do for loading."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader.cli.parser import Parser
from loader.cli.text import print_json, print_line, printable, size
from loader.device.host import available_memory
from loader.errors import LoaderError, MappingError
from loader.io import File
from loader.io.file import describe_errno
from loader.io.mapping import map_file
from loader.io.queue import open_queue

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROBE_BYTES = 1 << 20


def configure(parser: Parser) -> None:
    parser.add_argument("path", metavar="PATH", help="a file, or a folder that can be written to")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    with _file_at(arguments.path) as file:
        found = _examine(arguments.path, file)
    if arguments.json:
        print_json(found)
    else:
        for line in _in_words(found):
            print_line(printable(line))


@contextmanager
def _file_at(path: str) -> Iterator[File]:
    """The file, or one that is made for the purpose in a folder."""
    if not Path(path).is_dir():
        with File(path) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(dir=path, prefix=".gguf-dio-") as probe:
        probe.write(bytes(_PROBE_BYTES))
        probe.flush()
        os.fsync(probe.fileno())
        with File(probe.name) as file:
            yield file


def _examine(path: str, file: File) -> dict[str, object]:
    number = file.direct_errno
    memory_alignment, offset_alignment = file.alignments if number is None else (None, None)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "path": path,
        "file_system": _file_system(file.path),
        "direct_io": number is None,
        "direct_io_reason": None if number is None else describe_errno(number),
        "memory_alignment": memory_alignment,
        "offset_alignment": offset_alignment,
        "mmap": (mmap_reason := _why_no_mapping(file)) is None,
        "mmap_reason": mmap_reason,
        "io_uring": (uring_reason := _why_no_uring()) is None,
        "io_uring_reason": uring_reason,
        "resident_fraction": file.resident_fraction(),
        "huge_pages": _huge_pages(),
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "available_memory_bytes": available_memory(),
        "page_bytes": resource.getpagesize(),
        "cpus": os.cpu_count(),
    }


def _file_system(path: str) -> str | None:
    """The type of the mount that holds a path (proc(5), mountinfo)."""
    real = os.path.realpath(path)
    best, kind = "", None
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind


def _why_no_mapping(file: File) -> str | None:
    try:
        map_file(file)
    except MappingError as error:
        return describe_errno(error.errno or 0)
    return None


def _why_no_uring() -> str | None:
    try:
        open_queue("io_uring", 1)[0].close()
    except LoaderError as error:
        return describe_errno(getattr(error, "errno", None) or 0)
    return None


def _huge_pages() -> str | None:
    """The mode that is set: "always", "madvise" or "never"."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _in_words(found: dict[str, object]) -> Iterator[str]:
    yield f"{found['path']}: on {found['file_system'] or 'an unknown file system'}"
    if found["direct_io"]:
        yield (
            f"  direct I/O works; memory aligned to {found['memory_alignment']} B, offsets to "
            f"{found['offset_alignment']} B"
        )
    else:
        yield f"  direct I/O does not work: {found['direct_io_reason']}"
    for name in ("mmap", "io_uring"):
        reason = found[f"{name}_reason"]
        yield f"  {name} works" if reason is None else f"  {name} does not work: {reason}"
    fraction = found["resident_fraction"]
    known = isinstance(fraction, float)
    yield f"  {fraction:.0%} of it in the page cache" if known else "  page cache: not known"
    huge = {
        "always": "huge pages are used for weights",
        "madvise": "huge pages are used for weights, which ask for them",
        "never": "huge pages are off: loads into new memory take about twice as long",
    }
    yield f"  {huge.get(str(found['huge_pages']), 'huge pages: not known')}"
    limit = found["memlock_bytes"]
    yield (
        f"  at most {size(limit)} can be locked (--mlock); raise it with ulimit -l"
        if isinstance(limit, int)
        else "  memory can be locked without limit (--mlock)"
    )
    available = found["available_memory_bytes"]
    yield (
        f"  {size(available)} of memory available, {found['cpus']} processors"
        if isinstance(available, int)
        else f"  available memory: not known, {found['cpus']} processors"
    )
