"""Files that the command makes: whole or not at all, and never over one that is there."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def refuse_existing(path: str) -> None:
    """FileExistsError for what is there, before any work is done for it."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def write_new(path: str, text: str) -> None:
    """Writes a new file. OSError, with the path, when that fails; then there is no file."""
    target = Path(path)
    with target.open("x", encoding="utf-8", newline="") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException as error:
            target.unlink()
            if isinstance(error, OSError):
                error.filename = path
            raise
