"""Fits a model to the memory of devices."""

from loader.fit.planner import plan
from loader.fit.result import FitParams, FitResult

__all__ = ["FitParams", "FitResult", "plan"]
