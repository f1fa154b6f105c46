"""Running steps: the loaded model (`runtime`) and the thread that owns the device (`device`)."""

from .device import CompletedStep, DeviceThread
from .runtime import Runtime, assemble

__all__ = ["CompletedStep", "DeviceThread", "Runtime", "assemble"]
