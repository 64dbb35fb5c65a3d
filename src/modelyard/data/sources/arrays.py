"""Examples that a Python program gives: ``dataset=(x, y)``, splits of them, or a `Dataset`; and examples to predict.

    modelyard.train_and_evaluate(model="mlp", dataset=(x, y))
    modelyard.train_and_evaluate(model="mlp", dataset={"train": (x, y), "test": (x_test, y_test)})

Anything that NumPy converts is an array: lists, tensors, columns of pandas. A data frame is examples of numbers; its
column ``label`` is the label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import (
    ID,
    IMAGE,
    LABEL,
    SPLITS,
    TRAIN,
    VALIDATION,
    ArrayDataset,
    DataContext,
    Dataset,
    GeneratorDataset,
)
from modelyard.errors import DataError, unknown
from modelyard.registry import Options

_FORMS = (
    "give (x, y), {'train': (x, y), 'validation': (x, y), 'test': (x, y)}, a modelyard.ArrayDataset or another "
    "modelyard.Dataset"
)
_SHORT = "val"
_Named = dict[str, NDArray[Any]]


def given(options: Options, context: DataContext) -> Dataset:
    """Returns the dataset that a Python program gives."""
    data = context.given
    if data is None:
        raise DataError(
            "this dataset is arrays, which only a Python program can give. To resume such a run, or to evaluate one of "
            "its splits, give the same arrays again: modelyard.resume(RUN, dataset=(x, y)), "
            "modelyard.evaluate(RUN, split='test', dataset=(x, y)). To evaluate other examples: "
            "modelyard.load(RUN).evaluate((x, y)). Prediction, export and serving need no dataset."
        )
    if isinstance(data, GeneratorDataset):
        raise DataError(
            "a GeneratorDataset needs a name, since its examples are kept in the cache: return it from a function with "
            "@modelyard.register_dataset('my_data'), and give dataset='my_data'."
        )
    if isinstance(data, Dataset):
        return data
    whole = not _has_splits(data)
    group = context.split_group
    parts = _splits(data)
    columns = _column_names(parts.get(TRAIN), group)
    splits = {
        name: _named(_in_order(part, columns, group), "the dataset" if whole else f"the {name} split", group)
        for name, part in parts.items()
    }
    groups = None
    if group not in ("", ID, IMAGE, LABEL):  # it is no input
        groups = {name: arrays.pop(group, None) for name, arrays in splits.items()}.get(TRAIN)
    dataset = ArrayDataset(*_with_class_numbers(splits))
    dataset.value_columns = columns
    if groups is not None:
        dataset.extra[group] = groups
    return dataset


def is_one_split(data: Any) -> bool:
    """Returns whether examples are given without splits, such as ``(x, y)``."""
    return not isinstance(data, Dataset) and not _has_splits(data)


def read_given(data: Any, columns: Sequence[str] = ()) -> tuple[Any, NDArray[Any] | None]:
    """Returns the examples to predict, an array or named arrays, and their labels if there are some.

    Args:
        data: an array, (x, y), named arrays, or a data frame.
        columns: the columns that the model was trained on, which a data frame must have; if they are known.

    Raises:
        DataError: if they can't be converted to arrays.
    """
    if isinstance(data, Dataset):
        raise DataError(
            f"{type(data).__name__} is a dataset; give arrays: x or (x, y). To evaluate a split of it: "
            "modelyard.evaluate(RUN, split='test', dataset=…)."
        )
    data = _in_order(data, columns)
    plain = not (_is_pair(data) or isinstance(data, Mapping) or is_frame(data))
    named = {IMAGE: _array(data, "the data")} if plain else _named(data, "the data")
    labels = named.pop(LABEL, None)
    return (named[IMAGE] if list(named) == [IMAGE] else named), labels


def frame_columns(data: Any, names: Iterable[str]) -> Any:
    """Returns a data frame whose columns are inputs as a dictionary of arrays; anything else as it is."""
    if _is_pair(data):
        return frame_columns(data[0], names), data[1]
    if not is_frame(data):
        return data
    return {str(name): np.array(data[name].tolist()) for name in data.columns if name in (*names, LABEL)}


def has_names(data: Any) -> bool:
    """Returns whether examples, with or without labels, are arrays by name."""
    return isinstance(data, Mapping) or (_is_pair(data) and isinstance(data[0], Mapping)) or is_frame(data)


def _has_splits(data: Any) -> bool:
    return isinstance(data, Mapping) and any(name in (*SPLITS, _SHORT) for name in data)


def _splits(data: Any) -> dict[str, Any]:
    """Returns the examples of each split; all are of train if there are no splits."""
    if not _has_splits(data):
        return {TRAIN: data}
    named = {VALIDATION if name == _SHORT else str(name): part for name, part in data.items()}
    wrong = next((name for name in named if name not in SPLITS), None)
    if wrong is not None:
        raise DataError(f"the dataset is a dictionary of splits, but {unknown('split', wrong, SPLITS)}")
    return named


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2


def is_frame(data: Any) -> bool:
    """Whether something is a data frame of pandas, which need not be installed."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and getattr(data, "ndim", 0) == 2


