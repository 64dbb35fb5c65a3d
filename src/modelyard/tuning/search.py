"""A search: trials with options that a sampler proposes, each an ordinary run in a process of its own.

The folder of a search is that of a matrix that grows: every trial is a cell, and the runs are the truth.
``search.yaml`` says what is searched. When all trials have ended, the best are trained again with new seeds, as a
matrix in ``final/``; the best of those is tested, and ``best.yaml`` has its options.
"""

from __future__ import annotations

import logging
import re
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.comparison.leaderboard import Leaderboard, leaderboard
from modelyard.comparison.matrix import SEARCH
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.places import LOCAL, Place
from modelyard.comparison.plan import MAX_CELLS, SEED, Cell, MatrixRequest
from modelyard.comparison.results import RunResult, read_run
from modelyard.comparison.scheduler import CellResult, Scheduler
from modelyard.config.durations import Duration
from modelyard.config.resolve import option_name
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, counted
from modelyard.loop.metric_hooks import Ranking
from modelyard.system.console import live_table
from modelyard.system.files import write_text
from modelyard.system.process import log_to
from modelyard.tuning.objectives import COSTS
from modelyard.tuning.page import directions, live_page, read_trials, write_page
from modelyard.tuning.plots import ShownSearch, ShownTrial
from modelyard.tuning.record import best_evaluation
from modelyard.tuning.samplers import DONE, FAILED, import_optuna, make_sampler
from modelyard.tuning.search_file import KINDS, Request, Search, check_halving, find_search, read_search
from modelyard.tuning.space import SPACE
from modelyard.tuning.trials import BEST_METRIC, MAX_TRIALS, Budget, Trial, Trials, TuneResult

NAME = "tune"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
FINAL = "final"
TRIAL = re.compile(r"trial-\d{4,}")
"""The names of trials as cells."""
_RESTARTS = 3
"""How often a trial that was killed goes on, without having come further, before it counts as failed."""
log = logging.getLogger("modelyard")


