"""Derived splits: validation, test, folds and groups."""

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data.dataset import ArrayDataset, Arrays, Dataset, Feature
from modelyard.data.splits import SplitRules, divide, divide_groups, held_out, stratified
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


# -- every kind of dataset --------------------------------------------------------------------------------------------


class Squares(Dataset):
    """A dataset as users write them: examples by index, nothing in memory."""

    classes = ("even", "odd")

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    @property
    def features(self) -> dict[str, Feature]:
        return {"image": Feature((2,), "float32"), "label": Feature((), "int32"), "person": Feature((), "int64")}

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def read(self, split: str, indices: np.ndarray) -> Arrays:
        images = np.stack([indices, indices**2], 1).astype(np.float32)
        return {"image": images, "label": (indices % 2).astype(np.int32), "person": indices // 10}

    def fingerprint(self) -> str:
        return "squares"


def rows_of(dataset: Dataset, split: str) -> list[int]:
    """The examples of a split, by their row in the whole, which is their first value."""
    images = np.asarray(dataset.read(split, np.arange(dataset.size(split)))["image"])
    return [int(row) for row in images[:, 0]]


def test_a_dataset_of_ones_own_gets_a_validation_split() -> None:
    made = divide(Squares(train=50), SplitRules(0.2))
    assert made.sizes() == {"train": 40, "validation": 10}
    assert sorted(rows_of(made, "train") + rows_of(made, "validation")) == list(range(50))
    out = {"label": np.empty(10, np.int32)}
    made.read_into("validation", np.arange(10), out)
    assert out["label"].tolist() == [row % 2 for row in rows_of(made, "validation")]
    assert made.name("validation", 3) == str(rows_of(made, "validation")[3])
    assert made.fingerprint() != divide(Squares(train=50), SplitRules(0.2, seed=1)).fingerprint()
    assert divide(Squares(train=50, validation=5), SplitRules(0.2)).sizes() == {"train": 50, "validation": 5}


def test_its_groups_stay_together_and_are_no_input() -> None:
    made = divide(Squares(train=50), SplitRules(0.2, group="person"))
    assert len({row // 10 for row in rows_of(made, "validation")}) == 1
    assert made.sizes() == {"train": 40, "validation": 10}
    assert sorted(made.features) == ["image", "label"]
    assert made.derived is not None
    assert made.derived.groups == {"train": 4, "validation": 1}


# -- test -------------------------------------------------------------------------------------------------------------


def numbered(labels: np.ndarray, **more: np.ndarray) -> ArrayDataset:
    """A dataset whose images tell their row."""
    rows = np.arange(len(labels), dtype=np.float32)
    return ArrayDataset({"train": {"image": np.stack([rows, rows], 1), "label": labels, **more}})


def hundred(**more: np.ndarray) -> ArrayDataset:
    return numbered(np.arange(100) % 4, **more)


@pytest.mark.parametrize("group", [None, "person"])
def test_the_test_examples_do_not_depend_on_the_validation_split(group: str | None) -> None:
    whole = hundred(person=np.arange(100) // 5)
    found = [rows_of(divide(whole, SplitRules(fraction, 0.2, group)), "test") for fraction in (0, 0.1, 0.5)]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20


@relaxed
@given(label_lists, st.floats(0, 0.6), st.floats(0.01, 0.39), st.integers(0, 1000), st.booleans())
def test_derived_splits_are_disjoint_and_complete(
    labels: list[int], validation: float, test: float, seed: int, grouped: bool
) -> None:
    people = np.arange(len(labels)) // 3
    whole = numbered(np.array(labels), person=people)
    rules = SplitRules(validation, test, "person" if grouped else None, seed=seed)
    if (people[-1] + 1 if grouped else len(labels)) < 2 + (validation > 0):
        with pytest.raises(DataError, match="asked for, but train has only"):
            divide(whole, rules)
        return
    made = divide(whole, rules)
    assert all(made.sizes().values())
    rows = [rows_of(made, split) for split in made.sizes()]
    assert sorted(itertools.chain(*rows)) == list(range(len(labels)))
    if grouped:
        owners = [{row // 3 for row in part} for part in rows]
        assert sum(map(len, owners)) == len(set().union(*owners)), "a group is in one split"


def test_a_test_split_that_is_there_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="modelyard")
    whole = ArrayDataset({"train": {"label": np.arange(20) % 2}, "test": {"label": np.arange(6) % 2}})
    assert divide(whole, SplitRules(0.1, 0.2)).sizes() == {"train": 18, "test": 6, "validation": 2}
    assert "brings a test split" in caplog.text


def test_a_test_split_changes_little_of_the_validation_split() -> None:
    alone = set(rows_of(divide(hundred(), SplitRules(0.4)), "validation"))
    beside = set(rows_of(divide(hundred(), SplitRules(0.4, 0.2)), "validation"))
    assert len(alone) == len(beside) == 40
    assert len(alone & beside) >= 30


# -- folds ------------------------------------------------------------------------------------------------------------


@relaxed
@given(label_lists, st.integers(2, 7), st.integers(0, 1000), st.sampled_from([0, 0.2]))
def test_folds_are_disjoint_and_cover_everything(labels: list[int], folds: int, seed: int, test: float) -> None:
    whole = numbered(np.array(labels))
    if len(labels) < folds + (test > 0):
        with pytest.raises(DataError, match="asked for, but train has only"):
            divide(whole, SplitRules(0.1, test, folds=folds, seed=seed))
        return
    made = [divide(whole, SplitRules(0.1, test, folds=folds, fold=fold + 1, seed=seed)) for fold in range(folds)]
    held = [rows_of(one, "validation") for one in made]
    tested = rows_of(made[0], "test") if test else []
    assert sorted(itertools.chain(tested, *held)) == list(range(len(labels)))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for one, mine in zip(made, held, strict=True):
        assert sorted(rows_of(one, "train") + mine + tested) == list(range(len(labels)))
    counts = np.array([np.bincount(np.array(labels)[mine], minlength=6) for mine in held])
    assert (np.ptp(counts, axis=0) <= 1).all(), "every fold has its share of every class"


def test_all_folds_are_of_the_same_data() -> None:
    made = [divide(hundred(), SplitRules(folds=4, fold=fold)) for fold in (1, 2)]
    assert made[0].fingerprint() != made[1].fingerprint()
    assert [one.derived and one.derived.fingerprint for one in made] == [hundred().fingerprint()] * 2


def test_the_folds_of_this_seed_never_change() -> None:
    whole = numbered(np.arange(12) % 2)
    held = [rows_of(divide(whole, SplitRules(folds=3, fold=fold)), "validation") for fold in (1, 2, 3)]
    assert held == [[0, 4, 7, 9], [1, 2, 3, 10], [5, 6, 8, 11]]


def test_folds_of_a_dataset_with_a_validation_split_are_an_error() -> None:
    whole = ArrayDataset({"train": {"label": np.arange(9)}, "validation": {"label": np.arange(9)}})
    with pytest.raises(DataError, match="brings a validation split"):
        divide(whole, SplitRules(folds=3))


# -- groups -----------------------------------------------------------------------------------------------------------


@relaxed
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=200),
    st.sampled_from([(0.9, 0.1), (0.5, 0.5), (0.25,) * 4]),
    st.integers(0, 1000),
)
def test_groups_stay_whole_and_no_part_is_empty(
    examples: list[tuple[int, int]], shares: tuple[float, ...], seed: int
) -> None:
    groups, classes = np.array(examples).T
    if len(set(groups.tolist())) < len(shares):
        with pytest.raises(DataError, match="can't be divided"):
            divide_groups(groups, classes, shares, seed, 0)
        return
    part = divide_groups(groups, classes, shares, seed, 0)
    assert set(part.tolist()) == set(range(len(shares)))
    assert len(set(zip(groups.tolist(), part.tolist(), strict=True))) == len(set(groups.tolist()))


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.2,) * 5])
def test_groups_are_stratified_as_well_as_they_allow(shares: tuple[float, ...]) -> None:
    draws = np.random.default_rng(0)
    groups = draws.integers(0, 200, 4000)
    classes = np.where(draws.random(4000) < 0.7, groups % 5, draws.integers(0, 5, 4000))  # a group has mostly one class
    part = divide_groups(groups, classes, shares, 0, 0)
    counts = np.stack([np.bincount(classes[part == number], minlength=5) for number in range(len(shares))])
    assert np.abs(counts / np.outer(shares, np.bincount(classes)) - 1).max() < 0.06


