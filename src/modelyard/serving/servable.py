"""What a server needs of a model: images in, named arrays out. Of a run, and of an exported version."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE, LABEL, TEST, Feature
from modelyard.errors import DataError, RunError

if TYPE_CHECKING:
    from modelyard.serving.run_model import OpenRun

Outputs = dict[str, NDArray[Any]]
KINDS = ("classification", "multi_label", "regression", "other")
DESCRIPTION, SAVED_MODEL = "modelyard.json", "saved_model.pb"
"""An exported version has both; each is written last by someone, so a folder without one of them is half there."""


@dataclass(frozen=True)
class Facts:
    """What people are told of a model.

    Args:
        model: its name in Modelyard.
        dataset: what it was trained on.
        step: of its weights.
        kind: one of `KINDS`.
        classes: their names, in the order of the probabilities.
        image: of an example, as it is given.
        fit: how images of another shape are made to fit.
        shares: whether pixels are floats from 0 to 1, where image files hold bytes.
        test: its scores on the test split; empty where it was not tested.
    """

    model: str
    dataset: str
    step: int
    kind: str
    classes: tuple[str, ...]
    image: Feature
    fit: str = "crop"
    shares: bool = False
    test: Mapping[str, float] = field(default_factory=dict)


class Servable(ABC):
    """A model that is loaded. `predict` is called by one thread, `decode` by several."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.least = 1
        """Batches are multiples of this: where a model is on several devices, of their number."""
        self.outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape, without the batch, and type of each output; known after the first prediction."""

    @abstractmethod
    def predict(self, images: NDArray[Any]) -> Outputs:
        """What the model says of a batch of images; all arrays have its length."""

    def decode(self, data: bytes, name: str) -> NDArray[Any]:
        """The pixels of an image file as in training: colours, orientation, size.

        Raises:
            DataError: if it is no image.
        """
        from modelyard.data.images import fill

        out = np.empty(self.facts.image.shape, self.facts.image.dtype)
        if out.ndim != 3:
            raise DataError(f"{name} is an image file; examples of this model have shape {out.shape}. Give numbers.")
        fill(out, data, self.facts.fit, None, lambda: name)  # type: ignore[arg-type]
        if self.facts.shares:
            out /= 255
        return out

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Predicts a batch of each size, so that everything is compiled."""
        image = self.facts.image
        for size in sizes:
            found = self.predict(np.zeros((size, *image.shape), image.dtype))
            self.outputs = {name: (values.shape[1:], _type_name(values)) for name, values in found.items()}
            wrong = [name for name, values in found.items() if len(values) != size]
            if wrong:
                raise DataError(f"the model gives {wrong[0]} not once for each image; it can't be served.")


def _type_name(values: NDArray[Any]) -> str:
    return "string" if values.dtype.kind in "OSU" else values.dtype.name


def batch_sizes(largest: int, least: int = 1) -> list[int]:
    """The sizes of batch that are computed: powers of two, and the largest. Few, since each may be compiled."""
    sizes, size = [], least
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


class RunServable(Servable):
    """A checkpoint of a run with its engine. Build it in the thread that predicts: Keras has settings for each."""

    def __init__(self, opened: OpenRun) -> None:
        from modelyard.run.summary import summarize

        engine, dataset = opened.engine()  # first: it chooses Keras's backend
        kept = opened.remembered()
        test = summarize(opened.directory).get("test") or {}
        super().__init__(
            Facts(
                opened.config.model,
                Path(opened.config.dataset).name,
                opened.step,
                _kind_of(engine.task),
                tuple(kept.data.classes),
                kept.image,
                kept.fit,
                kept.shares,
                _numbers(test),
            )
        )
        self._engine, self._dataset = engine, dataset
        self.least = len(engine.devices)
        self._classes = np.array(kept.data.classes, object)

    def predict(self, images: NDArray[Any]) -> Outputs:
        """Through the engine, after what the user does to each example."""
        batch: dict[str, Any] = {IMAGE: images}
        if self._dataset.stored is not self._dataset:
            from modelyard.data.items import ArrayItems

            self._dataset.stored.items = ArrayItems(images, np.zeros(len(images), np.int32))  # type: ignore[attr-defined]
            read = self._dataset.read(TEST, np.arange(len(images)))
            batch = {name: values for name, values in read.items() if name not in (ID, LABEL)}
        found = {name: np.asarray(values) for name, values in self._engine.predict_batch(batch).items()}
        if "class" in found and len(self._classes):
            found["label"] = self._classes[found["class"]]
        return found


