"""Loads GGUF model weights through direct I/O, mmap or buffered reads.

import loader

with loader.open("model.gguf") as model:
    weights = model.load()
    array = weights["token_embd.weight"].numpy()
"""

import logging as _logging

from loader._version import __version__
from loader.errors import (
    DeviceError,
    DeviceMemoryError,
    DeviceUnavailableError,
    DirectIOError,
    FitError,
    FormatError,
    LoadCancelled,
    LoaderError,
    MappingError,
    ReadError,
    ShardError,
    ShortReadError,
    TensorDataError,
    TensorLayoutError,
    TruncatedFileError,
    UnsupportedFormatError,
    VerifyError,
)
from loader.fit import fit_model
from loader.gguf.metadata import Metadata, StringArray
from loader.gguf.tensors import TensorInfo
from loader.model import Model, load, open  # noqa: A004 - the contract: loader.open
from loader.options import access_from_flags
from loader.planning import ModelFile
from loader.report import Fallback, FileReport, LoadReport
from loader.tensor import Tensor, Weights

__all__ = [
    "DeviceError",
    "DeviceMemoryError",
    "DeviceUnavailableError",
    "DirectIOError",
    "Fallback",
    "FileReport",
    "FitError",
    "FormatError",
    "LoadCancelled",
    "LoadReport",
    "LoaderError",
    "MappingError",
    "Metadata",
    "Model",
    "ModelFile",
    "ReadError",
    "ShardError",
    "ShortReadError",
    "StringArray",
    "Tensor",
    "TensorDataError",
    "TensorInfo",
    "TensorLayoutError",
    "TruncatedFileError",
    "UnsupportedFormatError",
    "VerifyError",
    "Weights",
    "__version__",
    "access_from_flags",
    "fit_model",
    "load",
    "open",
]

_logging.getLogger("loader").addHandler(_logging.NullHandler())
