"""Reads weights from HDF5 files, in a process of its own: a damaged file can hang HDF5, or crash it.

`read_hdf5` starts the process. It has a limit of time and of memory, and writes what it has read as safetensors, which
cannot do harm. No layer is made from a config in the file: only arrays in the file itself are read, and none that is
much larger than what is stored of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from modelyard.errors import CheckpointError, UserError
from modelyard.system.files import explain
from modelyard.system.untrusted import check_regular

Found = tuple[dict[str, NDArray[Any]], dict[str, Any]]
"""Arrays by name, and what else `NamedWeights` takes."""

_SECONDS, _BYTES_PER_SECOND = 60, 1 << 20
"""The time for a file: slow disks read more than this."""
_MEMORY = 4 << 30
_REFUSED = 3
"""The exit status of the process if the file is refused; its reason is on standard output."""
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from modelyard.run.weights.hdf5 import main; main()"


def read_hdf5(path: Path, shown: str | None = None, *, seconds: float | None = None) -> Found:
    """Returns the weights of a ``.weights.h5`` or ``.h5`` file.

    Args:
        path: the file.
        shown: its name in errors.
        seconds: how long it may take; by default a minute, and a second per MiB.

    Raises:
        CheckpointError: if the file is damaged, or is no file of weights.
    """
    shown = shown or str(path)
    with explain(path, "read", CheckpointError):
        check_regular(path, CheckpointError)
        size = path.stat().st_size
    seconds = seconds or _SECONDS + size / _BYTES_PER_SECOND
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "weights.safetensors"
        arguments = [json.dumps(sys.path), str(path), shown, str(result), str(seconds)]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _CODE, *arguments], capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"{shown} is damaged: HDF5 has not read it within {seconds:.0f} s.") from error
        if done.returncode == _REFUSED:
            raise CheckpointError(done.stdout.decode("utf-8", "replace"))
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise CheckpointError(f"{shown} is damaged: HDF5 failed while reading it ({last or done.returncode}).")
        with safe_open(result, "np") as file:
            facts = json.loads(file.metadata()["facts"])
            arrays = {name: file.get_tensor(str(number)) for number, name in enumerate(facts.pop("names"))}
    if "order" in facts:
        facts["order"] = {name: (tuple(numbers), leaf) for name, (numbers, leaf) in facts["order"].items()}
    return arrays, facts


# -- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Reads the file that the command line names, and writes its weights."""
    path, shown, result, seconds = sys.argv[2:]
    used = psutil.Process().memory_info().vms  # libraries reserve memory for each core
    memory = used + _MEMORY + 3 * _most(Path(path).stat().st_size)
    # If the first process is killed, this one ends by itself.
    for limit, value in ((resource.RLIMIT_CPU, int(float(seconds)) + 1), (resource.RLIMIT_AS, memory)):
        with contextlib.suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(limit, (value, value))
    try:
        arrays, facts = read_here(Path(path), shown)
    except UserError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))
        sys.stdout.flush()
        os._exit(_REFUSED)  # not through HDF5, which would clean up
    facts["names"] = list(arrays)
    numbered = {str(number): array for number, array in enumerate(arrays.values())}
    save_file(numbered, result, {"facts": json.dumps(facts)})
    os._exit(0)


def read_here(path: Path, shown: str) -> Found:
    """Reads the file in this process."""
    with _open(path, shown) as root:
        arrays = _find_arrays(root, shown)
        for prefix in ("model_weights/", ""):
            group = root.get(prefix or "/")
            if group is not None and _texts(group, "layer_names"):
                return _read_old(root, prefix, arrays, shown)
        if any("vars" in path.split("/")[:-1] for path in arrays):
            return _read_new(root, arrays)
        return {path.removesuffix(":0"): _read_array(dataset) for path, dataset in arrays.items()}, {}


def _read_new(root: Any, arrays: dict[str, Any]) -> Found:
    """Keras 3: ``layers/conv2d/vars/0``. Layers are numbered by class; newer files have their names, too."""
    paths: dict[str, str] = {}
    for path in arrays:
        if path.split("/")[0] not in ("optimizer", "_optimizer") and "seed_generator" not in path:
            name = _name_of(root, path)
            paths[path if name in paths else name] = path
    return {name: _read_array(arrays[path]) for name, path in paths.items()}, {"paths": paths}


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


def _read_old(root: Any, prefix: str, arrays: dict[str, Any], shown: str) -> Found:
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
    return named, {"numbered": numbered, "order": order}


@contextlib.contextmanager
def _open(path: Path, shown: str) -> Iterator[Any]:
    """Opens the file for reading. Errors in the block become errors about ``shown``."""
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"{shown} is an HDF5 file; reading it needs h5py: pip install h5py.") from error

    try:
        with h5py.File(path, "r") as opened:
            yield opened
    except UserError:
        raise
    except Exception as error:  # HDF5 has a class for each of its errors, and h5py adds those of Python
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
    if is_too_large(declared, size):
        raise CheckpointError(f"{shown} has {size:,} bytes but claims {declared:,} bytes of arrays; it is not read.")
    return found


def _check_dataset(dataset: Any, path: str, shown: str) -> None:
    if dataset.external or dataset.is_virtual:
        raise CheckpointError(f"{shown}: the numbers of {path} are in another file; they are not read from there.")
    dtype = dataset.dtype
    bfloat16 = dtype.kind == "V" and dtype.itemsize == 2 and _text(dataset.attrs.get("dtype", "")) == "bfloat16"
    if (dtype.kind not in "fiub" or dtype.itemsize > 8) and not bfloat16:
        raise CheckpointError(f"{shown}: {path} has the type {dtype}, which is not numeric.")
    stored = dataset.id.get_storage_size()
    if is_too_large(dataset.nbytes, stored):
        raise CheckpointError(
            f"{shown}: {path} has the shape {dataset.shape}, {dataset.nbytes:,} bytes, of which {stored:,} are stored; "
            "it is not read."
        )


def is_too_large(claimed: int, stored: int) -> bool:
    """Whether an array cannot be weights: they hardly compress, and Keras does not try."""
    return claimed > _most(stored)


def _most(stored: int) -> int:
    return (1 << 20) + 20 * stored


def _read_array(dataset: Any) -> NDArray[Any]:
    """The numbers of a dataset. bfloat16, which HDF5 does not know, becomes float32."""
    if dataset.dtype.kind == "V":
        bits = np.asarray(dataset[()]).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(dataset.shape)
    array = np.asarray(dataset[()])
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _texts(group: Any, name: str) -> list[str]:
    """An attribute that is a list of texts; Keras cuts long ones into ``name0``, ``name1``, …"""
    parts = [name] if name in group.attrs else []
    while not (parts and parts[0] == name) and f"{name}{len(parts)}" in group.attrs:
        parts.append(f"{name}{len(parts)}")
    return [_text(value) for part in parts for value in np.atleast_1d(group.attrs[part])]


def _text(value: Any) -> str:
    """A text that HDF5 gives as bytes or as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
