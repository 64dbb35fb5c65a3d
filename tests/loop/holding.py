"""A plugin for tests: holds training at a step until the process is killed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import modelyard


@modelyard.register_hook("hold")
class Hold(modelyard.Hook):
    """Waits for ever at the step in HOLD_AT, after it has said so in a file."""

    order = 80  # after the trackers, before anything is saved

    def on_boundary(self, loop: Any) -> None:
        """Waits."""
        if loop.step == int(os.environ.get("HOLD_AT", "-1")):
            Path(os.environ["HELD"]).touch()
            threading.Event().wait()
