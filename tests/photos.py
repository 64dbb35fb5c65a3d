"""Small photographs for the tests: each is told apart by its pixels, and a JPEG keeps them well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def photo(number: int, height: int = 30, width: int = 40) -> NDArray[np.uint8]:
    """A picture like no other number's: a slope whose colours and direction hang on the number."""
    rows, columns = np.mgrid[0:height, 0:width].astype(float)
    wave = np.sin((rows / height + number) * 2) * np.cos((columns / width) * 3 + number * 0.7)
    channels = [128 + 100 * wave, 255 * rows / height, (number * 37) % 200 + 50 * columns / width]
    return np.stack(channels, axis=2).clip(0, 255).astype(np.uint8)


def save_photo(path: Path, number: int, height: int = 30, width: int = 40, **options: Any) -> None:
    """The picture of ``number`` as a file; its kind is the ending of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(photo(number, height, width)).save(path, **options)


def photo_folder(
    folder: Path, count: int, classes: tuple[str, ...] = ("cat", "dog", "emu"), ending: str = "jpg"
) -> Path:
    """A folder per class with ``count`` pictures of a few sizes, dealt out in turn."""
    for number in range(count):
        place = folder / classes[number % len(classes)] / f"{number:03d}.{ending}"
        save_photo(place, number, 30 + 2 * (number % 5), 40 - 3 * (number % 4))
    return folder
