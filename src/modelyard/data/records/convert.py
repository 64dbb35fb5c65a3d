"""Convert: any source becomes a folder of records that is fast to train on, shard by shard, in any number of processes.

The bytes do not depend on the number of processes, nor on how often the conversion was killed and resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from modelyard import storage
from modelyard.config import resolve
from modelyard.config.schema import PATH_DATASET
from modelyard.data.dataset import SPLITS, VALIDATION
from modelyard.data.decoded import DecodedDataset, raw_examples_of
from modelyard.data.open_dataset import open_stored
from modelyard.data.raw_examples import RawExamples
from modelyard.data.records.index import index_path
from modelyard.data.records.reader import (
    BAD,
    DATASET_JSON,
    FORMAT,
    LABELS,
    LARGEST_JSON,
    SETTINGS,
    ConvertedInfo,
    Encoding,
    SplitInfo,
    read_dataset_json,
)
from modelyard.data.records.shard import (
    OnBad,
    RecordEncoder,
    ShardResult,
    ShardTask,
    ShardWriter,
    bad_example_error,
    result_path,
    write_shards,
)
from modelyard.data.splits import SplitRules, divide
from modelyard.errors import DataError
from modelyard.system.console import bar
from modelyard.system.files import PARTIAL, explain, remove_folder, remove_partial, whole_file
from modelyard.system.machine import available_cores
from modelyard.system.untrusted import read_regular

_SHARD_BYTES = 128_000_000
_SAMPLED = 32
_MOST_SHARDS = 99_999
_SHOWN = 5
_SHARD_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_CONVERTED = re.compile(
    rf"({_SHARD_NAME}-)?({'|'.join(SPLITS)})-\d{{5}}-of-\d{{5}}\.tfrecord(\.index)?"
    rf"|{'|'.join(map(re.escape, (LABELS, BAD, DATASET_JSON)))}"
)
"""The names of the files of a complete conversion."""


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Args:
        folder: the folder of records, or its URL.
        already_done: whether an earlier conversion was complete.
        examples: the number of examples in each split.
        shards: the number of shards in each split.
        kept_shards: the number of shards that were finished before.
        bytes: of all shards.
        reencoded: with encoding keep, images that were resized, so their bytes are not the original ones.
        bad: name and reason of each example that was left out.
        shape: of all examples; None if they differ.
    """

    folder: Path | str
    already_done: bool
    examples: dict[str, int]
    shards: dict[str, int]
    kept_shards: int
    bytes: int
    reencoded: int
    bad: list[tuple[str, str]]
    shape: list[int] | None = None


def convert(
    source: str,
    to: str | Path,
    *,
    encoding: Encoding = "keep",
    max_edge: int | None = None,
    quality: int = 95,
    shards: int | None = None,
    validation_fraction: float | None = None,
    name: str | None = None,
    shard_name: str | None = None,
    processes: int = 0,
    on_bad: OnBad = "fail",
    origin: str = "Python",
    **options: Any,
) -> ConvertReport:
    """Converts any source into records with an index, labels and a dataset.json. A killed conversion is resumed.

    Args:
        source: a path or the name of a dataset.
        to: the folder to write, or its URL. For a URL, the records are written to the cache and then uploaded.
        encoding: keep the original bytes, or store JPEG or raw pixels.
        max_edge: resize images whose longer edge is longer; the aspect ratio is kept.
        quality: of JPEGs that are encoded.
        shards: files per split; by default about 128 MB each.
        validation_fraction: split off this share of train, stratified, by split_seed; by default splits are kept.
        name: of the dataset; by default that of the folder.
        shard_name: the first part of the names of the files: photos-train-00000-of-00002.tfrecord; by default none.
        processes: the number of processes; 0 for one per core. The bytes are the same.
        on_bad: fail at an image that can't be read, or skip it and list it in bad.txt.
        origin: where the options come from, for error messages.
        **options: options of the dataset, such as label_column.

    Example:
        >>> modelyard.convert("photos", "photos-records", validation_fraction=0.1)
    """
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    unsuitable = [key for key in ("image_size", "image_fit", "image_channels") if key in options]
    if unsuitable and config.entry("dataset").name == PATH_DATASET:
        raise DataError(f"{unsuitable[0]} is chosen when training; to store smaller images, use --max_edge.")
    stored = open_stored(config)
    if validation_fraction and VALIDATION in stored.sizes():
        raise DataError(f"{source} already has a validation split; remove --validation_fraction.")
    dataset = divide(stored, replace(SplitRules.of(config), validation_fraction=validation_fraction or 0.0))
    if not isinstance(dataset, DecodedDataset):
        processes = 1  # the examples are in the memory of this process
    splits = raw_examples_of(dataset)
    if not all(examples.label_kind == "class" for examples in splits.values()):
        raise DataError(
            f"the labels of {source} are not classes, and a record has one class per example. Train from {source}."
        )
    to = str(to)
    with (
        _prepared(to, storage.cache_folder(config.cache_dir)) as folder,
        bar("converting", sum(dataset.sizes().values())) as progress,
    ):
        report = convert_examples(
            splits,
            dataset.classes,
            folder,
            encoding=encoding,
            max_edge=max_edge,
            quality=quality,
            shards=shards,
            name=name or Path(to).name,
            shard_name=shard_name,
            processes=processes or available_cores(),
            on_bad=on_bad,
            source={"dataset": source, "split_seed": config.split_seed, "validation_fraction": validation_fraction},
            progress=progress,
            address=to,
        )
    return replace(report, folder=to if storage.is_remote(to) else folder)


