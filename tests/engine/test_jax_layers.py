"""Convolution and batch norm as GPUs compute them fastest have the values and gradients of Keras's own."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from conftest import Make, distance

pytestmark = pytest.mark.jax_only("it is about JAX")
RESNET: dict[str, Any] = {"model": "resnet20", "precision": "float64", "optimizer": "sgd", "learning_rate": 0.05}


@pytest.mark.parametrize(
    ("size", "channels", "filters", "width", "pixels"),
    [
        (3, 16, 16, 32, 4),
        (3, 32, 32, 16, 2),
        (3, 3, 16, 32, 4),
        (5, 16, 16, 32, 4),
        (3, 64, 64, 8, 1),  # there are enough channels
        (3, 3, 64, 32, 1),
        (3, 16, 16, 30, 2),  # groups of four do not fill a row
        (3, 16, 16, 31, 1),
        (1, 16, 16, 32, 1),  # it has no neighbours
        (2, 16, 16, 32, 1),
        (7, 32, 32, 32, 1),  # it would need more than the next groups
    ],
)
def test_groups_fill_the_channels_that_a_kernel_computes_at_a_time(
    two_devices: None, size: int, channels: int, filters: int, width: int, pixels: int
) -> None:
    from modelyard.engine.jax_layers import pixels_in_group

    assert pixels_in_group(size, channels, filters, width) == pixels


@pytest.mark.parametrize(("size", "group"), [((3, 3), 2), ((3, 3), 4), ((1, 3), 2), ((5, 5), 2), ((3, 7), 4)])
def test_a_convolution_over_groups_of_pixels_is_the_same_with_its_gradients(
    two_devices: None, size: tuple[int, int], group: int
) -> None:
    import jax
    from keras.src.backend.jax import nn

    from modelyard.engine.jax_layers import grouped_conv

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        inputs, kernel = random.standard_normal((2, 5, 16, 3)), random.standard_normal((*size, 3, 6))

        def values(conv: Any) -> Any:
            result = conv(inputs, kernel)
            return result, *jax.grad(lambda *given: (conv(*given) ** 3).sum(), (0, 1))(inputs, kernel)

        found = values(lambda i, k: grouped_conv(i, k, group))
        for mine, other in zip(found, values(lambda i, k: nn.conv(i, k, padding="same")), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_batch_norm_has_the_values_and_gradients_of_keras(two_devices: None, together: bool, far: float) -> None:
    import jax
    import jax.numpy as jnp
    from keras.src.backend.jax import nn

    from modelyard.engine import jax_layers

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x = random.standard_normal((4, 3, 5, 6)) * 3 + far
        gamma, beta = random.standard_normal((2, 6))

        def loss(functions: Any, *given: Any) -> Any:
            x, gamma, beta = given
            mean, variance = functions[0](x, [0, 1, 2])
            return jnp.sum(functions[1](x, mean, variance, -1, beta, gamma) ** 3 * jnp.arange(6))

        def values(*functions: Any) -> Any:
            given = x, gamma, beta
            gradients = jax.grad(loss, (1, 2, 3))
            twice = jax.grad(lambda *given: sum((g**2).sum() for g in gradients(functions, *given)), (0, 1, 2))
            with_gradients = (loss(functions, *given), *gradients(functions, *given))
            return with_gradients if far else (*with_gradients, *twice(*given))

        functions = partial(jax_layers.moments, together=together), jax_layers.batch_normalization
        ours, keras = values(*functions), values(nn.moments, nn.batch_normalization)
        for one, other in zip(ours, keras, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-7 * float(np.abs(other).max()))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("axes", [-1, [-1], (-3, -2), (0, -1), (1, 2)])
def test_moments_are_those_of_keras_over_axes_that_are_counted_from_the_end(
    two_devices: None, together: bool, axes: Any
) -> None:
    import jax
    import jax.numpy as jnp
    from keras.src.backend.jax import nn

    from modelyard.engine.jax_layers import moments

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 5, 6)), jnp.float32)

    def values(function: Any, **more: Any) -> Any:
        gradient = jax.grad(lambda x: sum((each**3).sum() for each in function(x, axes, **more)))
        return *function(x, axes, **more), *function(x, axes, keepdims=True, **more), jax.jit(gradient)(x)

    for mine, other in zip(values(moments, together=together), values(nn.moments), strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "bfloat16"])
def test_moments_of_other_types_are_those_of_keras(two_devices: None, dtype: str) -> None:
    import jax.numpy as jnp
    from keras.src.backend.jax import nn

    from modelyard.engine.jax_layers import moments

    x = jnp.asarray(np.random.default_rng(0).uniform(0, 255, (40, 3)) * (1 if "int" in dtype else 10), dtype)
    for mine, other in zip(moments(x, [0]), nn.moments(x, [0]), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine.astype("float32"), other.astype("float32"), rtol=1e-2)


def test_layer_normalization_is_computed_on_a_gpu(two_devices: None) -> None:
    import jax
    import jax.numpy as jnp
    import keras

    from modelyard.engine.jax_layers import faster_layers

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 6)), jnp.float32)
    layer = keras.layers.LayerNormalization()
    plain = layer(x)
    with faster_layers(on_gpu=True, replicas=1):
        fast = jax.jit(lambda x: layer(x))(x)
    np.testing.assert_allclose(fast, plain, atol=1e-5)


def test_functions_of_keras_that_layers_of_a_user_call_take_variables_and_other_types(two_devices: None) -> None:
    import jax
    import jax.numpy as jnp
    import keras
    from keras import ops

    from modelyard.engine.jax_layers import faster_layers

    random = np.random.default_rng(0)
    images, kernel = (keras.Variable(random.standard_normal(shape)) for shape in ((2, 4, 8, 6), (3, 3, 6, 6)))
    mean, variance, gamma, beta = (keras.Variable(random.uniform(1, 2, 6)) for _ in range(4))

    def values() -> Any:
        x = jnp.asarray(images.value, jnp.bfloat16)
        normalized = jax.grad(lambda x: ops.batch_normalization(x, mean, variance, -1, beta, gamma).sum())(x)
        return normalized, ops.conv(images, kernel, padding="same")

    plain = values()
    with faster_layers(on_gpu=True, replicas=1):
        fast = values()
    for mine, other in zip(fast, plain, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine.astype("float32"), other.astype("float32"), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("on_gpu", "replicas"), [(False, 1), (False, 2), (True, 2)])
def test_batch_norm_has_derivatives_in_forward_mode(two_devices: None, on_gpu: bool, replicas: int) -> None:
    import jax
    import jax.numpy as jnp
    from keras import ops

    from modelyard.engine.jax_layers import faster_layers

    def normalized(x: Any) -> Any:
        return ops.batch_normalization(x, *ops.moments(x, [0]), -1)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 6)), jnp.float32)
    plain = jax.jvp(normalized, (x,), (x**2,))[1]
    with faster_layers(on_gpu, replicas):
        np.testing.assert_allclose(jax.jvp(normalized, (x,), (x**2,))[1], plain, rtol=1e-4, atol=1e-5)


def test_threads_that_trace_at_once_leave_keras_as_it_was(two_devices: None) -> None:
    from keras.src.backend.jax import nn

    from modelyard.engine.jax_layers import faster_layers

    own, entered, left = nn.moments, threading.Event(), threading.Event()

    def trace() -> None:
        with faster_layers(on_gpu=False, replicas=1):
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=trace)
    with faster_layers(on_gpu=False, replicas=1):
        thread.start()
        assert not entered.wait(0.2)
    left.set()
    thread.join()
    assert entered.is_set()
    assert nn.moments is own


def test_moments_of_float32_do_not_cancel_far_from_zero(two_devices: None) -> None:
    from modelyard.engine.jax_layers import moments

    x = np.random.default_rng(0).standard_normal((64, 16, 16, 2)).astype(np.float32) + np.float32(1e4)
    mean, variance = moments(x, (0, 1, 2))
    np.testing.assert_allclose(mean, x.mean((0, 1, 2), np.float64), rtol=1e-7)
    np.testing.assert_allclose(variance, x.var((0, 1, 2), np.float64), rtol=1e-4)


def test_a_network_that_is_computed_as_on_a_gpu_trains_and_evaluates_the_same(make: Make) -> None:
    from keras.src.backend.jax import nn

    plain, as_on_gpu = (make(**RESNET, train_batch_size=16) for _ in range(2))
    as_on_gpu.on_gpu = True  # type: ignore[attr-defined]
    own = nn.conv, nn.moments
    losses = [engine.train(0, 3)["loss"] for engine in (plain, as_on_gpu)]
    assert (nn.conv, nn.moments) == own, "Keras is as it was"
    texts = []
    for engine in (plain, as_on_gpu):
        with engine._types():  # type: ignore[attr-defined]
            texts.append(engine._lowered("resident", 1, 0).as_text())  # type: ignore[attr-defined]
    wide = [text.count("3x3x64x64x") for text in texts]
    assert wide[1] > wide[0], "groups of pixels"
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    assert distance(plain.state(), as_on_gpu.state()) < 1e-8
    assert as_on_gpu.evaluate("test") == pytest.approx(plain.evaluate("test"), rel=1e-8)


def test_kernels_with_their_filters_first_between_the_steps_learn_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.engine import jax_step

    options = {**RESNET, "train_batch_size": 16, "ema_decay": 0.9, "momentum": 0.9}
    single, together = (make(**options) for _ in range(2))
    together.on_cpu = False  # type: ignore[attr-defined]
    single.prepare([8])
    monkeypatch.setattr(jax_step.Layout, "on_gpu", True)
    transposed = []
    first = jax_step._filters_first
    monkeypatch.setattr(jax_step, "_filters_first", lambda state: transposed.append(1) or first(state))
    together.prepare([8])
    assert transposed, "so that they are not transposed at each step"
    one, many = (engine.train(0, 8) for engine in (single, together))
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-9)
    assert distance(single.state(), together.state()) < 1e-8
