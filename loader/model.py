"""Opening a model and loading from it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gguf import Keys

from loader._closing import Closing
from loader.errors import ShardError, frames_released
from loader.gguf.header import Header, read_header
from loader.gguf.metadata import Metadata
from loader.gguf.tensors import TensorInfo
from loader.io.file import File
from loader.io.source import decide
from loader.loading import load as execute
from loader.options import AccessRequest, LoadKeywords, LoadOptions, MetadataValue, OpenOptions
from loader.planning import ModelFile, OpenFile, OpenModel
from loader.tensor import Weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Model(Closing):
    """An open model: its headers are read, its weights aren't. A context manager.

    metadata: a mapping, arrays decoded on first touch; tensors: a mapping from
    name to TensorInfo, in file order; files: a ModelFile for each file. All three
    stay usable after `close`; loading doesn't. A model may be used from several
    threads at once.
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    files: tuple[ModelFile, ...]

    def __init__(self, path: PathLike | Sequence[PathLike], options: OpenOptions) -> None:
        with frames_released():
            header, opened = _open(_single_path(path), options)
        self.metadata = header.metadata
        self.tensors = header.tensors
        self.files = tuple(file.describe() for file in opened.files)
        self._open: OpenModel | None = opened

    def load(self, **options: Unpack[LoadKeywords]) -> Weights:
        """Loads tensors into memory of their own, or maps them, as the model was opened.

        names: an iterable of names, or a predicate on TensorInfo (default: all);
        device: "cpu"; check_tensors: raise TensorDataError for NaN or infinite
        values or scales; mlock: lock the memory; no_alloc: read nothing, and
        return empty Weights whose report has the memory figures; progress:
        called with bytes done and total, the load is cancelled (LoadCancelled)
        when it returns False; chunk_bytes: the size of one read.

        Tensors of one load share one memory; see Tensor. Raises ValueError for an
        unknown name and for a closed model, UnsupportedFormatError for a tensor of
        unknown type, ReadError and its kinds when reading fails, MemoryError
        (DeviceMemoryError) when there is too little memory.
        """
        return self._load(LoadOptions(**options))

    def _load(self, options: LoadOptions) -> Weights:
        if self._open is None:
            raise ValueError("this model is closed; open it again to load from it")
        with frames_released():
            return execute(self._open, options)

    def close(self) -> None:
        """Closes the files. Tensors that were loaded, metadata and infos stay valid."""
        self._open = None

    def __repr__(self) -> str:
        return f"<Model {self.files[0].path!r}, {len(self.tensors)} tensors>"


def _open(path: PathLike, options: OpenOptions) -> tuple[Header, OpenModel]:
    started = time.perf_counter()
    file = File(path)
    header = read_header(file)
    _refuse_shard(file.path, header)
    header.metadata.override(options.metadata_overrides)
    opened = OpenFile(decide(file, options.modes), header)
    seconds = time.perf_counter() - started
    return header, OpenModel(file.path, (opened,), header.tensors, seconds)


def _single_path(path: PathLike | Sequence[PathLike]) -> PathLike:
    if isinstance(path, (str, bytes, os.PathLike)):
        return path
    if not isinstance(path, (list, tuple)):
        raise TypeError(f"a model is a path or a list of paths, not {path!r}")
    if len(path) != 1:
        raise ShardError(f"{len(path)} paths were given; this version opens models of one file")
    only = path[0]
    if not isinstance(only, (str, bytes, os.PathLike)):
        raise TypeError(f"a path is a str, bytes or os.PathLike, not {only!r}")
    return only


def _refuse_shard(path: str, header: Header) -> None:
    """One file of several isn't a model: loading it alone would leave tensors out unnoticed."""
    count = header.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1)
    if isinstance(count, int) and count > 1:
        raise ShardError(
            f"{path}: this is one of {count} files of a split model, which this version can't "
            "load; join them with llama.cpp's gguf-split --merge",
            path=path,
            field=Keys.Split.LLM_KV_SPLIT_COUNT,
        )


def open(  # noqa: A001 - the contract: loader.open
    path: PathLike | Sequence[PathLike],
    *,
    access: AccessRequest | None = None,
    metadata_overrides: Mapping[str, MetadataValue] | None = None,
) -> Model:
    """Opens a model: reads and checks its header, decides how its weights will be read.

    path: the file. access: "auto" (direct I/O, else mmap, else buffered reads),
    one mode, which is a demand, or a sequence in order of preference; the default
    comes from GGUF_DIO_ACCESS, else "auto". metadata_overrides: values that take
    the place of stored ones.

    Raises FormatError and its kinds for what is no valid GGUF file, DirectIOError
    or MappingError for a demand that can't be met, FileNotFoundError,
    PermissionError, IsADirectoryError, ReadError.
    """
    overrides = {} if metadata_overrides is None else metadata_overrides
    return Model(path, OpenOptions(access=access, metadata_overrides=overrides))


def load(
    path: PathLike | Sequence[PathLike],
    *,
    access: AccessRequest | None = None,
    metadata_overrides: Mapping[str, MetadataValue] | None = None,
    **options: Unpack[LoadKeywords],
) -> Weights:
    """Opens a model, loads from it and closes it; see `open` and `Model.load` for the options."""
    load_options = LoadOptions(**options)  # wrong ones are refused before anything is opened
    with open(path, access=access, metadata_overrides=metadata_overrides) as model:
        return model._load(load_options)
