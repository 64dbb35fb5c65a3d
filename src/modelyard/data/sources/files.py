"""A user's own files: the dataset ``files``, and the files of `predict`.

`kind_of` is the only place that decides what is at a path. Image decoders and record readers are imported when they are
needed: arrays need neither.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.config.schema import PATH_DATASET
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, DataContext, Dataset
from modelyard.data.image_spec import IMAGE_SUFFIXES, ImageOptions
from modelyard.data.raw_examples import ArrayExamples, FileExamples, RawExamples
from modelyard.data.sources.csv_file import CsvRows, label_columns, read_csv
from modelyard.data.sources.folder import (
    Labelled,
    explain_unsupported,
    files_in,
    images_by_class,
    is_hidden,
    is_image,
    no_images,
    sorted_classes,
    split_folders,
    unsupported_format,
)
from modelyard.data.sources.npz import read_npy_folder, read_npy_to_predict, read_npz, read_npz_to_predict
from modelyard.data.sources.remote import local_tree, remote_names
from modelyard.errors import ConfigError, DataError, Problem
from modelyard.storage import is_remote, list_files
from modelyard.system.console import bar
from modelyard.system.files import explain
from modelyard.system.untrusted import check_regular, read_regular

if TYPE_CHECKING:
    from modelyard.data.records.example import FeatureMap

Kind = Literal["npz", "npy", "csv", "records", "converted", "folder", "pattern", "file", "missing"]

log = logging.getLogger("modelyard")

RECORD_ENDINGS = (".tfrecord", ".tfrecords", ".tfrec", ".record", ".records")
_LARGEST_LABELS = 1 << 26  # bytes
_SHARD = re.compile(r"-[\d?*\[\]-]+-of-[\d?*\[\]-]+")
"""train-00000-of-01024, or a pattern of such."""
_OWN_OPTIONS = {
    "csv": ("image_column", "label_column", "label_kind", "split_column", "value_columns"),
    "records": tuple(name for name in FilesOptions.model_fields if name.startswith("record_")),
}
"""Options that have an effect on one kind of source only."""


@dataclass(frozen=True)
class Source:
    """Files that were read: their kind, the raw examples of each split, the class names."""

    kind: str
    splits: dict[str, RawExamples]
    classes: tuple[str, ...]


def kind_of(path: Path) -> Kind:
    """Returns the kind of file, folder or pattern at a local path, by its name and content."""
    endings: dict[str, Kind] = {".npz": "npz", ".npy": "npy", ".csv": "csv"}
    if path.suffix.lower() in endings:
        return endings[path.suffix.lower()]
    if _are_records(path):
        return "records"
    if path.is_dir():
        from modelyard.data.records.reader import DATASET_JSON

        if (path / DATASET_JSON).is_file():
            return "converted"
        return "npy" if (path / "x_train.npy").is_file() else "folder"
    if path.exists():
        return "file"
    return "pattern" if _is_pattern(path) else "missing"


# -- the dataset `files` ----------------------------------------------------------------------------------------------


def files(options: FilesOptions, context: DataContext) -> Dataset:
    """The dataset at the given path, or in the given files of each split.

    Raises:
        DataError: if there is nothing at the path, or nothing that can be read.
        ConfigError: if options are given that have no effect on this kind of source.
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
    paths = {TRAIN: context.source} if context.source else patterns
    found = _read({split: _local(path, options, context) for split, path in paths.items()}, options, context)
    _refuse_unused("arrays" if isinstance(found, ArrayDataset) else found.kind, options)
    classes = _named_classes(options, found.classes, context)
    if isinstance(found, ArrayDataset):
        found.classes = classes
        if options.image_size is None and options.image_channels is None:
            return found
    from modelyard.data.decoded import DecodedDataset, raw_examples_of

    image = ImageOptions(options.image_size, options.image_channels, options.image_fit)
    if isinstance(found, ArrayDataset):
        return DecodedDataset(raw_examples_of(found), classes, image, arrays=found)
    return DecodedDataset(found.splits, classes, image)


def _read(paths: dict[str, Path], options: FilesOptions, context: DataContext) -> Source | ArrayDataset:
    """Reads what is at one path, if the dataset is given by path, or the files of each split, all of one kind."""
    kinds = {kind_of(path) for path in paths.values()}
    if kinds == {"records"}:
        return _of_records({split: _matching(path) for split, path in paths.items()}, options, context)
    if kinds == {"csv"}:
        return _of_csv(paths, options, context)
    if context.source:
        return _at_path(paths[TRAIN], context)
    if kinds == {"folder"}:
        return _of_images({split: (path, images_by_class(path)) for split, path in paths.items()})
    if kinds == {"pattern"}:
        return _of_images({split: _images_of_pattern(path) for split, path in paths.items()})
    raise DataError(
        f"the files of all splits must be of one kind: folders per class, .csv files, records "
        f"({', '.join(RECORD_ENDINGS)}) or patterns of images such as 'photos/*/*.jpg'. "
        f"Given: {', '.join(map(str, paths.values()))}."
    )


