"""What can be given as a path, to the library and to the command."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loader
from loader.errors import ReadError
from tests.build import T1, T1_DATA, write
from tests.conftest import descriptors


def is_loaded(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bool:
    with loader.open(path) as model:
        assert model.path == os.fsdecode(path)
        return {n: t.numpy().tobytes() for n, t in model.load().items()} == {"t": T1_DATA}


def command(path: str | bytes | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loader", "load", path],
        capture_output=True, text=True, check=False, timeout=30, errors="surrogateescape",
    )  # fmt: skip


class OfBytes(os.PathLike[bytes]):
    def __init__(self, path: Path) -> None:
        self.path = os.fsencode(path)

    def __fspath__(self) -> bytes:
        return self.path


NAMES = [
    b"m.gguf", b"with space.gguf", "größe 模型.gguf".encode(), b"not utf-8 \xff\xfe.gguf",
    b"line\nbreak.gguf", b"\x1b[31mred.gguf", b"-m.gguf", b"[bold]x[\\].gguf", b"%s{}.gguf",
    b"a" * 250 + b".gguf",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_row_105_any_name_by_every_kind_of_path(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(T1)
    for given in (path, str(path), os.fsencode(path), OfBytes(path)):
        assert is_loaded(given)
    done = command(path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 7


def test_relative_paths_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", T1)
    (tmp_path / "link").symlink_to("m.gguf")
    (tmp_path / "hard").hardlink_to(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    for given in ("m.gguf", "./m.gguf", "link", "hard", b"m.gguf", Path("m.gguf")):
        assert is_loaded(given)


def test_row_101_paths_of_descriptors(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", T1)
    before = descriptors()
    with (tmp_path / "m.gguf").open("rb") as file:
        for folder in ("/dev/fd", "/proc/self/fd"):
            assert is_loaded(f"{folder}/{file.fileno()}")
        file.seek(20)
        assert is_loaded(f"/dev/fd/{file.fileno()}"), "from the beginning, wherever it stands"
        assert file.tell() == 20
        # A file without a name any more.
        (tmp_path / "m.gguf").unlink()
        assert is_loaded(f"/dev/fd/{file.fileno()}")
    assert descriptors() == before
    with pytest.raises(FileNotFoundError):
        loader.open("/dev/fd/999")


def test_row_101_memory_that_is_a_file() -> None:
    fd = os.memfd_create("model")
    try:
        os.write(fd, T1)
        assert is_loaded(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


@pytest.fixture
def irregular(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """What is no regular file, by how errors name it."""
    os.mkfifo(tmp_path / "fifo.gguf")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket.gguf"))
    read, written = os.pipe()
    yield {
        "a FIFO": tmp_path / "fifo.gguf",
        "a socket": tmp_path / "socket.gguf",
        "a character device": Path("/dev/zero"),
        f"/dev/fd/{read} is a FIFO": Path(f"/dev/fd/{read}"),
    }
    server.close()
    os.close(read)
    os.close(written)


def test_row_103_what_is_no_file_is_refused_at_once_and_by_name(
    tmp_path: Path, irregular: dict[str, Path], nothing_left: Callable[[], None]
) -> None:
    for what, path in irregular.items():
        for given in (path, [path]):
            with pytest.raises(ReadError, match=what) as caught:
                loader.open(given)
            assert caught.value.filename == str(path)
        if not str(path).startswith("/dev/fd"):
            done = command(path)
            assert done.returncode == 1
            assert what in done.stderr
            assert done.stderr.count("\n") == 1
    with pytest.raises(IsADirectoryError):
        loader.open(tmp_path)
    assert "directory" in command(tmp_path).stderr
    nothing_left()


def test_a_block_device_is_refused_by_name(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a device needs root")
    try:
        os.mknod(tmp_path / "disk.gguf", 0o60600, os.makedev(7, 250))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with pytest.raises(ReadError, match="a block device, not a regular file"):
        loader.open(tmp_path / "disk.gguf")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    write(tmp_path / "file", T1)
    for name in ("", tmp_path / "missing", tmp_path / "dangling"):
        with pytest.raises(FileNotFoundError):
            loader.open(name)
    for name in (tmp_path / "loop", tmp_path / "file" / "m.gguf", tmp_path / ("n" * 300)):
        with pytest.raises(ReadError, match="can't be opened") as caught:
            loader.open(name)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
        done = command(name)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    for wrong in ("a\0b", b"a\0b"):
        with pytest.raises(ValueError, match="null"):
            loader.open(wrong)


def test_row_104_permissions() -> None:
    """A file that may only be read is enough; one that may not be read is a PermissionError."""
    with tempfile.TemporaryDirectory() as name:  # where somebody else may get, unlike tmp_path
        folder = Path(name)
        path = write(folder / "m.gguf", T1)
        path.chmod(0o444)
        folder.chmod(0o555)
        assert is_loaded(path)
        if os.geteuid() != 0:
            pytest.skip("only root can become somebody else")
        for mode, status in ((0o000, 1), (0o444, 0)):
            path.chmod(mode)
            child = os.fork()
            if child == 0:
                outcome = 3
                try:
                    os.setuid(65534)
                    with loader.open(path) as model:
                        outcome = 0 if set(model.load()) == {"t"} else 2
                except PermissionError as error:
                    outcome = 1 if error.filename == str(path) else 2
                finally:
                    os._exit(outcome)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
        folder.chmod(0o755)
