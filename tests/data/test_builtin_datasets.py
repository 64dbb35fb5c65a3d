"""The datasets that need no files: digits and synthetic."""

import hashlib

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import ConfigError, DataError, UserError
from modelyard.registry import DATASETS


def load(**options: object) -> Dataset:
    return load_dataset(load_config(model="mlp", **options))


def ids(dataset: Dataset, split: str) -> list[int]:
    arrays = dataset.arrays(split)
    assert arrays is not None
    return [int(number) for number in arrays["id"]]


def test_digits_has_its_1797_images_each_in_one_split() -> None:
    digits = load(dataset="digits")
    assert digits.sizes() == {"train": 1295, "test": 359, "validation": 143}
    together = [number for split in digits.sizes() for number in ids(digits, split)]
    assert sorted(together) == list(range(1797))
    assert digits.classes == tuple("0123456789")
    assert digits.features["image"].shape == (8, 8, 1)
    assert digits.features["image"].dtype == "uint8"
    train = digits.arrays("train")
    assert train is not None
    assert (int(train["image"].min()), int(train["image"].max())) == (0, 255)


def test_no_seed_and_no_fraction_changes_the_test_split_of_digits() -> None:
    tests = [
        ids(load(dataset="digits", **options), "test")
        for options in ({}, {"split_seed": 5}, {"random_seed": 5}, {"validation_fraction": 0.5})
    ]
    assert all(test == tests[0] for test in tests)
    assert hashlib.sha256(np.array(tests[0], "<i8").tobytes()).hexdigest().startswith("abf1f6edcc477350")


def test_split_seed_changes_the_validation_split_and_random_seed_does_not() -> None:
    usual = ids(load(dataset="digits"), "validation")
    assert ids(load(dataset="digits", random_seed=7), "validation") == usual
    assert ids(load(dataset="digits", split_seed=7), "validation") != usual


def test_validation_fraction_is_followed_in_every_class() -> None:
    digits = load(dataset="digits", validation_fraction=0.5)
    train, validation = digits.arrays("train"), digits.arrays("validation")
    assert train is not None
    assert validation is not None
    counts = np.bincount(train["label"]) - np.bincount(validation["label"])
    assert np.abs(counts).max() <= 1


def test_the_fingerprint_is_that_of_the_data() -> None:
    assert load(dataset="digits").fingerprint() == load(dataset="digits", random_seed=1).fingerprint()
    assert load(dataset="digits").fingerprint() != load(dataset="digits", split_seed=1).fingerprint()


@pytest.mark.parametrize("shape", [(5,), (4, 4), (3, 5, 3), (7, 3, 1), (2, 3, 4, 5)])
def test_synthetic_has_any_shape(shape: tuple[int, ...]) -> None:
    made = load(dataset="synthetic", synthetic_shape=shape, synthetic_examples=25, synthetic_classes=3)
    assert made.features["image"].shape == ((*shape, 1) if len(shape) == 2 else shape)
    assert made.sizes() == {"train": 25, "validation": 5, "test": 5}
    assert made.classes == ("0", "1", "2")


def test_synthetic_is_the_same_everywhere() -> None:
    one = load(dataset="synthetic", synthetic_shape=(2, 3), synthetic_examples=10)
    other = load(dataset="synthetic", synthetic_shape=(2, 3), synthetic_examples=10, random_seed=9)
    assert one.fingerprint() == other.fingerprint()
    train = one.arrays("train")
    assert train is not None
    assert train["image"][0].ravel().tolist() == [34, 79, 188, 36, 182, 186]


def test_synthetic_splits_and_seeds_differ() -> None:
    made = load(dataset="synthetic", synthetic_examples=10)
    splits = [made.arrays(split) for split in ("validation", "test")]
    assert splits[0] is not None
    assert splits[1] is not None
    assert not np.array_equal(splits[0]["image"], splits[1]["image"])
    assert made.fingerprint() != load(dataset="synthetic", synthetic_examples=10, split_seed=1).fingerprint()


def test_synthetic_can_be_learned_and_noise_makes_it_harder() -> None:
    """Nearest class mean of train, on test."""
    scores = []
    for noise in (0.0, 30.0):
        made = load(dataset="synthetic", synthetic_shape=(4, 4), synthetic_examples=200, synthetic_noise=noise)
        train, test = made.arrays("train"), made.arrays("test")
        assert train is not None
        assert test is not None
        means = np.stack([train["image"][train["label"] == c].mean(axis=0) for c in range(10)])
        distances = ((test["image"][:, None].astype(float) - means[None]) ** 2).sum(axis=(2, 3, 4))
        scores.append(float((distances.argmin(axis=1) == test["label"]).mean()))
    assert scores[0] == 1.0
    assert scores[1] < 0.9


@pytest.mark.parametrize(
    "options",
    [{"synthetic_shape": "0,4"}, {"synthetic_shape": ""}, {"synthetic_examples": 5}, {"synthetic_classes": 1}],
)
def test_synthetic_data_that_makes_no_sense_is_a_config_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        load(dataset="synthetic", **options)


def test_files_without_a_path_says_how_to_name_one() -> None:
    with pytest.raises(UserError, match="--dataset PATH, or --train_files"):
        load(dataset="files")


def test_a_users_dataset_that_returns_something_else_is_told_what_to_return() -> None:
    DATASETS.register("returns_a_list")(lambda options, context: [1, 2])
    try:
        with pytest.raises(DataError, match=r"returned list; it must return a modelyard\.Dataset"):
            load(dataset="returns_a_list")
    finally:
        del DATASETS._entries["returns_a_list"]
