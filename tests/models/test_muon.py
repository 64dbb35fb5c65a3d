"""Muon: orthogonal updates, all kernels together or one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import TESTS, environment
from waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("two_devices")
SHAPES = [(216, 64), (64, 64), (30, 70), (10, 200), (70, 30), (64, 216)]


def kernels() -> list[Any]:
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    layers = [keras.layers.Conv2D(5, 3, name="a"), keras.layers.Conv2D(7, 3, name="b"), keras.layers.Dense(4, name="c")]
    for layer, width in zip(layers, (3, 5, 7), strict=True):
        layer.build((None, 8, 8, width) if layer.name != "c" else (None, width))
    return [v for layer in layers for v in layer.trainable_variables]


def updated(steps: int = 2, rate: float = 0.5, **options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Weights before and after some steps with the same gradients."""
    from modelyard.models.optimizers import build_optimizer

    config = modelyard.load_config(optimizer="muon", model="mlp", weight_decay=0, **options)
    variables, random = kernels(), np.random.default_rng(0)
    for variable in variables:
        variable.assign(random.normal(size=variable.shape))
    before = [np.array(v.value) for v in variables]
    optimizer = build_optimizer(config, lambda: rate)
    optimizer.build(variables)
    gradients = [random.normal(size=v.shape).astype(np.float32) for v in variables]
    for _ in range(steps):
        optimizer.apply(gradients, variables)
    return before, [np.array(v.value) for v in variables], gradients


def test_matrices_in_batches_become_what_they_become_alone() -> None:
    from modelyard.models.muon import group_into_batches, orthogonalize, orthogonalize_together

    random = np.random.default_rng(0)
    matrices = [random.normal(size=shape).astype(np.float32) for shape in SHAPES]
    wide = [tuple(sorted(shape)) for shape in SHAPES]
    assert len(group_into_batches(wide, 5)) == 1  # all of them padded to 64 × 216
    for matrix, together in zip(matrices, orthogonalize_together(matrices, 5), strict=True):
        alone = np.asarray(orthogonalize(matrix, 5))
        np.testing.assert_allclose(np.asarray(together), alone, atol=2e-5)
        values = np.linalg.svd(alone, compute_uv=False)
        assert values.max() < 1.3
        assert values.min() > 0.5 or matrix.shape == (64, 64)  # a square one has directions that hardly are there


def test_batches_are_shared_only_where_zeros_cost_little() -> None:
    from modelyard.models.muon import group_into_batches

    shapes = [(64, 64), (2048, 2048), (64, 80), (2048, 2048)]
    assert sorted(group_into_batches(shapes, 5)) == [[0, 2], [1, 3]]
    assert sorted(group_into_batches(shapes, 5, max_padding=0)) == [[0], [1, 3], [2]]
    assert group_into_batches(shapes, 5, max_padding=1e15) == [[0, 1, 2, 3]]


def test_a_normalised_kernel_moves_from_a_norm_of_the_root_of_its_outputs() -> None:
    from modelyard.models.muon import orthogonalize

    before, after, gradients = updated(1, muon_normalize=True, muon_scale="none", momentum=0.6, muon_steps=3)
    for old, new, gradient in zip(before[:3:2], after[:3:2], gradients[:3:2], strict=True):
        matrix = (1.6 * gradient).reshape(-1, gradient.shape[-1])  # the gradient and 0.6 times the first momentum
        update = np.asarray(orthogonalize(matrix, 3)).reshape(old.shape)
        expected = old * np.sqrt(old.shape[-1]) / np.linalg.norm(old) - 0.5 * update
        np.testing.assert_allclose(new, expected, atol=1e-5)


def test_rms_scales_by_the_larger_side() -> None:
    before, scaled, _ = updated(1)
    _, plain, _ = updated(1, muon_scale="none")
    np.testing.assert_allclose(scaled[0] - before[0], (plain[0] - before[0]) * 0.2 * np.sqrt(27), atol=1e-4)


def test_dense_and_convolution_kernels_move_as_with_keras() -> None:
    """On dense kernels, Keras's own Muon is the reference."""
    import keras

    before, after, gradients = updated(3, rate=0.1)
    variable = keras.Variable(before[4], name="kernel")
    reference = keras.optimizers.Muon(0.1, momentum=0.95, weight_decay=None, adam_weight_decay=None)
    reference.build([variable])
    for _ in range(3):
        reference.apply([gradients[4]], [variable])
    np.testing.assert_allclose(after[4], np.array(variable.value), atol=1e-5)


PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[1:2]
import numpy as np
from test_muon import updated
for value in updated(3, muon_normalize=True, nesterov=False)[1]:
    print(json.dumps(np.asarray(value, np.float64).ravel().tolist()))
"""


@pytest.mark.slow
def test_jax_makes_all_updates_together_and_the_same() -> None:
    pytest.importorskip("jax")
    words = [sys.executable, "-c", PROGRAM, str(TESTS / "models")]
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    extra = {"PYTHONPATH": path, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, env=environment(**extra), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = updated(3, muon_normalize=True, nesterov=False)[1]
    for line, value in zip(done.stdout.strip().splitlines(), expected, strict=True):
        np.testing.assert_allclose(json.loads(line), value.ravel(), atol=2e-5)
