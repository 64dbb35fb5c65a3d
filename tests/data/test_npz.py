"""A user's own arrays in one .npz file."""

from pathlib import Path

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import DataError

X = np.arange(20 * 16, dtype=np.uint16).reshape(20, 4, 4).astype(np.uint8)
Y = np.arange(20) % 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


def load(file: Path, **arrays: object) -> Dataset:
    if arrays:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return load_dataset(load_config(model="mlp", dataset=str(file)))


def test_train_alone_gets_a_validation_split(file: Path) -> None:
    made = load(file, x_train=X, y_train=Y)
    assert made.sizes() == {"train": 18, "validation": 2}
    validation = made.arrays("validation")
    assert validation is not None
    assert validation["label"].tolist().count(0) == 1
    assert np.array_equal(validation["image"][..., 0], X[validation["id"]])


@pytest.mark.parametrize("name", ["validation", "val"])
def test_all_splits_are_read(file: Path, name: str) -> None:
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:3], "y_test": Y[:3], f"x_{name}": X[:5], f"y_{name}": Y[:5]}
    assert load(file, **arrays).sizes() == {"train": 20, "validation": 5, "test": 3}


def test_classes_are_named(file: Path) -> None:
    assert load(file, x_train=X, y_train=Y, classes=np.array(["cat", "dog"])).classes == ("cat", "dog")


def test_a_compressed_file_is_read_too(file: Path) -> None:
    np.savez_compressed(file, x_train=X, y_train=Y)
    assert load(file).sizes()["train"] == 18


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": X, "labels": Y}, "must hold arrays named x_train and y_train; it holds: images, labels"),
        ({f"a{n}": Y for n in range(30)}, r"it holds: a0, .*, a19 and 10 more\."),
        ({"x_train": X}, "holds only one of x_train and y_train"),
        ({"x_train": X, "y_train": Y[:-1]}, "20 images but 19 labels for train"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y[:3]}, "20 images but 3 labels for test"),
        ({"x_train": X, "y_train": Y - 1}, "label -1 of example 0"),
        ({"x_train": X, "y_train": np.full(20, np.nan)}, "label nan of example 0 of the train split is not finite"),
        ({"x_train": X, "y_train": np.array(["cat", "dog"] * 10)}, "must be whole numbers"),
        ({"x_train": X, "y_train": np.eye(20, dtype=int) * 3}, "example 0 has 3. For regression give floats"),
        ({"x_train": X, "y_train": np.zeros((20, 0), int)}, "empty"),
        ({"x_train": np.array(5), "y_train": np.array(5)}, "first axis must count examples"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "the train split is empty"),
        ({"x_train": X.astype(int) + 1000, "y_train": Y}, r"int64 with values from 1000 to \d+"),
        ({"x_train": X.astype(int) - 1, "y_train": Y}, "values from -1"),
        ({"x_train": np.full((20, 4, 4), np.nan), "y_train": Y}, "not finite"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["cat"])}, r"label 1 of example \d+ .* 1 classes, 0 to 0"),
        ({"x_train": X, "y_train": Y, "classes": np.array(2)}, "classes must be a list of names"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, "examples of the test split are"),
    ],
)
def test_arrays_that_do_not_fit_are_explained(file: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(file, **arrays)


def test_labels_in_a_column_are_taken(file: Path) -> None:
    assert load(file, x_train=X, y_train=Y[:, None]).features["label"].shape == ()


def test_whole_numbers_of_64_bits_become_bytes(file: Path) -> None:
    made = load(file, x_train=X.astype(np.int64), y_train=Y)
    assert made.features["image"].dtype == "uint8"
    assert made.fingerprint() == load(file, x_train=X, y_train=Y).fingerprint()


class Trap:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def test_an_array_of_objects_is_refused_and_runs_nothing(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    traps = np.empty(20, object)
    traps[:] = Trap(trace)
    with pytest.raises(DataError, match=r"can't be read as an \.npz file of plain arrays"):
        load(file, x_train=traps, y_train=Y)
    assert not trace.exists()


def test_a_bare_pickle_is_refused_and_runs_nothing(file: Path, tmp_path: Path) -> None:
    import pickle

    trace = tmp_path / "it-ran"
    file.write_bytes(pickle.dumps(Trap(trace)))
    with pytest.raises(DataError, match="can't be read"):
        load(file)
    assert not trace.exists()


def test_a_single_array_by_the_name_of_npz_is_explained(file: Path) -> None:
    with open(file, "wb") as target:
        np.save(target, X)
    with pytest.raises(DataError, match="is a single array"):
        load(file)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*mine\.npz"):
        load(file)


@pytest.mark.parametrize("content", [b"", b"PK", b"hello, this is no archive", b"\x93NUMPY"])
def test_what_is_no_npz_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"can't be read as an \.npz file"):
        load(file)


def test_a_damaged_byte_anywhere_is_found_or_harmless_and_never_a_traceback(file: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 12, 12), dtype=np.uint8)
    np.savez_compressed(file, x_train=noise, y_train=Y)
    whole = file.read_bytes()
    fingerprint = load(file).fingerprint()
    refused = 0
    for place in range(0, len(whole), 23):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert load(file).fingerprint() == fingerprint
        except DataError:
            refused += 1
    assert refused > 100
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        load(file)
