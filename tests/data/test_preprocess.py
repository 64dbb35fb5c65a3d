"""A user's own preprocessing: of examples in NumPy, of batches inside the step."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.config.durations import RunLength
from modelyard.data.dataset import ArrayDataset, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.pipeline import Pipeline
from modelyard.data.preprocess import batch_preprocessing, with_example_preprocessing
from modelyard.errors import ConfigError, DataError, UserError
from modelyard.registry import PREPROCESSINGS
from photos import photo_folder


class Amount(modelyard.Options):
    amount: float = 1.0


def example_step(change: Callable[[dict[str, Any], bool], Any]) -> type:
    """A preprocessing of examples that does what the function does."""

    class Step:
        def __init__(self, options: Any) -> None: ...

        def example(self, example: dict[str, Any], training: bool) -> Any:
            return change(example, training)

    return Step


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers preprocessings for one test."""
    before = dict(PREPROCESSINGS._entries)

    def add(name: str, step: type, options: type[modelyard.Options] = modelyard.Options) -> None:
        PREPROCESSINGS._entries.pop(name, None)
        modelyard.register_preprocessing(name, options=options)(step)

    yield add
    PREPROCESSINGS._entries.clear()
    PREPROCESSINGS._entries.update(before)


def numbers() -> ArrayDataset:
    def part(count: int, first: int) -> dict[str, Any]:
        images = np.tile(np.arange(first, first + count, dtype=np.uint8)[:, None, None, None], (1, 4, 4, 1))
        return {"image": images, "label": np.arange(count) % 3}

    return ArrayDataset({"train": part(30, 0), "validation": part(8, 100)})


def preprocessed(calls: str, data: Dataset | None = None) -> Dataset:
    config = modelyard.load_config(model="mlp", dataset="digits", preprocess=calls)
    return with_example_preprocessing(data or numbers(), config.preprocess)


def read(data: Dataset, split: str = "train", *rows: int) -> dict[str, Any]:
    return dict(data.read(split, np.array(rows or range(data.size(split)))))


# -- examples -------------------------------------------------------------------------------------------------------


def test_examples_may_change_values_type_and_shape(register: Callable[..., None]) -> None:
    def halve(example: dict[str, Any], training: bool) -> dict[str, Any]:
        return {**example, "image": example["image"][:2, :3] / np.float32(2)}

    register("halve", example_step(halve))
    made = preprocessed("halve")
    assert made.features["image"].shape == (2, 3, 1)
    assert made.features["image"].dtype == "float32"
    assert np.array_equal(read(made, "train", 7, 2)["image"][:, 1, 2, 0], [3.5, 1.0])
    assert made.sizes() == numbers().sizes()
    assert made.classes == numbers().classes
    assert read(made)["label"].tolist() == read(numbers())["label"].tolist()
    assert read(made)["id"].tolist() == read(numbers())["id"].tolist()


def test_steps_run_in_order_and_their_input_is_their_own(register: Callable[..., None]) -> None:
    def add(example: dict[str, Any], training: bool) -> dict[str, Any]:
        example["image"] += 1  # in place: the dataset must not notice
        return example

    register("add", example_step(add))
    register("double", example_step(lambda example, training: {**example, "image": example["image"] * 2}))
    data = numbers()
    assert read(preprocessed("add, double", data), "train", 5)["image"][0, 0, 0, 0] == 12
    assert read(preprocessed("double, add", data), "train", 5)["image"][0, 0, 0, 0] == 11
    assert read(data, "train", 5)["image"][0, 0, 0, 0] == 5


def test_an_example_knows_whether_it_is_of_train(register: Callable[..., None]) -> None:
    register("tell", example_step(lambda e, training: {**e, "image": np.full((2,), training, np.float32)}))
    made = preprocessed("tell")
    assert set(read(made, "train")["image"].ravel()) == {1.0}
    assert set(read(made, "validation")["image"].ravel()) == {0.0}


