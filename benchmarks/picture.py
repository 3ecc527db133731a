"""Draws the README's picture: `python -m benchmarks.picture RESULTS.json docs/benchmark.svg`.

RESULTS.json is what `pytest benchmarks --benchmark-json=RESULTS.json` writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_OURS, _OTHERS = "#228833", "#bbbbbb"


def results(path: Path, test: str, key: str) -> dict[str, float]:
    """The figures of one benchmark by loader."""
    for entry in json.loads(path.read_text("utf-8"))["benchmarks"]:
        if entry["name"] == test:
            found: dict[str, float] = entry["extra_info"][key]
            return found
    raise SystemExit(f"{path} has no results of {test}")


def bars(axes: Any, figures: dict[str, float], title: str, number: str) -> None:
    names = sorted(figures, key=lambda name: figures[name])
    colours = [_OURS if name.startswith("gguf-dio") else _OTHERS for name in names]
    drawn = axes.barh(names, [figures[name] for name in names], color=colours)
    axes.bar_label(drawn, [format(figures[name], number) for name in names], padding=4)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def main() -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rcParams["svg.hashsalt"] = "the same picture for the same figures"
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    speeds = results(arguments.results, "test_peers[cold]", "gb_per_second")
    bars(left, speeds, "Cold load of a 3.2 GB model, GB/s\n(more is better)", ".2f")
    times = results(arguments.results, "test_open_a_large_vocabulary", "cpu_milliseconds")
    bars(
        right,
        times,
        "Opening a Gemma model, CPU ms\n(less is better; the scale is logarithmic)",
        ",.0f",
    )
    right.set_xscale("log")
    figure.savefig(arguments.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
