"""Examples in TFRecord files, by index: in any files with a feature map, and in folders that `convert` wrote.

A converted folder has records, their indexes, labels.txt and dataset.json. dataset.json is written last, so a folder
that has one is complete.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from pydantic import NonNegativeInt as Count

from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.example import FeatureMap, describe_example, find_features
from modelyard.data.records.index import IN_PIECES, Index, build_index, find_index, make_index
from modelyard.data.records.tfrecord import RecordFile, plain_file, scan
from modelyard.errors import DataError
from modelyard.storage import Progress, remove_stale
from modelyard.system.console import bar
from modelyard.system.files import whole_file
from modelyard.system.untrusted import read_regular

DATASET_JSON, LABELS, BAD = "dataset.json", "labels.txt", "bad.txt"
SETTINGS = ".convert.json"
"""Exists until the conversion is complete."""
FORMAT: Literal[1] = 1
LARGEST_JSON = 1 << 26
"""Bytes of dataset.json, and of labels.txt, which is shorter."""
_SHOWN = 5
_PROGRESS_RECORDS = 256
_PROGRESS_BYTES = 1 << 22  # reporting every record takes longer than reading it

Encoding = Literal["keep", "jpeg", "raw"]


class RecordExamples(RawExamples):
    """The records of some files, one file after the other. A record is read when it is loaded.

    Args:
        paths: the files; they are sorted.
        features: the features with image and label.
        cache: a folder for uncompressed copies of compressed files, and for indexes that can't be beside their files.
        classes: the names of the classes, if labels are text; by default all texts, sorted.
        progress: called with the bytes that are indexed and the total, if an index has to be made.

    Raises:
        DataError: if a file is damaged, or its records do not have the features.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        features: FeatureMap,
        cache: Path | None = None,
        classes: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.paths, self.features, self.cache = sorted(paths), features, cache
        for folder in {path.parent for path in self.paths} | ({cache / "index", cache / "plain"} if cache else set()):
            remove_stale(folder)
        self._files = [RecordFile(plain_file(path, cache)) for path in self.paths]
        self._indexes = self._open_indexes(progress)
        self._starts = np.cumsum([0, *(len(index.entries) for index in self._indexes)]).tolist()
        self.class_names = self._classes(classes)
        numbers = {name: number for number, name in enumerate(self.class_names or ())}
        columns = [self._labels(number, index, numbers) for number, index in enumerate(self._indexes)]
        self.labels = np.concatenate(columns) if columns else np.empty(0, np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files and the indexes itself. Labels may have been renumbered after they were read.
        arguments = (self.paths, self.features, self.cache, self.class_names)
        return RecordExamples, arguments, {"labels": self.labels}

    @property
    def columns(self) -> list[str]:
        """The other features of the first record."""
        if not len(self):
            return []
        return sorted(set(find_features(self._record(0))) - set(self.features.names()))

    def column(self, name: str) -> NDArray[Any] | None:
        """Reads a feature of all records, each with one text or number. It is kept in the cache.

        Raises:
            DataError: if a record has none, or several values.
        """
        if not len(self) or name not in find_features(self._record(0), (name,)):
            return None
        kept = None
        if self.cache is not None:
            key = hashlib.sha256(f"{self.fingerprint()}/{name}".encode()).hexdigest()[:32]
            kept = self.cache / "columns" / f"{key}.npy"
            with contextlib.suppress(OSError, ValueError):
                values: NDArray[Any] = np.load(kept, allow_pickle=False)
                if values.shape == (len(self),):
                    return values
        found = []
        with bar(f"reading {name}", len(self)) as progress:
            for index in range(len(self)):
                found.append(self._value(index, name))
                if len(found) % _PROGRESS_RECORDS == 0:
                    progress(len(found))
        values = np.array(found)
        if kept is not None:
            with contextlib.suppress(OSError):  # the cache saves time; it is not needed
                kept.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(kept) as file:
                    np.save(file, values)
        return values

    def _value(self, index: int, name: str) -> str | int:
        record = self._record(index)
        feature = find_features(record, (name,)).get(name)
        values = [] if feature is None or feature.kind == "floats" else feature.values(record)
        if len(values) != 1:
            raise DataError(f"{self.name(index)}: the feature {name!r} is not one text or whole number.")
        return values[0].decode(errors="surrogateescape") if isinstance(values[0], bytes) else int(values[0])

    def _record(self, index: int) -> bytes:
        number, row = self._file_and_row(index)
        at, size, crc, *_ = self._indexes[number].entries[row].item()
        return self._files[number].record(at, size, crc, row)

    def load(self, index: int) -> RawExample:
        """Reads the bytes of an image file, or the values as height × width × channels."""
        number, row = self._file_and_row(index)
        # All at once: field by field takes longer than the reading.
        at, size, crc, _, start, length, height, width = self._indexes[number].entries[row].item()
        file = self._files[number]
        record = file.record(at, size, crc, row)
        try:
            payload = record[start : start + length] if length != IN_PIECES else self._joined(record)
            if self.features.coding == "encoded":
                return payload
            return self.features.array(payload, height, width)
        except ValueError as error:
            raise DataError(f"{file.path}, record {row:,} at byte {at:,}: {error}.") from error

    def name(self, index: int) -> str:
        """Returns the file and the number of the record in it."""
        number, row = self._file_and_row(index)
        return f"{self.paths[number].name}, record {row}"

    def fingerprint(self) -> str:
        """Hashes the checksums of all records, and the labels."""
        digest = hashlib.sha256(f"{sorted(self.features.as_dict().items())}{self.class_names}".encode())
        for index in self._indexes:
            digest.update(np.stack([index.entries["length"], index.entries["crc"]], 1).data)
        digest.update(self.labels.data)
        return digest.hexdigest()

    def indexes(self) -> list[tuple[Path, Index]]:
        """Returns each file with its index; for a compressed file, its uncompressed copy."""
        return [(file.path, index) for file, index in zip(self._files, self._indexes, strict=True)]

    def index_problems(self) -> list[str]:
        """Reads all records and returns a message for each index that differs from its file."""
        problems = []
        for path, index in self.indexes():
            try:
                made = build_index(path, self.features)
            except DataError:
                continue  # found when the records are read
            if made.texts != index.texts or not np.array_equal(made.entries, index.entries):
                problems.append(f"{path}.index does not match its file. Delete it; it will be made again.")
        return problems

    def _open_indexes(self, progress: Progress | None) -> list[Index]:
        found = [find_index(file, self.features, self.cache) for file in self._files]
        total = sum(file.size for file, index in zip(self._files, found, strict=True) if index is None)
        done = reported = 0

        def count(read: int) -> None:
            nonlocal done, reported
            done += read
            if progress is not None and (done - reported >= _PROGRESS_BYTES or done == total):
                progress(done, total)
                reported = done

        return [
            index or make_index(file, self.features, self.cache, count)
            for file, index in zip(self._files, found, strict=True)
        ]

    def _file_and_row(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _joined(self, record: bytes) -> bytes:
        found = find_features(record, (self.features.image,)).get(self.features.image)
        if found is None or found.kind != "floats":
            raise ValueError("its index belongs to another record")
        return b"".join(record[start:end] for start, end in found.spans)

    def _classes(self, classes: Sequence[str] | None) -> tuple[str, ...] | None:
        filled = [(path, index) for path, index in self.indexes() if len(index.entries)]
        numbers = [path for path, index in filled if index.texts is None]
        texts = [path for path, index in filled if index.texts is not None]
        if numbers and texts:
            raise DataError(f"labels in {numbers[0]} are numbers, those in {texts[0]} are text.")
        if not texts:
            return None
        if classes is not None:
            return tuple(classes)
        return tuple(sorted({text for _, index in filled for text in index.texts or ()}))

    def _labels(self, number: int, index: Index, numbers: dict[str, int]) -> NDArray[np.int32]:
        column = np.array(index.entries["label"], np.int32)
        if index.texts is None or not len(column):
            return column
        unknown = sorted({text for text in index.texts if text not in numbers})
        if unknown:
            row = int(np.flatnonzero(column == index.texts.index(unknown[0]))[0])
            raise DataError(
                f"{self._files[number].path}, record {row:,}: its label {unknown[0]!r} is not one of the "
                f"{len(numbers)} classes: {', '.join(list(numbers)[:_SHOWN])}{', …' if len(numbers) > _SHOWN else ''}."
            )
        return np.array([numbers[text] for text in index.texts], np.int32)[column]


def describe_record(path: Path, cache: Path | None = None) -> list[str]:
    """Returns one line per feature of the first record of a file: name, kind and size. No lines if it has no record.

    Raises:
        DataError: if the file is damaged or the record is not an Example.
    """
    with _first_record(path, cache) as record:
        return describe_example(record) if record is not None else []


def has_feature(path: Path, name: str, cache: Path | None = None) -> bool:
    """Returns whether the first record of a file has a feature of that name.

    Raises:
        DataError: if the file is damaged or the record is not an Example.
    """
    with _first_record(path, cache) as record:
        return record is not None and name in find_features(record, (name,))


@contextlib.contextmanager
def _first_record(path: Path, cache: Path | None) -> Iterator[bytes | None]:
    """Yields the first record of a file; None if it has none. Errors in the block are those of that record."""
    record = next((data for _, data, _ in scan(plain_file(path, cache))), None)
    try:
        yield record
    except ValueError as error:
        raise DataError(f"{path}, record 0 at byte 0: {error}.") from error


# -- converted folders --------------------------------------------------------------------------------------------


class ShardInfo(BaseModel):
    """One file of records in dataset.json."""

    model_config = ConfigDict(frozen=True)
    # A name, never a path: dataset.json is untrusted input.
    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    records: Count
    bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SplitInfo(BaseModel):
    """One split in dataset.json."""

    model_config = ConfigDict(frozen=True)
    examples: Count
    class_counts: list[Count]
    shards: list[ShardInfo]


class ConvertedInfo(BaseModel):
    """The content of dataset.json."""

    model_config = ConfigDict(frozen=True)
    format: Literal[1]
    name: str
    encoding: Encoding
    shape: list[PositiveInt] | None
    """The shape of every example; None if shapes differ."""
    channels: int | None
    classes: list[str]
    features: FeatureMap
    splits: dict[Literal["train", "validation", "test"], SplitInfo]
    skipped: Count
    """Unreadable examples that were left out; bad.txt lists them."""
    reencoded: Count
    """With encoding keep: images that were resized, so their bytes are not the original ones."""
    source: dict[str, Any]
    settings: dict[str, Any]
    """Everything that decides the bytes of the records."""


def read_dataset_json(folder: Path) -> ConvertedInfo:
    """Reads the dataset.json of a converted folder.

    Raises:
        DataError: if it does not exist, is damaged, or names files outside the folder.
    """
    path = folder / DATASET_JSON
    try:
        return ConvertedInfo.model_validate_json(read_regular(path, LARGEST_JSON, DataError))
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no {DATASET_JSON}: it is not a converted dataset, or not finished.") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'file'}: {p['msg']}" for p in error.errors()[:_SHOWN]]
        raise DataError(f"{path} is damaged or has another version: {'; '.join(problems)}.") from error


def open_converted(folder: Path, cache: Path | None = None) -> tuple[dict[str, RawExamples], tuple[str, ...]]:
    """Returns the raw examples of each split of a converted folder, and the classes.

    Args:
        folder: a folder with a dataset.json.
        cache: a folder for indexes that are missing and can't be written beside their files.

    Raises:
        DataError: if a file is missing or differs from dataset.json.
    """
    info = read_dataset_json(folder)
    splits: dict[str, RawExamples] = {}
    for split, parts in info.splits.items():
        for shard in parts.shards:
            path = folder / shard.file
            if not path.is_file():
                raise DataError(f"{path} is missing, but {DATASET_JSON} lists it. Copy the whole folder again.")
            if (size := path.stat().st_size) != shard.bytes:
                raise DataError(f"{path} has {size:,} bytes, but {DATASET_JSON} says {shard.bytes:,}. Copy it again.")
        paths = [folder / shard.file for shard in parts.shards]
        with bar(f"indexing {split}") as progress:
            examples = RecordExamples(paths, info.features, cache, progress=progress)
        if len(examples) != parts.examples:
            raise DataError(f"{folder} has {len(examples):,} {split} examples; {DATASET_JSON} says {parts.examples:,}.")
        if len(examples) and int(examples.labels.max()) >= len(info.classes):
            worst = int(examples.labels.argmax())
            raise DataError(
                f"{folder}, {examples.name(worst)}: its label {int(examples.labels[worst])} is out of range, "
                f"there are {len(info.classes)} classes."
            )
        splits[split] = examples
    return splits, tuple(info.classes)
