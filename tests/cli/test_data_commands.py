"""The commands on datasets, as a user meets them. Most run in this process: a start costs seconds."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import modelyard
from conftest import COMMAND, environment
from modelyard.cli.app import main
from modelyard.data.sources import fetch as fetching
from modelyard.errors import counted
from photos import photo_folder, save_photo
from waiting import PATIENCE

HEAVY = {"tensorflow", "jax", "keras", "sklearn", "cv2", "PIL", "simplejpeg"}
DATA_COMMANDS = (["convert"], *(["data", name] for name in ("fetch", "info", "verify", "check", "show")))


@dataclass(frozen=True)
class Done:
    """What a command left: its status and what it printed."""

    status: int
    out: str
    error: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls the command line in this process; the log of the package is as before afterwards."""
    log = logging.getLogger("modelyard")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))

    def call(*words: str, status: int = 0) -> Done:
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as left:
                main([*words])
        finally:
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)
        out, error = capsys.readouterr()
        code = left.value.code or 0
        assert code == status, (code, out, error)
        assert "Traceback" not in error, error
        return Done(int(code), out, error)

    return call


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Thirteen photographs of three classes and one of a fourth."""
    folder = photo_folder(tmp_path / "photos", 13)
    save_photo(folder / "yak" / "only.jpg", 77, 50, 34)
    return folder


@pytest.fixture
def records(photos: Path, run: Run) -> Path:
    run("convert", "--from", str(photos), "--to", "records", "--shards", "3", "--processes", "1")
    return Path("records").absolute()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- the way from photographs to a result ---------------------------------------------------------------------------


def test_a_folder_is_converted_checked_trained_on_and_evaluated(command: Any, photos: Path, tmp_path: Path) -> None:
    """And training straight from the folder gives the very same weights."""
    options = ["train-and-evaluate", "--augment", "random_resized_crop, flip_left_right", "--deterministic"]
    options += ["--model", "simple_cnn", "--image_size", "24", "--train_steps", "6", "--train_batch_size", "4"]
    options += ["--threads", "1", "--save_every", "6", "--eval_every", "6"]
    cache = {"MODELYARD_CACHE": str(tmp_path / "cache")}
    straight = [*options, "--dataset", str(photos), "--model_dir", "straight", "--validation_fraction", "0.2"]
    beside = subprocess.Popen(  # while the rest goes on
        [*COMMAND, *straight], env=environment(**cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    done = command("convert", "--from", "photos", "--to", "records", "--validation-fraction", "0.2", **cache)
    assert "train on it: modelyard train-and-evaluate --dataset records" in done.stdout
    assert "everything was read; nothing is damaged." in command("data", "verify", "records", **cache).stderr
    splits = json.loads(command("data", "info", "records", "--json", **cache).stdout)["splits"]
    assert splits["train"] == {"examples": 11, "classes": [4, 3, 3, 1]}  # a class of one is for training
    assert splits["validation"] == {"examples": 3, "classes": [1, 1, 1, 0]}
    result = json.loads(command(*options, "--dataset", "records", "--model_dir", "run", "--json", **cache).stdout)
    assert result["step"] == 6
    again = json.loads(command("evaluate", "run", "--checkpoint", "latest", "--json", **cache).stdout)
    assert again["metrics"] == pytest.approx(result["metrics"])
    errors = beside.communicate(timeout=PATIENCE)[1]
    assert beside.returncode == 0, errors
    weights = "checkpoints/step-00000006/weights.safetensors"
    assert Path("straight", weights).read_bytes() == Path("run", weights).read_bytes()


# -- help and mistakes ----------------------------------------------------------------------------------------------


def test_help_of_every_data_command_comes_without_heavy_imports() -> None:
    code = (
        "import contextlib, sys\nfrom modelyard.cli.app import main\n"
        f"for words in {DATA_COMMANDS!r}:\n"
        "    with contextlib.suppress(SystemExit):\n        main([*words, '--help', 'all'])\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    for option in ("--max_edge", "--record_image", "--label_column", "--data_dir", "--augment", "--copies", "--json"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["convert", "--from", "photos"], ["--to"]),
        (["convert", "--encoding", "jpg"], ["there is no encoding 'jpg'", "'jpeg'"]),
        (["convert", "--on-bad", "stop"], ["there is no on_bad 'stop'", "fail, skip"]),
        (["convert", "--validation-fraction", "1"], ["validation_fraction 1.0 must be between 0 and 1"]),
        (["convert", "--validation_fraction", "some"], ["Invalid value for '--validation_fraction'"]),
        (["convert", "--max-edge", "0"], ["Invalid value for '--max_edge'"]),
        (["convert", "--quality", "101"], ["Invalid value for '--quality'"]),
        (["convert", "--image_size", "32"], ["image_size is chosen when training", "--max_edge"]),
        (["convert", "--image_fit", "pad"], ["image_fit is chosen when training"]),
        (["convert", "--image_channels=1"], ["image_channels is chosen when training"]),
        (["convert", "--max_edg", "3"], ["max_edg: there is no such option"]),
        (["convert", "--record_image", "x"], ["record_image: has no effect here", "these are folder"]),
        (["data", "info", "digitss"], ["there is no dataset 'digitss'", "'digits'"]),
        (["data", "info", "digits", "--record-image", "x"], ["record_image: has no effect here"]),
        (["data", "info", "digits", "photos"], ["photos: is not an option"]),
        (["data", "verify", "./nowhere"], ["there is no file or folder ./nowhere"]),
        (["data", "verify", "nowhere.csv"], ["there is no file or folder nowhere.csv"]),
        (["data", "verify", "digits", "--split_sed", "1"], ["split_sed: there is no such option", "'split_seed'"]),
        (["data", "show", "digits", "--split", "tset"], ["there is no split 'tset'", "'test'"]),
        (["data", "show", "digits", "--examples", "0"], ["Invalid value for '--examples'"]),
        (["data", "show", "digits", "--augment", "flip"], ["there is no augmentation 'flip'", "flip_up_down"]),
        (["data", "fetch", "cifar"], ["there is no dataset to fetch 'cifar'", "'cifar10'"]),
        (["data", "fetch", "mnist", "--from", "nowhere"], ["nowhere does not exist"]),
        (["data", "shw"], ["No such command 'shw'", "show"]),
    ],
)
def test_a_mistake_is_explained_and_changes_nothing(run: Run, photos: Path, words: list[str], texts: list[str]) -> None:
    if words[0] == "convert" and "--from" not in words:
        words += ["--from", "photos", *(["--to", "records"] if "--to" not in words else [])]
    done = run(*words, status=2)
    for text in texts:
        assert text in " ".join(done.error.replace("│", " ").split())  # some stand in a box
    assert done.out == ""
    assert sorted(path.name for path in Path().iterdir() if path.name != "cache") == ["photos"]


def test_dashes_are_underscores(run: Run, photos: Path) -> None:
    run("convert", "--from", "photos", "--to", "one", "--max-edge", "20", "--on-bad=skip", "--split-seed", "5")
    run(
        "convert",
        "--from",
        "photos",
        "--to",
        "two",
        "--max_edge",
        "20",
        "--on_bad=skip",
        "--split_seed",
        "5",
        "--name=one",
    )
    assert contents(Path("one")) == contents(Path("two"))
    assert max(json.loads(run("data", "info", "one", "--json").out)["sizes"][1]) == 20
    assert (
        "nowhere does not exist"
        in run("data", "fetch", "mnist", "--data-dir", "x", "--from", "nowhere", status=2).error
    )


def test_options_of_a_users_own_dataset_are_its_own(run: Run) -> None:
    Path("squares.py").write_text(
        "import numpy as np\nimport modelyard\n"
        "class Sized(modelyard.Options):\n    image_size: int = 4\n"
        "@modelyard.register_dataset('squares_of_a_size', options=Sized)\n"
        "def squares(options, context):\n"
        "    images = np.zeros((4, options.image_size, options.image_size), np.uint8)\n"
        "    return modelyard.ArrayDataset({'train': {'image': images, 'label': np.arange(4) % 2}})\n"
    )
    words = ("--plugins", "squares.py", "--image_size", "6")
    assert json.loads(run("data", "info", "squares_of_a_size", "--json", *words).out)["image"]["shape"] == [6, 6, 1]
    run("convert", "--from", "squares_of_a_size", "--to", "made", *words)
    assert json.loads(run("data", "info", "made", "--json").out)["image"]["shape"] == [6, 6, 1]


# -- convert --------------------------------------------------------------------------------------------------------


def test_convert_prints_one_json_object(run: Run, photos: Path) -> None:
    words = ("convert", "--from", "photos", "--to", "records", "--shards", "2", "--json")
    made = json.loads(run(*words).out)
    assert (made["folder"], made["examples"], made["shards"]) == ("records", {"train": 14}, {"train": 2})
    assert (made["already_done"], made["bad"], made["reencoded"]) == (False, [], 0)
    assert json.loads(run(*words).out)["already_done"] is True
    assert "exists already" in run(*words[:-1]).out


@pytest.mark.parametrize("source", ["digits", "photos"])
def test_what_was_converted_has_the_labels_and_sizes_of_its_source(run: Run, photos: Path, source: str) -> None:
    run("convert", "--from", source, "--to", "records")
    before, after = (json.loads(run("data", "info", of, "--json").out) for of in (source, "records"))
    assert after["splits"] == before["splits"]
    assert after["classes"] == before["classes"]
    if source == "photos":
        assert after["sizes"] == before["sizes"]


def test_bad_images_are_skipped_and_listed_where_that_is_asked_for(run: Run, photos: Path) -> None:
    (photos / "cat" / "000.jpg").write_bytes(b"no image")
    (photos / "dog" / "004.jpg").write_bytes((photos / "dog" / "004.jpg").read_bytes()[:300])
    failed = run("convert", "--from", "photos", "--to", "records", status=2)
    assert "cat/000.jpg" in failed.error
    assert "--on_bad skip" in failed.error
    done = run("convert", "--from", "photos", "--to", "records", "--on_bad", "skip")
    assert "2 images can't be read and were left out: records/bad.txt" in done.out
    names = [line.split("\t")[0] for line in Path("records/bad.txt").read_text().splitlines()]
    assert names == ["cat/000.jpg", "dog/004.jpg"]
    told = json.loads(run("convert", "--from", "photos", "--to", "records", "--on_bad", "skip", "--json").out)
    assert [name for name, _ in told["bad"]] == names


def test_a_folder_that_holds_something_else_is_refused_and_untouched(run: Run, photos: Path) -> None:
    Path("records").mkdir()
    Path("records/thesis.txt").write_text("all of it")
    done = run("convert", "--from", "photos", "--to", "records", status=2)
    assert "records holds other files: thesis.txt" in done.error
    assert contents(Path("records")) == {"thesis.txt": b"all of it"}
    before = contents(photos)
    assert "holds other files" in run("convert", "--from", "photos", "--to", "photos", status=2).error
    assert contents(photos) == before


def test_a_full_disk_is_a_sentence(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = run("convert", "--from", "photos", "--to", "records", "--processes", "1", status=2)
    assert "the disk is full" in done.error
    done = run("data", "show", "digits", "--output", "sheet.png", status=2)
    assert "the disk is full: can't write sheet.png" in done.error
    assert not Path("sheet.png").exists()


# -- info and verify ------------------------------------------------------------------------------------------------


def test_info_shows_classes_counts_and_sizes(run: Run, records: Path) -> None:
    told = run("data", "info", "records").out
    assert [line.split()[1:4:2] for line in told.splitlines() if "│" in line] == [
        ["cat", "5"], ["dog", "4"], ["emu", "4"], ["yak", "1"], ["all", "14"],
    ]  # fmt: skip
    assert "sizes differ (of 14 of 14 training images, heights 30 to 50, widths 31 to 40)" in told
    assert "--image_size" in told
    assert "image/encoded: " in told
    found = json.loads(run("data", "info", str(records), "--json").out)
    assert set(found) == {"source", "classes", "splits", "image", "sizes", "measured", "bad", "record", "fingerprint"}


def test_info_of_foreign_records_lists_their_features(run: Run, records: Path) -> None:
    shard = str(next(records.glob("train-00000*.tfrecord")))
    assert "image/class/text" in run("data", "info", shard).out
    wrong = run("data", "info", shard, "--record_image", "jpg", status=2)
    assert "it has no feature 'jpg'" in wrong.error
    assert "image/class/text" in wrong.error


def test_a_damaged_shard_is_named_with_all_that_is_wrong(run: Run, records: Path) -> None:
    first, second, third = sorted(records.glob("*.tfrecord"))
    flip(first, 400)
    flip(second, second.stat().st_size - 200)
    (records / "labels.txt").write_text("cat\ndog\nemu\ngnu\n")
    done = run("data", "verify", "records", status=2)
    assert f"records/{first.name} is damaged: record 0 at byte 0 " in done.error
    assert f"records/{second.name} is damaged: record 4 at byte " in done.error
    assert "labels.txt has other classes" in done.error
    assert third.name not in done.error
    told = run("data", "verify", "records", "--json", status=2)
    report = json.loads(told.out)
    assert report["problem_count"] == len(report["problems"]) == 5  # two sums of files, two records, the labels
    assert report["splits"]["train"]["bad"] == 2
    assert all(problem in told.error for problem in report["problems"])


def test_a_sound_dataset_has_no_problems(run: Run, records: Path, photos: Path) -> None:
    for source in ("records", "photos", "digits"):
        done = run("data", "verify", source, "--json")
        assert json.loads(done.out)["problems"] == []
        assert "everything was read; nothing is damaged." in done.error


def test_every_bad_image_of_a_folder_is_listed(run: Run, photos: Path) -> None:
    for name in ("cat/003.jpg", "emu/005.jpg"):
        (photos / name).write_bytes(b"nothing")
    done = run("data", "verify", "photos", status=2)
    assert "photos: 2 problem(s)" in done.error
    assert done.error.index("cat/003.jpg") < done.error.index("emu/005.jpg")


# -- show -----------------------------------------------------------------------------------------------------------


def picture(path: str = "sheet.png") -> Any:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_show_makes_a_picture_that_changes_with_the_augmentation(run: Run, two_devices: None, photos: Path) -> None:
    show = ("data", "show", "photos", "--image_size", "24", "--examples", "5", "--copies", "3")
    assert run(*show).out.strip() == "sheet.png"
    plain = picture()
    assert len(np.unique(plain)) > 50  # photographs and letters, not one colour
    drawn = []
    for augment in ("flip_left_right(probability=1)", "random_resized_crop", "mixup"):
        run(*show, "--augment", augment, "--output", "other.png")
        drawn.append(picture("other.png"))
        assert drawn[-1].shape[1] > plain.shape[1]  # three more columns
    assert not np.array_equal(drawn[0], drawn[1])
    run(*show, "--augment", "random_resized_crop", "--output", "again.png")
    assert np.array_equal(picture("again.png"), drawn[1])
    run(*show, "--augment", "random_resized_crop", "--output", "again.png", "--random_seed", "9")
    assert not np.array_equal(picture("again.png"), drawn[1])
    assert sorted(path.name for path in Path().glob("*.png")) == ["again.png", "other.png", "sheet.png"]


def test_show_augments_on_the_device_as_training_does(run: Run, two_devices: None, photos: Path) -> None:
    show = ("data", "show", "photos", "--image_size", "24", "--examples", "4", "--copies", "2", "--augment")
    drawn = []
    for probability in (0, 1):
        run(*show, f"flip_left_right(probability={probability})")
        drawn.append(picture())
    differing = np.flatnonzero((drawn[0] != drawn[1]).any(axis=(1, 2)))
    assert differing.max() > 0.7 * len(drawn[0])  # in the last example too, not in the words above alone


@pytest.mark.parametrize("examples", ["1", "3"])
def test_show_mixes_an_odd_number_of_digits(run: Run, two_devices: None, examples: str) -> None:
    words = ("--examples", examples, "--copies", "2", "--augment", "mixup, pad_and_crop(padding=1)")
    run("data", "show", "digits", *words)
    assert len(np.unique(picture())) > 5
    rows = picture().shape[0]
    run("data", "show", "digits", "--examples", "8", *words[2:])
    assert picture().shape[0] > rows


def test_show_takes_one_of_each_class_and_no_augmentation_outside_training(run: Run, two_devices: None) -> None:
    run("data", "show", "digits", "--split", "test", "--augment", "rotation(degrees=20)")
    first = picture()
    run("data", "show", "digits", "--split", "test")
    assert picture().shape == first.shape


def test_show_takes_random_examples_by_the_seed_or_those_that_are_named(run: Run, two_devices: None) -> None:
    def shown(*words: str) -> bytes:
        run("data", "show", "digits", "--examples", "4", *words)
        return picture().tobytes()

    drawn = shown()
    assert shown() == drawn == shown("--which", "random")
    assert shown("--random_seed", "5") != drawn
    assert shown("--which", "first") != drawn
    assert shown("--which", "first") == shown("--which", "first", "--random_seed", "5")
    assert shown("--which", "0,1,2,3") == shown("--which", "first"), "digits begin with one of each class"
    wrong = run("data", "show", "digits", "--which", "1,x", status=2).error
    assert "which is '1,x'; give random, first, or numbers" in wrong
    assert "there is no example 5000" in run("data", "show", "digits", "--which", "5000", status=2).error


def test_a_picture_that_cant_be_written_is_a_sentence_and_the_old_one_stays(run: Run, two_devices: None) -> None:
    assert (
        "can't write nowhere/sheet.png"
        in run("data", "show", "digits", "--output", "nowhere/sheet.png", status=2).error
    )
    Path("folder.png").mkdir()
    assert "can't write folder.png" in run("data", "show", "digits", "--output", "folder.png", status=2).error
    assert [path.name for path in Path().iterdir()] == ["folder.png"]


def test_too_little_memory_is_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr(modelyard, "data_info", full, raising=False)
    told = run("data", "info", "digits", status=1).error
    assert "error: there is not enough memory: Unable to allocate 7.28 TiB. Try smaller batches or fewer" in told


def test_one_and_equal_sizes_have_their_own_words(run: Run) -> None:
    for number, height in enumerate((30, 40, 40)):
        save_photo(Path("photos/cat", f"{number}.jpg"), number, height, 40)
    assert "heights 30 to 40, widths 40)" in run("data", "info", "photos").out
    assert counted(1, "step") == "1 step"
    assert counted(2000, "step") == "2,000 steps"


def test_info_shows_the_rest_of_a_folder_with_a_broken_file(run: Run, photos: Path) -> None:
    assert json.loads(run("data", "info", str(photos), "--json").out)["bad"] == []
    for broken in ("dog/001.jpg", "cat/000.jpg"):  # the first of all decides the size
        (photos / broken).write_bytes(b"none")
        told = run("data", "info", str(photos)).out
        assert "emu" in told
        assert f"can't be decoded: train: {broken} can't be decoded" in told
        assert f"modelyard data verify {photos}" in told
        assert "--on_bad skip" in told
        run("data", "info", str(photos), "--image_size", "8")


# -- fetch ----------------------------------------------------------------------------------------------------------


def test_fetch_takes_a_local_copy_if_it_is_the_official_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = np.random.default_rng(0).bytes(5000)
    Path("mine.tar.gz").write_bytes(content)
    official = fetching.Source("http://127.0.0.1:9/cifar-10-python.tar.gz", 5000, hashlib.md5(content).hexdigest())
    monkeypatch.setitem(fetching.SOURCES, "cifar10", (official,))  # type: ignore[arg-type]
    done = run("data", "fetch", "cifar10", "--data-dir", "there", "--from", "mine.tar.gz")
    assert done.out.strip() == "there/cifar10/cifar-10-python.tar.gz"
    assert Path(done.out.strip()).read_bytes() == content
    flip(Path("mine.tar.gz"), 1000)
    failed = run("data", "fetch", "cifar10", "--data_dir", "elsewhere", "--from", "mine.tar.gz", status=2)
    assert "mine.tar.gz is not the official file" in failed.error
    assert contents(Path("elsewhere")) == {}


def test_names_with_brackets_are_shown_as_they_are(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,label\n1,[/x]\n2,[bold]y\n")
    told = run("data", "info", "x.csv", "--value_columns", "a").out
    assert "[/x]" in told
    assert "[bold]y" in told


def test_labels_that_only_the_index_has_are_found(run: Run, records: Path) -> None:
    from modelyard.data.records.index import Index, build_index, index_path, write_index
    from modelyard.data.records.reader import read_dataset_json

    shard = next(path for path in sorted(records.glob("train-*.tfrecord")))
    info = read_dataset_json(records)
    made = build_index(shard, info.features)
    entries = made.entries.copy()
    entries["label"][0] = (entries["label"][0] + 1) % 3
    with open(index_path(shard), "wb") as out:
        write_index(out, Index(entries, made.texts), info.features, shard.stat().st_size)
    wrong = run("data", "verify", "records", status=2)
    assert "does not match its file" in wrong.error
