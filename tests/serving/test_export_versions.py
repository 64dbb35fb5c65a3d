"""Folders of exports: numbered, and put in order after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.errors import RunError
from modelyard.serving.exporting.export import choose_version, cleaned_up, exported_versions
from modelyard.system import files


def version(base: Path, number: int, text: str = "whole") -> None:
    (base / str(number)).mkdir(parents=True)
    (base / str(number) / "file").write_text(text)


def test_the_next_version_is_chosen_or_the_one_that_was_named(tmp_path: Path) -> None:
    assert choose_version(tmp_path, None, overwrite=False) == 1
    version(tmp_path, 4)
    assert choose_version(tmp_path, None, overwrite=False) == 5
    assert choose_version(tmp_path, None, overwrite=True) == 4
    with pytest.raises(RunError, match="exists and was not changed"):
        choose_version(tmp_path, 4, overwrite=False)


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    version(tmp_path, 1)
    (tmp_path / f"{files.PARTIAL}abc").mkdir()
    (tmp_path / f"{files.PARTIAL}abc" / "variables").write_text("half")
    with cleaned_up(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_version_that_was_being_replaced_is_back(tmp_path: Path) -> None:
    version(tmp_path, 1, "old")
    files._move_aside(tmp_path / "1")  # and then it was killed
    assert exported_versions(tmp_path) == []
    with cleaned_up(tmp_path):
        assert (tmp_path / "1" / "file").read_text() == "old"
        assert choose_version(tmp_path, None, overwrite=False) == 2


def test_exports_side_by_side_leave_each_other_alone(tmp_path: Path) -> None:
    with cleaned_up(tmp_path), files.whole_folder(tmp_path / "1") as first:
        with cleaned_up(tmp_path), files.whole_folder(tmp_path / "2") as second:
            (second / "file").write_text("second")
        (first / "file").write_text("first")
    assert [(tmp_path / name / "file").read_text() for name in "12"] == ["first", "second"]
    (tmp_path / f"{files.PARTIAL}late").mkdir()
    with cleaned_up(tmp_path):
        assert exported_versions(tmp_path) == [1, 2]
        assert not list(tmp_path.glob(f"{files.PARTIAL}*")), "the lock was given back"
