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
from modelyard.errors import COMMAND_LINE, Interrupted, UserError, counted

if TYPE_CHECKING:
    from modelyard.comparison.leaderboard import Leaderboard
    from modelyard.tuning.trials import TuneResult

_SHOWN_TRIALS = 10
_WITH_COSTS = 100
"""The columns of a terminal that has room for the costs of models beside their scores."""


On = Annotated[str, typer.Option("--on", metavar="local|ray", help="where the runs are trained")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray_address", metavar="HOST:PORT", help="address of the Ray cluster (default: RAY_ADDRESS, or this machine)"
    ),
]


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
    jobs: Annotated[
        int | None,
        typer.Option(help="runs in parallel, each with its part of the cores and GPUs (default: 1; ray: all that fit)"),
    ] = None,
    on: On = "local",
    ray_address: RayAddress = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="CELL", help="run one cell of the plan, by name or number, while other jobs run others"),
    ] = None,
    json: Json = False,
) -> None:
    """Train every combination of models, datasets and seeds, and compare them.

    If interrupted, run the same command again to resume.
    """
    if only is not None:
        if jobs is not None or on != "local" or ray_address is not None:
            raise UserError("--only runs one cell here, so --jobs, --on and --ray_address have no effect with it.")
        _single_cell(options, file, output, models, datasets, seeds, only, json)
        return
    from modelyard.comparison.matrix import matrix as run_matrix
    from modelyard.comparison.matrix_folder import MatrixFolder
    from modelyard.system.console import console

    again = f"{program()} matrix --output {shlex.quote(output)}{_place_words(jobs, on, ray_address)}"
    try:
        result = run_matrix(
            file, output=output, models=models, datasets=datasets, seeds=seeds, jobs=jobs,
            on=on, ray_address=ray_address, program=program_of_processes(), source=COMMAND_LINE,
            **keywords(options, run_matrix),
        )  # fmt: skip
    except Interrupted as interrupt:
        count = f"{interrupt.step} of {len(MatrixFolder(output).cell_axes())} cells done"
        exit_interrupted(interrupt, f" with {count}; started cells are saved", again)
    text = [] if result.leaderboard is None else [*_tables(result.leaderboard), _written(str(result.output))]
    text += [f"{cell.name} failed: {cell.reason}\n  log: {cell.log}" for cell in result.failed]
    show(asdict(result), text, as_json=json, text_too=True)
    if result.failed:
        message = f"{len(result.failed)} of {len(result.cells)} cells failed. Try them again: {again}"
        console().print(message, soft_wrap=True)
        sys.exit(1)


def _single_cell(
    options: dict[str, Any],
    file: str | None,
    output: str,
    models: str | None,
    datasets: str | None,
    seeds: str | None,
    only: str,
    json: bool,
) -> None:
    from modelyard.cli.training import train_and_evaluate
    from modelyard.comparison.matrix import requested
    from modelyard.comparison.single_cell import choose_cell, compare_if_complete, options_of
    from modelyard.system.console import console

    folder, request = requested(
        file, output=output, models=models, datasets=datasets, seeds=seeds, source=COMMAND_LINE,
        **keywords(options, requested),
    )  # fmt: skip
    cell = choose_cell(folder, request, only)
    of_cell = options_of(folder, cell)
    if of_cell is None:
        console().print(f"{cell.name} is done already", soft_wrap=True)
    else:
        train_and_evaluate(of_cell, json)
    if compare_if_complete(folder, request.trust):
        console().print(f"all cells are done. {_written(str(folder.path))}", soft_wrap=True)


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
    trials: Annotated[
        int | None,
        typer.Option(
            help="number of trials, those of before included (default: those of before, else 20, or by other limits)"
        ),
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option("--total_steps", help="train so many steps, over all trials")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="let trials save and exit after '30 min' or '2 h' of this start")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="validation metric to compare by (default: accuracy, else the loss); several, such as "
            "'accuracy, parameters', give a Pareto front"
        ),
    ] = None,
    constraint: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="limits of the best trial: 'parameters<=100000, ms_per_example<=0.5'"),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="sampler of Optuna: tpe (default), random, cmaes, gp, qmc …")
    ] = None,
    search_seed: Annotated[int | None, typer.Option("--search_seed", help="seed of the proposals (default: 0)")] = None,
    halving: Annotated[
        int | None,
        typer.Option(
            metavar="FACTOR", help="pause trials at rungs, and train only the best 1/FACTOR of a rung further"
        ),
    ] = None,
    first_rung: Annotated[
        str | None,
        typer.Option(
            "--first_rung",
            metavar="LENGTH",
            help="first rung: '1/27' of a run, '5 %', '100 steps' (default: 1/FACTOR³)",
        ),
    ] = None,
    brackets: Annotated[
        int | None, typer.Option(help="brackets of rungs, each beginning later than the one before (Hyperband)")
    ] = None,
    enqueue: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="TEXT", help="train these values next: 'learning_rate=0.1, optimizer=sgd'"),
    ] = None,
    top: Annotated[int, typer.Option(help="best trials to train again with new seeds at the end")] = 3,
    seeds: Annotated[int, typer.Option(help="new seeds for those; 0: don't train them again")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="trials in parallel, each with its part of the cores and GPUs (default: 1; ray: all that fit)"
        ),
    ] = None,
    on: On = "local",
    ray_address: RayAddress = None,
    json: Json = False,
) -> None:
    """Search for good options with Optuna; compare the best trials with new seeds, and test the best one.

    Every trial is an ordinary run. If interrupted, run the same command again to resume; give more --trials, steps or
    time, or another --space to extend a search.
    """
    from modelyard.system.console import console
    from modelyard.tuning.search import tune as run_search

    limits = {"--trials": trials, "--total_steps": total_steps, "--time": time, "--top": top, "--seeds": seeds}
    words = [str(word) for name, value in limits.items() if value is not None for word in (name, value)]
    again = f"{program()} tune --output {shlex.join([output, *words])}{_place_words(jobs, on, ray_address)}"
    try:
        result = run_search(
            space, output=output, trials=trials, total_steps=total_steps, time=time, metric=metric,
            constraint=constraint, sampler=sampler, search_seed=search_seed, halving=halving, first_rung=first_rung,
            brackets=brackets, enqueue=enqueue or (), top=top, seeds=seeds, jobs=jobs, on=on, ray_address=ray_address,
            program=program_of_processes(), source=COMMAND_LINE, **keywords(options, run_search),
        )  # fmt: skip
    except Interrupted as interrupt:
        exit_interrupted(interrupt, f" with {interrupt.step} trials done; started ones are saved", again)
    text: list[Any] = [_trial_table(result)]
    if len(result.trials) > _SHOWN_TRIALS:
        text.append(f"and {len(result.trials) - _SHOWN_TRIALS} more, in {result.output}")
    if result.front:
        text.append(prose(f"Pareto front: {', '.join(map(str, result.front))} (marked *)"))
    if result.final is not None:
        text += ["", *_tables(result.final)]
    if result.test:
        values = ", ".join(f"{name}: {score:.4g}" for name, score in result.test.items())
        text.append(f"test scores of the best: {values}")
    if result.best is not None:
        text.append(
            prose(f"options of the best: {result.best} (modelyard train-and-evaluate --config_file {result.best})")
        )
    failed = [trial for trial in result.trials if trial.reason]
    text += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_SHOWN_TRIALS]]
    show(asdict(result), text, as_json=json, text_too=True)
    if result.best is None:
        console().print(result.why, soft_wrap=True)
        sys.exit(1)


