"""Regression and multi-label: losses and metrics against NumPy, from data to result on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

import modelyard
from conftest import Make
from modelyard.data.dataset import ArrayDataset, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import ConfigError, DataError, UserError

pytestmark = pytest.mark.usefixtures("two_devices")
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(0, 1, (200, 6)).astype(np.float32)
HEIGHTS = (1000 + 250 * VALUES[:, 0] + 10 * RANDOM.normal(0, 1, 200)).astype(np.float32)
FLAGS = (VALUES[:, :3] > 0.3).astype(np.uint8)
FAST: dict[str, Any] = {"model": "mlp", "train_batch_size": 40, "learning_rate": 0.02}


def dataset(labels: NDArray[Any], classes: list[str] | None = None) -> ArrayDataset:
    """The first 150 are for training."""
    parts = {"train": slice(0, 150), "validation": slice(150, 200)}
    return ArrayDataset({name: {"image": VALUES[s], "label": labels[s]} for name, s in parts.items()}, classes)


def task(data: Dataset, **options: Any) -> Any:
    from modelyard.models.choose_task import build_task

    return build_task(modelyard.load_config(**{"model": "mlp", **options}), data)


def outputs_of(engine: Any) -> NDArray[np.float64]:
    """What the trained network gives for the validation split, outside the engine."""
    for name, value in engine.state().weights.items():
        engine.network.weights[name].assign(value)
    return np.asarray(engine.model(VALUES[150:]), np.float64)


# -- regression -----------------------------------------------------------------------------------------------------


def test_a_network_learns_values_of_any_size_and_says_them_in_their_units(make: Make) -> None:
    engine = make(dataset(HEIGHTS), **FAST)
    before = engine.evaluate("validation")
    assert before["rmse"] < 500, "it begins at the mean of the labels, not at 0"
    engine.train(0, 120)
    found = engine.evaluate("validation")
    assert found.keys() == {"loss", "mae", "rmse", "r2"}
    predicted = outputs_of(engine)[:, 0]
    errors = predicted - HEIGHTS[150:]
    spread = HEIGHTS[:150].astype(np.float64).std()
    assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)
    assert found["r2"] == pytest.approx(1 - (errors**2).mean() / HEIGHTS[150:].astype(np.float64).var(), rel=1e-3)
    assert found["loss"] == pytest.approx((errors**2).mean() / spread**2, rel=1e-4)
    assert found["r2"] > 0.8


def test_several_values_an_example_are_averaged(make: Make) -> None:
    labels = np.stack([HEIGHTS, VALUES[:, 1] * 1e-3], axis=1)
    engine = make(dataset(labels, ["height", "weight"]), **FAST)
    engine.train(0, 60)
    predicted = outputs_of(engine)
    errors = predicted - labels[150:]
    found = engine.evaluate("validation")
    r2 = 1 - (errors**2).mean(axis=0) / labels[150:].astype(np.float64).var(axis=0)
    assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-3)
    assert (r2 > 0.5).all(), "the small one is learned as well as the large one"


@pytest.mark.parametrize("kind", ["mse", "mae", "huber"])
def test_losses_are_those_of_their_names(kind: str) -> None:
    made = task(dataset(HEIGHTS), regression_loss=kind, **({"huber_delta": 0.5} if kind == "huber" else {}))
    spread = float(HEIGHTS[:150].astype(np.float64).std())
    outputs = np.array([[1000.0], [1000 + 0.25 * spread], [1000 - 2 * spread]], np.float32)
    batch = {"label": np.full(3, 1000, np.float32)}
    expected = {"mse": [0, 0.0625, 4], "mae": [0, 0.25, 2], "huber": [0, 0.5 * 0.0625, 0.5 * (2 - 0.25)]}[kind]
    assert np.asarray(made.loss(keras.ops.convert_to_tensor(outputs), batch)) == pytest.approx(expected, rel=1e-4)


def test_labels_that_are_all_the_same_make_no_nan(make: Make) -> None:
    engine = make(dataset(np.full(200, 7.0)), **FAST)
    engine.train(0, 2)
    found = engine.evaluate("validation")
    assert np.isfinite(list(found.values())).all()
    assert found["r2"] == 0.0


def test_classes_may_be_taken_for_numbers_if_that_is_said(make: Make) -> None:
    engine = make(model="mlp", task="regression", learning_rate=0.01)
    assert engine.model.output_shape == (None, 1)
    engine.train(0, 40)
    assert engine.evaluate("test")["r2"] > 0.2


def test_predictions_have_the_shape_of_labels() -> None:
    outputs = keras.ops.ones((3, 1))
    assert task(dataset(HEIGHTS)).predictions(outputs, {})["values"].shape == (3,)
    assert task(dataset(HEIGHTS[:, None].repeat(2, 1))).predictions(keras.ops.ones((3, 2)), {})["values"].shape == (
        3,
        2,
    )


# -- several classes ------------------------------------------------------------------------------------------------


def test_classes_that_apply_are_learned_and_measured(make: Make) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    engine = make(dataset(FLAGS, ["red", "green", "blue"]), **FAST)
    engine.train(0, 40)
    found = engine.evaluate("validation")
    logits = outputs_of(engine)
    truth, said = FLAGS[150:], (logits > 0).astype(int)
    assert found.keys() == {"loss", "exact_match", "binary_accuracy", "macro_f1"}
    entropy = np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0) - logits * truth
    assert found["loss"] == pytest.approx(entropy.mean(), rel=1e-4)
    assert found["exact_match"] == pytest.approx((said == truth).all(axis=1).mean())
    assert found["binary_accuracy"] == pytest.approx((said == truth).mean())
    assert found["macro_f1"] == pytest.approx(sklearn.f1_score(truth, said, average="macro"))
    assert found["macro_f1"] > 0.8


def test_logits_of_any_size_have_a_finite_loss_and_zero_its_slope() -> None:
    made = task(dataset(FLAGS))
    outputs = keras.ops.convert_to_tensor(np.array([[1e4, -1e4, 0]], np.float32))
    found = np.asarray(made.loss(outputs, {"label": np.array([[0, 1, 1]], np.uint8)}))
    assert found == pytest.approx([(1e4 + 1e4 + np.log(2)) / 3])
    said = made.predictions(outputs, {})
    assert np.asarray(said["labels"]).tolist() == [[1, 0, 0]]
    assert np.asarray(said["probabilities"]) == pytest.approx(np.array([[1, 0, 0.5]]))


# -- which task -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "name", "outputs"),
    [
        (np.arange(200) % 4, "Classifier", 4),
        (HEIGHTS, "Regressor", 1),
        (HEIGHTS[:, None].repeat(3, 1), "Regressor", 3),
        (FLAGS, "MultiLabel", 3),
        (FLAGS.astype(bool), "MultiLabel", 3),
    ],
)
def test_the_labels_decide_what_a_network_is_trained_as(labels: NDArray[Any], name: str, outputs: int) -> None:
    made = task(dataset(labels))
    assert type(made).__name__ == name
    assert made.checked_network().output_shape == (None, outputs)


@pytest.mark.parametrize(
    ("labels", "wanted", "message"),
    [
        (HEIGHTS, "classification", "labels are float32, one per example. Set --task regression"),
        (
            FLAGS,
            "classification",
            r"labels are uint8, of shape \(3,\). Set --task multi_label, or take the argmax",
        ),
        (
            HEIGHTS,
            "multi_label",
            "needs labels of 0 and 1, one row per example; the dataset has labels of float32, one per example",
        ),
    ],
)
def test_a_task_that_does_not_fit_the_labels_is_refused(labels: NDArray[Any], wanted: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task(dataset(labels), task=wanted)


def test_options_of_another_task_are_refused() -> None:
    with pytest.raises(ConfigError, match="label_smoothing: has no effect here: it is for classification"):
        task(dataset(HEIGHTS), label_smoothing=0.1)
    with pytest.raises(ConfigError, match="regression_loss: has no effect here: it is for regression"):
        task(dataset(FLAGS), regression_loss="mae")
    with pytest.raises(ConfigError, match="huber_delta: has no effect here: it is for --regression_loss huber"):
        task(dataset(HEIGHTS), huber_delta=2)
    with pytest.raises(ConfigError, match="task: is regression, but the model 'watcher' defines its own task"):
        task(dataset(np.arange(200) % 4), model="watcher", task="regression")


def test_a_model_of_ones_own_may_be_a_regression() -> None:
    class Line(modelyard.Regressor):
        """One unit, or as many as are wrong."""

        units = 1

        def network(self) -> keras.Model:
            inputs, x = modelyard.any_input(self.data)
            return keras.Model(inputs, keras.layers.Dense(self.units, name="value")(x))

    from modelyard.models.data_info import describe_data

    made = Line(Line.Options(), describe_data(dataset(HEIGHTS)))
    assert [v.path.split("/")[-2] for v in made.checked_network().weights if "value" in v.path] == ["value", "value"]
    Line.units = 3
    with pytest.raises(UserError, match="the model has 3 outputs, but there are 1 numbers in a label"):
        made.checked_network()


@pytest.mark.parametrize(
    ("labels", "activation", "base"),
    [(np.arange(200) % 3, "softmax", modelyard.Classifier), (FLAGS, "sigmoid", modelyard.MultiLabel)],
)
def test_an_activation_that_is_applied_twice_is_noticed(
    labels: NDArray[Any], activation: str, base: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(base):  # type: ignore[misc]
        """A network with that activation, or none, at its end."""

        def __init__(self, data: Dataset, last: str | None) -> None:
            super().__init__(self.Options(), describe_data(data))
            self.last = last

        def network(self) -> keras.Model:
            inputs, x = modelyard.any_input(self.data)
            outputs = keras.layers.Dense(self.data.num_classes, name="head", activation=self.last)(x)
            return keras.Model(inputs, outputs)

    class WithOwnLoss(Ends):
        """A task of its own, which may take probabilities."""

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs[:, 0]

    from modelyard.models.data_info import describe_data

    data = dataset(labels)
    Ends(data, None).checked_network()
    WithOwnLoss(data, activation).checked_network()
    assert not caplog.text
    Ends(data, activation).checked_network()
    assert f"the network ends in a {activation} (layer 'head')" in caplog.text


def test_mixing_labels_that_are_no_classes_is_refused(make: Make) -> None:
    parts = {"image": np.zeros((8, 4, 4, 1), np.uint8), "label": np.linspace(0, 1, 8)}
    with pytest.raises(DataError, match="'mixup' mixes labels, but the labels of these examples are not classes"):
        make(ArrayDataset({"train": parts}), model="mlp", train_batch_size=4, augment="mixup")


# -- from files to results ------------------------------------------------------------------------------------------


def test_values_in_an_npz_are_learned_and_the_least_loss_is_kept(tmp_path: Path) -> None:
    np.savez(tmp_path / "heights.npz", x_train=VALUES, y_train=HEIGHTS.astype(np.float64))
    result = modelyard.train_and_evaluate(
        **FAST, dataset=str(tmp_path / "heights.npz"), train_epochs=6, model_dir=str(tmp_path / "run"),
        engine=keras.backend.backend(), regression_loss="huber", hooks="-tensorboard",
    )  # fmt: skip
    assert result.best["metric"] == "loss"
    assert {"mae", "rmse", "r2"} <= result.metrics.keys()
    again = modelyard.evaluate(tmp_path / "run", engine=keras.backend.backend())
    assert again.metrics["loss"] == pytest.approx(result.best["value"], rel=1e-6)


CSV = "a,b,price,rooms,red,blue\n" + "".join(f"{i},{i * 2},{i * 1.5},{i % 4},{i % 2},{int(i > 5)}\n" for i in range(20))


def read_csv(folder: Path, **options: Any) -> Dataset:
    (folder / "table.csv").write_text(CSV)
    return load_dataset(modelyard.load_config(dataset=str(folder / "table.csv"), model="mlp", **options))


def test_columns_of_numbers_are_labels_to_predict(tmp_path: Path) -> None:
    data = read_csv(tmp_path, label_kind="numbers", label_column="price", value_columns="a,b")
    found = data.read("train", np.array([3]))
    assert found["label"] == pytest.approx(found["image"][:, 0] * 1.5)
    assert data.sizes() == {"train": 18, "validation": 2}
    assert data.classes == ()
    both = read_csv(tmp_path, label_kind="numbers", label_column="price, rooms", value_columns="a,b")
    assert both.features["label"].shape == (2,)
    assert both.classes == ("price", "rooms")
    everything = read_csv(tmp_path, label_kind="numbers", label_column="price,rooms", value_columns="all")
    assert everything.features["image"].shape == (4,)


def test_a_column_a_class_says_which_apply(tmp_path: Path) -> None:
    data = read_csv(tmp_path, label_kind="flags", label_column="red,blue", value_columns="a,b")
    assert (data.features["label"].dtype, data.classes) == ("uint8", ("red", "blue"))
    found = data.read("train", np.arange(18))
    assert np.asarray(found["label"]).tolist() == [[a % 2, int(a > 5)] for a in found["image"][:, 0]]
    with pytest.raises(DataError, match=r"table.csv:4: the label '2' must be 0 or 1 \(--label_kind flags\)"):
        read_csv(tmp_path, label_kind="flags", label_column="rooms", value_columns="a,b")
    with pytest.raises(DataError, match=r"there is no column 'read'. Did you mean 'red'"):
        read_csv(tmp_path, label_kind="flags", label_column="read,blue", value_columns="a,b")


def test_photos_may_have_values_as_labels(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(6):
        Image.fromarray(np.full((5, 5, 3), number * 40, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "ages.csv").write_text("path,label\n" + "".join(f"{n}.png,{n + 0.5}\n" for n in range(6)))
    data = load_dataset(modelyard.load_config(dataset=str(tmp_path / "ages.csv"), label_kind="numbers", image_size=4))
    found = data.read("train", np.arange(5))
    assert found["label"] == pytest.approx(np.asarray(found["image"])[:, 0, 0, 0] / 40 + 0.5)
    assert modelyard.data_info(str(tmp_path / "ages.csv"), label_kind="numbers")["splits"]["train"]["classes"] is None
    assert not modelyard.verify_data(str(tmp_path / "ages.csv"), label_kind="numbers").problems
    modelyard.show_data(str(tmp_path / "ages.csv"), tmp_path / "sheet.png", label_kind="numbers")
    with pytest.raises(DataError, match="are not classes, and a record has one class per example"):
        modelyard.convert(str(tmp_path / "ages.csv"), tmp_path / "records", label_kind="numbers")


def test_images_in_arrays_may_be_resized_with_values_as_labels(tmp_path: Path) -> None:
    images = np.arange(10, dtype=np.uint8)[:, None, None].repeat(6, 1).repeat(6, 2)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=np.arange(10) + 0.5)
    data = load_dataset(modelyard.load_config(dataset=str(tmp_path / "a.npz"), image_size=3))
    found = data.read("train", np.arange(9))
    assert np.asarray(found["image"]).shape == (9, 3, 3, 1)
    assert found["label"] == pytest.approx(np.asarray(found["image"])[:, 0, 0, 0] + 0.5)


def test_classes_saved_as_something_else_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(tmp_path / "a.npz", x_train=VALUES, y_train=(np.arange(200) % 5).astype(float))
    np.savez(tmp_path / "b.npz", x_train=VALUES, y_train=np.eye(5, dtype=int)[np.arange(200) % 5])
    np.savez(tmp_path / "c.npz", x_train=VALUES, y_train=np.arange(200))
    for name, message in (
        ("a", "labels are floats"),
        ("b", "exactly one class. If classes exclude each other, save their indices: y.argmax(axis=1)"),
        ("c", "each of 200 numbers is a class. For a regression, save the labels as floats"),
    ):
        caplog.clear()
        load_dataset(modelyard.load_config(dataset=str(tmp_path / f"{name}.npz"), model="mlp"))
        assert message in caplog.text


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("axis", [None, 0])
def test_a_loss_that_is_not_one_value_per_example_is_refused(make: Make, evaluates: bool, axis: int | None) -> None:
    @modelyard.register_model("mean_loss")
    class MeanLoss(modelyard.Regressor):
        """Its loss is a mean over the batch, as in Keras."""

        def network(self) -> keras.Model:
            inputs, x = modelyard.any_input(self.data)
            return keras.Model(inputs, keras.layers.Dense(1)(x))

        def loss(self, outputs: Any, batch: Any) -> Any:
            return keras.ops.mean(outputs - batch["label"][:, None], axis=axis)

    engine = make(dataset(HEIGHTS), **{**FAST, "model": "mean_loss"})
    with pytest.raises(UserError, match="the loss of MeanLoss must return one value per example"):
        engine.evaluate("validation") if evaluates else engine.train(0, 1)


def test_examples_without_labels_are_no_classification() -> None:
    with pytest.raises(DataError, match="these examples have no labels, which classification needs"):
        task(ArrayDataset({"train": {"image": VALUES}}))
