"""Datasets of generators: run once, kept as records, never half."""

from __future__ import annotations

import fcntl
import io
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import modelyard
from conftest import environment
from modelyard.data.dataset import DataContext, Dataset
from modelyard.data.decoded import DecodedDataset
from modelyard.data.sources.generated import materialise
from modelyard.data.splits import SplitRules, divide
from modelyard.errors import DataError, UserError
from modelyard.registry import Entry, Options
from waiting import PATIENCE

Splits = dict[str, Callable[[], Any]]


class Size(Options):
    """Of the images."""

    edge: int = 4


def made(number: int, edge: int = 4) -> dict[str, Any]:
    return {"image": np.full((edge, edge), number, np.uint8), "label": number % 2}


def build(_: Any, context: DataContext) -> None:
    """Stands for a user's function: its file is what counts."""


def load(
    splits: Splits | Callable[[], Any],
    cache: Path,
    options: Options | None = None,
    fraction: float = 0.0,
    target: Callable[..., Any] = build,
    data_dir: str = "data",
    **more: Any,
) -> DecodedDataset:
    named: Splits = splits if isinstance(splits, dict) else {"train": splits}
    context = DataContext(Path(data_dir), 0, fraction, cache, "")
    entry = Entry("dataset", "counted", target, Options, "")
    dataset = materialise(modelyard.GeneratorDataset(named, **more), entry, options or Options(), context)
    divided = divide(dataset, SplitRules(fraction))
    assert isinstance(divided, DecodedDataset)
    return divided


def pixels(dataset: Dataset, split: str = "train") -> list[int]:
    images = np.asarray(dataset.read(split, np.arange(dataset.size(split)))["image"])
    return images.reshape(len(images), -1)[:, 0].tolist()


def left_in(cache: Path) -> list[Path]:
    """Everything that is neither a lock nor an index."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock" and path.suffix != ".index"]


class Counted:
    """A generator that knows how often it was run."""

    def __init__(self, count: int = 6) -> None:
        self.runs, self.count = 0, count

    def __call__(self) -> Iterator[dict[str, Any]]:
        self.runs += 1
        yield from (made(number) for number in range(self.count))


# -- once -----------------------------------------------------------------------------------------------------------


def test_a_generator_runs_once_and_its_examples_keep_their_order(tmp_path: Path) -> None:
    counted = Counted()
    first, second = load(counted, tmp_path), load(counted, tmp_path)
    assert counted.runs == 1
    assert pixels(first) == pixels(second) == [0, 1, 2, 3, 4, 5]
    assert first.labels("train").tolist() == [0, 1, 0, 1, 0, 1]
    assert first.classes == ("0", "1")
    assert first.features["image"].shape == (4, 4, 1)
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"options": Size(edge=5)},
        {"version": "2"},
        {"classes": ["even", "odd"]},
        {"data_dir": "elsewhere"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_runs_anew_when_something_about_it_changes(tmp_path: Path, change: dict[str, Any]) -> None:
    counted = Counted()
    load(counted, tmp_path)
    load(counted, tmp_path, **change)
    assert counted.runs == 2
    load(counted, tmp_path)
    load(counted, tmp_path, **change)
    assert counted.runs == 2  # both are kept


def test_another_split_is_not_looked_for_in_records_that_lack_it(tmp_path: Path) -> None:
    load(Counted(), tmp_path)
    dataset = load({"train": Counted(), "test": Counted(2)}, tmp_path)
    assert dataset.sizes() == {"train": 6, "test": 2}


def test_a_changed_file_runs_it_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    counted = Counted()
    for text, runs in (("", 1), ("", 1), ("# another line\n", 2), ("# another line\n", 2), ("", 2)):
        file.write_text(f"def rings(options, context): ...\n{text}")
        load(counted, tmp_path / "cache", target=runpy.run_path(str(file))["rings"])
        assert counted.runs == runs


def test_a_validation_split_is_derived_where_there_is_none(tmp_path: Path) -> None:
    counted = Counted(20)
    assert load(counted, tmp_path).sizes() == {"train": 20}
    derived = load(counted, tmp_path, fraction=0.2)
    assert derived.sizes() == {"train": 16, "validation": 4}
    assert sorted(pixels(derived) + pixels(derived, "validation")) == list(range(20))
    assert derived.labels("validation").tolist().count(0) == 2
    assert counted.runs == 1
    own = load({"train": counted, "validation": Counted(3)}, tmp_path, fraction=0.2)
    assert own.sizes() == {"train": 20, "validation": 3}


# -- what may be yielded --------------------------------------------------------------------------------------------


def test_labels_may_be_names(tmp_path: Path) -> None:
    examples = [{**made(number), "label": name} for number, name in enumerate(["thick", "thin", "thick"])]
    dataset = load(lambda: examples, tmp_path, classes=["thin", "thick"])
    assert dataset.labels("train").tolist() == [1, 0, 1]
    assert dataset.classes == ("thin", "thick")


def test_images_may_be_the_bytes_of_files_and_stay_those_bytes(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(np.arange(75, dtype=np.uint8).reshape(5, 5, 3)).save(out, "PNG")
    dataset = load(lambda: [{"image": out.getvalue(), "label": 0}] * 2, tmp_path)
    assert dataset.splits["train"].load(1) == out.getvalue()
    image = dataset.read("train", np.array([0]))["image"][0]
    assert np.array_equal(image.reshape(-1), np.arange(75))


@pytest.mark.parametrize("shape", [(3,), (4, 5), (4, 5, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_arrays_of_numbers_come_back_as_they_were(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(3, *shape)).astype(dtype)
    dataset = load(lambda: ({"image": value, "label": np.int64(0)} for value in values), tmp_path)
    found = np.asarray(dataset.read("train", np.arange(3))["image"])
    assert found.dtype == np.float32
    assert np.array_equal(found.reshape(values.shape), values.astype(np.float32))


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    def train() -> Iterator[dict[str, Any]]:
        yield from (made(number, edge=4 + number) for number in range(3))

    with pytest.raises(
        DataError, match=r"example 1 of the train split of counted is 5×5×1, the first one 4×4×1.*image_size="
    ):
        load(train, tmp_path)
    assert left_in(tmp_path) == []
    dataset = load(train, tmp_path, image_size=(4, 6))
    assert pixels(dataset) == [0, 1, 2]
    assert dataset.features["image"].shape == (4, 6, 1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (7, "must be a dictionary with 'image' and 'label'; got int"),
        ({"image": np.zeros((4, 4))}, "must be a dictionary with 'image' and 'label'"),
        ({**made(1), "label": "thickk"}, "there is no class 'thickk'. Did you mean 'thick'"),
        ({**made(1), "label": 2}, "its label is 2, but there are 2 classes"),
        ({**made(1), "label": -1}, "its label is -1; give the number of a class"),
        ({**made(1), "label": 1.0}, "its label is 1.0; give the number of a class"),
        ({**made(1), "label": True}, "its label is True; give the number of a class"),
        ({"image": "photo.jpg", "label": 1}, "give an array of numbers"),
        ({"image": np.zeros((4, 4), bool), "label": 1}, "its image is bool"),
        ({"image": b"nonsense", "label": 1}, "is an image file; those before it are arrays"),
        ({"image": np.zeros((4, 4), np.float32), "label": 1}, "has values of float32, those before it of uint8"),
        ({"image": np.zeros((0, 4), np.uint8), "label": 1}, r"has shape (0, 4)"),
    ],
)
def test_an_example_that_is_wrong_is_named_by_its_number(tmp_path: Path, second: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        load({"train": Counted(), "test": lambda: [made(0), second]}, tmp_path, classes=["thin", "thick"])
    assert str(error.value).startswith("example 1 of the test split of counted")
    assert message in str(error.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": Counted()}, "generates no train split"),
        ({"train": Counted(0)}, "the train split of counted is empty: its function yields nothing"),
        ({"train": Counted(), "holdout": Counted()}, "there is no split 'holdout'"),
    ],
)
def test_splits_that_are_wrong_are_told(tmp_path: Path, splits: Splits, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(splits, tmp_path)
    assert left_in(tmp_path) == []


# -- whole or not there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("mine"), FileNotFoundError(2, "No such file", "mine.png"), UserError("mine"), KeyError(3)],
)
def test_a_bug_in_the_generator_surfaces_as_itself(tmp_path: Path, error: Exception) -> None:
    cause = ValueError("the cause")

    def train() -> Iterator[dict[str, Any]]:
        yield made(0)
        here_it_happens()

    def here_it_happens() -> None:
        raise error from cause

    with pytest.raises(type(error)) as caught:
        load(train, tmp_path)
    assert caught.value is error
    assert caught.value.__cause__ is cause
    assert "here_it_happens" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert left_in(tmp_path) == []
    assert pixels(load(Counted(3), tmp_path)) == [0, 1, 2]


_KILLED = """
import os, signal, sys
from pathlib import Path
import test_generated as those

