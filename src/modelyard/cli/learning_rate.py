"""The command find-learning-rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from modelyard.cli.commands import print_json, stdout
from modelyard.config.schema import Config
from modelyard.system.console import show_log

_ROWS = 12


def find(config: Config, settings: dict[str, Any], *, as_json: bool) -> None:
    """Tries learning rates, shows some of them and what to take."""
    from modelyard.loop.learning_rate_finder import PLOT, TABLE, find_learning_rate

    show_log()
    found = find_learning_rate(config, **settings)
    if as_json:
        print_json(found.as_json())
        return
    table = Table("step", "learning rate", "loss", "smoothed")
    count = len(found.losses)
    for step in sorted({round(i * (count - 1) / (_ROWS - 1)) for i in range(_ROWS)}):
        values = (found.learning_rates[step], found.losses[step], found.smoothed[step])
        table.add_row(str(step), *(f"{value:.3g}" for value in values))
    screen = stdout()
    screen.print(table)
    for name, rate in (
        ("the loss falls fastest at", found.steepest),
        ("the loss diverges at", found.diverged),
        ("a tenth of that is", found.tenth),
    ):
        screen.print(f"{name:<26} {'–' if rate is None else f'{rate:.2g}'}")
    if found.suggestion is None:
        screen.print(
            "no suggestion: the loss neither fell, beyond noise, nor diverged. Try a higher --highest or more --steps."
        )
    else:
        which = "where the loss falls fastest" if found.suggestion == found.steepest else "a tenth of where it diverges"
        screen.print(f"suggestion: --learning_rate {found.suggestion:.2g} ({which})")
    screen.print(f"{Path(found.folder) / TABLE}, {PLOT}", soft_wrap=True)
