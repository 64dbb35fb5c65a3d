"""Whether an export predicts what its run predicts, on real examples."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from modelyard.data.dataset import IMAGE, TEST, TRAIN, VALIDATION, Dataset
from modelyard.data.items import ArrayItems
from modelyard.data.stored import StoredDataset
from modelyard.errors import UserError
from modelyard.loop.run import open_dataset
from modelyard.serving.examples import Examples
from modelyard.serving.exporting.exportable import CLASS, Exportable

log = logging.getLogger("modelyard")
TOLERANCE = 1e-4
_MOST = 32
_READABLE = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")
Predictions = Mapping[str, NDArray[Any]]
Predictor = Callable[[Any], Predictions]


@dataclass(frozen=True)
class Probe:
    """What to compare predictions on.

    Args:
        images: a batch as the dataset gives it.
        files: image files, the first of the same examples.
        decoded: those as in training.
        what: where they come from, for people.
    """

    images: NDArray[Any]
    files: list[bytes]
    decoded: NDArray[Any]
    what: str


def gather_probe(model: Exportable) -> Probe:
    """Real examples of the run's data; random ones where that is not here."""
    try:
        dataset = open_dataset(model.run.config)
    except (UserError, OSError) as error:
        log.warning("the data of the run can't be opened (%s): the export is checked on random images", error)
        images, stored, what = _random(model), None, "random images"
    else:
        sizes = dataset.sizes()
        split = next(name for name in (TEST, VALIDATION, TRAIN) if name in sizes)
        rows = np.unique(np.linspace(0, sizes[split] - 1, min(sizes[split], _MOST)).astype(np.int64))
        images, what = np.asarray(dataset.read(split, rows)[IMAGE]), f"{len(rows)} examples of {split}"
        stored = _stored(dataset, split, rows)
        if images.shape[1:] != model.image.shape or images.dtype != model.image.dtype:
            raise UserError(
                f"the examples of {model.run.config.dataset} are {images.dtype} of shape {images.shape[1:]} now; the "
                f"run was trained on {model.image.dtype} of shape {model.image.shape}. Put its data back in place."
            )
    if not model.takes_files:
        return Probe(images, [], images[:0], what)
    files = [
        one if isinstance(one, bytes) and one.startswith(_READABLE) else _png(image, model.kept.shares)
        for one, image in zip(stored or [None] * len(images), images, strict=True)
    ]
    files += _unusual(files[0])
    reader = Examples(ArrayItems(images[:1], np.zeros(1, np.int32)), model.kept)
    decoded = np.empty((len(files), *model.image.shape), model.image.dtype)
    for place, file in enumerate(files):
        reader.put(decoded[place], file, lambda: "an example to check with")
    return Probe(images, files, decoded, what)


def compare(name: str, predictor: Predictor, batch: Any, expected: Predictions) -> float:
    """The largest difference of the predictions for ``batch`` from what is expected; numbers beyond 1 are shares.

    Raises:
        UserError: if they differ by more than the tolerance.
    """
    found = predictor(batch)
    missing = [output for output in expected if output not in found]
    if missing:
        raise UserError(f"the export was refused: {name} gives no {', '.join(missing)}.")
    largest = 0.0
    for output, wanted in expected.items():
        got = np.asarray(found[output])
        if got.shape != wanted.shape:
            raise UserError(
                f"the export was refused: {output} of {name} has shape {got.shape}, that of the run {wanted.shape}."
            )
        if wanted.dtype.kind == "f":
            size = np.maximum(np.abs(wanted.astype(np.float64)), 1.0)
            difference = float(np.max(np.abs(got.astype(np.float64) - wanted) / size, initial=0.0))
        else:
            difference = float(np.any((got != wanted) & ~_undecided(output, got, expected)))
        if not difference <= TOLERANCE:  # nor is no number
            raise UserError(
                f"the export was refused: {output} of {name} differs from the run's own predictions by "
                f"{difference:.2g}; {TOLERANCE:g} is the most. Nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _undecided(output: str, got: NDArray[Any], expected: Predictions) -> Any:
    """Where the run itself wavers between two answers, so that rounding decides."""
    shares = expected.get("probabilities")
    if shares is None:
        return False
    if output == CLASS and shares.ndim == 2 and got.ndim == 1:
        chosen = np.take_along_axis(shares, got[:, None].astype(np.int64).clip(0, shares.shape[1] - 1), axis=1)[:, 0]
        return shares.max(axis=1) - chosen <= TOLERANCE
    return np.abs(shares - 0.5) <= TOLERANCE if shares.shape == got.shape else False


def _stored(dataset: Dataset, split: str, rows: NDArray[np.int64]) -> list[Any] | None:
    stored = dataset.stored
    if not isinstance(stored, StoredDataset):
        return None
    return [stored.splits[split].load(int(row)) for row in rows]


def _random(model: Exportable) -> NDArray[Any]:
    random = np.random.default_rng(0)
    shape = (_MOST, *model.image.shape)
    if model.image.dtype == "uint8":
        return random.integers(0, 256, shape, np.uint8)
    values = random.random(shape) if model.kept.shares else random.normal(0, 1, shape)
    return values.astype(model.image.dtype)


def _png(image: NDArray[Any], shares: bool) -> bytes:
    """An image of a dataset as a file; of floats, the nearest bytes."""
    if image.dtype != np.uint8:
        image = np.rint(image.astype(np.float64) * (255 if shares else 1)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()


def _unusual(file: bytes) -> list[bytes]:
    """The same picture of other sizes and colour modes, on its side, transparent."""
    with Image.open(io.BytesIO(file)) as opened:
        picture = opened.convert("RGB")
    large = picture.resize((3 * picture.width + 1, 2 * picture.height + 5))
    turned = Image.Exif()
    turned[0x0112] = 6
    grey, colour, transparent = io.BytesIO(), io.BytesIO(), io.BytesIO()
    large.convert("L").save(grey, "JPEG", exif=turned.tobytes())
    large.save(colour, "JPEG", quality=90)
    large.convert("RGBA").save(transparent, "PNG")
    return [grey.getvalue(), colour.getvalue(), transparent.getvalue()]


__all__ = ["TOLERANCE", "Probe", "compare", "gather_probe"]
