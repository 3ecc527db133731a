"""Which access the flags and the environment ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from loader.cli.parser import Parser
from loader.options import Access, SettingError, access_from_flags

Flag = Literal["mmap", "no-mmap", "direct", "no-direct"]

_TRUE = {"on", "enabled", "true", "1"}
_FALSE = {"off", "disabled", "false", "0"}


def add_access_flags(parser: Parser) -> None:
    """The flags that llama.cpp has. They act in the order in which they are given."""

    def add(*names: str, flag: Flag, text: str) -> None:
        parser.add_argument(
            *names, action="append_const", dest="access_flags", const=flag, help=text
        )

    add("--mmap", flag="mmap", text="map the file; turns direct I/O off")
    add("--no-mmap", flag="no-mmap", text="don't map the file")
    add("-dio", "--direct-io", flag="direct", text="read directly if possible, before mmap")
    add("-ndio", "--no-direct-io", flag="no-direct", text="don't read directly")


def requested_access(
    access_flags: Iterable[Flag] | None, environment: Mapping[str, str]
) -> tuple[Access, ...] | None:
    """The modes in order of preference; None leaves it to GGUF_DIO_ACCESS.

    Flags beat GGUF_DIO_ACCESS, which beats LLAMA_ARG_MMAP and LLAMA_ARG_DIO.
    """
    flags: list[Flag] = list(access_flags or ())
    if "GGUF_DIO_ACCESS" not in environment:
        flags = _llama_flags(environment) + flags
    elif not flags:
        return None
    use_mmap = use_direct = True
    for flag in flags:
        if flag == "mmap":
            use_mmap, use_direct = True, False
        elif flag == "no-mmap":
            use_mmap = False
        else:
            use_direct = flag == "direct"
    return access_from_flags(use_mmap, use_direct)


def _llama_flags(environment: Mapping[str, str]) -> list[Flag]:
    """llama.cpp's variables, in the order in which it reads them."""
    flags: list[Flag] = []
    for name, on, off in (("MMAP", "mmap", "no-mmap"), ("DIO", "direct", "no-direct")):
        value = _llama_switch(environment, name)
        if value is not None:
            flags.append(on if value else off)  # type: ignore[arg-type]  # literals of the tuple
    return flags


def _llama_switch(environment: Mapping[str, str], name: str) -> bool | None:
    if f"LLAMA_ARG_NO_{name}" in environment:
        return False
    variable = f"LLAMA_ARG_{name}"
    text = environment.get(variable)
    if text is None:
        return None
    if text not in _TRUE | _FALSE:
        raise SettingError(
            f"environment variable {variable}: {text!r} is neither on, enabled, true, 1 nor "
            "off, disabled, false, 0"
        )
    return text in _TRUE
