"""A whole dataset looked through: every checksum, every image, every label, and images that are there twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import TRAIN
from modelyard.data.images import decode as decode_image
from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.converted import DATASET_JSON, LABELS, ConvertedInfo, ShardInfo, read_dataset_json
from modelyard.data.records.items import RecordExamples
from modelyard.errors import DataError
from modelyard.system.files import explain

MOST_PROBLEMS = 100
"""More are counted but not listed."""

_AT_ONCE = 32
_SHOWN = 3

Size = tuple[int, int]


@dataclass
class SplitReport:
    """What was found in one split.

    Args:
        examples: how many there are, sound or not.
        class_counts: how many of each class.
        bad: how many can't be read.
        heights: the least and the most, None if nothing was decoded.
        widths: likewise.
        repeated: how many are the same as an earlier one of the split.
    """

    examples: int
    class_counts: list[int]
    bad: int = 0
    heights: Size | None = None
    widths: Size | None = None
    repeated: int = 0


@dataclass
class VerifyReport:
    """What was found.

    Args:
        splits: by name.
        shared: for two splits, how many examples of the second are in the first, too.
        problems: what is wrong, at most `MOST_PROBLEMS` of it.
        problem_count: how much is wrong.
        warnings: what may be meant so.
    """

    splits: dict[str, SplitReport] = field(default_factory=dict)
    shared: dict[tuple[str, str], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problem_count

    def add(self, problem: str) -> None:
        """Notes something that is wrong."""
        self.problem_count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


@dataclass(frozen=True)
class _Seen:
    """One example: a hash of it, its size, and what is wrong with it."""

    digest: int
    size: Size | None
    problem: str | None


def verify(
    splits: Mapping[str, RawExamples],
    classes: Sequence[str],
    *,
    decode: bool = True,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Looks through all examples, and does not stop at what is wrong.

    Args:
        splits: the stored examples of each split.
        classes: the names of the classes.
        decode: decode every image; without it checksums are checked only.
        threads: how many read at once.
        progress: called with numbers of examples.
    """
    report = VerifyReport()
    digests = {
        name: _verify_split(report, name, items, classes, decode, threads, progress) for name, items in splits.items()
    }
    _find_repeated(report, splits, digests)
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
    decode: bool = True,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Looks through a converted folder: also whether its files are those that dataset.json describes.

    Raises:
        DataError: if dataset.json itself can't be read.
    """
    info = read_dataset_json(folder)
    problems: list[str] = []
    splits: dict[str, RawExamples] = {}
    for split, parts in info.splits.items():
        opened = []
        for shard in parts.shards:
            # One with other bytes is looked through as well, where that is possible: the damaged record gets named.
            try:
                problems += _shard_problems(folder / shard.file, shard, info, cache)
                opened.append(folder / shard.file)
            except DataError as error:
                problems.append(str(error))
        splits[split] = RecordExamples(opened, info.features, cache)
        if len(opened) == len(parts.shards) and _histogram(splits[split], len(info.classes)) != parts.class_counts:
            problems.append(f"{folder}: classes of the {split} split are not as often as {DATASET_JSON} says.")
    try:
        lines = (folder / LABELS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{folder / LABELS} can't be read: {error}.")
    else:
        if lines != info.classes:
            problems.append(f"{folder / LABELS} names other classes than {DATASET_JSON}.")
    report = verify(splits, info.classes, decode=decode, threads=threads, progress=progress)
    report.problems = [*problems, *report.problems][:MOST_PROBLEMS]
    report.problem_count += len(problems)
    return report


def _verify_split(
    report: VerifyReport,
    name: str,
    items: RawExamples,
    classes: Sequence[str],
    decode: bool,
    threads: int,
    progress: Callable[[int], None] | None,
) -> NDArray[np.uint64]:
    """Adds what was found to the report; gives a hash of each example, 0 for bad ones."""
    if isinstance(items, RecordExamples):
        for problem in items.index_problems():
            report.add(problem)
    found = report.splits[name] = SplitReport(len(items), _histogram(items, len(classes)))
    outside = (items.labels < 0) | (items.labels >= len(classes)) if items.label_kind == "class" else np.zeros(0, bool)
    for worst in np.flatnonzero(outside).tolist():
        label = int(items.labels[worst])
        report.add(f"{items.name(worst)}: label {label} is out of range, there are {len(classes)} classes.")
    digests = np.zeros(len(items), np.uint64)
    for number, seen in enumerate(_look_at_all(items, decode, threads, progress)):
        digests[number] = seen.digest
        if seen.problem is not None:
            found.bad += 1
            report.add(seen.problem)
        if seen.size is not None:
            height, width = seen.size
            found.heights = _widened(found.heights, height)
            found.widths = _widened(found.widths, width)
    return digests


def _look_at_all(
    items: RawExamples, decode: bool, threads: int, progress: Callable[[int], None] | None
) -> Iterator[_Seen]:
    """In order, whoever is first."""

    def some(start: int) -> list[_Seen]:
        return [_look_at(items, index, decode) for index in range(start, min(start + _AT_ONCE, len(items)))]

    pool = ThreadPoolExecutor(threads)
    try:
        for batch in pool.map(some, range(0, len(items), _AT_ONCE)):
            if progress is not None:
                progress(len(batch))
            yield from batch
    finally:
        pool.shutdown(cancel_futures=True)


def _look_at(items: RawExamples, index: int, decode: bool) -> _Seen:
    name = items.name(index)
    try:
        stored = items.load(index)
        digest = _digest(stored)
        if isinstance(stored, bytes):
            size = decode_image(stored, None, name).shape[:2] if decode else None
            return _Seen(digest, size, None)
        if stored.dtype.kind == "f" and not np.isfinite(stored).all():
            return _Seen(digest, None, f"{name} holds values that are not finite.")
        return _Seen(digest, stored.shape[:2] if stored.ndim == 3 else None, None)
    except DataError as error:
        return _Seen(0, None, str(error))


def _digest(stored: RawExample) -> int:
    if isinstance(stored, bytes):
        digest = hashlib.blake2b(stored, digest_size=8)
    else:
        digest = hashlib.blake2b(f"{stored.dtype.str}{stored.shape}".encode(), digest_size=8)
        digest.update(np.ascontiguousarray(stored).data)
    return int.from_bytes(digest.digest(), "little") or 1


def _histogram(items: RawExamples, classes: int) -> list[int]:
    if items.label_kind != "class":
        return []
    sound = items.labels[(items.labels >= 0) & (items.labels < classes)]
    counts: list[int] = np.bincount(sound, minlength=classes).tolist()
    return counts


def _widened(known: Size | None, value: int) -> Size:
    return (value, value) if known is None else (min(known[0], value), max(known[1], value))


def _find_repeated(
    report: VerifyReport, splits: Mapping[str, RawExamples], digests: Mapping[str, NDArray[np.uint64]]
) -> None:
    for name, own in digests.items():
        sound = own[own != 0]
        repeated = len(sound) - len(np.unique(sound))
        report.splits[name].repeated = repeated
        if repeated:
            report.warnings.append(f"{repeated:,} examples of the {name} split are there more than once.")
    for one, other in combinations(digests, 2):
        both = np.flatnonzero(np.isin(digests[other], digests[one]) & (digests[other] != 0))
        report.shared[one, other] = len(both)
        if len(both):
            index = int(both[0])
            twin = int(np.flatnonzero(digests[one] == digests[other][index])[0])
            report.warnings.append(
                f"{len(both):,} of {len(digests[other]):,} {other} examples are also in {one}, the first: "
                f"{splits[other].name(index)} is {splits[one].name(twin)}."
            )
    if not all(items.label_kind == "class" for items in splits.values()):
        return
    labels = np.concatenate([items.labels for items in splits.values()]) if splits else np.empty(0, np.int32)
    every = np.concatenate(list(digests.values())) if digests else np.empty(0, np.uint64)
    order = np.lexsort((labels, every))
    same = (every[order][1:] == every[order][:-1]) & (every[order][1:] != 0)
    torn = int(np.count_nonzero(same & (labels[order][1:] != labels[order][:-1])))
    if torn:
        report.warnings.append(f"{torn:,} examples are there with different labels.")


def _shard_problems(path: Path, shard: ShardInfo, info: ConvertedInfo, cache: Path | None) -> Iterator[str]:
    """In what a shard is not the one that was made; a `DataError` if it can't be opened."""
    with explain(path, "read", DataError), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    count = len(RecordExamples([path], info.features, cache))
    if digest != shard.sha256:
        yield f"{path} is not the file that was made: its SHA-256 is not that in {DATASET_JSON}."
    if count != shard.records:
        yield f"{path} has {count:,} records, but {DATASET_JSON} says {shard.records:,}."
