"""A converted folder is untrusted input: its dataset.json is checked."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from modelyard.data.raw_examples import ArrayExamples
from modelyard.data.records.convert import convert_examples
from modelyard.data.records.reader import open_converted, read_dataset_json
from modelyard.errors import DataError
from modelyard.system import console


@pytest.fixture
def made(tmp_path: Path) -> Path:
    items = ArrayExamples(np.zeros((24, 4, 4, 3), np.uint8), np.arange(24, dtype=np.int32) % 3)
    return convert_examples({"train": items}, ("cat", "dog", "emu"), tmp_path / "made", shards=2).folder


def change_description(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads((folder / "dataset.json").read_text())
    change(described)
    (folder / "dataset.json").write_text(json.dumps(described))


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/b", "", ".hidden", "..", "a\\b\0"])
def test_no_file_outside_the_folder_is_opened(made: Path, file: str) -> None:
    change_description(made, lambda d: d["splits"]["train"]["shards"][0].update(file=file))
    with pytest.raises(DataError, match=r"another version: splits\.train\.shards\.0\.file"):
        open_converted(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "another version: format"),
        (lambda d: d.pop("classes"), "classes"),
        (lambda d: d["features"].update(coding="pickle"), "features"),
        (lambda d: d["features"].update(shape=[-1]), "is not the shape of an image"),
        (lambda d: d["splits"].update(other={}), "splits"),
        (lambda d: d["splits"]["train"].update(examples=23), "has 24 train examples; dataset.json says 23"),
        (lambda d: d.update(classes=["cat"]), "its label 2 is out of range, there are 1 classes"),
        (lambda d: d["splits"]["train"]["shards"][1].update(bytes=5), "says 5"),
        (lambda d: d["splits"]["train"]["shards"][1].update(file="none"), "none is missing"),
    ],
)
def test_a_description_that_does_not_match_is_an_error(made: Path, change: Any, message: str) -> None:
    change_description(made, change)
    with pytest.raises(DataError, match=message):
        open_converted(made)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_nonsense_is_no_description(made: Path, text: str) -> None:
    (made / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json is damaged"):
        read_dataset_json(made)


def test_an_unfinished_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is not a converted dataset, or not finished"):
        read_dataset_json(tmp_path)


def test_people_see_that_missing_indexes_are_being_made(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=True, width=100))
    open_converted(made)
    assert out.getvalue() == ""
    for index in made.glob("*.index"):
        index.unlink()
    open_converted(made)
    assert "indexing train" in out.getvalue()
