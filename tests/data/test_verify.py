"""Checking a whole dataset: all problems are found and named."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelyard.data import inspection
from modelyard.data.inspection import VerifyReport, verify, verify_folder
from modelyard.data.raw_examples import ArrayExamples, FileExamples
from modelyard.data.records.convert import convert_examples
from modelyard.data.records.index import index_path

CLASSES = ("cat", "dog", "emu")


def png(seed: int, height: int = 6, width: int = 8) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for n in range(100):
        (folder / f"{n:03}.png").write_bytes(png(n, 4 + n % 7, 5 + n % 3))
    return folder


def items(folder: Path, numbers: range, labels: list[int] | None = None) -> FileExamples:
    return FileExamples(folder, [f"{n:03}.png" for n in numbers], labels or [n % 3 for n in numbers])


@pytest.fixture
def made(photos: Path, tmp_path: Path) -> Path:
    splits = {"train": items(photos, range(80)), "test": items(photos, range(80, 100))}
    convert_examples(splits, CLASSES, tmp_path / "made", shards=2)
    return tmp_path / "made"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sound_dataset_is_described(photos: Path, threads: int) -> None:
    reported: list[int] = []
    splits = {"train": items(photos, range(80)), "test": items(photos, range(80, 100))}
    report = verify(splits, CLASSES, threads=threads, progress=reported.append)
    assert report.ok
    assert (report.problems, report.warnings) == ([], [])
    train = report.splits["train"]
    assert (train.examples, train.class_counts, train.bad) == (80, [27, 27, 26], 0)
    assert (train.heights, train.widths) == ((4, 10), (5, 7))
    assert reported == list(range(1, 101))


@pytest.mark.parametrize("threads", [1, 4])
def test_all_bad_images_are_named_in_order(photos: Path, threads: int) -> None:
    for n in (3, 40, 79):
        (photos / f"{n:03}.png").write_bytes(png(n)[:60])
    (photos / "050.png").unlink()
    report = verify({"train": items(photos, range(80))}, CLASSES, threads=threads)
    assert not report.ok
    assert report.problem_count == report.splits["train"].bad == 4
    found = [problem.split(".png")[0][-3:] for problem in report.problems]
    assert found == ["003", "040", "050", "079"]


def test_only_so_many_problems_are_listed_but_all_are_counted(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MOST_PROBLEMS", 5)
    for n in range(30):
        (photos / f"{n:03}.png").write_bytes(b"bad")
    report = verify({"train": items(photos, range(80))}, CLASSES)
    assert (len(report.problems), report.problem_count) == (5, 30)


def test_labels_out_of_range_are_named(photos: Path) -> None:
    report = verify({"train": items(photos, range(4), [0, 3, -1, 1])}, CLASSES)
    assert report.problems == [
        "001.png: label 3 is out of range, there are 3 classes.",
        "002.png: label -1 is out of range, there are 3 classes.",
    ]
    assert report.splits["train"].class_counts == [1, 1, 0]


def test_a_class_without_training_examples_is_a_warning(photos: Path) -> None:
    report = verify({"train": items(photos, range(3), [0, 0, 0])}, CLASSES)
    assert report.warnings == ["2 of 3 classes have no training example: dog, emu."]


def test_values_that_are_not_finite_are_found() -> None:
    values = np.ones((3, 4, 4, 1), np.float32)
    values[1, 0, 0, 0] = np.nan
    report = verify({"train": ArrayExamples(values, np.arange(3, dtype=np.int32))}, CLASSES)
    assert report.problems == ["1 holds values that are not finite."]


class TestFolder:
    """A converted folder against its own description."""

    def found(self, report: VerifyReport) -> str:
        assert not report.ok
        return "\n".join(report.problems)

    def test_a_sound_one_is_sound(self, made: Path) -> None:
        report = verify_folder(made)
        assert report.ok
        assert {name: split.examples for name, split in report.splits.items()} == {"train": 80, "test": 20}

    def test_damage_in_several_records_is_named_by_file_and_offset(self, made: Path) -> None:
        for shard, at in (("train-00000-of-00002", 1000), ("train-00000-of-00002", 3000), ("test-00001-of-00002", 900)):
            path = made / f"{shard}.tfrecord"
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
        report = verify_folder(made, threads=2)
        found = self.found(report)
        assert report.problem_count == 5
        assert found.count("is not the file that was written") == 2
        assert found.count("is damaged: ") == 3
        assert all(" at byte " in line for line in report.problems if "is damaged" in line)
        assert (report.splits["train"].bad, report.splits["test"].bad) == (2, 1)

    def test_damage_in_a_length_does_not_hide_other_shards(self, made: Path) -> None:
        path = made / "train-00000-of-00002.tfrecord"
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
        report = verify_folder(made)
        assert "the length of the record at byte 0 does not match its checksum" in self.found(report)
        assert {name: split.examples for name, split in report.splits.items()} == {"train": 40, "test": 20}

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda f: (f / "train-00001-of-00002.tfrecord").unlink(), "train-00001-of-00002.tfrecord: No such file"),
            (lambda f: (f / "labels.txt").write_text("cat\nemu\ndog\n"), "labels.txt has other classes"),
            (lambda f: (f / "labels.txt").unlink(), "labels.txt can't be read"),
            (
                lambda f: [(f / f"t{n}").rename(f / m) for n, m in enumerate(swapped(f))],
                "is not the file that was written",
            ),
        ],
    )
    def test_files_that_are_not_as_described_are_named(self, made: Path, damage: Any, message: str) -> None:
        damage(made)
        assert message in self.found(verify_folder(made))

    def test_a_missing_index_is_no_problem(self, made: Path) -> None:
        for path in made.glob("*.tfrecord"):
            index_path(path).unlink()
        assert verify_folder(made).ok


def swapped(folder: Path) -> list[str]:
    """Moves two shards aside, and gives their names the wrong way round."""
    names = ["train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"]
    for number, name in enumerate(names):
        (folder / name).rename(folder / f"t{number}")
    return names[::-1]
