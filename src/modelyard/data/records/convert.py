"""Conversion of any source into a folder of records that trains fast: shard by shard, in any number of processes.

The bytes that come out do not depend on the number of processes, nor on how often it was killed and started again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from modelyard.data.dataset import SPLITS
from modelyard.data.raw_examples import RawExamples
from modelyard.data.records.convert_processes import write_shards
from modelyard.data.records.convert_shard import (
    OnBad,
    Recipe,
    ShardResult,
    ShardTask,
    encode_item,
    recipe_for,
    result_path,
    unskipped,
)
from modelyard.data.records.index import index_path
from modelyard.data.records.reader import (
    BAD,
    DATASET_JSON,
    FORMAT,
    LABELS,
    SETTINGS,
    ConvertedInfo,
    Encoding,
    ShardInfo,
    SplitInfo,
    read_dataset_json,
)
from modelyard.errors import DataError
from modelyard.system.files import PARTIAL, explain, remove_partial, whole_file

_SHARD_BYTES = 128_000_000
_LOOKED_AT = 32
_MOST_SHARDS = 99_999
_SHOWN = 5


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion made.

    Args:
        folder: where it is.
        already_done: nothing was to do.
        examples: in each split.
        shards: in each split.
        kept_shards: finished by an earlier start.
        bytes: of all shards.
        reencoded: examples that were made smaller and so are not the original bytes, where those were to be kept.
        bad: name and reason of each example that was left out.
    """

    folder: Path
    already_done: bool
    examples: dict[str, int]
    shards: dict[str, int]
    kept_shards: int
    bytes: int
    reencoded: int
    bad: list[tuple[str, str]]


