"""What a dataset in memory accepts, and how it explains what it does not."""

import subprocess
import sys

import numpy as np
import pytest

from modelyard.data.dataset import ArrayDataset
from modelyard.errors import DataError

IMAGES = np.zeros((4, 2, 2, 1), np.uint8)
LABELS = np.array([0, 1, 2, 1])


def train(**arrays: object) -> dict[str, dict[str, np.ndarray]]:
    return {"train": {"image": IMAGES, "label": LABELS, **arrays}}  # type: ignore[dict-item]


def test_examples_are_read_by_index_in_the_order_asked_for() -> None:
    made = ArrayDataset(train(image=np.arange(16, dtype=np.uint8).reshape(4, 2, 2)))
    read = made.read("train", np.array([3, 0, 3]))
    assert read["id"].tolist() == [3, 0, 3]
    assert read["label"].tolist() == [1, 0, 1]
    assert read["image"][:, 0, 0, 0].tolist() == [12, 0, 12]


def test_classes_are_numbered_where_they_have_no_names() -> None:
    assert ArrayDataset(train()).classes == ("0", "1", "2")
    assert ArrayDataset(train(), ["a", "b", "c", "d"]).classes == ("a", "b", "c", "d")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_labels_of_any_whole_type_become_int32(dtype: type) -> None:
    made = ArrayDataset(train(label=LABELS.astype(dtype)))
    assert made.features["label"].dtype == "int32"
    assert made.arrays("train")["label"].tolist() == [0, 1, 2, 1]


