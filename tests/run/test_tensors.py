"""Safetensors files, from Modelyard and from elsewhere: what is read, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from modelyard.errors import CheckpointError
from modelyard.run.tensors import pack_tensors, unpack_tensors
from modelyard.run.weights.read import load_weights


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: str, shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_bfloat16_is_read_as_float32_exactly(tmp_path: Path) -> None:
    """Every value that bfloat16 has, infinity and NaN included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    path = tmp_path / "w.safetensors"
    path.write_bytes(file_of({"w": tensor("BF16", [256, 256], 0, 2 << 16)}, bits.tobytes()))
    found = load_weights(path)["w"]
    assert (found.dtype, found.shape) == (np.float32, (256, 256))
    np.testing.assert_array_equal(found.ravel(), bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_what_a_model_in_bfloat16_saves_is_read_back() -> None:
    given = np.array([[1.5, -2.0, 3e38]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(unpack_tensors(pack_tensors({"w": given}), "x")["w"], given.astype(np.float32))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_other_types_are_named(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(file_of({"a/w": tensor(dtype, [4], 0, 4)}, bytes(4)))
    with pytest.raises(CheckpointError, match=rf"w\.safetensors: a/w has the type {dtype}, .* Supported: BF16, BOOL"):
        load_weights(path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", bytes(8), file_of(b""), file_of(b"{"), file_of(b"[]"), file_of(b"null"), file_of(b"\xff\xfe"),
        file_of({}, b"more"), file_of({}, length=2**63), file_of({}, length=2**64 - 1), file_of({}, length=100),
        file_of({"a": 5}), file_of({"a": {}}), file_of({"a": tensor("X9", [1], 0, 4)}, bytes(4)),
        file_of({"a": tensor("F32", [1], 0, 8)}, bytes(8)), file_of({"a": tensor("F32", [2], 0, 4)}, bytes(4)),
        file_of({"a": tensor("F32", [-1], 0, 4)}, bytes(4)), file_of({"a": tensor("F32", [1.5], 0, 4)}, bytes(4)),
        file_of({"a": tensor("F32", ["1"], 0, 4)}, bytes(4)), file_of({"a": tensor("F32", 1, 0, 4)}, bytes(4)),
        file_of({"a": tensor("F32", [2**62, 4], 0, 0)}), file_of({"a": tensor("F32", [2**32, 2**32], 0, 0)}),
        file_of({"a": tensor("F32", [1], 4, 0)}, bytes(4)), file_of({"a": tensor("F32", [1], 4, 8)}, bytes(8)),
        file_of({"a": tensor("F32", [1], 0, 2**40)}, bytes(4)), file_of({"a": tensor("F32", [1], -4, 0)}, bytes(4)),
        file_of({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, bytes(4)),
        file_of({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 4, 8)}, bytes(8)),
        file_of({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, bytes(12)),
        file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],'
                b'"data_offsets":[0,4]}}', bytes(8)),
        file_of(b'{"a":' * 20_000), file_of({"__metadata__": {"a": {"b": 1}}}),
        file_of({"a": tensor("F32", [1] * 2000, 0, 4)}, bytes(4)), file_of({"a": tensor("F4", [3], 0, 1)}, bytes(1)),
    ],
)  # fmt: skip
def test_a_header_that_is_wrong_is_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.safetensors(:| is damaged)"):
        load_weights(path)


def test_what_can_not_be_opened_is_explained(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("loop", "folder", "none"):
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors (does not exist|is not a run folder)"):
            load_weights(tmp_path / f"{name}.safetensors")
