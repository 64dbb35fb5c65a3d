"""What people see while something takes long."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from modelyard.run import console
from modelyard.run.console import late_bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_late_bar_is_seen_when_there_is_something_to_tell(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=terminal, width=80))
    with late_bar("idle"):
        pass
    assert out.getvalue() == ""
    with late_bar("indexing") as progress:
        progress(3, 10)
        progress(10, 10)
    assert ("indexing" in out.getvalue(), "10/10" in out.getvalue()) == (terminal, terminal)
