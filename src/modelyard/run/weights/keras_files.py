"""Weights in files of Keras: ``.weights.h5``, ``.h5`` with weights or a whole model, and ``.keras``.

The files are not trusted. Of a ``.keras`` file, which is a zip archive, only the HDF5 file in it is read, never its
config, which may name code.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from modelyard.errors import CheckpointError
from modelyard.run.weights.hdf5 import is_too_large, read_hdf5
from modelyard.run.weights.match import NamedWeights
from modelyard.system.untrusted import check_archive, open_regular

_WEIGHTS = "model.weights.h5"


def read_h5(path: Path) -> NamedWeights:
    """The weights of a ``.weights.h5`` or ``.h5`` file."""
    weights, facts = read_hdf5(path)
    return NamedWeights(weights, **facts)


def read_keras(path: Path) -> NamedWeights:
    """The weights in a ``.keras`` file."""
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / _WEIGHTS
        try:
            _extract(path, inner)
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
            raise CheckpointError(f"{path} is damaged or no .keras file: {error}.") from error
        weights, facts = read_hdf5(inner, str(path))
        return NamedWeights(weights, **facts)


def _extract(path: Path, inner: Path) -> None:
    """Writes the HDF5 file in a ``.keras`` file to ``inner``."""
    with open_regular(path, CheckpointError) as file, zipfile.ZipFile(file) as archive:
        if _WEIGHTS not in archive.namelist():
            raise CheckpointError(f"{path} has no {_WEIGHTS} in it, so it is no .keras file with weights.")
        info = archive.getinfo(_WEIGHTS)
        if is_too_large(info.file_size, info.compress_size):
            raise CheckpointError(
                f"{path}: {_WEIGHTS} claims {info.file_size:,} bytes, of which {info.compress_size:,} are stored; "
                "it is not read."
            )
        check_archive(path, archive, CheckpointError)
        with archive.open(info) as packed, open(inner, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
