"""Masks and boxes move with the image, or the run is refused. Segmentation is trained with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from keras import ops
from numpy.typing import NDArray

import modelyard
from conftest import Make, distance, same_bits
from modelyard.config.calls import Call
from modelyard.data.augment.build import build_augmentation
from modelyard.data.dataset import ArrayDataset, Arrays, Dataset, Feature
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.errors import DataError

pytestmark = pytest.mark.usefixtures("two_devices")
Array = NDArray[Any]

COUNT, HEIGHT, WIDTH = 32, 24, 20
MOVING = (
    "flip_left_right(probability=1)",
    "flip_left_right(alternate=true)",
    "flip_up_down",
    "pad_and_crop(padding=5)",
    "pad_and_crop(padding=5, fill=reflect)",
    "rotation(degrees=40)",
    "random_resized_crop(scale=[0.5, 1])",
    "rand_augment(operations=3, magnitude=15)",
)
COLOURS = ("brightness", "contrast", "saturation", "hue", "noise", "cutout")


def shapes(count: int = COUNT, seed: int = 0) -> tuple[Array, Array, Array]:
    """White rectangles on black, their masks, and their boxes."""
    rng = np.random.default_rng(seed)
    masks, boxes = np.zeros((count, HEIGHT, WIDTH), np.uint8), np.zeros((count, 2, 4), np.float32)
    for mask, box in zip(masks, boxes, strict=True):
        top, left = rng.integers(5, 9), rng.integers(3, 7)
        tall, wide = rng.integers(6, 10), rng.integers(6, 9)
        mask[top : top + tall, left : left + wide] = 1
        box[0] = top / HEIGHT, left / WIDTH, (top + tall) / HEIGHT, (left + wide) / WIDTH
    return np.repeat(masks[..., None] * np.uint8(250), 3, axis=3), masks, boxes


IMAGES, MASKS, BOXES = shapes()


def dataset(maps: Any = ("mask",), boxes: Any = ("boxes",), **more: Array) -> ArrayDataset:
    train = {"image": IMAGES, "mask": MASKS, "boxes": BOXES, "label": np.arange(COUNT) % 2, **more}
    return ArrayDataset({"train": train}, maps=maps, boxes=boxes)


def augmented(data: Dataset, *texts: str) -> dict[str, Array]:
    arrays = data.read("train", np.arange(COUNT))
    augment = build_augmentation([Call.parse(text) for text in texts], data, 3)
    numbers = np.arange(COUNT)
    batch = {name: ops.convert_to_tensor(arrays[name]) for name in data.features if name != "id"}
    low, high = (ops.convert_to_tensor(n.astype(np.uint32)) for n in (numbers, numbers * 0))
    rows, epochs = (ops.convert_to_tensor(n.astype(np.int32)) for n in (numbers, numbers * 0))
    return {name: np.asarray(ops.convert_to_numpy(v)) for name, v in augment(batch, low, high, rows, epochs).items()}


def overlap(one: Array, other: Array) -> float:
    return float(np.logical_and(one, other).sum() / np.logical_or(one, other).sum())


def around(mask: Array) -> Array:
    """The box of what is not 0."""
    rows, columns = np.nonzero(mask.any(axis=1))[0], np.nonzero(mask.any(axis=0))[0]
    return np.array([rows[0] / HEIGHT, columns[0] / WIDTH, (rows[-1] + 1) / HEIGHT, (columns[-1] + 1) / WIDTH])


def sources(masks: Array) -> list[int]:
    return sorted(set(np.unique(masks).tolist()))


# -- what augmentation does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", MOVING)
def test_a_mask_moves_with_the_image(text: str) -> None:
    made = augmented(dataset(), text)
    mask = made["mask"]
    assert (mask.shape, mask.dtype, sources(mask)) == (MASKS.shape, MASKS.dtype, [0, 1]), "no values in between"
    assert overlap(mask, MASKS) < 0.9, "it has moved"
    if text.startswith("rand_augment"):  # colours change as well: compare with the same map, painted by the image
        return
    if text.startswith(("flip", "pad")):
        assert np.array_equal(mask, made["image"][..., 0] // 250)
    else:
        assert overlap(mask, made["image"][..., 0] > 125) > 0.97


@pytest.mark.parametrize("text", MOVING)
def test_boxes_move_with_the_image(text: str) -> None:
    made = augmented(dataset(), text)
    assert (made["boxes"].shape, made["boxes"].dtype) == (BOXES.shape, np.float32)
    assert not made["boxes"][:, 1].any(), "rows of zeros stay"
    errors = []
    for mask, box in zip(made["mask"], made["boxes"][:, 0], strict=True):
        if not mask.any():
            continue
        seen = around(mask)
        if "reflect" in text:  # a reflection is seen beside the object
            assert (seen[:2] <= box[:2] + 1e-4).all()
            assert (seen[2:] >= box[2:] - 1e-4).all()
            continue
        errors.append(np.abs(seen - box) * [HEIGHT, WIDTH, HEIGHT, WIDTH])
    limit = 1e-3 if text.startswith(("flip", "pad")) else 2.0
    assert "reflect" in text or np.max(errors) < limit


def test_a_box_outside_of_the_crop_becomes_zeros_and_one_at_the_edge_is_cut_off() -> None:
    corner = np.zeros((COUNT, 4), np.float32)
    corner[:] = 0, 0, 2 / HEIGHT, 2 / WIDTH
    made = augmented(dataset(boxes=("boxes", "corner"), corner=corner), "pad_and_crop(padding=4)")["corner"]
    gone = ~made.any(axis=1)
    assert 0 < gone.sum() < COUNT
    kept = made[~gone]
    assert ((kept >= 0) & (kept <= 1)).all()
    assert ((kept[:, 2] > kept[:, 0]) & (kept[:, 3] > kept[:, 1])).all()
    assert (kept[:, 2] - kept[:, 0] < 2 / HEIGHT - 1e-6).any(), "cut off"


@pytest.mark.parametrize("text", COLOURS)
def test_colours_leave_masks_and_boxes_alone(text: str) -> None:
    made = augmented(dataset(), text)
    assert np.array_equal(made["mask"], MASKS)
    assert np.array_equal(made["boxes"], BOXES)


@pytest.mark.parametrize("text", ["rotation(degrees=40)", "pad_and_crop(padding=5)"])
def test_what_comes_from_outside_has_the_value_that_the_dataset_names(text: str) -> None:
    data = dataset(maps={"mask": 255, "deep": -1.0}, deep=np.ones((COUNT, HEIGHT, WIDTH, 2), np.float32))
    made = augmented(data, text)
    assert sources(made["mask"]) == [0, 1, 255]
    assert sources(made["deep"]) == [-1, 1]
    assert np.array_equal(made["mask"] == 255, made["deep"][..., 0] == -1), "the same pixels, by the same draws"


def test_several_augmentations_in_a_row() -> None:
    texts = ("flip_left_right", "pad_and_crop(padding=3)", "brightness", "flip_up_down")
    made = augmented(dataset(), *texts)
    assert np.array_equal(made["mask"] > 0, made["image"][..., 0] > 100)


def test_cutmix_pastes_the_mask_with_the_image() -> None:
    data = ArrayDataset({"train": {"image": IMAGES, "mask": MASKS, "label": np.arange(COUNT) % 2}}, maps=["mask"])
    with pytest.raises(DataError, match=r"'mask' can't be mixed.*take cutmix, which pastes maps"):
        augmented(data, "mixup")
    made = augmented(data, "cutmix")
    assert np.array_equal(made["mask"], made["image"][..., 0] // 250)
    assert made["label"].shape == (COUNT, 2)
    labelled = ArrayDataset({"train": {"image": IMAGES, "label": MASKS}}, maps=["label"])
    made = augmented(labelled, "cutmix")
    assert np.array_equal(made["label"], made["image"][..., 0] // 250)


def test_an_image_file_is_not_cropped_while_it_is_decoded_if_there_is_a_mask(make: Make) -> None:
    class Files(Dataset):
        """Says that it could."""

        classes = ("0", "1")
        crops = True
        maps = ("mask",)
        features: ClassVar[Any] = {
            "image": Feature((HEIGHT, WIDTH, 3), "uint8"),
            "mask": Feature((HEIGHT, WIDTH), "uint8"),
        }

        def sizes(self) -> dict[str, int]:
            return {"train": COUNT}

        def read(self, split: str, indices: Array) -> Arrays:
            return {"image": IMAGES[indices], "mask": MASKS[indices]}

        def fingerprint(self) -> str:
            return ""

    made = augmented(Files(), "random_resized_crop(scale=[0.5, 1])")
    assert overlap(made["mask"], made["image"][..., 0] > 125) > 0.97
    from modelyard.config.durations import RunLength
    from modelyard.config.resolve import resolve
    from modelyard.data.pipeline import Pipeline

    config = resolve({"model": "mlp", "dataset": "digits", "augment": "random_resized_crop"})
    assert not Pipeline(config, Files(), RunLength(COUNT, 4, 1)).crops_while_decoding


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*MOVING, "mixup", "cutmix"])
def test_a_mask_that_nobody_declared_is_refused(text: str) -> None:
    name = text.partition("(")[0]
    with pytest.raises(DataError, match=rf"'{name}' moves pixels .* 'mask', .*24×20.* maps=\['mask'\] .* maps=\[\]"):
        augmented(dataset(maps=None, boxes=[]), text)
    with pytest.raises(DataError, match=rf"'{name}' moves pixels .* 'boxes', .*rows of 4 .* boxes=\['boxes'\]"):
        augmented(dataset(maps=[], boxes=None), text)


def test_a_mask_that_is_declared_as_something_else_stays() -> None:
    made = augmented(dataset(maps=[], boxes=[]), "flip_left_right(probability=1)")
    assert np.array_equal(made["mask"], MASKS)
    assert np.array_equal(augmented(dataset(maps=None, boxes=None), "brightness")["mask"], MASKS)


@pytest.mark.parametrize(
    ("text", "maps", "message"),
    [
        ("mixup", ["mask"], r"'mixup' mixes two images, and 'mask' and 'boxes' can't be mixed"),
        ("cutmix", ["mask"], r"'cutmix' mixes two images, and 'boxes' can't be mixed"),
        ("flip_up_down", ["masks"], r"names 'masks' in maps, .* have: mask, boxes, label"),
        ("flip_up_down", "mask", r"must be a list of names"),
        ("flip_up_down", ["label"], r"labels of the train split are maps, .* got int64 of shape \(32,\)"),
        ("flip_up_down", ["boxes"], r"the map 'boxes' has shape \(2, 4\), the image 24×20"),
        ("flip_up_down", {"mask": 300}, r"'mask' is uint8, which can't hold 300"),
    ],
)
def test_errors_say_what_to_do(text: str, maps: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        augmented(dataset(maps=maps), text)


def test_boxes_in_pixels_are_refused() -> None:
    in_pixels = {"image": IMAGES, "boxes": BOXES * HEIGHT, "label": np.arange(COUNT) % 2}
    with pytest.raises(DataError, match=r"boxes 'boxes' have values from 0 to .*divide pixels by the height or width"):
        augmented(ArrayDataset({"train": in_pixels}, boxes=["boxes"]), "flip_up_down")


@modelyard.register_augmentation("maps_silent")
class Silent:
    """An augmentation that does not say what it does."""

    def __init__(self, options: Any) -> None:
        pass

    def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "image": batch["image"][:, ::-1]}


@modelyard.register_augmentation("maps_photometric")
class Photometric(Silent):
    moves_pixels = False

    def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, "image": 255 - batch["image"]}


@modelyard.register_augmentation("maps_moving")
class Moving(Silent):
    moves_pixels = True

    def prepare(self, info: Any) -> None:
        self.names = ["image", *info.aligned.maps]

    def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {**batch, **{name: batch[name][:, ::-1] for name in self.names}}


def test_your_own_augmentation_says_whether_it_moves_pixels() -> None:
    with pytest.raises(DataError, match=r"'maps_silent' does not say .* 'mask' and 'boxes' .*moves_pixels = False"):
        augmented(dataset(), "maps_silent")
    with pytest.raises(DataError, match=r"'maps_silent' moves pixels"):
        augmented(dataset(maps=None, boxes=None), "maps_silent")
    assert np.array_equal(augmented(dataset(), "maps_photometric")["mask"], MASKS)
    assert np.array_equal(augmented(dataset(), "maps_moving")["mask"], MASKS[:, ::-1])


# -- where maps are declared -----------------------------------------------------------------------------------------


@modelyard.register_preprocessing("with_mask")
class WithMask:
    """Preprocessing that adds a mask, and says so."""

    maps: ClassVar = {"bright": 255}

    def __init__(self, options: Any) -> None:
        pass

    def example(self, example: dict[str, Any], training: bool) -> dict[str, Any]:
        return {**example, "bright": (example["image"][..., 0] > 100).astype(np.uint8)}


def test_a_preprocessing_can_add_a_map() -> None:
    plain = ArrayDataset({"train": {"image": IMAGES, "mask": MASKS, "label": np.arange(COUNT) % 2}}, maps=["mask"])
    made = augmented(with_example_preprocessing(plain, [Call.parse("with_mask")]), "pad_and_crop(padding=5)")
    assert np.array_equal(made["bright"] == 1, made["mask"] == 1)
    assert sources(made["bright"]) == [0, 1, 255]


def test_labels_that_are_maps() -> None:
    with pytest.raises(DataError, match=r"If each pixel has a label, give .*maps=\['label'\]"):
        ArrayDataset({"train": {"image": IMAGES, "label": MASKS}})
    data = ArrayDataset({"train": {"image": IMAGES, "label": MASKS}}, maps={"label": 255})
    assert data.classes == ("0", "1")
    assert data.features["label"] == Feature((HEIGHT, WIDTH), "uint8")
    with pytest.raises(DataError, match=r"the label -1 in example 0 of the train split is below 0"):
        ArrayDataset({"train": {"image": IMAGES, "label": MASKS.astype(int) - 1}}, maps=["label"])
    ignored = np.where(MASKS > 0, MASKS, 255)
    assert ArrayDataset({"train": {"image": IMAGES, "label": ignored}}, maps={"label": 255}).classes == ("0", "1")
    made = augmented(data, "flip_left_right")
    assert np.array_equal(made["label"], made["image"][..., 0] // 250)


def test_whether_maps_are_declared_changes_the_fingerprint() -> None:
    found = {
        dataset(maps=maps, boxes=boxes).fingerprint()
        for maps in (None, ["mask"], {"mask": 1})
        for boxes in (None, ["boxes"])
    }
    assert len(found) == 6
    assert dataset(None, None).fingerprint() == dataset([], []).fingerprint()


# -- whole runs ------------------------------------------------------------------------------------------------------


@modelyard.register_model("segmenter")
class Segmenter(modelyard.Task):
    """A few convolutions; the label of each pixel."""

    def network(self) -> keras.Model:
        inputs, x = modelyard.image_input(self.data)
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(x)
        return keras.Model(inputs, keras.layers.Conv2D(2, 1, name="logits")(x), name="segmenter")

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        labels = ops.cast(batch["label"], "int32")
        return ops.mean(ops.sparse_categorical_crossentropy(labels, outputs, from_logits=True), axis=(1, 2))

    def metrics(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        found = ops.cast(ops.argmax(outputs, axis=-1), "int32")
        return {
            "pixels": ops.mean(ops.cast(ops.equal(found, ops.cast(batch["label"], "int32")), "float32"), axis=(1, 2))
        }


LABELLED = ArrayDataset(
    {
        "train": {"image": IMAGES, "label": MASKS, "boxes": BOXES},
        "validation": {"image": IMAGES, "label": MASKS, "boxes": BOXES},
    },
    maps=["label"],
    boxes=["boxes"],
)
RUN: dict[str, Any] = {
    "model": "segmenter",
    "augment": "flip_left_right, pad_and_crop(padding=3), rotation",
    "train_batch_size": 8,
    "train_steps": 6,
    "deterministic": True,
}


def test_a_step_sees_masks_that_fit_their_images(make: Make) -> None:
    engine = make(LABELLED, **{**RUN, "augment": "flip_left_right, pad_and_crop(padding=3)"})
    batch = engine.training_batch(0)
    assert np.array_equal(batch["label"], batch["image"][..., 0] // 250)
    assert not np.array_equal(batch["label"], MASKS[engine.pipeline.rows(0, 1)[0]][: len(batch["label"])])


def test_weights_do_not_depend_on_threads_devices_or_where_the_data_is(make: Make) -> None:
    ends = []
    for options in ({"resident": "never", "input_threads": 1}, {"resident": "never", "input_threads": 4}):
        engine = make(LABELLED, **RUN, **options)
        engine.train(0, 6)
        ends.append(engine.state())
    assert same_bits(ends[0], ends[1])
    resident = make(LABELLED, **RUN, resident="always")
    resident.train(0, 6)
    assert distance(resident.state(), ends[0]) < 1e-5
    several = make(LABELLED, **RUN, cpu_devices=2)
    several.train(0, 6)
    assert distance(several.state(), ends[0]) < 1e-4


def test_a_resumed_run_ends_with_the_same_weights(make: Make, tmp_path: Path) -> None:
    whole = make(LABELLED, **RUN)
    whole.train(0, 6)
    first = make(LABELLED, **RUN)
    first.train(0, 3)
    state = first.state()
    second = make(LABELLED, **RUN)
    second.load(state)
    second.train(3, 3)
    assert same_bits(second.state(), whole.state())


def test_views_of_images_are_refused_for_outputs_with_places(make: Make) -> None:
    engine = make(LABELLED, **RUN, test_time_augmentation="flip")
    with pytest.raises(DataError, match=r"test_time_augmentation .*a value for each place"):
        engine.evaluate("validation")
