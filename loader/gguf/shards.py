"""Split models: a model in several files, the shards, each with a header of its own.

Which shard a file is, and of how many, is in its metadata (split.no, from 0,
split.count, and split.tensors.count, the tensors of all of them together). Names
(model-00002-of-00003.gguf) only say where the others are to be looked for. So the
metadata wins over the name, and what is wrong with a set is said all at once.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gguf import GGUF_DEFAULT_ALIGNMENT, Keys

from loader.errors import FormatError, ReadError, ShardError, TruncatedFileError, quoted
from loader.gguf.alignment import alignment_of
from loader.gguf.header import DataSection, Header, locate_data, read_header
from loader.gguf.metadata import Metadata
from loader.gguf.tensors import data_length
from loader.io.file import File
from loader.io.ranges import align_up
from loader.options import PathLike

_NUMBER, _COUNT = Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT
_TENSORS = Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT

_MOST_SHARDS = 0xFFFF  # split.count is a UINT16
_MOST_LISTED = 256
_SPARE_DESCRIPTORS = 4  # a second one while a file is opened, and those of a queue of reads

_SHARD_NAME = re.compile(
    r"(?P<prefix>(?:.*-)?)(?P<number>[0-9]{1,9})(?P<rest>-of-[0-9]{1,9}\.gguf)",
    re.DOTALL | re.IGNORECASE,
)
# How the pieces are named when a file is cut after some number of bytes.
_BYTE_PART_NAME = re.compile(
    r".*(?:[.-]part[-_.]?(?:[0-9]+(?:[-_]?of[-_]?[0-9]+)?|[a-z]{1,2})"
    r"|[.-]split[-_.]?(?:[0-9]+|[a-z]{1,2})|\.gguf\.(?:[0-9]{2,3}|[a-z]{2}))",
    re.DOTALL | re.IGNORECASE,
)
_MERGE = "llama.cpp's llama-gguf-split --merge joins them into one file as it should be"


@dataclass(frozen=True)
class Split:
    """What a shard says of its set. number: which shard it is, from 0; tensors: how many the whole
    set has, None when it doesn't say."""

    number: int
    count: int
    tensors: int | None


@dataclass(frozen=True)
class Shard:
    """An open file of a model, with its header. split: None when it is a model by itself;
    metadata: of the first file, which has the model's; None in the others."""

    file: File
    header: Header
    split: Split | None
    metadata: Metadata | None


@dataclass(frozen=True)
class FileSet:
    """The files of a model in order, all of them there and belonging together. path: as it was
    given, the first one of a list."""

    path: str
    files: tuple[tuple[File, Header, DataSection], ...]
    metadata: Metadata


def open_files(path: PathLike | Sequence[PathLike]) -> FileSet:
    """Opens a model in one file or in several: any shard of it, or a list of all its files.

    Reads the headers and nothing else. Raises ShardError for a set that isn't
    complete, ReadError (EMFILE) when the process may not open so many files, and
    what File and read_header raise.
    """
    try:
        return _open_files(path)
    except FormatError as error:
        # Something that is cut off, or begins in the middle.
        broken = isinstance(error, TruncatedFileError) or type(error) is FormatError
        if broken and _BYTE_PART_NAME.fullmatch(os.path.basename(error.path or "")):  # noqa: PTH119
            raise ShardError(
                f"{error.path}: by its name this is a byte part of a larger file; join the parts "
                "in their order first (cat part1 part2 > model.gguf)",
                path=error.path,
                offset=error.offset,
                field=error.field,
            ) from error
        raise


def _open_files(path: PathLike | Sequence[PathLike]) -> FileSet:
    if isinstance(path, (str, bytes, os.PathLike)):
        paths, listed = [os.fspath(path)], False
    else:
        paths, listed = _checked_list(path), True
    if len(paths) > 1:
        _check_descriptors(os.fsdecode(paths[0]), len(paths))
    given = _open_shard(paths[0])
    if given.split is None and len(paths) == 1:
        return _assemble(given, [given])
    others = paths[1:] if listed else _siblings(given)
    return _assemble(given, _complete(given, others, listed=listed))


def _checked_list(paths: object) -> list[str | bytes]:
    if not isinstance(paths, (list, tuple)):
        raise TypeError(f"a model is a path or a list of paths, not {paths!r}")
    for path in paths:
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise TypeError(f"a path is a str, bytes or os.PathLike, not {path!r}")
    if not paths:
        raise ValueError("the list of paths is empty")
    return [os.fspath(path) for path in paths]


# --- One file -----------------------------------------------------------------------