def test_the_groups_of_this_seed_never_change() -> None:
    groups, classes = np.arange(24) // 3, np.arange(24) % 2
    assert divide_groups(groups, classes, (0.5, 0.25, 0.25), 0, 0)[::3].tolist() == [2, 0, 0, 2, 0, 1, 1, 0]


def test_large_groups_that_give_another_size_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = divide(hundred(person=np.arange(100) // 50), SplitRules(0.1, group="person"))
    assert made.sizes() == {"train": 50, "validation": 50}
    assert "groups of person are large: validation has 50 of 100 examples, 0.1 of them" in caplog.text


def test_a_class_that_a_derived_split_lacks_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    whole = ArrayDataset({"train": {"label": np.array([0] * 50 + [1])}}, ["cat", "dog"])
    divide(whole, SplitRules(0.1, 0.2))
    assert "no validation example of: dog" in caplog.text
    assert "no test example of: dog" in caplog.text


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (SplitRules(0.1, group="persn"), r"no column or feature 'persn'.*There are: all, id, name, person"),
        (SplitRules(0.1, group="person", folds=6), r"6 splits or folds are asked for, but train has only 5 group"),
        (SplitRules(0.1, 0.1, group="all"), r"3 splits .* only 1 group"),
        (SplitRules(0.1, group=r"name:^(\d+)"), r"does not match 'a0', a value of name"),
    ],
)
def test_groups_that_cannot_be_are_explained(rules: SplitRules, message: str) -> None:
    people = np.arange(100) // 20
    names = np.array([f"a{number}" for number in people])
    with pytest.raises(DataError, match=message):
        divide(hundred(person=people, all=np.zeros(100, int), name=names), rules)


