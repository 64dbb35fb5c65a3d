"""`--on_bad skip`: images that can't be decoded are left out of training, and nothing else changes."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.config import Config
from modelyard.config.durations import RunLength
from modelyard.data import left_out
from modelyard.data.dataset import ID, IMAGE, TRAIN
from modelyard.data.open_dataset import open_dataset
from modelyard.data.pipeline import Pipeline
from modelyard.errors import ConfigError, DataError
from photos import photo_folder, save_photo

BAD = ("cat/000.jpg", "dog/004.jpg", "emu/005.jpg")  # the first of all, too: it decides the size


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = photo_folder(tmp_path / "photos", 30)
    for name in BAD:
        path = folder / name
        path.write_bytes(path.read_bytes()[:300])
    return folder


def config(photos: Path, **options: Any) -> Config:
    chosen = {"model": "mlp", "image_size": 12, "train_batch_size": 4, "train_steps": 6, "on_bad": "skip"}
    return modelyard.load_config(dataset=str(photos), cache_dir=str(photos.parent / "cache"), **{**chosen, **options})


def train(photos: Path, **options: Any) -> Any:
    chosen = config(photos, **options)
    return modelyard.train_and_evaluate(chosen)


def test_the_default_is_an_error_that_names_the_file_and_the_option(photos: Path) -> None:
    with pytest.raises(DataError, match=r"jpg can't be decoded: .*--on_bad skip"):
        train(photos, on_bad="fail")


def test_bad_images_are_left_out_counted_and_named(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "modelyard"):
        train(photos, model_dir="run")
    assert f"3 example(s) can't be decoded and are left out: {', '.join(BAD)}" in caplog.text
    stored = json.loads(Path("run/manifest.json").read_text())["dataset"]
    assert sum(stored["sizes"].values()) == 27
    assert stored["left_out"]["train"]["count"] == 3
    assert list(stored["left_out"]["train"]["examples"]) == list(BAD)
    with Path("run/splits.csv").open() as file:
        rows = {int(row["row"]): row["example"] for row in csv.DictReader(file)}
    names = [path.relative_to(photos).as_posix() for path in sorted(photos.glob("*/*"))]
    assert rows
    assert all(names[row] == name and name not in BAD for row, name in rows.items())


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_those_of_the_folder_without_the_bad_files(photos: Path, resident: str, threads: int) -> None:
    def batches() -> list[np.ndarray[Any, Any]]:
        chosen = config(photos, resident=resident, input_threads=threads)
        dataset = open_dataset(chosen)
        pipeline = Pipeline(chosen, dataset, RunLength(dataset.size(TRAIN), 4, 6))
        try:
            if resident == "always":
                whole = pipeline.resident(TRAIN)
                assert whole is not None
                return [np.asarray(whole[IMAGE])[row] for row in pipeline.rows(0, 6)]
            found = []
            while len(found) < 6:
                with pipeline.training(len(found), 1) as (arrays, _):
                    found.append(np.array(arrays[IMAGE]))
            return found
        finally:
            pipeline.close()

    skipped = batches()
    for name in BAD:
        (photos / name).unlink()
    for one, other in zip(skipped, batches(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_bad_files_the_option_changes_nothing(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", 12)
    one, other = (open_dataset(config(folder, on_bad=on_bad)) for on_bad in ("fail", "skip"))
    assert one.fingerprint() == other.fingerprint()


def test_a_resumed_run_ends_with_the_same_weights(photos: Path) -> None:
    train(photos, model_dir="whole", deterministic=True)
    train(photos, model_dir="parts", deterministic=True, train_steps=2)
    train(photos, model_dir="parts", deterministic=True, train_steps=6)
    one, other = (next(Path(run, "checkpoints").glob("*06")) / "weights.safetensors" for run in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()


def test_a_file_that_becomes_bad_or_good_is_other_data(photos: Path) -> None:
    train(photos, model_dir="run", train_steps=2)
    path = photos / "dog/007.jpg"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))  # of the same size
    with pytest.raises(DataError, match=r"(?s)not the data this run started with.* dog/007\.jpg can't be decoded"):
        train(photos, model_dir="run")
    path.write_bytes(good)
    save_photo(photos / BAD[1], 4)
    with pytest.raises(DataError, match=f"(?s)not the data this run started with.*can be decoded now.*: {BAD[1]}"):
        train(photos, model_dir="run")


def test_a_file_that_becomes_bad_under_way_is_an_error(photos: Path) -> None:
    dataset = open_dataset(config(photos))
    victim = photos / dataset.name(TRAIN, 3)
    victim.write_bytes(b"\0" * 400)
    with pytest.raises(DataError, match=r"can't be decoded: .* It could be decoded when this started"):
        dataset.read(TRAIN, np.array([3]))


def test_the_option_cant_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", 12)
    train(folder, model_dir="run", on_bad="fail", train_steps=2)
    with pytest.raises(ConfigError, match="on_bad: is skip here, fail in the run"):
        train(folder, model_dir="run")


def test_unchanged_files_are_decoded_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset(config(photos)).fingerprint()
    monkeypatch.setattr(left_out, "_decode_all", lambda *_: pytest.fail("decoded again"))
    assert open_dataset(config(photos)).fingerprint() == first


def test_a_file_that_cant_be_read_at_the_moment_is_not_bad(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = left_out.FileExamples.load

    def failing(self: Any, index: int) -> bytes:
        if self.paths[index] == "dog/007.jpg":
            raise DataError("dog/007.jpg can't be read: Input/output error.") from OSError(5, "Input/output error")
        return load(self, index)

    monkeypatch.setattr(left_out.FileExamples, "load", failing)
    with pytest.raises(DataError, match="Input/output error"):
        open_dataset(config(photos))


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", 12)
    modelyard.convert(str(folder), tmp_path / "records", shards=1, processes=1)
    path = tmp_path / "records/train-00000-of-00001.tfrecord"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    dataset = open_dataset(config(tmp_path / "records", validation_fraction=0))
    assert dataset.size(TRAIN) == 11
    ids = dataset.read(TRAIN, np.arange(11))[ID].tolist()
    assert len({*range(12)} - {*ids}) == 1


def test_no_example_left_is_an_error(photos: Path) -> None:
    for path in photos.glob("*/*"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="no training example can be decoded"):
        open_dataset(config(photos))