def _open_shard(path: str | bytes) -> Shard:
    file = File(path)
    header, metadata = read_header(file)
    split = read_split(file.path, metadata)
    is_first = split is None or split.number == 0
    return Shard(file, header, split, metadata if is_first else None)


def read_split(path: str, metadata: Metadata) -> Split | None:
    """What a file says of the set that it is part of; None for a model in one file.

    ShardError for numbers that can't be, FormatError for what are no numbers.
    """

    def number(key: str, least: int, most: int) -> int | None:
        if key not in metadata:
            return None
        value = int(metadata.get_typed(key, int))
        if not least <= value <= most:
            raise ShardError(
                f"{path}: {key} is {value}; it can be from {least} to {most}",
                path=path,
                offset=metadata.offset(key),
                field=key,
            )
        return value

    count = number(_COUNT, 0, _MOST_SHARDS)
    if count is None or count <= 1:
        return None
    which = number(_NUMBER, 0, count - 1)
    if which is None:
        raise ShardError(
            f"{path}: this is one of {count} files, but {_NUMBER} is missing: it doesn't say which",
            path=path,
            field=_NUMBER,
        )
    return Split(which, count, number(_TENSORS, 0, (1 << 63) - 1))


def _joined_at(shard: Shard, inherited: int | None = None) -> int | None:
    """Where another GGUF file follows the data of this one, because shards were joined as bytes."""
    header = shard.header
    after_data = set()
    for alignment in {header.alignment or inherited, header.alignment or GGUF_DEFAULT_ALIGNMENT}:
        if alignment is not None:
            end = align_up(header.end, alignment) + data_length(header.records)
            after_data |= {end, align_up(end, alignment)}
    magic = bytearray(4)
    for after in after_data:
        if after + len(magic) <= shard.file.size:
            shard.file.pread_into(magic, after)
            if magic == b"GGUF":
                return after
    return None


# --- The others ------------------------------------------------------------------


def _siblings(given: Shard) -> list[str]:
    """Where the other files of the set should be, by the name that was given for one of them,
    wherever a link of that name leads to."""
    path, split = given.file.path, given.split
    count, number = (1, 1) if split is None else (split.count, split.number + 1)
    folder, name = os.path.split(path)
    match = _SHARD_NAME.fullmatch(name)
    if match is None:
        if (joined := _joined_at(given)) is not None:
            raise ShardError(
                f"{path}: this holds several shards, joined as bytes, of which only the first can "
                f"be read; {_MERGE}",
                path=path,
                offset=joined,
                field=_COUNT,
            )
        raise ShardError(
            f"{path}: this is one of {count} files of a model, but by its name the others can't be "
            f"found (it should end in -{number:05}-of-{count:05}.gguf){_linked(path)}; give a "
            f"list of all paths (loader.open takes one), or join them: {_MERGE}",
            path=path,
            field=_COUNT,
        )
    width = len(match["number"])
    names = [f"{match['prefix']}{i:0{width}}{match['rest']}" for i in range(1, count + 1)]
    others = [os.path.join(folder, other) for other in names if other != name]  # noqa: PTH118 - str
    _check_descriptors(path, sum(map(os.path.exists, others)))
    return others


def _linked(path: str) -> str:
    """A hint for a link to a file that has the name of a shard."""
    if not os.path.islink(path):  # noqa: PTH114 - a str
        return ""
    target = os.path.realpath(path)
    is_shard = _SHARD_NAME.fullmatch(os.path.basename(target))  # noqa: PTH119 - a str
    return f"; it is a link, open {target} itself" if is_shard else ""


def _check_descriptors(path: str, count: int) -> None:
    """Each file takes a descriptor; ReadError, before they are opened, when there are too few."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/dev/fd")) - 1  # noqa: PTH208 - names only; one is the listing's
    except OSError:
        used = 3
    needed = used + count + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise ReadError(
            f"{path}: {count} more files of the model have to be opened, which needs {needed} file "
            f"descriptors ({used} are in use), but the limit (RLIMIT_NOFILE) is {limit}; raise it "
            "with 'ulimit -n' or LimitNOFILE=",
            errno=errno.EMFILE,
            filename=path,
        )


def _complete(given: Shard, others: Sequence[str | bytes], *, listed: bool) -> list[Shard]:
    """All files of the set, in order. listed: their paths were given and not guessed, so one that
    can't be opened is an error by itself."""
    shards, problems = [given], []
    detailed: FormatError | OSError | None = None
    for path in others:
        try:
            shards.append(_open_shard(path))
        except (FormatError, OSError) as error:
            if isinstance(error, OSError) and (listed or error.errno == errno.EMFILE):
                raise
            problems.append(_failure(os.fsdecode(path), error))
            detailed = None if _is_absent(error) else error
    wrong = list(_disagreements(shards))
    if len(problems) == 1 and not wrong and detailed is not None:
        raise detailed
    problems += wrong
    if not problems:
        problems += _gaps(shards)
    if problems:
        raise _set_error(given.file.path, problems, listed=listed)
    return sorted(shards, key=lambda shard: 0 if shard.split is None else shard.split.number)


