"""Named arrays as safetensors, the format of checkpoints and of weights from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from modelyard.errors import CheckpointError

Arrays = dict[str, NDArray[Any]]
_TYPES = {
    "BOOL": "?", "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def pack_tensors(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns the content of a safetensors file."""
    # The format has no zero-dimensional big-endian or strided arrays; plain contiguous ones always work.
    data: bytes = save({name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()})
    return data


def unpack_tensors(data: bytes, shown: str) -> Arrays:
    """Returns the arrays in a safetensors file. bfloat16, which NumPy does not have, becomes float32.

    Args:
        data: the content of the file.
        shown: its name in errors.

    Raises:
        CheckpointError: if it is damaged, or has tensors of another type.
    """
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
        return {name: _array(name, tensor, shown) for name, tensor in tensors}
    except (SafetensorError, ValueError, OverflowError) as error:  # ValueError: more dimensions than NumPy has
        raise CheckpointError(f"{shown} is damaged or no safetensors file: {error}.") from error


def _array(name: str, tensor: Mapping[str, Any], shown: str) -> NDArray[Any]:
    given = tensor["dtype"]
    if given == "BF16":  # the upper half of a float32
        bits = np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor["shape"])
    if given not in _TYPES:
        raise CheckpointError(
            f"{shown}: {name} has the type {given}, which is not supported. Supported: BF16, {', '.join(_TYPES)}. "
            "Convert the file to F32 or BF16."
        )
    return np.frombuffer(tensor["data"], _TYPES[given]).reshape(tensor["shape"])
