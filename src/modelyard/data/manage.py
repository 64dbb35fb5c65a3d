"""What a user does to datasets: convert, fetch, look at, check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.config import Config, resolve
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.config.schema import PATH_DATASET, is_path
from modelyard.data.dataset import IMAGE, LABEL, TRAIN, VALIDATION, Dataset, label_kind
from modelyard.data.decoded import DecodedDataset, raw_examples_of
from modelyard.data.open_dataset import load_dataset, open_dataset
from modelyard.data.records.convert import ConvertReport, convert_items
from modelyard.data.records.converted import read_dataset_json
from modelyard.data.records.items import RecordExamples, describe_record
from modelyard.data.sources.files import kind_of
from modelyard.data.sources.remote import local_tree
from modelyard.data.verify import VerifyReport, verify, verify_folder
from modelyard.errors import DataError
from modelyard.storage import cache_folder, is_remote
from modelyard.system.console import bar
from modelyard.system.machine import available_cores


def convert(
    source: str,
    to: str | Path,
    *,
    encoding: Literal["keep", "jpeg", "raw"] = "keep",
    max_edge: int | None = None,
    quality: int = 95,
    shards: int | None = None,
    validation_fraction: float | None = None,
    name: str | None = None,
    processes: int = 0,
    on_bad: Literal["fail", "skip"] = "fail",
    origin: str = "Python",
    **options: Any,
) -> ConvertReport:
    """Turns any source into records with an index, labels and a dataset.json. Killed, it goes on when called again.

    Args:
        source: a path or the name of a dataset.
        to: the folder to make.
        encoding: keep the original bytes, or store as JPEG or as raw pixels.
        max_edge: images whose longer edge is longer are made smaller, aspect kept.
        quality: of JPEGs that have to be encoded.
        shards: files a split; by default about 128 MB each.
        validation_fraction: set aside this share of train, stratified, by split_seed; by default the splits stay.
        name: of the dataset; by default that of the folder.
        processes: how many work; 0: as many as there are cores. The result is the same bytes.
        on_bad: what to do with an image that can't be read: fail, or skip it and list it in bad.txt.
        origin: where the options come from, for error messages.
        **options: options of the dataset, such as label_column.

    Example:
        >>> modelyard.convert("photos", "photos-records", validation_fraction=0.1)
    """
    if is_remote(str(to)):
        raise DataError(f"{to} is not on this machine. Convert to a local folder, then copy it there.")
    config = _config(source, options, origin)
    pointless = [key for key in ("image_size", "image_fit", "image_channels") if key in options]
    if pointless and config.entry("dataset").name == PATH_DATASET:
        raise DataError(f"{pointless[0]} is chosen when training; to store smaller images, use --max_edge.")
    dataset = open_dataset(config, validation_fraction or 0.0)
    if validation_fraction and VALIDATION in open_dataset(config, 0.0).sizes():
        raise DataError(f"{source} has a validation split already; leave --validation_fraction out.")
    if not isinstance(dataset, DecodedDataset):
        processes = 1  # the examples are in this process
    items = raw_examples_of(dataset)
    if not all(each.label_kind == "class" for each in items.values()):
        raise DataError(f"the labels of {source} are no classes, and records hold one class an example. Train from it.")
    told = {"dataset": source, "split_seed": config.split_seed, "validation_fraction": validation_fraction}
    with bar("converting", sum(dataset.sizes().values())) as progress:
        return convert_items(
            items,
            dataset.classes,
            Path(to).expanduser(),
            encoding=encoding,
            max_edge=max_edge,
            quality=quality,
            shards=shards,
            name=name or Path(to).name,
            processes=processes or available_cores(),
            on_bad=on_bad,
            source=told,
            progress=_counted(progress),
        )


def fetch(name: str, data_dir: str | Path = "data", archive: str | Path | None = None) -> list[Path]:
    """Brings the official files of a dataset to ``data_dir``, checked.

    Args:
        name: mnist, fashion_mnist, cifar10 or cifar100.
        data_dir: the folder for them.
        archive: a local copy to take them from, instead of their official address.
    """
    from modelyard.data.sources.fetch import fetch as bring

    local = None if archive is None else Path(archive).expanduser()
    with bar(f"fetching {name}", None) as progress:
        return bring(
            name,
            Path(data_dir).expanduser(),
            local,
            lambda file, done, total: progress(done, total, f"fetching {file}"),
        )


def data_info(source: str, origin: str = "Python", **options: Any) -> dict[str, Any]:
    """What is in a dataset: splits, classes, shapes.

    Args:
        source: a path or the name of a dataset.
        origin: where the options come from, for error messages.
        **options: options of the dataset.
    """
    dataset = open_dataset(_config(source, options, origin), 0.0)
    splits = {}
    for split, size in dataset.sizes().items():
        labels = dataset.labels(split)
        counts = None if labels is None else np.bincount(labels, minlength=len(dataset.classes)).tolist()
        splits[split] = {"examples": size, "classes": counts}
    image = dataset.features.get(IMAGE)
    return {
        "source": source,
        "classes": list(dataset.classes),
        "splits": splits,
        "image": None if image is None else image.as_json(),
        "sizes": _sizes(dataset),
        "record": _record(dataset),
        "fingerprint": dataset.fingerprint(),
    }


def verify_data(source: str, origin: str = "Python", **options: Any) -> VerifyReport:
    """Reads everything: checksums, every image, labels, classes; lists what is wrong.

    Args:
        source: a path or the name of a dataset.
        origin: where the options come from, for error messages.
        **options: options of the dataset.
    """
    config = _config(source, options, origin)
    cache = cache_folder(config.cache_dir)
    folder = local_tree(source, cache) if is_remote(source) else Path(source).expanduser()
    threads = config.input_threads or available_cores()
    if is_path(source) and kind_of(folder) == "converted":
        examples = sum(split.examples for split in read_dataset_json(folder).splits.values())
        with bar("verifying", examples) as progress:
            return verify_folder(folder, cache=cache, threads=threads, progress=_counted(progress))
    dataset = open_dataset(config, 0.0)
    with bar("verifying", sum(dataset.sizes().values())) as progress:
        return verify(raw_examples_of(dataset), dataset.classes, threads=threads, progress=_counted(progress))


def show_data(
    source: str,
    output: str | Path = "sheet.png",
    *,
    split: str = TRAIN,
    examples: int = 8,
    copies: int = 5,
    origin: str = "Python",
    **options: Any,
) -> Path:
    """Makes a picture: examples of all classes as they are, and augmented as in training, several times each.

    Args:
        source: a path or the name of a dataset.
        output: the PNG file to write.
        split: which split.
        examples: rows.
        copies: how often each example is shown augmented.
        origin: where the options come from, for error messages.
        **options: options of the dataset, ``augment``, ``preprocess``, ``random_seed``.
    """
    from modelyard.data.sheet import sheet, to_png
    from modelyard.system.files import explain, whole_file

    path = Path(output).expanduser()
    if path.suffix.lower() != ".png":
        raise DataError(f"{path} must end in .png: that is what is written.")
    config = _config(source, options, origin)
    select_engine(config.engine)
    dataset = load_dataset(config)
    rows = _spread_over_classes(dataset, split, examples)
    found = dataset.read(split, rows)
    strips = [[image] for image in _originals(dataset, split, rows, np.asarray(found[IMAGE]))]
    seen = copies if split == TRAIN and (config.augment or config.preprocess) else 0
    for copy in range(seen):
        for strip, image in zip(strips, _augmented(config, dataset, rows, copy), strict=True):
            strip.append(image)
    labels = np.asarray(found[LABEL]) if LABEL in found else None
    captions = [
        f"{_caption(dataset, labels[place])}\n{dataset.name(split, int(row))}" if labels is not None else str(row)
        for place, row in enumerate(rows)
    ]
    shape = "×".join(map(str, dataset.features[IMAGE].shape))
    notes = [
        f"{split}: {dataset.size(split):,} examples of {len(dataset.classes)} classes, given as {shape}",
        f"augment: {', '.join(map(str, config.augment)) or 'none'}",
    ]
    headings = ["stored", *(f"augmented {number + 1}" for number in range(seen))]
    picture = sheet(list(zip(captions, strips, strict=True)), headings, title=source, notes=notes)
    data = to_png(picture)
    with explain(path, "write", DataError), whole_file(path) as file:
        file.write(data)
    return path


def _caption(dataset: Dataset, label: Any) -> str:
    """The class; the classes that apply; or the values."""
    kind = label_kind(dataset.features.get(LABEL))
    if kind == "class":
        return dataset.classes[int(label)]
    if kind == "flags":
        return ", ".join(name for name, applies in zip(dataset.classes, label, strict=True) if applies) or "none"
    return ", ".join(f"{value:.4g}" for value in np.ravel(label))


def _originals(dataset: Dataset, split: str, rows: NDArray[np.int64], read: NDArray[Any]) -> list[NDArray[Any]]:
    """The images as they are stored: whole, whatever size training gives them."""
    if not isinstance(dataset, DecodedDataset):
        return list(read)
    from modelyard.data.images import decode

    items = dataset.splits[split]
    stored = [(items.load(row), items.name(row)) for row in rows.tolist()]
    return [decode(value, None, name) if isinstance(value, bytes) else value for value, name in stored]


def _counted(progress: Callable[[int], None]) -> Callable[[int], None]:
    """From numbers that were done to the number that is done."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done)

    return add


