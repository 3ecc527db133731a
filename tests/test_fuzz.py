"""A bounded run of the fuzzer; see tests/fuzz.py for long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz

SECONDS = 20


def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    try:
        result = fuzz.run(SECONDS, tmp_path)
    except fuzz.NoFuzzerError as error:
        pytest.skip(str(error))
    assert result.failure is None
    assert result.executions > 10_000
    assert result.coverage > 150
