"""What people see while something takes long."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.text import Text

from modelyard.system import console
from modelyard.system.console import bar, show_log


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_without_a_total_appears_with_the_first_update(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=terminal, width=80))
    with bar("idle"):
        pass
    assert out.getvalue() == ""
    with bar("indexing") as progress:
        progress(3, 10)
        progress(10, 10)
    assert ("indexing" in out.getvalue(), "10/10" in out.getvalue()) == (terminal, terminal)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_looks_like_one_and_stays_as_it_was_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, terminal: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(console, "console", lambda: Console(file=out, force_terminal=terminal, width=80))
    monkeypatch.setattr("sys.stderr", out)
    log = logging.getLogger("modelyard")
    for name, value in (("handlers", []), ("propagate", True), ("level", logging.DEBUG)):
        monkeypatch.setattr(log, name, value)
    show_log()
    log.addHandler(caplog.handler)
    log.info("loaded %d of 8 weights", 8)
    log.warning("loaded %d of 8 weights", 2)
    log.error("gone")
    plain = [Text.from_ansi(line).plain.split(maxsplit=1)[1].strip() for line in out.getvalue().splitlines()]
    assert plain == ["loaded 8 of 8 weights", "warning: loaded 2 of 8 weights", "error: gone"]
    assert [record.message for record in caplog.records] == ["loaded 8 of 8 weights", "loaded 2 of 8 weights", "gone"]