def _config(source: str, options: dict[str, Any], origin: str) -> Config:
    return resolve({**options, "dataset": source}, source=origin, pick_up_files=False)


def _sizes(dataset: Dataset, most: int = 100) -> list[list[int]]:
    """Smallest and largest height and width among some stored images."""
    if not isinstance(dataset, DecodedDataset):
        return []
    from modelyard.data.images import upright_size

    items = dataset.splits[TRAIN]
    rows = np.unique(np.linspace(0, len(items) - 1, min(len(items), most)).astype(int)).tolist()
    stored = [(items.load(row), items.name(row)) for row in rows]
    found = [upright_size(value, name) for value, name in stored if isinstance(value, bytes) or value.ndim >= 2]
    edges = list(zip(*found, strict=True))
    return [[min(edge) for edge in edges], [max(edge) for edge in edges]] if found else []


def _record(dataset: Dataset) -> list[str]:
    """Of records, the features that the first one has."""
    items = dataset.splits[TRAIN] if isinstance(dataset, DecodedDataset) else None
    return describe_record(items.paths[0], items.cache) if isinstance(items, RecordExamples) else []


def _spread_over_classes(dataset: Dataset, split: str, count: int) -> NDArray[np.int64]:
    """Examples of as many classes as possible; the first of each, then the second."""
    size = dataset.size(split)
    labels = dataset.labels(split)
    if labels is None:
        return np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64))
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], labels[order])
    turn = np.arange(size) - first  # how many of the class come before
    return np.sort(order[np.lexsort((labels[order], turn))][: min(count, size)])