def _place_words(jobs: int | None, on: str, ray_address: str | None) -> str:
    """Returns the options of where runs are trained, for the command that resumes them."""
    given = {"jobs": jobs, "on": on if on != "local" else None, "ray_address": ray_address}
    return "".join(f" --{key} {shlex.quote(str(value))}" for key, value in given.items() if value is not None)


def _trial_table(result: TuneResult) -> Any:
    """Returns a table of the best trials, or of the front and the best of the others."""
    shown = result.trials[: max(_SHOWN_TRIALS, len(result.front))]
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.values))
    metrics = list(dict.fromkeys(name for trial in result.trials for name in trial.scores))
    metrics = metrics or ["score" if result.metric == "auto" else result.metric]
    whole = len({trial.step for trial in result.trials if trial.state == "done"}) <= 1
    whole = whole and all(trial.state != "paused" for trial in result.trials)
    columns = ["trial", *metrics, *([] if whole else ["step"]), *names]
    rows = []
    for trial in shown:
        states = [f"{trial.scores[name]:.6g}" if name in trial.scores else "" for name in metrics]
        if trial.score is None:
            states[0] = trial.state
        mark = "*" if trial.number in result.front else "!" if trial.violates else ""
        steps = [] if whole else [f"{trial.step}" + (f" ({trial.state})" if trial.state != "done" else "")]
        values = [
            f"{value:.4g}" if isinstance(value := trial.values.get(name), float) else _inline(value) for name in names
        ]
        rows.append([f"{trial.number}{mark}", *states, *steps, *values])
    title = f"{counted(len(result.trials), 'trial')}, {counted(result.steps, 'step')}, the best first"
    if any(trial.violates for trial in shown):
        title += "; ! violates a constraint"
    return table(columns, rows, right=columns[: len(columns) - len(names)], title=title)


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

    try:
        return [f"written: {write_search_page(Path(folder).expanduser(), output)}"]
    except UserError as error:  # the runs can be compared without it
        return [f"search.html was not written: {error}"]


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
    """List all runs, or compare the results and options of some.

    A folder of `matrix` or `tune` as RUN or --runs_dir lists its runs.
    """
    from modelyard.comparison.matrix_folder import cells_folder, holds_cells
    from modelyard.config.yaml_file import inline
    from modelyard.run.directory import find_runs, open_run_folder
    from modelyard.run.summary import compare, summarize
    from modelyard.system.console import console

    chosen = [*(folders or ()), *([] if model_dir is None or model_dir in (folders or ()) else [model_dir])]
    if len(chosen) == 1 and holds_cells(chosen[0]):
        runs_dir = chosen.pop()
    if not chosen:
        cells = cells_folder(runs_dir) if holds_cells(runs_dir) else runs_dir
        found = [summarize(run) for run in find_runs(cells)]
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