def test_streamed_and_resident_examples_are_preprocessed_alike(register: Callable[..., None], tmp_path: Path) -> None:
    register("invert", example_step(lambda e, training: {**e, "image": 255 - e["image"]}))
    root = photo_folder(tmp_path / "pets", 20)
    options = {"model": "mlp", "dataset": str(root), "image_size": 8, "preprocess": "invert", "train_batch_size": 6}
    plain = load_dataset(modelyard.load_config(**{**options, "preprocess": ""}))
    for augment in ("", "random_resized_crop"):
        config = modelyard.load_config(**options, resident="never", augment=augment)
        made = load_dataset(config)
        pipeline = Pipeline(config, made, RunLength(made.size("train"), 6, 9))
        assert not pipeline.crops_while_decoding, "the user's code sees the image before it is cropped"
        rows = pipeline.rows(1, 2).reshape(-1)
        with pipeline.training(1, 2) as (arrays, count):
            assert np.array_equal(arrays["image"], 255 - plain.read("train", rows[: count * 6])["image"])
        pipeline.close()


ODD: dict[str, Any] = {
    "shape": lambda e: {**e, "image": e["image"][:3]},
    "missing": lambda e: {"label": 1, "id": 2},
    "type": lambda e: {**e, "image": e["image"] / 2},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"uint8 of shape \(3, 4, 1\) as image of 9 \(train\); .*it returned uint8 of shape \(4, 4, 1\)"),
        ("missing", r"returned nothing as image of 9 \(train\)"),
        ("type", r"returned float64 of .* it returned uint8"),
    ],
)
def test_an_example_unlike_the_first_is_named(register: Callable[..., None], change: str, message: str) -> None:
    register("odd", example_step(lambda e, training: ODD[change](e) if int(e["id"]) == 9 else e))
    made = preprocessed("odd")
    read(made, "train", 8, 10)
    with pytest.raises(DataError, match=message):
        read(made, "train", 8, 9)


@pytest.mark.parametrize("returned", [None, [1], "text", np.zeros(3)])
def test_what_is_no_example_is_refused_by_name(register: Callable[..., None], returned: object) -> None:
    register("fine", example_step(lambda e, t: e))
    register("bad", example_step(lambda e, t: returned))
    with pytest.raises(UserError, match=f"the preprocessing bad returned {type(returned).__name__}"):
        preprocessed("fine, bad")


def test_a_preprocessing_with_neither_method_is_refused(register: Callable[..., None]) -> None:
    class Empty:
        example = None

        def __init__(self, options: Any) -> None: ...

    register("empty", Empty)
    with pytest.raises(UserError, match="'empty' has neither example"):
        preprocessed("empty")


def test_unknown_names_and_arguments_are_mistakes_of_the_config(register: Callable[..., None]) -> None:
    register("scale", example_step(lambda e, t: e), Amount)
    with pytest.raises(ConfigError, match="scael"):
        modelyard.load_config(preprocess="scael")
    with pytest.raises(ConfigError, match="amuont"):
        modelyard.load_config(preprocess="scale(amuont=2)")


# -- fingerprints ---------------------------------------------------------------------------------------------------

CODE = """
class Scale:
    def __init__(self, options):
        self.amount = options.amount

    def example(self, example, training):
        return {{**example, "image": example["image"] * {factor}}}
"""


def class_in_file(path: Path, factor: str) -> type:
    path.write_text(CODE.format(factor=factor))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: type = module.Scale
    return made


def test_the_fingerprint_changes_with_arguments_and_code(register: Callable[..., None], tmp_path: Path) -> None:
    class Later:
        def __init__(self, options: Any) -> None: ...

        def batch(self, batch: Any, training: bool) -> Any:
            return batch

    register("later", Later)
    register("scale", class_in_file(tmp_path / "scale_one.py", "1"), Amount)
    plain = numbers().fingerprint()
    one = preprocessed("scale(amount=1)").fingerprint()
    assert preprocessed("scale(amount=1)").fingerprint() == one
    assert preprocessed("scale(amount=2)").fingerprint() not in (one, plain)
    # Whatever else is in the list, it is this step's arguments that count.
    assert preprocessed("later, scale(amount=1)").fingerprint() == one
    assert preprocessed("later, scale(amount=2)").fingerprint() == preprocessed("scale(amount=2)").fingerprint()
    register("scale", class_in_file(tmp_path / "scale_two.py", "2"), Amount)
    assert preprocessed("scale(amount=1)").fingerprint() not in (one, plain)
    for name in ("scale_one", "scale_two"):
        del sys.modules[name]


