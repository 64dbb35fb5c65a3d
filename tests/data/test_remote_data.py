"""Datasets at URLs: a real S3 server on loopback, and the batches of the same files on the disk."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import modelyard
from conftest import environment
from modelyard import storage
from modelyard.config.durations import RunLength
from modelyard.data.dataset import Dataset
from modelyard.data.inspection import data_info, verify_data
from modelyard.data.open_dataset import load_dataset, open_stored
from modelyard.data.pipeline import Pipeline
from modelyard.data.records.convert import convert
from modelyard.data.sources.remote import local_tree
from modelyard.errors import DataError
from modelyard.system import console
from object_store import BUCKET, object_store
from photos import photo, photo_folder, save_photo
from waiting import PATIENCE


@pytest.fixture(scope="module", autouse=True)
def _store() -> Iterator[None]:
    with object_store():
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(request: pytest.FixtureRequest, cache: Path) -> str:
    """A folder of the test's own."""
    return f"s3://{BUCKET}/{request.node.originalname}"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is downloaded, as it happens."""
    seen: list[str] = []
    real = storage.download

    def download(url: str, local: Path, progress: storage.Progress | None = None) -> None:
        seen.append(url)
        real(url, local, progress)

    monkeypatch.setattr(storage, "download", download)
    return seen


def put(folder: Path, url: str) -> None:
    """Copies a folder to the store."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")


def opened(source: str, **options: Any) -> Dataset:
    return open_stored(modelyard.load_config(dataset=source, **options))


def batches(source: str, **options: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Everything training is given in five steps, and all examples with their ids."""
    config = modelyard.load_config(
        dataset=source, train_batch_size=4, train_steps=5, validation_fraction=0.2, **options
    )
    dataset = load_dataset(config)
    pipeline = Pipeline(config, dataset, RunLength(dataset.size("train"), 4, 5))
    found = [pipeline.training_examples(step, 4)[0] for step in range(5)]
    return found + [dict(dataset.read(split, np.arange(size))) for split, size in sorted(dataset.sizes().items())]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with everything that a dataset can be."""
    top = tmp_path_factory.mktemp("files")
    photo_folder(top / "photos", 13)
    convert(str(top / "photos"), top / "records", shards=3, processes=1)
    images = sorted((top / "photos").rglob("*.jpg"))
    lines = [f"./{path.relative_to(top)},{path.parent.name}" for path in images]
    (top / "list.csv").write_text("\n".join(["path,label", *lines]))
    (top / "values.csv").write_text("a,b,label\n" + "".join(f"{n},{n * n},{n % 2}\n" for n in range(10)))
    pixels = np.stack([photo(number, 8, 8) for number in range(12)])
    np.savez(top / "arrays.npz", x_train=pixels, y_train=np.arange(12) % 3)
    (top / "npy").mkdir()
    np.save(top / "npy/x_train.npy", pixels)
    np.save(top / "npy/y_train.npy", np.arange(12) % 3)
    return top


CROPPED: dict[str, Any] = {"image_size": 12, "augment": "random_resized_crop"}


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("photos", CROPPED),
        ("photos/", CROPPED),
        ("records", CROPPED),
        ("records/train-*-of-*.tfrecord", CROPPED),
        ("records/train-?????-of-00003.tfrecord", CROPPED),
        ("list.csv", CROPPED),
        ("values.csv", {"value_columns": "all"}),
        ("arrays.npz", {}),
        ("npy", {}),
    ],
)
def test_batches_are_those_of_the_local_files_and_come_once(
    files: Path, url: str, downloads: list[str], source: str, options: dict[str, Any]
) -> None:
    put(files, url)
    here, there = batches(f"{files}/{source}", **options), batches(f"{url}/{source}", **options)
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(one[name], other[name]), name
    came = len(downloads)
    assert came == len(set(downloads)) > 0  # nothing is brought twice
    batches(f"{url}/{source}", **options)
    assert len(downloads) == came
    assert opened(f"{url}/{source}", **options).fingerprint() == opened(f"{files}/{source}", **options).fingerprint()


