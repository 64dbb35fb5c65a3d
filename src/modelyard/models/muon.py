"""Muon for the kernels of convolutions and dense layers, AdamW for the rest.

A kernel is updated by its momentum, made orthogonal by Newton-Schulz iterations (K. Jordan et al., "Muon: an optimizer
for hidden layers in neural networks", 2024). On JAX, where a step is one compiled program, all kernels are
orthogonalized together in few batched multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import keras
from keras import ops

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MAX_PADDING = 4e9
"""Operations on padding to save a batch: microseconds on a GPU, about the cost of a kernel launch."""
Shape = tuple[int, int]


@keras.saving.register_keras_serializable(package="modelyard")
class KernelMuon(keras.optimizers.Muon):
    """Muon that also takes the kernels of convolutions: orthogonalized as matrices of (all inputs) × (outputs).

    Keras's own updates every variable that is not two-dimensional with AdamW.

    Args:
        normalize: scale each kernel to a norm of √outputs before it is updated.
        **kwargs: as for `keras.optimizers.Muon`.
    """

    def __init__(self, *args: Any, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.normalize = normalize

    def _should_use_adamw(self, variable: Any) -> bool:
        if len(variable.shape) <= 2:
            return bool(super()._should_use_adamw(variable))
        return not str(getattr(variable, "path", variable.name)).split(":")[0].endswith("kernel")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        if keras.backend.backend() != "jax":
            super()._backend_update_step(grads, trainable_variables, learning_rate)
            return
        directions, kernels = [], []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            slot = self._get_variable_index(variable)
            if self.adam_velocities[slot] is not None:
                self.update_step(gradient, variable, learning_rate)
            else:
                directions.append(as_matrix(self._direction(gradient, self.momentums[slot])))
                kernels.append(variable)
        for variable, update in zip(kernels, orthogonalize_together(directions, self.ns_steps), strict=True):
            self._move(variable, update, learning_rate)

    def _muon_update_step(self, gradient: Any, variable: Any, lr: Any, m: Any) -> None:
        self._move(variable, orthogonalize(as_matrix(self._direction(gradient, m)), self.ns_steps), lr)

    def _direction(self, gradient: Any, m: Any) -> Any:
        """Updates the momentum ``m`` and returns the smoothed gradient."""
        gradient = ops.cast(gradient, m.dtype)
        self.assign(m, ops.add(gradient, m * self.momentum))
        return ops.add(gradient, m * self.momentum) if self.nesterov else ops.convert_to_tensor(m)

    def _move(self, variable: Any, update: Any, learning_rate: Any) -> None:
        step = self.lr_adjust(ops.reshape(ops.cast(update, variable.dtype), tuple(variable.shape)))
        value = ops.convert_to_tensor(variable)
        if self.normalize:
            value = value * (math.sqrt(variable.shape[-1]) / (ops.sqrt(ops.sum(ops.square(value))) + 1e-7))
        self.assign(variable, value - ops.cast(learning_rate, variable.dtype) * step)

    def lr_adjust(self, x: Any) -> Any:
        """Scales an update by the larger side of its matrix form."""
        if self.rms_rate is None:
            return x
        outputs = x.shape[-1]
        inputs = math.prod(x.shape[:-1])
        return x * (math.sqrt(max(inputs, outputs)) * self.rms_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format."""
        return {**super().get_config(), "normalize": self.normalize}


def as_matrix(kernel: Any) -> Any:
    """Returns a kernel as a matrix of (all inputs) × (outputs)."""
    return ops.reshape(kernel, (-1, kernel.shape[-1]))


def orthogonalize(matrix: Any, steps: int) -> Any:
    """Makes a matrix, or several in one array, nearly orthogonal: singular values about 1, same singular vectors.

    It computes in bfloat16 if the run does; its values are approximate anyway.
    """
    rows, columns = matrix.shape[-2:]
    if rows > columns:
        return ops.swapaxes(orthogonalize(ops.swapaxes(matrix, -1, -2), steps), -1, -2)
    a, b, c = _COEFFICIENTS
    x = matrix / (ops.sqrt(ops.sum(ops.square(matrix), axis=(-2, -1), keepdims=True)) + 1e-7)
    if keras.config.dtype_policy().compute_dtype == "bfloat16":
        x = ops.cast(x, "bfloat16")
    for _ in range(steps):
        square = x @ ops.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return ops.cast(x, matrix.dtype)


def orthogonalize_together(matrices: Sequence[Any], steps: int) -> list[Any]:
    """Applies `orthogonalize` to each matrix, in few batches, padded with zeros, which do not change the result."""
    wide = [m if m.shape[0] <= m.shape[1] else ops.transpose(m) for m in matrices]
    done: list[Any] = [None] * len(wide)
    for indices in group_into_batches([m.shape for m in wide], steps):
        rows, columns = (max(wide[index].shape[side] for index in indices) for side in (0, 1))
        padded = [
            ops.pad(wide[index], [[0, rows - wide[index].shape[0]], [0, columns - wide[index].shape[1]]])
            for index in indices
        ]
        batch = orthogonalize(ops.stack(padded), steps)
        for number, index in enumerate(indices):
            height, width = wide[index].shape
            part = batch[number, :height, :width]
            done[index] = part if matrices[index].shape == wide[index].shape else ops.transpose(part)
    return done


def group_into_batches(shapes: Sequence[Shape], steps: int, max_padding: float = _MAX_PADDING) -> list[list[int]]:
    """Groups matrices into batches: those of one shape, and similar ones if their padding costs little."""
    by_shape: dict[Shape, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault((shape[0], shape[1]), []).append(index)
    batches = list(by_shape.items())
    while len(batches) > 1:
        cost, one, other = min(
            (_cost(*_joined(p, q), steps) - _cost(*p, steps) - _cost(*q, steps), i, j)
            for (i, p), (j, q) in combinations(enumerate(batches), 2)
        )
        if cost > max_padding:
            break
        joined = _joined(batches[one], batches[other])
        batches = [batch for index, batch in enumerate(batches) if index not in (one, other)] + [joined]
    return [indices for _, indices in batches]


def _joined(one: tuple[Shape, list[int]], other: tuple[Shape, list[int]]) -> tuple[Shape, list[int]]:
    (p, some), (q, others) = one, other
    return (max(p[0], q[0]), max(p[1], q[1])), sorted([*some, *others])


def _cost(shape: Shape, indices: list[int], steps: int) -> float:
    """Returns the operations to orthogonalize the matrices, each padded to ``shape``."""
    rows, columns = shape
    return len(indices) * steps * (4.0 * rows**2 * columns + 2.0 * rows**3)
