"""The C unit tests (tests/native/*.c), under each sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parent / "_native"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
SANITIZERS: dict[str, list[str]] = {
    "address,undefined": ["-fno-sanitize-recover=all"],
    "thread": [],
}


PROGRAMS: dict[str, list[list[str]]] = {
    "test_read": [[]],
    "test_scan": [[]],
    "test_queue": [["1"], ["2"], ["3"]],  # an ld_method_id each
}
SKIPPED = 77


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_c_units(direct_folder: Path, name: str, sanitizer: str) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not NATIVE.is_dir():
        pytest.skip("a C compiler and the sources of the core are needed")
    program = direct_folder / name
    flags = [*WARNINGS, "-g", "-O1", f"-fsanitize={sanitizer}", *SANITIZERS[sanitizer]]
    sources = [HERE / "native" / f"{name}.c", *sorted(NATIVE.glob("*.c"))]
    built = subprocess.run(
        [compiler, *flags, '-DLD_VERSION="test"', *sources, "-lpthread", "-o", program],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if "cannot find -l" in built.stderr or "unsupported option" in built.stderr:
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    for words in PROGRAMS[name]:
        command: list[str | Path] = [program, direct_folder / "data", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == SKIPPED:
            pytest.skip(done.stdout)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
