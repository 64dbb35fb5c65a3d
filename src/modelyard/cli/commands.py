"""What the commands do: call the library and print."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from modelyard.cluster.description import CHIEF, EVALUATOR
from modelyard.cluster.environment import find_cluster
from modelyard.config.calls import parse_list
from modelyard.config.plugins import load_installed_plugins, load_plugins
from modelyard.config.resolve import COMMAND_LINE
from modelyard.config.schema import CORE_FIELDS, GROUPS, Config
from modelyard.config.yaml_file import inline
from modelyard.errors import DataError, Interrupted, unknown
from modelyard.registry import DATASETS, HOOKS, MODELS, Registry
from modelyard.system.console import console, show_log


def train(config: Config, *, evaluates: bool, as_json: bool) -> None:
    """Trains, shows the results."""
    show_log()
    _train(config, evaluates, as_json)


def resume(model_dir: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Goes on with a run."""
    from modelyard.loop.existing_run import resume_config

    show_log()
    _train(*resume_config(model_dir, options, COMMAND_LINE), as_json)


def _train(config: Config, evaluates: bool, as_json: bool) -> None:
    from modelyard import api

    try:
        result = _interruptible(lambda: api.run(config, evaluates))
    except api.ExportFailedError as error:
        _show_result(error.result, as_json)  # the run itself is complete
        raise
    _show_result(result, as_json)


def evaluate(model_dir: str, checkpoint: str | None, split: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Evaluates a checkpoint."""
    from modelyard import api
    from modelyard.data.dataset import SPLITS

    if split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    show_log()
    result = api.evaluate(model_dir, checkpoint=checkpoint, split=split, source=COMMAND_LINE, **options)
    _show_result(result, as_json)


def _interruptible(run: Any) -> Any:
    """Says how to go on when a run is interrupted."""
    try:
        return run()
    except Interrupted as interrupt:
        console().print(f"[bold]stopped at step {interrupt.step}.[/] Go on with:")
        if find_cluster().is_alone:
            console().print(f"  {program()} resume {shlex.quote(interrupt.model_dir)}", soft_wrap=True)
        else:
            console().print("  the same command for every process of the cluster", soft_wrap=True)
        sys.exit(128 + interrupt.signal)


def program() -> str:
    """How the user called this: ``modelyard``, or a script of their own that knows their parts."""
    script = Path(sys.argv[0])
    ours = script.stem in ("modelyard", "yard", "__main__")
    return "modelyard" if ours else f"python {shlex.quote(sys.argv[0])}"


def _show_result(result: Any, as_json: bool) -> None:
    if result.role not in (CHIEF, EVALUATOR):  # the chief shows it
        return
    table = Table(title=f"{result.split}, model of step {result.model_step}", title_justify="left", show_header=False)
    for name, value in result.metrics.items():
        table.add_row(name, _cell(float(value)))
    if result.best:
        table.add_row(f"best validation {result.best['metric']}", _cell(float(result.best["value"])))
        table.add_row("best at step", str(result.best["step"]))
    if result.seconds:
        table.add_row("seconds", f"{result.seconds:.1f}")
    out = console() if as_json else stdout()
    out.print(table)
    out.print(f"run folder: {result.model_dir}", soft_wrap=True)
    for path in result.exports:
        out.print(f"exported: {path}", soft_wrap=True)
    if as_json:
        print_json(result.as_json())


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(_finite(value)), flush=True)  # noqa: T201 - the one thing that goes to standard output


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_config(config: Config, *, as_json: bool) -> None:
    """Prints every option, its value and its origin."""
    values = config.flat()
    if as_json:
        print_json({key: {"value": value, "origin": config.origin(key)} for key, value in values.items()})
        return
    groups = [(group.title, list(group.model_fields)) for group in GROUPS]
    groups.append(("Options of the chosen parts", [key for key in values if key not in CORE_FIELDS]))
    lines = []
    width = max(len(key) + len(inline(value)) for key, value in values.items())
    for title, keys in groups:
        lines.append(f"# {title}")
        for key in keys:
            text = f"{key}: {inline(values[key])}"
            lines.append(f"{text:<{min(width, 60) + 2}}  # {config.origin(key)}")
        lines.append("")
    print("\n".join(lines).rstrip())  # noqa: T201
    for note in config.notes:
        console().print(f"note: {note}", soft_wrap=True)


_REGISTRIES: dict[str, Registry] = {"model": MODELS, "dataset": DATASETS, "hook": HOOKS}


def list_parts(kind: str, plugins: str | None, *, as_json: bool) -> None:
    """Lists models, datasets or hooks with their options."""
    if plugins:
        from modelyard.config.backend import select_engine

        select_engine("auto")
    load_installed_plugins()
    load_plugins(tuple(parse_list(plugins)))
    entries = _REGISTRIES[kind].entries()
    if as_json:
        print_json(
            [
                {
                    "name": e.name,
                    "summary": e.summary,
                    "options": {k: default_of(f) for k, f in e.options.model_fields.items()},
                }
                for e in entries
            ]
        )
        return
    table = Table(kind, "what it is", "options and defaults", show_lines=True)
    for entry in entries:
        listed = "\n".join(f"{key} = {default_of(info)}" for key, info in entry.options.model_fields.items())
        table.add_row(entry.name, entry.summary, listed)
    stdout().print(table)


def default_of(info: Any) -> Any:
    """What an option has if nobody sets it."""
    if info.is_required():
        return "(needed)"
    return list(info.default) if isinstance(info.default, tuple) else info.default


def stdout() -> Any:
    """The console of standard output."""
    from rich.console import Console

    # Without markup: names of classes and files are shown as they are, brackets and all.
    terminal = Console(highlight=False, markup=False)
    if terminal.is_terminal:
        return terminal
    return Console(highlight=False, markup=False, width=200)  # a file or a pipe has room


def runs(folders: list[str], runs_dir: str, *, as_json: bool) -> None:
    """Lists or compares runs."""
    from modelyard.run.directory import find_runs, open_run_folder
    from modelyard.run.summary import compare, summarize

    if not folders:
        found = [summarize(run) for run in find_runs(runs_dir)]
        if as_json:
            print_json(found)
            return
        if not found:
            console().print(f"no runs in {runs_dir}. Start one: modelyard train-and-evaluate")
            return
        columns = ("run", "model", "dataset", "step", "status", "best", "test")
        table = Table(Column("run", overflow="fold", min_width=20), *columns[1:])
        for row in found:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        stdout().print(table)
        return
    compared = compare([open_run_folder(folder) for folder in folders])
    if as_json:
        print_json(compared)
        return
    names = [row["run"] for row in compared["runs"]]
    table = Table("", *names, title="results", title_justify="left")
    for key in ("model", "dataset", "step", "status", "best", "validation", "test", "seconds"):
        table.add_row(key, *(_cell(row.get(key)) for row in compared["runs"]))
    stdout().print(table)
    table = Table("option", *names, title="options that differ", title_justify="left")
    for key, values in compared["options"].items():
        table.add_row(key, *(inline(value) for value in values))
    stdout().print(table if compared["options"] else "all options are the same")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_cell(item)}" for name, item in value.items())
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"  # a learning rate of 1e-5 is not 0.0000
