"""The network with whitened patches: its fixed first layer, its pooling, its beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_models import network

pytestmark = pytest.mark.usefixtures("two_devices")
SMALL = {"model": "whitened_cnn", "dataset": "synthetic", "synthetic_examples": 60, "widths": "32,32,32"}


def test_whitened_patches_have_unit_covariance_and_come_with_their_negatives() -> None:
    from modelyard.models.whitened import Whiten, whitening_kernel

    noise = np.random.default_rng(0).normal(size=(400, 9, 9, 3)).astype(np.float32)
    images = noise + np.roll(noise, 1, axis=1) + 0.5 * noise[..., ::-1]  # neighbours and channels hang together
    layer = Whiten(whitening_kernel(images, epsilon=0.0), name="whiten")
    out = np.asarray(layer(images)).reshape(-1, 24)
    np.testing.assert_allclose(out.T @ out / len(out), np.kron([[1, -1], [-1, 1]], np.eye(12)), atol=2e-3)
    assert layer.trainable_variables == []


def test_a_direction_in_which_nothing_happens_is_not_blown_up() -> None:
    from modelyard.models.whitened import whitening_kernel

    kernel = whitening_kernel(np.zeros((4, 5, 5, 1), np.float32))
    assert np.isfinite(kernel).all()
    assert np.abs(kernel).max() <= 1 / np.sqrt(5e-4) + 1e-3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(2, 6, 6, 3), (2, 7, 11, 1)])
def test_max_pool_is_that_of_keras(size: int, shape: tuple[int, ...]) -> None:
    import keras

    from modelyard.models.whitened import MaxPool

    images = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(MaxPool(size)(images)), np.asarray(keras.layers.MaxPooling2D(size)(images))
    )
    assert MaxPool(size).compute_output_shape(shape) == keras.layers.MaxPooling2D(size).compute_output_shape(shape)


def test_convolutions_begin_by_handing_their_inputs_on() -> None:
    from modelyard.models.whitened import IdentityKernel

    kernel = np.asarray(IdentityKernel()((3, 3, 4, 10)))
    expected = np.zeros((3, 3, 4, 4))
    expected[1, 1] = np.eye(4)
    np.testing.assert_array_equal(kernel[..., :4], expected)
    rest = kernel[..., 4:]
    assert 0.8 / 6 < np.abs(rest).max() <= 1 / 6  # nine places, four channels: 1 / √36
    np.testing.assert_array_equal(np.asarray(IdentityKernel()((3, 3, 10, 4)))[1, 1], np.eye(10, 4))


@pytest.mark.parametrize(("depth", "bias"), [(2, False), (3, True)])
def test_only_kernels_offsets_and_the_head_are_learned(depth: int, bias: bool) -> None:
    model = network(**SMALL, depth=str(depth), whiten_bias=bias)
    names = [v.path for v in model.trainable_variables]
    groups = [f"group{g}_{kind}" for g in (1, 2, 3) for n in range(1, depth + 1) for kind in (f"conv{n}", f"norm{n}")]
    expected = [f"{name}/{'kernel' if 'conv' in name else 'beta'}" for name in groups]
    assert names == [*(["whiten/bias"] if bias else []), *expected, "logits/kernel"]
    assert any(layer.name == "group1_add" for layer in model.layers) == (depth == 3)


def test_logits_are_scaled_by_the_last_width_or_as_said() -> None:
    images = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3), np.uint8)

    def logits(**options: Any) -> Any:
        import keras

        keras.utils.set_random_seed(3)
        return np.asarray(network(**SMALL, **options)(images))

    np.testing.assert_allclose(logits(), logits(logit_scale=0.5) * 2 / 32, rtol=1e-5)


def test_the_fixed_kernel_is_saved_with_the_model(tmp_path: Path) -> None:
    import keras

    model = network(**SMALL)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    images = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(loaded(images)), np.asarray(model(images)))
