"""Arrays of an HDF5 file from strangers: only those in the file itself, and no larger than the file makes likely."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import CheckpointError

_MOST_EXPANSION = 20  # weights hardly compress, and Keras does not try
_SMALL = 1 << 20


@contextlib.contextmanager
def open_hdf5(file: Path | BinaryIO, shown: str) -> Iterator[Any]:
    """The file, to read. What goes wrong with it in the block is said as an error about ``shown``.

    Raises:
        CheckpointError: if it is damaged or no HDF5 file.
    """
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"{shown} is an HDF5 file; reading it needs h5py: pip install h5py.") from error

    try:
        with h5py.File(file, "r") as opened:
            yield opened
    except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{shown} is damaged or no HDF5 file: {error}.") from error


def find_arrays(root: Any, shown: str) -> dict[str, Any]:
    """All datasets of an open file by path, unread, in the file's order.

    Raises:
        CheckpointError: if one is elsewhere, is of no plain numbers, or is too large for what is stored of it.
    """
    import h5py

    found: dict[str, Any] = {}
    seen = set()
    todo = [("", root)]
    while todo:
        path, group = todo.pop()
        address = h5py.h5o.get_info(group.id).addr
        if address in seen:  # else a group that is linked into itself would never end
            raise CheckpointError(f"{shown}: the group {path} is linked from two places; this is no file of weights.")
        seen.add(address)
        inner = []
        for name in group:
            here = f"{path}{name}"
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise CheckpointError(
                    f"{shown}: {here} is a {type(link).__name__}, which may lead out of the file, so it is not "
                    "followed. Save the weights into one file."
                )
            item = group[name]
            if isinstance(item, h5py.Group):
                inner.append((f"{here}/", item))
            elif isinstance(item, h5py.Dataset):
                found[here] = _checked(item, here, shown)
        todo += reversed(inner)
    declared = sum(dataset.nbytes for dataset in found.values())
    size = root.file.id.get_filesize()
    if declared > _SMALL + _MOST_EXPANSION * size:
        raise CheckpointError(f"{shown} has {size:,} bytes but claims {declared:,} bytes of arrays; it is not read.")
    return found


def read_array(dataset: Any) -> NDArray[Any]:
    """The numbers of a dataset; bfloat16, which HDF5 does not know, as float32."""
    if dataset.dtype.kind == "V":
        bits = np.asarray(dataset[()]).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(dataset.shape)
    return np.asarray(dataset[()])


def texts(group: Any, name: str) -> list[str]:
    """An attribute that is a list of texts; Keras cuts long ones into ``name0``, ``name1``, …"""
    parts = [name] if name in group.attrs else []
    while not (parts and parts[0] == name) and f"{name}{len(parts)}" in group.attrs:
        parts.append(f"{name}{len(parts)}")
    return [text(value) for part in parts for value in np.atleast_1d(group.attrs[part])]


def text(value: Any) -> str:
    """A text that HDF5 gives as bytes or as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _checked(dataset: Any, path: str, shown: str) -> Any:
    if dataset.external or dataset.is_virtual:
        raise CheckpointError(f"{shown}: the numbers of {path} are in another file; they are not read from there.")
    kind = dataset.dtype
    bfloat16 = kind.kind == "V" and kind.itemsize == 2 and text(dataset.attrs.get("dtype", "")) == "bfloat16"
    if kind.kind not in "fiub" and not bfloat16:
        raise CheckpointError(f"{shown}: {path} has the type {kind}, which is no weight.")
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > _SMALL + _MOST_EXPANSION * stored:
        raise CheckpointError(
            f"{shown}: {path} has the shape {dataset.shape}, {dataset.nbytes:,} bytes, of which {stored:,} are stored; "
            "it is not read."
        )
    return dataset