def _at_path(path: Path, context: DataContext) -> Source | ArrayDataset:
    kind = kind_of(path)
    if kind == "npz":
        return read_npz(path, context)
    if kind == "npy":
        folder = path if path.is_dir() else path.parent
        if not (folder / "x_train.npy").is_file():
            raise DataError(
                f"{path} is one array. Name arrays x_train.npy, y_train.npy and so on, and give their folder."
            )
        return read_npy_folder(folder, context)
    if kind == "folder":
        return _of_folder(path)
    if kind == "converted":
        from modelyard.data.records.reader import open_converted

        return Source("converted", *open_converted(path, context.cache_dir))
    if kind == "file":
        raise DataError(
            f"unsupported file type: {path}. Supported: folders of images, converted folders, .csv, .npz and .npy "
            f"files, records ({', '.join(RECORD_ENDINGS)})."
        )
    raise DataError(f"there is no folder {path}.")


def _of_folder(path: Path) -> Source:
    from modelyard.data.records.reader import SETTINGS

    folders = split_folders(path)
    if folders and TRAIN not in folders:
        raise DataError(f"{path} has no folder train; it has: {', '.join(f.name for f in folders.values())}.")
    if not folders and (path / SETTINGS).is_file():
        raise DataError(f"the conversion into {path} is not finished. To resume it, repeat its `modelyard convert`.")
    records = [p for p in sorted(path.iterdir()) if _is_record_name(p.name) and p.is_file()]
    if not folders and records:
        raise DataError(
            f"{path} holds records. Give the files of each split: --dataset {PATH_DATASET} "
            f"--train_files '{path}/train*' --eval_files '{path}/validation*', for example; here: {records[0].name} …"
        )
    return _of_images({s: (folder, images_by_class(folder)) for s, folder in (folders or {TRAIN: path}).items()})


