"""The index of a file of records: made once, and checked before it is used."""

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_files import PLAIN, numbered, payload, write
from rich.console import Console

from modelyard.config import load_config
from modelyard.data.open_dataset import open_stored
from modelyard.data.records import index as record_index
from modelyard.data.records import reader
from modelyard.data.records.example import FeatureMap
from modelyard.data.records.index import index_path
from modelyard.data.records.reader import RecordExamples
from modelyard.system import console


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = numbered(tmp_path / "a.tfrecord", 30)
    RecordExamples([path], PLAIN)
    return path


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose index was made, as it happens."""
    built: list[Path] = []
    build = record_index.build_index
    monkeypatch.setattr(record_index, "build_index", lambda path, *rest: built.append(path) or build(path, *rest))
    return built


def sound_items(items: RecordExamples, count: int = 30) -> bool:
    return [items.load(n) for n in range(count)] == [payload(n) for n in range(count)]


def test_it_is_made_once(path: Path, built: list[Path]) -> None:
    assert sound_items(RecordExamples([path], PLAIN))
    assert built == []
    assert isinstance(RecordExamples([path], PLAIN).indexes()[0][1].entries.base, np.memmap)


def test_a_missing_one_is_made(path: Path, built: list[Path]) -> None:
    index_path(path).unlink()
    assert sound_items(RecordExamples([path], PLAIN))
    assert built == [path]
    assert index_path(path).exists()


def test_one_of_another_file_is_not_used(path: Path, tmp_path: Path, built: list[Path]) -> None:
    records = [{"image": payload(n)[::-1], "label": 1} for n in range(30)]
    other = write(tmp_path / "b.tfrecord", records)
    assert other.stat().st_size == path.stat().st_size
    RecordExamples([other], PLAIN)
    shutil.copy(index_path(other), index_path(path))
    items = RecordExamples([path], PLAIN)
    assert sound_items(items)
    assert items.labels.tolist() == [n % 3 for n in range(30)]
    assert built == [other, path]


def test_one_of_another_feature_map_is_not_used(path: Path, built: list[Path]) -> None:
    shifted = RecordExamples([path], FeatureMap("image", "label", first_label=-1))
    assert shifted.labels.tolist() == [n % 3 + 1 for n in range(30)]
    assert built == [path]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_one_is_made_again(path: Path, data: st.DataObject) -> None:
    place = index_path(path)
    sound = place.read_bytes()
    if data.draw(st.booleans(), label="cut"):
        place.write_bytes(sound[: data.draw(st.integers(0, len(sound) - 1))])
    else:
        damaged = bytearray(sound)
        damaged[data.draw(st.integers(0, len(sound) - 1))] ^= data.draw(st.integers(1, 255))
        place.write_bytes(damaged)
    items = RecordExamples([path], PLAIN)
    assert sound_items(items)
    assert items.labels.tolist() == [n % 3 for n in range(30)]
    place.write_bytes(sound)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", 1 << 60),
        ("length", (1 << 32) - 1),
        ("image_offset", 1 << 30),
        ("image_length", 1 << 30),
        ("label", -1),
    ],
)
def test_a_forged_one_reads_nothing_outside_its_records(path: Path, built: list[Path], column: str, value: int) -> None:
    made = RecordExamples([path], PLAIN).indexes()[0][1]
    entries = np.array(made.entries)
    entries[column][3] = value
    with open(index_path(path), "wb") as out:
        forged = record_index.Index(entries, made.texts)
        record_index.write_index(out, forged, PLAIN, path.stat().st_size)
    assert sound_items(RecordExamples([path], PLAIN))
    assert built == [path]


@pytest.mark.parametrize("header", [b"[]", b"{}", b"1", b'{"records": "x"}', b"[" * 100_000, b"\xff", b""])
def test_a_header_of_nonsense_is_no_matter(path: Path, built: list[Path], header: bytes) -> None:
    index_path(path).write_bytes(record_index._MAGIC + header + b"\n")
    assert sound_items(RecordExamples([path], PLAIN))
    assert built == [path]


def test_an_older_version_is_made_again(path: Path, built: list[Path]) -> None:
    place = index_path(path)
    place.write_bytes(place.read_bytes().replace(b"index 1\n", b"index 0\n"))
    assert sound_items(RecordExamples([path], PLAIN))
    assert built == [path]


def test_where_its_folder_is_read_only_it_goes_to_the_cache(
    path: Path, tmp_path: Path, built: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    index_path(path).unlink()
    real = record_index.whole_file

    def refused(place: Path) -> Any:
        if place.parent == path.parent:
            raise PermissionError(13, "Permission denied")
        return real(place)

    monkeypatch.setattr(record_index, "whole_file", refused)
    for _ in range(2):
        assert sound_items(RecordExamples([path], PLAIN, tmp_path / "cache"))
    assert built == [path]
    assert not index_path(path).exists()
    assert len(list((tmp_path / "cache/index").iterdir())) == 1


def test_where_nothing_can_be_written_it_stays_in_memory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index_path(path).unlink()
    (tmp_path / "file").touch()

    def refused(place: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(record_index, "whole_file", refused)
    with caplog.at_level(logging.WARNING):
        assert sound_items(RecordExamples([path], PLAIN, tmp_path / "file" / "cache"))
    assert "kept in memory" in caplog.text


def test_progress_reports_the_bytes_of_files_without_an_index(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [numbered(tmp_path / name, 10) for name in ("b", "c")]
    total = sum(file.stat().st_size for file in others)
    seen: list[tuple[int, int]] = []

    def report(done: int, all_of_it: int) -> None:
        seen.append((done, all_of_it))

    RecordExamples([path, *others], PLAIN, progress=report)
    assert seen == [(total, total)]
    RecordExamples([path, *others], PLAIN, progress=report)
    assert len(seen) == 1
    for file in others:
        index_path(file).unlink()
    monkeypatch.setattr(reader, "_PROGRESS_BYTES", 1)
    RecordExamples([path, *others], PLAIN, progress=report)
    assert len(seen) == 1 + 20
    assert seen[1:] == sorted(seen[1:])
    assert seen[-1] == (total, total)


def test_people_see_that_an_index_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=True, width=100))
    write(tmp_path / "a.tfrecord", [{"image/encoded": payload(n), "image/class/label": n % 3} for n in range(9)])
    config = load_config(dataset=str(tmp_path / "a.tfrecord"), image_size=8, cache_dir=str(tmp_path / "cache"))
    for words in ("indexing records", ""):
        open_stored(config)
        assert words in out.getvalue()
        assert bool(words) == bool(out.getvalue())
        out.truncate(0)
        out.seek(0)


def test_its_header_is_readable(path: Path) -> None:
    header = json.loads(index_path(path).read_bytes().split(b"\n")[1])
    assert (header["records"], header["size"]) == (30, path.stat().st_size)
    assert header["features"]["image"] == "image"
