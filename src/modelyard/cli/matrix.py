"""What the commands for many runs do: call the library and print."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from modelyard.cli.commands import print_json, program, stdout
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import Interrupted
from modelyard.system.console import console, show_log


def matrix(file: str | None, settings: dict[str, Any], options: dict[str, Any], *, as_json: bool) -> None:
    """Runs a matrix; the status is 1 if a cell failed."""
    from modelyard.comparison.matrix import matrix as run_matrix
    from modelyard.comparison.matrix_folder import MatrixFolder

    show_log()
    runner = None if program() == "modelyard" else [sys.executable, str(Path(sys.argv[0]))]
    try:
        result = run_matrix(file, **settings, **options, program=runner, source=COMMAND_LINE)
    except Interrupted as interrupt:
        again = shlex.join(["matrix", "--output", str(settings["output"]), "--jobs", str(settings["jobs"])])
        count = f"{interrupt.step} of {len(MatrixFolder(settings['output']).cell_axes())} cells done"
        with contextlib.suppress(OSError):  # the terminal may have been closed
            console().print(f"[bold]stopped with {count}; those under way are saved.[/] Go on with:")
            console().print(f"  {program()} {again}", soft_wrap=True, markup=False)
        sys.exit(128 + interrupt.signal)
    out = console() if as_json else stdout()
    if result.leaderboard is not None:
        _show(result.leaderboard, out)
        _say_written(Path(result.output), [], out)
    for cell in result.failed:
        out.print(f"{cell.name} failed: {cell.reason}\n  log: {cell.log}", soft_wrap=True, markup=False)
    if as_json:
        print_json(asdict(result))
    if result.failed:
        again = f"{program()} matrix --output {shlex.quote(result.output)}"
        console().print(
            f"{len(result.failed)} of {len(result.cells)} cells failed; tried again by: {again}",
            soft_wrap=True,
            markup=False,
        )
        sys.exit(1)


def leaderboard(folder: str, metric: str | None, split: str | None, output: str | None, *, as_json: bool) -> None:
    """Makes a leaderboard and shows it."""
    from modelyard.comparison.leaderboard import leaderboard as make
    from modelyard.comparison.pages import page_files

    place = Path(output or folder).expanduser()
    replaced = [path for path in page_files(place) if path.exists()]
    board = make(folder, metric=metric, split=split, output=output)
    out = console() if as_json else stdout()
    _show(board, out)
    _say_written(place, replaced, out)
    if as_json:
        print_json(asdict(board))


def _show(board: Any, out: Any) -> None:
    from modelyard.comparison.pages import LEGEND, heading, table_rows

    (first, *names), *rows = table_rows(board)
    columns = [Column(first, overflow="fold"), *(Column(Text(name), justify="right") for name in names)]
    table = Table(*columns, title=Text(heading(board)), title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)
    out.print(LEGEND, markup=False)
    for note in board.notes:
        out.print(f"note: {note}", soft_wrap=True, markup=False)
    for run in board.unfinished:
        more = f" – {run.reason}" if run.reason else ""
        out.print(f"not counted: {run.name}: {run.status}{more}", soft_wrap=True, markup=False)


def _say_written(folder: Path, replaced: list[Path], out: Any) -> None:
    from modelyard.comparison.pages import page_files

    text = f"written: {', '.join(str(path) for path in page_files(folder))}"
    if replaced:
        names = ", ".join(path.name for path in replaced)
        text += f"\n  in place of the earlier {names}; --output FOLDER writes elsewhere and keeps them"
    out.print(text, soft_wrap=True, markup=False)
