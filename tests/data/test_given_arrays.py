"""Arrays that a Python program gives as a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import modelyard
from modelyard.config import load_config
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.sources.arrays import read_given
from modelyard.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 1)).astype(np.uint8)
LABELS = np.arange(60) % 3


def opened(data: Any) -> Dataset:
    return load_dataset(load_config(model="mlp", dataset=data))


def test_a_pair_is_a_dataset_that_gets_a_validation_split() -> None:
    dataset = opened((IMAGES, LABELS))
    assert dataset.sizes() == {"train": 54, "validation": 6}
    assert dataset.classes == ("0", "1", "2")


def test_splits_are_kept_as_they_are_given() -> None:
    dataset = opened({"train": (IMAGES[:30], LABELS[:30]), "val": (IMAGES[30:45], LABELS[30:45]), "test": _named(45)})
    assert dataset.sizes() == {"train": 30, "validation": 15, "test": 15}
    assert np.array_equal(dataset.read("test", np.arange(15))["image"], IMAGES[45:])


def _named(first: int) -> dict[str, Any]:
    return {"image": IMAGES[first:], "label": LABELS[first:]}


def test_names_of_classes_may_be_the_labels() -> None:
    names = np.array(["dog", "cat", "emu"])[LABELS]
    dataset = opened({"train": (IMAGES[:30], names[:30]), "validation": (IMAGES[30:], names[30:].tolist())})
    assert dataset.classes == ("cat", "dog", "emu")
    labels = dataset.read("validation", np.arange(30))["label"]
    assert [dataset.classes[number] for number in labels] == names[30:].tolist()


def test_lists_and_nested_inputs_are_arrays() -> None:
    dataset = opened(({"image": IMAGES.tolist(), "vec": [[0.5, 1.0]] * 60}, LABELS.tolist()))
    assert dataset.features["vec"].shape == (2,)


def test_a_dataset_object_is_taken_as_it_is() -> None:
    given = modelyard.ArrayDataset({"train": _named(0), "validation": _named(40)}, ["a", "b", "c"])
    assert opened(given).fingerprint() == given.fingerprint()


def test_a_config_with_arrays_names_a_dataset_that_can_be_written_down() -> None:
    config = load_config(model="mlp", dataset=(IMAGES, LABELS))
    assert config.flat()["dataset"] == "arrays"
    assert config.model_copy(update={"train_steps": 3}).given_dataset is config.given_dataset
    assert config == config.model_copy()


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x_train=IMAGES, y_train=LABELS)
    assert opened(tmp_path / "data.npz").sizes()["train"] == 54


def test_a_data_frame_is_columns_of_numbers_and_a_label() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(60), "label": np.array(["x", "y", "z"])[LABELS], "b": 0.5})
    dataset = opened(frame)
    assert dataset.features["image"].shape == (2,)
    assert dataset.classes == ("x", "y", "z")
    assert opened((frame[["a", "b"]], frame["label"])).fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("arrays", r"modelyard.resume\(RUN, dataset=\(x, y\)\)"),
        ((IMAGES, LABELS, 3), "the dataset is tuple; give"),
        (((IMAGES, LABELS), (IMAGES, LABELS)), "Name the splits"),
        ({"train": (IMAGES, LABELS), "tset": (IMAGES, LABELS)}, "Did you mean 'test'"),
        ({"test": (IMAGES, LABELS)}, "needs a train split"),
        ((IMAGES, LABELS[:9]), "differ in length"),
        ((IMAGES, np.eye(3)[LABELS]), r"y.argmax\(axis=1\)"),
        ((IMAGES, [object()] * 60), "y of the dataset holds Python objects"),
        (([[1], [1, 2]], [0, 1]), "x of the dataset can't be converted"),
        (modelyard.GeneratorDataset({"train": list}), "register_dataset"),
    ],
)
def test_what_is_no_dataset_is_refused_with_what_to_give(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(data)


@pytest.mark.parametrize("own", [False, True])
def test_whole_numbers_of_a_regression_are_no_classes(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    if own:
        modelyard.register_model("own_regressor")(type("OwnRegressor", (modelyard.Regressor,), {}))
    options: dict[str, Any] = {"model": "own_regressor"} if own else {"model": "mlp", "task": "regression"}
    dataset = load_dataset(load_config(**options, dataset=(IMAGES, np.arange(60)), test_fraction=0.2))
    assert dataset.sizes() == {"train": 42, "validation": 6, "test": 12}
    assert not caplog.text


def test_rows_of_0_and_1_as_floats_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows = (IMAGES[:, 0, :3, 0] > 100).astype(np.float32)
    opened((IMAGES, rows + 0.5))
    opened((IMAGES, rows.astype(np.uint8)))
    assert not caplog.text
    opened((IMAGES, rows))
    assert "so this is a regression" in caplog.text
    assert "y.astype('uint8')" in caplog.text


class Own(Dataset):
    """A dataset of a user's own."""

    classes = ("a", "b")
    features: ClassVar = {"image": modelyard.Feature((3,), "float32"), "label": modelyard.Feature((), "int32")}

    def sizes(self) -> dict[str, int]:
        return {"train": 60}

    def read(self, split: str, indices: Any) -> dict[str, Any]:
        return {"image": np.zeros((len(indices), 3), np.float32), "label": np.asarray(indices, np.int32) % 2}

    def fingerprint(self) -> str:
        return "own"


class Short(Own):
    def read(self, split: str, indices: Any) -> dict[str, Any]:
        return super().read(split, indices[:-1])


def test_a_dataset_of_your_own_is_checked() -> None:
    assert opened(Own()).sizes() == {"train": 54, "validation": 6}
    for changed, message in {
        ("classes", None): r"Own.classes must be .* it is missing",
        ("features", (("image", (3,)),)): r"Own.features\['image'\] is \(3,\); it must be a modelyard.Feature",
        ("sizes", None): r"needs a train split; Own.sizes\(\) has: test",
    }.items():
        name, value = changed
        own = type("Own", (Own,), {name: (lambda self: {"test": 3}) if name == "sizes" else value and dict(value)})
        with pytest.raises(DataError, match=message):
            opened(own())
    with pytest.raises(DataError, match=r"Short.read returned an array of shape \(1, 3\) as 'image', expected .*2 ex"):
        opened(Short())
    with pytest.raises(DataError, match="Own is a dataset; give arrays"):
        read_given(Own())


def test_derived_splits_have_their_share_of_each_class_if_labels_are_known(caplog: pytest.LogCaptureFixture) -> None:
    class Known(Own):
        def labels(self, split: str) -> Any:
            return np.arange(60, dtype=np.int32) % 2

    found = opened(Known())
    assert found.read("validation", np.arange(6))["label"].sum() == 3
    assert "by chance" not in caplog.text
    opened(Own())
    assert "derived splits are chosen by chance alone" in caplog.text
