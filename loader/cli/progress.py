"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loader.cli.text import printable
from loader.options import Progress


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A callback for `load(progress=...)` that draws on stderr; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bars,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    # Remarks go to stderr as they are: rich would wrap them.
    with Bars(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        task = bars.add_task(printable(what), total=None)

        def update(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield update