def convert_items(
    splits: Mapping[str, RawExamples],
    classes: Sequence[str],
    to: Path,
    *,
    encoding: Encoding = "keep",
    max_edge: int | None = None,
    quality: int = 95,
    shards: int | None = None,
    name: str = "dataset",
    processes: int = 1,
    on_bad: OnBad = "fail",
    source: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Converts stored examples into a folder of records; they stay in order.

    Args:
        splits: the stored examples of each split.
        classes: the names of the classes.
        to: the folder to make. One that was left unfinished with the same settings is gone on with.
        encoding: ``keep`` the bytes of image files, ``jpeg`` for all, or ``raw`` pixels. Arrays are kept as values.
        max_edge: images whose longer edge is longer are made smaller, never larger.
        quality: of JPEGs that are made, 1 to 100.
        shards: files a split; by default so many that one has about 128 MB.
        name: what to call the dataset.
        processes: how many work at it; 1 is this one.
        on_bad: ``fail`` at the first example that can't be read, or ``skip`` all of them and list them in bad.txt.
        source: facts about where the examples come from, for dataset.json.
        progress: called with numbers of examples as they are done, beginning with those of earlier starts.

    Raises:
        DataError: if an example can't be read, the folder holds something else, or the disk is full.
    """
    filled = {split: splits[split] for split in SPLITS if split in splits and len(splits[split])}
    _check(splits, filled, classes, max_edge, quality, shards, processes)
    recipe = _recipe(filled, encoding, max_edge, quality, on_bad)
    counts = {split: shards or _shard_count(items, recipe) for split, items in filled.items()}
    counts = {split: min(count, len(filled[split])) for split, count in counts.items()}
    settings: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "encoding": encoding,
        "max_edge": max_edge,
        "quality": quality,
        "shards": counts,
        "classes": list(classes),
        "examples": {split: items.fingerprint() for split, items in filled.items()},
    }
    tasks = [task for split, items in filled.items() for task in _tasks(to, split, items, counts[split])]
    with _own_folder(to):
        done = _earlier(to, settings, tasks)
        if done is not None:
            return done
        results = {task.path: result for task in tasks if (result := _finished(task.path)) is not None}
        bad = [pair for task in tasks if task.path in results for pair in results[task.path].bad]
        if bad and on_bad == "fail":
            raise DataError(unskipped(bad[0][1]))
        kept = len(results)
        if progress is not None and kept:
            progress(sum(len(task.labels) for task in tasks if task.path in results))
        left = [task for task in tasks if task.path not in results]
        if recipe.arrays and encoding != "jpeg":
            processes = 1  # sending arrays to other processes would cost more than it brings
        made = write_shards(left, filled, classes, recipe, on_bad, min(processes, max(len(left), 1)), progress)
        results |= {task.path: result for task, result in zip(left, made, strict=True)}
        info = _info(settings, recipe, {task.path.name: task.split for task in tasks}, list(results.values()), source)
        bad = [pair for task in tasks for pair in results[task.path].bad]
        _finish(to, info, bad, tasks)
    return _report(to, info, bad, kept=kept, already_done=False)


def _check(
    splits: Mapping[str, RawExamples],
    filled: Mapping[str, RawExamples],
    classes: Sequence[str],
    max_edge: int | None,
    quality: int,
    shards: int | None,
    processes: int,
) -> None:
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise DataError(f"there is no split {unknown[0]!r}; splits are {', '.join(SPLITS)}.")
    if not filled:
        raise DataError("there are no examples to convert.")
    for text, value, least, most in (
        ("max_edge", max_edge, 1, 1 << 20),
        ("quality", quality, 1, 100),
        ("shards", shards, 1, _MOST_SHARDS),
        ("processes", processes, 1, 1 << 10),
    ):
        if value is not None and not least <= value <= most:
            raise DataError(f"{text} is from {least} to {most:,}, not {value}.")
    for number, text in enumerate(classes):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the name of class {number} is not valid text: {text!r}.") from error
        if text.splitlines() not in ([text], []):
            raise DataError(f"the name of class {number} holds a line break: {text!r}.")
    for split, items in filled.items():
        for worst in (int(items.labels.argmin()), int(items.labels.argmax())):
            if not 0 <= int(items.labels[worst]) < len(classes):
                raise DataError(
                    f"{items.name(worst)} of the {split} split: label {int(items.labels[worst])} is out of range, "
                    f"there are {len(classes)} classes."
                )


def _recipe(
    filled: Mapping[str, RawExamples], encoding: Encoding, max_edge: int | None, quality: int, on_bad: OnBad
) -> Recipe:
    """As the first example that can be read wants it."""
    first_error: DataError | None = None
    for items in filled.values():
        for index in range(len(items)):
            try:
                stored = items.load(index)
            except DataError as error:
                first_error = first_error or error
                if on_bad == "fail":
                    raise DataError(unskipped(str(error))) from error
                continue
            return recipe_for(stored, encoding, max_edge, quality, items.name(index))
    raise DataError(f"no example can be read. The first one: {first_error}")


def _shard_count(items: RawExamples, recipe: Recipe) -> int:
    """From a few examples, the same whoever asks."""
    looked_at = np.unique(np.linspace(0, len(items) - 1, _LOOKED_AT).astype(np.int64)).tolist()
    sizes = []
    for index in looked_at:
        with contextlib.suppress(DataError):
            sizes.append(len(encode_item(items.load(index), recipe, items.name(index)).payload))
    total = sum(sizes) * len(items) // max(len(sizes), 1)
    return min(max(math.ceil(total / _SHARD_BYTES), 1), _MOST_SHARDS)


def _tasks(to: Path, split: str, items: RawExamples, count: int) -> Iterator[ShardTask]:
    bounds = [len(items) * number // count for number in range(count + 1)]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        path = to / f"{split}-{number:05}-of-{count:05}.tfrecord"
        yield ShardTask(path, split, start, np.array(items.labels[start:end], np.int32))


@contextlib.contextmanager
def _own_folder(to: Path) -> Iterator[None]:
    """Makes the folder, and makes sure that no other conversion writes to it."""
    with explain(to, "write to", DataError):
        if to.exists() and not to.is_dir():
            raise DataError(f"{to} is a file; name a folder.")
        to.mkdir(parents=True, exist_ok=True)
        handle = os.open(to, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no locks.
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise DataError(f"another conversion is writing to {to}. Wait for it to end, or stop it.") from error
        yield
    finally:
        os.close(handle)


def _earlier(to: Path, settings: dict[str, Any], tasks: Sequence[ShardTask]) -> ConvertReport | None:
    """What an earlier start left: all of it, or something to go on with, or nothing; anything else is an error."""
    own = {SETTINGS, LABELS, BAD, DATASET_JSON}
    own |= {place.name for task in tasks for place in (task.path, index_path(task.path), result_path(task.path))}
    present = {path.name for path in to.iterdir() if not path.name.startswith(PARTIAL)}
    if DATASET_JSON in present:
        info = read_dataset_json(to)
        _same(to, info.settings, settings, "holds a dataset that was converted with other settings")
        _remove_notes(to, tasks)
        return _report(to, info, _read_bad(to), kept=len(tasks), already_done=True)
    if SETTINGS in present:
        try:
            before = json.loads((to / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{to / SETTINGS} can't be read ({error}). Delete {to} or name another folder.") from error
        _same(to, before, settings, "holds an unfinished conversion with other settings")
    strangers = sorted(present - own)
    if strangers or (present and SETTINGS not in present):
        listed = ", ".join((strangers or sorted(present))[:_SHOWN])
        raise DataError(f"{to} holds other files: {listed}. Name a folder that is empty or not there.")
    remove_partial(to)
    with explain(to, "write to", DataError), whole_file(to / SETTINGS) as out:
        out.write(json.dumps(settings, indent=1).encode())
    return None


def _same(to: Path, before: Any, now: dict[str, Any], what: str) -> None:
    if before == now:
        return
    told = []
    for key, value in now.items():
        old = before.get(key) if isinstance(before, dict) else None
        if old == value:
            continue
        short = all(isinstance(v, str | int | float | None) for v in (old, value))
        told.append(f"{key} was {old!r}, is {value!r}" if short else f"other {key}")
    raise DataError(f"{to} {what}: {'; '.join(told) or 'unknown ones'}. Name another folder, or delete this one.")


def _finished(path: Path) -> ShardResult | None:
    """The result of a shard that an earlier start finished."""
    try:
        result = ShardResult.model_validate_json(result_path(path).read_bytes())
        whole = path.stat().st_size == result.bytes and index_path(path).is_file() and result.file == path.name
    except (OSError, ValidationError):
        return None
    return result if whole else None


def _info(
    settings: dict[str, Any],
    recipe: Recipe,
    split_of: Mapping[str, str],
    results: list[ShardResult],
    source: Mapping[str, Any] | None,
) -> ConvertedInfo:
    results = sorted(results, key=lambda result: result.file)
    splits: dict[Any, SplitInfo] = {}
    for split in settings["examples"]:
        own = [result for result in results if split_of[result.file] == split]
        counts = [sum(result.class_counts.get(label, 0) for result in own) for label in range(len(settings["classes"]))]
        shards = [ShardInfo.model_validate(result.model_dump(include=set(ShardInfo.model_fields))) for result in own]
        splits[split] = SplitInfo(examples=sum(counts), class_counts=counts, shards=shards)
        if not splits[split].examples:
            bad = next(pair for result in own for pair in result.bad)
            raise DataError(f"no example of the {split} split can be read. The first one: {bad[1]}")
    sizes = {size for result in results for size in (result.smallest, result.largest) if size is not None}
    shape = list(recipe.features.shape) if recipe.features.shape is not None else None
    if len(sizes) == 1:
        shape = list(next(iter(sizes)))
    channels = {size[2] for size in sizes}
    return ConvertedInfo(
        format=FORMAT,
        name=settings["name"],
        encoding=settings["encoding"],
        shape=shape,
        channels=channels.pop() if len(channels) == 1 else None,
        classes=settings["classes"],
        features=recipe.features,
        splits=splits,
        skipped=sum(len(result.bad) for result in results),
        reencoded=sum(result.reencoded for result in results),
        source=dict(source or {}),
        settings=settings,
    )


def _finish(to: Path, info: ConvertedInfo, bad: Sequence[tuple[str, str]], tasks: Sequence[ShardTask]) -> None:
    with explain(to, "write to", DataError):
        with whole_file(to / LABELS) as out:
            out.write("".join(f"{text}\n" for text in info.classes).encode())
        if bad:
            with whole_file(to / BAD) as out:
                lines = ("\t".join(" ".join(part.split()) for part in pair) for pair in bad)
                out.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        with whole_file(to / DATASET_JSON) as out:
            out.write(info.model_dump_json(indent=1).encode() + b"\n")
        _remove_notes(to, tasks)


def _remove_notes(to: Path, tasks: Sequence[ShardTask]) -> None:
    for path in (to / SETTINGS, *(result_path(task.path) for task in tasks)):
        path.unlink(missing_ok=True)


def _read_bad(to: Path) -> list[tuple[str, str]]:
    try:
        lines = (to / BAD).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [(path, reason) for path, _, reason in (line.partition("\t") for line in lines)]


def _report(
    to: Path, info: ConvertedInfo, bad: list[tuple[str, str]], *, kept: int, already_done: bool
) -> ConvertReport:
    return ConvertReport(
        folder=to,
        already_done=already_done,
        examples={split: parts.examples for split, parts in info.splits.items()},
        shards={split: len(parts.shards) for split, parts in info.splits.items()},
        kept_shards=kept,
        bytes=sum(shard.bytes for parts in info.splits.values() for shard in parts.shards),
        reencoded=info.reencoded,
        bad=bad,
    )
