"""Running steps: the loaded model (`runtime`) and whoever runs its steps (`device`)."""

from .device import CompletedStep, Device, open_device
from .runtime import Runtime, assemble

__all__ = ["CompletedStep", "Device", "Runtime", "assemble", "open_device"]
