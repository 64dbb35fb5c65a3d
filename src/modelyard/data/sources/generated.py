"""Keeps the examples of generators as records in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.data.dataset import IMAGE, LABEL, SPLITS, TRAIN, DataContext, Dataset, GeneratorDataset
from modelyard.data.decoded import DecodedDataset
from modelyard.data.image_spec import ImageOptions
from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.example import FeatureMap, encode_example
from modelyard.data.records.reader import RecordExamples
from modelyard.data.records.shard import RecordEncoder
from modelyard.data.records.tfrecord import frame
from modelyard.errors import DataError, unknown
from modelyard.registry import Entry, Options
from modelyard.system.console import bar
from modelyard.system.files import explain, remove_partial, whole_folder

log = logging.getLogger("modelyard")
_FACTS = "generated.json"


class _FromUserError(Exception):
    """An error of a user's function. `explain` must not take it for an error of our own files."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def materialise(generated: GeneratorDataset, entry: Entry, options: Options, context: DataContext) -> Dataset:
    """Returns the dataset of the generated examples; generates them if they are not in the cache.

    Raises:
        DataError: if an example is invalid, with its number.
    """
    if TRAIN not in generated.splits:
        raise DataError(f"the dataset {entry.name!r} generates no train split.")
    key = hashlib.sha256(
        json.dumps(
            [
                entry.name,
                options.model_dump(mode="json"),
                [str(context.data_dir.absolute()), context.split_seed],
                *([context.split_group] if context.split_group else []),
                generated.version,
                list(generated.splits),
                list(generated.classes or []),
                _code_hash(entry),
            ]
        ).encode()
    ).hexdigest()[:24]
    cached = context.cache_dir / "generated" / f"{entry.name}-{key}"
    raised: Exception | None = None
    try:
        _generate_once(generated, cached, entry.name, context.split_group)
    except _FromUserError as wrapped:
        raised = wrapped.error
    if raised is not None:  # outside of the block, so that its traceback has no exception of ours
        raise raised
    folder = cached / "records"
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    features = FeatureMap(**facts["features"])
    splits: dict[str, RawExamples] = {
        split: RecordExamples([folder / f"{split}.tfrecord"], features, cached) for split in generated.splits
    }
    return DecodedDataset(splits, facts["classes"], ImageOptions(generated.image_size))


def _generate_once(generated: GeneratorDataset, cached: Path, name: str, group: str) -> None:
    folder = cached / "records"
    with explain(cached, "write to the cache", DataError):
        cached.mkdir(parents=True, exist_ok=True)
        with open(cached / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process is generating the examples of %s; waiting for it", name)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / _FACTS).is_file():
                log.info("the examples of %s were generated before; they are in %s", name, cached)
                return
            remove_partial(cached)
            log.info("generating the examples of %s, once; they are kept in %s", name, cached)
            with whole_folder(folder) as partial:
                _write(generated, partial, name, group)


def _write(generated: GeneratorDataset, folder: Path, name: str, group: str) -> None:
    encoder: RecordEncoder | None = None
    first_size: tuple[int, ...] | None = None
    highest = -1
    for split, generate in generated.splits.items():
        if split not in SPLITS:
            raise DataError(unknown("split", split, SPLITS))
        with bar(f"generating {split}", None) as progress, open(folder / f"{split}.tfrecord", "wb") as file:
            number = -1
            for number, example in enumerate(_examples(generate)):
                where = f"example {number} of the {split} split of {name}"
                raw, label = _checked(example, generated.classes, where)
                encoder = encoder or RecordEncoder.of(raw, where)
                encoded = encoder.encode(raw, where)
                features: dict[str, Any] = {
                    encoder.features.image: encoded.payload,
                    str(encoder.features.label): label,
                    "image/format": encoded.format,
                }
                first_size = first_size or encoded.size
                if generated.image_size is None and encoded.size != first_size:
                    raise DataError(
                        f"{where} is {_shape(encoded.size)}, the first one {_shape(first_size)}. "
                        "Give one size for all: GeneratorDataset(…, image_size=(height, width))."
                    )
                if group and split == TRAIN:
                    features[group] = _group_of(example, group, where)
                if encoded.size is not None:
                    features["image/height"], features["image/width"], _ = encoded.size
                file.write(frame(encode_example(features)))
                highest = max(highest, label)
                progress(number + 1)
            if number < 0:
                raise DataError(f"the {split} split of {name} is empty: its function yields nothing.")
    assert encoder is not None
    classes = list(generated.classes) if generated.classes is not None else [str(i) for i in range(highest + 1)]
    facts = {"features": encoder.features.as_dict(), "classes": classes}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _examples(generate: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    try:
        yield from generate()
    except Exception as error:
        raise _FromUserError(error) from error


def _shape(size: tuple[int, ...] | None) -> str:
    return "×".join(map(str, size or ()))


def _checked(example: Any, classes: Sequence[str] | None, where: str) -> tuple[RawExample, int]:
    if not isinstance(example, Mapping) or IMAGE not in example or LABEL not in example:
        raise DataError(f"{where} must be a dictionary with 'image' and 'label'; got {type(example).__name__}.")
    label = example[LABEL]
    if isinstance(label, str):
        if classes is None:
            raise DataError(f"{where}: its label is the text {label!r}; give GeneratorDataset the names: classes=[…].")
        if label not in classes:
            raise DataError(f"{where}: {unknown('class', label, classes)}")
        label = list(classes).index(label)
    if isinstance(label, bool) or not isinstance(label, int | np.integer) or not 0 <= int(label) < 1 << 20:
        raise DataError(f"{where}: its label is {label!r}; give the number of a class, from 0.")
    if classes is not None and int(label) >= len(classes):
        raise DataError(f"{where}: its label is {label}, but there are {len(classes)} classes.")
    image = example[IMAGE]
    if isinstance(image, bytes):
        return image, int(label)
    array = np.asarray(image)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.kind not in "uif" or array.ndim == 0:
        raise DataError(f"{where}: its image is {array.dtype} of shape {array.shape}; give an array of numbers.")
    return array, int(label)


def _group_of(example: Mapping[str, Any], group: str, where: str) -> str | int:
    value = example.get(group)
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    found = "nothing" if value is None else type(value).__name__
    raise DataError(f"{where}: split_group is {group!r}, so each example needs it, a text or a number; got {found}.")


def _code_hash(entry: Entry) -> str:
    """Hashes the file that defines the dataset."""
    try:
        file = inspect.getsourcefile(entry.load())
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except (OSError, TypeError):
        return ""
