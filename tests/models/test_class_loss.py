"""Losses of classifiers, against NumPy: weights of classes, focal loss, smoothing, mixed labels; on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import modelyard
from conftest import Make, compiled
from modelyard.data.dataset import ArrayDataset, Dataset
from modelyard.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("two_devices")
CLASSES = ("cat", "dog", "cow")
COUNTS = (60, 30, 10)


def uneven() -> ArrayDataset:
    """60 cats, 30 dogs, 10 cows."""
    labels = np.repeat([0, 1, 2], COUNTS)
    images = np.random.default_rng(0).integers(0, 255, (100, 4, 4, 1)).astype(np.uint8)
    images[:, 0, 0, 0] = labels * 100
    part = {"image": images, "label": labels}
    return ArrayDataset({"train": part, "validation": part}, CLASSES)


def task(dataset: Dataset | None = None, **options: Any) -> Any:
    from modelyard.models.choose_task import build_task

    return build_task(modelyard.load_config(model="mlp", **options), dataset or uneven())


def loss(
    labels: Any, logits: NDArray[Any], training: bool = True, task_of: Any = None, **options: Any
) -> NDArray[np.float64]:
    """The loss as a training step, or an evaluation, has it."""
    from keras import ops

    made = task_of or task(**options)
    batch = {"label": ops.convert_to_tensor(labels)}
    batch = made.weigh(batch) if training else batch
    return np.asarray(made.loss(ops.convert_to_tensor(logits), batch), np.float64)


LOGITS = np.random.default_rng(1).normal(0, 2, (4, 3)).astype(np.float32)
LOGS = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1, keepdims=True))
LABELS = np.array([0, 1, 2, 2], np.int32)
ROW = np.arange(4)


def test_balanced_weights_count_every_class_alike_and_are_one_in_the_mean() -> None:
    found = loss(LABELS, LOGITS, class_weights="balanced") / -LOGS[ROW, LABELS]
    weights = 100 / (3 * np.array(COUNTS))
    np.testing.assert_allclose(found, weights[LABELS], rtol=1e-5)
    assert weights @ COUNTS / 100 == pytest.approx(1)


@pytest.mark.parametrize("given", ["cow=4, dog=2", {"cow": 4, "dog": 2}, "1,2,4", [1, 2, 4]])
def test_weights_by_name_or_in_order_keep_their_ratios(given: Any) -> None:
    found = loss(LABELS, LOGITS, class_weights=given) / -LOGS[ROW, LABELS]
    np.testing.assert_allclose(found, np.array([1, 2, 4, 4]) / 1.6, rtol=1e-5)


def test_evaluation_goes_without_weights() -> None:
    np.testing.assert_allclose(loss(LABELS, LOGITS, False, class_weights="balanced"), -LOGS[ROW, LABELS], rtol=1e-5)


def test_focal_loss_is_that_of_the_paper() -> None:
    p = np.exp(LOGS[ROW, LABELS])
    for training in (True, False):
        found = loss(LABELS, LOGITS, training, focal_gamma=2.0)
        np.testing.assert_allclose(found, -((1 - p) ** 2) * np.log(p), rtol=1e-4)
    np.testing.assert_allclose(loss(LABELS, LOGITS, focal_gamma=0.0), -np.log(p), rtol=1e-5)


def test_smoothing_spreads_the_target_before_the_focal_factor() -> None:
    terms = (1 - np.exp(LOGS)) ** 1.5 * -LOGS
    expected = 0.7 * terms[ROW, LABELS] + 0.3 * terms.mean(axis=1)
    np.testing.assert_allclose(loss(LABELS, LOGITS, focal_gamma=1.5, label_smoothing=0.3), expected, rtol=1e-4)
    plain = -(0.7 * LOGS[ROW, LABELS] + 0.3 * LOGS.mean(axis=1))
    found = loss(LABELS, LOGITS, label_smoothing=0.3, class_weights=[1, 1, 1])
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_the_weight_of_a_class_multiplies_the_smoothed_loss() -> None:
    options = {"label_smoothing": 0.3, "focal_gamma": 1.0}
    found = loss(LABELS, LOGITS, class_weights="1,2,4", **options) / loss(LABELS, LOGITS, **options)
    np.testing.assert_allclose(found, np.array([1, 2, 4, 4]) / 1.6, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"focal_gamma": 2.0},
        {"class_weights": "balanced"},
        {"class_weights": "balanced", "focal_gamma": 0.5, "label_smoothing": 0.2},
    ],
    ids=str,
)
def test_the_loss_of_a_mixed_label_is_the_mean_of_both_by_their_shares(options: dict[str, Any]) -> None:
    one, other, share = np.array([0, 0, 1, 2]), np.array([1, 2, 2, 2]), np.array([0.3, 0.9, 0.5, 0.2], np.float32)
    eye = np.eye(3, dtype=np.float32)
    mixed = eye[one] * share[:, None] + eye[other] * (1 - share[:, None])
    made = task(**options)
    losses = [loss(labels.astype(np.int32), LOGITS, task_of=made) for labels in (one, other)]
    np.testing.assert_allclose(
        loss(mixed, LOGITS, task_of=made), share * losses[0] + (1 - share) * losses[1], rtol=1e-5
    )


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_loss_and_its_slope_are_finite_for_logits_of_any_size(gamma: float) -> None:
    import keras

    made = task(focal_gamma=gamma, class_weights="balanced")
    logits = np.array([[1e4, -1e4, 0], [-1e4, 1e4, 0], [200, 0, 0], [0, 0, 0]], np.float32)
    labels = np.zeros(4, np.int32)

    def total(values: Any) -> Any:
        return keras.ops.sum(made.loss(values, made.weigh({"label": labels})))

    if keras.backend.backend() == "jax":
        import jax

        slope = np.asarray(jax.grad(total)(logits))
    else:
        import tensorflow as tf

        variable = tf.Variable(logits)
        with tf.GradientTape() as tape:
            value = total(variable)
        slope = tape.gradient(value, variable).numpy()
    assert np.isfinite(loss(labels, logits, task_of=made)).all()
    assert np.isfinite(slope).all()
    assert slope[3, 0] < -0.1


def test_the_slope_of_a_weighted_loss_is_its_own() -> None:
    """TensorFlow's own cross-entropy takes targets for shares that add up to 1, and has another slope if they don't."""
    import keras

    made = task(class_weights="cow=9", label_smoothing=0.1)
    step = 1e-2

    def total(values: Any) -> Any:
        return keras.ops.sum(made.loss(values, made.weigh({"label": LABELS})))

    if keras.backend.backend() == "jax":
        import jax

        slope = np.asarray(jax.grad(total)(LOGITS))
    else:
        import tensorflow as tf

        variable = tf.Variable(LOGITS)
        with tf.GradientTape() as tape:
            value = total(variable)
        slope = tape.gradient(value, variable).numpy()
    for row, column in ((0, 1), (2, 2), (3, 0)):
        shift = np.zeros_like(LOGITS)
        shift[row, column] = step
        measured = (float(total(LOGITS + shift)) - float(total(LOGITS - shift))) / (2 * step)
        assert measured == pytest.approx(slope[row, column], abs=2e-3)


def test_training_with_weights_hits_the_rare_class_and_compiles(make: Make) -> None:
    options: dict[str, Any] = {"model": "mlp", "train_batch_size": 40, "cpu_devices": 2, "learning_rate": 0.01}
    plain = make(uneven(), **options)
    weighted = make(uneven(), **options, class_weights="cow=1000,dog=0,cat=0", augment="mixup(alpha=0.2)")
    before = plain.evaluate("train")["loss"]
    assert weighted.evaluate("train")["loss"] == pytest.approx(before, rel=1e-5), "evaluation has no weights"
    for engine in (plain, weighted):
        engine.train(0, 40)
        engine.close()
    assert weighted.evaluate("train")["accuracy"] == pytest.approx(0.1), "all cows"
    assert plain.evaluate("train")["accuracy"] > 0.5


def test_a_classifier_with_preprocessing_of_its_own_keeps_its_weights(make: Make) -> None:
    import keras

    from modelyard.models.task import Batch
    from modelyard.models.task_types import Classifier

    @modelyard.register_model("own_preprocessing")
    class Own(Classifier):
        """Sees its images upside down."""

        def network(self) -> keras.Model:
            inputs, x = modelyard.image_input(self.data)
            logits = keras.layers.Dense(self.data.num_classes, kernel_initializer="zeros", name="logits")
            return keras.Model(inputs, logits(keras.layers.Flatten()(x)))

        def preprocess(self, batch: Batch, training: bool) -> Batch:
            return {**batch, "image": keras.ops.flip(batch["image"], axis=1)}

    moved = {}
    for weights in (None, "balanced"):
        options = {"class_weights": weights, "train_batch_size": 100, "optimizer": "sgd", "learning_rate": 1.0}
        engine = make(uneven(), model="own_preprocessing", **options)
        engine.train(0, 1)
        moved[weights] = float(np.abs(engine.state().weights["logits/bias"]).max())
    # All classes are as likely at first: the bias of a step over all examples moves unless they have the same say.
    assert moved[None] > 0.1
    assert moved["balanced"] < 1e-5


def test_a_weighted_step_is_the_same_compiled(make: Make) -> None:
    made = task(class_weights="balanced", focal_gamma=2.0)
    run = compiled(lambda logits, labels: made.loss(logits, made.weigh({"label": labels})))
    np.testing.assert_allclose(np.asarray(run(LOGITS, LABELS)), loss(LABELS, LOGITS, task_of=made), rtol=1e-5)


def test_unknown_classes_are_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"class_weights: there is no class 'cats'. Did you mean 'cat'?"):
        task(class_weights="cats=2").checked_network()
    with pytest.raises(ConfigError, match="has 2 weights, but there are 3 classes: cat, dog, cow"):
        task(class_weights="1,2").checked_network()
    with pytest.raises(ConfigError, match="gives every training example the weight 0"):
        task(class_weights="0,0,0").checked_network()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cat=two", "'two' is not a weight"),
        ("cat=2,3", "mixes weights with and without a name"),
        ("cat=-1", "'-1' is not a weight"),
        ("cat=1,cat=2", "names 'cat' twice"),
        ("balance", "'balance' is not a weight. Write balanced"),
        ([float("inf")], "inf is not a weight"),
        ("[]", "is empty"),
    ],
)
def test_weights_that_are_none_are_explained(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        modelyard.load_config(model="mlp", class_weights=given)


@pytest.mark.parametrize("given", ["balanced", "a=2,0=0.5", "1,2"])
def test_weights_survive_the_config_of_a_run(given: str) -> None:
    config = modelyard.load_config(model="mlp", class_weights=given)
    again = modelyard.load_config(model="mlp", class_weights=config.flat()["class_weights"])
    assert config.options_of("model") == again.options_of("model")


def test_a_run_with_weights_goes_on(tmp_path: Path) -> None:
    from conftest import engine_name

    modelyard.train(
        model="mlp", dataset="digits", class_weights={"3": 2, "8": 0.5}, focal_gamma=1.0, train_steps=3,
        model_dir=str(tmp_path / "run"), engine=engine_name(), hooks="-tensorboard",
    )  # fmt: skip
    assert modelyard.resume(tmp_path / "run", train_steps=6, engine=engine_name()).step == 6
    with pytest.raises(ConfigError, match="class_weights"):
        modelyard.resume(tmp_path / "run", class_weights="balanced")


def test_classes_are_counted_from_labels_alone_where_they_are_not_known() -> None:
    from modelyard.models.data_info import describe_data

    class Quiet(ArrayDataset):
        """Does not tell its labels."""

        def arrays(self, split: str) -> Any:
            return None

        def read(self, split: str, indices: Any) -> Any:
            return {name: array[indices] for name, array in self._splits[split].items()}

        def read_into(self, split: str, indices: Any, out: Any, crop: Any = None) -> None:
            asked.append(sorted(out))
            out["label"][...] = self._splits[split]["label"][indices]

    asked: list[list[str]] = []
    part = uneven().arrays("train")
    data = describe_data(Quiet({"train": part}, CLASSES))
    assert not asked, "not before somebody wants to know"
    assert data.counts.tolist() == list(COUNTS)
    assert asked == [["label"]]


def test_what_has_no_class_is_not_counted() -> None:
    from modelyard.models.data_info import describe_data

    part = {"image": np.zeros((4, 2), np.float32)}
    with pytest.raises(DataError, match="no class as a label"):
        _ = describe_data(ArrayDataset({"train": part})).counts
