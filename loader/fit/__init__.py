"""Fits a model to the memory of devices."""

from loader.device.memory import DeviceMemory
from loader.fit.model import ModelFit, fit_model
from loader.fit.planner import plan
from loader.fit.result import FitParams, FitResult

__all__ = ["DeviceMemory", "FitParams", "FitResult", "ModelFit", "fit_model", "plan"]