def _is_absent(error: FormatError | OSError) -> bool:
    """Whether a file isn't there, or has nothing in it."""
    empty = isinstance(error, TruncatedFileError) and error.offset == 0
    return empty or isinstance(error, FileNotFoundError)


def _failure(path: str, error: FormatError | OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing"
    if isinstance(error, (FormatError, ReadError)):
        return str(error)
    return f"{path}: {error.strerror}"


def _disagreements(shards: Sequence[Shard]) -> Iterator[str]:
    """What the files say that can't be true of one set."""
    reference = next((shard for shard in shards if shard.split is not None), None)
    inherited = next((s.header.alignment for s in shards if s.split and not s.split.number), None)
    places: dict[int, str] = {}
    for shard in shards:
        path, split = shard.file.path, shard.split
        if split is None or reference is None or reference.split is None:
            yield f"{path} is no shard: it has no {_COUNT}"
        elif split.count != reference.split.count:
            yield (
                f"{path} is of a set of {split.count} files ({_COUNT}), {reference.file.path} of "
                f"one of {reference.split.count}"
            )
        elif split.tensors != reference.split.tensors:
            yield (
                f"{path} is of a set of {_or_unknown(split.tensors)} tensors ({_TENSORS}), "
                f"{reference.file.path} of one of {_or_unknown(reference.split.tensors)}"
            )
        elif split.number in places:
            yield (
                f"{path} is shard {split.number + 1} of {split.count} ({_NUMBER}), as "
                f"{places[split.number]} is"
            )
        elif _joined_at(shard, inherited) is not None:
            yield f"{path} holds several shards, joined as bytes; {_MERGE}"
        else:
            places[split.number] = path


def _or_unknown(number: int | None) -> str:
    return "an unknown number of" if number is None else str(number)


def _gaps(shards: Sequence[Shard]) -> Iterator[str]:
    """Shards that are in no file."""
    found = {shard.split.number for shard in shards if shard.split is not None}
    count = max(shard.split.count for shard in shards if shard.split is not None)
    missing = (number for number in range(count) if number not in found)
    yield from (f"shard {number + 1} of {count} is missing" for number in missing)


def _set_error(path: str, problems: Sequence[str], *, listed: bool) -> ShardError:
    what = "this is one of several files of a model, and the others aren't as they should be"
    remedy = "Download what is missing or wrong again, all from one place"
    if listed:
        what = "the files of the list aren't those of one model"
        remedy = "List each file of a split model once, and a model in one file by itself"
    shown = "; ".join(problems[:_MOST_LISTED])
    more = len(problems) - _MOST_LISTED
    return ShardError(
        f"{path}: {what}: {shown}{f'; and {more} more' if more > 0 else ''}. {remedy}",
        path=path,
        field=_COUNT,
    )


# --- The set ----------------------------------------------------------------------


def _assemble(given: Shard, shards: Sequence[Shard]) -> FileSet:
    """The files as one model; they are complete and in order."""
    first = shards[0].header.alignment
    metadata = next(shard.metadata for shard in shards if shard.metadata is not None)
    if len(shards) > 1:
        _check_tensors(shards)
    files = (
        (
            shard.file,
            shard.header,
            locate_data(shard.file, shard.header, alignment_of(shard.file, shard.header, first)),
        )
        for shard in shards
    )
    return FileSet(given.file.path, tuple(files), metadata)


def _check_tensors(shards: Sequence[Shard]) -> None:
    """Holds the tensors of all files against each other and against what they say of the set."""
    first = shards[0]
    expected = None if first.split is None else first.split.tensors
    total = sum(len(shard.header.records.names) for shard in shards)
    if expected is not None and total != expected:
        raise ShardError(
            f"{first.file.path}: the {len(shards)} files have {total} tensors together, but "
            f"{_TENSORS} is {expected}; are all of them from one conversion?",
            path=first.file.path,
            field=_TENSORS,
        )
    places: dict[str, str] = {}
    for shard in shards:
        for name in shard.header.records.names:
            if name in places:
                raise ShardError(
                    f"{shard.file.path}: tensor {quoted(name)} is in {places[name]} too",
                    path=shard.file.path,
                    field=name,
                )
            places[name] = shard.file.path
