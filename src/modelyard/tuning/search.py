"""A search: trials with options that a sampler proposes, each an ordinary run in a process of its own.

The folder of a search is that of a matrix that grows: every trial is a cell, and the runs are the truth.
``search.yaml`` says what is searched. When all trials have ended, the best are trained again with new seeds, as a
matrix in ``final/``; the best of those is tested, and ``best.yaml`` has its options.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.comparison.leaderboard import Leaderboard, leaderboard
from modelyard.comparison.matrix import DONE as FINISHED
from modelyard.comparison.matrix import FAILED as HAS_FAILED
from modelyard.comparison.matrix import MAX_JOBS, SEARCH, CellResult, Scheduler, make_slots
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.plan import MAX_CELLS, SEED, Cell, MatrixRequest, make_cell
from modelyard.comparison.results import RunResult, read_run
from modelyard.config.calls import parse_list
from modelyard.config.named_files import SAVED_MODEL_PATH
from modelyard.config.resolve import option_name
from modelyard.config.trust import is_own_file, trust_cache, trust_plugins, trust_saved_model
from modelyard.config.yaml_file import Value, dump, inline, read_sections
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, nearest
from modelyard.loop.metric_hooks import Ranking
from modelyard.run.directory import config_text, read_json
from modelyard.system.console import live_table
from modelyard.system.files import write_text
from modelyard.system.machine import available_cores
from modelyard.system.process import log_to
from modelyard.tuning.page import directions, live_page, read_trials, write_page
from modelyard.tuning.plots import ShownSearch, ShownTrial
from modelyard.tuning.samplers import (
    DONE,
    FAILED,
    JOURNAL,
    RUNNING,
    Journal,
    Known,
    import_optuna,
    make_sampler,
    propose,
)
from modelyard.tuning.space import OPTIONS, SPACE, Choice, Space, options_of, parse_value, read_space

NAME = "tune"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
REMEMBERED, BEST, FINAL = "sampler.json", "best.yaml", "final"
TRIAL = re.compile(r"trial-\d{4,}")
"""The names of trials as cells."""
_VERSION, _VERSION_KEY = 1, "search_version"
_FAILURES = 3
"""If so many trials have failed and no other has been trained, the search ends."""
_RESTARTS = 3
"""How often a trial that was killed goes on, without having come further, before it counts as failed."""
_TRIED = 24
"""Proposals whose options are checked before the first trial starts."""
_KINDS = {str: "text", int: "a whole number", dict: "'option: values' lines"}
log = logging.getLogger("modelyard")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of a search: its parameters, its state, and its score if it is done."""

    number: int
    values: dict[str, Any]
    state: str
    score: float | None
    reason: str
    model_dir: str


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a search. It prints as text.

    Args:
        output: its folder.
        metric: what the trials are compared by.
        trials: all trials, the best first.
        final: the best trials, trained again with new seeds; None if they were not.
        test: the test scores of the best of those, one for each seed.
        best: the file with the options of the best trial; None if no trial is done.
    """

    output: str
    metric: str
    trials: tuple[Trial, ...]
    final: Leaderboard | None
    test: dict[str, float]
    best: str | None

    def __str__(self) -> str:
        lines = [f"{self.output}: {len(self.trials)} trials, by {self.metric}"]
        lines += [_line(trial) for trial in self.trials[:10]]
        if self.final is not None:
            lines.append(str(self.final))
        lines += [f"test, {name}: {score:.4g}" for name, score in self.test.items()]
        return "\n".join(lines if self.best is None else [*lines, f"options of the best: {self.best}"])


def _line(trial: Trial) -> str:
    values = ", ".join(f"{name}={inline(value)}" for name, value in trial.values.items())
    score = trial.reason or trial.state if trial.score is None else f"{trial.score:.4g}"
    return f"trial {trial.number}: {score}  {values}"


@dataclass(frozen=True)
class Search:
    """The request of a search: a space, options of all trials, a metric, a sampler and a seed."""

    space: Space
    options: dict[str, Any]
    metric: str
    sampler: str
    seed: int

    def text(self) -> str:
        """Returns the content of its file."""
        values = {
            _VERSION_KEY: _VERSION,
            "metric": self.metric,
            "sampler": self.sampler,
            "seed": self.seed,
            SPACE: {name: parameter.text for name, parameter in self.space.items()},
            OPTIONS: self.options,
        }
        return f"# What this search varies. Its trials are the cells of matrix.yaml.\n{dump(values)}"


def tune(
    space: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path,
    trials: int = 20,
    metric: str | None = None,
    sampler: str | None = None,
    search_seed: int | None = None,
    top: int = 3,
    seeds: int = 3,
    jobs: int = 1,
    program: Sequence[str] | None = None,
    source: str = "Python",
    trust: bool = False,
    **options: Any,
) -> TuneResult:
    """Searches for good options: trains trials with options that a sampler of Optuna proposes.

    If ``output`` exists, the search is resumed: interrupted trials go on where they were, and new ones are proposed
    until there are ``trials``. A search of one job at a time that was killed ends with the same trials.

    Args:
        space: the options that vary: ``"learning_rate=log(1e-4, 1), model=[mlp, simple_cnn]"``, a dictionary of such
            texts and lists, or a YAML file with ``space`` and ``options``.
        output: the folder of the search; given without a space, the search in it is resumed.
        trials: the number of trials, those of before included.
        metric: the validation metric to compare by; by default accuracy, or the loss if there is none.
        sampler: a sampler of Optuna: tpe, random, cmaes, gp, qmc, …
        search_seed: the seed of the proposals.
        top: how many of the best trials are trained again with new seeds at the end.
        seeds: the number of new seeds; 0 leaves that out.
        jobs: how many trials run in parallel; each gets a part of the cores and GPUs.
        program: the program that runs the commands of the trials; by default Modelyard itself.
        source: where the request comes from, for error messages.
        trust: import the plugins that the configs in ``output`` name, even if they are not the user's.
        **options: options of all trials.

    Raises:
        ConfigError: with every problem, before anything is started.
        Interrupted: after SIGTERM or SIGINT, when all trials have saved and exited.

    Example:
        >>> modelyard.tune("learning_rate=log(1e-4, 1)", output="runs/search", dataset="digits", train_epochs=2)
    """
    import_optuna()
    problems: list[Problem] = []
    if not str(output):
        problems.append(Problem(source, "output", "is missing: the folder of the search, such as runs/search."))
    for name, number, least, most in (
        ("trials", trials, 1, MAX_CELLS),
        ("jobs", jobs, 1, MAX_JOBS),
        ("top", top, 1, MAX_CELLS),
        ("seeds", seeds, 0, 1000),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            problems.append(Problem(source, name, f"must be {least} to {most}, got {number!r}."))
    for key, value, kind in (("metric", metric, str), ("sampler", sampler, str), ("search_seed", search_seed, int)):
        if value is not None and not isinstance(value, kind):
            problems.append(Problem(source, key, f"must be {_KINDS[kind]}, got {value!r}."))
    forms: Any = (str, Path, Mapping, type(None))
    if not isinstance(space, forms):
        problems.append(Problem(source, SPACE, f"must be text, a file or a dictionary, got {space!r}."))
    if problems:
        raise ConfigError(problems)
    folder = MatrixFolder(output)
    given = {option_name(key): value for key, value in options.items() if value is not None}
    search = _search(folder, space, given, metric, sampler, search_seed, source, trust)
    request = MatrixRequest({}, (), search.options, source, source == COMMAND_LINE, trust=trust)
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
    run = _Run(folder, search, request, trials, known)
    if len(known) < trials:
        run.check_space()
    folder.create()
    shown = partial(_shown, folder, search)
    with faults.injected(folder.logs, NAME), log_to(folder.logs, NAME), live_page(folder, shown) as page:
        if not folder.plan.exists():  # by which the folder is known as one of ours, after a kill between the two files
            folder.write([])
        write_text(folder.path / SEARCH, search.text())
        program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
        slots = make_slots(jobs, os.environ, available_cores())
        log.info("%d trials in %s, %d at a time", trials, folder.path, jobs)

        def trained(where: MatrixFolder, cells: Sequence[Cell], **more: Any) -> list[CellResult]:
            with live_table() as live:
                return Scheduler(where, cells, slots, program, live, **more).run()

        # If nothing but failures is there, what they failed of may have been changed since: a full disk, missing data.
        hopeless = {cell.name for cell in known} <= set(folder.failures())
        results = trained(folder, known, propose=run.next_cell, retries=hopeless, restarts=_RESTARTS, watch=page.update)
        ranked = run.ranked(results)
        done = [trial for trial in ranked if trial.state == DONE]
        if not done:
            return TuneResult(str(folder.path), search.metric, tuple(ranked), None, {}, None)
        best, board, test = _final(run, done[:top], seeds, trained) if seeds else (done[0], None, {})
        write_text(folder.path / BEST, _recipe(run, best))
    return TuneResult(str(folder.path), run.metric, tuple(ranked), board, test, str(folder.path / BEST))


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
    search = _read_search(folder)
    if search is None:
        raise UserError(f"{folder.path / SEARCH} is missing, so there is no search to show.")
    shown = _shown(folder, search, *read_trials(folder))
    return write_page(shown, folder.path, None if output is None else Path(output).expanduser())


def _shown(folder: MatrixFolder, search: Search, trials: Sequence[ShownTrial], modes: Mapping[str, str]) -> ShownSearch:
    """Returns the search as its page shows it; ``modes`` says what is better of the metrics of its trials."""
    metrics = directions([search.metric], trials, modes)
    checked = [
        replace(one, state=FAILED, reason=f"its {name} is not a finite number")
        if one.state == DONE and (name := next((name for name in metrics if name not in one.scores), ""))
        else one
        for one in trials
    ]
    return ShownSearch(
        name=folder.path.resolve().name, space=search.space, options=search.options, sampler=search.sampler,
        seed=search.seed, metrics=metrics, trials=checked,
    )  # fmt: skip


def _search(
    folder: MatrixFolder,
    space: str | Path | Mapping[str, Any] | None,
    given: dict[str, Any],
    metric: str | None,
    sampler: str | None,
    seed: int | None,
    source: str,
    trust: bool,
) -> Search:
    """Returns what to search: what is given, or what is in the folder. The space may change, the options may not.

    Raises:
        UntrustedPluginError: for plugins that a file of somebody else names, without ``trust``.
    """
    before = _read_search(folder)
    if before is not None:
        path = folder.path / SEARCH
        _check_trust(before.options, before.space if space is None else {}, path, False, given, trust)
    if space is None and before is None:
        near = nearest(SPACE, given, 1)
        hint = f" Did you mean it by {near[0]}?" if near else ""
        message = f"is missing: the options that vary, such as learning_rate=log(1e-4, 1).{hint}"
        raise ConfigError([Problem(source, SPACE, message)])
    in_file: dict[str, Value] = {}
    if space is None:
        assert before is not None
        found = before.space
    else:
        found, in_file = read_space(str(space) if isinstance(space, Path) else space, source)
        if in_file:
            file = Path(str(space).strip())
            _check_trust(
                {key: _plain(value) for key, value in in_file.items()}, found, file, is_own_file(file), given, trust
            )
    options = {**{key: _plain(value) for key, value in in_file.items()}, **given}
    if before is None:
        return Search(found, options, metric or "auto", sampler or "tpe", seed or 0)
    problems = []
    for key in {**before.options, **options} if options or space is not None else ():
        old, new = before.options.get(key), options.get(key, before.options.get(key))
        if _same(old) != _same(new):
            was = (
                "the trials of this search do not have it"
                if old is None
                else f"{_text(old)} in the trials of this search"
            )
            where = in_file[key].where if key in in_file and key not in given else source
            problems.append(Problem(where, key, f"is {_text(new)} here, but {was}."))
    changed: list[tuple[str, Any, Any]] = [("metric", metric, before.metric), ("search_seed", seed, before.seed)]
    for key, mine, was in changed:
        if mine is not None and mine != was:
            problems.append(Problem(source, key, f"is {mine} here, but {was} in this search."))
    if problems:
        error = ConfigError(problems)
        error.add_hint("The space of a search may change, its options may not. Choose another --output for others.")
        raise error
    return Search(found, before.options, before.metric, sampler or before.sampler, before.seed)


def _check_trust(
    options: dict[str, Any], space: Space, path: Path, own: bool, given: Mapping[str, Any], trust: bool
) -> None:
    """Raises if a file of somebody else names code that the user has not used before. A strange cache is left out."""

    def named(key: str) -> list[str]:
        listed = parse_list(options.get(key)) if key not in given else []
        domain = space[key].domain if key in space else None
        more = domain.values if isinstance(domain, Choice) else ()
        return [str(name) for value in (listed, *more) for name in parse_list(value)]

    trust_plugins(named("plugins"), str(path), named_by_user=own, trust=trust)
    for model in named(SAVED_MODEL_PATH):
        trust_saved_model(model, str(path), named_by_user=own, trust=trust)
    if not all(trust_cache(cache, named_by_user=own, trust=trust) for cache in named("cache_dir")):
        log.warning("%s: cache_dir: you have not used it before, so your own cache is used", path)
        options.pop("cache_dir", None)


def _same(value: Any) -> list[str]:
    """Returns an option so that its forms are equal: on the command line, numbers and lists are text."""
    try:
        parts = parse_list(value) if isinstance(value, str | list | tuple) else [value]
        return [inline(parse_value(part) if isinstance(part, str) else part) for part in parts]
    except ValueError:
        return [inline(value)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else inline(value)


def _read_search(folder: MatrixFolder) -> Search | None:
    path = folder.path / SEARCH
    if not path.exists():
        return None
    problems: list[Problem] = []
    found = read_sections(path, problems)
    version = found[_VERSION_KEY].value if _VERSION_KEY in found else None
    if not problems and version != _VERSION:
        problems.append(Problem(str(path), "", f"is not a search of version {_VERSION}, the only supported one."))
    if problems:
        raise ConfigError(problems)

    plain = {key: _plain(value) for key, value in found.items()}
    types = {"metric": str, "sampler": str, "seed": int, SPACE: dict, OPTIONS: dict}
    for key, kind in types.items():
        if not isinstance(plain.get(key), kind):
            message = f"must be {_KINDS[kind]}, got {inline(plain.get(key))}. The file is damaged; restore it."
            problems.append(Problem(found[key].where if key in found else str(path), key, message))
    if problems:
        raise ConfigError(problems)
    space = read_space(plain[SPACE], str(path))[0]
    return Search(space, plain[OPTIONS], plain["metric"], plain["sampler"], plain["seed"])


def _plain(value: Any) -> Any:
    """Returns a value without the lines that it was read from."""
    value = value.value if isinstance(value, Value) else value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _remembered(path: Path) -> dict[str, dict[str, Any]]:
    """Returns what the sampler keeps with each trial. What is damaged is left out: samplers do without."""
    return {
        name: kept
        for name, kept in read_json(path).items()
        if isinstance(kept, dict) and all(isinstance(one, dict) for one in kept.values())
    }


class _Run:
    """The trials of a search: proposes them, and reads their scores."""

    def __init__(
        self, folder: MatrixFolder, search: Search, request: MatrixRequest, trials: int, cells: Sequence[Cell]
    ) -> None:
        self.folder, self.search, self.request, self.trials = folder, search, request, trials
        self.cells = list(cells)
        self._results: dict[str, RunResult] = {}
        self._ranking: Ranking | None = None
        self._journal: Journal | None = None
        self._remembered = _remembered(folder.path / REMEMBERED)

    @property
    def metric(self) -> str:
        """The metric of the search; auto until a trial is done."""
        return self.search.metric if self._ranking is None else self._ranking.metric

    def check_space(self) -> None:
        """Raises `ConfigError` if trials of the space have wrong options."""
        problems: list[Problem] = []
        for number in range(_TRIED):
            proposed = propose(self.search.space, [], number, "random", self.search.seed, True)
            if proposed is None:
                break
            try:
                self._cell("trial", proposed[0])
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))

    def _cell(self, name: str, values: Mapping[str, Any]) -> Cell:
        both = [key for key in values if key in self.request.options]
        if both:
            message = "is both in the space and an option of all trials; give only one."
            raise ConfigError([Problem(self.request.source, key, message) for key in both])
        try:
            axes = options_of(values, self.request.options)
        except ValueError as error:
            raise ConfigError([Problem(self.request.source, SPACE, str(error))]) from error
        # What is an argument of a name in a list replaces the list.
        rest = {key: value for key, value in self.request.options.items() if key not in axes}
        defaults: dict[str, Any] = {} if "test_at_end" in rest else {"test_at_end": False}
        if self.search.metric != "auto" and "best_metric" not in rest:
            defaults["best_metric"] = self.search.metric
        cell = make_cell(replace(self.request, options={**rest, **defaults}), name, axes)
        return replace(cell, axes=dict(values))

    def next_cell(self) -> Cell | None:
        """Proposes another trial and writes its config; None if there are enough."""
        number = len(self.cells)
        if number >= self.trials:
            return None
        known = self.known()
        failures = self.folder.failures()
        if len(failures) >= _FAILURES and not any(one.state == DONE for one in known):
            reasons = "; ".join(dict.fromkeys(failures.values()))
            raise UserError(
                f"the first {len(failures)} trials of this search failed: {reasons}\nRun the same command again to try "
                "them again, or choose another --output for other options."
            )
        maximize = self._ranking is None or self._ranking.mode == "max"
        found = propose(self.search.space, known, number, self.search.sampler, self.search.seed, maximize)
        if found is None:
            log.info("the space has no other values than those of the %d trials", number)
            return None
        values, remembered = found
        cell = self._cell(f"trial-{number:04}", values)
        if remembered:
            self._remembered[cell.name] = remembered
            write_text(self.folder.path / REMEMBERED, json.dumps(self._remembered) + "\n")
        self.cells.append(cell)
        self.folder.write(self.cells)
        return cell

    def known(self) -> list[Known]:
        """Returns what is known of all trials, in their order, and tells Optuna's dashboard."""
        failures = self.folder.failures()
        known = []
        for number, cell in enumerate(self.cells):
            result = self._result(cell.name) if cell.name not in failures else None
            state = FAILED if cell.name in failures else RUNNING if result is None else DONE
            score = None if result is None else self._score(result)
            known.append(Known(number, cell.axes, state, score, self._remembered.get(cell.name, {})))
        if self._journal is None and self._ranking is not None:
            self._journal = Journal(self.folder.path / JOURNAL, self.search.space, self._ranking.mode == "max")
        if self._journal is not None:
            self._journal.add(known)
        return known

    def _result(self, name: str) -> RunResult | None:
        if name not in self._results:
            found = read_run(str(self.folder.run(name).path), name, "")
            if not isinstance(found, RunResult):
                return None
            self._results[name] = found
        return self._results[name]

    def _score(self, result: RunResult) -> float | None:
        """Returns the score of a trial.

        Raises:
            UserError: if no trial measures the metric.
        """
        scores = result.scores.get("validation")
        if not scores:
            raise UserError(
                f"the trial {result.name} was not evaluated on validation, so there is nothing to compare trials by. "
                "Give --validation_fraction, or a dataset with a validation split."
            )
        if self._ranking is None:
            self._ranking = Ranking.choose(self.search.metric, "auto", scores, result.modes)
        return scores.get(self._ranking.metric)

    def ranked(self, results: Sequence[CellResult]) -> list[Trial]:
        """Returns all trials, the best first, then those without a score."""
        reasons = {result.name: result for result in results}
        trials = []
        for one in self.known():
            name = self.cells[one.number].name
            result = reasons[name]
            reason = result.reason if result.state == HAS_FAILED else ""
            if one.state == DONE and one.score is None:
                reason = f"its {self.metric} is not a finite number"
            state = one.state if one.state != RUNNING or result.state != FINISHED else DONE
            trials.append(
                Trial(
                    number=one.number, values=dict(one.values), state=state if not reason else FAILED, score=one.score,
                    reason=reason, model_dir=result.model_dir,
                )
            )  # fmt: skip
        ranking = self._ranking

        def key(trial: Trial) -> tuple[bool, float, int]:
            without = trial.score is None or ranking is None
            return without, 0.0 if without else ranking.key(trial.score), trial.number  # type: ignore[union-attr,arg-type]

        return sorted(trials, key=key)


