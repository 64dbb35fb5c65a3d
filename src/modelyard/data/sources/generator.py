"""Datasets from Python generators: each is run once, its examples are kept as records in the cache.

    @modelyard.register_dataset("rings")
    def rings(options, context):
        def train():
            for number in range(1000):
                yield {"image": draw(number), "label": number % 2}
        return modelyard.GeneratorDataset({"train": train}, classes=["thin", "thick"])

A generator has no order but its own and no length; records have both, so everything that is promised of order and
resuming holds. Another code in the file, or other options, make new records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GeneratorDataset:
    """A dataset that is generated, one example after the other.

    Args:
        splits: for each split a function without arguments that yields examples: ``image`` (an array, or the bytes of
            an image file) and ``label`` (a class number, or the name of a class).
        classes: the names of the classes; by default the numbers that occur.
        image_size: height and width that images are given, where they differ in size.
        version: change it to have the examples generated anew, when something changed that the file does not show.
    """

    splits: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]]
    classes: Sequence[str] | None = None
    image_size: tuple[int, int] | None = None
    version: str = ""
