"""Random numbers as arithmetic, and the augmentation that is made of them. This file imports TensorFlow."""

import subprocess
import sys

import numpy as np
import pytest
from keras import ops
from numpy.typing import NDArray

from conftest import compiled
from modelyard.config.calls import Call
from modelyard.data.augment.build import build_augmentation
from modelyard.data.augment.geometry import FlipLeftRight, PadAndCrop
from modelyard.data.catalog import FlipLeftRightOptions, PadAndCropOptions
from modelyard.data.dataset import ArrayDataset
from modelyard.data.draws import HOST, Draws, fold, mix, mix_host
from modelyard.errors import DataError, UserError
from waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("two_devices")
Words = NDArray[np.uint32]


# -- the same arithmetic in plain NumPy, from its description ---------------------------------------------------------


def plain_mix(words: Words) -> Words:
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x7FEB352D)
    words = words ^ (words >> np.uint32(15))
    words = words * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


def plain_words(seed: int, positions: NDArray[np.uint64], first: int, count: int) -> Words:
    low, high = (positions & np.uint64(0xFFFFFFFF)).astype(np.uint32), (positions >> np.uint64(32)).astype(np.uint32)
    key = plain_mix(low ^ np.uint32(fold(seed)))
    key = plain_mix(plain_mix(key ^ high) + low)
    salts = plain_mix(np.array([0x85EBCA6B + first + i for i in range(count)], np.uint32))
    return plain_mix(key[:, None] ^ salts[None, :])