def test_without_a_step_for_examples_the_dataset_is_left_alone(register: Callable[..., None]) -> None:
    class Later:
        def __init__(self, options: Any) -> None: ...

        def batch(self, batch: Any, training: bool) -> Any:
            return batch

    register("later", Later)
    data = numbers()
    assert preprocessed("later", data) is data
    assert preprocessed("", data) is data


# -- batches --------------------------------------------------------------------------------------------------------


def test_batches_go_through_all_steps_and_know_whether_it_is_training(register: Callable[..., None]) -> None:
    class Add:
        def __init__(self, options: Amount) -> None:
            self.amount = options.amount

        def batch(self, batch: dict[str, Any], training: bool) -> dict[str, Any]:
            return {**batch, "image": batch["image"] * 10 + self.amount + 5 * training}

    register("add", Add, Amount)
    config = modelyard.load_config(preprocess="add(amount=1), add(amount=2)")
    change = batch_preprocessing(config.preprocess)
    assert change({"image": np.zeros(2)}, False)["image"].tolist() == [12, 12]
    assert change({"image": np.zeros(2)}, True)["image"].tolist() == [67, 67]


def test_what_is_no_batch_is_refused_by_name(register: Callable[..., None]) -> None:
    class Forgets:
        def __init__(self, options: Any) -> None: ...

        def batch(self, batch: Any, training: bool) -> None:
            batch["image"] = batch["image"] * 2

    register("forgets", Forgets)
    change = batch_preprocessing(modelyard.load_config(preprocess="forgets").preprocess)
    with pytest.raises(UserError, match="the preprocessing forgets returned NoneType; it must return the batch"):
        change({"image": np.zeros(2)}, True)


# -- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", ["always", "never"])
def test_a_run_trains_and_evaluates_on_what_it_makes(
    two_devices: None, register: Callable[..., None], tmp_path: Path, resident: str
) -> None:
    from keras import ops

    class Both:
        """The label is the only thing left in the image, so that a model with these examples is perfect."""

        def __init__(self, options: Any) -> None: ...

        def example(self, example: dict[str, Any], training: bool) -> dict[str, Any]:
            return {**example, "image": np.full((2, 2, 1), example["label"], np.float32)}

        def batch(self, batch: dict[str, Any], training: bool) -> dict[str, Any]:
            return {
                **batch,
                "image": ops.cast(ops.equal(batch["image"], ops.reshape(ops.arange(10.0), (1, 1, 1, 10))), "float32"),
            }

    register("both", Both)
    result = modelyard.train_and_evaluate(
        model="mlp", dataset="digits", preprocess="both", resident=resident, train_steps=60, train_batch_size=64,
        learning_rate=0.02, model_dir=str(tmp_path / "run"), hooks="-progress, -tensorboard",
    )  # fmt: skip
    assert result.validation["accuracy"] == 1.0


def test_a_changed_preprocessing_is_noticed_when_a_run_goes_on(
    two_devices: None, register: Callable[..., None], tmp_path: Path
) -> None:
    register("scale", class_in_file(tmp_path / "scale_three.py", "1"), Amount)
    options: dict[str, Any] = {
        "model": "mlp", "dataset": "digits", "preprocess": "scale", "train_batch_size": 64,
        "model_dir": str(tmp_path / "run"), "hooks": "-progress, -tensorboard",
    }  # fmt: skip
    modelyard.train_and_evaluate(**options, train_steps=2)
    register("scale", class_in_file(tmp_path / "scale_four.py", "0"), Amount)
    with pytest.raises(UserError, match="data"):
        modelyard.train_and_evaluate(**options, train_steps=4)