def test_each_split_may_be_a_pattern_in_the_same_folder(files: Path, url: str) -> None:
    put(files / "records", url)
    shards = {"train_files": "train-0000[01]*.tfrecord", "eval_files": "train-00002*.tfrecord"}
    here, there = (
        opened("files", image_size=8, **{option: f"{top}/{pattern}" for option, pattern in shards.items()})
        for top in (files / "records", url)
    )
    assert here.sizes() == there.sizes() == {"train": 8, "validation": 5}
    assert here.fingerprint() == there.fingerprint()


def test_a_file_of_labels_may_be_at_a_url(files: Path, url: str) -> None:
    put(files / "photos", f"{url}/photos")
    storage.write_bytes(f"{url}/names.txt", b"kitten\npuppy\nbird\n")
    assert opened(f"{url}/photos", image_size=8, labels_file=f"{url}/names.txt").classes == ("kitten", "puppy", "bird")


# -- what changes there, changes here -------------------------------------------------------------------------------


def test_only_what_changed_is_fetched_anew(tmp_path: Path, url: str, downloads: list[str]) -> None:
    put(photo_folder(tmp_path / "photos", 6), url)
    before = opened(url, image_size=8)
    old = before.read("train", np.arange(6))["image"]
    save_photo(tmp_path / "photos/cat/000.jpg", 99)
    storage.upload(tmp_path / "photos/cat/000.jpg", f"{url}/cat/000.jpg")
    downloads.clear()
    new = opened(url, image_size=8).read("train", np.arange(6))["image"]
    assert downloads == [f"{url}/cat/000.jpg"]
    assert [bool(np.array_equal(*pair)) for pair in zip(old, new, strict=True)] == [False, *[True] * 5]
    # Who has opened it reads on as it was.
    assert np.array_equal(before.read("train", np.arange(6))["image"], old)


def test_what_was_deleted_there_is_not_found_here(tmp_path: Path, url: str) -> None:
    put(photo_folder(tmp_path / "photos", 7), f"{url}/train")
    put(photo_folder(tmp_path / "more", 3), f"{url}/validation")
    assert opened(url, image_size=8).sizes() == {"train": 7, "validation": 3}
    storage.remove(f"{url}/train/cat/000.jpg")
    for number in range(3):  # the folder of the split is empty then
        storage.remove(f"{url}/validation/{('cat', 'dog', 'emu')[number]}/{number:03d}.jpg")
    after = opened(url, image_size=8)
    assert after.sizes() == {"train": 6}
    assert [after.name("train", row) for row in range(6)][:2] == ["cat/003.jpg", "cat/006.jpg"]
    for path in storage.list_files(url):
        storage.remove(path)
    with pytest.raises(DataError, match=rf"^there is nothing at {url}\.$"):
        opened(url, image_size=8)


