"""Builds GGUF files byte by byte, so that every field of them can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

_FORMATS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f",
    BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip


def text(value: str | bytes) -> bytes:
    """A string: u64 length and bytes."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def fixed(version: int, n_tensors: int, n_keys: int) -> bytes:
    """The fixed header."""
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def scalar(kind: int, value: Any) -> bytes:
    """The bytes of a value that is no array."""
    return text(value) if kind == STRING else struct.pack(_FORMATS[kind], value)


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata record; `value` is raw."""
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, values: list[Any]) -> bytes:
    """The raw value of an array."""
    return struct.pack("<IQ", kind, len(values)) + b"".join(scalar(kind, v) for v in values)


def info(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """A tensor record; dims with ne[0] first."""
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def pad(data: bytes, alignment: int = 32) -> bytes:
    """`data` up to the next multiple of the alignment."""
    return data + bytes(-len(data) % alignment)


T1_DATA = bytes(range(32))
T1 = pad(fixed(3, 1, 0) + info("t", [8], 0, 0)) + T1_DATA


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def model(
    path: Path,
    tensors: dict[str, npt.NDArray[Any]],
    *,
    alignment: int | None = None,
    tokens: int = 0,
    seal: bool = True,
) -> Path:
    """A model of plain tensors by gguf-py's writer. seal=False: no padding at the end."""
    writer = gguf.GGUFWriter(path, "test")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    if tokens:
        writer.add_token_list([f"token{i}" for i in range(tokens)])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not seal:
        last = list(tensors.values())[-1]
        excess = -last.nbytes % (alignment or 32)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - excess])
    return path


def random_bytes(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8).tobytes()


def random_model(path: Path, sizes: list[int], seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """A model of int8 tensors of these sizes in bytes; returns what is in it."""
    random = np.random.default_rng(seed)
    tensors = {f"t{i}": random.integers(-128, 128, size, np.int8) for i, size in enumerate(sizes)}
    model(path, tensors)
    return tensors


Arrays = dict[str, npt.NDArray[Any]]


def split_model(
    folder: Path,
    tensors: Arrays,
    *,
    name: str = "m",
    arch: str = "test",
    alignment: int | None = None,
    **options: Any,
) -> list[Path]:
    """A split model by gguf-py's writer; its files in order."""
    options.setdefault("split_max_tensors", 1)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", arch, **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}-*.gguf"))


def random_tensors(n: int = 3, size: int = 5000, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {f"t{i}": random.integers(-128, 128, size + i, np.int8) for i in range(n)}


def shard(
    number: int,
    count: int,
    *,
    total: int | None = None,
    tensors: tuple[str, ...] = ("t",),
    extra: bytes = b"",
) -> bytes:
    """A shard byte by byte; number from 0."""
    keys = [
        key("split.no", U16, scalar(U16, number)),
        key("split.count", U16, scalar(U16, count)),
    ]
    if total is not None:
        keys.append(key("split.tensors.count", I32, scalar(I32, total)))
    infos = b"".join(info(name, [8], 0, 32 * i) for i, name in enumerate(tensors))
    data = b"".join(bytes([(number + 1) % 256]) * 32 for _ in tensors)
    return pad(fixed(3, len(tensors), len(keys)) + b"".join(keys) + infos) + data + extra


def quantized(path: Path, rows: int, wrong: dict[str, int]) -> None:
    """Q6_K tensors (210 bytes a block: cuts lie inside of blocks), some with a NaN scale."""
    infos, data = b"", b""
    for number in range(4):
        blocks = np.zeros((rows, 210), np.uint8)
        if (block := wrong.get(f"t{number}")) is not None:
            blocks[block, 208:] = np.array([np.nan], np.float16).view(np.uint8)
        infos += info(f"t{number}", [256, rows], 14, len(data))
        data += pad(blocks.tobytes())
    path.write_bytes(pad(fixed(3, 4, 0) + infos) + data)
