"""`gguf-dio verify`: digests of a model's tensors, and comparison with a list or another model."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from loader.cli.access import add_access_flags, requested_access
from loader.cli.against import (
    Differences,
    compare_with,
    differences,
    print_agreement,
    print_compared,
    refuse_unreadable,
)
from loader.cli.digests import digest_model
from loader.cli.lists import list_line, read_list, write_list
from loader.cli.new_file import refuse_existing
from loader.cli.parser import Parser, UsageError
from loader.cli.text import print_json, print_line
from loader.errors import VerifyError


def configure(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any file of a split model")
    add_access_flags(parser)
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with another GGUF file, or the folder of a Hugging Face checkpoint",
    )
    parser.add_argument("--check", metavar="FILE", help="compare with a list made by --write")
    parser.add_argument("--write", metavar="FILE", help="write the list to a new file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def execute(arguments: argparse.Namespace) -> None:
    if arguments.check is not None and arguments.write is not None:
        raise UsageError("--check and --write exclude each other")
    access = requested_access(arguments.access_flags, os.environ)
    listed = None if arguments.check is None else read_list(arguments.check)
    if arguments.write is not None:
        refuse_existing(arguments.write)
    if arguments.against is not None:
        refuse_unreadable(arguments.against, access)
    files, digests = digest_model(arguments.model, access)
    compared: dict[str, Differences | None] = {"check": None, "against": None}
    if listed is not None:
        compared["check"] = differences(digests, listed, arguments.check)
    if arguments.against is not None:
        compared["against"] = compare_with(arguments.model, digests, arguments.against, access)
    if arguments.write is not None:
        write_list(arguments.write, digests)

    comparisons = [found for found in compared.values() if found is not None]
    if arguments.json:
        objects = {key: None if found is None else asdict(found) for key, found in compared.items()}
        print_json(
            {
                "model": arguments.model,
                "files": [asdict(file) for file in files],
                "tensors": digests,
                **objects,
            }
        )
    elif not comparisons and arguments.write is None:
        for name, digest in digests.items():
            print_line(list_line(name, digest, sys.stdout.encoding))
    for found in comparisons:
        if not arguments.json:
            print_compared(found.compared)
        if not found and not arguments.json:
            print_agreement(arguments.model, len(digests), found)
    wrong = [f"{found.other} says: {found}" for found in comparisons if found]
    if wrong:
        raise VerifyError(f"{arguments.model} is not what {'; and not what '.join(wrong)}")
