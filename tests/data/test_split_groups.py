"""Groups for the splits, from every kind of source: a column, an array, a feature, a part of the path."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import modelyard
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.records.example import encode_example
from modelyard.data.records.tfrecord import frame
from modelyard.errors import ConfigError, DataError

COUNT, PEOPLE = 40, 8
PERSON = np.arange(COUNT) // 5
NAMES = [f"p{number}" for number in PERSON]
LABELS = np.arange(COUNT) % 2
IMAGES = np.broadcast_to((PERSON * 10).astype(np.uint8)[:, None, None, None], (COUNT, 8, 8, 1)).copy()
"""The value of every pixel is ten times the number of the person."""


def load(dataset: Any, **options: Any) -> Dataset:
    options = {"split_group": "person", "validation_fraction": 0.25, "test_fraction": 0.25, **options}
    return load_dataset(modelyard.load_config(model="mlp", dataset=dataset, **options))


def people(dataset: Dataset, split: str) -> set[int]:
    images = np.asarray(dataset.read(split, np.arange(dataset.size(split)))["image"], np.float64)
    return {round(float(value) / 10) for value in images.reshape(len(images), -1)[:, 0]}


def photos(folder: Path) -> list[str]:
    """Writes the images into a folder per class and returns their paths."""
    paths = [f"{'ab'[LABELS[row]]}/{NAMES[row]}_{row}.png" for row in range(COUNT)]
    for path, image in zip(paths, IMAGES, strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / path)
    return paths


def table(path: Path, header: list[str], rows: Iterator[Any]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def a_folder(at: Path) -> dict[str, Any]:
    photos(at / "photos")
    return {"dataset": str(at / "photos"), "split_group": "path:([^/_]+)_"}


def a_table_of_images(at: Path) -> dict[str, Any]:
    table(at / "all.csv", ["path", "label", "person"], zip(photos(at), LABELS, NAMES, strict=True))
    return {"dataset": str(at / "all.csv")}


def a_table_of_values(at: Path) -> dict[str, Any]:
    table(at / "all.csv", ["a", "b", "person", "label"], zip(PERSON * 10, LABELS, NAMES, LABELS, strict=True))
    return {"dataset": str(at / "all.csv"), "value_columns": "all"}


def arrays_in_a_file(at: Path) -> dict[str, Any]:
    np.savez(at / "all.npz", x_train=IMAGES, y_train=LABELS, person_train=np.array(NAMES))
    return {"dataset": str(at / "all.npz")}


def arrays_that_are_resized(at: Path) -> dict[str, Any]:
    return {**arrays_in_a_file(at), "image_size": 4}


def arrays_in_a_folder(at: Path) -> dict[str, Any]:
    for name, values in (("x", IMAGES), ("y", LABELS), ("person", PERSON)):
        np.save(at / f"{name}_train.npy", values)
    return {"dataset": str(at)}


def records(at: Path) -> dict[str, Any]:
    with open(at / "all.tfrecord", "wb") as file:
        for row in range(COUNT):
            features = {"image": IMAGES[row].tobytes(), "label": int(LABELS[row]), "person": NAMES[row]}
            file.write(frame(encode_example(features)))
    named = {"record_image": "image", "record_label": "label", "record_coding": "raw", "record_shape": "8,8,1"}
    return {"dataset": str(at / "all.tfrecord"), **named}


def a_generator(at: Path) -> dict[str, Any]:
    @modelyard.register_dataset("made_people")
    def build(options: Any, context: Any) -> Any:
        def train() -> Iterator[dict[str, Any]]:
            for row in range(COUNT):
                yield {"image": IMAGES[row], "label": int(LABELS[row]), "person": int(PERSON[row])}

        return modelyard.GeneratorDataset({"train": train})

    return {"dataset": "made_people"}


def a_plugin(at: Path) -> dict[str, Any]:
    @modelyard.register_dataset("people")
    def build(options: Any, context: Any) -> Any:
        return modelyard.ArrayDataset({"train": {"image": IMAGES, "label": LABELS, "person": np.array(NAMES)}})

    return {"dataset": "people"}


def arrays_of_a_program(at: Path) -> dict[str, Any]:
    return {"dataset": {"image": IMAGES, "label": LABELS, "person": NAMES}}


SOURCES = (
    a_folder, a_table_of_images, a_table_of_values, arrays_in_a_file, arrays_that_are_resized, arrays_in_a_folder,
    records, a_generator, a_plugin, arrays_of_a_program,
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_everybody_is_in_one_split(source: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), **source(tmp_path)}
    made = load(**options)
    found = [people(made, split) for split in ("train", "validation", "test")]
    assert list(map(len, found)) == [4, 2, 2]
    assert set().union(*found) == set(range(PEOPLE))
    assert "person" not in made.features
    folds = [load(**options, test_fraction=0, folds=4, fold=fold) for fold in (1, 2, 3, 4)]
    held = [people(one, "validation") for one in folds]
    assert sorted(person for one in held for person in one) == list(range(PEOPLE))
    assert all(not people(one, "train") & mine for one, mine in zip(folds, held, strict=True))
    assert load(**options).fingerprint() == made.fingerprint()


def test_a_folder_can_be_grouped_by_the_name_of_a_subfolder(tmp_path: Path) -> None:
    for row in range(COUNT):
        path = tmp_path / "photos" / "ab"[LABELS[row]] / NAMES[row] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[row, ..., 0]).save(path)
    made = load(str(tmp_path / "photos"), split_group="path:/(.*)/")
    assert not people(made, "train") & people(made, "validation")


def test_a_column_of_records_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.data.records.reader import RecordExamples

    options = {"cache_dir": str(tmp_path / "cache"), **records(tmp_path)}
    first = load(**options)
    monkeypatch.setattr(RecordExamples, "_value", lambda *_: pytest.fail("the records were read again"))
    assert load(**options).fingerprint() == first.fingerprint()


@pytest.mark.parametrize(
    ("source", "group", "message"),
    [
        (a_folder, "person", r"no column or feature 'person'.*There are: path.*path:"),
        (a_folder, r"path:^(\d+)", r"'\^\(\\\\d\+\)' does not match 'a/p0_0.png', a value of path"),
        (a_table_of_images, "persn", r"all.csv:1: .*no column 'persn'.*'person'.*--split_group"),
        (arrays_in_a_file, "owner", r"no array owner_train for split_group.*x_train"),
        (records, "owner", r"no column or feature 'owner'.*There are: person"),
        (a_generator, "owner", r"example 0 of the train split of made_people: split_group is 'owner'.*got nothing"),
        (arrays_of_a_program, "owner", r"no column or feature 'owner'.*There are: id, person"),
    ],
)
def test_a_group_that_does_not_exist_is_explained(
    source: Callable[[Path], dict[str, Any]], group: str, message: str, tmp_path: Path
) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), **source(tmp_path), "split_group": group}
    with pytest.raises(DataError, match=message):
        load(**options)


def test_rows_without_a_group_are_an_error(tmp_path: Path) -> None:
    table(tmp_path / "all.csv", ["a", "person", "label"], zip([1, 2], ["x", ""], [0, 1], strict=True))
    with pytest.raises(DataError, match=r"all.csv:3: 'person' is empty"):
        load(str(tmp_path / "all.csv"), value_columns="all")


def test_a_part_of_the_path_must_be_a_valid_expression() -> None:
    with pytest.raises(ConfigError, match=r"split_group: '\(\[' is not a valid regular expression"):
        load("digits", split_group="path:([")


def a_table_with_splits(at: Path, validation: set[int]) -> str:
    splits = ["validation" if row in validation else "train" for row in range(COUNT)]
    rows = zip(PERSON * 10, LABELS, NAMES, LABELS, splits, strict=True)
    table(at / "splits.csv", ["a", "b", "person", "label", "split"], rows)
    return str(at / "splits.csv")


def test_splits_of_the_data_that_divide_a_group_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    divided = a_table_with_splits(tmp_path, {0, 1, 5})
    for fraction in (0.0, 0.25):  # with and without a split that is derived
        caplog.clear()
        load(divided, value_columns="all", test_fraction=fraction)
        assert "2 in train and validation (p0, p1)" in caplog.text
    report = modelyard.check_data(divided, value_columns="all", split_group="person")
    assert [finding.example for finding in report.of("groups")] == ["p0", "p1"]
    caplog.clear()
    load(a_table_with_splits(tmp_path, set(range(5))), value_columns="all", test_fraction=0)
    assert "divide groups" not in caplog.text
