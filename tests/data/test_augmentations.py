"""Every augmentation: what all of them promise, then what each does. This file imports Keras."""

from typing import Any

import numpy as np
import pytest
from keras import ops
from numpy.typing import NDArray

from conftest import compiled
from modelyard.config.calls import Call
from modelyard.data.augment.build import build_augmentation
from modelyard.data.dataset import ArrayDataset
from modelyard.errors import DataError, UserError
from modelyard.registry import AUGMENTATIONS

pytestmark = pytest.mark.usefixtures("two_devices")
Array = NDArray[np.generic]

NAMES = [entry.name for entry in AUGMENTATIONS.entries() if isinstance(entry.target, str)]
COUNT, HEIGHT, WIDTH = 48, 12, 10
CLASSES = 5
_RNG = np.random.default_rng(0)
# Patches with soft edges and black and white in them: smooth enough to see what moved, no two alike.
IMAGES = np.clip(
    np.kron(_RNG.normal(128, 90, (COUNT, HEIGHT // 2, WIDTH // 2, 3)), np.ones((1, 2, 2, 1)))
    + _RNG.normal(0, 5, (COUNT, HEIGHT, WIDTH, 3)),
    0,
    255,
).astype(np.uint8)
GREY = IMAGES[..., :1]
FLOATS = (IMAGES / 100 - 1).astype(np.float32)
LABELS = _RNG.integers(0, CLASSES, COUNT)
STRONG = {
    "pad_and_crop": "pad_and_crop(padding=2)",
    "noise": "noise(spread=0.5)",
    "rotation": "rotation(degrees=180)",
    "cutout": "cutout(size=5)",
    "rand_augment": "rand_augment(operations=3, magnitude=20)",
    "brightness": "brightness(amount=1)",
    "contrast": "contrast(amount=1)",
    "saturation": "saturation(amount=1)",
    "hue": "hue(amount=0.5)",
    "mixup": "mixup(alpha=0.4)",
    "cutmix": "cutmix(alpha=0.4)",
}
NOTHING = [
    "flip_left_right(probability=0)",
    "flip_up_down(probability=0)",
    "rotation(degrees=0)",
    "noise(spread=0)",
    "random_resized_crop(scale=[1, 1], ratio=[0.5, 2])",
    "brightness(amount=0)",
    "contrast(amount=0)",
    "saturation(amount=0)",
    "hue(amount=0)",
    "cutout(size=0)",
    "mixup(alpha=0)",
    "mixup(probability=0)",
    "cutmix(alpha=0)",
    "cutmix(probability=0)",
]


def dataset(images: Array = IMAGES) -> ArrayDataset:
    classes = [str(i) for i in range(CLASSES)]
    return ArrayDataset({"train": {"image": images, "label": np.resize(LABELS, len(images))}}, classes=classes)


def calls(*texts: str) -> list[Call]:
    return [Call.parse(text) for text in texts]


def augmented(
    *texts: str,
    images: Array = IMAGES,
    seed: int = 3,
    first: int = 0,
    share: slice = slice(None),
    labels: Array = LABELS,
) -> tuple[Array, Array]:
    """Images and labels of a share of the batch."""
    augment = build_augmentation(calls(*texts), dataset(images), seed)
    positions = (np.arange(len(images), dtype=np.uint64) + np.uint64(first))[share]
    low, high = (positions & np.uint64(0xFFFFFFFF)).astype(np.uint32), (positions >> np.uint64(32)).astype(np.uint32)
    batch = {
        "image": ops.convert_to_tensor(images[share]),
        "label": ops.convert_to_tensor(np.resize(labels, len(images))[share]),
    }
    made = augment(batch, ops.convert_to_tensor(low), ops.convert_to_tensor(high))
    return np.asarray(ops.convert_to_numpy(made["image"])), np.asarray(ops.convert_to_numpy(made["label"]))


def many(image: Array, count: int = 2000) -> Array:
    return np.repeat(image[None], count, axis=0)


# -- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_augmented_the_same_in_any_shares(name: str) -> None:
    images, labels = augmented(STRONG.get(name, name))
    for shares in (2, 4):
        size = COUNT // shares
        parts = [augmented(STRONG.get(name, name), share=slice(i * size, i * size + size)) for i in range(shares)]
        assert np.array_equal(np.concatenate([part[0] for part in parts]), images)
        assert np.array_equal(np.concatenate([part[1] for part in parts]), labels)


@pytest.mark.parametrize("name", NAMES)
def test_it_hangs_on_seed_and_position_and_nothing_else(name: str) -> None:
    text = STRONG.get(name, name)
    images, _ = augmented(text)
    assert np.array_equal(augmented(text)[0], images)
    assert not np.array_equal(images, IMAGES)
    for seed, first in ((4, 0), (3, 2), (3, 1 << 32)):  # another run, a step later, an epoch later
        assert not np.array_equal(augmented(text, seed=seed, first=first)[0], images)
    if name not in ("mixup", "cutmix"):
        # The same image again and again: what differs is the draw of each position.
        same, _ = augmented(text, images=many(IMAGES[1], 16))
        assert len(np.unique(same.reshape(16, -1), axis=0)) > (1 if name.startswith("flip") else 8)


@pytest.mark.parametrize("images", [IMAGES, GREY, FLOATS], ids=["colour", "grey", "floats"])
@pytest.mark.parametrize("name", NAMES)
def test_shape_type_and_range_are_kept(name: str, images: Array) -> None:
    if name in ("saturation", "hue") and images.shape[3] == 1:
        with pytest.raises(DataError, match=f"'{name}' needs colour images"):
            augmented(name, images=images)
        return
    made, _ = augmented(STRONG.get(name, name), images=images)
    assert (made.shape, made.dtype) == (images.shape, images.dtype)
    assert np.isfinite(made).all()
    if images.dtype == np.uint8:
        # Values that leave the range stick to its ends; had they wrapped around, the mean would be far off.
        assert abs(made.mean() - images.mean()) < 40


@pytest.mark.parametrize("name", NAMES)
def test_labels_stay_or_become_shares_that_sum_to_one(name: str) -> None:
    _, labels = augmented(STRONG.get(name, name))
    if name in ("mixup", "cutmix"):
        assert (labels.shape, labels.dtype) == ((COUNT, CLASSES), np.float32)
        np.testing.assert_allclose(labels.sum(axis=1), 1, rtol=1e-6)
    else:
        assert np.array_equal(labels, LABELS)


@pytest.mark.parametrize("images", [IMAGES, FLOATS], ids=["uint8", "floats"])
@pytest.mark.parametrize("text", NOTHING)
def test_an_amount_of_nothing_changes_nothing(text: str, images: Array) -> None:
    made, labels = augmented(text, images=images)
    np.testing.assert_allclose(made, images, rtol=0, atol=1e-5)
    if labels.ndim == 2:
        assert np.array_equal(labels, np.eye(CLASSES)[LABELS])


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_augments_as_an_eager_one_in_any_precision(name: str) -> None:
    import keras

    text = STRONG.get(name, name)
    eager, labels = augmented(text)
    augment = compiled(build_augmentation(calls(text), dataset(), 3))
    low = np.arange(COUNT, dtype=np.uint32)
    batch = {"image": ops.convert_to_tensor(IMAGES), "label": ops.convert_to_tensor(LABELS)}
    keras.config.set_floatx("float64")
    try:
        made = augment(batch, low, low * 0)
    finally:
        keras.config.set_floatx("float32")
    # Graph optimisation reorders sums: a value on an edge of rounding may fall to the other side.
    different = ops.convert_to_numpy(made["image"]) != eager
    assert different.mean() < 0.01
    np.testing.assert_allclose(ops.convert_to_numpy(made["label"]), labels, atol=1e-6)


def test_a_first_augmentation_that_is_done_already_leaves_the_draws_of_the_others() -> None:
    both = calls("flip_up_down(probability=1)", "noise")
    low = ops.arange(COUNT, dtype="int32")
    words = ops.cast(low, "uint32"), ops.cast(low * 0, "uint32")
    made = build_augmentation(both, dataset(), 3, COUNT, skip_first=True)(
        {"image": ops.convert_to_tensor(IMAGES[:, ::-1].copy())}, *words
    )
    whole = build_augmentation(both, dataset(), 3, COUNT)({"image": ops.convert_to_tensor(IMAGES)}, *words)
    assert np.array_equal(ops.convert_to_numpy(made["image"]), ops.convert_to_numpy(whole["image"]))


def test_all_at_once_in_one_list() -> None:
    images, labels = augmented(*NAMES)
    assert images.dtype == np.uint8
    np.testing.assert_allclose(labels.sum(axis=1), 1, rtol=1e-5)


def test_fractions_are_rounded_and_never_wrap_around() -> None:
    """Keras would cut them off: 254.9 would become 254, 300 would become 44."""
    bright, _ = augmented("brightness(amount=1)", images=many(np.full((2, 2, 1), 200, np.uint8)))
    assert bright.max() == 255
    assert bright.min() == 0
    assert (bright[:, 0, 0, 0] == 255).mean() == pytest.approx(200 / 510, abs=0.05)
    # Half of all shifts up to a half round up to 1 and none goes further.
    slight, _ = augmented("brightness(amount=0.00390625)", images=many(np.full((2, 2, 1), 100, np.uint8)))
    assert {99, 100, 101} == set(np.unique(slight))
    assert (slight == 100).mean() == pytest.approx(0.5, abs=0.05)


def test_an_augmentation_of_ones_own_need_not_keep_the_range() -> None:
    class Stretch:
        def __init__(self, options: object) -> None:
            pass

        def __call__(self, batch: dict[str, Any], draws: object) -> dict[str, Any]:
            return {**batch, "image": ops.cast(batch["image"], "float32") * 4.0 - 200.0}

    AUGMENTATIONS.register("stretch")(Stretch)
    few = IMAGES[:1, :1, :3].copy()  # TensorFlow wraps around the last few values of an array, and not the others
    few[0, 0, 0] = [0, 60, 255]
    assert augmented("stretch", images=few)[0][0, 0, 0].tolist() == [0, 40, 255]
    made, _ = augmented("stretch")
    assert np.array_equal(made, np.clip(IMAGES.astype(int) * 4 - 200, 0, 255))


# -- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "axis"), [("flip_left_right", 2), ("flip_up_down", 1)])
def test_a_flip_mirrors_as_many_as_asked_for(name: str, axis: int) -> None:
    images = many(IMAGES[0])
    made, _ = augmented(f"{name}(probability=0.3)", images=images)
    flipped = (made == np.flip(images, axis)).all(axis=(1, 2, 3))
    still = (made == images).all(axis=(1, 2, 3))
    assert (flipped ^ still).all()
    assert flipped.mean() == pytest.approx(0.3, abs=0.05)


def plain_warp(image: Array, matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pixel by pixel: the new pixel at p (from the centre) is the old one at matrix @ (p, 1), black outside."""
    height, width, _ = image.shape
    middle = np.array([(height - 1) / 2, (width - 1) / 2])
    made = np.zeros(image.shape)
    for place in np.ndindex(height, width):
        y, x = matrix @ [*(place - middle), 1] + middle
        for row in (int(np.floor(y)), int(np.floor(y)) + 1):
            for column in (int(np.floor(x)), int(np.floor(x)) + 1):
                if 0 <= row < height and 0 <= column < width:
                    made[place] += image[row, column] * (1 - abs(y - row)) * (1 - abs(x - column))
    return made


def test_warp_agrees_with_plain_numpy() -> None:
    from modelyard.data.augment.geometry import warp

    matrices = np.random.default_rng(1).normal(np.eye(2, 3), [0.3, 0.3, 3], (8, 2, 3))
    made = warp(
        ops.convert_to_tensor(IMAGES[:8]), [ops.convert_to_tensor(m) for m in matrices.reshape(8, 6).T.astype("f")]
    )
    expected = [plain_warp(image, matrix) for image, matrix in zip(IMAGES[:8], matrices, strict=True)]
    np.testing.assert_allclose(ops.convert_to_numpy(made), expected, atol=0.01)


def test_rotation_turns_a_known_pattern_as_plain_numpy_does() -> None:
    from modelyard.data.augment.geometry import Rotation
    from modelyard.data.catalog import RotationOptions
    from modelyard.data.draws import Draws

    rotation = Rotation(RotationOptions(degrees=30))
    angle = np.deg2rad(25)
    rotation.table[:] = [np.cos(angle), np.sin(angle)]
    zero = ops.zeros((1,), "uint32")
    made = rotation({"image": ops.convert_to_tensor(IMAGES[:1])}, Draws(0, zero, zero))["image"]
    matrix = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0]])
    np.testing.assert_allclose(ops.convert_to_numpy(made)[0], plain_warp(IMAGES[0], matrix), atol=0.01)


def test_rotation_takes_every_angle_of_its_range() -> None:
    image = np.zeros((21, 21, 1), np.float32)
    image[8:13, 18:] = 1  # a mark at three o'clock
    made, _ = augmented("rotation(degrees=60)", images=many(image))
    places = np.arange(21) - 10
    y = (made[..., 0] * places[None, :, None]).sum(axis=(1, 2))
    x = (made[..., 0] * places[None, None, :]).sum(axis=(1, 2))
    angles = np.rad2deg(np.arctan2(y, x))
    assert np.abs(angles).max() == pytest.approx(60, abs=2)
    assert angles.mean() == pytest.approx(0, abs=4)
    assert angles.std() == pytest.approx(60 / np.sqrt(3), abs=2)


def test_a_crop_is_the_box_resized_by_bilinear_sampling() -> None:
    from modelyard.data.augment.geometry import resize_boxes

    boxes = np.array([[0, 0, 12, 10], [2, 3, 5, 4], [11, 9, 1, 1], [0, 4, 12, 6], [3, 0, 2, 10]], np.float32)
    made = resize_boxes(ops.convert_to_tensor(IMAGES[:5]), *(ops.convert_to_tensor(v) for v in boxes.T.copy()))
    for image, (top, left, tall, wide), result in zip(
        IMAGES, boxes.astype(int), ops.convert_to_numpy(made), strict=False
    ):
        part = image[top : top + tall, left : left + wide].astype(float)
        for axis, size, new in ((0, tall, HEIGHT), (1, wide, WIDTH)):
            places = np.clip((np.arange(new) + 0.5) * size / new - 0.5, 0, size - 1)
            weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size)))
            part = np.moveaxis(np.tensordot(weights, part, (1, axis)), 0, axis)
        np.testing.assert_allclose(result, part, atol=0.01)


def test_random_resized_crop_takes_the_boxes_of_the_host() -> None:
    from modelyard.data.draws import HOST, Draws, crop_box, fold

    ramp = np.broadcast_to(np.arange(40, dtype=np.float32)[:, None, None], (40, 30, 1))
    made, _ = augmented("random_resized_crop(scale=[0.1, 0.5])", images=many(ramp, 50))
    words = np.arange(50, dtype=np.uint32)
    uniform = Draws(fold(3, 0), words, words * np.uint32(0), ops=HOST).uniform(4).T
    top, _, tall, _ = crop_box(uniform, 40, 30, (0.1, 0.5), (0.75, 1.3333))
    np.testing.assert_allclose(made[:, 0].min(axis=(1, 2)), top, atol=1e-3)
    np.testing.assert_allclose(made[:, -1].max(axis=(1, 2)), top + tall - 1, atol=1e-3)


# -- colour ---------------------------------------------------------------------------------------------------------


def test_amounts_are_shares_of_255_for_uint8_and_of_1_for_floats() -> None:
    grey = many(np.full((1, 1, 1), 128, np.uint8))
    shifts = augmented("brightness(amount=0.2)", images=grey)[0].astype(float) - 128
    assert np.abs(shifts).max() == pytest.approx(0.2 * 255, abs=1)
    assert shifts.mean() == pytest.approx(0, abs=3)
    shifts = augmented("brightness(amount=0.2)", images=grey.astype(np.float32))[0] - 128
    assert np.abs(shifts).max() == pytest.approx(0.2, abs=0.001)


def test_contrast_keeps_the_mean_of_each_channel_and_scales_what_differs_from_it() -> None:
    made, _ = augmented("contrast(amount=0.5)", images=FLOATS)
    np.testing.assert_allclose(made.mean(axis=(1, 2)), FLOATS.mean(axis=(1, 2)), atol=1e-5)
    factors = made.std(axis=(1, 2)) / FLOATS.std(axis=(1, 2))
    np.testing.assert_allclose(factors, factors[:, :1].repeat(3, axis=1), rtol=1e-4)
    assert 0.5 <= factors.min() < 0.7
    assert 1.3 < factors.max() <= 1.5


def test_saturation_keeps_grey_and_scales_what_differs_from_it() -> None:
    weights = np.array([0.299, 0.587, 0.114])
    made, _ = augmented("saturation(amount=0.5)", images=FLOATS)
    grey = (FLOATS @ weights)[..., None]
    np.testing.assert_allclose((made @ weights)[..., None], grey, atol=1e-5)
    factors = (made - grey).std(axis=(1, 2, 3)) / (FLOATS - grey).std(axis=(1, 2, 3))
    np.testing.assert_allclose(made, grey + (FLOATS - grey) * factors[:, None, None, None], atol=1e-4)
    assert 0.5 <= factors.min() < 0.7
    assert 1.3 < factors.max() <= 1.5


def test_hue_turns_as_the_standard_library_does() -> None:
    import colorsys

    images = np.random.default_rng(5).random((COUNT, 3, 3, 3)).astype(np.float32)
    made, _ = augmented("hue(amount=0.5)", images=images)
    turns = []
    for before, after in zip(images, made, strict=True):
        pixels = [[colorsys.rgb_to_hsv(*pixel) for pixel in im.reshape(-1, 3).astype(float)] for im in (before, after)]
        turn = (pixels[1][0][0] - pixels[0][0][0] + 0.5) % 1 - 0.5
        turns.append(turn)
        for (h, s, v), new in zip(*pixels, strict=True):
            np.testing.assert_allclose(colorsys.hsv_to_rgb((h + turn) % 1, s, v), colorsys.hsv_to_rgb(*new), atol=1e-3)
    assert np.std(turns) == pytest.approx(1 / np.sqrt(12), abs=0.07)


def test_hue_leaves_grey_and_the_lightest_and_darkest_value() -> None:
    grey = many(np.full((2, 2, 3), 77, np.uint8), 50)
    assert np.array_equal(augmented("hue(amount=0.5)", images=grey)[0], grey)
    made, _ = augmented("hue(amount=0.5)")
    assert np.array_equal(made.max(axis=3), IMAGES.max(axis=3))
    assert np.array_equal(made.min(axis=3), IMAGES.min(axis=3))


def test_noise_has_the_spread_asked_for_in_every_value() -> None:
    grey = many(np.full((8, 8, 3), 128, np.uint8), 200)
    noise = augmented("noise(spread=0.1)", images=grey)[0].astype(float) - 128
    assert noise.std() == pytest.approx(25.5, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.5)
    assert np.abs(np.corrcoef(noise.reshape(200, -1)[:, :20].T) - np.eye(20)).max() < 0.4


# -- mixing ---------------------------------------------------------------------------------------------------------


def test_cutout_paints_one_square_black() -> None:
    white = many(np.full((12, 10, 3), 255, np.uint8))
    made, _ = augmented("cutout(size=4)", images=white)
    assert set(np.unique(made)) == {0, 255}
    black = (made == 0).all(axis=3)
    assert np.array_equal(black, black.any(axis=2)[:, :, None] & black.any(axis=1)[:, None, :])
    for axis, size in ((2, 12), (1, 10)):
        sides = black.any(axis=axis).sum(axis=1)
        assert (sides.min(), sides.max()) == (2, 4)
        assert (sides == 4).mean() == pytest.approx((size - 3) / size, abs=0.05)


def test_cutout_may_be_grey_and_wholly_inside() -> None:
    made, _ = augmented("cutout(size=4, fill=grey, inside=true)", images=many(np.full((12, 10, 3), 255, np.uint8)))
    assert set(np.unique(made)) == {127, 255}
    grey = (made == 127).all(axis=3)
    assert (grey.sum(axis=(1, 2)) == 16).all()
    tops, lefts = grey.any(axis=2).argmax(axis=1), grey.any(axis=1).argmax(axis=1)
    assert (set(tops), set(lefts)) == (set(range(9)), set(range(7)))
    with pytest.raises(DataError, match="does not fit into images of 12×10"):
        augmented("cutout(size=11, inside=true)", images=many(np.full((12, 10, 3), 255, np.uint8)))


def partners(values: Array) -> Array:
    return values.reshape(len(values) // 2, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)


def test_mixup_mixes_pixels_and_labels_by_the_same_share() -> None:
    labels = np.tile([0, 1], COUNT // 2)
    made, soft = augmented("mixup(alpha=1)", images=FLOATS, labels=labels)
    share = soft[np.arange(COUNT), labels]
    expected = share[:, None, None, None] * FLOATS + (1 - share)[:, None, None, None] * partners(FLOATS)
    np.testing.assert_allclose(made, expected, atol=1e-5)
    assert share.std() > 0.2
    assert np.abs(share - partners(share)).min() > 0  # each has a share of its own
    np.testing.assert_allclose(soft[np.arange(COUNT), 1 - labels], 1 - share, atol=1e-6)


def test_cutmix_counts_labels_by_the_pixels_that_are_seen() -> None:
    labels = np.tile([0, 1], 500)
    black_and_white = np.tile(np.array([0, 255], np.uint8), 500)[:, None, None, None] * np.ones(
        (1, 12, 10, 3), np.uint8
    )
    augment = build_augmentation(
        calls("cutmix(alpha=1)"), ArrayDataset({"train": {"image": black_and_white, "label": labels}}), 0
    )
    low = ops.arange(1000, dtype="int32")
    batch = {"image": ops.convert_to_tensor(black_and_white), "label": ops.convert_to_tensor(labels)}
    made = augment(batch, ops.cast(low, "uint32"), ops.cast(low * 0, "uint32"))
    soft, images = ops.convert_to_numpy(made["label"]), ops.convert_to_numpy(made["image"])
    np.testing.assert_allclose(soft[:, 1], (images == 255).mean(axis=(1, 2, 3)), atol=1e-6)
    foreign = (images != black_and_white).all(axis=3)
    assert np.array_equal(foreign, foreign.any(axis=2)[:, :, None] & foreign.any(axis=1)[:, None, :])
    assert 0.2 < foreign.mean() < 0.5
    assert foreign[:, 0, 0].mean() > 0.05  # boxes reach every corner
    assert foreign[:, -1, -1].mean() > 0.05


def test_mixing_twice_mixes_shares() -> None:
    _, once = augmented("cutmix(alpha=1)")
    _, twice = augmented("cutmix(alpha=1)", "mixup(alpha=1)")
    assert once.shape == twice.shape
    np.testing.assert_allclose(twice.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(twice + partners(twice), twice + partners(twice), rtol=1e-6)
    assert not np.allclose(once, twice)


def test_the_share_of_the_examples_that_are_mixed_is_as_asked_for() -> None:
    _, soft = augmented("mixup(alpha=1, probability=0.25)", images=many(FLOATS[0], COUNT), labels=np.arange(COUNT) % 2)
    assert (soft.max(axis=1) == 1).mean() == pytest.approx(0.75, abs=0.2)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 2.0, 8.0, 100.0])
def test_the_table_has_the_moments_of_the_beta_distribution(alpha: float) -> None:
    from modelyard.data.augment.mix import beta_table

    table = beta_table(alpha).astype(float)
    assert table.min() >= 0
    assert table.max() <= 1
    assert (np.diff(table) >= 0).all()
    assert table.mean() == pytest.approx(0.5, abs=1e-6)
    variance = 1 / (4 * (2 * alpha + 1))
    assert table.var() == pytest.approx(variance, rel=2e-3)
    kurtosis = -6 / (2 * alpha + 3)
    assert ((table - 0.5) ** 4).mean() / variance**2 - 3 == pytest.approx(kurtosis, abs=0.02)
    if alpha == 1:
        np.testing.assert_allclose(table, (np.arange(4096) + 0.5) / 4096, atol=1e-5)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_an_odd_share_of_the_batch_is_refused_where_neighbours_are_mixed(name: str) -> None:
    build_augmentation(calls(name), dataset(), 0, share=6)
    with pytest.raises(DataError, match=f"'{name}' mixes 2 neighbours .* multiple of 2; it is 3"):
        build_augmentation(calls(name), dataset(), 0, share=3)
    with pytest.raises(DataError, match="it is 3"):
        augmented(name, share=slice(0, 3))


def test_mixing_needs_classes() -> None:
    nameless = ArrayDataset({"train": {"image": IMAGES, "id": LABELS}})
    with pytest.raises(DataError, match="'mixup' mixes labels, but the labels of these examples are not classes"):
        build_augmentation(calls("mixup"), nameless, 0)


# -- RandAugment ----------------------------------------------------------------------------------------------------


def only(name: str, sign: float, images: Array, magnitude: float = 15) -> Array:
    """RandAugment that does one operation."""
    from modelyard.data.augment.build import ImageInfo
    from modelyard.data.augment.rand_augment import RandAugment
    from modelyard.data.catalog import RandAugmentOptions

    class Fixed:
        def integers(self, high: int, count: int) -> object:
            return ops.full((len(images), count), augment.names.index(name), "int32")

        def uniform(self, count: int) -> object:
            return ops.full((len(images), count), 0.0 if sign < 0 else 0.9, "float32")

    augment = RandAugment(RandAugmentOptions(operations=1, magnitude=magnitude))
    augment.prepare(ImageInfo("rand_augment", images.shape[1:], images.dtype.name, CLASSES))
    made = augment({"image": ops.convert_to_tensor(images)}, Fixed())["image"]  # type: ignore[arg-type]
    return np.asarray(ops.convert_to_numpy(made))


WEIGHTS = np.array([0.299, 0.587, 0.114])
COLOURS = IMAGES[:6].astype(float)
GREYED = (COLOURS @ WEIGHTS)[..., None]


@pytest.mark.parametrize(
    ("name", "sign", "expected"),
    [
        ("identity", 1, COLOURS),
        ("brightness", 1, COLOURS * 1.45),
        ("brightness", -1, COLOURS * 0.55),
        ("contrast", -1, COLOURS * 0.55 + 0.45 * GREYED.mean(axis=(1, 2), keepdims=True)),
        ("saturation", 1, COLOURS * 1.45 - 0.45 * GREYED),
        ("solarize", 1, np.where(COLOURS > 127.5, 255 - COLOURS, COLOURS)),
        ("posterize", 1, COLOURS // 4 * 4),
        (
            "autocontrast",
            1,
            (COLOURS - COLOURS.min(axis=(1, 2), keepdims=True)) * 255 / np.ptp(COLOURS, axis=(1, 2), keepdims=True),
        ),
        ("translate_x", 1, np.concatenate([COLOURS[:, :, 2:], COLOURS[:, :, :2] * 0], axis=2)),
        ("translate_y", -1, np.concatenate([COLOURS[:, :2] * 0, COLOURS[:, :-2]], axis=1)),
        ("shear_x", 1, [plain_warp(image, np.array([[1, 0, 0], [0.15, 1, 0]])) for image in COLOURS]),
        ("shear_y", -1, [plain_warp(image, np.array([[1, -0.15, 0], [0, 1, 0]])) for image in COLOURS]),
    ],
)
def test_an_operation_of_rand_augment_is_the_usual_one(name: str, sign: float, expected: Array) -> None:
    np.testing.assert_allclose(only(name, sign, IMAGES[:6]), np.clip(expected, 0, 255), atol=0.51)


def test_sharpness_of_rand_augment_blurs_or_sharpens_all_but_the_edge() -> None:
    image = np.zeros((1, 5, 5, 1), np.uint8)
    image[0, 2, 2] = 130
    blurred = only("sharpness", -1, image)[0, :, :, 0]  # 0.55 of the image, 0.45 of the blurred one
    expected = np.zeros((5, 5))
    expected[1:4, 1:4] = 0.45 * 10
    expected[2, 2] = 0.55 * 130 + 0.45 * 50
    np.testing.assert_allclose(blurred, expected, atol=0.51)
    flat = np.full((1, 5, 5, 1), 50, np.uint8)
    np.testing.assert_allclose(only("sharpness", 1, flat), flat, atol=0.01)


def test_rand_augment_applies_its_maps_one_after_the_other() -> None:
    from modelyard.data.augment.build import ImageInfo
    from modelyard.data.augment.rand_augment import MOVES, RandAugment
    from modelyard.data.catalog import RandAugmentOptions

    augment = RandAugment(RandAugmentOptions(operations=2, magnitude=30))
    augment.prepare(ImageInfo("rand_augment", (HEIGHT, WIDTH, 3), "uint8", CLASSES))
    maps = {name: np.eye(3) for name in MOVES}
    maps["rotate"][:2, :2] = [[np.cos(np.pi / 6), -0.5], [0.5, np.cos(np.pi / 6)]]
    maps["translate_x"][1, 2] = int(150 / 331 * WIDTH)
    maps["translate_y"][0, 2] = int(150 / 331 * HEIGHT)
    maps["shear_x"][1, 0] = maps["shear_y"][0, 1] = 0.3
    pairs = [(one, other) for one in MOVES for other in MOVES]
    choices = np.array([[augment.names.index(name) for name in pair] for pair in pairs], np.float32)
    made = augment._map(ops.convert_to_tensor(choices), ops.ones(choices.shape, "float32"))
    # What is turned, then moved: a new place is moved back, then turned back.
    expected = [(maps[one] @ maps[other])[:2].ravel() for one, other in pairs]
    np.testing.assert_allclose(np.stack([ops.convert_to_numpy(m) for m in made], axis=1), expected, atol=1e-6)


def test_rand_augment_chooses_each_operation_equally_often() -> None:
    image = IMAGES[3]
    made, _ = augmented("rand_augment(operations=1, magnitude=15)", images=many(image, 3000))
    kinds, counts = np.unique(made.reshape(3000, -1), axis=0, return_counts=True)
    # 13 operations, 9 of them with a sign: shears, translations, rotate, brightness, contrast, sharpness, saturation.
    assert len(kinds) == 13 + 9
    assert counts.max() < 1.4 * 3000 / 13
    assert counts.min() > 0.6 * 3000 / 26


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random_resized_crop(scale=[0.5, 0.2])", "scale"),
        ("random_resized_crop(scale=[0, 1])", "scale"),
        ("random_resized_crop(ratio=[0.5])", "ratio"),
        ("rotation(degrees=200)", "degrees"),
        ("hue(amount=0.6)", "amount"),
        ("rand_augment(magnitude=31)", "magnitude"),
        ("mixup(alpha=-1)", "alpha"),
    ],
)
def test_arguments_out_of_range_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_augmentation(calls(text), dataset(), 0)


def test_every_option_of_an_augmentation_is_described() -> None:
    for entry in AUGMENTATIONS.entries():
        if isinstance(entry.target, str):
            assert entry.summary
            assert all(field.description for field in entry.options.model_fields.values()), entry.name
