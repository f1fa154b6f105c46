"""Whether a file's tensors are those that a program reads."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels.backend import Tensor
from ...kernels.program import Program
from ..errors import ModelError


def check_weights(program: Program, tensors: Mapping[str, Tensor], file: str) -> None:
    """Check that `tensors` are the program's weights, no fewer, no more, each of its shape.

    Raises:
        ModelError: names the file, the first tensor that is missing, too many or ill-shaped, what was
            expected and what is there.
    """
    for name, spec in program.weights.items():
        if name not in tensors:
            raise ModelError(f"{file}: the tensor {name} {list(spec.shape)} is missing")
        if tensors[name].shape != spec.shape:
            raise ModelError(
                f"{file}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(spec.shape)}"
            )
    for name in tensors:
        if name not in program.weights:
            raise ModelError(f"{file}: unexpected tensor {name}; {program.name} does not read it")
