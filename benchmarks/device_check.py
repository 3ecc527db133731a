"""Checks a device with a model: `python -m benchmarks.device_check MODEL cuda:0`.

Loads the model to the device, reads every tensor back and compares its digest
with that of a load to the host. Then prints how fast reading, copying, and both
at once are. Exit status 1 when a tensor differs, 2 for wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import loader
from benchmarks.devices import digests, measure
from loader.device.registry import open_device

_ROUNDS = 5


def main(words: list[str]) -> int:
    if len(words) != 2:
        print(__doc__)
        return 2
    path, device = Path(words[0]), open_device(words[1])
    memory = device.memory()
    print(f"{device.name}: {memory.free / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB")
    with loader.open(path) as model:
        with model.load() as weights:
            expected = digests(weights)
        with model.load(device=device) as weights:
            found, report = digests(weights), weights.report
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        print(f"{len(wrong)} of {len(expected)} tensors differ, the first is {wrong[0]!r}")
        return 1
    print(f"all {len(expected)} tensors are the same")
    if report.staging is not None:
        pinned = report.staging.why_pageable or "pinned"
        size = report.staging.buffer_bytes >> 20
        print(f"staging: {report.staging.buffers} buffers of {size} MiB, {pinned}")
    figures = measure(path, device, _ROUNDS, lambda _: None)
    for name, text in figures.rows():
        print(f"  {name:<14}{text}")
    print(f"  a load takes {figures.ratio:.2f} of the longer of reading and copying")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