def _augmented(config: Config, dataset: Dataset, rows: NDArray[np.int64], copy: int) -> NDArray[Any]:
    """The examples augmented as in training, from other draws for every copy."""
    from keras import ops

    from modelyard.data.augment.build import build_augmentation, neighbours
    from modelyard.data.draws import halves
    from modelyard.data.pipeline import Pipeline
    from modelyard.data.preprocess import batch_preprocessing

    together = neighbours(config.augment)
    rest = np.concatenate([rows, np.resize(rows, -len(rows) % together)])
    pipeline = Pipeline(config, dataset, RunLength(dataset.size(TRAIN), len(rest), 1))
    positions = np.arange(len(rest)) + copy * (-(-dataset.size(TRAIN) // together) * together)
    out = {name: np.empty((len(rest), *f.shape), f.dtype) for name, f in pipeline.features.items()}
    pipeline.read(rest, positions, out)
    batch = {name: ops.convert_to_tensor(array) for name, array in out.items()}
    augment = build_augmentation(config.augment, dataset, config.random_seed, len(rest), pipeline.crops_while_decoding)
    low, high = (ops.convert_to_tensor(half) for half in halves(positions.astype(np.uint64)))
    numbers, epochs = (ops.convert_to_tensor(n.astype(np.int32)) for n in (rest, np.full(len(rest), copy)))
    batch = batch_preprocessing(config.preprocess)(augment(batch, low, high, numbers, epochs), True)
    return np.asarray(ops.convert_to_numpy(batch[IMAGE]))[: len(rows)]
