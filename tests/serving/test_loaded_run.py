"""A run as a Python object: arrays in, predictions and scores out, the same as the commands have."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import engine_name
from modelyard.engine.base import Engine
from modelyard.errors import ChangedConfigError, DataError, UserError
from modelyard.run.checkpoint import read_checkpoint, select_checkpoint
from modelyard.run.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("two_devices")
SMALL = {"train_batch_size": 16, "log_every": 6, "save_every": 6, "eval_every": 6, "eval_batch_size": 64}
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 3, 300)
IMAGES = np.clip(RANDOM.normal(60, 30, (300, 6, 6, 1)) + 70 * LABELS[:, None, None, None], 0, 255).astype(np.uint8)
NAMES = np.array(["low", "middle", "high"])[LABELS]
GIVEN = {"train": (IMAGES[:150], NAMES[:150]), "validation": (IMAGES[150:200], NAMES[150:200])}
NEW, NEW_NAMES = IMAGES[200:], NAMES[200:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A run on arrays with averaged weights, and in a second folder the same, in two parts."""
    folder = tmp_path_factory.mktemp("loaded")
    options = {"model": "tiny_norm", "engine": engine_name(), "ema_decay": 0.8, **SMALL}
    modelyard.train_and_evaluate(dataset=GIVEN, train_steps=12, model_dir=folder / "run", **options)
    modelyard.train_and_evaluate(dataset=GIVEN, train_steps=6, model_dir=folder / "parts", **options)
    return folder


@pytest.fixture(scope="module")
def run(home: Path) -> modelyard.Run:
    return modelyard.load(home / "run", "latest")


def weights(folder: Path) -> dict[str, Any]:
    directory = RunDirectory(folder)
    return read_checkpoint(select_checkpoint(directory.checkpoints, directory.best, "latest")).weights