def tune(
    space: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path,
    trials: int | None = None,
    total_steps: int | None = None,
    time: str | None = None,
    metric: str | None = None,
    constraint: str | None = None,
    sampler: str | None = None,
    search_seed: int | None = None,
    halving: int | None = None,
    first_rung: str | None = None,
    brackets: int | None = None,
    enqueue: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    top: int = 3,
    seeds: int = 3,
    jobs: int | None = None,
    on: str = LOCAL,
    ray_address: str | None = None,
    program: Sequence[str] | None = None,
    source: str = "Python",
    trust: bool = False,
    **options: Any,
) -> TuneResult:
    """Searches for good options: trains trials with options that a sampler of Optuna proposes.

    If ``output`` exists, the search is resumed: interrupted trials go on where they were, and new ones are proposed
    until the budget is spent. A search of one job at a time that was killed ends with the same trials.

    Args:
        space: the options that vary: ``"learning_rate=log(1e-4, 1), model=[mlp, simple_cnn]"``, a dictionary of such
            texts and lists, or a YAML file with ``space`` and ``options``.
        output: the folder of the search; given without a space, the search in it is resumed.
        trials: the number of trials, those of before included; by default the last budget, 20, or any number with
            another budget.
        total_steps: the steps of all trials together, those of before included. Trials that have begun are finished.
        time: how long this start may take, such as ``"2 h"``. Trials that run then save and exit.
        metric: the validation metric to compare by; by default accuracy, or the loss if there is none. Several, such
            as ``"accuracy, parameters"``, give a Pareto front.
        constraint: limits, such as ``"parameters<=100000"``. Trials that violate them are never the best.
        sampler: a sampler of Optuna: tpe, random, cmaes, gp, qmc, …
        search_seed: the seed of the proposals.
        halving: of each rung, one trial in so many is trained further (successive halving).
        first_rung: where the first rung is: ``"1/27"`` of a run, ``"100 steps"``, ``"1 epochs"``.
        brackets: the number of brackets (Hyperband); in each, the first rung is ``halving`` times as late.
        enqueue: values to train next: ``"learning_rate=0.1"``, a dictionary, or a list of those. The sampler chooses
            the parameters that are missing.
        top: how many of the best trials are trained again with new seeds at the end.
        seeds: the number of new seeds; 0 leaves that out.
        jobs: how many trials run in parallel; each gets a part of the cores and GPUs. By default one, and on a cluster
            as many as it has room for.
        on: where trials run: local, or ray.
        ray_address: the address of a Ray cluster; by default RAY_ADDRESS, or one of this machine.
        program: the program that runs the commands of the trials; by default Modelyard itself.
        source: where the request comes from, for error messages.
        trust: import the plugins that the configs in ``output`` name, even if they are not the user's.
        **options: options of all trials.

    Raises:
        ConfigError: with every problem, before anything is started.
        UserError: if no trial measures the metric, or the first trials fail.
        Interrupted: after SIGTERM or SIGINT, when all trials have saved and exited.

    Example:
        >>> modelyard.tune("learning_rate=log(1e-4, 1)", output="runs/search", dataset="digits", train_epochs=2)
    """
    import_optuna()
    asked = Request(metric, sampler, search_seed, constraint, halving, first_rung, brackets)
    numbers = {"trials": (trials, 1, MAX_CELLS), "total_steps": (total_steps, 1, 2**63)}
    numbers |= {"top": (top, 1, MAX_CELLS), "seeds": (seeds, 0, 1000)}
    place = Place(on, jobs, ray_address)
    _check_arguments(asked, numbers, space, output, source, place)
    seconds = _seconds(time, source)
    folder = MatrixFolder(output)
    given = {option_name(key): value for key, value in options.items() if value is not None}
    search = find_search(folder, space, given, asked, source, trust)
    request = MatrixRequest(
        {}, (), search.options, source, source == COMMAND_LINE, trust=trust, own_files=search.names_own_files
    )
    make_sampler(search.sampler, 0, search.space)
    known = folder.cells(trust=trust)
    foreign = next((cell.name for cell in known if not TRIAL.fullmatch(cell.name)), None)
    if foreign is not None:
        raise UserError(f"{folder.path} is a matrix, not a search: it has the cell {foreign}. Choose another --output.")
    if known and not (folder.path / SEARCH).exists():
        raise UserError(
            f"{folder.path / SEARCH} is missing, so it is not known what was searched in the {len(known)} trials of "
            "this folder. Restore the file, or choose another --output."
        )
    if (trials, total_steps, seconds) == (None, None, None):
        trials, total_steps = search.trials, search.total_steps
    if trials is None and total_steps is None and seconds is None:
        trials = MAX_TRIALS
    if (trials, total_steps) != (None, None):
        search = replace(search, trials=trials, total_steps=total_steps)
    trials = MAX_CELLS if trials is None else min(trials, MAX_CELLS)
    run = Trials(folder, search, request, Budget(trials, total_steps), known)
    queued = run.read_values(enqueue)
    if len(known) < trials:
        run.check_space()
    run.check_metrics()
    folder.create()
    given_threads = str(search.options.get("threads"))
    threads = int(given_threads) if given_threads.isdecimal() else 0
    with (
        faults.injected(folder.logs, NAME),
        log_to(folder.logs, NAME),
        place.open(program, folder.path, threads) as (executor, slots),
        live_page(folder, partial(_shown, folder, search)) as page,
    ):
        if not folder.plan.exists():  # by which the folder is known as one of ours, after a kill between the two files
            folder.write([])
        write_text(folder.path / SEARCH, search.text())
        run.renew()
        for values in queued:
            run.enqueue(values)
        limits = [counted(trials, "trial")] if trials < MAX_CELLS else []
        limits += [counted(total_steps, "step")] if total_steps is not None else []
        limits += [str(time)] if time is not None else []
        log.info("at most %s in %s, %d at a time", ", ".join(limits), folder.path, len(slots))

        def trained(where: MatrixFolder, cells: Sequence[Cell], noun: str = "run", **more: Any) -> list[CellResult]:
            with live_table() as live:
                return Scheduler(where, cells, slots, executor, live, noun=noun, **more).run()

        results = trained(
            folder, run.cells, noun="trial", propose=run.next_cell, retries=False, restarts=_RESTARTS,
            state_of=run.state_of, pause_at=run.pause_at, metric=run.shown_metric,
            deadline=None if seconds is None else clock.monotonic() + seconds, watch=page.update,
        )  # fmt: skip
        result = run.result(results)
        if result.best is None:
            run.remove_best()
            return result
        best = [trial for trial in result.trials if trial.number in result.front] if result.front else []
        best = best or [trial for trial in result.trials if run.is_candidate(trial)]
        run.write_best(best[0], result.front)  # the last phase may be interrupted
        winner, board, test = _final(run, best[:top], seeds, trained) if seeds else (best[0], None, {})
        run.write_best(winner, result.front)
    return replace(result, final=board, test=test)