@contextlib.contextmanager
def _prepared(to: str, cache: Path) -> Iterator[Path]:
    """Yields the local folder to write. If ``to`` is a URL, it is in the cache, and uploaded when it is complete.

    Raises:
        DataError: if there are other files at the URL.
    """
    if not storage.is_remote(to):
        yield Path(to).expanduser()
        return
    names = storage.names_below(to)
    others = [name or to for name in names if not _CONVERTED.fullmatch(name)]
    if others:
        raise DataError(f"{to} holds other files: {', '.join(others[:_SHOWN])}. Use an empty or a new folder.")
    base = storage.output_folder(to, cache)
    with _locked(base, to):
        if DATASET_JSON in names:  # it is complete, and only compared with what is wanted now
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=base) as copy:
                for name in {DATASET_JSON, BAD} & set(names):
                    storage.download(storage.join(to, name), Path(copy, name))
                yield Path(copy)
            return
        yield base / "records"
        with bar(f"uploading to {to}"):
            storage.upload_folder(base / "records", to, last=[DATASET_JSON])
        remove_folder(base / "records")


def convert_examples(
    splits: Mapping[str, RawExamples],
    classes: Sequence[str],
    to: Path,
    *,
    encoding: Encoding = "keep",
    max_edge: int | None = None,
    quality: int = 95,
    shards: int | None = None,
    name: str = "dataset",
    shard_name: str | None = None,
    processes: int = 1,
    on_bad: OnBad = "fail",
    source: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
    address: str | None = None,
) -> ConvertReport:
    """Converts raw examples into a folder of records, in order. The other arguments are those of `convert`.

    Args:
        splits: the raw examples of each split.
        classes: the names of the classes.
        to: the folder to write. An unfinished conversion with the same settings is resumed.
        processes: the number of processes; 1 is this one.
        source: facts about the origin of the examples, for dataset.json.
        progress: called with the number of examples that are done, those of finished shards included.
        address: what messages call the folder; by default its path.

    Raises:
        DataError: if an example can't be read, the folder holds something else, or the disk is full.
    """
    filled = {split: splits[split] for split in SPLITS if split in splits and len(splits[split])}
    _check(splits, filled, classes, max_edge, quality, shards, processes)
    if shard_name is not None and re.fullmatch(_SHARD_NAME, shard_name) is None:
        raise DataError(
            f"shard_name {shard_name!r} must have letters, digits . _ - only, at most 100, the first a letter or digit."
        )
    encoder = _encoder(filled, encoding, max_edge, quality, on_bad)
    counts = {split: shards or _shard_count(examples, encoder) for split, examples in filled.items()}
    counts = {split: min(count, len(filled[split])) for split, count in counts.items()}
    settings: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "encoding": encoding,
        "max_edge": max_edge,
        "quality": quality,
        "shards": counts,
        "classes": list(classes),
        "examples": {split: examples.fingerprint() for split, examples in filled.items()},
        **({} if shard_name is None else {"shard_name": shard_name}),
    }
    first = "" if shard_name is None else f"{shard_name}-"
    tasks = [task for split, examples in filled.items() for task in _tasks(to, first, split, examples, counts[split])]
    address = str(to) if address is None else address
    with _locked(to, address):
        info = _completed(to, settings, tasks, address)
        if info is not None:
            return _report(to, info, _read_bad(to), kept=len(tasks), already_done=True)
        results = {task.path: result for task in tasks if (result := _finished(task.path)) is not None}
        bad = [pair for result in results.values() for pair in result.bad]
        if bad and on_bad == "fail":
            raise bad_example_error(bad[0][1])
        kept = len(results)
        kept_examples = sum(len(task.labels) for task in tasks if task.path in results)
        progress(kept_examples)
        todo = [task for task in tasks if task.path not in results]
        if encoder.arrays and encoding != "jpeg":
            processes = 1  # sending arrays to other processes takes longer than writing them
        writer = ShardWriter(filled, classes, encoder, on_bad)
        written = write_shards(
            writer, todo, min(processes, max(len(todo), 1)), lambda done: progress(kept_examples + done)
        )
        results |= {task.path: result for task, result in zip(todo, written, strict=True)}
        by_split = {split: [results[task.path] for task in tasks if task.split == split] for split in filled}
        info = _info(settings, encoder, by_split, source)
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
        raise DataError(f"there is no split {unknown[0]!r}; the splits are {', '.join(SPLITS)}.")
    if not filled:
        raise DataError("there are no examples to convert.")
    for text, value, least, most in (
        ("max_edge", max_edge, 1, 1 << 20),
        ("quality", quality, 1, 100),
        ("shards", shards, 1, _MOST_SHARDS),
        ("processes", processes, 1, 1 << 10),
    ):
        if value is not None and not least <= value <= most:
            raise DataError(f"{text} must be from {least} to {most:,}, not {value}.")
    for number, text in enumerate(classes):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the name of class {number} is not valid text: {text!r}.") from error
        if text.splitlines() not in ([text], []):
            raise DataError(f"the name of class {number} contains a line break: {text!r}.")
    for split, examples in filled.items():
        for row in (int(examples.labels.argmin()), int(examples.labels.argmax())):
            if not 0 <= int(examples.labels[row]) < len(classes):
                raise DataError(
                    f"{examples.name(row)} of the {split} split: label {int(examples.labels[row])} is out of range, "
                    f"there are {len(classes)} classes."
                )


