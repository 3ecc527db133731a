"""The command: its subcommands, errors to one line, exit status."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from loader._version import __version__
from loader.cli import bench, doctor, fit, inspect, load, verify
from loader.cli.parser import Parser, UsageError
from loader.cli.text import note
from loader.errors import LoaderError
from loader.options import SettingError

_COMMANDS = {
    "load": (load, "load a model and report how it went"),
    "inspect": (inspect, "show what a model's header says"),
    "verify": (verify, "digests of a model's tensors, and comparison"),
    "bench": (bench, "how fast a model loads here, by access mode and method"),
    "fit": (fit, "which layers fit on which device, and how long a context"),
    "doctor": (doctor, "what a file system and this machine can do"),
}
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# What to do about errors of the system, which don't say it themselves.
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "name the GGUF file in it",
    errno.EACCES: "its owner has to allow it",
    errno.EEXIST: "choose another name or remove it",
    errno.ENOSPC: "make room",
}


def _parser() -> Parser:
    parser = Parser(
        prog="gguf-dio",
        description="Loads GGUF model weights through direct I/O, mmap or buffered reads.",
        leading_only=True,
    )
    parser.add_argument("--version", action="version", version=f"gguf-dio {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        module.configure(commands.add_parser(name, help=text, description=f"{text}.".capitalize()))
    return parser


class _NoteHandler(logging.Handler):
    """Warnings of the library as remarks on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status. argparse exits by itself on wrong usage, and
    KeyboardInterrupt is left to `run`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = _NoteHandler(logging.WARNING)
    logging.getLogger("loader").addHandler(handler)
    try:
        return _run(sys.argv[1:] if words is None else words)
    finally:
        logging.getLogger("loader").removeHandler(handler)


def _run(words: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(words)
    command = _COMMANDS[arguments.command][0]
    try:
        command.execute(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone; nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (SettingError, UsageError) as error:
        note(str(error))
        return USAGE
    except (LoaderError, OSError, ValueError, MemoryError) as error:
        note(_message(error))
        return FAILED
    except Exception as error:
        note(f"internal error, please report it: {type(error).__name__}: {error}")
        return FAILED
    return DONE


def _message(error: BaseException) -> str:
    if isinstance(error, LoaderError) or not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = "the output" if error.filename is None else os.fsdecode(error.filename) or "''"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")


def run() -> NoReturn:
    """The console script: runs the command and ends the process with its exit status."""
    # A stream that was closed before we began is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    sys.stderr = sys.stderr or sys.stdout
    try:
        status = main()
    except KeyboardInterrupt:
        note("interrupted")
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    sys.exit(status)
