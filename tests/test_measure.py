"""`gguf-dio bench` and `gguf-dio doctor`."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.cli.text import size
from loader.measure import (
    CONFIGURATIONS,
    evict,
    fraction_of_ceiling,
    is_cold,
    measure,
    warm_up,
)
from tests.build import fixed, model
from tests.conftest import Faults
from tests.test_cli import Run, run

__all__ = ["run"]  # a fixture


@pytest.fixture
def path(direct_folder: Path) -> Path:
    return model(direct_folder / "m.gguf", {f"t{i}": np.ones(1 << 20, np.int8) for i in range(8)})


RUN_KEYS = {
    "access", "method", "seconds", "bytes_per_second", "spread", "fraction_of_ceiling",
    "cpu_seconds_per_gb", "cold", "failed",
}  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--warm"]])
def test_bench(run: Run, path: Path, flags: list[str]) -> None:
    done = run("bench", path, "--json", *flags)
    assert done.status == 0
    found = done.json
    assert set(found) == {"model", "warm", "rounds", "ceiling", "runs"}
    assert found["warm"] == bool(flags)
    assert found["ceiling"]["fraction_of_ceiling"] == 1
    configurations = [(r["access"], r["method"]) for r in found["runs"]]
    assert configurations == list(CONFIGURATIONS)
    for result in [found["ceiling"], *found["runs"]]:
        assert set(result) == RUN_KEYS
        assert len(result["seconds"]) == len(result["cold"]) == found["rounds"]
        assert result["bytes_per_second"] > 0
        assert result["failed"] is None
        assert not flags or not any(result["cold"])
    text = run("bench", path, *flags)
    assert text.status == 0
    assert "direct   io_uring" in text.out
    assert "of the ceiling" in text.out


def test_bench_says_not_cold_rather_than_a_figure(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.measure.is_cold", lambda _: False)
    done = run("bench", path)
    assert done.status == 0
    assert "could not be dropped" in done.err
    assert done.out.count("not cold") == 1 + len(CONFIGURATIONS)
    assert "GB/s" not in done.out


def test_bench_where_a_mode_cannot_be_had(path: Path, faults: Faults) -> None:
    faults.fail("pread_direct", errno.EINVAL)
    ceiling, runs = measure(str(path), rounds=1, warm=True)
    assert ceiling.seconds == []
    failed = {run.access for run in runs if run.failed}
    assert failed == {"direct"}
    assert all(run.seconds for run in runs if run.access != "direct")
    assert runs[0].to_dict(None)["fraction_of_ceiling"] is None


def test_a_file_is_cold_when_it_is_out_of_the_cache(path: Path) -> None:
    warm_up(str(path))
    assert not is_cold(str(path))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    if not evict(str(path)):
        pytest.skip("the page cache can't be emptied here")
    assert is_cold(str(path))


def test_the_fraction_of_the_ceiling_of_a_load(path: Path, faults: Faults) -> None:
    found = fraction_of_ceiling(loader.load(path).report)
    assert found is not None
    assert 0.001 < found < 1000
    assert fraction_of_ceiling(loader.load(path, names=[]).report) is None
    faults.fail("pread_direct", errno.EINVAL)
    assert fraction_of_ceiling(loader.load(path).report) is None


def test_bench_draws_a_picture(run: Run, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.png"
    done = run("bench", path, "--warm", "--plot", target)
    if importlib.util.find_spec("matplotlib") is None:
        assert done.status == 1
        assert "gguf-dio[plot]" in done.err
        return
    assert done.status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_bench_of_what_is_no_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"<!DOCTYPE html>")
    done = run("bench", tmp_path / "x")
    assert done.status == 1
    assert "HTML" in done.err
    assert run("bench", tmp_path / "missing").status == 1
    (tmp_path / "empty.gguf").write_bytes(fixed(3, 0, 0))
    assert run("bench", tmp_path / "empty.gguf", "--warm").status == 0


def test_bench_refuses_a_picture_before_it_measures(run: Run, path: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "x.svg", tmp_path / "no" / "x.png"):
        done = run("bench", path, "--plot", target)
        assert done.status == 1
        assert done.out == ""


DOCTOR_KEYS = {
    "path", "file_system", "direct_io", "direct_io_reason", "memory_alignment", "offset_alignment",
    "mmap", "mmap_reason", "io_uring", "io_uring_reason", "resident_fraction", "huge_pages",
    "memlock_bytes", "available_memory_bytes", "page_bytes", "cpus",
}  # fmt: skip


def test_doctor(run: Run, path: Path, tmp_path: Path) -> None:
    for where in (path, tmp_path):
        before = sorted(tmp_path.iterdir())
        found = run("doctor", where, "--json").json
        assert sorted(tmp_path.iterdir()) == before, "the probe file is gone"
        assert set(found) == DOCTOR_KEYS
        assert found["direct_io"] is True
        assert found["direct_io_reason"] is None
        assert found["offset_alignment"] % 512 == 0
        assert found["mmap"] is True
        text = run("doctor", where)
        assert text.status == 0
        assert "direct I/O works" in text.out
        assert f"on {found['file_system']}" in text.out
        if found["available_memory_bytes"] is not None:
            assert size(1 << 30)[-3:] in text.out


def test_doctor_says_why_not(run: Run, path: Path, faults: Faults) -> None:
    faults.fail("pread_direct", errno.EINVAL)
    faults.fail("uring_setup", errno.EPERM)
    faults.fail("cachestat", errno.ENOSYS)
    faults.fail("mincore", errno.ENOSYS)
    faults.fail("pread_nowait", errno.EOPNOTSUPP)
    faults.fail("mmap", errno.ENODEV)
    done = run("doctor", path)
    assert done.status == 0
    for what in (
        "direct I/O does not work: Invalid argument (EINVAL)",
        "mmap does not work: No such device (ENODEV)",
        "io_uring does not work: Operation not permitted (EPERM)",
        "page cache: not known",
    ):
        assert what in done.out
    assert run("doctor", path.parent / "missing").status == 1
