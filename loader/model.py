"""Opening a model and loading from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from loader._closing import Closing
from loader.errors import frames_released
from loader.gguf.kind import Kind, kind_of
from loader.gguf.metadata import Metadata
from loader.gguf.shards import open_files
from loader.gguf.tensors import TensorInfo, TensorTable
from loader.io.access import disables_mmap
from loader.io.file import log_fallback
from loader.io.source import decide
from loader.loading import choose, empty, load as execute, load_tensors, stream
from loader.options import (
    AccessRequest,
    LoadKeywords,
    LoadOptions,
    MetadataValue,
    OpenOptions,
    PageCache,
    PathLike,
    Selection,
)
from loader.planning import ModelFile, OpenFile, OpenModel, rows
from loader.tensor import Buffers, Tensor, Weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("loader")


class Model(Closing):
    """An open model: its headers are read, its weights aren't. A context manager.

    path: as it was given, the first one of a list; kind: "model", "projector",
    "adapter", "imatrix" or "vocabulary"; metadata: a mapping, arrays
    decoded on first touch; tensors: a mapping from name to TensorInfo, in file
    order; files: a ModelFile for each file. All of them stay usable after
    `close`; loading doesn't. A model may be used from several threads at once.
    """

    path: str
    kind: Kind
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    files: tuple[ModelFile, ...]

    def __init__(self, path: PathLike | Sequence[PathLike], options: OpenOptions) -> None:
        with frames_released():
            self.metadata, opened = _open(path, options)
        self.path = opened.name
        self.tensors = opened.tensors
        self.kind = kind_of(self.metadata, len(self.tensors))
        self.files = tuple(file.describe() for file in opened.files)
        self._open: OpenModel | None = opened

    def load(self, **options: Unpack[LoadKeywords]) -> Weights:
        """Loads tensors into memory of their own, or maps them, as the model was opened.

        names: an iterable of names, or a predicate on TensorInfo (default: all);
        device: where to: "cpu", "cuda:0", "opencl:0", "torch:DEVICE", a
        loader.device.base.Device, or, for several, a mapping from name or a
        function of a TensorInfo to these, or "PATTERN=DEVICE,..."; check_tensors:
        raise TensorDataError for NaN or infinite values or scales; mlock: lock the
        memory; no_alloc: read nothing, and return empty Weights whose report has
        the memory figures; progress: called with bytes done and total, the load is
        cancelled (LoadCancelled) when it returns False; into: memory to read to,
        see below; method: "auto", or, as a demand, "io_uring", "threads" or "sync"
        (one read at a time); depth: how many direct reads are under way at once
        (of buffered ones, and of a mapping, more than two are no gain);
        chunk_bytes: the size of one; memory_limit: the most that staging buffers
        on the way to devices have.

        into: a mapping from name to a writable buffer (an array, a memoryview, the
        result of `empty`; for a device, an array of its own library), or an
        earlier Weights, whose memory is used again: tensors of it that somebody
        still holds then show the new data, and it keeps only those that are where
        they were. Tensors that are loaded but not in the mapping, or are on a
        device that the earlier Weights aren't on, get memory of their own.
        ValueError, before anything is read, for names that aren't loaded and for
        buffers that are read-only, overlap, have another size or are on another
        device. After an error the memory holds something of both.

        Tensors of one load share one memory; see Tensor. Raises ValueError for an
        unknown name and for a closed model, UnsupportedFormatError for a tensor of
        unknown type, ReadError and its kinds when reading fails, MemoryError
        (DeviceMemoryError) when there is too little memory.
        """
        return self._load(LoadOptions(**options))

    def _load(self, options: LoadOptions) -> Weights:
        with frames_released():
            return execute(self._opened(), options)

    def _opened(self) -> OpenModel:
        if self._open is None:
            raise ValueError("this model is closed; open it again to load from it")
        return self._open

    def stream(self, **options: Unpack[LoadKeywords]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, Tensor) for each tensor as it becomes ready.

        Tensors that lie together share memory, which is freed when the last of
        them is gone; memory_limit (bytes) bounds how far is read ahead of the
        caller. Leaving the loop early ends what is under way. The options are
        those of `load` but for into, mlock and no_alloc. With check_tensors,
        an invalid tensor is a TensorDataError in its place.
        """
        chosen = LoadOptions(**options)
        for option in ("into", "mlock", "no_alloc"):
            if option in options:
                raise TypeError(f"{option} makes no sense for a stream")
        opened = self._opened()
        return _stream(opened, choose(opened, chosen), chosen)

    def read_rows(
        self, name: str, start: int, stop: int, **options: Unpack[LoadKeywords]
    ) -> Tensor:
        """A part of a tensor on its outermost axis: rows of a matrix, experts of a stack.

        The result has the shape (stop - start, ...) and memory of its own (or is
        mapped). Of a tensor with one axis and of block type, start and stop are
        at whole blocks. ValueError for an unknown name and for what isn't
        inside the tensor. Options as for `load`.
        """
        if "names" in options:
            raise TypeError("read_rows takes one name")
        if "no_alloc" in options:
            raise TypeError("no_alloc makes no sense for read_rows")
        chosen = replace(LoadOptions(**options), names=[name])
        (info,) = choose(self._opened(), chosen)
        return self._read_part(info, start, stop, chosen)

    def read_part(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """A part of a tensor on the outermost axis, with axes as they are in `info`.

        info: that of a tensor of this model, or one with another shape of as many
        elements, such as one with its outer axes taken together. Else as
        `read_rows`. ValueError for what is no tensor of this model.
        """
        stored = self.tensors.get(info.name)
        if stored is None or replace(info, shape=stored.shape) != stored:
            raise ValueError(f"{info!r} is no tensor of {self.path}")
        if prod(info.shape) != prod(stored.shape):
            raise ValueError(f"{info!r} has another number of elements than {stored.shape}")
        chosen = LoadOptions(names=[info.name])
        choose(self._opened(), chosen)  # refuses what is of unknown type
        return self._read_part(info, start, stop, chosen)

    def _read_part(self, info: TensorInfo, start: int, stop: int, options: LoadOptions) -> Tensor:
        part = rows(info, start, stop)
        with frames_released():
            return load_tensors(self._opened(), [part], options)[info.name]

    def empty(self, names: Selection | None = None) -> Buffers:
        """Memory for tensors by name, of the shapes and types of `Tensor.numpy`, placed so that
        direct reads go straight in: for `load(into=...)` with the same names."""
        opened = self._opened()
        return empty(opened, choose(opened, LoadOptions(names=names)))

    def close(self) -> None:
        """Closes the files. Tensors that were loaded, metadata and infos stay valid."""
        self._open = None

    def __repr__(self) -> str:
        files = f"{len(self.files)} files, " if len(self.files) > 1 else ""
        return f"<Model {self.path!r}, {files}{len(self.tensors)} tensors>"


def _stream(
    model: OpenModel, wanted: list[TensorInfo], options: LoadOptions
) -> Iterator[tuple[str, Tensor]]:
    with frames_released():
        yield from stream(model, wanted, options)


def _open(path: PathLike | Sequence[PathLike], options: OpenOptions) -> tuple[Metadata, OpenModel]:
    started = time.perf_counter()
    found = open_files(path)
    header_seconds = time.perf_counter() - started
    found.metadata.override(options.metadata_overrides)
    files = tuple(
        OpenFile(
            decide(file, options.modes, options.page_cache),
            header.version,
            section.alignment,
            section.begin,
            header.moved,
        )
        for file, header, section in found.files
    )
    for file in files:
        if file.source.decision.access != "direct":
            file.source.file.stay_buffered()
    table = TensorTable([(header.records, section.begin) for _, header, section in found.files])
    if any(disables_mmap(file.source.decision) for file in files):
        logger.info("%s: direct I/O is enabled and available, mmap is disabled", found.path)
    fallen = ((file, header.moved.fallback) for file, header, _ in found.files)
    if first := next(((file, how) for file, how in fallen if how is not None), None):
        log_fallback(first[0], *first[1])
    seconds = time.perf_counter() - started
    return found.metadata, OpenModel(found.path, files, table, seconds, header_seconds)


def open(  # noqa: A001 - the contract: loader.open
    path: PathLike | Sequence[PathLike],
    *,
    access: AccessRequest | None = None,
    page_cache: PageCache = "ignore",
    metadata_overrides: Mapping[str, MetadataValue] | None = None,
) -> Model:
    """Opens a model: reads and checks its header, decides how its weights will be read.

    path: the file, any file of a split model (the others are found by its name),
    or a list of all files of one, whatever they are called. access: "auto"
    (direct I/O, else mmap, else buffered reads), one mode, which is a demand, or
    a sequence in order of preference; the default comes from GGUF_DIO_ACCESS,
    else "auto"; each file is decided by itself. page_cache: "ignore", or "reuse": a
    file of which at least 90% are in the page cache is mapped (or read
    buffered) although direct I/O is available, unless that is demanded.
    metadata_overrides: values that take the place of stored ones.

    Raises FormatError and its kinds for what is no valid GGUF file (ShardError for
    a split model whose files aren't all there or don't belong together), DirectIOError
    or MappingError for a demand that can't be met, FileNotFoundError,
    PermissionError, IsADirectoryError, ReadError.
    """
    overrides = {} if metadata_overrides is None else metadata_overrides
    options = OpenOptions(access=access, page_cache=page_cache, metadata_overrides=overrides)
    return Model(path, options)


def load(
    path: PathLike | Sequence[PathLike],
    *,
    access: AccessRequest | None = None,
    page_cache: PageCache = "ignore",
    metadata_overrides: Mapping[str, MetadataValue] | None = None,
    **options: Unpack[LoadKeywords],
) -> Weights:
    """Opens a model, loads from it and closes it; see `open` and `Model.load` for the options."""
    load_options = LoadOptions(**options)  # wrong ones are refused before anything is opened
    with open(
        path, access=access, page_cache=page_cache, metadata_overrides=metadata_overrides
    ) as model:
        return model._load(load_options)
