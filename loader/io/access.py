"""The choice of how a file is read: pure, from what was asked for and what can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loader.options import Access

# With page_cache="reuse", a file counts as resident from this fraction on.
RESIDENT = 0.9

_NAMES: dict[Access, str] = {"direct": "direct I/O", "mmap": "mmap", "buffered": "buffered reading"}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """requested: the modes in order of preference; access: the one taken; reason: why."""

    requested: tuple[Access, ...]
    access: Access
    reason: str


def choose(
    requested: Sequence[Access],
    refusals: Mapping[Access, str],
    *,
    resident: float | None = None,
) -> Decision | None:
    """The first requested mode that isn't refused, or None when all are.

    refusals: modes that can't be had, and why. resident: the fraction of the
    file that is in the page cache, when that is to be made use of, else None; a
    resident file isn't read directly if it can be had another way. One mode
    alone is a demand, so neither applies to it.
    """
    left = [mode for mode in requested if mode not in refusals]
    if not left:
        return None
    if resident is not None and resident >= RESIDENT:
        cached = [mode for mode in left if mode != "direct"]
        if left[0] == "direct" and cached:
            reason = f"{resident:.0%} of the file is in the page cache, which is used again"
            return Decision(requested=tuple(requested), access=cached[0], reason=reason)
    mode = left[0]
    return Decision(
        requested=tuple(requested), access=mode, reason=_reason(mode, requested, refusals)
    )


def _reason(mode: Access, requested: Sequence[Access], refusals: Mapping[Access, str]) -> str:
    if len(requested) == 1:
        return f"{_NAMES[mode]} was asked for"
    passed = [
        f"{_NAMES[refused]} can't be had ({refusals[refused]})"
        for refused in requested[: requested.index(mode)]
    ]
    if passed:
        return f"{' and '.join(passed)}; {_NAMES[mode]} is the next choice"
    if mode == "direct" and "mmap" in requested:
        return "direct I/O is enabled and available, so mmap is disabled"
    return f"{_NAMES[mode]} is the first choice and available"


def disables_mmap(decision: Decision) -> bool:
    """Whether direct I/O was taken although mmap would have been welcome too."""
    return decision.access == "direct" and "mmap" in decision.requested
