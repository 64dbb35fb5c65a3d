"""What people see while something takes long."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console
from rich.text import Text

from modelyard.cli import output
from modelyard.system import console
from modelyard.system.console import SafeConsole, bar, live_table, show_log, visible


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


HOSTILE = "\x1b]0;owned\x07\x1b[2J[/] [bold] :smile: \x9b31m\r\x7f\u202egnp.exe"


@pytest.mark.parametrize("terminal", [True, False])
def test_text_of_others_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    out = io.StringIO()
    made = SafeConsole(file=out, force_terminal=terminal, width=300, color_system=None)
    monkeypatch.setattr(console, "console", lambda: made)
    monkeypatch.setattr("sys.stderr", out)
    log = logging.getLogger("modelyard")
    for name, value in (("handlers", []), ("propagate", True), ("level", logging.DEBUG)):
        monkeypatch.setattr(log, name, value)
    show_log()
    log.warning("the run %s", HOSTILE)
    with bar(HOSTILE, 10, note=HOSTILE) as progress:
        progress(3, note=HOSTILE)
    with live_table() as live:
        if live is not None:
            live(output.table((HOSTILE,), [[HOSTILE]], title=HOSTILE))
    made.print(HOSTILE)
    made.print(output.table((HOSTILE,), [[HOSTILE]], title=HOSTILE))
    shown = out.getvalue()
    assert "\\x1b[2J[/] [bold] :smile: \\x9b31m\\r\\x7f\\u202egnp.exe" in shown
    ours = re.sub(r"\x1b\[(\?7[lh]|[0-9]*[AJK])|\r", "", shown)  # of the display itself
    assert [letter for letter in ours if visible(letter) != letter] == []
    assert "\r" not in shown.replace("\r\x1b[J", "").replace("\r\x1b[?7h", "")


def test_a_cell_is_one_line() -> None:
    assert output.cell("a\nerror: b") == "a\\nerror: b"
