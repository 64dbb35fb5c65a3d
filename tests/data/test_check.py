"""`data check`: what is found in a dataset, and what is not."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

import modelyard
from modelyard.cli.app import main
from modelyard.data import check, near_duplicates
from modelyard.data.near_duplicates import find_candidates, similarity, thumbnails
from modelyard.errors import DataError

CLASSES = ("cat", "dog", "emu")


def picture(seed: int, height: int = 96, width: int = 72) -> Image.Image:
    """A picture with large and small shapes, like no other seed's."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    fine = Image.fromarray(random.integers(0, 256, (24, 18, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return Image.blend(coarse, fine, 0.35).filter(ImageFilter.GaussianBlur(1))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 pictures for training and 7 for validation, with nothing to find."""
    for number in range(27):
        split = "train" if number < 20 else "validation"
        path = tmp_path / "photos" / split / CLASSES[number % 3] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path, quality=92)
    return tmp_path / "photos"


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
"""The start of a photo of a phone."""


def found(folder: Path, **options: Any) -> dict[str, list[tuple[str, str]]]:
    """The names of each check: of the example, and of the other of the pair."""
    report = modelyard.check_data(str(folder), **options)
    return {check: [(f.example, f.other) for f in report.of(check)] for check in report.counts}


def test_nothing_is_found_in_different_images(photos: Path) -> None:
    assert found(photos) == {}


def test_photos_of_an_unsupported_format_are_found(photos: Path) -> None:
    (photos / "train" / "bag").mkdir()
    (photos / "train" / "bag" / "IMG_1.HEIC").write_bytes(HEIC)
    (photos / "validation" / CLASSES[0] / "named.jpg").write_bytes(HEIC)
    report = modelyard.check_data(str(photos))
    assert [str(finding) for finding in report.of("unsupported")] == ["train: bag/IMG_1.HEIC, HEIC: convert it to JPEG"]
    assert "HEIC is not supported; convert it to JPEG" in report.of("unreadable")[0].note


def test_copies_are_named_with_their_original(photos: Path) -> None:
    shutil.copy(photos / "train/cat/03.jpg", photos / "train/cat/again.jpg")
    shutil.copy(photos / "train/dog/04.jpg", photos / "validation/dog/leaked.jpg")
    shutil.copy(photos / "train/emu/05.jpg", photos / "train/cat/5.jpg")
    assert found(photos) == {
        "leaks": [("dog/leaked.jpg", "dog/04.jpg")],
        "duplicates": [("cat/again.jpg", "cat/03.jpg"), ("emu/05.jpg", "cat/5.jpg")],
        "label_conflicts": [("emu/05.jpg", "cat/5.jpg")],
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda image, path: image.save(path, quality=30), id="compressed"),
        pytest.param(lambda image, path: image.resize((48, 64)).save(path, quality=92), id="resized"),
        pytest.param(lambda image, path: image.crop((1, 2, 71, 95)).save(path, quality=92), id="cropped"),
        pytest.param(lambda image, path: Image.eval(image, lambda v: int(v * 0.8)).save(path), id="darker"),
        pytest.param(lambda image, path: image.save(path.with_suffix(".png")), id="other format"),
    ],
)
def test_changed_copies_are_found_also_in_another_split(
    photos: Path, change: Callable[[Image.Image, Path], None]
) -> None:
    change(Image.open(photos / "train/cat/03.jpg"), photos / "train/cat/changed.jpg")
    change(Image.open(photos / "train/dog/04.jpg"), photos / "validation/dog/changed.jpg")
    names = {check: [(Path(one).stem, other) for one, other in pairs] for check, pairs in found(photos).items()}
    assert names == {"near_leaks": [("changed", "dog/04.jpg")], "near_duplicates": [("changed", "cat/03.jpg")]}


def test_flat_images_are_not_taken_for_the_same(photos: Path) -> None:
    for number, color in enumerate(((10, 20, 30), (11, 20, 30), (200, 10, 10))):
        Image.new("RGB", (72, 96), color).save(photos / f"train/cat/flat{number}.png")
    assert found(photos) == {"constant": [(f"cat/flat{number}.png", "") for number in range(3)]}


def test_odd_images_are_named(photos: Path) -> None:
    picture(50).convert("L").save(photos / "train/cat/grey.jpg")
    picture(51, 9, 7).save(photos / "train/cat/tiny.png")
    picture(52, 40, 300).save(photos / "train/dog/wide.jpg")
    (photos / "train/dog/broken.jpg").write_bytes((photos / "train/dog/04.jpg").read_bytes()[:500])
    assert found(photos) == {
        "unreadable": [("dog/broken.jpg", "")],
        "color": [("cat/grey.jpg", "")],
        "size": [("cat/tiny.png", "")],
        "aspect_ratio": [("dog/wide.jpg", "")],
    }


