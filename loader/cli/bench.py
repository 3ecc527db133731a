"""`gguf-dio bench`: how fast a model loads here, by access mode and method."""

from __future__ import annotations

import argparse
from pathlib import Path

from loader.cli.parser import Parser
from loader.cli.text import note, print_json, print_line, printable, size
from loader.measure import Run, check_plot, measure, plot

_ROUNDS = 3


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any file of a split model")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the result to a file")
    parser.add_argument(
        "--warm", action="store_true", help="with the file in the page cache, not out of it"
    )


def execute(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_plot(Path(arguments.plot))
    ceiling, runs = measure(arguments.model, rounds=_ROUNDS, warm=arguments.warm)
    if not arguments.warm and not all(all(run.cold) for run in [ceiling, *runs]):
        note(
            "the file could not be dropped from the page cache before every run: those marked "
            "'not cold' say nothing about the disk"
        )
    if arguments.plot is not None:
        title = f"{printable(Path(arguments.model).name)}, {'warm' if arguments.warm else 'cold'}"
        plot(Path(arguments.plot), title, ceiling, runs)
    top = ceiling.bytes_per_second
    if arguments.json:
        print_json(
            {
                "model": arguments.model,
                "warm": arguments.warm,
                "rounds": _ROUNDS,
                "ceiling": ceiling.to_dict(top),
                "runs": [run.to_dict(top) for run in runs],
            }
        )
        return
    print_line(f"{printable(arguments.model)}: medians of {_ROUNDS} alternating rounds")
    for run in [ceiling, *runs]:
        print_line(_line(run, top, arguments.warm))


def _line(run: Run, ceiling: float | None, warm: bool) -> str:
    name = f"  {run.access:<9}{run.method or '':<9}"
    if run.failed is not None:
        return f"{name} {printable(run.failed)}"
    speed = run.bytes_per_second
    if not speed:
        return f"{name} not possible here"
    if not warm and not all(run.cold):
        return f"{name} not cold"
    share = f"{speed / ceiling:5.2f} of the ceiling" if ceiling else ""
    return (
        f"{name}{size(speed):>10}/s  {share}  {run.cpu_seconds_per_gb:.3f} CPU s/GB  "
        f"spread {run.spread:.0%}"
    )