def test_a_run_on_arrays_is_resumed_with_the_same_arrays_only(home: Path) -> None:
    with pytest.raises(DataError, match="only a Python program can give"):
        modelyard.resume(home / "parts", train_steps=12)
    with pytest.raises(DataError, match=r"modelyard.evaluate\(RUN, split='test', dataset=\(x, y\)\)"):
        modelyard.load(home / "run").evaluate("validation")
    other = {**GIVEN, "train": (IMAGES[:150] // 2, NAMES[:150])}
    with pytest.raises(DataError, match="is not the data this run started with"):
        modelyard.resume(home / "parts", train_steps=12, dataset=other)
    assert modelyard.resume(home / "parts", train_steps=12, dataset=GIVEN).step == 12
    one, parts = weights(home / "run"), weights(home / "parts")
    assert {name: values.tobytes() for name, values in one.items()} == {n: v.tobytes() for n, v in parts.items()}


def test_predictions_are_those_of_predict(run: modelyard.Run, home: Path) -> None:
    found = run.predict((NEW, NEW_NAMES))
    assert found["probabilities"].shape == (100, 3)
    assert [run.classes[number] for number in found["class"]] == found["label"].tolist()
    table = modelyard.predict(home / "run", (NEW, NEW_NAMES), checkpoint="latest", top=3, probabilities=True)
    rows = list(csv.DictReader(Path(table.path).read_text().splitlines()))
    ours = found.table(top=3, probabilities=True)
    assert [list(row) for row in ours] == [list(row) for row in rows]
    assert [row["label"] for row in ours] == [row["label"] for row in rows]
    assert [row["truth"] for row in ours] == NEW_NAMES.tolist()
    assert found.scores == {name: score for name, score in table.scores.items() if name != "loss"}
    assert found.scores["accuracy"] > 0.4


def test_evaluation_is_that_of_the_commands(run: modelyard.Run, home: Path) -> None:
    expected = run.predict((NEW, NEW_NAMES)).scores["accuracy"]
    assert run.evaluate((NEW, NEW_NAMES)).metrics["accuracy"] == pytest.approx(expected)
    found = modelyard.evaluate(home / "run", checkpoint="latest", dataset=(NEW, NEW_NAMES))
    assert found.metrics["accuracy"] == pytest.approx(expected)
    last = [row for row in run.metrics if row["split"] == "validation"][-1]
    loaded = modelyard.load(home / "run", "latest", dataset=GIVEN)
    assert loaded.evaluate("validation").metrics == pytest.approx({name: last[name] for name in ("loss", "accuracy")})
    assert modelyard.evaluate(home / "run", checkpoint="latest", dataset=GIVEN).metrics["loss"] == last["loss"]


def test_the_keras_model_has_the_weights_that_are_evaluated(run: modelyard.Run) -> None:
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        logits = np.asarray(run.model(NEW), np.float64)
        assert keras.config.dtype_policy().name == "mixed_bfloat16", "a user's own setting stays"
    finally:
        keras.config.set_dtype_policy("float32")
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    assert shares == pytest.approx(run.predict(NEW)["probabilities"], abs=1e-5)


def test_one_example_and_grey_images_without_channels_are_predicted(run: modelyard.Run) -> None:
    expected = run.predict(NEW)["probabilities"]
    assert run.predict(NEW[3])["probabilities"] == pytest.approx(expected[3:4], abs=1e-6)
    assert run.predict(NEW[3, :, :, 0])["probabilities"] == pytest.approx(expected[3:4], abs=1e-6)
    assert run.predict(NEW[..., 0].tolist())["probabilities"] == pytest.approx(expected, abs=1e-6)


def test_a_second_prediction_compiles_nothing(run: modelyard.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.predict(NEW)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the network is traced again")

    traced = type(run._servable._engine.functions)  # type: ignore[attr-defined]
    monkeypatch.setattr(traced, "predictions", refuse)
    monkeypatch.setattr(Engine, "build", refuse)
    assert len(run.predict(NEW[:90])["class"]) == 90
    assert len(run.predict(NEW[:70])["class"]) == 70


def test_files_are_predicted_and_unreadable_ones_are_named(run: modelyard.Run, tmp_path: Path) -> None:
    from PIL import Image

    for number in range(3):
        Image.fromarray(NEW[number, :, :, 0]).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1\.png"):
        run.predict(tmp_path)
    found = run.predict([tmp_path / "0.png", tmp_path / "1.png"], on_bad="skip")
    assert list(found.bad) == [1]
    assert found["probabilities"][0] == pytest.approx(run.predict(NEW[0])["probabilities"][0], abs=1e-6)
    assert found.table()[1]["error"]


class Frame(dict[str, list[Any]]):
    """The part of a pandas data frame that Modelyard uses."""

    ndim = 2

    @property
    def columns(self) -> list[str]:
        return [*self]

    def to_numpy(self) -> Any:
        raise NotImplementedError


def test_a_data_frame_of_paths_may_have_labels(
    run: modelyard.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from PIL import Image

    for number in range(3):
        Image.fromarray(NEW[number, :, :, 0]).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    truth = NEW_NAMES[:3].tolist()
    plain = run.predict(Frame(path=paths))
    assert plain.truth is None
    expected = run.predict((NEW[:3], truth)).scores
    assert run.predict(Frame(path=paths, label=truth)).scores == expected
    assert run.predict(Frame(file=paths, kind=truth), image_column="file", label_column="kind").scores == expected
    assert run.evaluate(Frame(path=paths, label=truth)).metrics["accuracy"] == expected["accuracy"]
    with pytest.raises(DataError, match=r"there is no column 'knd'. Did you mean 'kind'\? Name the right one"):
        run.predict(Frame(path=paths, kind=truth), label_column="knd")
    assert run.predict(Frame(path=paths, label=["else"] * 3)).truth is None
    assert "labels are left out: there is no class 'else'" in caplog.text


def test_curves_and_metrics_are_those_of_the_run(run: modelyard.Run) -> None:
    steps, values = run.curve("accuracy")
    assert steps.tolist() == [6, 12]
    assert values[-1] == [row["accuracy"] for row in run.metrics if row["split"] == "validation"][-1]
    assert run.config.model == "tiny_norm"
    with pytest.raises(DataError, match=r"accuracy \(validation\)"):
        run.curve("f2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((5, 12, 12, 1), np.uint8), "shape 5×12×12×1; the model takes one or several examples of shape 6×6×1"),
        (NEW / 255, "the run was trained on uint8"),
        ((NEW, NEW_NAMES[:5]), "100 examples but 5 labels"),
        ((NEW, ["lwo"] * 100), "Did you mean 'low'"),
        ((NEW, np.full(100, 7)), "there is a 7, and the run has 3 classes"),
        ("nothing.png", "no file or folder nothing.png"),
    ],
)
def test_what_does_not_fit_is_refused(run: modelyard.Run, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run.predict(data)


def test_examples_without_labels_have_no_scores(run: modelyard.Run) -> None:
    with pytest.raises(DataError, match="no labels"):
        run.evaluate(NEW)
    with pytest.raises(DataError, match="no labels"):
        _ = run.predict(NEW).scores


def test_a_run_on_a_named_dataset_is_not_evaluated_on_other_splits(home: Path) -> None:
    modelyard.train(model="tiny_norm", dataset="digits", engine=engine_name(), train_steps=1, model_dir="named")
    with pytest.raises(ChangedConfigError, match="is arrays here, digits in the run"):
        modelyard.evaluate("named", dataset=GIVEN)


@pytest.mark.tensorflow_only("exports are made and run by TensorFlow")
def test_an_export_predicts_the_same_and_says_what_it_lacks(run: modelyard.Run, home: Path, tmp_path: Path) -> None:
    exported = modelyard.export(home / "run", checkpoint="latest", output=tmp_path / "export", dataset=GIVEN)
    assert exported.checked_on == "32 examples of validation"
    loaded = modelyard.load(tmp_path / "export")
    assert loaded.predict(NEW)["probabilities"] == pytest.approx(run.predict(NEW)["probabilities"], abs=1e-4)
    assert loaded.predict((NEW, NEW_NAMES)).scores["accuracy"] > 0.4
    with pytest.raises(UserError, match="is an export, which has no metrics"):
        _ = loaded.metrics


class NumericFrame:
    """The part of a pandas data frame of numbers that Modelyard uses."""

    ndim = 2

    def __init__(self, columns: dict[str, Any]) -> None:
        self._values, self.columns = columns, [*columns]

    def __getitem__(self, names: Any) -> Any:
        return (
            NumericFrame({name: self._values[name] for name in names})
            if isinstance(names, list)
            else self._values[names]
        )

    def drop(self, columns: list[str]) -> NumericFrame:
        return NumericFrame({name: values for name, values in self._values.items() if name not in columns})

    def to_numpy(self, dtype: Any = None) -> Any:
        return np.stack([*self._values.values()], axis=1).astype(dtype)


def test_columns_of_a_data_frame_are_found_by_their_names() -> None:
    size, weight = RANDOM.normal(700, 90, 60), RANDOM.normal(1, 0.5, 60)
    names, other = np.where(size > 700, "large", "small"), np.arange(60)
    given = {"train": (NumericFrame({"size": size, "weight": weight}), names)}
    given["test"] = NumericFrame({"label": names, "weight": weight, "size": size})  # type: ignore[assignment]
    options = {"model": "mlp", "train_batch_size": 16, "train_steps": 6, "validation_fraction": 0}
    modelyard.train(dataset=given, model_dir="run", **options)
    run = modelyard.load("run", dataset=given)
    expected = run.predict(np.stack([size, weight], axis=1))["probabilities"]
    for frame in (
        NumericFrame({"weight": weight, "size": size}),
        NumericFrame({"weight": weight, "other": other, "size": size}),
    ):
        assert np.array_equal(run.predict(frame)["probabilities"], expected)
        assert run.evaluate((frame, names)).metrics == run.evaluate("test").metrics
    with pytest.raises(DataError, match=r"lacks columns .* trained on: weight. It has instead: wieght"):
        run.predict(NumericFrame({"size": size, "wieght": weight}))