def train():
    yield from (those.made(number) for number in range(3))
    os.kill(os.getpid(), signal.SIGKILL)

those.load(train, Path(sys.argv[1]))
"""
_BOTH = """
import sys
from pathlib import Path
import test_generated as those

def train():
    with open(Path(sys.argv[1]) / "runs.txt", "a") as out:
        out.write("x")
    print("began", flush=True)
    sys.stdin.readline()
    yield from (those.made(number) for number in range(5))

print(those.pixels(those.load(train, Path(sys.argv[1]))), flush=True)
"""


def process(code: str, cache: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=paths),
    )


def test_killed_in_the_middle_nothing_is_taken_for_whole(tmp_path: Path) -> None:
    killed = process(_KILLED, tmp_path)
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    assert len(left_in(tmp_path)) == 1  # what it had begun
    counted = Counted()
    assert pixels(load(counted, tmp_path)) == [0, 1, 2, 3, 4, 5]
    assert counted.runs == 1
    assert len(left_in(tmp_path)) == 2  # records and facts: the rest was removed


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    first = process(_BOTH, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "began\n"
    (lock,) = tmp_path.rglob(".lock")
    with open(lock) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = process(_BOTH, tmp_path)
    first_out, _ = first.communicate("go\n", timeout=PATIENCE)
    second_out, _ = second.communicate("go\n", timeout=PATIENCE)
    assert first_out.splitlines()[-1] == second_out.splitlines()[-1] == "[0, 1, 2, 3, 4]"
    assert (tmp_path / "runs.txt").read_text() == "x"
    assert sorted(path.name for path in left_in(tmp_path)) == ["generated.json", "runs.txt", "train.tfrecord"]


def test_a_cache_that_cant_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "generated").write_text("a file")
    with pytest.raises(UserError, match="can't write to the cache"):
        load(Counted(), tmp_path)
