"""Waiting for a condition. Ends are generous: a machine may be busy, and a test that passes never waits for them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds after which something that a test waits for will not happen any more."""


def wait_until(
    condition: Callable[[], Any], what: str = "the condition", process: subprocess.Popen[Any] | None = None
) -> Any:
    """Waits for ``condition`` to be true and returns its value. ``process`` must not end before."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:g} s"
        if process is not None and process.poll() is not None:
            assert condition(), f"{what} did not come before the process ended: {process.communicate()}"
        time.sleep(0.005)
    return value
