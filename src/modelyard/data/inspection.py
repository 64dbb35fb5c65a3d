"""Inspect datasets: what a dataset contains, and a check of every checksum, image and label for damage."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.config import resolve
from modelyard.config.schema import is_path
from modelyard.data.dataset import IMAGE, TRAIN, Dataset
from modelyard.data.decoded import DecodedDataset, raw_examples_of
from modelyard.data.image_spec import UndecodableError
from modelyard.data.images import decode, upright_size
from modelyard.data.open_dataset import open_dataset, open_stored
from modelyard.data.raw_examples import RawExamples
from modelyard.data.records.reader import (
    DATASET_JSON,
    LABELS,
    LARGEST_JSON,
    ConvertedInfo,
    RecordExamples,
    ShardInfo,
    describe_record,
    read_dataset_json,
)
from modelyard.data.sources.files import kind_of
from modelyard.data.sources.remote import local_tree
from modelyard.data.splits import SPLIT_OPTIONS
from modelyard.errors import DataError
from modelyard.storage import cache_folder, is_remote
from modelyard.system.console import bar
from modelyard.system.files import explain
from modelyard.system.machine import available_cores
from modelyard.system.untrusted import open_regular, read_regular

MOST_PROBLEMS = 100
"""More are counted but not listed."""

_BATCH = 32
_SHOWN = 3

Size = tuple[int, int]


def data_info(source: str, origin: str = "Python", **options: Any) -> dict[str, Any]:
    """Returns the splits, classes and shapes of a dataset, as it is stored.

    Args:
        source: a path or the name of a dataset.
        origin: where the options come from, for error messages.
        **options: options of the dataset. With one of splits, such as ``validation_fraction``, the splits are those
            that a run with these options has.
    """
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    as_in_a_run = any(options.get(name) is not None for name in SPLIT_OPTIONS)
    dataset = open_dataset(config) if as_in_a_run else open_stored(config)
    splits = {}
    for split, size in dataset.sizes().items():
        labels = dataset.labels(split)
        counts = None if labels is None else np.bincount(labels, minlength=len(dataset.classes)).tolist()
        splits[split] = {"examples": size, "classes": counts}
        if dataset.derived is not None and split in dataset.derived.groups:
            splits[split]["groups"] = dataset.derived.groups[split]
    sizes, measured, bad = _sizes(dataset)
    image, fingerprint = None, None
    try:
        image, fingerprint = dataset.features.get(IMAGE), dataset.fingerprint()
    except UndecodableError as error:  # the first example decides the size
        bad = list(dict.fromkeys([f"{TRAIN}: {error}", *bad]))
    return {
        "source": source,
        "classes": list(dataset.classes),
        "splits": splits,
        "image": None if image is None else image.as_json(),
        "sizes": sizes,
        "measured": measured,
        "bad": bad,
        "record": _first_record(dataset),
        "fingerprint": fingerprint,
    }


def _sizes(dataset: Dataset) -> tuple[list[list[int]], int, list[str]]:
    """Returns the smallest and the largest height and width of raw images, of how many, and which can't be decoded.

    At most 100 images are read.
    """
    if not isinstance(dataset, DecodedDataset):
        return [], 0, []
    examples = dataset.splits[TRAIN]
    rows = np.unique(np.linspace(0, len(examples) - 1, min(len(examples), 100)).astype(int)).tolist()
    raw = [(examples.load(row), examples.name(row)) for row in rows]
    found, bad = [], []
    for value, name in raw:
        try:
            if isinstance(value, bytes) or value.ndim >= 2:
                found.append(upright_size(value, name))
        except UndecodableError as error:
            bad.append(f"{TRAIN}: {error}")
    return ([np.min(found, axis=0).tolist(), np.max(found, axis=0).tolist()] if found else []), len(found), bad


def _first_record(dataset: Dataset) -> list[str]:
    examples = dataset.splits[TRAIN] if isinstance(dataset, DecodedDataset) else None
    return describe_record(examples.paths[0], examples.cache) if isinstance(examples, RecordExamples) else []


# -- verify ---------------------------------------------------------------------------------------------------------


@dataclass
class SplitReport:
    """The result for one split.

    Args:
        examples: the number of examples, bad ones included.
        class_counts: the number of examples of each class.
        bad: the number of examples that can't be read.
        heights: the smallest and the largest height; None if there are no images.
        widths: the smallest and the largest width.
    """

    examples: int
    class_counts: list[int]
    bad: int = 0
    heights: Size | None = None
    widths: Size | None = None


@dataclass
class VerifyReport:
    """The result of a verification.

    Args:
        splits: by name.
        problems: errors in the data, at most `MOST_PROBLEMS` of them.
        problem_count: the number of errors.
        warnings: findings that may be intended.
    """

    splits: dict[str, SplitReport] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problem_count

    def add(self, problem: str) -> None:
        """Adds an error in the data."""
        self.problem_count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


def verify_data(source: str, origin: str = "Python", **options: Any) -> VerifyReport:
    """Reads all checksums, images, labels and classes, and lists all problems.

    Args:
        source: a path or the name of a dataset.
        origin: where the options come from, for error messages.
        **options: options of the dataset.
    """
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    cache = cache_folder(config.cache_dir)
    folder = local_tree(source, cache) if is_remote(source) else Path(source).expanduser()
    threads = config.input_threads or available_cores()
    if is_path(source) and kind_of(folder) == "converted":
        examples = sum(split.examples for split in read_dataset_json(folder).splits.values())
        with bar("verifying", examples) as progress:
            return verify_folder(folder, cache=cache, threads=threads, progress=progress)
    dataset = open_stored(config)
    with bar("verifying", sum(dataset.sizes().values())) as progress:
        return verify(raw_examples_of(dataset), dataset.classes, threads=threads, progress=progress)


def verify(
    splits: Mapping[str, RawExamples],
    classes: Sequence[str],
    *,
    threads: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    report: VerifyReport | None = None,
) -> VerifyReport:
    """Checks all examples and adds the problems to the report. A problem does not end the check."""
    report = report or VerifyReport()
    for name, examples in splits.items():
        report.splits[name] = SplitReport(len(examples), _class_counts(examples, len(classes)))
        for problem in examples.index_problems() if isinstance(examples, RecordExamples) else ():
            report.add(problem)
        if examples.label_kind == "class":
            for row in np.flatnonzero((examples.labels < 0) | (examples.labels >= len(classes))).tolist():
                label = int(examples.labels[row])
                report.add(f"{examples.name(row)}: label {label} is out of range, there are {len(classes)} classes.")
    for done, (name, checked) in enumerate(_check_all(splits, threads), 1):
        progress(done)
        split = report.splits[name]
        if checked.problem is not None:
            split.bad += 1
            report.add(checked.problem)
        if checked.size is not None:
            height, width = checked.size
            split.heights = _extended(split.heights, height)
            split.widths = _extended(split.widths, width)
    if TRAIN in report.splits:
        empty = [classes[n] for n, count in enumerate(report.splits[TRAIN].class_counts) if not count]
        if empty:
            listed = ", ".join(empty[:_SHOWN]) + (", …" if len(empty) > _SHOWN else "")
            report.warnings.append(f"{len(empty)} of {len(classes)} classes have no training example: {listed}.")
    return report


def verify_folder(
    folder: Path,
    *,
    cache: Path | None = None,
    threads: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> VerifyReport:
    """Checks a converted folder: all examples, and that its files match dataset.json.

    Raises:
        DataError: if dataset.json can't be read.
    """
    info = read_dataset_json(folder)
    report = VerifyReport()
    splits: dict[str, RawExamples] = {}
    for split, parts in info.splits.items():
        opened = []
        for shard in parts.shards:
            # The records of a shard with a wrong checksum are checked too, to name the damaged ones.
            try:
                for problem in _shard_problems(folder / shard.file, shard, info, cache):
                    report.add(problem)
                opened.append(folder / shard.file)
            except DataError as error:
                report.add(str(error))
        splits[split] = RecordExamples(opened, info.features, cache)
        if len(opened) == len(parts.shards) and _class_counts(splits[split], len(info.classes)) != parts.class_counts:
            report.add(f"{folder}: the class counts of the {split} split differ from {DATASET_JSON}.")
    try:
        lines = read_regular(folder / LABELS, LARGEST_JSON, DataError).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        report.add(f"{folder / LABELS} can't be read: {error}.")
    except DataError as error:
        report.add(str(error))
    else:
        if lines != info.classes:
            report.add(f"{folder / LABELS} has other classes than {DATASET_JSON}.")
    return verify(splits, info.classes, threads=threads, progress=progress, report=report)


@dataclass(frozen=True)
class _Checked:
    """The result for one example."""

    size: Size | None = None
    problem: str | None = None


def _check_all(splits: Mapping[str, RawExamples], threads: int) -> Iterator[tuple[str, _Checked]]:
    """Yields split and result of each example, in order."""

    def check_batch(examples: RawExamples, start: int) -> list[_Checked]:
        return [_check(examples, row) for row in range(start, min(start + _BATCH, len(examples)))]

    pool = ThreadPoolExecutor(threads)
    try:
        for name, examples in splits.items():
            starts = range(0, len(examples), _BATCH)
            batches = pool.map(check_batch, itertools.repeat(examples), starts)
            for checked in itertools.chain.from_iterable(batches):
                yield name, checked
    finally:
        pool.shutdown(cancel_futures=True)


def _check(examples: RawExamples, row: int) -> _Checked:
    name = examples.name(row)
    try:
        example = examples.load(row)
        if isinstance(example, bytes):
            return _Checked(decode(example, None, name).shape[:2])
        if example.dtype.kind == "f" and not np.isfinite(example).all():
            return _Checked(problem=f"{name} holds values that are not finite.")
        return _Checked(example.shape[:2] if example.ndim == 3 else None)
    except DataError as error:
        return _Checked(problem=str(error))


def _class_counts(examples: RawExamples, classes: int) -> list[int]:
    if examples.label_kind != "class":
        return []
    valid = examples.labels[(examples.labels >= 0) & (examples.labels < classes)]
    counts: list[int] = np.bincount(valid, minlength=classes).tolist()
    return counts


def _extended(known: Size | None, value: int) -> Size:
    return (value, value) if known is None else (min(known[0], value), max(known[1], value))


def _shard_problems(path: Path, shard: ShardInfo, info: ConvertedInfo, cache: Path | None) -> Iterator[str]:
    """Yields the differences of a shard from dataset.json.

    Raises:
        DataError: if it can't be opened.
    """
    with explain(path, "read", DataError), open_regular(path, DataError) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    count = len(RecordExamples([path], info.features, cache))
    if digest != shard.sha256:
        yield f"{path} is not the file that was written: its SHA-256 differs from {DATASET_JSON}."
    if count != shard.records:
        yield f"{path} has {count:,} records, but {DATASET_JSON} says {shard.records:,}."
