"""An argument parser that takes options by their whole name only."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from loader.cli.text import printable


class UsageError(Exception):
    """Options that are right one by one, but not together."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations.

    argparse takes "-d" for "-dio" even with allow_abbrev=False, and says
    "expected one argument" for a value that begins with a minus without showing
    it. So the words that look like options are looked at first. leading_only:
    stop at the first word that doesn't, after which a subcommand's parser looks.
    """

    def __init__(self, *args: Any, leading_only: bool = False, **options: Any) -> None:
        self._known: set[str] = set()
        self._leading_only = leading_only
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def add_argument(self, *args: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*args, **options)
        self._known.update(action.option_strings)
        return action

    def parse_known_args(  # type: ignore[override]  # of its two overloads we need the plain one
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        for word in args or ():
            option = word.startswith("-") and word != "-"
            if word == "--" or (not option and self._leading_only):
                break
            if option and word.split("=", 1)[0] not in self._known:
                self.error(
                    f"{word!r} is no option; options are written out in full, and a path or a "
                    "value that begins with a minus goes after '--' or '='"
                )
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))