def plain_uniform(seed: int, positions: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float32]:
    return (plain_words(seed, positions, first, count) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def halves(positions: NDArray[np.uint64]) -> tuple[object, object]:
    low = ops.convert_to_tensor((positions & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    high = ops.convert_to_tensor((positions >> np.uint64(32)).astype(np.uint32))
    return low, high


def draws(seed: int, positions: NDArray[np.uint64]) -> Draws:
    return Draws(seed, *halves(positions))


def numpy(tensor: object) -> NDArray[np.generic]:
    return np.asarray(ops.convert_to_numpy(tensor))


POSITIONS = np.array([0, 1, 2, 999, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**40 + 3, 2**63], np.uint64)
MANY = np.arange(20_000, dtype=np.uint64)


# -- draws ----------------------------------------------------------------------------------------------------------


def test_the_scrambling_agrees_with_plain_numpy_and_plain_python() -> None:
    words = np.array([0, 1, 2, 0xFFFFFFFF, 0x80000000, 12345678], np.uint32)
    assert numpy(mix(ops.convert_to_tensor(words))).tolist() == plain_mix(words).tolist()
    assert [mix_host(int(word)) for word in words] == plain_mix(words).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_draws_agree_with_plain_numpy(seed: int) -> None:
    made = draws(seed, POSITIONS)
    assert np.array_equal(numpy(made.words(3)), plain_words(seed, POSITIONS, 0, 3))
    assert np.array_equal(numpy(made.uniform(2)), plain_uniform(seed, POSITIONS, 3, 2))
    integers = np.floor(plain_uniform(seed, POSITIONS, 5, 4) * np.float32(9)).astype(np.int32)
    assert np.array_equal(numpy(made.integers(9, 4)), integers)


def test_these_draws_never_change() -> None:
    """A run that goes on under a later version must see the same augmentation."""
    assert fold(0) == 14768737
    assert numpy(draws(0, POSITIONS[[0, 1, 6]]).words(2)).tolist() == [
        [4281777189, 53313895],
        [1964743034, 3824199961],
        [1926792052, 2505774448],
    ]


def test_these_fields_never_change() -> None:
    made = draws(5, POSITIONS[[0, 6]])
    assert (numpy(made.field(5)) * 2**17).astype(int).tolist() == [
        [56225, 92025, 73483, 71119, 87733],
        [40373, 24927, 17303, 18229, 110093],
    ]
    assert np.round(numpy(made.normal(3)).astype(float), 5).tolist() == [
        [0.43488, 0.75904, -0.67221],
        [0.09667, 1.54709, -1.60536],
    ]


@pytest.mark.parametrize("kind", ["words", "uniform", "integers", "field", "normal"])
def test_the_host_draws_the_same_bits(kind: str) -> None:
    arguments = (1000, 3) if kind == "integers" else (7,)
    low, high = (POSITIONS & np.uint64(0xFFFFFFFF)).astype(np.uint32), (POSITIONS >> np.uint64(32)).astype(np.uint32)
    on_host, on_device = Draws(3, low, high, ops=HOST), draws(3, POSITIONS)
    for _ in range(2):
        one, other = getattr(on_host, kind)(*arguments), numpy(getattr(on_device, kind)(*arguments))
        assert isinstance(one, np.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_draws_on_the_host_import_no_keras() -> None:
    program = "import sys, numpy as np; from modelyard.data.draws import HOST, Draws; n = np.zeros(1, np.uint32); "
    program += "from modelyard.data.draws import crop_box; crop_box(Draws(0, n, n, ops=HOST).uniform(4)[0], 9, 9); "
    program += "sys.exit('keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program], check=False, timeout=PATIENCE).returncode == 0


def test_a_field_is_one_draw_of_numbers_that_tell_positions_elements_and_draws_apart() -> None:
    made = draws(0, MANY[:400])
    fields = [numpy(made.field(101)).astype(float) for _ in range(2)]
    both = np.stack(fields)
    assert both.min() > 0
    assert both.max() < 1
    assert abs(both.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / both.size)
    assert abs(both.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / both.size)
    for one, other in ((both[0], both[1]), (both[:, :-1], both[:, 1:]), (both[:, :, :50], both[:, :, 51:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)
    after = draws(0, MANY[:400])
    after.words(2)
    assert np.array_equal(numpy(made.words()), numpy(after.words()))


def test_normal_draws_are_normal() -> None:
    values = numpy(draws(0, MANY[:300]).normal(301)).astype(float)
    count = values.size
    assert abs(values.mean()) < 5 / np.sqrt(count)
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / count)
    assert abs((values**4).mean() - 3) < 5 * np.sqrt(96 / count)
    assert abs((np.abs(values) < 1).mean() - 0.6827) < 5 * np.sqrt(0.25 / count)


def test_draws_depend_on_seed_and_position_not_on_the_batch_they_come_in() -> None:
    positions = np.arange(40, dtype=np.uint64) + np.uint64(2**32 - 20)
    together = numpy(draws(7, positions).uniform(3))
    halved = [numpy(draws(7, part).uniform(3)) for part in np.split(positions, [13])]
    assert np.array_equal(np.concatenate(halved), together)
    backwards = numpy(draws(7, positions[::-1].copy()).uniform(3))
    assert np.array_equal(backwards[::-1], together)
    alone = [numpy(draws(7, positions[i : i + 1]).uniform(3))[0] for i in (0, 19, 20, 39)]
    assert np.array_equal(alone, together[[0, 19, 20, 39]])


def test_draws_one_by_one_are_the_draws_together() -> None:
    made = draws(3, POSITIONS)
    one_by_one = np.concatenate([numpy(made.words()) for _ in range(4)], axis=1)
    assert np.array_equal(one_by_one, numpy(draws(3, POSITIONS).words(4)))


def test_the_high_word_of_the_position_matters() -> None:
    low = np.arange(1000, dtype=np.uint64)
    words = [numpy(draws(0, low + np.uint64(high << 32)).words())[:, 0] for high in (0, 1, 2, 2**31)]
    for i in range(4):
        for j in range(i):
            assert (words[i] == words[j]).mean() < 0.01


def test_the_seed_matters_in_all_its_bits() -> None:
    seeds = [0, 1, 2, 2**31, 2**32, 2**33, 2**62]
    words = [tuple(numpy(draws(seed, POSITIONS).words())[:, 0].tolist()) for seed in seeds]
    assert len(set(words)) == len(seeds)


def test_fold_depends_on_every_word_and_on_their_order() -> None:
    folded = [fold(), fold(0), fold(0, 0), fold(1, 0), fold(0, 1), fold(1 << 32, 0), fold(1, 2), fold(2, 1)]
    assert len(set(folded)) == len(folded)


def test_uniform_draws_are_uniform() -> None:
    values = numpy(draws(0, MANY).uniform(5)).astype(float)
    assert values.min() >= 0
    assert values.max() < 1
    count = len(MANY)
    for column in values.T:
        assert abs(column.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / count)
        assert abs(column.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / count)
        bins = np.histogram(column, bins=16, range=(0, 1))[0]
        assert ((bins - count / 16) ** 2 / (count / 16)).sum() < 50  # chi-square, 15 degrees of freedom


def test_neighbours_and_draws_are_not_correlated() -> None:
    values = numpy(draws(0, MANY).uniform(3)).astype(float)
    limit = 5 / np.sqrt(len(MANY))
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < limit
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < limit
    other = numpy(draws(1, MANY).uniform())[:, 0]
    assert abs(np.corrcoef(values[:, 0], other)[0, 1]) < limit


def test_whole_numbers_are_all_there_and_equally_often() -> None:
    counts = np.bincount(numpy(draws(0, MANY).integers(9))[:, 0])
    assert len(counts) == 9
    assert np.abs(counts - len(MANY) / 9).max() < 5 * np.sqrt(len(MANY) / 9)


def test_whole_numbers_stay_below_their_limit_for_the_largest_word() -> None:
    class Largest(Draws):
        def words(self, count: int = 1) -> object:
            return ops.convert_to_tensor(np.full((1, count), 0xFFFFFFFF, np.uint32))

    largest = Largest(0, *halves(POSITIONS[:1]))
    limits = [*range(1, 300), 2**15 - 1, 2**15, 2**15 + 1, 2**20 + 1, 2**24 - 1]
    assert [int(numpy(largest.integers(limit))[0, 0]) for limit in limits] == [limit - 1 for limit in limits]


# -- augmentation ---------------------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(0).integers(1, 256, (50, 6, 5, 3)).astype(np.float32)
DATASET = ArrayDataset({"train": {"image": IMAGES, "label": np.arange(50) % 2}})
PLACES = np.arange(50, dtype=np.uint64) + np.uint64(2**32 - 25)


@pytest.mark.parametrize("padding", [1, 2, 4, 7])
def test_pad_and_crop_is_the_crop_of_numpy_at_the_same_offsets(padding: int) -> None:
    batch = {"image": ops.convert_to_tensor(IMAGES), "label": "kept"}
    made = PadAndCrop(PadAndCropOptions(padding=padding))(batch, draws(5, PLACES))
    offsets = numpy(draws(5, PLACES).integers(2 * padding + 1, 2))
    padded = np.pad(IMAGES, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    expected = np.stack([p[top : top + 6, left : left + 5] for p, (top, left) in zip(padded, offsets, strict=True)])
    assert np.array_equal(numpy(made["image"]), expected)
    assert made["label"] == "kept"
    assert len({tuple(offset) for offset in offsets.tolist()}) > 5


def test_flip_mirrors_whole_examples_about_half_of_them() -> None:
    count = 2000
    images = np.random.default_rng(1).integers(0, 256, (count, 3, 4, 2)).astype(np.float32)
    places = np.arange(count, dtype=np.uint64)
    made = numpy(
        FlipLeftRight(FlipLeftRightOptions())({"image": ops.convert_to_tensor(images)}, draws(0, places))["image"]
    )
    flipped = (made == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (made == images).all(axis=(1, 2, 3))
    assert (flipped ^ kept).all()
    assert abs(flipped.mean() - 0.5) < 5 * 0.5 / np.sqrt(count)


@pytest.mark.parametrize(("probability", "share"), [(0.0, 0.0), (1.0, 1.0), (0.2, 0.2)])
def test_flip_follows_its_probability(probability: float, share: float) -> None:
    count = 2000
    images = np.tile(np.array([0.0, 1.0], np.float32).reshape(1, 1, 2, 1), (count, 1, 1, 1))
    flip = FlipLeftRight(FlipLeftRightOptions(probability=probability))
    made = numpy(flip({"image": ops.convert_to_tensor(images)}, draws(0, np.arange(count, dtype=np.uint64)))["image"])
    assert abs(made[:, 0, 0, 0].mean() - share) <= 5 * np.sqrt(share * (1 - share) / count)


def augmented(calls: list[Call], seed: int, rows: slice) -> NDArray[np.generic]:
    augment = build_augmentation(calls, DATASET, seed)
    return numpy(augment({"image": ops.convert_to_tensor(IMAGES[rows])}, *halves(PLACES[rows]))["image"])


BOTH = [Call("pad_and_crop", {"padding": 2}), Call("flip_left_right")]


def test_an_example_is_augmented_the_same_in_any_batch() -> None:
    together = augmented(BOTH, 3, slice(None))
    apart = [augmented(BOTH, 3, slice(at, at + 10)) for at in range(0, 50, 10)]
    assert np.array_equal(np.concatenate(apart), together)
    assert not np.array_equal(augmented(BOTH, 4, slice(None)), together)


def test_augmentations_are_done_in_order_each_with_draws_of_its_own() -> None:
    first = PadAndCrop(PadAndCropOptions(padding=2))(
        {"image": ops.convert_to_tensor(IMAGES)}, draws(fold(3, 0), PLACES)
    )
    both = FlipLeftRight(FlipLeftRightOptions())(first, draws(fold(3, 1), PLACES))
    assert np.array_equal(augmented(BOTH, 3, slice(None)), numpy(both["image"]))


def test_no_augmentation_changes_nothing() -> None:
    assert np.array_equal(augmented([], 0, slice(None)), IMAGES)


def test_a_compiled_step_augments_as_an_eager_one() -> None:
    augment = compiled(build_augmentation(BOTH, DATASET, 3))
    made = augment({"image": ops.convert_to_tensor(IMAGES)}, *halves(PLACES))
    assert np.array_equal(numpy(made["image"]), augmented(BOTH, 3, slice(None)))


def test_augmentation_needs_images() -> None:
    flat = ArrayDataset({"train": {"image": np.zeros((4, 7), np.uint8), "label": np.arange(4)}})
    with pytest.raises(DataError, match=r"height × width × channels; these examples have shape \(7,\)"):
        build_augmentation(BOTH, flat, 0)
    build_augmentation([], flat, 0)


def test_a_wrong_argument_of_an_augmentation_is_named() -> None:
    with pytest.raises(UserError, match="pad_and_crop"):
        build_augmentation([Call("pad_and_crop", {"padding": 0})], DATASET, 0)
