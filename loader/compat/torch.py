"""torch tensors from GGUF files, in the manner of safetensors.torch and of inference servers.

What is quantised stays so: blocks are uint8 tensors with the last axis in bytes.
Plain types have torch's own, BF16 among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gguf import GGMLQuantizationType

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"loader.compat.torch needs torch ({error}); install it with the extra: "
        "pip install 'gguf-dio[torch]'"
    ) from None

from loader._closing import Closing
from loader.device.registry import HOST
from loader.errors import quoted
from loader.gguf.tensors import TensorInfo
from loader.gguf.types import PLAIN_DTYPES, array_layout, type_name
from loader.model import Model, load, open as open_model
from loader.options import AccessRequest, LoadKeywords, PathLike, ReadKeywords
from loader.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _access(access: AccessRequest | None) -> AccessRequest | None:
    """The default is memory that torch may write to; a mapping is read-only."""
    if access is None and "GGUF_DIO_ACCESS" not in os.environ:
        return ("direct", "buffered")
    return access


def load_file(
    filename: PathLike | Sequence[PathLike],
    device: str | int | torch.device | None = "cpu",
    *,
    access: AccessRequest | None = None,
    **options: Unpack[ReadKeywords],
) -> dict[str, torch.Tensor]:
    """Loads a model as torch tensors by name, in file order, as `safetensors.torch.load_file` does.

    filename: a GGUF file, any file of a split model, or a list of all its files;
    device: as torch names it; access: as of `loader.load`, but by default direct
    or buffered, since torch warns of mapped tensors that they can't be written
    to; options: as of `loader.load`. On the processor tensors of one call share
    one memory, without a copy. Errors as of `loader.load`.
    """
    weights = load(filename, access=_access(access), device=_device_name(device), **options)
    return {name: as_torch(tensor) for name, tensor in weights.items()}


def gguf_quant_weights_iterator(
    gguf_file: PathLike | Sequence[PathLike],
    gguf_to_hf_name_map: Mapping[str, str] | None = None,
    *,
    device: str | int | torch.device | None = "cpu",
    access: AccessRequest | None = None,
    **options: Unpack[ReadKeywords],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) as weight loaders of inference servers take them from GGUF files.

    gguf_file: as for `load_file`; gguf_to_hf_name_map: from names in the file to
    those that are yielded, tensors that aren't in it are left out; None for the
    names in the file. First comes the type of each quantised tensor, a scalar
    named ...qweight_type for ...weight, then the tensors, quantised ones as
    ...qweight. They are read while the caller works, in memory that is freed when
    they are: options as of `Model.stream`, such as memory_limit.
    """
    if "names" in options:
        raise TypeError("gguf_to_hf_name_map says which tensors")
    with open_model(gguf_file, access=_access(access)) as model:
        given = gguf_to_hf_name_map
        if given is None:
            names = dict(zip(model.tensors, model.tensors, strict=True))
        else:
            names = {name: given[name] for name in model.tensors if name in given}
        for name, other in names.items():
            info = model.tensors[name]
            if int(info.ggml_type) not in _TYPED:
                yield _renamed(other, "qweight_type"), torch.tensor(int(info.ggml_type))
        chosen: LoadKeywords = {**options, "names": names, "device": _device_name(device)}
        for name, tensor in model.stream(**chosen):
            is_typed = int(tensor.info.ggml_type) in _TYPED
            yield names[name] if is_typed else _renamed(names[name], "qweight"), as_torch(tensor)


def as_torch(tensor: Tensor) -> torch.Tensor:
    """A tensor of ours as one of torch's, in the same memory, which it keeps alive."""
    if tensor.device != HOST:
        found = tensor.native()
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"{tensor!r} is on {tensor.device}, not on a device of torch")
        return found
    host = torch.from_numpy(tensor.numpy())
    is_bf16 = tensor.info.ggml_type == GGMLQuantizationType.BF16
    return host.view(torch.bfloat16) if is_bf16 else host


class safe_open(Closing):  # noqa: N801 - the name that users know
    """Reads single tensors of a model, as `safetensors.safe_open` does: a context manager.

    filename: as for `load_file`; framework: "pt", torch; device: as torch names
    it. Opening reads headers only.
    """

    def __init__(
        self,
        filename: PathLike | Sequence[PathLike],
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(
                f"framework {framework!r}: only 'pt' is had here; loader.open gives numpy arrays"
            )
        self._device = _device_name(device)
        self._model: Model = open_model(filename, access=_access(None))

    def keys(self) -> list[str]:
        """The names of the tensors, in file order."""
        return list(self._model.tensors)

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in file order."""
        return self.keys()

    def metadata(self) -> dict[str, str]:
        """The metadata as text, but for arrays (`loader.open` gives them typed)."""
        values = self._model.metadata
        return {key: str(values[key]) for key in values if values.element_type(key) is None}

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own. ValueError for a name that isn't there."""
        return self.get_slice(name).whole()

    def get_slice(self, name: str) -> Slice:
        """A tensor of which only parts are to be read: index the result."""
        self._model.load(names=[name], no_alloc=True)  # says what is wrong with the name
        return Slice(self._model, self._model.tensors[name], self._device)

    def close(self) -> None:
        """Closes the files. Tensors that were read stay valid."""
        self._model.close()


class Slice:
    """A tensor that is read when it is indexed; of the outermost axis, only what is asked for."""

    def __init__(self, model: Model, info: TensorInfo, device: str) -> None:
        self._model = model
        self._info = info
        self._device = device

    def get_shape(self) -> list[int]:
        """Numbers of elements along each axis, of the tensor that indexing gives: of what is
        quantised, the last axis is in bytes."""
        return list(array_layout(self._info.ggml_type, self._info.shape)[1])

    def get_dtype(self) -> str:
        """The type as GGUF names it: "F32", "Q4_K"."""
        return type_name(self._info.ggml_type)

    def whole(self) -> torch.Tensor:
        """All of it."""
        name, shape = self._info.name, self._info.shape
        if not shape:
            return as_torch(self._model.load(names=[name], device=self._device)[name])
        return as_torch(self._model.read_rows(name, 0, shape[0], device=self._device))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part of the tensor that torch's indexing of the whole one gives."""
        places = index if isinstance(index, tuple) else (index,)
        first = places[0] if places else None
        shape, name = self._info.shape, self._info.name
        if len(shape) < 2 or not isinstance(first, (int, slice)) or isinstance(first, bool):
            return self.whole()[index]
        try:
            rows = range(shape[0])[first]
        except IndexError:
            raise IndexError(
                f"{first} is outside of tensor {quoted(name)}, {self.get_shape()}"
            ) from None
        within: int | slice = 0
        if isinstance(rows, int):
            start, stop = rows, rows + 1
        elif rows.step < 1:
            raise ValueError(f"a step of {rows.step}: torch has only positive ones")
        else:
            start, stop = rows.start, max(rows.start, rows.stop)
            within = slice(None, None, rows.step)
        part = as_torch(self._model.read_rows(name, start, stop, device=self._device))
        inner = (within, *places[1:])
        return part[inner]


_TYPED = frozenset(int(kind) for kind in PLAIN_DTYPES)


def _renamed(name: str, ending: str) -> str:
    """...weight becomes ...qweight or ...qweight_type."""
    before, found, after = name.rpartition("weight")
    return f"{before}{ending}{after}" if found else f"{name}.{ending}"


def _device_name(device: str | int | torch.device | None) -> str:
    """The name by which it is loaded to; what is for the processor is read where it stays."""
    if device is None:
        return HOST
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    return HOST if name.partition(":")[0] == "cpu" else f"torch:{name}"
