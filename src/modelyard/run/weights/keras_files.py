"""Files of Keras: ``.keras``, ``.weights.h5``, and the older ``.h5`` with weights or a whole model.

Nothing in them is run: no layer is made from their config, only arrays are read.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

from modelyard.errors import CheckpointError
from modelyard.run.weights.hdf5 import find_arrays, open_hdf5, read_array, text, texts
from modelyard.run.weights.named import NamedWeights

_WEIGHTS = "model.weights.h5"
_MOST_EXPANSION = 20
_SMALL = 1 << 20


def read_hdf5(path: Path) -> NamedWeights:
    """The weights of a ``.weights.h5`` or ``.h5`` file."""
    with open_hdf5(path, str(path)) as root:
        return _read(root, str(path))


def read_keras(path: Path) -> NamedWeights:
    """The weights in a ``.keras`` file, which is a zip archive with an HDF5 file in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if _WEIGHTS not in archive.namelist():
                raise CheckpointError(f"{path} has no {_WEIGHTS} in it, so it is no .keras file with weights.")
            info = archive.getinfo(_WEIGHTS)
            if info.file_size > _SMALL + _MOST_EXPANSION * info.compress_size:
                raise CheckpointError(
                    f"{path}: {_WEIGHTS} claims {info.file_size:,} bytes, of which {info.compress_size:,} are stored; "
                    "it is not read."
                )
            with archive.open(info) as packed:
                data = packed.read(info.file_size + 1)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged or no .keras file: {error}.") from error
    with open_hdf5(io.BytesIO(data), str(path)) as root:
        return _read(root, str(path))


def _read(root: Any, shown: str) -> NamedWeights:
    arrays = find_arrays(root, shown)
    for prefix in ("model_weights/", ""):
        group = root.get(prefix.rstrip("/")) if prefix else root
        if group is not None and texts(group, "layer_names"):
            return _read_old(root, prefix, arrays, shown)
    if any("vars" in path.split("/")[:-1] for path in arrays):
        return _read_new(root, arrays)
    return NamedWeights({path.removesuffix(":0"): read_array(dataset) for path, dataset in arrays.items()})


def _read_new(root: Any, arrays: dict[str, Any]) -> NamedWeights:
    """Keras 3: ``layers/conv2d/vars/0``. Layers are numbered by class; newer files have their names, too."""
    places: dict[str, str] = {}
    for path in arrays:
        if path.split("/")[0] not in ("optimizer", "_optimizer") and "seed_generator" not in path:
            name = _own_name(root, path)
            places[path if name in places else name] = path
    named = {name: read_array(arrays[path]) for name, path in places.items()}
    return NamedWeights(named, places=places)


def _own_name(root: Any, path: str) -> str:
    """``layers/functional/layers/conv2d/vars/0`` as ``backbone/conv1/0``, if every layer on the way has its name."""
    *parts, _, number = path.split("/")
    names = []
    for end in range(1, len(parts) + 1):
        place = "/".join([*parts[:end], "vars"])
        if place in root and "name" in root[place].attrs:
            names.append(text(root[place].attrs["name"]))
        elif end == len(parts):
            return path
    return "/".join([*names, number]) if names else path


def _read_old(root: Any, prefix: str, arrays: dict[str, Any], shown: str) -> NamedWeights:
    """A group a layer, whose attribute ``weight_names`` has ``conv1/kernel:0`` and so on, in the layer's order."""
    named, numbered, order = {}, {}, {}
    layers: dict[tuple[str, str], int] = {}
    for layer in [*texts(root[prefix or "/"], "layer_names"), "top_level_model_weights"]:
        if f"{prefix}{layer}" not in root:
            continue
        written = texts(root[f"{prefix}{layer}"], "weight_names")
        owners = {name.rpartition("/")[0] for name in written}
        for number, name in enumerate(written):
            path = f"{prefix}{layer}/{name}"
            if path not in arrays:
                raise CheckpointError(f"{shown} is damaged: it names {path}, which is not in it.")
            clean = name.removesuffix(":0")
            clean = f"{layer}/{clean}" if clean in named or "/" not in clean else clean
            named[clean] = read_array(arrays[path])
            owner, _, leaf = clean.rpartition("/")
            order[clean] = ((layers.setdefault((layer, owner), len(layers)),), leaf)
            if len(owners) == 1:
                numbered[clean] = f"{layer}/{number}"
    return NamedWeights(named, numbered=numbered, order=order)
