"""The dataset ``files``: a user's own files, whatever they are.

What is at a path is found out from its name and a look inside; it gives the stored examples of each split and one list
of classes for all of them. What decodes images and reads records is imported where it is needed: arrays need neither.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.config.schema import PATH_DATASET
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, DataContext, Dataset
from modelyard.data.image_spec import IMAGE_SUFFIXES, ImageOptions
from modelyard.data.raw_examples import ArrayExamples, FileExamples, RawExamples
from modelyard.data.sources.csv_file import CsvRows, label_columns, named_images, read_csv
from modelyard.data.sources.folder import Labelled, class_names, images_by_class, split_folders
from modelyard.data.sources.npz import read_npy_folder, read_npz
from modelyard.data.sources.remote import local_tree
from modelyard.errors import ConfigError, DataError, Problem
from modelyard.storage import is_remote, list_files
from modelyard.system.console import bar

if TYPE_CHECKING:
    from modelyard.data.records.feature_map import FeatureMap

log = logging.getLogger("modelyard")

RECORD_ENDINGS = (".tfrecord", ".tfrecords", ".tfrec", ".record", ".records")
_SHARD = re.compile(r"-[\d?*\[\]-]+-of-[\d?*\[\]-]+")
"""train-00000-of-01024, or a pattern of such."""
_OWN = {
    "csv": ("image_column", "label_column", "label_kind", "split_column", "value_columns"),
    "records": tuple(name for name in FilesOptions.model_fields if name.startswith("record_")),
}
"""Options that only one kind of source has a use for."""


@dataclass(frozen=True)
class Source:
    """What was found: its kind (folder, csv, records, converted), the stored examples of each split, the classes."""

    kind: str
    splits: dict[str, RawExamples]
    classes: tuple[str, ...]


def files(options: FilesOptions, context: DataContext) -> Dataset:
    """The dataset at the path that was given, or in the files of each split.

    Raises:
        DataError: if there is nothing at the path, or it is nothing that can be read.
        ConfigError: if options are given that this kind of source has no use for.
    """
    given = {TRAIN: options.train_files, VALIDATION: options.eval_files, TEST: options.test_files}
    patterns = {split: pattern for split, pattern in given.items() if pattern is not None}
    if context.source and patterns:
        raise DataError(
            f"the dataset is {context.source}; give --train_files, --eval_files and --test_files with "
            f"--dataset {PATH_DATASET} only."
        )
    if not context.source and TRAIN not in patterns:
        raise DataError(
            "which files? Give the path as --dataset PATH, or --train_files (and --eval_files, --test_files)."
        )
    found = _at_path(context.source, options, context) if context.source else _by_split(patterns, options, context)
    if isinstance(found, ArrayDataset):
        _refuse_unused("arrays", options)
        found.classes = _named_classes(options, found.classes, context)
        if options.image_size is None and options.image_channels is None:
            return found
    from modelyard.data.decoded import DecodedDataset, raw_examples_of, with_validation_examples

    if isinstance(found, ArrayDataset):
        found = Source("arrays", raw_examples_of(found), found.classes)
    _refuse_unused(found.kind, options)
    return DecodedDataset(
        with_validation_examples(found.splits, context),
        _named_classes(options, found.classes, context),
        ImageOptions(options.image_size, options.image_channels, options.image_fit),
    )


def _at_path(path: str, options: FilesOptions, context: DataContext) -> Source | ArrayDataset:
    place = _local(path, options, context)
    lower = place.name.lower()
    if lower.endswith(".npz"):
        return read_npz(place, context)
    if lower.endswith(".npy"):
        if not (place.parent / "x_train.npy").is_file():
            raise DataError(
                f"{place} is one array. Name arrays x_train.npy, y_train.npy and so on, and give their folder."
            )
        return read_npy_folder(place.parent, context)
    if lower.endswith(".csv"):
        if not place.is_file():
            raise DataError(f"there is no file {place}.")
        return _of_csv({place: read_csv(place, options)}, options)
    if holds_records(place):
        return _of_records({TRAIN: matching(str(place))}, options, context)
    if not place.is_dir():
        raise DataError(f"there is no folder {place}." if not place.exists() else f"{place} is no kind of file I know.")
    if (place / "dataset.json").is_file():
        from modelyard.data.records.converted import open_converted

        return Source("converted", *open_converted(place, context.cache_dir))
    if (place / "x_train.npy").is_file():
        return read_npy_folder(place, context)
    folders = split_folders(place)
    if folders:
        if TRAIN not in folders:
            raise DataError(f"{place} has no folder train; it has: {', '.join(f.name for f in folders.values())}.")
        return _of_folders({split: (folder, images_by_class(folder)) for split, folder in folders.items()})
    from modelyard.data.records.converted import SETTINGS

    if (place / SETTINGS).is_file():
        raise DataError(
            f"the conversion into {place} is not finished. Run the same `modelyard convert` again: it goes on."
        )
    records = [p for p in sorted(place.iterdir()) if _is_records(p.name.lower()) and p.is_file()]
    if records:
        raise DataError(
            f"{place} holds records. Say which are of which split: --dataset {PATH_DATASET} "
            f"--train_files '{place}/train*' --eval_files '{place}/validation*', for example; here: {records[0].name} …"
        )
    return _of_folders({TRAIN: (place, images_by_class(place))})


def _by_split(patterns: dict[str, str], options: FilesOptions, context: DataContext) -> Source:
    """A folder, a file or a pattern for each split, all of one kind."""
    places = {split: _local(pattern, options, context) for split, pattern in patterns.items()}
    if all(holds_records(place) for place in places.values()):
        return _of_records({split: matching(str(place)) for split, place in places.items()}, options, context)
    if all(place.name.lower().endswith(".csv") for place in places.values()):
        rows: dict[Path, dict[str, CsvRows]] = {}
        for split, place in places.items():
            found = read_csv(place, options, split)
            others = [name for name in found if name != split]
            if others:
                raise DataError(
                    f"{place} is given as the {split} files, but its column {options.split_column!r} also names "
                    f"{' and '.join(others)}. Give it as --dataset {place}."
                )
            rows[place] = {**rows.get(place, {}), **found}
        return _of_csv(rows, options)
    if all(place.is_dir() for place in places.values()):
        return _of_folders({split: (place, images_by_class(place)) for split, place in places.items()})
    if all(any(c in str(place) for c in "*?[") for place in places.values()):
        return _of_folders({split: _matching_images(place) for split, place in places.items()})
    listed = ", ".join(f"{place}" for place in places.values())
    raise DataError(
        f"the files of all splits must be of one kind that is known: folders per class, .csv files, records "
        f"({', '.join(RECORD_ENDINGS)}) or patterns of images such as 'photos/*/*.jpg'. Given: {listed}."
    )


# -- the kinds ------------------------------------------------------------------------------------------------------


def _of_folders(found: dict[str, tuple[Path, Labelled]]) -> Source:
    classes = class_names({split: [name for _, name in labelled] for split, (_, labelled) in found.items()})
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, RawExamples] = {
        split: FileExamples(root, [path for path, _ in labelled], [numbers[name] for _, name in labelled])
        for split, (root, labelled) in found.items()
    }
    return Source("folder", splits, tuple(classes))


def _of_csv(files: dict[Path, dict[str, CsvRows]], options: FilesOptions) -> Source:
    every = [(path, split, rows) for path, splits in files.items() for split, rows in splits.items()]
    names = label_columns(options)
    if options.label_kind == "class":
        classes = class_names({str(number): rows.labels for number, (_, _, rows) in enumerate(every)})
    else:  # columns are classes that apply or not, or values; a single value needs no name
        classes = names if options.label_kind == "flags" or len(names) > 1 else []
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, RawExamples] = {}
    for path, split, rows in every:
        labels: Any = np.array([numbers[name] for name in rows.labels], np.int32)
        if options.label_kind == "flags":
            labels = np.stack(rows.targets).astype(np.uint8)
        elif options.label_kind == "numbers":
            labels = np.stack(rows.targets)
            labels = labels[:, 0] if labels.shape[1] == 1 else labels
        if options.value_columns:
            splits[split] = ArrayExamples(np.stack(rows.values), labels)
        else:
            splits[split] = FileExamples(path.parent, rows.paths, labels)
    return Source("csv", splits, tuple(classes))


def feature_map(options: FilesOptions) -> FeatureMap:
    """Where image and label are in records, as the options say."""
    from modelyard.data.records.feature_map import FeatureMap

    return FeatureMap(
        image=options.record_image,
        label=options.record_label,
        coding=options.record_coding,
        layout=options.record_layout,
        shape=options.record_shape,
        height=options.record_height,
        width=options.record_width,
        dtype=options.record_dtype,
        first_label=options.record_first_label,
    )


def _of_records(files: dict[str, list[Path]], options: FilesOptions, context: DataContext) -> Source:
    from modelyard.data.records.items import RecordExamples

    features = feature_map(options)
    with bar("indexing records") as progress:
        opened = {
            split: RecordExamples(p, features, context.cache_dir, progress=progress) for split, p in files.items()
        }
    texts = {split: items.class_names for split, items in opened.items() if items.class_names is not None}
    if not texts:
        highest = max((int(items.labels.max()) for items in opened.values() if len(items)), default=-1)
        return Source("records", dict(opened), tuple(str(i) for i in range(highest + 1)))
    classes = class_names(texts)
    numbers = {name: number for number, name in enumerate(classes)}
    for items in opened.values():
        table = np.array([numbers[name] for name in items.class_names or ()], np.int32)
        items.labels = table[items.labels]
    return Source("records", dict(opened), tuple(classes))


# -- paths ----------------------------------------------------------------------------------------------------------


def _local(path: str, options: FilesOptions, context: DataContext) -> Path:
    """A path on this machine; what is in cloud storage is brought to the cache first."""
    if not is_remote(path):
        return Path(path).expanduser()
    names_images = path.lower().endswith(".csv") and not options.value_columns
    return local_tree(path, context.cache_dir, partial(named_images, options=options) if names_images else None)


def _is_records(name: str) -> bool:
    name = name.removesuffix(".gz")
    return (
        name.endswith(RECORD_ENDINGS)
        or ".tfrecord-" in name
        or (_SHARD.search(name) is not None and not name.endswith((".csv", *IMAGE_SUFFIXES)))
    )


def holds_records(place: Path) -> bool:
    """Whether a file, or the files of a pattern, are records by their names."""
    if any(c in place.name for c in "*?[") and not _is_records(place.name.lower()):
        names = [Path(name).name.lower() for name in list_files(str(place)) if not name.endswith(".index")]
        return bool(names) and all(_is_records(name) for name in names)
    return _is_records(place.name.lower()) and not place.is_dir()


def matching(pattern: str) -> list[Path]:
    """The files of a pattern, by name; indexes are not records."""
    names = (Path(name) for name in list_files(pattern))
    found = [path for path in names if path.suffix != ".index" and not path.name.startswith(".")]
    if not found:
        raise DataError(f"no file matches {pattern}.")
    return found


def _matching_images(pattern: Path) -> tuple[Path, Labelled]:
    """Images of a pattern; their classes are the names of the folders they are in."""
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if any(c in part for c in "*?["))
    root = Path(*parts[:fixed]) if fixed else Path()
    found = [Path(name) for name in list_files(str(pattern))]
    if not found:
        raise DataError(f"no file matches {pattern}.")
    return root, [(path.relative_to(root).as_posix(), path.parent.name) for path in found]


def _refuse_unused(kind: str, options: FilesOptions) -> None:
    owners = {key: owner for owner, keys in _OWN.items() for key in keys}
    problems = [
        Problem("options of the dataset", key, f"has no use here: it is for {owner} files, these are {kind}.")
        for key, owner in owners.items()
        if owner != kind and getattr(options, key) != FilesOptions.model_fields[key].default
    ]
    if options.image_fit != FilesOptions.model_fields["image_fit"].default and options.image_size is None:
        problems.append(Problem("options of the dataset", "image_fit", "has no use without image_size."))
    if problems:
        raise ConfigError(problems)


def _named_classes(options: FilesOptions, found: Sequence[str], context: DataContext) -> tuple[str, ...]:
    """The names from a file, where one is given."""
    if options.labels_file is None:
        return tuple(found)
    path = _local(options.labels_file, options, context)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as a text of class names: {error}.") from error
    names = [line for line in lines if line]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} names the class {twice[0]!r} twice.")
    if len(names) < len(found):
        raise DataError(f"{path} names {len(names)} classes, but there are {len(found)}.")
    return tuple(names)
