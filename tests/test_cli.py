"""The command: results, JSON, exit status, and what it does with hostile names."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import loader
from loader.cli.lists import decode_name, encode_name
from loader.cli.main import main
from loader.cli.text import printable, size
from tests import build
from tests.build import T1, T1_DATA, array, fixed, info, key, model, pad, random_bytes, text, write

Run = Callable[..., "Done"]


class Done:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process."""
    for name in list(os.environ):
        if name.startswith(("GGUF_DIO_", "LLAMA_ARG_")):
            monkeypatch.delenv(name)

    def do(*words: str | Path) -> Done:
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Done(status, *capsys.readouterr())

    return do


def execute(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "loader", *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)


@pytest.fixture
def path(direct_folder: Path) -> Path:
    tensors = {f"blk.{i}.w": np.arange(i, i + 1000, dtype=np.float32) for i in range(3)}
    return model(direct_folder / "m.gguf", tensors)


def digests(path: Path) -> dict[str, str]:
    weights = loader.load(path, access="buffered")
    return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in weights.items()}


# --- load ---


ACCESS = [
    ([], "direct", ["direct", "mmap", "buffered"]),
    (["-dio"], "direct", ["direct", "mmap", "buffered"]),
    (["--direct-io"], "direct", ["direct", "mmap", "buffered"]),
    (["--mmap"], "mmap", ["mmap", "buffered"]),
    (["-ndio"], "mmap", ["mmap", "buffered"]),
    (["--no-mmap"], "direct", ["direct", "buffered"]),
    (["-ndio", "--no-mmap"], "buffered", ["buffered"]),
    (["--no-mmap", "--no-direct-io"], "buffered", ["buffered"]),
    (["-dio", "--mmap"], "mmap", ["mmap", "buffered"]),
    (["--mmap", "-dio"], "direct", ["direct", "mmap", "buffered"]),
    (["--no-mmap", "--mmap", "-ndio"], "mmap", ["mmap", "buffered"]),
]


@pytest.mark.parametrize(("flags", "access", "requested"), ACCESS)
def test_flags_choose_the_access(
    run: Run, path: Path, flags: list[str], access: str, requested: list[str]
) -> None:
    done = run("load", path, *flags, "--json")
    assert done.status == 0
    assert done.err == ""
    file = done.json["files"][0]
    assert (file["access"], file["requested"]) == (access, requested)
    assert run("load", *flags, path, "--json").json["files"][0]["access"] == access
    verified = run("verify", path, *flags, "--json").json
    assert verified["tensors"] == digests(path)
    assert verified["files"][0]["access"] == access