def test_labels_in_a_column_become_a_row() -> None:
    assert ArrayDataset(train(label=LABELS[:, None])).features["label"].shape == ()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS + 1j, "must be whole numbers"),
        (LABELS.astype(str), "must be whole numbers"),
        (LABELS.astype(bool), "must be whole numbers"),
        (LABELS.astype(object), "must be whole numbers"),
        (np.ones((4, 2, 2), int), "must be whole numbers"),
        (np.eye(4, dtype=int) * 2, "each must be 0 or 1 .* example 0 has 2. For regression give floats"),
        (np.array([0, 1, np.nan, 1]), "label nan of example 2 of the train split is not finite"),
        (np.array([[0, 1], [1, 1e300], [0, 0], [0, 0]]), "label 1e.300 of example 1 of the train split is not finite"),
        (np.array([0, -3, 1, 1]), "label -3 of example 1 of the train split is below 0"),
        (np.array([0, 1, 1 << 20, 1]), "label 1048576 of example 2 of the train split is out of range"),
        (np.array([0, 1, 2]), "differ in length"),
        (np.array(5), "first axis must count examples"),
        (np.array([], int), "empty"),
    ],
)
def test_labels_that_do_not_fit_are_explained(labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset(train(label=labels))


def test_floats_are_values_to_predict() -> None:
    data = ArrayDataset(train(label=LABELS.astype(float)))
    assert (data.features["label"].dtype, data.features["label"].shape) == ("float32", ())
    assert data.classes == ()
    assert data.labels("train") is None
    assert ArrayDataset(train(label=LABELS[:, None] / 2)).features["label"].shape == ()
    two = ArrayDataset(train(label=np.ones((4, 2), np.float16)), ["width", "height"])
    assert two.features["label"].shape == (2,)
    assert two.classes == ("width", "height")
    with pytest.raises(DataError, match=r"3 names are given, but a label has 2 number\(s\)"):
        ArrayDataset(train(label=np.ones((4, 2), np.float16)), ["a", "b", "c"])


@pytest.mark.parametrize("dtype", [int, bool, np.uint8])
def test_rows_of_0_and_1_are_classes_that_apply(dtype: type) -> None:
    data = ArrayDataset(train(label=np.eye(4, dtype=dtype)))
    assert (data.features["label"].dtype, data.features["label"].shape) == ("uint8", (4,))
    assert data.classes == ("0", "1", "2", "3")
    assert data.labels("train") is None
    with pytest.raises(DataError, match="1 names are given, but a label has 4"):
        ArrayDataset(train(label=np.eye(4, dtype=dtype)), ["cat"])


def test_splits_must_have_labels_of_one_kind() -> None:
    splits = train() | {"test": {"image": IMAGES, "label": LABELS / 2}}
    with pytest.raises(
        DataError, match=r"examples of the test split are .*label float32 single, those of train .*label int32"
    ):
        ArrayDataset(splits)
    splits = train(label=LABELS / 2) | {"test": {"image": IMAGES, "label": LABELS}}
    with pytest.raises(DataError, match="examples of the test split are"):
        ArrayDataset(splits)


def test_a_label_beyond_the_named_classes_is_out_of_range() -> None:
    with pytest.raises(DataError, match="label 2 of example 2 of the train split is out of range: there are 2 classes"):
        ArrayDataset(train(), ["a", "b"])


def test_a_label_that_only_the_test_split_has_is_out_of_range() -> None:
    splits = train() | {"test": {"image": IMAGES, "label": LABELS + 1}}
    with pytest.raises(DataError, match="label 3 of example 2 of the test split"):
        ArrayDataset(splits, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        (np.full((4, 2, 2), 255, np.int64), ("uint8", (2, 2, 1), 255)),
        (np.full((4, 2, 2, 3), 7, np.int16), ("uint8", (2, 2, 3), 7)),
        (np.full((4, 2, 2), True), ("uint8", (2, 2, 1), 1)),
        (np.full((4, 2, 2), 0.5), ("float32", (2, 2, 1), 0.5)),
        (np.full((4, 2, 2), 1000.0, np.float16), ("float32", (2, 2, 1), 1000)),
        (np.full((4, 3), 5, np.uint8), ("uint8", (3,), 5)),
        (np.full((4, 2, 2, 2, 2), 5, np.uint8), ("uint8", (2, 2, 2, 2), 5)),
    ],
)
def test_images_become_bytes_or_float32(images: np.ndarray, kept: tuple[str, tuple[int, ...], float]) -> None:
    made = ArrayDataset(train(image=images))
    feature = made.features["image"]
    assert (feature.dtype, feature.shape, made.arrays("train")["image"].flat[0]) == kept


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.full((4, 2, 2), 256), "values from 256 to 256"),
        (np.full((4, 2, 2), -1, np.int8), "values from -1 to -1"),
        (np.full((4, 2, 2), np.nan), "not finite"),
        (np.full((4, 2, 2), np.inf), "not finite"),
        (np.full((4, 2, 2), "a"), "give uint8"),
        (np.full((4, 2, 2), None), "give uint8"),
        (np.full((4, 2, 2), 1j), "give uint8"),
        (np.zeros(4, np.uint8), "single numbers"),
        (np.zeros((4, 0, 2), np.int64), "empty"),
        (np.zeros((3, 2, 2)), "differ in length"),
        (np.array(7), "first axis must count examples"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_images_that_do_not_fit_are_explained(images: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset(train(image=images))


@pytest.mark.parametrize("splits", [{}, {"test": {"label": LABELS}}])
def test_a_dataset_needs_a_train_split(splits: dict[str, dict[str, np.ndarray]]) -> None:
    with pytest.raises(DataError, match="needs a train split"):
        ArrayDataset(splits)


@pytest.mark.parametrize("arrays", [{}, {"image": IMAGES[:0], "label": LABELS[:0]}])
def test_an_empty_split_is_refused(arrays: dict[str, np.ndarray]) -> None:
    for split in ("train", "test"):
        with pytest.raises(DataError, match=f"the {split} split is empty"):
            ArrayDataset(train() | {split: arrays})


def test_splits_must_look_alike() -> None:
    with pytest.raises(DataError, match="examples of the test split are"):
        ArrayDataset(train() | {"test": {"image": np.zeros((4, 3, 3), np.uint8), "label": LABELS}})


def test_a_split_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DataError, match=r"no test split\. It has: train"):
        ArrayDataset(train()).size("test")


def test_the_fingerprint_follows_every_value() -> None:
    usual = ArrayDataset(train()).fingerprint()
    assert usual == ArrayDataset(train(image=IMAGES.copy())).fingerprint()
    changed = IMAGES.copy()
    changed[3, 1, 1, 0] = 1
    others = [
        ArrayDataset(train(image=changed)),
        ArrayDataset(train(image=IMAGES.reshape(4, 1, 4, 1))),
        ArrayDataset(train(image=IMAGES.astype(np.float32))),
        ArrayDataset(train(label=LABELS[::-1])),
        ArrayDataset(train(id=LABELS)),
        ArrayDataset(train(), ["a", "b", "c"]),
        ArrayDataset(train() | {"test": train()["train"]}),
    ]
    assert len({usual, *(other.fingerprint() for other in others)}) == len(others) + 1


def test_a_fingerprint_does_not_depend_on_how_arrays_lie_in_memory() -> None:
    images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3, 1)
    assert (
        ArrayDataset(train(image=np.asfortranarray(images))).fingerprint()
        == ArrayDataset(train(image=images)).fingerprint()
    )


@pytest.mark.parametrize("kind", ["object", "S1", "M8[D]", "U2"])
def test_ids_of_any_kind_have_a_fingerprint_that_another_process_finds_again(kind: str) -> None:
    values = "['a', 'b', 'c', 'd']" if kind != "M8[D]" else "['2020-01-01'] * 4"
    program = (
        "import numpy as np\nfrom modelyard.data.dataset import ArrayDataset\n"
        f"ids = np.array({values}, dtype={kind!r})\n"
        "print(ArrayDataset({'train': {'label': np.arange(4), 'id': ids}}).fingerprint())"
    )
    seen = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


def test_ids_that_are_objects_but_no_text_are_refused() -> None:
    with pytest.raises(DataError, match="id of the train split holds Python objects"):
        ArrayDataset(train(id=np.array([{}, {}, {}, {}], dtype=object)))


def test_a_pair_is_image_and_label() -> None:
    named = ArrayDataset({"train": {"image": IMAGES, "label": LABELS}})
    assert ArrayDataset({"train": (IMAGES, LABELS)}).fingerprint() == named.fingerprint()
    several = ArrayDataset({"train": ({"image": IMAGES, "age": LABELS}, LABELS)})
    assert set(several.features) == {"image", "age", "label", "id"}
    with pytest.raises(DataError, match=r"the train split is list; give \(x, y\)"):
        ArrayDataset({"train": [IMAGES, LABELS]})  # type: ignore[dict-item]
