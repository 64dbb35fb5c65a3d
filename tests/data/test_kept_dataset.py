"""The dataset of the last run is kept in memory, and is read again as soon as one of its files is another."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data import kept_dataset
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_dataset, "_kept", None)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were just written count as old."""
    monkeypatch.setattr(kept_dataset, "_SETTLED_NANOSECONDS", -10_000_000_000)


def write(path: Path, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    images, labels = draw.integers(0, 256, (40, 4, 4), np.uint8), np.arange(40) % 4
    np.savez(path, x_train=images, y_train=labels)
    return path


def load(dataset: Any, **options: Any) -> Dataset:
    return load_dataset(load_config(model="mlp", dataset=str(dataset), **options), kept=True)


@pytest.mark.usefixtures("settled")
def test_the_same_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "data.npz", 0)
    first = load(path)
    assert load(path, random_seed=5, learning_rate=0.5) is first
    assert load_dataset(load_config(model="mlp", dataset=str(path))) is not first, "only if it is asked for"
    for other in ({"validation_fraction": 0.3}, {"split_seed": 4}, {"folds": 4, "fold": 2}, {"image_size": 8}):
        assert load(path, **other) is not first, other
        first = load(path)
    assert load("digits") is load("digits", random_seed=3)


@pytest.mark.usefixtures("settled")
def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "data.npz", 0)
    first = load(path)
    times = path.stat()
    write(path, 1)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and time
    second = load(path)
    assert second is not first
    assert second.fingerprint() != first.fingerprint()
    path.unlink()
    write(tmp_path / "other.npz", 0).rename(path)
    assert load(path).fingerprint() == first.fingerprint()


@pytest.mark.usefixtures("settled")
def test_a_file_that_comes_before_the_one_that_was_read_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "mnist.npz", 0)
    first = load("mnist", data_dir=str(tmp_path))
    assert load("mnist", data_dir=str(tmp_path)) is first
    (tmp_path / "mnist").mkdir()
    write(tmp_path / "mnist" / "mnist.npz", 1)
    assert load("mnist", data_dir=str(tmp_path)).fingerprint() != first.fingerprint()
    assert path.exists()


def test_a_file_that_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "data.npz", 0)
    first = load(path)
    assert load(path) is not first
    old = time.time() - 60
    os.utime(path, (old, old))
    assert load(path) is not first, "its inode changed just now"


@pytest.mark.usefixtures("settled")
def test_what_is_kept_can_not_be_changed_and_is_computed_once(tmp_path: Path) -> None:
    kept = load(write(tmp_path / "data.npz", 0))
    arrays = kept.arrays("train")
    assert arrays is not None
    with pytest.raises(ValueError, match="read-only"):
        arrays["image"][0] = 0  # type: ignore[index]
    counted: list[int] = []
    for dataset, calls in ((kept, 1), (load_dataset(load_config(model="mlp", dataset="digits")), 2)):
        counted.clear()
        for _ in range(2):
            dataset.once("a test", lambda: counted.append(1))
        assert len(counted) == calls


@pytest.mark.usefixtures("settled")
def test_data_of_a_program_or_with_code_of_a_user_is_not_kept(tmp_path: Path) -> None:
    images = np.zeros((40, 4, 4), np.uint8)
    config = load_config(model="mlp", dataset=(images, np.arange(40) % 4))
    first, second = (load_dataset(config, kept=True) for _ in range(2))
    assert first.results is second.results is None
