"""Loads to devices: overlap with a driver of the tests' own, and PoCL beside the host."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import loader
from benchmarks import device_check
from benchmarks.devices import measure, timed
from benchmarks.test_load import table
from loader.device.registry import open_device
from loader.errors import DeviceUnavailableError
from tests import fake_cuda


def test_copies_as_slow_as_reads(
    model: Path, rounds: int, benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """A load, beside the longer of reading alone and copying alone."""
    pytest.importorskip("cuda.bindings.driver", reason="needs the extra cuda")
    driver = fake_cuda.FakeCuda(fake_cuda.build(tmp_path))
    driver.device(0, total=1 << 40)
    figures = measure(model, open_device("cuda:0"), rounds, lambda speed: driver.speed(int(speed)))
    ratio = f"{figures.ratio:.2f} of the longer of the two alone"
    grown = median(figures.checked) / median(figures.both)
    table(
        "CUDA on a driver that copies as fast as the disk reads",
        [*figures.rows(), ("overlap", ratio), ("checking", f"{grown:.2f} of the time without")],
    )
    benchmark.extra_info["ratio"] = figures.ratio
    benchmark(lambda: None)  # the figures are in extra_info


@pytest.mark.parametrize("name", ["opencl:0", "torch:cpu"])
def test_devices_beside_the_host(
    model: Path, rounds: int, benchmark: BenchmarkFixture, name: str
) -> None:
    """Into fresh memory on both."""
    try:
        device = open_device(name)
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    host: list[float] = []
    there: list[float] = []
    with loader.open(model, access="direct") as opened:
        opened.load(device=device).close()  # the library has started
        for _ in range(rounds):
            host.append(timed(lambda: opened.load().close()))
            there.append(timed(lambda: opened.load(device=device).close()))
    rows = [(label, f"{median(runs):.3f} s") for label, runs in (("host", host), (name, there))]
    rows.append(("ratio", f"{median(there) / median(host):.2f}"))
    table(f"{name} beside the host, fresh memory", rows)
    benchmark.extra_info["rows"] = rows
    benchmark(lambda: None)


def test_the_check_of_a_device(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    assert device_check.main([str(model), "torch:cpu"]) == 0
    assert "tensors are the same" in capsys.readouterr().out
    assert device_check.main([]) == 2
