"""How bytes are got: files, mappings, arenas, and the choice among them."""

from loader.io.file import File

__all__ = ["File"]