class ExportedServable(Servable):
    """A SavedModel that `modelyard export` wrote, run by TensorFlow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(read_description(folder))
        try:
            import tensorflow as tf
        except ImportError as error:
            raise RunError(
                "an exported SavedModel is served by TensorFlow: pip install 'modelyard[cpu]', or serve the run itself "
                "with --model_dir."
            ) from error
        try:
            self._loaded = tf.saved_model.load(str(folder))  # holds the variables
            self._function = self._loaded.signatures["serving_default"]
        except Exception as error:  # TensorFlow's readers have no class of error in common
            raise DataError(f"{folder} can't be loaded: {str(error).strip() or type(error).__name__}") from error
        self._tensor: Callable[..., Any] = tf.constant
        wanted = self._function.structured_input_signature[1]
        if set(wanted) != {IMAGE}:
            raise DataError(
                f"{folder} takes {', '.join(wanted) or 'nothing'}; a model that takes {IMAGE} can be served."
            )
        shape, of_model = self.facts.image.shape, wanted[IMAGE]
        if not of_model.shape.is_compatible_with((None, *shape)) or of_model.dtype.name != self.facts.image.dtype:
            raise DataError(
                f"{folder} takes images {of_model.shape} of {of_model.dtype.name}, but its {DESCRIPTION} says "
                f"{shape} of {self.facts.image.dtype}."
            )

    def predict(self, images: NDArray[Any]) -> Outputs:
        """By the signature serving_default; text as text."""
        found = {name: values.numpy() for name, values in self._function(image=self._tensor(images)).items()}
        for name, values in found.items():
            if values.dtype == object:
                flat = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in values.flat]
                text = np.empty(len(flat), object)
                text[:] = flat
                found[name] = text.reshape(values.shape)
        return found


def read_description(folder: Path) -> Facts:
    """What modelyard.json says of an exported version.

    Raises:
        DataError: if it is missing or damaged.
    """
    file = folder / DESCRIPTION
    try:
        kept = json.loads(file.read_bytes())
        image = Feature(tuple(int(n) for n in kept["image"]["shape"]), np.dtype(kept["image"]["dtype"]).name)
        kind = str(kept["kind"])
        test = kept.get("test") or {}
        classes = tuple(str(name) for name in kept.get("classes") or ())
        facts = Facts(
            str(kept["model"]),
            Path(str(kept["dataset"])).name,
            int(kept["step"]),
            kind if kind in KINDS else "other",
            classes,
            image,
            str(kept.get("fit", "crop")),
            bool(kept.get("shares", False)),
            _numbers(test),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is missing or damaged: {error!r}. Export it again.") from error
    if kept.get("format", "saved_model") != "saved_model":
        raise DataError(f"{folder} is an export as {kept['format']}; a SavedModel can be served.")
    if not image.shape or min(image.shape) < 1:
        raise DataError(f"{file} says that images have shape {image.shape}. Export it again.")
    return facts


def is_version(folder: Path) -> bool:
    """Whether a folder is a whole exported version, by its name and what is in it."""
    named = folder.name.isascii() and folder.name.isdigit() and folder.name == str(int(folder.name))
    return named and (folder / DESCRIPTION).is_file() and (folder / SAVED_MODEL).is_file()


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Those that can be shown."""
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    }


def _kind_of(task: Any) -> str:
    from modelyard.models.kinds import KINDS as TASKS

    return next((name for name, known in TASKS.items() if isinstance(task, known)), "other")
