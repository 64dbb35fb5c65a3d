"""Networks of keras.applications, wide ResNets and the transformer: each is built, trains a step and is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_models import network

import modelyard
from conftest import Make
from modelyard.errors import CheckpointError, DataError, UserError
from modelyard.models.catalog import BACKBONES

pytestmark = pytest.mark.usefixtures("two_devices")
IMAGES = {"dataset": "synthetic", "synthetic_examples": 20, "synthetic_classes": 3}
NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 4},
    "resnet34": {"width": 4},
    "wide_resnet": {"depth": 10, "widen": 1},
    "vit": {"blocks": 1, "embedding": 12},
}
"""Networks of our own, in a size for tests."""


def side_of(name: str) -> int:
    return BACKBONES[name].smallest if name in BACKBONES else 32


@pytest.mark.parametrize(
    "name",
    ["wide_resnet", "vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet18", "resnet34", *BACKBONES))],
)
def test_a_network_trains_a_step_and_is_evaluated(make: Make, name: str) -> None:
    side = side_of(name)
    shape = f"{side},{side},3"
    options = {**IMAGES, "model": name, "synthetic_shape": shape, "train_batch_size": 8, "optimizer": "sgd"}
    options |= NARROW.get(name, {})
    engine = make(**options, train_steps=1, learning_rate=1e-4, eval_batch_size=4)
    losses = engine.train(0, 1)["loss"]
    assert np.isfinite(losses).all()
    assert np.isfinite(engine.evaluate("test")["loss"])


@pytest.mark.parametrize(("model", "parameters"), [("resnet18", 11_173_962), ("resnet34", 21_282_122)])
def test_basic_resnets_have_their_known_sizes(model: str, parameters: int) -> None:
    learned = network(model=model, dataset="synthetic", synthetic_examples=50).trainable_variables
    assert sum(int(np.prod(v.shape)) for v in learned) == parameters  # those for ten classes of 32×32, as published


def test_a_wide_resnet_has_its_known_size_and_a_depth_that_fits() -> None:
    learned = network(model="wide_resnet", depth=16, widen=4, dataset="synthetic", synthetic_examples=50)
    count = sum(int(np.prod(v.shape)) for v in learned.trainable_variables)
    assert abs(count - 2_748_890) < 10_000  # 2.7 million in the paper
    with pytest.raises(UserError, match=r"must be 6 n \+ 4, got 18. Use 16"):
        network(model="wide_resnet", depth=18, dataset="synthetic", synthetic_examples=50)


def test_large_images_are_made_smaller_first() -> None:
    shapes = {"32,32,3": (None, 32, 32, 64), "96,96,3": (None, 24, 24, 64)}
    for shape, expected in shapes.items():
        model = network(model="resnet18", dataset="synthetic", synthetic_examples=20, synthetic_shape=shape)
        assert tuple(model.get_layer("stage1_block1_conv1").output.shape) == expected


def pixels(kind: str, images: Any) -> Any:
    from modelyard.models.backbones import Pixels

    return np.asarray(Pixels(kind)(images))


@pytest.mark.parametrize(
    ("kind", "module"),
    [("centred", "mobilenet_v2"), ("caffe", "resnet50"), ("torch", "densenet"), ("bytes", "efficientnet_v2")],
)
def test_pixels_are_those_that_keras_preprocesses_to(kind: str, module: str) -> None:
    import keras

    images = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 3)).astype(np.float32)
    expected = getattr(keras.applications, module).preprocess_input(images.copy())
    np.testing.assert_allclose(pixels(kind, images.astype(np.uint8)), expected, atol=1e-4)


def test_grey_images_become_three_channels_and_shares_become_bytes(tmp_path: Path) -> None:
    grey = np.full((1, 2, 2, 1), 255, np.uint8)
    np.testing.assert_allclose(pixels("centred", grey), np.ones((1, 2, 2, 3)), atol=1e-6)
    images = np.random.default_rng(0).random((8, 32, 32, 1)).astype(np.float32)
    np.savez(tmp_path / "grey.npz", x_train=images, y_train=np.arange(8) % 2)
    model = network(model="mobilenet_v2", alpha=0.35, dataset=str(tmp_path / "grey.npz"), validation_fraction=0.25)
    assert model.get_layer("pixels").scale == 255


def test_a_run_begins_with_pretrained_weights_and_goes_on_with_its_own(tmp_path: Path) -> None:
    import keras

    body = keras.applications.MobileNetV2(alpha=0.35, weights=None, include_top=False, input_shape=(224, 224, 3))
    body.save_weights(tmp_path / "body.weights.h5")
    options = {**IMAGES, "model": "mobilenet_v2", "alpha": 0.35, "pretrained": str(tmp_path / "body.weights.h5")}
    options |= {"fine_tune": "head", "train_batch_size": 4, "log_every": 1, "save_every": 1, "model_dir": "run"}
    result = modelyard.train(**options, train_steps=1)
    found = modelyard_weights(result.model_dir, 1)
    expected = {v.path: np.asarray(v) for v in body.variables}
    for name in ("Conv1/kernel", "block_16_project/kernel", "Conv_1_bn/moving_variance"):
        np.testing.assert_array_equal(found[name], expected[name])
    (tmp_path / "body.weights.h5").unlink()  # once is enough
    body.save_weights(tmp_path / "body.weights.h5")
    renamed = (tmp_path / "body.weights.h5").rename(tmp_path / "body.h5")  # Keras goes by the ending of the name
    modelyard.train(**{**options, "pretrained": str(renamed), "model_dir": "renamed"}, train_steps=1)
    modelyard.train(**options, train_steps=2)
    np.testing.assert_array_equal(modelyard_weights("run", 2)["Conv1/kernel"], expected["Conv1/kernel"])


def test_imagenet_is_a_word_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras
    from keras.src.utils import file_utils

    body = keras.applications.MobileNetV2(alpha=0.35, weights=None, include_top=False, input_shape=(224, 224, 3))
    body.save_weights(tmp_path / "published.weights.h5")
    asked: list[str] = []

    def fetch(name: str, *_: Any, **__: Any) -> str:
        asked.append(name)
        return str(tmp_path / "published.weights.h5")

    monkeypatch.setattr(file_utils, "get_file", fetch)
    options = {**IMAGES, "model": "mobilenet_v2", "alpha": 0.35, "pretrained": "imagenet", "fine_tune": "head"}
    modelyard.train(**options, train_batch_size=4, train_steps=1, model_dir="run")
    assert asked == ["mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_224_no_top.h5"]
    np.testing.assert_array_equal(
        modelyard_weights("run", 1)["Conv1/kernel"], np.asarray(body.get_layer("Conv1").kernel)
    )
    assert modelyard.load_config(config_file="run/config.yaml").component_options["pretrained"] == "imagenet"


def modelyard_weights(folder: str, step: int) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(Path(folder) / "checkpoints" / f"step-{step:08d}" / "weights.safetensors"))


def test_mistakes_with_backbones_are_told(make: Make, tmp_path: Path) -> None:
    options = {**IMAGES, "model": "mobilenet_v2", "alpha": 0.35, "train_steps": 1}
    with pytest.raises(DataError, match=r"at least 32×32; those of this dataset have 16×16.*--input_size 32"):
        make(**options, synthetic_shape="16,16,3")
    with pytest.raises(DataError, match="1 or 3 channels"):
        make(**options, synthetic_shape="32,32,4")
    engine = make(**options, synthetic_shape="16,16,3", input_size=32)
    assert engine.model.get_layer("resize").output.shape == (None, 32, 32, 3)
    with pytest.raises(UserError, match=r"there is no file nowhere\.h5"):
        make(**options, pretrained="nowhere.h5").initialize()
    (tmp_path / "other.weights.h5").write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match=r"other\.weights\.h5"):
        make(**options, pretrained=str(tmp_path / "other.weights.h5")).initialize()
    network(model="mlp", dataset="digits").save_weights(tmp_path / "mlp.weights.h5")
    with pytest.raises(CheckpointError, match=r"mlp.weights.h5 does not belong to mobilenet_v2 with alpha 0.35"):
        make(**options, pretrained=str(tmp_path / "mlp.weights.h5")).initialize()


def test_a_file_of_another_width_or_network_is_told_by_two_shapes_and_without_warnings(
    make: Make, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import keras

    body = keras.applications.MobileNetV2(alpha=0.35, weights=None, include_top=False, input_shape=(32, 32, 3))
    body.save_weights(tmp_path / "narrow.weights.h5")
    options = {**IMAGES, "train_steps": 1, "pretrained": str(tmp_path / "narrow.weights.h5")}
    with pytest.raises(CheckpointError) as told:
        make(**options, model="mobilenet_v2", alpha=0.5).initialize()
    assert str(told.value).endswith(
        "narrow.weights.h5 does not belong to mobilenet_v2 with alpha 0.5: block_1_project/kernel is 1×1×48×8 in the "
        "file and 1×1×48×16 in the network; 187 of 260 weights have another shape. Perhaps it has another --alpha, or "
        "is of another network (--model)."
    )
    with pytest.raises(CheckpointError, match=r"conv1/kernel is 3×3×3×16 in the file and 3×3×3×8 in the network; "):
        make(**options, model="mobilenet", alpha=0.25).initialize()
    assert not [str(warning.message) for warning in recwarn if "container" in str(warning.message)]


def test_pretrained_weights_that_are_no_numbers_are_refused(make: Make, tmp_path: Path) -> None:
    import keras

    body = keras.applications.MobileNetV2(alpha=0.35, weights=None, include_top=False, input_shape=(32, 32, 3))
    body.get_layer("bn_Conv1").gamma.assign(np.full(16, np.nan))
    body.save_weights(tmp_path / "nan.weights.h5")
    with pytest.raises(CheckpointError, match=r"nan\.weights\.h5: bn_Conv1/gamma holds 16 values of 16 that are not"):
        make(**IMAGES, model="mobilenet_v2", alpha=0.35, pretrained=str(tmp_path / "nan.weights.h5")).initialize()
