"""Derived splits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data.dataset import ArrayDataset, Arrays, Dataset
from modelyard.data.splits import SplitRules, divide, stratified
from modelyard.errors import DataError

relaxed = settings(deadline=None)
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=200)
fractions = st.floats(0.01, 0.99)


def with_validation(train: Arrays, fraction: float, seed: int, **others: Arrays) -> Dataset:
    return divide(ArrayDataset({"train": train, **others}), SplitRules(fraction, seed=seed))


@relaxed
@given(label_lists, fractions, st.integers(0, 2**63 - 1))
def test_the_two_parts_are_disjoint_and_complete(labels: list[int], fraction: float, seed: int) -> None:
    larger, smaller = stratified(np.array(labels), fraction, seed)
    assert sorted([*larger.tolist(), *smaller.tolist()]) == list(range(len(labels)))
    assert larger.tolist() == sorted(larger.tolist())
    assert len(larger) >= 1
    if len(labels) > 1:
        assert len(smaller) >= 1


@relaxed
@given(label_lists, fractions, st.integers(0, 1000))
def test_every_class_keeps_its_share(labels: list[int], fraction: float, seed: int) -> None:
    array = np.array(labels)
    larger, smaller = stratified(array, fraction, seed)
    counts = np.bincount(array, minlength=6)
    taken = np.bincount(array[smaller], minlength=6)
    wanted = np.minimum(np.round(counts * fraction), np.maximum(counts - 1, 0))
    if wanted.sum() > 0:
        assert taken.tolist() == wanted.tolist()
    if (counts > 1).any():
        assert set(array.tolist()) == set(array[larger].tolist()), "every class stays in the larger part"


def test_a_class_with_a_single_example_stays_in_train() -> None:
    labels = np.array([0] * 10 + [1] + [2] * 10)
    for fraction in (0.1, 0.5, 0.99):
        for seed in range(20):
            assert 10 in stratified(labels, fraction, seed)[0]


def test_a_class_with_a_single_example_stays_in_train_also_where_only_one_can_be_taken() -> None:
    labels = np.array([0, 0, 0, 0, 1])
    for seed in range(30):
        larger, smaller = stratified(labels, 0.1, seed)
        assert len(smaller) == 1
        assert 4 in larger


def test_where_every_class_has_one_example_one_is_taken_all_the_same() -> None:
    _, smaller = stratified(np.arange(5), 0.1, 0)
    assert len(smaller) == 1


def test_the_split_of_this_seed_never_changes() -> None:
    assert stratified(np.arange(20) % 2, 0.2, 0)[1].tolist() == [7, 10, 12, 19]


def test_the_seed_changes_the_split() -> None:
    labels = np.arange(100) % 4
    assert len({tuple(stratified(labels, 0.2, seed)[1].tolist()) for seed in range(10)}) == 10


def test_validation_is_taken_from_train_and_ids_stay_those_of_the_whole() -> None:
    images = np.arange(40, dtype=np.uint8)[:, None, None, None]
    made = with_validation({"image": images, "label": np.arange(40) % 2}, 0.25, 0)
    assert sorted(made.sizes()) == ["train", "validation"]
    for arrays in map(made.arrays, made.sizes()):
        assert arrays["image"][:, 0, 0, 0].tolist() == arrays["id"].tolist()
        assert (arrays["id"] % 2).tolist() == arrays["label"].tolist()
    assert sorted([*made.arrays("train")["id"], *made.arrays("validation")["id"]]) == list(range(40))
    assert len(made.arrays("validation")["id"]) == 10


def test_ids_that_a_dataset_brings_are_kept() -> None:
    names = np.array([f"file-{i}" for i in range(10)])
    made = with_validation({"label": np.zeros(10, int), "id": names}, 0.2, 0)
    assert sorted([*made.arrays("train")["id"], *made.arrays("validation")["id"]]) == sorted(names)


def test_a_validation_split_that_is_there_stays() -> None:
    made = with_validation({"label": np.zeros(10, int)}, 0.2, 0, validation={"label": np.zeros(3, int)})
    assert made.sizes() == {"train": 10, "validation": 3}


@pytest.mark.parametrize("labels", [np.linspace(0, 1, 50), np.eye(50, dtype=int), np.zeros((50, 3), bool)])
def test_labels_that_are_no_classes_are_split_by_chance(labels: np.ndarray) -> None:
    train = {"label": labels, "image": np.arange(50)[:, None]}
    found = with_validation(train, 0.1, 0)
    rows, validation = (found.arrays(split)["image"][:, 0].tolist() for split in ("train", "validation"))
    assert len(validation) == 5
    assert sorted(rows + validation) == list(range(50))
    assert validation != list(range(5))
    assert with_validation(train, 0.1, 1).arrays("validation")["image"][:, 0].tolist() != validation
    assert (found.arrays("validation")["label"] == labels[validation].astype(np.float32)).all()


@pytest.mark.parametrize(
    "train",
    [
        {"label": np.array(5)},
        {"label": np.array(["a", "b"])},
        {"label": np.array([np.nan, 1.0])},
        {"label": np.zeros((4, 3, 2), int)},
        {"label": np.zeros((4, 0), int)},
        {"label": np.zeros(4, int), "image": np.zeros((5, 2, 2))},
    ],
)
def test_a_train_split_that_is_not_sound_is_explained(train: dict[str, np.ndarray]) -> None:
    with pytest.raises(DataError, match="train split"):
        with_validation(train, 0.2, 0)


def test_a_train_split_with_one_example_is_not_divided() -> None:
    assert with_validation({"label": np.zeros(1, int)}, 0.2, 0).sizes() == {"train": 1}


def test_examples_without_labels_are_divided_by_chance() -> None:
    assert with_validation({"image": np.zeros((5, 2, 2))}, 0.2, 0).sizes() == {"train": 4, "validation": 1}
