"""The box of a random resized crop, on the host. The device must choose the same one."""

import numpy as np
import pytest

from modelyard.data.draws import HOST, SCALARS, Draws, crop_box

WORDS = np.arange(20_000, dtype=np.uint32)
UNIFORM = Draws(1, WORDS, np.zeros_like(WORDS), ops=HOST).uniform(4).T.copy()
SIZES = [(224, 224), (32, 32), (100, 300), (500, 375), (31, 900), (900, 31), (2, 3), (1, 1)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_box_is_whole_and_inside(height: int, width: int) -> None:
    top, left, tall, wide = crop_box(UNIFORM, height, width)
    for value in (top, left, tall, wide):
        assert value.dtype == np.float32
        assert np.array_equal(value, np.round(value))
    assert min(top.min(), left.min()) >= 0
    assert min(tall.min(), wide.min()) >= 1
    assert (top + tall).max() <= height
    assert (left + wide).max() <= width


@pytest.mark.parametrize(("height", "width"), SIZES[:4])
def test_boxes_have_the_area_and_ratio_asked_for(height: int, width: int) -> None:
    *_, tall, wide = (value.astype(float) for value in crop_box(UNIFORM, height, width, (0.2, 0.6), (0.5, 2.0)))
    area = tall * wide / (height * width)
    rounding = 1 / tall.min() + 1 / wide.min()
    assert (wide / tall).min() > 0.5 * (1 - rounding)
    assert (wide / tall).max() < 2 * (1 + rounding)
    assert area.max() < 0.6 * (1 + rounding)
    if width < 2 * height:
        assert area.min() > 0.2 * (1 - rounding)
        assert abs(area.mean() - 0.4) < 0.01
        assert abs(np.log(wide / tall).mean()) < 0.05
        assert np.log(wide / tall).std() > 0.25


@pytest.mark.parametrize(("height", "width"), [(200, 300), (300, 200), (250, 250)])
def test_the_ratio_gives_way_before_the_area(height: int, width: int) -> None:
    *_, tall, wide = crop_box(UNIFORM, height, width, (0.9, 0.9), (0.1, 10.0))
    np.testing.assert_allclose(tall * wide / (height * width), 0.9, atol=0.006)


def test_every_place_is_taken_equally_often() -> None:
    top, left, *_ = crop_box(UNIFORM, 8, 8, (0.25, 0.25), (1.0, 1.0))
    for start in (top, left):
        counts = np.bincount(start.astype(int), minlength=5)
        assert len(counts) == 5
        assert ((counts - 4000) ** 2 / 4000).sum() < 30  # chi-square, 4 degrees of freedom


def test_the_whole_image_is_a_box_too() -> None:
    for values in zip(*crop_box(UNIFORM, 20, 20, (1.0, 1.0), (0.75, 1.3333)), strict=True):
        assert [int(value) for value in values] == [0, 0, 20, 20]


def test_the_largest_number_below_one_stays_inside() -> None:
    largest = np.full((4, 1), np.nextafter(np.float32(1), np.float32(0)), np.float32)
    for height, width in SIZES:
        top, left, tall, wide = crop_box(largest, height, width)
        assert top + tall <= height
        assert left + wide <= width


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_device_chooses_the_same_box_as_the_host(height: int, width: int) -> None:
    from keras import ops

    on_device = crop_box([ops.convert_to_tensor(u) for u in UNIFORM], height, width, ops=ops)
    for one, other in zip(crop_box(UNIFORM, height, width), on_device, strict=True):
        assert np.array_equal(one, ops.convert_to_numpy(other))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_boxes_one_by_one_are_the_boxes_together(height: int, width: int) -> None:
    together = np.stack(crop_box(UNIFORM[:, :2000], height, width), axis=1)
    alone = [crop_box(u, height, width, ops=SCALARS) for u in UNIFORM[:, :2000].T.tolist()]
    # Plain numbers are float64: once in many boxes a side or a place is rounded to the other side.
    assert np.abs(together - alone).max() <= 1
    assert (together != alone).mean() < 0.001
