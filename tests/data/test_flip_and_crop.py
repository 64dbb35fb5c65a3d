"""Flips that alternate, and crops of reflected borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelyard.config.calls import Call, build_component
from modelyard.data.draws import HOST, Draws
from modelyard.errors import DataError
from modelyard.registry import AUGMENTATIONS

pytestmark = pytest.mark.usefixtures("two_devices")
COUNT = 400
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 6, 8, 3), np.uint8)


def run(call: str, images: Any = IMAGES, seed: int = 0, first: int = 0, **where: Any) -> Any:
    from keras import ops

    low = np.arange(first, first + len(images), dtype=np.uint32)
    where = {name: ops.convert_to_tensor(np.asarray(value, np.int32)) for name, value in where.items()}
    draws = Draws(seed, ops.convert_to_tensor(low), ops.convert_to_tensor(low * 0), **where)
    made = build_component(Call.parse(call), AUGMENTATIONS)({"image": ops.convert_to_tensor(images)}, draws)["image"]
    return np.asarray(made)


def mirrored(made: Any, images: Any = IMAGES) -> Any:
    flipped = (made == images[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (flipped | (made == images).all(axis=(1, 2, 3))).all()
    return flipped


def test_each_example_is_mirrored_every_other_epoch_wherever_it_stands() -> None:
    rows, call = np.arange(COUNT), "flip_left_right(alternate=true)"
    epochs = [mirrored(run(call, rows=rows, epochs=rows * 0 + epoch, first=epoch * COUNT)) for epoch in range(4)]
    assert 0.4 < epochs[0].mean() < 0.6
    np.testing.assert_array_equal(epochs[1], ~epochs[0])
    np.testing.assert_array_equal(epochs[2], epochs[0])
    np.testing.assert_array_equal(epochs[3], ~epochs[0])
    order = np.random.default_rng(1).permutation(COUNT)
    shuffled = mirrored(run(call, IMAGES[order], rows=order, epochs=order * 0), IMAGES[order])
    np.testing.assert_array_equal(shuffled, epochs[0][order])
    assert 0.3 < (mirrored(run(call, seed=1, rows=rows, epochs=rows * 0)) == epochs[0]).mean() < 0.7


def test_a_batch_over_the_end_of_an_epoch_has_both() -> None:
    rows, epochs = np.array([3, 4, 3, 4]), np.array([0, 0, 1, 1])
    images = IMAGES[rows]
    flipped = mirrored(run("flip_left_right(alternate=true)", images, rows=rows, epochs=epochs), images)
    assert (flipped[:2] != flipped[2:]).all()


def test_words_of_rows_are_the_same_on_the_host() -> None:
    from keras import ops

    low, rows = np.arange(9, dtype=np.uint32), np.arange(9, dtype=np.int32) * 1000
    host = Draws(5, low, low * np.uint32(0), ops=HOST, rows=rows, epochs=rows).row_words()
    tensors = [ops.convert_to_tensor(value) for value in (low, low * 0, rows)]
    device = Draws(5, tensors[0], tensors[1], rows=tensors[2], epochs=tensors[2]).row_words()
    assert np.asarray(device).tolist() == np.asarray(host).tolist()
    assert len(set(np.asarray(host).tolist())) == 9


def test_without_knowing_the_examples_an_alternating_flip_says_so() -> None:
    with pytest.raises(DataError, match="needs the rows and epochs"):
        run("flip_left_right(alternate=true)")


def test_a_reflected_crop_is_a_crop_of_the_reflected_image() -> None:
    made = run("pad_and_crop(padding=3, fill=reflect)")
    assert made.dtype == np.uint8
    padded = np.pad(IMAGES, [(0, 0), (3, 3), (3, 3), (0, 0)], mode="reflect")
    crops = np.stack([padded[:, y : y + 6, x : x + 8] for y in range(7) for x in range(7)])
    places = (crops == made).all(axis=(2, 3, 4))
    assert places.any(axis=0).all()
    assert set(places.argmax(axis=0)) == set(range(49))


def test_black_and_reflected_crops_move_by_the_same_draws() -> None:
    black, reflected = (run(f"pad_and_crop(padding=2, fill={fill})") for fill in ("black", "reflect"))
    inside = black.any(axis=3)
    np.testing.assert_array_equal(black[inside], reflected[inside])
    assert not inside.all()


def test_an_image_is_not_reflected_beyond_its_size() -> None:
    from modelyard.data.augment.build import ImageInfo

    step = build_component(Call.parse("pad_and_crop(padding=6, fill=reflect)"), AUGMENTATIONS)
    with pytest.raises(DataError, match=r"reflected by 5 pixels at most; padding is 6"):
        step.prepare(ImageInfo("pad_and_crop", (6, 8, 3), "uint8", 10))
