"""A SavedModel as frozen features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import engine_name
from modelyard.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("two_devices")
only_tensorflow = pytest.mark.tensorflow_only("a SavedModel is a program for TensorFlow")
RUN: dict[str, Any] = {
    "model": "saved_model", "dataset": "synthetic", "synthetic_shape": "8,8,1", "synthetic_examples": 200,
    "synthetic_classes": 3, "train_steps": 3, "train_batch_size": 32, "saved_model_path": "hub",
}  # fmt: skip


def save(folder: str, size: int | None = 12, signatures: bool = True, channels: int = 3) -> np.ndarray:
    """A SavedModel whose features are the means of quarters of the image, mixed by a variable."""
    import tensorflow as tf

    kernel = np.random.default_rng(1).normal(size=(channels, 5)).astype(np.float32)

    class Features(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(kernel)

        @tf.function(input_signature=[tf.TensorSpec([None, size, size, channels], tf.float32)])
        def __call__(self, images: Any) -> Any:
            return tf.reduce_mean(images, [1, 2]) @ self.kernel

        @tf.function(input_signature=[tf.TensorSpec([None, size, size, channels], tf.float32)])
        def maps(self, images: Any) -> Any:
            return {"maps": images}

        @tf.function(input_signature=[tf.TensorSpec([4, size, size, channels], tf.float32)])
        def fours(self, images: Any) -> Any:
            return {"out": tf.reduce_mean(images, [1, 2])}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def files(self, names: Any) -> Any:
            return {"out": tf.strings.length(names)}

    module = Features()
    named = {"serving_default": module.__call__, "maps": module.maps, "fours": module.fours, "files": module.files}
    tf.saved_model.save(module, folder, signatures=named if signatures else None)
    return kernel


def build(**options: Any) -> Any:
    from modelyard.data.open_dataset import load_dataset
    from modelyard.models.choose_task import build_task

    config = modelyard.load_config(**{**RUN, **options})
    return build_task(config, load_dataset(config)).network()


@only_tensorflow
def test_a_saved_model_is_a_program() -> None:
    """docs/security.md says so: whoever made it decides what it does here."""
    import tensorflow as tf

    class Writes(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3], tf.float32)])
        def __call__(self, images: Any) -> Any:
            tf.io.write_file("canary", "written by the model")
            return tf.reduce_mean(images, [1, 2])

    tf.saved_model.save(Writes(), "hub")
    build()(np.zeros((1, 8, 8, 1), np.uint8))
    assert Path("canary").read_text() == "written by the model"


@only_tensorflow
@pytest.mark.parametrize("signatures", [True, False])
def test_bytes_become_floats_from_0_to_1_of_the_size_it_takes(signatures: bool) -> None:
    kernel = save("hub", signatures=signatures)
    model = build()
    image = np.full((1, 8, 8, 1), 51, np.uint8)
    features = model.get_layer("features")(image)
    np.testing.assert_allclose(features, np.full((1, 3), 0.2) @ kernel, rtol=1e-5)
    assert [v.path for v in model.variables] == ["logits/kernel", "logits/bias"]


@only_tensorflow
def test_a_run_trains_and_saves_only_the_head_and_goes_on() -> None:
    save("hub")
    modelyard.train_and_evaluate(**RUN, model_dir="run", hidden_units=[4], dropout_rate=0.1, checkpoint_path=None)
    assert set(modelyard.load_weights("run")) == {"dense1/kernel", "dense1/bias", "logits/kernel", "logits/bias"}
    assert f"saved_model_path: {Path('hub').absolute()}" in Path("run/config.yaml").read_text()
    before = modelyard.evaluate("run", checkpoint="latest").metrics
    Path("hub").rename("moved")
    with pytest.raises(UserError, match=r"hub is not a SavedModel: there is no file saved_model.pb"):
        modelyard.evaluate("run")
    assert modelyard.evaluate("run", checkpoint="latest", saved_model_path="moved").metrics == before
    assert modelyard.resume("run", train_steps=5, saved_model_path="moved").step == 5


@only_tensorflow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saved_model_path": "nowhere"}, "nowhere is not a SavedModel"),
        ({"signature": "embed"}, r"no signature 'embed'. It has: files, fours, maps, serving_default"),
        ({"signature": "maps"}, r"returns float32 of shape \?×12×12×3, not features \[batch, features\]"),
        ({"signature": "fours"}, r"takes float32 of shape 4×12×12×3; it must take floats of batch×height"),
        ({"signature": "files"}, r"takes string of shape \?;"),
        ({"synthetic_shape": "8,8,2"}, "takes 3 channels; the images have 2"),
    ],
)
def test_what_does_not_fit_is_said(options: dict[str, Any], message: str) -> None:
    save("hub")
    with pytest.raises(UserError, match=message):
        build(**options)


@only_tensorflow
def test_a_damaged_saved_model_is_an_error() -> None:
    save("hub")
    Path("hub/saved_model.pb").write_bytes(b"\xff\xff nothing")
    with pytest.raises(UserError, match=r"hub cannot be loaded by TensorFlow"):
        build()


@only_tensorflow
def test_images_keep_their_size_where_it_takes_any() -> None:
    kernel = save("hub", size=None)
    features = build().get_layer("features")(np.full((2, 8, 8, 1), 255, np.uint8))
    np.testing.assert_allclose(features, np.ones((2, 3)) @ kernel, rtol=1e-5)


def test_the_path_must_be_given() -> None:
    with pytest.raises(ConfigError, match="saved_model_path"):
        modelyard.load_config(model="saved_model")


@pytest.mark.jax_only("on TensorFlow it works")
def test_on_jax_the_engine_is_named() -> None:
    assert engine_name() == "jax"
    with pytest.raises(UserError, match="needs --engine tensorflow"):
        build()