def _class_indices(names: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    """Returns the classes of all splits, and the indices of the names of each split."""
    classes = sorted_classes(names)
    numbers = {name: number for number, name in enumerate(classes)}
    return tuple(classes), {split: np.array([numbers[n] for n in named], np.int32) for split, named in names.items()}


def _of_images(found: dict[str, tuple[Path, Labelled]]) -> Source:
    classes, labels = _class_indices({s: [name for _, name in labelled] for s, (_, labelled) in found.items()})
    splits: dict[str, RawExamples] = {
        split: FileExamples(root, [path for path, _ in labelled], labels[split])
        for split, (root, labelled) in found.items()
    }
    return Source("folder", splits, classes)


def _of_csv(paths: dict[str, Path], options: FilesOptions, context: DataContext) -> Source:
    splits: dict[str, CsvRows] = {}
    for split, path in paths.items():
        found = read_csv(path, options, split, split_group=context.split_group if split == TRAIN else "")
        others = [name for name in found if name != split]
        if not context.source and others:
            raise DataError(
                f"{path} is given as the {split} files, but its column {options.split_column!r} also names "
                f"{' and '.join(others)}. Give it as --dataset {path}."
            )
        splits.update(found)
    if options.label_kind == "class":
        classes, labels = _class_indices({split: rows.class_names for split, rows in splits.items()})
        return Source("csv", {split: rows.examples(labels[split]) for split, rows in splits.items()}, classes)
    examples = {split: rows.examples(targets_of(np.stack(rows.targets), options)) for split, rows in splits.items()}
    names = label_columns(options)  # of the classes that apply or not, or of the values; a single value needs none
    return Source("csv", examples, tuple(names if options.label_kind == "flags" or len(names) > 1 else ()))


def targets_of(targets: NDArray[Any], options: FilesOptions) -> NDArray[Any]:
    """Returns labels that are numbers or flags, in the form that a task takes: a single number has no columns."""
    if options.label_kind == "flags":
        return targets.astype(np.uint8)
    return targets[:, 0] if targets.shape[1] == 1 else targets


def _of_records(paths: dict[str, list[Path]], options: FilesOptions, context: DataContext) -> Source:
    from modelyard.data.records.reader import RecordExamples

    features = _feature_map(options)
    with bar("indexing records") as progress:
        splits = {
            split: RecordExamples(p, features, context.cache_dir, progress=progress) for split, p in paths.items()
        }
    named = {split: examples.class_names is not None for split, examples in splits.items() if len(examples)}
    if len(set(named.values())) > 1:
        texts, numbers = (next(split for split in named if named[split] == kind) for kind in (True, False))
        raise DataError(
            f"labels of the {texts} split are text, those of the {numbers} split are numbers. Use one kind of labels."
        )
    if not any(named.values()):
        highest = max((int(examples.labels.max()) for examples in splits.values() if len(examples)), default=-1)
        return Source("records", dict(splits), tuple(str(i) for i in range(highest + 1)))
    classes, indices = _class_indices({split: examples.class_names or () for split, examples in splits.items()})
    for split, examples in splits.items():
        examples.labels = indices[split][examples.labels]
    return Source("records", dict(splits), classes)


def _feature_map(options: FilesOptions) -> FeatureMap:
    from modelyard.data.records.example import FeatureMap

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


# -- the files of `predict` -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesToPredict:
    """Examples in storage order, whose labels may be missing.

    Args:
        examples: the raw examples.
        labels: class names, or the values in a file; None if there are none.
        from_folders: whether the names are those of the images' folders, which may have another meaning.
        unlabelled: why the labels of a table are left out; empty if they are not, or if there are none.
        columns: the columns of a table that numbers or flags come from.
    """

    examples: RawExamples
    labels: Sequence[str] | NDArray[Any] | None
    from_folders: bool = False
    unlabelled: str = ""
    columns: tuple[str, ...] = ()


def read_to_predict(
    sources: Sequence[str], options: FilesOptions, cache: Path, split_group: str = "", named: Collection[str] = ()
) -> FilesToPredict:
    """Reads image files, folders of them, and patterns; or one .csv, .npz or .npy file, records or converted folder.

    Args:
        sources: the paths.
        options: which columns or features hold what.
        cache: a folder for indexes.
        split_group: a column of .csv files that is not a value.
        named: the options that are given for these files; those of other kinds of files are refused.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    paths = [_local_path(source, options, cache) for source in sources]
    kinds = [kind_of(path) for path in paths]
    kind = kinds[0] if len(kinds) == 1 else "folder"
    owners = {key: owner for owner, keys in _OWN_OPTIONS.items() for key in keys if key in named and owner != kind}
    if owners and kind != "missing":
        what = {"npz": "npz files", "csv": "csv files", "records": "records", "converted": "converted records"}
        raise ConfigError(
            Problem(
                "options of predict",
                key,
                f"has no effect here: it is for {owner} files, these are {what.get(kind, 'images')}.",
            )
            for key, owner in owners.items()
        )
    if kinds == ["csv"]:
        rows = read_csv(paths[0], options, split_group=split_group, to_predict=True, named=named)[TRAIN]
        if rows.unlabelled or options.label_kind == "class" or not rows.targets:
            names = None if rows.unlabelled else rows.class_names or None
            return FilesToPredict(rows.examples(), names, unlabelled=rows.unlabelled)
        targets = targets_of(np.stack(rows.targets), options)
        return FilesToPredict(rows.examples(targets), targets, columns=tuple(label_columns(options)))
    if kinds == ["npz"]:
        values, labels = read_npz_to_predict(paths[0])
        zeros = np.zeros(len(values), np.int32)
        return FilesToPredict(ArrayExamples(values, zeros if labels is None else labels), labels)
    if kinds == ["npy"] and not paths[0].is_dir():
        values = read_npy_to_predict(paths[0])
        return FilesToPredict(ArrayExamples(values, np.zeros(len(values), np.int32)), None)
    if kinds == ["records"]:
        return _records_to_predict(_matching(paths[0]), options, cache)
    if kinds == ["converted"]:
        return _converted_to_predict(paths[0], cache)
    images: list[Path] = []
    addresses: list[str] = []
    for source, path in zip(sources, paths, strict=True):
        found = _images_at(path)
        images += found
        addresses += remote_names(source, path, found) if is_remote(source) else map(Path.as_posix, found)
    folders = [image.parent.name for image in images]
    zeros = np.zeros(len(images), np.int32)
    examples = FileExamples(Path(), [image.as_posix() for image in images], zeros, addresses)
    one_by_one = all(path.exists() and not path.is_dir() for path in paths)
    return FilesToPredict(examples, None if one_by_one else folders, from_folders=True)


def _images_at(path: Path) -> list[Path]:
    if path.is_dir():
        images = [file for file in files_in(path) if is_image(file)]
        if not images:
            raise no_images(path)
        unsupported = [file for file in files_in(path) if unsupported_format(file)]
        if unsupported:
            log.warning("%s", explain_unsupported(unsupported))
        return images
    if path.exists():
        return [path]
    if _is_pattern(path):
        return _matching(path)
    raise DataError(f"there is no file or folder {path}.")


def _records_to_predict(paths: list[Path], options: FilesOptions, cache: Path) -> FilesToPredict:
    from modelyard.data.records.reader import RecordExamples, has_feature

    features = _feature_map(options)
    labelled = features.label is not None and has_feature(paths[0], features.label, cache)
    if not labelled:
        features = replace(features, label=None)
    with bar("indexing records") as progress:
        examples = RecordExamples(paths, features, cache, progress=progress)
    if not labelled:
        return FilesToPredict(examples, None)
    names = examples.class_names
    return FilesToPredict(examples, examples.labels if names is None else [names[n] for n in examples.labels])


def _converted_to_predict(folder: Path, cache: Path) -> FilesToPredict:
    """Returns the examples of all splits of a converted folder."""
    from modelyard.data.records.reader import RecordExamples, read_dataset_json

    info = read_dataset_json(folder)
    shards = [folder / shard.file for split in info.splits.values() for shard in split.shards]
    with bar("indexing records") as progress:
        examples = RecordExamples(shards, info.features, cache, progress=progress)
    return FilesToPredict(examples, [info.classes[number] for number in examples.labels])


# -- paths ------------------------------------------------------------------------------------------------------------


def _local(path: str, options: FilesOptions, context: DataContext) -> Path:
    """Returns a path on this machine. Files in cloud storage are copied to the cache."""
    return _local_path(path, options, context.cache_dir)


def _local_path(path: str, options: FilesOptions, cache: Path) -> Path:
    if not is_remote(path):
        return Path(path).expanduser()

    def images(table: Path) -> list[str]:
        return read_csv(table, options, to_predict=True, check_images=False)[TRAIN].paths

    lists_images = path.lower().endswith(".csv") and not options.value_columns
    return local_tree(path, cache, images if lists_images else None)


def _is_pattern(path: Path) -> bool:
    return any(c in str(path) for c in "*?[")


def _is_record_name(name: str) -> bool:
    name = name.lower().removesuffix(".gz")
    return (
        name.endswith(RECORD_ENDINGS)
        or ".tfrecord-" in name
        or (_SHARD.search(name) is not None and not name.endswith((".csv", *IMAGE_SUFFIXES)))
    )


def _are_records(path: Path) -> bool:
    """Returns whether a file, or the files of a pattern, are records by their names."""
    if any(c in path.name for c in "*?[") and not _is_record_name(path.name):
        names = [Path(name).name for name in list_files(str(path)) if not name.endswith(".index")]
        return bool(names) and all(map(_is_record_name, names))
    return _is_record_name(path.name) and not path.is_dir()


def _matching(pattern: Path) -> list[Path]:
    """Returns the files of a pattern, by name, without hidden files and indexes of records."""
    paths = map(Path, list_files(str(pattern)))
    found = [path for path in paths if path.suffix != ".index" and not is_hidden(path.name)]
    if not found:
        if os.path.lexists(pattern):
            with explain(pattern, "read", DataError):
                check_regular(pattern, DataError)
        raise DataError(f"no file matches {pattern}.")
    return found


def _images_of_pattern(pattern: Path) -> tuple[Path, Labelled]:
    """Returns the images of a pattern. The class of an image is the name of its folder."""
    parts = pattern.parts
    root = Path(*parts[: next(i for i, part in enumerate(parts) if _is_pattern(Path(part)))])
    return root, [(path.relative_to(root).as_posix(), path.parent.name) for path in _matching(pattern)]


# -- options ----------------------------------------------------------------------------------------------------------


def _refuse_unused(kind: str, options: FilesOptions) -> None:
    def is_set(key: str) -> bool:
        return bool(getattr(options, key) != FilesOptions.model_fields[key].default)

    unused = {
        key: f"has no effect here: it is for {owner} files, these are {kind}."
        for owner, keys in _OWN_OPTIONS.items()
        for key in keys
        if owner != kind and is_set(key)
    }
    if is_set("image_fit") and options.image_size is None:
        unused["image_fit"] = "has no effect without image_size."
    if unused:
        raise ConfigError([Problem("options of the dataset", key, problem) for key, problem in unused.items()])


def _named_classes(options: FilesOptions, found: Sequence[str], context: DataContext) -> tuple[str, ...]:
    """Returns the class names in ``labels_file``, if it is given, else those that were found."""
    if options.labels_file is None:
        return tuple(found)
    path = _local(options.labels_file, options, context)
    try:
        text = read_regular(path, _LARGEST_LABELS, DataError).decode("utf-8-sig")
        lines = [line.strip() for line in text.splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as a text of class names: {error}.") from error
    names = [line for line in lines if line]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} names the class {twice[0]!r} twice.")
    if len(names) < len(found):
        raise DataError(f"{path} names {len(names)} classes, but there are {len(found)}.")
    return tuple(names)