def _encoder(
    filled: Mapping[str, RawExamples], encoding: Encoding, max_edge: int | None, quality: int, on_bad: OnBad
) -> RecordEncoder:
    """Returns an encoder for the first example that can be read."""
    first_error: DataError | None = None
    for examples in filled.values():
        for row in range(len(examples)):
            try:
                example = examples.load(row)
            except DataError as error:
                first_error = first_error or error
                if on_bad == "fail":
                    raise bad_example_error(str(error)) from error
                continue
            return RecordEncoder.of(example, examples.name(row), encoding, max_edge, quality)
    raise DataError(f"no example can be read. The first error: {first_error}")


def _shard_count(examples: RawExamples, encoder: RecordEncoder) -> int:
    """Estimates the number of shards from a sample."""
    sizes = []
    for row in np.unique(np.linspace(0, len(examples) - 1, _SAMPLED).astype(np.int64)).tolist():
        with contextlib.suppress(DataError):
            sizes.append(len(encoder.encode(examples.load(row), examples.name(row)).payload))
    total = sum(sizes) * len(examples) // max(len(sizes), 1)
    return min(max(math.ceil(total / _SHARD_BYTES), 1), _MOST_SHARDS)


def _tasks(to: Path, first: str, split: str, examples: RawExamples, count: int) -> Iterator[ShardTask]:
    bounds = [len(examples) * number // count for number in range(count + 1)]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        path = to / f"{first}{split}-{number:05}-of-{count:05}.tfrecord"
        yield ShardTask(path, split, start, np.array(examples.labels[start:end], np.int32))


@contextlib.contextmanager
def _locked(to: Path, address: str) -> Iterator[None]:
    """Creates the folder and locks it against other conversions."""
    with explain(to, "write to", DataError):
        if to.exists() and not to.is_dir():
            raise DataError(f"{to} is a file; give a folder.")
        to.mkdir(parents=True, exist_ok=True)
        handle = os.open(to, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another conversion is writing to {address}. Wait until it ends, or stop it.") from error
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(handle)


def _completed(to: Path, settings: dict[str, Any], tasks: Sequence[ShardTask], address: str) -> ConvertedInfo | None:
    """Returns the info of a complete conversion with the same settings; None if one is to be started or resumed.

    Raises:
        DataError: if the folder holds anything else.
    """
    own = {SETTINGS, LABELS, BAD, DATASET_JSON}
    own |= {path.name for task in tasks for path in (task.path, index_path(task.path), result_path(task.path))}
    present = {path.name for path in to.iterdir() if not path.name.startswith(PARTIAL)}
    if DATASET_JSON in present:
        info = read_dataset_json(to)
        _compare(address, info.settings, settings, "holds a dataset that was converted with other settings")
        _remove_temporary(to, tasks)
        return info
    if SETTINGS in present:
        try:
            before = json.loads(read_regular(to / SETTINGS, LARGEST_JSON, DataError))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{to / SETTINGS} can't be read ({error}). Delete {to} or use another folder.") from error
        _compare(address, before, settings, "holds an unfinished conversion with other settings")
    unexpected = sorted(present - own) or ([] if SETTINGS in present else sorted(present))
    if unexpected:
        listed = ", ".join(unexpected[:_SHOWN])
        raise DataError(f"{to} holds other files: {listed}. Use an empty or a new folder.")
    remove_partial(to)
    with explain(to, "write to", DataError), whole_file(to / SETTINGS) as out:
        out.write(json.dumps(settings, indent=1).encode())
    return None


def _compare(to: str, before: Any, now: dict[str, Any], problem: str) -> None:
    if before == now:
        return
    changes = []
    earlier = before if isinstance(before, dict) else {}
    for key in {**now, **earlier}:
        value, old = now.get(key), earlier.get(key)
        if old == value:
            continue
        short = all(isinstance(v, str | int | float | None) for v in (old, value))
        changes.append(f"{key} was {old!r}, is {value!r}" if short else f"other {key}")
    raise DataError(f"{to} {problem}: {'; '.join(changes) or 'unknown ones'}. Use another folder, or delete this one.")


def _finished(path: Path) -> ShardResult | None:
    """Returns the result of a shard that was finished before."""
    try:
        result = ShardResult.model_validate_json(read_regular(result_path(path), LARGEST_JSON, DataError))
        whole = path.stat().st_size == result.bytes and index_path(path).is_file() and result.file == path.name
    except (OSError, ValidationError):
        return None
    return result if whole else None


def _info(
    settings: dict[str, Any],
    encoder: RecordEncoder,
    by_split: Mapping[str, list[ShardResult]],
    source: Mapping[str, Any] | None,
) -> ConvertedInfo:
    splits: dict[Any, SplitInfo] = {}
    for split, results in by_split.items():
        if not any(result.records for result in results):
            raise DataError(f"no example of the {split} split can be read. The first error: {results[0].bad[0][1]}")
        counts = [sum(result.class_counts.get(n, 0) for result in results) for n in range(len(settings["classes"]))]
        splits[split] = SplitInfo(examples=sum(counts), class_counts=counts, shards=[*results])
    every = [result for results in by_split.values() for result in results]
    shapes = {size for result in every for size in result.sizes}
    channels = {size[2] for size in shapes}
    shape = next(iter(shapes)) if len(shapes) == 1 else encoder.features.shape
    return ConvertedInfo(
        format=FORMAT,
        name=settings["name"],
        encoding=settings["encoding"],
        shape=None if shape is None else list(shape),
        channels=channels.pop() if len(channels) == 1 else None,
        classes=settings["classes"],
        features=encoder.features,
        splits=splits,
        skipped=sum(len(result.bad) for result in every),
        reencoded=sum(result.reencoded for result in every),
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
        _remove_temporary(to, tasks)


def _remove_temporary(to: Path, tasks: Sequence[ShardTask]) -> None:
    for path in (to / SETTINGS, *(result_path(task.path) for task in tasks)):
        path.unlink(missing_ok=True)


def _read_bad(to: Path) -> list[tuple[str, str]]:
    try:
        lines = (to / BAD).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [(name, reason) for name, _, reason in (line.partition("\t") for line in lines)]


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
        shape=info.shape,
    )
