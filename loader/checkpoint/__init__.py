"""Hugging Face checkpoints: folders with config.json and safetensors, which models are made of."""

from loader.checkpoint.conversion import is_made_by_conversion
from loader.checkpoint.folder import Checkpoint

__all__ = ["Checkpoint", "is_made_by_conversion"]