def _recipe(run: _Run, best: Trial) -> str:
    cell = run.cells[best.number]
    head = f"# The options of trial {best.number}, the best of this search by {run.metric}.\n"
    return head + config_text(cell.config)


def _final(
    run: _Run, best: Sequence[Trial], seeds: int, trained: Callable[..., list[CellResult]]
) -> tuple[Trial, Leaderboard | None, dict[str, float]]:
    """Trains the best trials again with new seeds, compares them on validation, and tests the best of them.

    Returns:
        The best trial, the leaderboard, and the test scores of the best by seed.
    """
    folder = MatrixFolder(run.folder.path / FINAL)
    folder.create()
    first = int(run.cells[0].config.random_seed) + 1
    cells, members = [], {}
    for trial in best:
        config = run.cells[trial.number].config
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
    log.info("the best %d trials are trained again with %d new seeds", len(best), seeds)
    results = {result.name: result for result in trained(folder, cells)}
    means: dict[int, float] = {}
    for number, mine in members.items():
        scores = [_score_of(folder, cell.name, "validation", run.metric) for cell in mine]
        if all(score is not None for score in scores):
            means[number] = sum(scores) / len(scores)  # type: ignore[arg-type]
    if not means:
        failed = next((f"{one.name}: {one.reason}" for one in results.values() if one.reason), "")
        raise UserError(f"none of the best trials could be trained again with new seeds. {failed}")
    assert run._ranking is not None
    ranking = run._ranking
    number = min(means, key=lambda number: (ranking.key(means[number]), number))
    winner = [_tested(cell) for cell in members[number]]
    folder.write([*winner, *(cell for cell in folder.cells() if cell.name not in {one.name for one in winner})])
    trained(folder, winner)
    board = leaderboard(str(folder.path), metric=run.metric, split="validation")
    test = {}
    for cell in winner:
        score = _score_of(folder, cell.name, "test", run.metric)
        if score is not None:
            test[f"seed {cell.config.random_seed}"] = score
    return next(trial for trial in best if trial.number == number), board, test


def _tested(cell: Cell) -> Cell:
    return replace(cell, config=cell.config.model_copy(update={"test_at_end": True}))


def _score_of(folder: MatrixFolder, name: str, split: str, metric: str) -> float | None:
    result = read_run(str(folder.run(name).path), name, "")
    return result.scores.get(split, {}).get(metric) if isinstance(result, RunResult) else None
