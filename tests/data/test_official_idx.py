"""MNIST and Fashion-MNIST from their IDX files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.sources.builtin import FASHION_CLASSES
from modelyard.errors import DataError

NAMES = {
    "train-images-idx3-ubyte": (30, 28, 28),
    "train-labels-idx1-ubyte": (30,),
    "t10k-images-idx3-ubyte": (10, 28, 28),
    "t10k-labels-idx1-ubyte": (10,),
}


def content(name: str, shape: tuple[int, ...]) -> bytes:
    count = int(np.prod(shape))
    values = np.arange(shape[0]) % 10 if len(shape) == 1 else np.random.default_rng(len(name)).integers(0, 256, count)
    header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(struct.pack(">I", size) for size in shape)
    return header + values.astype(np.uint8).tobytes()


def write(folder: Path, ending: str = "", **changed: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in NAMES.items():
        raw = changed.get(name.replace("-", "_"), content(name, shape))
        (folder / f"{name}{ending}").write_bytes(gzip.compress(raw) if ending == ".gz" else raw)


def load(data_dir: Path, name: str = "mnist") -> Dataset:
    return load_dataset(load_config(model="mlp", dataset=name, data_dir=str(data_dir)))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("inside", ["", "mnist"])
def test_plain_and_gz_files_are_read_from_the_folder_or_its_own(tmp_path: Path, ending: str, inside: str) -> None:
    write(tmp_path / inside, ending)
    made = load(tmp_path)
    assert made.sizes() == {"train": 29, "validation": 1, "test": 10}
    assert made.features["image"].shape == (28, 28, 1)
    test = made.arrays("test")
    assert test is not None
    assert test["label"].tolist() == list(range(10))
    raw = content("t10k-images-idx3-ubyte", NAMES["t10k-images-idx3-ubyte"])[16:]
    assert test["image"].tobytes() == raw


def test_fashion_mnist_has_its_class_names(tmp_path: Path) -> None:
    write(tmp_path / "fashion_mnist")
    assert load(tmp_path, "fashion_mnist").classes == FASHION_CLASSES


def test_an_npz_of_that_name_is_taken_too(tmp_path: Path) -> None:
    images, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "fashion_mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert load(tmp_path, "fashion_mnist").classes == FASHION_CLASSES


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz"),
    ],
)
def test_a_missing_dataset_names_the_folder_and_the_files_to_put_there(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path / "nowhere", name)
    for words in (name, str(tmp_path / "nowhere"), file, f"{name}.npz", "--data_dir"):
        assert words in str(caught.value)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        load(tmp_path)


WHOLE = content("train-images-idx3-ubyte", (30, 28, 28))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (WHOLE[:-1], "is truncated or damaged: it has 23519 bytes of data, not 23520"),
        (WHOLE + b"\0", "is truncated or damaged"),
        (WHOLE[:10], "is not an IDX file"),
        (b"", "is not an IDX file"),
        (b"\0\0\x0d" + WHOLE[3:], "is not an IDX file of bytes"),
        (b"<html>not found</html>", "is not an IDX file"),
        (b"\0\0\x08\0\0", "is not an IDX file"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + b"\0" * 100, "is truncated or damaged"),
        (content("train-images-idx3-ubyte", (29, 28, 28)), "holds 29 images, .* 30 labels"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_damaged_file_is_named(tmp_path: Path, raw: bytes, message: str, ending: str) -> None:
    write(tmp_path, ending, train_images_idx3_ubyte=raw)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert f"train-images-idx3-ubyte{ending}" in str(caught.value)


def test_a_gz_cut_off_or_with_a_wrong_byte_is_never_a_traceback(tmp_path: Path) -> None:
    write(tmp_path, ".gz")
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            load(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(whole)
    whole = images.read_bytes()
    for place in range(12, len(whole), 499):
        images.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(DataError):
            load(tmp_path)


def test_a_label_beyond_nine_is_out_of_range(tmp_path: Path) -> None:
    raw = b"\0\0\x08\x01" + struct.pack(">I", 30) + bytes([10] * 30)
    write(tmp_path, train_labels_idx1_ubyte=raw)
    with pytest.raises(DataError, match="label 10 of example 0 of the train split is out of range"):
        load(tmp_path)


def test_labels_in_the_place_of_images_are_refused(tmp_path: Path) -> None:
    write(tmp_path, train_images_idx3_ubyte=content("train-labels-idx1-ubyte", (30,)))
    with pytest.raises(DataError, match="single numbers"):
        load(tmp_path)
