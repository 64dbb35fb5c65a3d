"""Files of Keras: ``.keras``, ``.weights.h5``, and the older ``.h5`` with weights or a whole model.

The files are not trusted. No layer is made from their config: only arrays in the file itself are read, and none that is
much larger than what is stored of it.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import CheckpointError
from modelyard.run.weights.match import NamedWeights

_WEIGHTS = "model.weights.h5"


def read_hdf5(file: Path | BinaryIO, shown: str | None = None) -> NamedWeights:
    """The weights of a ``.weights.h5`` or ``.h5`` file.

    Args:
        file: the file.
        shown: its name in errors.
    """
    shown = shown or str(file)
    with _open_hdf5(file, shown) as root:
        arrays = _find_arrays(root, shown)
        for prefix in ("model_weights/", ""):
            group = root.get(prefix or "/")
            if group is not None and _texts(group, "layer_names"):
                return _read_old(root, prefix, arrays, shown)
        if any("vars" in path.split("/")[:-1] for path in arrays):
            return _read_new(root, arrays)
        return NamedWeights({path.removesuffix(":0"): _read_array(dataset) for path, dataset in arrays.items()})


def read_keras(path: Path) -> NamedWeights:
    """The weights in a ``.keras`` file, which is a zip archive with an HDF5 file in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if _WEIGHTS not in archive.namelist():
                raise CheckpointError(f"{path} has no {_WEIGHTS} in it, so it is no .keras file with weights.")
            info = archive.getinfo(_WEIGHTS)
            if _is_too_large(info.file_size, info.compress_size):
                raise CheckpointError(
                    f"{path}: {_WEIGHTS} claims {info.file_size:,} bytes, of which {info.compress_size:,} are stored; "
                    "it is not read."
                )
            with archive.open(info) as packed:
                data = packed.read(info.file_size + 1)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged or no .keras file: {error}.") from error
    return read_hdf5(io.BytesIO(data), str(path))


def _read_new(root: Any, arrays: dict[str, Any]) -> NamedWeights:
    """Keras 3: ``layers/conv2d/vars/0``. Layers are numbered by class; newer files have their names, too."""
    paths: dict[str, str] = {}
    for path in arrays:
        if path.split("/")[0] not in ("optimizer", "_optimizer") and "seed_generator" not in path:
            name = _name_of(root, path)
            paths[path if name in paths else name] = path
    return NamedWeights({name: _read_array(arrays[path]) for name, path in paths.items()}, paths=paths)


def _name_of(root: Any, path: str) -> str:
    """``layers/functional/layers/conv2d/vars/0`` as ``backbone/conv1/0``, if every layer in the path has its name."""
    *parts, _, number = path.split("/")
    names = []
    for end in range(1, len(parts) + 1):
        group = "/".join([*parts[:end], "vars"])
        if group in root and "name" in root[group].attrs:
            names.append(_text(root[group].attrs["name"]))
        elif end == len(parts):
            return path
    return "/".join([*names, number]) if names else path


def _read_old(root: Any, prefix: str, arrays: dict[str, Any], shown: str) -> NamedWeights:
    """A group per layer, whose attribute ``weight_names`` has ``conv1/kernel:0`` and so on, in the layer's order."""
    named, numbered, order = {}, {}, {}
    layers: dict[tuple[str, str], int] = {}
    for layer in [*_texts(root[prefix or "/"], "layer_names"), "top_level_model_weights"]:
        if f"{prefix}{layer}" not in root:
            continue
        written = _texts(root[f"{prefix}{layer}"], "weight_names")
        owners = {name.rpartition("/")[0] for name in written}
        for number, name in enumerate(written):
            path = f"{prefix}{layer}/{name}"
            if path not in arrays:
                raise CheckpointError(f"{shown} is damaged: it names {path}, which is not in it.")
            clean = name.removesuffix(":0")
            clean = f"{layer}/{clean}" if clean in named or "/" not in clean else clean
            named[clean] = _read_array(arrays[path])
            owner, _, leaf = clean.rpartition("/")
            order[clean] = ((layers.setdefault((layer, owner), len(layers)),), leaf)
            if len(owners) == 1:
                numbered[clean] = f"{layer}/{number}"
    return NamedWeights(named, numbered=numbered, order=order)


# -- HDF5 -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_hdf5(file: Path | BinaryIO, shown: str) -> Iterator[Any]:
    """Opens the file for reading. Errors in the block become errors about ``shown``."""
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"{shown} is an HDF5 file; reading it needs h5py: pip install h5py.") from error

    try:
        with h5py.File(file, "r") as opened:
            yield opened
    except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{shown} is damaged or no HDF5 file: {error}.") from error


def _find_arrays(root: Any, shown: str) -> dict[str, Any]:
    """All datasets of an open file by path, unread, in the file's order.

    Raises:
        CheckpointError: if one is in another file, is not numeric, or is too large for what is stored of it.
    """
    import h5py

    found: dict[str, Any] = {}
    seen = set()
    todo = [("", root)]
    while todo:
        path, group = todo.pop()
        address = h5py.h5o.get_info(group.id).addr
        if address in seen:  # else a group that is linked into itself would never end
            raise CheckpointError(f"{shown}: the group {path} is linked twice; this is not a file of weights.")
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
                _check_dataset(item, here, shown)
                found[here] = item
        todo += reversed(inner)
    declared = sum(dataset.nbytes for dataset in found.values())
    size = root.file.id.get_filesize()
    if _is_too_large(declared, size):
        raise CheckpointError(f"{shown} has {size:,} bytes but claims {declared:,} bytes of arrays; it is not read.")
    return found


def _check_dataset(dataset: Any, path: str, shown: str) -> None:
    if dataset.external or dataset.is_virtual:
        raise CheckpointError(f"{shown}: the numbers of {path} are in another file; they are not read from there.")
    dtype = dataset.dtype
    bfloat16 = dtype.kind == "V" and dtype.itemsize == 2 and _text(dataset.attrs.get("dtype", "")) == "bfloat16"
    if dtype.kind not in "fiub" and not bfloat16:
        raise CheckpointError(f"{shown}: {path} has the type {dtype}, which is not numeric.")
    stored = dataset.id.get_storage_size()
    if _is_too_large(dataset.nbytes, stored):
        raise CheckpointError(
            f"{shown}: {path} has the shape {dataset.shape}, {dataset.nbytes:,} bytes, of which {stored:,} are stored; "
            "it is not read."
        )


def _is_too_large(claimed: int, stored: int) -> bool:
    """Whether an array cannot be weights: they hardly compress, and Keras does not try."""
    return claimed > (1 << 20) + 20 * stored


def _read_array(dataset: Any) -> NDArray[Any]:
    """The numbers of a dataset. bfloat16, which HDF5 does not know, becomes float32."""
    if dataset.dtype.kind == "V":
        bits = np.asarray(dataset[()]).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(dataset.shape)
    return np.asarray(dataset[()])


def _texts(group: Any, name: str) -> list[str]:
    """An attribute that is a list of texts; Keras cuts long ones into ``name0``, ``name1``, …"""
    parts = [name] if name in group.attrs else []
    while not (parts and parts[0] == name) and f"{name}{len(parts)}" in group.attrs:
        parts.append(f"{name}{len(parts)}")
    return [_text(value) for part in parts for value in np.atleast_1d(group.attrs[part])]


def _text(value: Any) -> str:
    """A text that HDF5 gives as bytes or as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