def test_records_are_indexed_once(files: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (files / "records").glob("*.tfrecord"):
        storage.upload(path, f"{url}/{path.name}")
    first = opened(f"{url}/*.tfrecord", image_size=8)
    monkeypatch.setattr("modelyard.data.records.index.build_index", pytest.fail)
    assert opened(f"{url}/*.tfrecord", image_size=8).fingerprint() == first.fingerprint()


def test_two_starts_at_once_make_one_tree(files: Path, url: str, cache: Path) -> None:
    put(files / "photos", url)
    code = (
        "import sys, modelyard\nfrom modelyard.data.open_dataset import open_stored\n"
        "print(open_stored(modelyard.load_config(dataset=sys.argv[1], image_size=8)).fingerprint())\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, url], env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = {process.communicate(timeout=PATIENCE)[0] for process in started}
    assert told == {opened(url, image_size=8).fingerprint() + "\n"}
    (place,) = (cache / "trees").iterdir()
    assert len([path for path in place.iterdir() if path.is_dir()]) == 1


# -- strangers' names, and nothing there ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["../outside.jpg", "cat/../../../outside.jpg", "cat/./a.jpg"])
def test_a_key_that_leaves_its_folder_is_refused(url: str, cache: Path, downloads: list[str], key: str) -> None:
    storage.write_bytes(f"{url}/{len(key)}/cat/a.jpg", b"1")
    storage.write_bytes(f"{url}/{len(key)}/{key}", b"1")
    with pytest.raises(DataError, match=r"outside\.jpg is not inside s3://|\./a\.jpg is not inside s3://"):
        opened(f"{url}/{len(key)}", image_size=8)
    assert downloads == []
    assert not cache.exists()


@pytest.mark.parametrize("name", ["../outside.jpg", "/etc/hostname", "a/../../b.jpg"])
def test_a_list_that_names_files_elsewhere_is_refused(url: str, downloads: list[str], name: str) -> None:
    storage.write_bytes(f"{url}/list.csv", f"path,label\n{name},cat\n".encode())
    with pytest.raises(DataError, match=rf"{name} is not inside {url}\.$"):
        opened(f"{url}/list.csv", image_size=8)
    assert set(downloads) <= {f"{url}/list.csv"}


def test_a_file_that_a_list_names_and_is_not_there_is_named(url: str) -> None:
    storage.write_bytes(f"{url}/list.csv", b"path,label\ncat/none.jpg,cat\n")
    with pytest.raises(DataError, match=rf"can't read {url}/cat/none\.jpg: it does not exist"):
        opened(f"{url}/list.csv", image_size=8)


def test_people_see_how_a_large_file_comes(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=True, width=200))
    storage.write_bytes(f"{url}/a.npz", b"x" * 1000)
    local_tree(f"{url}/a.npz", tmp_path / "cache")
    assert f"copying {url}/a.npz" in out.getvalue()
    assert "1000/1000" in out.getvalue()
    out.truncate(0)
    out.seek(0)
    local_tree(f"{url}/a.npz", tmp_path / "cache")
    assert out.getvalue() == ""


def test_objects_that_stand_for_folders_are_no_files(tmp_path: Path, url: str) -> None:
    """The consoles of stores make them."""
    boto3 = pytest.importorskip("boto3")
    put(photo_folder(tmp_path / "photos", 4), url)
    for key in ("", "cat/", "empty/"):
        boto3.client("s3").put_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/{key}", Body=b"")
    assert opened(url, image_size=8).sizes() == {"train": 4}
    assert storage.list_files(f"{url}/*") == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://nobucket/photos", r"can't list s3://nobucket/photos: The specified bucket does not exist\.$"),
        ("s3://nobucket/x.npz", r"can't list s3://nobucket/x\.npz: The specified bucket does not exist\.$"),
        (f"s3://{BUCKET}/nothing", rf"^there is nothing at s3://{BUCKET}/nothing\.$"),
        (f"s3://{BUCKET}/nothing.csv", rf"^there is nothing at s3://{BUCKET}/nothing\.csv\.$"),
        (f"s3://{BUCKET}/no-*.tfrecord", rf"^there is nothing at s3://{BUCKET}/no-\*\.tfrecord\.$"),
        ("s4://x/y", "s4:// is not supported"),
    ],
)
def test_what_is_not_there_is_a_sentence(cache: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(source, image_size=8)


def test_a_cache_that_cant_be_written_is_a_sentence(files: Path, url: str, cache: Path) -> None:
    put(files / "photos", url)
    cache.mkdir()
    (cache / "trees").write_text("a file")
    with pytest.raises(DataError, match="can't write to the cache"):
        opened(url, image_size=8)


# -- the commands ---------------------------------------------------------------------------------------------------


def test_a_remote_folder_is_converted_looked_at_and_verified(files: Path, url: str, tmp_path: Path) -> None:
    put(files, url)
    report = convert(f"{url}/photos", tmp_path / "made", processes=2, shards=3, name="records")
    assert report.examples == {"train": 13}
    for path in sorted((files / "records").glob("*.tfrecord")):
        assert (tmp_path / "made" / path.name).read_bytes() == path.read_bytes()
    assert data_info(f"{url}/records")["splits"] == data_info(str(files / "records"))["splits"]
    assert verify_data(f"{url}/records").ok


def test_verify_of_a_remote_folder_checks_the_files_too(files: Path, url: str) -> None:
    put(files / "records", url)
    storage.write_bytes(f"{url}/labels.txt", b"other\n")
    shard = f"{url}/train-00001-of-00003.tfrecord"
    data = bytearray(storage.read_bytes(shard))
    data[500] ^= 1
    storage.write_bytes(shard, bytes(data))
    problems = verify_data(url).problems
    assert len(problems) == 3
    assert sum("train-00001-of-00003.tfrecord" in problem for problem in problems) == 2
    assert sum("at byte " in problem for problem in problems) == 1
