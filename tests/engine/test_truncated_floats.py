"""Floats that the network's input would truncate are reported once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelyard.engine.batch_functions import warn_of_truncated_floats


@pytest.mark.parametrize(
    ("given", "taken", "reported"), [("float32", "uint8", 1), ("uint8", "uint8", 0), ("float32", "float32", 0)]
)
def test_floats_for_an_input_of_bytes_are_told_once(
    two_devices: None, caplog: pytest.LogCaptureFixture, given: str, taken: str, reported: int
) -> None:
    from keras import ops

    task: Any = SimpleNamespace()
    model = SimpleNamespace(inputs=[SimpleNamespace(name="image", dtype=taken)])
    batch = {"image": ops.convert_to_tensor(np.zeros((1, 2), given))}
    for _ in range(2):
        warn_of_truncated_floats(task, model, batch)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * reported
