"""Examples in TFRecord files, ours or others', by number."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.example import describe_example, find_features
from modelyard.data.records.feature_map import FeatureMap
from modelyard.data.records.index import IN_PIECES, Index, build_index, find_index, make_index
from modelyard.data.records.tfrecord import RecordFile, plain_file, scan
from modelyard.errors import DataError
from modelyard.storage import Progress, remove_stale

__all__ = ["FeatureMap", "RecordExamples", "describe_record"]

_SHOWN = 5
_TELL_BYTES = 1 << 22  # to tell of every record takes longer than to read it


class RecordExamples(RawExamples):
    """The records of some files, one file after the other. Nothing is read but what is asked for.

    Args:
        paths: the files; they are taken in order of their names.
        features: where image and label are in a record.
        cache: a folder for plain copies of compressed files, and for indexes that can't stand beside their files.
        classes: the names of the classes, where labels are text; by default all texts there are, sorted.
        progress: called with the bytes that are indexed and the bytes there are to index, if there are any.

    Raises:
        DataError: if a file is damaged, or its records do not hold what ``features`` says.
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
        places = {path.parent for path in self.paths} | ({cache / "index", cache / "plain"} if cache else set())
        for place in places:
            remove_stale(place)
        self._files = [RecordFile(plain_file(path, cache)) for path in self.paths]
        self._indexes = self._open_indexes(progress)
        self._starts = np.cumsum([0, *(len(index.entries) for index in self._indexes)]).tolist()
        self.class_names = self._classes(classes)
        numbers = {name: number for number, name in enumerate(self.class_names or ())}
        columns = [self._labels(number, index, numbers) for number, index in enumerate(self._indexes)]
        self.labels = np.concatenate(columns) if columns else np.empty(0, np.int32)
        self._fingerprint: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files and maps the indexes itself. Labels may have been renumbered since.
        arguments = (self.paths, self.features, self.cache, self.class_names)
        return RecordExamples, arguments, {"labels": self.labels}

    def load(self, index: int) -> RawExample:
        """The bytes of an image file, or the values as height × width × channels."""
        number, row = self._place(index)
        # All at once: field by field takes longer than the reading.
        at, size, crc, _, start, length, height, width = self._indexes[number].entries[row].item()
        file = self._files[number]
        record = file.record(at, size, crc, row)
        try:
            payload = record[start : start + length] if length != IN_PIECES else self._gathered(record)
            if self.features.coding == "encoded":
                return payload
            return self.features.array(payload, height, width)
        except ValueError as error:
            raise DataError(f"{file.path}, record {row:,} at byte {at:,}: {error}.") from error

    def name(self, index: int) -> str:
        """The file and the number of the record in it."""
        number, row = self._place(index)
        return f"{self.paths[number].name}, record {row}"

    def fingerprint(self) -> str:
        """Of all records' checksums and labels, so that it changes with every bit of them."""
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{sorted(self.features.as_dict().items())}{self.class_names}".encode())
            for index in self._indexes:
                digest.update(np.stack([index.entries["length"], index.entries["crc"]], 1).data)
            digest.update(self.labels.data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def places(self) -> list[tuple[Path, Index]]:
        """Each file with its index; a compressed file is its plain copy."""
        return [(file.path, index) for file, index in zip(self._files, self._indexes, strict=True)]

    def index_problems(self) -> list[str]:
        """What is in the indexes and not in the files: all records are read to know."""
        problems = []
        for file, index in zip(self._files, self._indexes, strict=True):
            try:
                made = build_index(file.path, self.features)
            except DataError:
                continue  # reading the records says what is damaged
            if made.texts != index.texts or not np.array_equal(made.entries, index.entries):
                problems.append(f"{file.path}.index does not fit its file. Delete it: it is made anew.")
        return problems

    def _open_indexes(self, progress: Progress | None) -> list[Index]:
        found = [find_index(file, self.features, self.cache) for file in self._files]
        total = sum(file.size for file, index in zip(self._files, found, strict=True) if index is None)
        done = told = 0

        def count(read: int) -> None:
            nonlocal done, told
            done += read
            if progress is not None and (done - told >= _TELL_BYTES or done == total):
                progress(done, total)
                told = done

        return [
            index or make_index(file, self.features, self.cache, count)
            for file, index in zip(self._files, found, strict=True)
        ]

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _gathered(self, record: bytes) -> bytes:
        found = find_features(record, (self.features.image,)).get(self.features.image)
        if found is None or found.kind != "floats":
            raise ValueError("its index is of another record")
        return b"".join(record[start:end] for start, end in found.spans)

    def _classes(self, classes: Sequence[str] | None) -> tuple[str, ...] | None:
        filled = [(path, index) for path, index in self.places() if len(index.entries)]
        kinds = {index.texts is None for _, index in filled}
        if len(kinds) > 1:
            number = next(path for path, index in filled if index.texts is None)
            text = next(path for path, index in filled if index.texts is not None)
            raise DataError(f"labels in {number} are numbers, those in {text} are text.")
        if kinds != {False}:
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
                f"{self._files[number].path}, record {row:,}: its label {unknown[0]!r} is none of the "
                f"{len(numbers)} classes: {', '.join(list(numbers)[:_SHOWN])}{', …' if len(numbers) > _SHOWN else ''}."
            )
        return np.array([numbers[text] for text in index.texts], np.int32)[column]


def describe_record(path: Path, cache: Path | None = None) -> list[str]:
    """A line for each feature of the first record of a file: name, kind and size. No lines if there is no record.

    Raises:
        DataError: if the file is damaged or the record is no Example.
    """
    plain = plain_file(path, cache)
    for at, data, _ in scan(plain):
        try:
            return describe_example(data)
        except ValueError as error:
            raise DataError(f"{path}, record 0 at byte {at}: {error}.") from error
    return []