@pytest.mark.parametrize(
    ("variables", "flags", "access"),
    [
        ({"LLAMA_ARG_MMAP": "1"}, [], "mmap"),
        ({"LLAMA_ARG_MMAP": "on", "LLAMA_ARG_DIO": "enabled"}, [], "direct"),
        ({"LLAMA_ARG_MMAP": "0", "LLAMA_ARG_DIO": "off"}, [], "buffered"),
        ({"LLAMA_ARG_DIO": "false"}, [], "mmap"),
        ({"LLAMA_ARG_NO_MMAP": "", "LLAMA_ARG_NO_DIO": "0"}, [], "buffered"),
        ({"LLAMA_ARG_NO_DIO": "1", "LLAMA_ARG_DIO": "1"}, [], "mmap"),
        ({"LLAMA_ARG_DIO": "disabled"}, ["--no-mmap"], "buffered"),
        ({"LLAMA_ARG_DIO": "disabled"}, ["-dio"], "direct"),
        ({"GGUF_DIO_ACCESS": "buffered", "LLAMA_ARG_MMAP": "1"}, [], "buffered"),
        ({"GGUF_DIO_ACCESS": "buffered"}, ["--mmap"], "mmap"),
        ({"GGUF_DIO_ACCESS": "mmap", "LLAMA_ARG_DIO": "no"}, ["-ndio"], "mmap"),
        ({"GGUF_DIO_ACCESS": "auto"}, [], "direct"),
    ],
)
def test_the_environment(
    run: Run,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    flags: list[str],
    access: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run("load", path, *flags, "--json").json["files"][0]["access"] == access


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLAMA_ARG_MMAP", "yes"),
        ("LLAMA_ARG_DIO", ""),
        ("GGUF_DIO_ACCESS", "fast"),
        ("GGUF_DIO_CHUNK", "-1"),
    ],
)
def test_variables_that_do_not_parse_are_named(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    done = run("load", path)
    assert done.status == 2
    assert name in done.err
    assert done.out == ""


def test_load_says_how_it_went(run: Run, path: Path) -> None:
    done = run("load", path)
    assert done.status == 0
    assert done.err == ""
    assert "access: direct: direct I/O is enabled and available, so mmap is disabled" in done.out
    assert "3 tensors" in done.out
    report = run("load", path, "--json", "--tensors", "blk.1.*", "--mlock").json
    assert report["tensors"] == 1
    assert report["bytes"] == 4000
    both = run("load", path, "--json", "--tensors", "blk.1.*", "--tensors", "*.2.w").json
    assert both["tensors"] == 2


def test_load_options_that_fail(run: Run, path: Path) -> None:
    for words, what in (
        (["--tensors", "nope*"], "no tensor matches nope*"),
        (["--device", "cuda:0"], "cuda:0"),
    ):
        done = run("load", path, *words)
        assert done.status == 1
        assert what in done.err
        assert done.err.count("\n") == 1


def test_check_tensors(run: Run, direct_folder: Path) -> None:
    path = model(direct_folder / "m.gguf", {"bad": np.full(10, np.nan, np.float32)})
    assert run("load", path).status == 0
    done = run("load", path, "--check-tensors")
    assert done.status == 1
    assert "'bad'" in done.err


def test_the_sample(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "cache" / "gguf-dio" / "sample.gguf"
    first = run("load", "--json", "--check-tensors")
    assert first.status == 0
    assert f"made the sample {path}" in first.err
    assert first.json["tensors"] == 16
    assert f"loading the sample {path}" in run("load").err
    path.write_bytes(b"broken")
    assert "made the sample" in run("load").err
    assert list(path.parent.iterdir()) == [path], "no temporary files are left"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    done = run("load")
    assert done.status == 1
    assert done.err.count("\n") == 1


# --- Wrong usage and broken files ---


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nope"],
        ["load", "-d"],
        ["load", "--js"],
        ["load", "--no"],
        ["load", "m", "n"],
        ["load", "-1024,512"],
        ["load", "--device"],
        ["load", "--tensors", "-x,-y"],
        ["--vers"],
        ["inspect"],
        ["verify", "m", "--check", "a", "--write", "b"],
        ["load", "-dio,mmap"],
    ],
)
def test_wrong_usage(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert done.status == 2
    assert done.out == ""
    listed = [word for word in words if "," in word]
    assert all(word in done.err for word in listed), "a list that begins with a minus is shown"


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"gguf-dio {loader.__version__}\n"
    for words in (["--help"], ["load", "--help"], ["inspect", "-h"], ["verify", "-h"]):
        done = run(*words)
        assert done.status == 0
        assert "usage: gguf-dio" in done.out


def test_a_path_that_begins_with_a_minus(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "-m.gguf", T1)
    os.chdir(tmp_path)
    assert run("load", "--json", "--", "-m.gguf").json["model"] == "-m.gguf"


@pytest.mark.parametrize("command", ["load", "inspect", "verify"])
def test_broken_input_is_one_clear_line(run: Run, tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    broken = {
        write(tmp_path / "empty", b""): "is empty",
        write(tmp_path / "html", b"<!DOCTYPE html>"): "HTML",
        write(tmp_path / "cut", T1[:-1]): "only 31",
        tmp_path / "missing": "No such file",
        tmp_path: "Is a directory",
        tmp_path / "fifo": "a FIFO",
    }
    for path, what in broken.items():
        for words in ([], ["--json"]):
            done = run(command, path, *words)
            assert done.status == 1
            assert done.out == ""
            assert done.err.count("\n") == 1
            assert str(path) in done.err
            assert what in done.err


# --- Hostile names ---

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "two\nlines\r",
    "[/x][bold]markup",
    "\u202egnp.exe",
    "tab\tnull\0",
    "back\\slash",
    "\udcff\udc80",
    "größe 模型 🙂",
    "",
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    names = [name.encode("utf-8", "surrogateescape") for name in HOSTILE]
    infos = b"".join(info(name, [8], 0, 32 * i) for i, name in enumerate(names))
    keys = b"".join(key(name, build.STRING, text(name)) for name in names if name)
    keys += key("list", build.ARRAY, array(build.STRING, names))
    data = pad(fixed(3, len(names), len(names)) + keys + infos) + random_bytes(32 * len(names))
    return write(tmp_path / "h\x1b[1mostile\n.gguf", data)


def is_harmless(out: str) -> bool:
    return all(char == "\n" or char.isprintable() for char in out)


def test_row_125_names_are_printed_harmlessly(run: Run, hostile: Path) -> None:
    for words in (
        ["load", hostile],
        ["inspect", hostile, "--metadata", "--tensors"],
        ["verify", hostile],
        ["load", str(hostile) + "\x1b[2J"],
        ["load", hostile, "--tensors", "\x1b[2J"],
        ["load", hostile, "--\x1b[2J\n"],
    ):
        done = run(*words)
        assert is_harmless(done.out), done.out
        assert is_harmless(done.err), done.err
        assert done.out or done.err
    shown = run("inspect", hostile, "--tensors").out.splitlines()
    assert len([line for line in shown if " F32 " in line]) == len(HOSTILE)
    assert "\\x1b[31mred\\x1b[0m" in run("inspect", hostile, "--tensors").out
    assert "[/x][bold]markup" in run("inspect", hostile, "--tensors").out


def test_text_of_any_size_is_cut_for_a_terminal(run: Run, tmp_path: Path) -> None:
    """Arrays of strings, and a name of a megabyte: the beginning, in bounded time and memory."""
    tokens = key("tokens", build.ARRAY, array(build.STRING, ["one", "two", "\x1b[31m"] * 5))
    name = key("general.name", build.STRING, text(b"\x80" * (1 << 20)))
    path = write(tmp_path / "m.gguf", pad(fixed(3, 0, 2) + tokens + name))
    done = run("inspect", path, "--metadata")
    assert done.status == 0, done.err
    assert "tokens = 15 x STRING: ['one', 'two', '\\x1b[31m', " in done.out
    assert "... (1048576 characters)" in done.out
    assert len(done.out) < 100_000


def test_row_125_json_is_exact(run: Run, hostile: Path) -> None:
    found = run("inspect", hostile, "--json").json
    assert [tensor["name"] for tensor in found["tensors"]] == HOSTILE
    assert found["metadata"]["list"]["value"] == HOSTILE
    assert found["model"] == str(hostile)
    for name in HOSTILE:
        assert not name or found["metadata"][name]["value"] == name
    out = run("verify", hostile, "--json").out
    assert out.isascii()
    assert out.count("\n") == 1
    assert list(json.loads(out)["tensors"]) == HOSTILE


def test_lists_of_hostile_names(run: Run, hostile: Path, tmp_path: Path) -> None:
    target = tmp_path / "list"
    assert run("verify", hostile, "--write", target).status == 0
    assert len(target.read_text().split("\n")) == len(HOSTILE) + 1
    assert run("verify", hostile, "--check", target).status == 0


@given(st.text(st.characters(codec=None)), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_names_in_lists_are_exact(name: str, encoding: str) -> None:
    shown = encode_name(name, encoding)
    assert is_harmless(shown)
    assert "\n" not in shown
    shown.encode(encoding)
    assert decode_name(shown) == name
    assert printable(printable(name)) == printable(name)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1 << 20, 5 << 30, 9 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 GiB", "9216.0 GiB",
    ]  # fmt: skip


# --- inspect ---


def test_inspect(run: Run, path: Path) -> None:
    done = run("inspect", path, "--metadata", "--tensors")
    assert done.status == 0
    for text_ in ("GGUF version 3", "general.architecture = test", "blk.2.w", "F32: 3 tensors"):
        assert text_ in done.out
    found = run("inspect", path, "--json").json
    assert set(found) == {"model", "kind", "files", "bytes", "types", "metadata", "tensors"}
    assert found["types"] == {"F32": {"tensors": 3, "bytes": 12000}}
    assert found["tensors"][1]["shape"] == [1000]
    assert found["files"][0]["version"] == 3


def test_inspect_shortens_long_arrays_unless_asked(run: Run, direct_folder: Path) -> None:
    path = model(direct_folder / "m.gguf", {"t": np.zeros(8, np.float32)}, tokens=100)
    for words, whole in (([], False), (["--metadata"], True)):
        value = run("inspect", path, "--json", *words).json["metadata"]["tokenizer.ggml.tokens"]
        assert (value["type"], value["element_type"], value["count"]) == ("ARRAY", "STRING", 100)
        assert value["value"] == ([f"token{i}" for i in range(100)] if whole else None)


def test_inspect_numbers_that_json_has_not(run: Run, tmp_path: Path) -> None:
    keys = key("nan", build.F32, b"\0\0\xc0\x7f")
    keys += key("infs", build.ARRAY, array(build.F64, [float("inf"), float("-inf"), 1.5]))
    found = run("inspect", write(tmp_path / "m.gguf", fixed(3, 0, 2) + keys), "--json").json
    assert found["metadata"]["nan"]["value"] == "nan"
    assert found["metadata"]["infs"]["value"] == ["inf", "-inf", 1.5]


def test_unknown_types_are_listed(run: Run, tmp_path: Path) -> None:
    infos = info("odd", [8], 99, 0) + info("t", [8], 0, 32)
    path = write(tmp_path / "m.gguf", pad(fixed(3, 2, 0) + infos) + bytes(32) + T1_DATA)
    assert "type 99" in run("inspect", path, "--tensors").out
    found = run("inspect", path, "--json").json["tensors"][0]
    assert (found["type_id"], found["nbytes"]) == (99, None)
    done = run("verify", path, "--json")
    assert done.status == 0
    assert "'odd'" in done.err
    assert done.json["tensors"] == {"odd": None, "t": hashlib.sha256(T1_DATA).hexdigest()}
    assert run("load", path).status == 1
    assert run("load", path, "--tensors", "t").status == 0


# --- verify ---


def test_verify_prints_a_list(run: Run, path: Path, tmp_path: Path) -> None:
    done = run("verify", path)
    assert done.out == "".join(f"{digest}  {name}\n" for name, digest in digests(path).items())
    target = write(tmp_path / "list", done.out.encode())
    checked = run("verify", path, "--check", target)
    assert checked.status == 0
    assert "3 tensors are as in" in checked.out


def test_verify_finds_one_changed_byte(run: Run, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "list"
    assert run("verify", path, "--write", target).status == 0
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    other = write(tmp_path / "other.gguf", bytes(data))
    for words in (["--check", target], ["--against", path]):
        done = run("verify", other, *words)
        assert done.status == 1
        assert "1 tensors different ('blk.2.w')" in done.err
        found = run("verify", other, *words, "--json").json[str(words[0]).removeprefix("--")]
        assert found["different"] == ["blk.2.w"]
        assert found["missing"] == found["unexpected"] == []


def test_verify_finds_missing_and_unexpected_tensors(
    run: Run, path: Path, direct_folder: Path
) -> None:
    other = model(direct_folder / "o.gguf", {"blk.0.w": np.arange(1000, dtype=np.float32)})
    done = run("verify", other, "--against", path)
    assert done.status == 1
    assert "2 tensors missing" in done.err
    assert "2 tensors not expected" in run("verify", path, "--against", other).err
    assert run("verify", path, "--against", path).status == 0
    found = run("verify", path, "--json").json
    assert found["check"] is None
    assert found["against"] is None


def test_verify_never_overwrites(run: Run, path: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "list", b"precious")
    done = run("verify", path, "--write", target)
    assert done.status == 1
    assert "File exists" in done.err
    assert str(target) in done.err
    assert target.read_bytes() == b"precious"
    assert run("verify", path, "--write", tmp_path / "no" / "list").status == 1


def test_verify_wants_a_list(run: Run, path: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "list", b"a" * 64 + b"  fine\nnot a list\n")
    done = run("verify", path, "--check", target)
    assert done.status == 1
    assert "line 2" in done.err
    assert run("verify", path, "--check", tmp_path / "missing").status == 1
    digest = "a" * 64
    for content, what in (
        (b"\xff\xfe\x00", "line 1 is not of the form"),
        (f"{digest}  \\\\U99999999".encode(), "line 1 is wrong escape"),
        (f"{digest}  a\n{digest}  \\\\z".encode(), "line 2 is wrong escape"),
        (f"{digest}  a\n{digest}  a".encode(), "line 2 is for a tensor that the list has already"),
    ):
        done = run("verify", path, "--check", write(tmp_path / "wrong", content))
        assert done.status == 1
        assert f"wrong: {what}" in done.err
    os.mkfifo(tmp_path / "fifo")
    assert "a FIFO" in run("verify", path, "--check", tmp_path / "fifo").err


def test_verify_takes_lists_of_other_tools(run: Run, path: Path, tmp_path: Path) -> None:
    lines = [f"{digest.upper()} *{name}\r\n" for name, digest in digests(path).items()]
    target = write(tmp_path / "list", b"\xef\xbb\xbf" + "".join([*lines, "\n"]).encode())
    assert run("verify", path, "--check", target).status == 0


def test_verify_of_tensors_without_a_digest(run: Run, tmp_path: Path) -> None:
    infos = info("odd", [8], 99, 0) + info("t", [8], 0, 32)
    path = write(tmp_path / "m.gguf", pad(fixed(3, 2, 0) + infos) + bytes(32) + T1_DATA)
    assert run("verify", path, "--write", tmp_path / "list").status == 0
    done = run("verify", path, "--check", tmp_path / "list", "--against", path)
    assert done.status == 0
    assert "'odd'" in done.err


def test_verify_of_a_list_in_another_encoding(hostile: Path, tmp_path: Path) -> None:
    poor = os.environ | {"PYTHONIOENCODING": "ascii"}
    made = execute("verify", hostile, env=poor)
    assert made.returncode == 0
    target = write(tmp_path / "list", made.stdout)
    assert execute("verify", hostile, "--check", target).returncode == 0


# --- A process of its own ---


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams(path: Path, closed: int) -> None:
    command = [sys.executable, "-m", "loader", "load", str(path), "--json"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command],  # noqa: S607
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert closed == 1 or json.loads(done.stdout)["tensors"] == 3


def test_a_full_disk_is_named(path: Path) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            [sys.executable, "-m", "loader", "load", str(path)],
            stdout=full, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == b"gguf-dio: the output: No space left on device; make room\n"


def test_no_home_for_the_sample(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    done = run("load")
    assert done.status == 1
    assert "set XDG_CACHE_HOME" in done.err


def test_a_closed_pipe_ends_quietly(path: Path) -> None:
    command = [sys.executable, "-m", "loader", "verify", str(path)]
    read, write_ = os.pipe()
    os.close(read)
    with os.fdopen(write_, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_poor_encodings(hostile: Path, variables: dict[str, str]) -> None:
    done = execute("inspect", hostile, "--tensors", env=os.environ | variables)
    assert done.returncode == 0
    assert done.stderr == b""


def test_ctrl_c_is_130(direct_folder: Path) -> None:
    """During a work of some seconds, on a sparse file of 8 GiB."""
    size, n = 128 << 20, 64
    path = direct_folder / "m.gguf"
    infos = b"".join(info(f"t{i}", [size], 24, size * i) for i in range(n))
    path.write_bytes(pad(fixed(3, n, 0) + infos))
    os.truncate(path, path.stat().st_size + n * size)
    command = [sys.executable, "-m", "loader", "verify", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == (b"", b"gguf-dio: interrupted\n")


def test_a_progress_bar_on_a_terminal_only(path: Path) -> None:
    assert execute("verify", path, "--json").stderr == b""
    control, terminal = pty.openpty()
    fcntl.fcntl(control, fcntl.F_SETFL, os.O_NONBLOCK)
    done = subprocess.run(
        [sys.executable, "-m", "loader", "verify", str(path), "--json"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        timeout=60,
        check=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(terminal)
    drawn = os.read(control, 1 << 16)
    os.close(control)
    assert b"verifying" in drawn
    assert json.loads(done.stdout)["tensors"] == digests(path)


def test_no_traceback_for_a_bug(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\x1b[1mboom")

    monkeypatch.setattr("loader.cli.load.execute", fail)
    done = run("load", path)
    assert done.status == 1
    assert re.search(r"internal error.*RuntimeError: \\x1b\[1mboom", done.err)
