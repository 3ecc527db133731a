"""A model beside another one, or beside the checkpoint that it was made of."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from loader.checkpoint import Checkpoint, is_made_by_conversion
from loader.cli.digests import digest_model
from loader.cli.lists import Digests
from loader.cli.progress import progress_bar
from loader.cli.text import note, print_line, printable
from loader.comparison import Comparison, ModelValues, Values, compare, squeezed
from loader.errors import quoted
from loader.gguf.tensors import TensorInfo
from loader.model import Model, open as open_model
from loader.options import Access

_MOST_NAMED = 5


@dataclass
class Differences:
    """How the tensors of a model differ from what `other` says they are.

    different: names; missing: in the model; unexpected: only in the model;
    uncompared: whose values can't be had; compared: by value, those of the same
    bytes left out, worst first; hint: the likely cause.
    """

    other: str
    different: list[str]
    missing: list[str]
    unexpected: list[str]
    uncompared: list[str] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)
    hint: str | None = None

    def __bool__(self) -> bool:
        return bool(self.different or self.missing or self.unexpected or self.uncompared)

    def __str__(self) -> str:
        kinds = {
            "different": self.different,
            "missing": self.missing,
            "not expected": self.unexpected,
            "that can't be compared": self.uncompared,
        }
        parts = [
            f"{len(names)} tensors {what} ({', '.join(map(quoted, names[:_MOST_NAMED]))}"
            f"{', ...' if len(names) > _MOST_NAMED else ''})"
            for what, names in kinds.items()
            if names
        ]
        return "; ".join(parts + ([self.hint] if self.hint else []))


def differences(found: Digests, expected: Digests, other: str) -> Differences:
    """By digests. Tensors without one on both sides can't be compared; a note has said so."""
    return Differences(
        other,
        [name for name in found if name in expected and found[name] != expected[name]],
        [name for name in expected if name not in found],
        [name for name in found if name not in expected],
    )


def refuse_unreadable(other: str, access: tuple[Access, ...] | None) -> None:
    """The errors of what a model is to be compared with, before the model is read."""
    opened = Checkpoint(Path(other)) if _is_folder(other) else open_model(other, access=access)
    opened.close()


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - a path that can't be looked at is no folder


def compare_with(
    path: str, digests: Digests, other: str, access: tuple[Access, ...] | None
) -> Differences:
    """Compares a model, whose digests are known, with another one or with a checkpoint: by value
    what isn't the same bytes."""
    with ExitStack() as stack:
        model = stack.enter_context(open_model(path, access=access))
        if _is_folder(other):
            checkpoint = stack.enter_context(Checkpoint(Path(other)))
            references = _checkpoint_values(model, checkpoint, other)
            found = Differences(
                other,
                [],
                [name for name in references if name not in digests],
                [n for n in digests if n not in references and not is_made_by_conversion(n)],
            )
            found.compared = _compare_values(model, references)
            found.different = [one.name for one in found.compared if not one.is_close]
            _set_apart(found)
            found.hint = checkpoint.hint(model.metadata) if found else None
            return found
        others = digest_model(other, access)[1]
        found = differences(digests, others, other)
        reference = stack.enter_context(open_model(other, access=access))
        unlike = [
            info
            for name, info in reference.tensors.items()
            if name in digests
            and (name in found.different or not _alike(model.tensors[name], info))
        ]
        references = {info.name: ModelValues(reference, info) for info in unlike}
        found.compared = _compare_values(model, references)
        # What is of one type has to have the same bytes.
        found.different = [
            one.name for one in found.compared if not one.is_close or one.type == one.other_type
        ]
        _set_apart(found)
        return found


def _set_apart(found: Differences) -> None:
    """Those that are different because they couldn't be compared."""
    found.uncompared = [one.name for one in found.compared if not one.is_compared]
    found.different = [name for name in found.different if name not in found.uncompared]


def _alike(info: TensorInfo, other: TensorInfo) -> bool:
    """Whether the same bytes are the same tensor: axes of one element don't count."""
    return info.ggml_type == other.ggml_type and squeezed(info.shape) == squeezed(other.shape)


def _checkpoint_values(model: Model, checkpoint: Checkpoint, folder: str) -> dict[str, Values]:
    """What the model should have, by its names; a remark about what has no place there."""
    shapes = {name: info.shape for name, info in model.tensors.items()}
    references, unmapped = checkpoint.as_converted(model.metadata, shapes)
    if unmapped:
        first = ", ".join(map(quoted, unmapped[:_MOST_NAMED]))
        note(f"{len(unmapped)} tensors of {folder} have no name in a GGUF model ({first})")
    return references


def _compare_values(model: Model, references: Mapping[str, Values]) -> list[Comparison]:
    """The tensors that both have, worst first."""
    infos = [model.tensors[name] for name in references if name in model.tensors]
    total, done = sum(math.prod(info.shape) for info in infos), 0
    with progress_bar("comparing") as progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        found = [
            compare(info.name, ModelValues(model, info), references[info.name], advance)
            for info in infos
        ]
    return sorted(found, key=lambda one: one.badness, reverse=True)


def print_compared(compared: list[Comparison]) -> None:
    """A table, worst first."""
    if not compared:
        return
    rows = [("NMSE", "type", "against", "tensor")]
    for found in compared:
        error = "-" if found.nmse is None else f"{found.nmse:.3g}"
        why = f"  {found.why}" if found.why else ""
        words = (error, found.type, found.other_type, found.name + why)
        rows.append(tuple(map(printable, words)))  # type: ignore[arg-type]  # four of them
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for error, kind, other, name in rows:
        print_line(f"{error:>{widths[0]}}  {kind:<{widths[1]}}  {other:<{widths[2]}}  {name}")


def print_agreement(model: str, count: int, found: Differences) -> None:
    values = sum(one.nmse == 0 for one in found.compared)
    rounded = len(found.compared) - values
    text = f"{printable(model)}: {count} tensors are as in {printable(found.other)}"
    if found.compared:
        text += (
            f", {len(found.compared)} of them by value: {values} equal, {rounded} but for rounding"
        )
    print_line(text)