def write_search_page(path: str | Path, output: str | Path | None = None) -> Path:
    """Writes search.html anew, from the folder of a search alone.

    Args:
        path: the folder of the search.
        output: the folder to write to; by default that of the search.

    Returns:
        The page.

    Raises:
        UserError: if this is not the folder of a search, or a file in it is damaged.
    """
    folder = MatrixFolder(path)
    search = read_search(folder)
    if search is None:
        raise UserError(f"{folder.path / SEARCH} is missing, so there is no search to show.")
    shown = _shown(folder, search, *read_trials(folder))
    return write_page(shown, folder.path, None if output is None else Path(output).expanduser())


def _shown(folder: MatrixFolder, search: Search, trials: Sequence[ShownTrial], modes: Mapping[str, str]) -> ShownSearch:
    """Returns the search as its page shows it; ``modes`` says what is better of the metrics of its trials."""
    wanted = {*search.metrics, *(one.name for one in search.constraints)}
    trials = [
        replace(one, scores={**{name: cost for name, cost in one.costs.items() if name in wanted}, **one.scores})
        for one in trials
    ]
    metrics = directions(search.metrics, trials, {**modes, **COSTS})
    named = search.options.get(BEST_METRIC)
    choosing = [Ranking(name, mode) for name, mode in metrics.items() if name not in COSTS]
    chooser = next((ranking for ranking in choosing if ranking.metric == named), next(iter(choosing), None))
    checked = []
    for one in trials:
        if chooser is not None:  # the metric may have changed since the run kept its best model
            one = replace(one, scores={**one.scores, **best_evaluation(one.evaluations, chooser)})
        missing = next((name for name in metrics if name not in one.scores), None) if one.state == DONE else None
        if missing is not None:
            one = replace(one, state=FAILED, reason=f"its {missing} is not a finite number")
        meets = not one.scores or all(limit.violation(one.scores) <= 0 for limit in search.constraints)
        checked.append(replace(one, feasible=meets))
    return ShownSearch(
        name=folder.path.resolve().name, space=search.space, options=search.options, sampler=search.sampler,
        seed=search.seed, metrics=metrics, trials=checked,
    )  # fmt: skip


def _check_arguments(
    asked: Request, numbers: Mapping[str, tuple[Any, int, int]], space: Any, output: Any, source: str, place: Place
) -> None:
    """Raises `ConfigError` with the arguments that have wrong types or are out of range."""
    problems: list[Problem] = []
    if not str(output):
        problems.append(Problem(source, "output", "is missing: the folder of the search, such as runs/search."))
    for name, (number, least, most) in numbers.items():
        if number is None and name in ("trials", "total_steps"):
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            problems.append(Problem(source, name, f"must be {least} to {most}, got {number!r}."))
    problems += place.problems(source)
    texts = ("metric", "sampler", "constraint", "first_rung")
    for key, value in vars(asked).items():
        kind = str if key in texts else int
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            problems.append(Problem(source, key, f"must be {KINDS[kind]}, got {value!r}."))
    forms: Any = (str, Path, Mapping, type(None))
    if not isinstance(space, forms):
        problems.append(Problem(source, SPACE, f"must be text, a file or a dictionary, got {space!r}."))
    if problems:
        raise ConfigError(problems)
    check_halving(asked, source)


