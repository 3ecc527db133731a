"""Fuzzes the scan of headers with libFuzzer: `python -m tests.fuzz SECONDS [CORPUS]`.

Needs clang with its libFuzzer (on Debian: clang and libclang-rt-dev). The corpus
grows from small valid files; give a folder to keep it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import build
from tests.build import T1, array, fixed, info, key, pad, scalar

HERE = Path(__file__).parent
NATIVE = HERE.parent / "_native"
LONGEST_INPUT = 4096


class NoFuzzerError(Exception):
    """This machine has no clang, or one without libFuzzer."""


@dataclass(frozen=True)
class Result:
    """executions: inputs that were tried; coverage: edges of the code that were reached; failure:
    what the fuzzer printed when it found something, else None."""

    executions: int
    coverage: int
    failure: str | None


def seeds() -> list[bytes]:
    """Valid headers with everything that there is in the format, and a few that are broken."""
    kinds = [kind for kind in range(13) if kind != build.ARRAY]
    values = {kind: "text" if kind == build.STRING else 1 for kind in kinds}
    scalars = b"".join(key(f"k{kind}", kind, scalar(kind, values[kind])) for kind in kinds)
    arrays = b"".join(key(f"a{k}", build.ARRAY, array(k, [values[k]] * 3)) for k in kinds)
    split = key("split.no", build.U16, scalar(build.U16, 1))
    split += key("split.count", build.U16, scalar(build.U16, 3))
    tensors = b"".join(
        info(f"t{kind}", [256, 2, kind], kind, 4096 * kind) for kind in range(7)
    ) + info("scalar", [], 0, 0)
    strings = array(build.STRING, ["", "a", "bc" * 20])
    return [
        T1,
        pad(fixed(2, 0, 24) + scalars + arrays),
        pad(fixed(3, 8, 2) + split + tensors),
        pad(fixed(3, 1, 1) + key("tokens", build.ARRAY, strings) + info("t", [1] * 8, 0, 0)),
        fixed(3, 0, 1) + key("a", build.ARRAY, b"\0\0\0\0" + b"\xff" * 8),
        fixed(1, 0, 0),
        b"GGU",
    ]


def compile_target(folder: Path) -> Path:
    """Builds the target; NoFuzzerError where that can't be done."""
    compiler = shutil.which("clang")
    if compiler is None or not NATIVE.is_dir():
        raise NoFuzzerError("clang and the sources of the core are needed")
    target = folder / "fuzz_scan"
    built = subprocess.run(
        [compiler, "-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror",
         "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all",
         '-DLD_VERSION="fuzz"', HERE / "native" / "fuzz_scan.c", *sorted(NATIVE.glob("*.c")),
         "-lpthread", "-o", target],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if "libclang_rt.fuzzer" in built.stderr:
        raise NoFuzzerError("this clang has no libFuzzer (Debian: libclang-rt-dev)")
    if built.returncode != 0:
        raise RuntimeError(built.stderr)
    return target


def run(seconds: int, folder: Path, corpus: Path | None = None) -> Result:
    """Fuzzes for so long. folder: for what is made; corpus: inputs to begin with and to add to."""
    target = compile_target(folder)
    corpus = folder / "corpus" if corpus is None else corpus
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds()):
        for how in (0x00, 0x05, 0x7F, 0x85):
            (corpus / f"seed-{number}-{how}").write_bytes(bytes([how]) + seed)
    done = subprocess.run(
        # The peak of a process counts that of the one that it was forked from, however large: a
        # shell is small.
        ["/bin/sh", "-c", '"$@"; exit $?', "sh",
         target, corpus, f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", "-timeout=5",
         "-rss_limit_mb=1024", "-malloc_limit_mb=64", "-print_final_stats=1",
         "-use_value_profile=1", f"-artifact_prefix={folder}/"],
        capture_output=True, text=True, check=False, timeout=seconds + 300,
        # Freed memory that is kept, to find uses of it, counts as the process's.
        env={**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=32"},
    )  # fmt: skip
    executions = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    return Result(
        int(executions[1]) if executions else 0,
        int(coverage[-1]) if coverage else 0,
        None if done.returncode == 0 else done.stderr[-4000:],
    )


def main() -> int:
    seconds = int(sys.argv[1])
    corpus = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    result = run(seconds, folder, corpus)
    print(f"{result.executions} executions in {seconds} s, coverage {result.coverage}")
    if result.failure is not None:
        print(f"{result.failure}\nThe input is in {folder}.")
    return 0 if result.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
