"""Shared by commands: results as text or JSON, options as keywords, the command that resumes an interrupted run."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from modelyard.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from modelyard.errors import Interrupted

Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of standard output")]


def show(value: Any, text: Iterable[Any], *, as_json: bool, text_too: bool = False) -> None:
    """Prints a result on standard output.

    Args:
        value: the result, for programs.
        text: the result, for people: strings and tables.
        as_json: whether to print ``value``, as one line of JSON, and not ``text``.
        text_too: whether to print ``text`` on standard error then.
    """
    with writing_stdout():
        if text_too or not as_json:
            console = _console(stderr=as_json)
            for item in text:
                console.print(item, soft_wrap=isinstance(item, str))
        if as_json:
            import json

            print(json.dumps(_finite(value)), flush=True)  # noqa: T201


def _console(stderr: bool = False) -> Console:
    from modelyard.system.console import SafeConsole

    console = SafeConsole(stderr=stderr)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has room
    return console


def width() -> int:
    """Returns how many characters a line of standard output has room for."""
    return _console().width


def prose(text: str) -> Text | str:
    """Returns sentences for `show`, wrapped between words in a terminal. Other text is one line that can be copied."""
    from rich.text import Text

    return Text(text) if _console().is_terminal else text


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Turns an error of writing standard output into one for the user, such as a full disk.

    A closed pipe, such as that of ``| head``, ends the command quietly.
    """
    try:
        yield
        if sys.stdout is not None:  # None: it was closed by the shell
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):  # Python flushes it once more at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UserError(f"can't write to standard output: {error.strerror or error}.") from error


def table(
    columns: Sequence[str], rows: Iterable[Iterable[Any]], *, right: Collection[str] = (), **settings: Any
) -> Table:
    """Returns a table for `show`.

    Args:
        columns: the headings.
        rows: the cells of each row; `cell` makes them text, of one line. A ``Text`` may have several.
        right: columns that are aligned to the right.
        **settings: other settings of a rich table, such as its title.
    """
    from rich.table import Column, Table
    from rich.text import Text

    headings = [Column(name, justify="right" if name in right else "left", overflow="fold") for name in columns]
    made = Table(*headings, title_justify="left", **settings)
    cells = [[value if isinstance(value, Text) else cell(value) for value in row] for row in rows]
    for row in cells:
        made.add_row(*row)
    for column, size in zip(made.columns, _widths([columns, *cells], width()) or [], strict=False):
        column.width = size
    return made


def _widths(rows: Sequence[Sequence[Any]], room: int) -> list[int] | None:
    """Returns the widths of columns that wrap between words, where rich would break words; None if all have room.

    Words of more than 20 characters, such as paths, may be broken; of fewer only if there is no room.
    """
    from rich.cells import cell_len

    columns = [[str(value) for value in column] for column in itertools.zip_longest(*rows, fillvalue="")]
    room -= 3 * len(columns) + 1  # lines and spaces
    sizes = [max(cell_len(line) for text in column for line in text.split("\n")) for column in columns]
    words = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in columns]
    longest = next((most for most in range(20, 0, -1) if sum(min(word, most) for word in words) <= room), None)
    if sum(sizes) <= room or longest is None:
        return None
    while sum(sizes) > room:
        spare = [(size, number) for number, size in enumerate(sizes) if size > min(words[number], longest)]
        sizes[max(spare)[1]] -= 1
    return sizes


def text_of(lines: Sequence[str]) -> Text:
    """Returns a cell of several lines for `table`."""
    from rich.text import Text

    return Text("\n".join(map(cell, lines)))


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value: Any) -> str:
    """Returns a value as text for a table."""
    from modelyard.system.console import visible

    if isinstance(value, dict):
        return "  ".join(f"{name} {cell(item)}" for name, item in value.items())
    if value is None:
        return "–"
    if not isinstance(value, float):
        return visible(str(value)).replace("\n", "\\n")
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"  # a learning rate of 1e-5 is not 0.0000


def _user_script() -> str | None:
    """Returns the user's script that called `main`, with their models and datasets; None for Modelyard itself."""
    return None if Path(sys.argv[0]).stem in ("modelyard", "yard", "__main__") else sys.argv[0]


def program() -> str:
    """Returns how the user calls the command line: ``modelyard``, or their own script."""
    script = _user_script()
    return "modelyard" if script is None else f"python {shlex.quote(script)}"


def program_of_processes() -> list[str] | None:
    """Returns the program for processes of this command: the user's script, or None for Modelyard itself."""
    script = _user_script()
    return None if script is None else [sys.executable, script]


def exit_interrupted(interrupt: Interrupted, stopped: str, again: str) -> NoReturn:
    """Reports what was saved and how to resume it, and exits with the status of the signal."""
    from modelyard.system.console import console

    with contextlib.suppress(OSError):  # the terminal may have been closed
        console().print(f"stopped{stopped}.", "Resume with:", style="bold")
        console().print(f"  {again}", soft_wrap=True)
    sys.exit(128 + interrupt.signal)


def keywords(options: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the options of the config as keywords of a function of Python that a command calls.

    The function's other arguments are no options of the command line: like a word that is no option, they are reported
    with the mistakes in the config. Only ``trust`` may be both.
    """
    from modelyard.config.schema import TRUST

    others = {*inspect.signature(function).parameters} - {TRUST}
    return {f"'--{name}'" if name in others else name: value for name, value in options.items()}