def _seconds(text: str | None, source: str) -> float | None:
    """Returns a time in seconds."""
    if text is None:
        return None
    try:
        seconds = Duration.parse(text).seconds
    except ValueError:
        seconds = None
    if seconds is None:
        raise ConfigError([Problem(source, "time", f"must be a time such as '30 min' or '2 h', got {text!r}.")])
    return seconds


def _final(
    run: Trials, best: Sequence[Trial], seeds: int, trained: Callable[..., list[CellResult]]
) -> tuple[Trial, Leaderboard | None, dict[str, float]]:
    """Trains the best trials again with new seeds, compares them on validation, and tests the best of them.

    Returns:
        The best trial, the leaderboard, and the test scores of the best by seed.
    """
    folder = MatrixFolder(run.folder.path / FINAL)
    folder.create()
    metric, first = run.chooser.metric, int(run.cells[0].config.random_seed) + 1
    cells, members = [], {}
    for trial in best:
        config = run.cells[trial.number].config
        if BEST_METRIC not in run.search.options:  # that of the search may have changed since
            config = config.model_copy(update={BEST_METRIC: run.chooser.metric})
        mine = []
        for seed in range(first, first + seeds):
            name = f"trial-{trial.number:04}-seed{seed}"
            changed = config.model_copy(update={"random_seed": seed})
            mine.append(Cell(name, {**trial.values, SEED: seed}, changed))
        members[trial.number] = mine
        cells += mine
    known = {cell.name: cell for cell in folder.cells()}  # those of a search that was smaller stay
    winners = {name for name, cell in known.items() if cell.config.test_at_end}
    cells = [_tested(cell) if cell.name in winners else cell for cell in cells]
    folder.write([*cells, *(cell for name, cell in known.items() if name not in {cell.name for cell in cells})])
    log.info("training again with new seeds: %s, %s each", counted(len(best), "trial"), counted(seeds, "seed"))
    results = {result.name: result for result in trained(folder, cells)}
    means: dict[int, float] = {}
    for number, mine in members.items():
        scores = [_score_of(folder, cell.name, "validation", metric) for cell in mine]
        if all(score is not None for score in scores):
            means[number] = sum(scores) / len(scores)  # type: ignore[arg-type]
    if not means:
        failed = next((f"{one.name}: {one.reason}" for one in results.values() if one.reason), "")
        raise UserError(f"none of the best trials could be trained again with new seeds. {failed}")
    number = min(means, key=lambda number: (run.chooser.key(means[number]), number))
    winner = [_tested(cell) for cell in members[number]]
    folder.write([*winner, *(cell for cell in folder.cells() if cell.name not in {one.name for one in winner})])
    trained(folder, winner)
    board = leaderboard(str(folder.path), metric=metric, split="validation")
    test = {}
    for cell in winner:
        score = _score_of(folder, cell.name, "test", metric)
        if score is not None:
            test[f"seed {cell.config.random_seed}"] = score
    return next(trial for trial in best if trial.number == number), board, test


def _tested(cell: Cell) -> Cell:
    return replace(cell, config=cell.config.model_copy(update={"test_at_end": True}))


def _score_of(folder: MatrixFolder, name: str, split: str, metric: str) -> float | None:
    result = read_run(str(folder.run(name).path), name, "")
    return result.scores.get(split, {}).get(metric) if isinstance(result, RunResult) else None
