"""Random float32 weights for any program: the same seed gives the same tensors."""

from __future__ import annotations

import numpy as np

from artesian.kernels.backend import Tensor
from artesian.kernels.program import Program


def f32_tensor(values: np.ndarray) -> Tensor:
    """Wrap an array as a weight of format F32."""
    data = np.ascontiguousarray(values, np.float32)
    return Tensor("F32", data.shape, data.reshape(-1).view(np.uint8))


def random_weights(program: Program, seed: int = 0, *, gain: float = 1.0) -> dict[str, Tensor]:
    """Matrices of standard deviation gain / sqrt(k), vectors near 1 (norms) or near 0 (biases).

    The embedding table has deviation 1 / sqrt(k) too, so that tied logits stay of order one.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for name, spec in program.weights.items():
        noise = generator.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            values = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
        else:
            values = noise * gain * spec.shape[-1] ** -0.5
        weights[name] = f32_tensor(values)
    return weights
