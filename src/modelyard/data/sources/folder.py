"""Image files in folders: a folder per class, with or without folders per split above them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelyard.data.dataset import TEST, TRAIN, VALIDATION
from modelyard.data.image_spec import IMAGE_SUFFIXES, UNSUPPORTED_FORMATS
from modelyard.errors import DataError

log = logging.getLogger("modelyard")

SPLIT_NAMES = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "eval", "dev"),
    TEST: ("test", "testing"),
}
Labelled = list[tuple[str, str]]
"""Paths and class names, in storage order."""


def split_named(name: str) -> str | None:
    """Returns the split that a folder or a cell names, if it does."""
    return next((split for split, names in SPLIT_NAMES.items() if name.lower() in names), None)


def split_folders(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits in ``folder``; none if its folders are classes.

    A class may be called ``train``, too. If there are other folders, it is a split only if there is a second split, or
    if it holds folders and no images.
    """
    found: dict[str, Path] = {}
    others = []
    for path in _folders(folder):
        split = split_named(path.name)
        if split is None:
            others.append(path.name)
        elif split in found:
            raise DataError(f"{folder} has two folders for {split}: {found[split].name} and {path.name}. Keep one.")
        else:
            found[split] = path
    if others and (TRAIN not in found or (len(found) < 2 and not _holds_classes(found[TRAIN]))):
        return {}
    if others:
        log.warning("%s has folders for splits; %s beside them is left out", folder, ", ".join(others))
    return found


def images_by_class(folder: Path) -> Labelled:
    """Returns the images in the class folders of ``folder``: by class, then by path, relative to ``folder``.

    Raises:
        DataError: if there are no class folders, or no images in them.
    """
    classes = _folders(folder)
    if not classes:
        raise DataError(
            f"{folder} has no folder per class. Put the images of each class into a folder named like it: "
            f"{folder / 'cat'}{os.sep}…"
        )
    found: Labelled = []
    others: list[str] = []
    unsupported: list[Path] = []
    for class_folder in classes:
        images = []
        for path in files_in(class_folder):
            if is_image(path):
                images.append(path.relative_to(folder).as_posix())
            elif unsupported_format(path):
                unsupported.append(path)
            else:
                others.append(path.name)
        if not images:
            log.warning("%s holds no images and is left out", class_folder)
        found += [(path, class_folder.name) for path in sorted(images)]
    if found and unsupported:
        log.warning("%s", explain_unsupported(unsupported))
    if others:
        log.warning("%s: %d file(s) left out, no images by their names: %s …", folder, len(others), others[0])
    if not found:
        raise no_images(folder)
    return found


def files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and below, sorted within each folder, without hidden ones."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        yield from (Path(parent, name) for name in sorted(files) if not is_hidden(name))


def is_image(path: Path) -> bool:
    """Returns whether a file is an image by its name."""
    return path.name.lower().endswith(IMAGE_SUFFIXES)


def unsupported_format(path: Path) -> str | None:
    """Returns the format of an image that can't be decoded, such as HEIC, by its name; None for any other file."""
    name = path.name.lower()
    return next((kind for kind, suffixes in UNSUPPORTED_FORMATS.items() if name.endswith(suffixes)), None)


def explain_unsupported(paths: Sequence[Path]) -> str:
    """Returns the message about image files of formats that can't be decoded."""
    kinds = " and ".join(sorted({str(unsupported_format(path)) for path in paths}))
    return f"{len(paths):,} image(s) are left out, the first: {paths[0]}. {kinds} is not supported: convert to JPEG"


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder belongs to the system and not to the user."""
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db", "desktop.ini")


def no_images(folder: Path) -> DataError:
    """Returns the error for a folder without images."""
    unsupported = [path for path in files_in(folder) if unsupported_format(path)]
    if unsupported:
        return DataError(f"there are no images that can be read under {folder}: {explain_unsupported(unsupported)}.")
    return DataError(f"there are no images under {folder}. Known endings: {', '.join(IMAGE_SUFFIXES)}.")


def sorted_classes(labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the classes of all splits: by number if all are whole numbers, else by name.

    Raises:
        DataError: if two names differ in case only.
    """
    names = {name for of_split in labels.values() for name in of_split}
    folded: dict[str, str] = {}
    for name in sorted(names):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"the classes {other!r} and {name!r} differ in case only. Rename one if they are two classes, "
                "or put them together."
            )
    if all(name.isascii() and name.isdigit() and str(int(name)) == name for name in names):
        return sorted(names, key=int)
    return sorted(names)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error.strerror or error}.") from error


def _holds_classes(folder: Path) -> bool:
    return bool(_folders(folder)) and not any(is_image(path) for path in folder.iterdir())
