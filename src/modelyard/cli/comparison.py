"""Commands for many runs: matrix, tune, leaderboard, runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.cli.output import (
    Json,
    exit_interrupted,
    keywords,
    program,
    program_of_processes,
    prose,
    show,
    table,
    width,
)
from modelyard.errors import COMMAND_LINE, Interrupted

if TYPE_CHECKING:
    from modelyard.comparison.leaderboard import Leaderboard

_SHOWN_TRIALS = 10
_WITH_COSTS = 100
"""The columns of a terminal that has room for the costs of models beside their scores."""


def matrix(
    options: dict[str, Any],
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.yaml", help="YAML file with axes, exclude and options")
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="folder of the matrix; if it exists, the matrix is resumed")
    ] = "",
    models: Annotated[str | None, typer.Option(metavar="LIST", help="models, separated by commas")] = None,
    datasets: Annotated[str | None, typer.Option(metavar="LIST", help="datasets, by name or path")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBER", help="number of seeds, or a list: 0,7,11")] = None,
    jobs: Annotated[int, typer.Option(help="runs in parallel, each with its part of the cores and GPUs")] = 1,
    json: Json = False,
) -> None:
    """Train every combination of models, datasets and seeds, and compare them.

    If interrupted, run the same command again to resume.
    """
    from modelyard.comparison.matrix import matrix as run_matrix
    from modelyard.comparison.matrix_folder import MatrixFolder
    from modelyard.system.console import console

    again = f"{program()} matrix --output {shlex.quote(output)}"
    try:
        result = run_matrix(
            file, output=output, models=models, datasets=datasets, seeds=seeds, jobs=jobs,
            program=program_of_processes(), source=COMMAND_LINE, **keywords(options, run_matrix),
        )  # fmt: skip
    except Interrupted as interrupt:
        count = f"{interrupt.step} of {len(MatrixFolder(output).cell_axes())} cells done"
        exit_interrupted(interrupt, f" with {count}; started cells are saved", f"{again} --jobs {jobs}")
    text = [] if result.leaderboard is None else [*_tables(result.leaderboard), _written(str(result.output))]
    text += [f"{cell.name} failed: {cell.reason}\n  log: {cell.log}" for cell in result.failed]
    show(asdict(result), text, as_json=json, text_too=True)
    if result.failed:
        message = f"{len(result.failed)} of {len(result.cells)} cells failed. Try them again: {again}"
        console().print(message, soft_wrap=True)
        sys.exit(1)


def tune(
    options: dict[str, Any],
    space: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE.yaml",
            help="options that vary: 'learning_rate=log(1e-4, 1), model=[mlp, simple_cnn], "
            "dropout=uniform(0, .5) if model=simple_cnn'",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="folder of the search; if it exists, the search is resumed")
    ] = "",
    trials: Annotated[int, typer.Option(help="number of trials, those of before included")] = 20,
    metric: Annotated[
        str | None, typer.Option(help="validation metric to compare by (default: accuracy, else the loss)")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="sampler of Optuna: tpe (default), random, cmaes, gp, qmc …")
    ] = None,
    search_seed: Annotated[int | None, typer.Option("--search_seed", help="seed of the proposals (default: 0)")] = None,
    top: Annotated[int, typer.Option(help="best trials to train again with new seeds at the end")] = 3,
    seeds: Annotated[int, typer.Option(help="new seeds for those; 0: don't train them again")] = 3,
    jobs: Annotated[int, typer.Option(help="trials in parallel, each with its part of the cores and GPUs")] = 1,
    json: Json = False,
) -> None:
    """Search for good options with Optuna; compare the best trials with new seeds, and test the best one.

    Every trial is an ordinary run. If interrupted, run the same command again to resume; give more --trials or another
    --space to extend a search.
    """
    from modelyard.system.console import console
    from modelyard.tuning.search import tune as run_search

    again = f"{program()} tune --output {shlex.quote(output)} --trials {trials} --top {top} --seeds {seeds}"
    try:
        result = run_search(
            space, output=output, trials=trials, metric=metric, sampler=sampler, search_seed=search_seed, top=top,
            seeds=seeds, jobs=jobs, program=program_of_processes(), source=COMMAND_LINE,
            **keywords(options, run_search),
        )  # fmt: skip
    except Interrupted as interrupt:
        exit_interrupted(
            interrupt, f" with {interrupt.step} runs done; started ones are saved", f"{again} --jobs {jobs}"
        )
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.values))
    shown = [
        [
            trial.number,
            trial.state if trial.score is None else f"{trial.score:.4g}",
            *(
                f"{value:.4g}" if isinstance(value := trial.values.get(name), float) else _inline(value)
                for name in names
            ),
        ]
        for trial in result.trials[:_SHOWN_TRIALS]
    ]
    columns = ["trial", result.metric, *names]
    text: list[Any] = [table(columns, shown, right=columns[:2], title=f"{len(result.trials)} trials, the best first")]
    if len(result.trials) > _SHOWN_TRIALS:
        text.append(f"and {len(result.trials) - _SHOWN_TRIALS} more, in {result.output}")
    if result.final is not None:
        text += ["", *_tables(result.final)]
    if result.test:
        values = ", ".join(f"{name}: {score:.4g}" for name, score in result.test.items())
        text.append(f"test {result.metric} of the best: {values}")
    if result.best is not None:
        text.append(
            prose(f"options of the best: {result.best} (modelyard train-and-evaluate --config_file {result.best})")
        )
    failed = [trial for trial in result.trials if trial.reason]
    text += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_SHOWN_TRIALS]]
    show(asdict(result), text, as_json=json, text_too=True)
    if result.best is None:
        console().print("no trial is done.")
        sys.exit(1)


def _inline(value: Any) -> str:
    from modelyard.config.yaml_file import inline

    return "" if value is None else inline(value)


def leaderboard(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="folder with runs, at any depth")],
    metric: Annotated[str | None, typer.Option(help="metric to compare (default: accuracy if there is)")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="test|validation", help="split to compare (default: test if all have it; folds: validation)"
        ),
    ] = None,
    output: Annotated[str | None, typer.Option(metavar="FOLDER", help="folder to write to (default: FOLDER)")] = None,
    json: Json = False,
) -> None:
    """Rank models over datasets and seeds, with mean, spread and costs.

    The table is written as leaderboard.csv, leaderboard.md and leaderboard.html. The folder of a search gets its page,
    search.html, too.
    """
    from modelyard.comparison.leaderboard import leaderboard as make_leaderboard
    from modelyard.comparison.pages import PAGES
    from modelyard.storage import exists, inside, is_remote

    target = output or folder
    target = target if is_remote(target) else str(Path(target).expanduser())
    pages = [inside(target, name) for name in PAGES]
    replaced = [path for path in pages if exists(path if is_remote(path) else Path(path))]
    written = _search_page(folder, output)
    board = make_leaderboard(folder, metric=metric, split=split, output=output)
    show(asdict(board), [*_tables(board), _written(target, replaced), *written], as_json=json, text_too=True)


def _search_page(folder: str, output: str | None) -> list[str]:
    """Writes the page of a search anew, if the folder is that of one; returns what to tell of it."""
    from modelyard.comparison.matrix import SEARCH
    from modelyard.storage import is_remote

    if is_remote(folder) or is_remote(output or "") or not (Path(folder).expanduser() / SEARCH).is_file():
        return []
    from modelyard.tuning.search import write_search_page

    return [f"written: {write_search_page(Path(folder).expanduser(), output)}"]


def _tables(board: Leaderboard) -> list[Any]:
    from modelyard.comparison.pages import COSTS, PAGES, heading, remarks, table_rows

    columns, *rows = table_rows(board)
    costs = []
    if width() < _WITH_COSTS:
        columns, *rows = (row[: -len(COSTS)] for row in (columns, *rows))
        costs = [prose(f"{', '.join(COSTS.values())} are in {PAGES[1]}.")]
    ranking = table(columns, rows, right=columns[1:], title=heading(board))
    return [ranking, *costs, *map(prose, remarks(board))]


def _written(folder: str, replaced: Sequence[str] = ()) -> str:
    from modelyard.comparison.pages import PAGES
    from modelyard.storage import inside

    text = f"written: {', '.join(inside(folder, name) for name in PAGES)}"
    if replaced:
        names = ", ".join(path.rpartition("/")[2] for path in replaced)
        text += f"\n  in place of the earlier {names}; --output FOLDER writes elsewhere and keeps them"
    return text


def runs(
    folders: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="folders of runs to compare")] = None,
    model_dir: Annotated[str | None, typer.Option("--model_dir", metavar="RUN", help="one run, instead of RUN")] = None,
    runs_dir: Annotated[str, typer.Option("--runs_dir", help="folder of the runs to list")] = "runs",
    json: Json = False,
) -> None:
    """List all runs, or compare the results and options of some."""
    from modelyard.config.yaml_file import inline
    from modelyard.run.directory import find_runs, open_run_folder
    from modelyard.run.summary import compare, summarize
    from modelyard.system.console import console

    chosen = [*(folders or ()), *([] if model_dir is None or model_dir in (folders or ()) else [model_dir])]
    if not chosen:
        found = [summarize(run) for run in find_runs(runs_dir)]
        columns = ("run", "model", "dataset", "step", "status", "best", "test")
        listed = table(columns, [[_in_list(row, column) for column in columns] for row in found])
        show(found, [listed] if found else [], as_json=json)
        if not found and not json:
            console().print(f"no runs in {runs_dir}. Start one: modelyard train-and-evaluate")
        return
    compared = compare([open_run_folder(folder, runs_dir=runs_dir) for folder in chosen])
    names = [row["run"] for row in compared["runs"]]
    keys = ("model", "dataset", "step", "status", "best", "validation", "test", "seconds")
    results = table(("", *names), [(key, *(row.get(key) for row in compared["runs"])) for key in keys], title="results")
    options = [(key, *map(inline, values)) for key, values in compared["options"].items()]
    different = table(("option", *names), options, title="options that differ")
    show(compared, [results, different if options else "all options are the same"], as_json=json)


def _in_list(row: Mapping[str, Any], column: str) -> Any:
    """Returns a value for the list of runs: of a path the name, of the test metrics the one of the best model."""
    value, best = row.get(column), row.get("best") or {}
    if column == "dataset" and value:
        return Path(value).name or value
    return {name: value[name] for name in best} if column == "test" and value and set(best) <= set(value) else value
