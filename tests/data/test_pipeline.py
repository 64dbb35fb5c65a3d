"""What an engine is given: the same examples resident or read ahead, on any number of workers."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import modelyard
from modelyard.config.durations import RunLength
from modelyard.data import pipeline as module
from modelyard.data.dataset import ArrayDataset, Arrays, Dataset
from modelyard.data.draws import HOST, SCALARS, Draws, crop_box, fold, halves
from modelyard.data.images import fill
from modelyard.data.open_dataset import load_dataset
from modelyard.data.order import Order
from modelyard.data.pipeline import Pipeline, share_of_batch
from modelyard.errors import UserError
from photos import photo_folder

BATCH = 8
CROP = "random_resized_crop(scale=[0.2, 1.0]), flip_left_right"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos") / "photos", 47)


class Made:
    """A pipeline of a config, with its dataset."""

    def __init__(self, dataset: str | Path | Dataset, share: NDArray[np.int64] | None = None, **options: Any) -> None:
        chosen = "digits" if isinstance(dataset, Dataset) else str(dataset)
        more = {} if isinstance(dataset, Dataset) else {"image_size": 12}
        self.config = modelyard.load_config(
            **{"model": "mlp", "dataset": chosen, "train_batch_size": BATCH, "train_steps": 40, **more, **options}
        )
        self.dataset = dataset if isinstance(dataset, Dataset) else load_dataset(self.config)
        run = RunLength(self.dataset.size("train"), self.config.train_batch_size, self.config.train_steps or 0)
        self.pipeline = Pipeline(self.config, self.dataset, run, share)

    def batches(self, step: int, stop: int, most: int = 3) -> Arrays:
        """Copies of what is streamed, batch after batch."""
        found = []
        while step < stop:
            with self.pipeline.training(step, min(most, stop - step)) as (arrays, count):
                found.append({name: array.copy() for name, array in arrays.items()})
            step += count
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


@pytest.fixture
def make() -> Any:
    made: list[Made] = []

    def build(*args: Any, **options: Any) -> Made:
        made.append(Made(*args, **options))
        return made[-1]

    yield build
    for one in made:
        one.pipeline.close()


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def numbered(size: int = 100, **splits: int) -> ArrayDataset:
    def part(count: int, first: int) -> dict[str, Any]:
        numbers = np.arange(first, first + count)
        return {"image": np.tile(numbers[:, None].astype(np.float32), (1, 3)), "label": numbers % 5}

    return ArrayDataset({"train": part(size, 0), **{name: part(n, 10_000) for name, n in splits.items()}})


# -- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "pieces"), [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2), (4, 2), (2, 4)])
def test_positions_are_dealt_out_without_gap_or_overlap(workers: int, pieces: int) -> None:
    shares = [share_of_batch(16, pieces, workers, worker) for worker in range(workers)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(16))
    for worker, share in enumerate(shares):
        # What a worker has of piece p is what its replica computes in piece p of one process.
        by_piece = share.reshape(pieces, -1)
        size = 16 // (pieces * workers)
        assert [row[0] for row in by_piece.tolist()] == [(p * workers + worker) * size for p in range(pieces)]


@pytest.mark.parametrize("augment", ["", CROP], ids=["whole", "cropped"])
@pytest.mark.parametrize(("workers", "pieces"), [(2, 1), (4, 1), (2, 2)])
def test_workers_together_read_exactly_the_global_batches_of_one(
    make: Any, photos: Path, workers: int, pieces: int, augment: str
) -> None:
    options = {"resident": "never", "augment": augment, "input_threads": 3}
    whole = make(photos, **options).batches(4, 11)  # over the end of an epoch
    dealt = {name: np.zeros_like(array).reshape(7, BATCH, *array.shape[1:]) for name, array in whole.items()}
    for worker in range(workers):
        share = share_of_batch(BATCH, pieces, workers, worker)
        mine = make(photos, share=share, **options).batches(4, 11, most=worker + 1)
        for name, array in mine.items():
            dealt[name][:, share] = array.reshape(7, len(share), *array.shape[1:])
    assert same({name: array.reshape(whole[name].shape) for name, array in dealt.items()}, whole)


def test_streamed_batches_are_those_of_the_order(make: Any, photos: Path) -> None:
    made = make(photos, resident="never")
    rows = made.pipeline.rows(3, 9)
    assert np.array_equal(rows, Order(0, made.dataset.size("train")).batches(3, 9, BATCH))
    expected = made.dataset.read("train", rows.reshape(-1))
    found = made.batches(3, 12)
    assert same(found, {name: expected[name] for name in found})
    assert set(found) == {"image", "label"}


# -- crops while decoding -------------------------------------------------------------------------------------------


def test_a_crop_hangs_on_its_position_alone(make: Any, photos: Path) -> None:
    options = {"resident": "never", "augment": CROP}
    one = make(photos, **options)
    assert one.pipeline.crops_while_decoding
    straight = one.batches(0, 14)
    for step in (13, 2, 7):  # jumps, there and back
        again, fresh = one.batches(step, step + 1), make(photos, **options).batches(step, step + 1)
        part = {name: array[step * BATCH : (step + 1) * BATCH] for name, array in straight.items()}
        assert same(again, part)
        assert same(fresh, part)
    shown, positions = one.pipeline.training_examples(7, 5)
    assert positions.tolist() == list(range(56, 61))
    assert same(shown, {name: array[56:61] for name, array in straight.items()})


def test_a_crop_is_the_box_of_the_draws_taken_from_the_whole_file(make: Any, photos: Path) -> None:
    made = make(photos, resident="never", augment=CROP, random_seed=11)
    found = made.batches(5, 6)["image"]
    positions = np.arange(40, 48)
    draws = Draws(fold(11, 0), *halves(positions.astype(np.uint64)), ops=HOST).uniform(4)
    items = made.dataset.splits["train"]
    for place, index in enumerate(made.pipeline.rows(5, 1)[0].tolist()):
        mine = draws[place].tolist()
        out = np.empty((12, 12, 3), np.uint8)
        fill(out, items.load(index), "crop", lambda h, w: crop_box(mine, h, w, (0.2, 1.0), ops=SCALARS), str)  # noqa: B023
        assert np.array_equal(found[place], out)


def test_crops_differ_between_epochs_seeds_and_examples(make: Any, photos: Path) -> None:
    made = make(photos, resident="never", augment=CROP)
    size = made.dataset.size("train")
    two_epochs = made.batches(0, 2 * size // BATCH + 1)["image"]
    rows = made.pipeline.order.indices(0, 2 * size)
    first, again = (np.flatnonzero(rows == 5)[i] for i in (0, 1))
    assert not np.array_equal(two_epochs[first], two_epochs[again])
    other = make(photos, resident="never", augment=CROP, random_seed=1)
    assert not np.array_equal(other.batches(0, 1)["image"], two_epochs[:BATCH])


def test_only_a_crop_that_comes_first_is_done_while_decoding(make: Any, photos: Path) -> None:
    assert not make(photos, augment="flip_left_right, random_resized_crop").pipeline.crops_while_decoding
    assert not make(photos).pipeline.crops_while_decoding
    assert not make(numbered(), augment="random_resized_crop").pipeline.crops_while_decoding


# -- resident -------------------------------------------------------------------------------------------------------


def test_what_is_streamed_is_what_is_resident(make: Any, photos: Path) -> None:
    resident, streamed = make(photos, resident="always"), make(photos, resident="never")
    assert streamed.pipeline.resident("train") is None
    held = resident.pipeline.resident("train")
    assert held is not None
    rows = resident.pipeline.rows(2, 9).reshape(-1)
    assert same({name: array[rows] for name, array in held.items()}, streamed.batches(2, 11))
    assert resident.pipeline.resident("train") is held, "it is read once"


def test_auto_holds_what_fits_together(make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(photos)
    sizes = one.dataset.sizes()
    example = 12 * 12 * 3 + 4
    assert one.pipeline.resident("train") is not None
    for budget, train, validation in [
        (sum(sizes.values()) * example, True, True),
        (sum(sizes.values()) * example - 1, True, False),
        (sizes["train"] * example - 1, False, True),
        (sizes["validation"] * example - 1, False, False),
    ]:
        monkeypatch.setattr(module, "RESIDENT_BYTES", budget)
        made = make(photos)
        assert (made.pipeline.resident("train") is not None) == train, budget
        assert (made.pipeline.resident("validation") is not None) == validation, budget


@pytest.mark.parametrize(
    ("device", "host", "is_resident"),
    [(100, 300, True), (99, 300, False), (100, 296, False), (1 << 40, 1 << 40, True), (0, 0, False)],
)
def test_auto_holds_what_device_and_host_have_room_for(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: int,
    host: int,
    is_resident: bool,
) -> None:
    made = make(numbered(25))
    size = made.pipeline._bytes("train")
    monkeypatch.setattr(module, "RESIDENT_BYTES", size - 1)
    monkeypatch.setattr(module, "available_memory", lambda: host * size // 100)
    pipeline = Pipeline(made.config, made.dataset, made.pipeline.run, None, lambda: device * size // 100)
    assert (pipeline.resident("train") is not None) == is_resident
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 50)
    assert (pipeline.resident("train") is not None) == is_resident, "a split stays what it is"
    assert Pipeline(made.config, made.dataset, made.pipeline.run, None).resident("train") is None


def test_the_log_says_what_is_resident_and_why_not(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    caplog.set_level(logging.INFO, "modelyard")
    make(photos).pipeline.resident("train")
    assert "the training data stays on the device: 0 MiB" in caplog.text
    make(photos, train_steps=2).batches(0, 1)
    assert caplog.messages[-1].endswith("threads: the run is shorter than an epoch")
    make(photos, resident="never").batches(0, 1)
    assert caplog.messages[-1].endswith("threads")
    monkeypatch.setattr(module, "RESIDENT_BYTES", 1 << 10)
    make(photos).batches(0, 1)
    assert caplog.messages[-1].endswith("threads: the split has 0.0 GiB, and at most 0.0 GiB stay on the device")


def test_a_split_that_becomes_resident_meanwhile_does_not_change_why_another_is_not(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    caplog.set_level(logging.INFO, "modelyard")
    pipeline = make(photos, train_steps=2).pipeline
    monkeypatch.setattr(module, "RESIDENT_BYTES", pipeline._bytes("train"))
    read_ahead, may_begin = pipeline._read_ahead, threading.Event()

    def late(request: Any, *rest: Any) -> Any:
        assert request is not module.TrainingPart or may_begin.wait(60)
        return read_ahead(request, *rest)

    monkeypatch.setattr(pipeline, "_read_ahead", late)
    pipeline.start(0)
    assert pipeline.resident("validation") is not None
    may_begin.set()
    pipeline._training.result()
    assert caplog.messages[-1].endswith("threads: the run is shorter than an epoch")


@pytest.mark.parametrize("size", [1, 63, 64, 65, 129])
def test_every_row_of_a_resident_split_is_read(make: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "STREAM_BYTES", 1)  # 64 examples at a time
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "bar", lambda *_: contextlib.nullcontext(lambda *numbers: told.append(numbers)))
    made = make(numbered(size), resident="always")

    def read(split: str, indices: NDArray[np.int64], out: Arrays) -> None:
        out["image"][...] = indices[:, None]
        out["label"][...] = indices

    monkeypatch.setattr(made.dataset, "arrays", lambda split: None)
    monkeypatch.setattr(made.dataset, "read_into", lambda split, indices, out, crop=None: read(split, indices, out))
    held = made.pipeline.resident("train")
    assert held["label"].tolist() == held["image"][:, 2].tolist() == list(range(size))
    assert told == [(min(done, size), size) for done in range(min(64, size), size + 64, 64)]


def test_auto_does_not_read_all_for_a_few_steps(make: Any, photos: Path) -> None:
    made = make(photos, train_steps=2)
    assert made.pipeline.resident("train") is None
    assert made.pipeline.resident("validation") is not None
    assert make(numbered(), train_steps=2).pipeline.resident("train") is not None, "it is in memory already"


def test_always_and_never_are_what_they_say(make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESIDENT_BYTES", 1)
    assert make(photos, resident="always", train_steps=1).pipeline.resident("train") is not None
    monkeypatch.setattr(module, "RESIDENT_BYTES", 1 << 40)
    assert make(photos, resident="never").pipeline.resident("train") is None
    assert make(numbered(), resident="never").pipeline.resident("train") is None


def test_images_that_are_cropped_while_decoding_are_never_held(make: Any, photos: Path) -> None:
    made = make(photos, augment=CROP)
    assert made.pipeline.resident("train") is None
    assert made.pipeline.resident("validation") is not None
    with pytest.raises(UserError, match=r"random_resized_crop .* Set resident to 'auto'"):
        make(photos, augment=CROP, resident="always")


def test_arrays_are_streamed_too(make: Any) -> None:
    made = make(numbered(), resident="never")
    found = made.batches(5, 30)
    assert np.array_equal(found["image"][:, 0], made.pipeline.rows(5, 25).reshape(-1))


# -- order ----------------------------------------------------------------------------------------------------------


def test_blocks_use_the_two_levels(make: Any) -> None:
    data = numbered(2000)
    made = make(data, shuffle="blocks", resident="never", random_seed=3)
    expected = Order(3, 2000, levels=2).batches(240, 20, BATCH)  # over the end of an epoch
    assert np.array_equal(made.pipeline.rows(240, 20), expected)
    assert np.array_equal(made.batches(240, 260)["image"][:, 0], expected.reshape(-1))
    assert not np.array_equal(make(data, shuffle="full", random_seed=3).pipeline.rows(240, 20), expected)
    assert np.array_equal(make(data, random_seed=3).pipeline.rows(240, 20), Order(3, 2000).batches(240, 20, BATCH)), (
        "auto is full for a small set"
    )


# -- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 23, 24, 50])
def test_an_evaluation_counts_every_example_exactly_once(make: Any, resident: str, batch_size: int) -> None:
    made = make(numbered(validation=23), resident=resident, input_threads=3)
    seen = []
    for batch, weights in made.pipeline.evaluation("validation", batch_size):
        assert batch["image"].shape == (batch_size, 3)
        assert weights.shape == (batch_size,)
        assert set(weights) <= {0.0, 1.0}
        seen += batch["image"][weights > 0, 0].tolist()
    assert seen == list(range(10_000, 10_023)), "all, once, in storage order"


def test_an_evaluation_of_files_is_the_same_held_and_streamed(make: Any, photos: Path) -> None:
    found = []
    for resident in ("always", "never"):
        made = make(photos, resident=resident)
        batches = made.pipeline.evaluation("validation", 3)
        found.append([({k: v.copy() for k, v in batch.items()}, weights) for batch, weights in batches])
    assert len(found[0]) == len(found[1]) > 1
    for (one, ones), (two, twos) in zip(*found, strict=True):
        assert same(one, two)
        assert np.array_equal(ones, twos)


def test_an_evaluation_sees_whole_images_even_where_training_crops(make: Any, photos: Path) -> None:
    made = make(photos, resident="never", augment=CROP)
    batch, _ = next(made.pipeline.evaluation("train", 4))
    assert np.array_equal(batch["image"], made.dataset.read("train", np.arange(4))["image"])


# -- threads --------------------------------------------------------------------------------------------------------


def test_threads_end_when_the_pipeline_is_closed_or_an_evaluation_is_broken_off(make: Any, photos: Path) -> None:
    before = set(threading.enumerate())
    made = make(photos, resident="never", input_threads=5)
    made.batches(0, 2)
    assert len(set(threading.enumerate()) - before) == 5
    evaluation = made.pipeline.evaluation("validation", 2)
    next(evaluation)
    assert len(set(threading.enumerate()) - before) == 10
    evaluation.close()  # type: ignore[attr-defined]
    made.pipeline.close()
    assert set(threading.enumerate()) == before
    made.batches(3, 5)  # and it can be used again


def test_a_damaged_file_is_named_at_its_batch(make: Any, tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", 40)
    made = make(folder, resident="never")
    index = int(made.pipeline.rows(4, 1)[0, 3])
    name = made.dataset.name("train", index)
    (folder / name).write_bytes((folder / name).read_bytes()[:300])
    made.batches(0, 4)
    with pytest.raises(UserError, match=f"{name} can't be decoded"):
        made.batches(4, 5)


# -- memory ---------------------------------------------------------------------------------------------------------

HUGE = 10**12


def test_a_batch_that_cannot_fit_in_memory_is_an_error_in_words() -> None:
    with pytest.raises(UserError, match=r"^train_batch_size is too large: 1,000,000,000,000 examples .* GiB are free"):
        modelyard.train(model="mlp", dataset="digits", train_steps=1, train_batch_size=HUGE, model_dir="run")
    with pytest.raises(UserError, match="train_batch_size is too large"):
        modelyard.find_learning_rate(model="mlp", dataset="digits", train_batch_size=HUGE)


def test_batches_that_are_read_ahead_fit_in_memory_too(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(photos, resident="never")
    monkeypatch.setattr(module, "_ALWAYS_ALLOWED", 100)
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="train_batch_size is too large: 8 examples of 436 bytes"):
        made.batches(0, 1)
    with pytest.raises(UserError, match=r"eval_batch_size is too large: 50 examples .* Give at most 1\."):
        next(made.pipeline.evaluation("validation", 50))
