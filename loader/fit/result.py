"""What a fit is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# A pattern on names of tensors and the device that they go to ("CPU" for the host), as
# llama.cpp's --override-tensor takes them.
Override: TypeAlias = tuple[str, str]
Status: TypeAlias = Literal["success", "failure", "error"]

HOST_NAME = "CPU"


@dataclass(frozen=True, kw_only=True)
class FitParams:
    """How a model is to be placed, in llama.cpp's terms.

    n_ctx: the context in tokens, 0 for as much as the model was trained with;
    n_gpu_layers: how many layers, the output layer included, are on devices, from
    the back, -1 for all; tensor_split: in which proportions, None for that of the
    free memory; overrides: where tensors go whatever their layer; split_mode:
    "layer" or "row".
    """

    n_ctx: int = 0
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] | None = None
    overrides: tuple[Override, ...] = ()
    split_mode: Literal["none", "layer", "row"] = "layer"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The answer.

    status: "success"; "failure", when what was asked for can't be met, with the
    reason; "error", when the request makes no sense or the memory couldn't be
    found out. The other fields as in FitParams; tensor_split is empty where the
    caller's, or the proportions of the free memory, are to be used. shortfall: of a
    failure, the bytes that the devices have too little for these parameters.
    """

    status: Status
    reason: str
    n_ctx: int
    n_gpu_layers: int
    tensor_split: tuple[float, ...]
    overrides: tuple[Override, ...]
    shortfall: int = 0