def _named(data: Any, where: str, group: str = "") -> _Named:
    """Returns the named arrays of one split: of a pair (x, y), of a dictionary, or of a data frame.

    The column ``group`` of a data frame is an array of its own.
    """
    if _is_pair(data):
        examples, labels = data
        if isinstance(examples, tuple) and isinstance(labels, tuple):
            raise DataError(
                f"{where} is a pair of pairs, as Keras's load_data() returns it. Name the splits: "
                "dataset={'train': (x_train, y_train), 'test': (x_test, y_test)}."
            )
        if isinstance(examples, Mapping):
            named = {str(name): _array(values, f"{name} of {where}") for name, values in examples.items()}
        else:
            named = _frame(examples, group) if is_frame(examples) else {IMAGE: _array(examples, f"x of {where}")}
        return {**named, LABEL: _array(labels, f"y of {where}")}
    if isinstance(data, Mapping):
        return {str(name): _array(values, f"{name} of {where}") for name, values in data.items()}
    if is_frame(data):
        return _frame(data, group)
    raise DataError(f"{where} is {_described(data)}; {_FORMS}.")


def _array(values: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
        if array.dtype == object:  # columns of pandas with text or with whole numbers that may be missing
            array = np.array(array.tolist())
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} can't be converted to an array: {error}") from error
    if array.dtype == object:
        raise DataError(f"{what} holds Python objects; give numbers or text.")
    return array


def _frame(frame: Any, group: str) -> _Named:
    """Returns the columns of a data frame as one vector of numbers per example, without the label and the group."""
    own = [name for name in dict.fromkeys((LABEL, group)) if name in frame.columns]
    values = frame.drop(columns=own) if own else frame
    try:
        named: _Named = {IMAGE: values.to_numpy(dtype=np.float32)}
    except (ValueError, TypeError) as error:
        why = str(error).rstrip(".")
        raise DataError(
            f"a column of the data frame is not numbers: {why}. Give the columns that the model should see, and the "
            "labels beside them: dataset=(frame[columns], frame['label'])."
        ) from error
    return named | {name: _array(frame[name], f"the column {name}") for name in own}


def _column_names(data: Any, group: str) -> list[str]:
    """Returns the names of the columns that are examples, of a data frame; none if they are not unique."""
    frame = data[0] if _is_pair(data) else data
    if not is_frame(frame):
        return []
    names = [str(name) for name in frame.columns if name not in (LABEL, group)]
    return names if len(set(names)) == len(names) else []


def _in_order(data: Any, columns: Sequence[str], group: str = "") -> Any:
    """Returns a data frame, or its pair with labels, with ``columns`` in their order; anything else as it is.

    Raises:
        DataError: if some are missing.
    """
    if _is_pair(data):
        return _in_order(data[0], columns, group), data[1]
    if not is_frame(data) or not columns:
        return data
    found = {str(name): name for name in data.columns}
    missing = [name for name in columns if name not in found]
    if missing:
        others = [name for name in found if name not in (*columns, LABEL)]
        has = f" It has instead: {', '.join(others)}." if others else ""
        raise DataError(
            f"the data frame lacks columns that the model was trained on: {', '.join(missing)}.{has} Name them as in "
            "training, or give an array, whose columns are in the order of training: frame.to_numpy()."
        )
    own = [name for name in dict.fromkeys((LABEL, group)) if name in data.columns]
    return data[[*(found[name] for name in columns), *own]]


def _described(data: Any) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


# -- labels -----------------------------------------------------------------------------------------------------------


def _with_class_numbers(splits: Mapping[str, _Named]) -> tuple[dict[str, _Named], list[str] | None]:
    """Returns the splits with numbers for class names, and the names in alphabetical order; None if there are none."""
    labels = {split: arrays[LABEL] for split, arrays in splits.items() if LABEL in arrays}
    for split, values in labels.items():
        _refuse_one_hot(split, values)
    if not any(values.ndim == 1 and values.dtype.kind in "USb" for values in labels.values()):
        return dict(splits), None
    text = {split: values.astype(np.str_) for split, values in labels.items()}
    names = np.unique(np.concatenate([np.unique(values) for values in text.values()]))
    numbered = {split: np.searchsorted(names, values).astype(np.int32) for split, values in text.items()}
    return {
        split: {**arrays, LABEL: numbered[split]} if split in numbered else arrays for split, arrays in splits.items()
    }, names.tolist()


def _refuse_one_hot(split: str, labels: NDArray[Any]) -> None:
    if labels.ndim != 2 or labels.shape[1] < 2 or labels.dtype.kind != "f":
        return
    if bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all()):
        raise DataError(
            f"labels of the {split} split are one-hot rows of floats. Give the classes: y.argmax(axis=1). "
            "For a regression on such rows, give a modelyard.ArrayDataset."
        )
