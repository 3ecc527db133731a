"""Writes the C source of the binding `loader._native` from the declarations in ld_api.h.

Usage: python ffi_build.py OUTPUT.c (called by the build).
"""

import sys
from pathlib import Path

from cffi import FFI


def builder() -> FFI:
    """The cffi builder: ld_api.h is at the same time the C header and the cdef."""
    ffi = FFI()
    ffi.cdef(Path(__file__).with_name("ld_api.h").read_text(encoding="utf-8"))
    ffi.set_source(
        "loader._native",
        '#include <stdint.h>\n#include <stddef.h>\n#include "ld_api.h"\n',
        py_limited_api=True,
    )
    return ffi


if __name__ == "__main__":
    builder().emit_c_code(sys.argv[1])
