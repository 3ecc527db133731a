"""The structure of the code: imports go down only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import loader

ROOT = Path(loader.__file__).parent

# From the bottom up; a module may import from its own layer and from those before it.
LAYERS = [
    ["_version", "_closing", "errors", "options"],
    ["report"],
    ["_ffi"],
    ["io"],
    ["gguf"],
    ["device"],
    ["fit"],
    ["planning"],
    ["placement"],
    ["tensor"],
    ["batch"],
    ["reading"],
    ["results"],
    ["destinations"],
    ["loading"],
    ["model"],
    ["measure"],
    ["comparison"],
    ["checkpoint"],
    ["compat", "cli"],
    ["__init__", "__main__"],
]
PURE = ["io/ranges.py", "io/access.py"]
# The planner and its result: beside arithmetic they know what memory is, and log.
PLANNER = ["fit/planner.py", "fit/result.py"]


def layer(module: str) -> int:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            found.add(node.module)
            if node.module == "loader":
                found.discard("loader")
                found.update(f"loader.{alias.name}" for alias in node.names)
    return found


def test_imports_go_down_only() -> None:
    paths = [path for path in ROOT.rglob("*.py") if path.name != "__pycache__"]
    assert len(paths) > 20
    for path in paths:
        module = "loader." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in imports(path):
            if not name.startswith("loader"):
                continue
            if name == "loader._native":
                assert path.name == "_ffi.py", f"{path} imports the native module"
                continue
            assert layer(name) <= layer(module), f"{path} imports {name}, which is above it"


def test_pure_modules_know_no_files_and_no_native_code() -> None:
    for name in PURE:
        allowed = {"__future__", "bisect", "collections.abc", "dataclasses", "operator"}
        assert imports(ROOT / name) <= allowed | {"loader.options"}, name


def test_the_planner_knows_no_files_and_no_devices() -> None:
    for name in PLANNER:
        allowed = {
            "__future__",
            "collections.abc",
            "dataclasses",
            "enum",
            "logging",
            "operator",
            "typing",
        }
        allowed |= {"loader.fit.result", "loader.device.memory"}
        assert imports(ROOT / name) <= allowed, name


def test_importing_the_library_imports_no_terminal_and_no_device_packages() -> None:
    code = (
        "import sys, loader; unwanted = ('rich', 'torch', 'cuda', 'pyopencl', 'loader.cli'); "
        "print([name for name in unwanted if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