def test_rare_and_empty_classes_are_named(tmp_path: Path) -> None:
    labels = np.array([0] * 30 + [1] * 2 + [2] * 20)
    images = np.random.default_rng(0).integers(0, 256, (52, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images[:9, ::-1], y_test=np.zeros(9, int),
             classes=np.array(["a", "b", "c"]))  # fmt: skip
    report = modelyard.check_data(str(tmp_path / "a.npz"))
    assert [str(finding) for finding in report.of("classes")] == [
        "train: b, 2 examples; a has 30",
        "test: b, no examples",
        "test: c, no examples",
    ]


def test_images_and_masks_are_questioned(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(3):
            picture(number + 10 * len(name)).save(tmp_path / "set" / name / f"{number}.jpg")
    assert [*found(tmp_path / "set")] == ["folders"]


def test_all_kinds_of_datasets_find_the_same(photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "train/cat/03.jpg", photos / "validation/cat/leaked.jpg")
    Image.open(photos / "train/cat/06.jpg").save(photos / "train/cat/06b.jpg", quality=40)
    expected = {check: len(pairs) for check, pairs in found(photos).items()}
    assert expected == {"leaks": 1, "near_duplicates": 1}
    modelyard.convert(str(photos), tmp_path / "records", processes=1)
    paths = [path.relative_to(tmp_path) for path in sorted(photos.glob("*/*/*"))]
    rows = [f"{path},{path.parts[2]},{path.parts[1]}" for path in paths]
    (tmp_path / "photos.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    arrays = {}
    for split in ("train", "validation"):
        files = sorted((photos / split).glob("*/*"))
        arrays[f"x_{split}"] = np.stack([np.asarray(Image.open(file)) for file in files])
        arrays[f"y_{split}"] = np.array([CLASSES.index(file.parent.name) for file in files])
    np.savez(tmp_path / "a.npz", **arrays)
    for source in ("records", "photos.csv", "a.npz"):
        assert modelyard.check_data(str(tmp_path / source)).counts == expected, source


def test_digits_have_no_duplicates() -> None:
    report = modelyard.check_data("digits")
    assert report.counts == {}
    assert sum(report.examples.values()) == 1797


def test_numbers_are_checked_for_equal_rows(tmp_path: Path) -> None:
    lines = [f"{n % 7},{n},{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *lines, "3,3,0"]) + "\n")
    report = modelyard.check_data(str(tmp_path / "t.csv"), value_columns="a,b")
    assert report.counts == {"duplicates": 1, "label_conflicts": 1}
    assert "not images" in report.notes[0]


def test_strokes_are_near_duplicates_only_if_they_are_equal() -> None:
    """There are hundreds of ones in MNIST that fit on each other if they are moved."""
    strokes = np.zeros((400, 28, 28), np.float32)
    random = np.random.default_rng(0)
    rows = np.arange(4, 24)
    for stroke in strokes:
        slope, wide = random.uniform(-0.3, 0.3), random.integers(2, 4)
        middle = np.rint(14 + random.uniform(-1, 1) + slope * (rows - 14)).astype(int)
        for offset in range(wide):
            stroke[rows, middle + offset] = 255 * random.uniform(0.8, 1, len(rows))
    candidates = find_candidates(thumbnails(strokes))
    assert len(candidates.pairs)
    assert not candidates.moved


@pytest.mark.parametrize("held", [1 << 23, 5000])
def test_of_very_many_images_that_look_alike_each_is_compared_with_a_few(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """The frames of four cameras: all pairs would not fit into memory."""
    monkeypatch.setattr(near_duplicates, "_ALWAYS_COMPARED", 0)
    monkeypatch.setattr(near_duplicates, "_MOST_HELD", held)
    monkeypatch.setattr(near_duplicates, "_MOST_PAIRS", min(held, near_duplicates._MOST_PAIRS))
    random, count = np.random.default_rng(0), 200
    scenes = random.integers(0, 256, (4, 24, 24)).repeat(count, axis=0)
    frames = np.clip(scenes + random.normal(0, 1, scenes.shape), 0, 255).astype(np.uint8)
    candidates = find_candidates(frames)
    first, second = candidates.pairs.T
    assert not candidates.complete
    assert np.bincount(second).max() <= 16
    assert (first < second).all()
    assert (first // count == second // count).all()
    assert set(range(len(frames))) - set(second) == {0, count, 2 * count, 3 * count}, "each has one that is before it"
    early = second[first % count < 8]
    assert set(early) == set(second), "and the first of all are among them"
    assert find_candidates(scenes[::count]).complete


def test_the_similarity_of_different_images_is_none() -> None:
    one, other = (np.asarray(picture(seed, 64, 64)) for seed in (1, 2))
    assert similarity(one, other) is None
    assert similarity(one, one) == pytest.approx(1)


# -- the command ------------------------------------------------------------------------------------------------------


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["data", "check", *words])
    return int(left.value.code or 0)


def test_the_exit_status_says_whether_something_was_found(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(str(photos)) == 0
    assert "Nothing was found" in capsys.readouterr().out
    shutil.copy(photos / "train/cat/03.jpg", photos / "validation/cat/leaked.jpg")
    assert status(str(photos), "--json") == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["counts"] == {"leaks": 1}
    assert told["findings"][0]["other"] == "cat/03.jpg"
    assert status(str(photos), "--skip", "leaks") == 0
    assert status(str(photos), "--skip", "leak") == 2
    assert "Did you mean 'leaks'" in capsys.readouterr().err
    assert status("nowhere.csv") == 2


def test_the_list_and_the_sheet_have_everything(photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "train/cat/03.jpg", photos / "validation/cat/leaked.jpg")
    picture(50).convert("L").save(photos / "train/cat/grey.jpg")
    assert status(str(photos), "--output", "all.csv", "--sheet", "sheet.png") == 1
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["check"], row["split"], row["example"], row["other"]) for row in rows] == [
        ("leaks", "validation", "cat/leaked.jpg", "cat/03.jpg"),
        ("color", "train", "cat/grey.jpg", ""),
    ]
    assert Image.open(tmp_path / "sheet.png").width > 400


def test_the_sheet_of_large_photos_keeps_small_copies_in_memory(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        picture(3).resize((1600, 900)).save(photos / f"train/cat/{name}.png")
    drawn: list[tuple[int, ...]] = []
    real = check.sheet

    def noted(rows: Any, **options: Any) -> Image.Image:
        drawn.extend(image.shape for _, images in rows for image in images)
        return real(rows, **options)

    monkeypatch.setattr(check, "sheet", noted)
    assert status(str(photos), "--sheet", "sheet.png") == 1
    assert set(drawn) == {(180, 320, 3), (96, 72, 3)}


def test_labels_that_are_maps_are_named_and_compared() -> None:
    images = np.stack([np.asarray(picture(number, 32, 32)) for number in (1, 2, 1, 2)])
    maps = np.zeros((4, 32, 32), np.uint8)
    maps[3, 5] = 1
    data = modelyard.ArrayDataset({"train": {"image": images, "label": maps}}, maps=["label"])
    report = check.check_dataset(data)
    assert [str(each) for each in report.of("duplicates")] == [
        "train: 2 (a map of 32×32) = 0 (a map of 32×32)", "train: 3 (a map of 32×32) = 1 (a map of 32×32)",
    ]  # fmt: skip
    assert [each.example for each in report.of("label_conflicts")] == ["3"]


# -- labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[int]]:
    """Bright and dark images, of which some have the wrong label, and a run that was trained on most of them."""
    folder = tmp_path_factory.mktemp("labels")
    random = np.random.default_rng(0)
    truth = np.arange(240) % 2
    images = random.integers(0, 100, (240, 6, 6, 1)) + (truth * 150)[:, None, None, None]
    wrong = set(random.choice(240, 12, replace=False).tolist())
    labels = np.array([1 - truth[n] if n in wrong else truth[n] for n in range(240)])
    np.savez(folder / "a.npz", x_train=images.astype(np.uint8), y_train=labels)
    modelyard.train_and_evaluate(
        model="mlp", dataset=str(folder / "a.npz"), train_epochs=12, validation_fraction=0.4, model_dir=folder / "run",
        train_batch_size=16,
    )  # fmt: skip
    return folder / "a.npz", folder / "run", wrong


def test_wrong_labels_are_found_among_the_examples_that_the_run_has_not_seen(
    trained: tuple[Path, Path, set[int]],
) -> None:
    data, run, wrong = trained
    with (run / "splits.csv").open() as file:
        unseen = {int(row["row"]) for row in csv.DictReader(file)}
    report = modelyard.check_data(str(data), run=run)
    listed = [finding.rows[0] for finding in report.of("mislabelled")]
    assert wrong & unseen
    assert set(listed) == wrong & unseen
    assert "trained on 144" in report.notes[0]
    everything = modelyard.check_data(str(data), run=run, trained_on=True)
    assert {*listed} < {finding.rows[0] for finding in everything.of("mislabelled")} <= wrong
    seen = next(finding for finding in everything.of("mislabelled") if finding.rows[0] not in unseen)
    assert "trained on" in seen.note


def test_a_run_on_resized_photos_has_seen_them(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, run = photos / "train", tmp_path / "run"
    (folder / CLASSES[0] / "notes.txt").write_text("mine")
    modelyard.train(
        model="mlp", dataset=str(folder), image_size=8, train_steps=1, train_batch_size=4, validation_fraction=0.4,
        model_dir=run,
    )  # fmt: skip
    with (run / "splits.csv").open() as file:
        unseen = len(list(csv.DictReader(file)))
    caplog.clear()
    notes = modelyard.check_data(str(folder), run=run).notes
    assert caplog.text.count("notes.txt") == 1, "the data is opened several times, and warns once"
    assert f"the run was trained on {20 - unseen} of the examples" in notes[0]
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    next(other.rglob("*.jpg")).unlink()
    assert "trained on other data" in modelyard.check_data(str(other), run=run).notes[0]


def test_a_run_of_other_classes_is_refused(trained: tuple[Path, Path, set[int]], photos: Path) -> None:
    with pytest.raises(
        DataError, match="the data has 3, the run 2; only in the data: cat, dog, emu; only in the run: 0, 1"
    ):
        modelyard.check_data(str(photos), run=trained[1])