def test_a_part_of_a_text_can_group() -> None:
    names = np.array([f"anna_{i}" if i < 30 else f"{'bc'[i % 2]}_{i}" for i in range(100)])
    made = divide(hundred(name=names), SplitRules(folds=3, group="name:^([^_]+)_"))
    assert made.derived is not None
    assert made.derived.groups == {"train": 2, "validation": 1}
    assert "name" not in made.features


def test_a_fraction_without_a_derived_split_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "modelyard")
    arrays = {"image": np.zeros((10, 2, 2, 1), np.uint8), "label": np.arange(10) % 2}
    brings = ArrayDataset({"train": arrays, "validation": arrays})
    divide(brings, SplitRules())
    assert not caplog.text
    divide(brings, SplitRules(0.3))
    assert "validation_fraction has no effect: the dataset brings a validation split" in caplog.text


def test_a_group_without_a_derived_split_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    divide(hundred(person=np.arange(100)), SplitRules(0, group="person"))
    assert "split_group has no effect" in caplog.text


def test_what_was_held_out_is_listed_by_row_and_name() -> None:
    made = divide(hundred(id=np.array([f"file-{row}" for row in range(100)])), SplitRules(0.1, 0.2))
    listed = list(held_out(made))
    assert {split for split, _, _ in listed} == {"validation", "test"}
    assert all(name == f"file-{row}" for _, row, name in listed)
    assert sorted(row for _, row, _ in listed) == sorted(rows_of(made, "validation") + rows_of(made, "test"))
