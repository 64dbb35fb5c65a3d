"""The trials of a search: which is trained next, what is known of each, and which is the best.

The run folders are the record. What is kept in memory saves time only.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from modelyard.comparison.leaderboard import Leaderboard
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.plan import Cell, MatrixRequest, make_cell
from modelyard.comparison.scheduler import DONE as FINISHED
from modelyard.comparison.scheduler import FAILED as HAS_FAILED
from modelyard.comparison.scheduler import CellResult
from modelyard.config.calls import split_list
from modelyard.config.durations import Duration
from modelyard.config.trust import may_read_state, remember_state
from modelyard.config.yaml_file import inline
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, counted, unknown
from modelyard.loop.metric_hooks import Ranking
from modelyard.run.directory import check_own_files, config_text
from modelyard.system.files import write_text
from modelyard.tuning.halving import Standing, next_promotion
from modelyard.tuning.objectives import AUTO, COSTS, choose_rankings, front_numbers, ranked
from modelyard.tuning.record import Record, read_record
from modelyard.tuning.samplers import (
    DONE,
    FAILED,
    JOURNAL,
    PAUSED,
    RUNNING,
    Journal,
    Known,
    Proposer,
    keeps_pickles,
    propose,
)
from modelyard.tuning.search_file import Search
from modelyard.tuning.space import SPACE, options_of, parse_value

REMEMBERED, BEST = "sampler.jsonl", "best.yaml"
_BEST_FILE = re.compile(r"best(-\d{4,})?\.yaml")
MAX_TRIALS = 20
"""How many trials a search has, unless the user says how long it is."""
BEST_METRIC = "best_metric"
"""The option of a trial that is its metric. A trial in which nothing measures it fails with its name."""
_FAILURES = 3
"""If so many trials have failed and no other has been trained, the search ends."""
_TRIED = 24
"""Proposals whose options are checked before the first trial starts."""
_OF_FILES = re.compile(
    r"the disk is full|another process uses its run folder|can't \w+( \w+)* .*/"
    r"|(\w+\.)*(OSError|IOError|\w*(File|Directory|IO|Permission)\w*Error)\b"
)
"""Failures of the disk and of its locks, which may be over at the next start."""
log = logging.getLogger("modelyard")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of a search.

    Args:
        number: its number.
        values: the values of its parameters.
        state: done, paused, running, waiting, stopped or failed.
        score: its score by the first metric; of a paused trial, the best so far.
        reason: why it failed.
        model_dir: its run folder.
        scores: its scores by all metrics, and the values that constraints limit.
        step: how many steps it has trained.
        violates: the constraints that it does not meet.
    """

    number: int
    values: dict[str, Any]
    state: str
    score: float | None
    reason: str
    model_dir: str
    scores: dict[str, float] = field(default_factory=dict)
    step: int = 0
    violates: tuple[str, ...] = ()


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a search. It prints as text.

    Args:
        output: its folder.
        metric: what the trials are compared by.
        trials: all trials, the best first.
        final: the best trials, trained again with new seeds; None if they were not.
        test: the test scores of the best of those, one for each seed.
        best: the file with the options of the best trial; None if no trial is done and meets the constraints.
        front: the numbers of the trials that no other is better than, if there are several metrics.
        steps: how many steps all trials have trained together.
        why: why there is no best trial.
    """

    output: str
    metric: str
    trials: tuple[Trial, ...]
    final: Leaderboard | None
    test: dict[str, float]
    best: str | None
    front: tuple[int, ...] = ()
    steps: int = 0
    why: str = ""

    def __str__(self) -> str:
        lines = [f"{self.output}: {counted(len(self.trials), 'trial')}, by {self.metric}"]
        lines += [_line(trial) for trial in self.trials[:10]]
        if self.front:
            lines.append(f"Pareto front: {', '.join(map(str, self.front))}")
        if self.final is not None:
            lines.append(str(self.final))
        lines += [f"test, {name}: {score:.4g}" for name, score in self.test.items()]
        return "\n".join([*lines, self.why] if self.best is None else [*lines, f"options of the best: {self.best}"])


def _line(trial: Trial) -> str:
    values = ", ".join(f"{name}={inline(value)}" for name, value in trial.values.items())
    score = trial.reason or trial.state if trial.score is None else f"{trial.score:.4g}"
    return f"trial {trial.number}: {score}  {values}"


@dataclass(frozen=True)
class Budget:
    """The budget of a search. The limit that is reached first ends it.

    Args:
        trials: the number of trials.
        total_steps: steps of training, of all trials together.
    """

    trials: int = MAX_TRIALS
    total_steps: int | None = None


def _remembered(path: Path) -> dict[str, dict[str, Any]]:
    """Returns what the sampler keeps with each trial. What is damaged is left out: samplers do without."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            kept = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name, one in kept.items() if isinstance(kept, dict) else ():
            if isinstance(one, dict) and all(isinstance(part, dict) for part in one.values()):
                found[name] = one
    return found


def _remember(path: Path, name: str, kept: Mapping[str, Any]) -> None:
    """Adds what the sampler keeps with a trial. After a kill, the last line may be cut off."""
    with open(path, "ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps({name: kept}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _best_file(number: int) -> str:
    return f"best-{number:04}.yaml"


class Trials:
    """The trials of a search: proposes and promotes them, and reads their scores."""

    def __init__(
        self, folder: MatrixFolder, search: Search, request: MatrixRequest, budget: Budget, cells: Sequence[Cell]
    ) -> None:
        self.folder, self.search, self.request, self.budget = folder, search, request, budget
        self.cells = list(cells)
        self._numbers = {cell.name: number for number, cell in enumerate(self.cells)}
        self._memory = folder.path / REMEMBERED
        check_own_files([self._memory, folder.path / JOURNAL], "a search")
        self._remembered = _remembered(self._memory)
        if self._remembered and keeps_pickles(search.sampler) and not may_read_state(self._memory, trust=request.trust):
            log.warning(
                "%s is not read: your searches have not written it, and what the sampler %s keeps there can run code. "
                "The sampler begins anew. If you trust the file, give --trust.",
                *(self._memory, search.sampler),
            )
            self._remembered = {}
        self._rankings: tuple[Ranking, ...] = ()
        self._proposer: Proposer | None = None
        self._journal: Journal | None = None
        self._tells = True
        """Whether Optuna's dashboard is told."""
        self._records: dict[str, Record] = {}
        """Records of trials that are at rest."""
        self._knowns: dict[str, Known] = {}
        """Their scores for the sampler, once the metrics are known."""
        self._standings: dict[str, Standing] = {}
        self._active: set[str] = set()
        """Trials whose processes run."""
        self._failed: dict[str, str] = {}
        self._is_over = False

    @property
    def metric(self) -> str:
        """The metrics of the search; auto until a trial is done."""
        return ", ".join(ranking.metric for ranking in self._rankings) or self.search.metric

    @property
    def shown_metric(self) -> str:
        """The metric that is shown while trials run."""
        shown = next(name for name in self.search.metrics if name not in COSTS)
        return "accuracy" if shown == AUTO else shown

    @property
    def chooser(self) -> Ranking:
        """The metric that selects the best model of a trial."""
        named = self.search.options.get(BEST_METRIC)
        for ranking in self._rankings:
            if ranking.metric == named:
                return ranking
        return next(ranking for ranking in self._rankings if ranking.metric not in COSTS)

    # -- cells ------------------------------------------------------------------------------------------------------

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

    def check_metrics(self) -> None:
        """Raises `UserError` if the trials that are done do not have a metric of the search."""
        failures = self.folder.failures()
        for cell in self.cells:
            record = self._record(cell.name)
            if record.state and cell.name not in failures:
                self._choose_metrics(cell.name, record)
                return

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
        if BEST_METRIC not in rest:
            defaults[BEST_METRIC] = self._best_metric
        cell = make_cell(replace(self.request, options={**rest, **defaults}), name, axes)
        return replace(cell, axes=dict(values))

    @property
    def _best_metric(self) -> str:
        return next(name for name in self.search.metrics if name not in COSTS)

    def renew(self) -> None:
        """Gives trials that have not begun the metric of the search, and forgets failures that may be over."""
        failures = self.folder.failures()
        hopeless = set(self._numbers) <= set(failures)
        kept = {
            name: reason
            for name, reason in failures.items()
            if not hopeless and not _OF_FILES.match(reason) and not reason.startswith(BEST_METRIC)
        }
        if BEST_METRIC not in self.search.options:
            for number, cell in enumerate(self.cells):
                if cell.config.best_metric != self._best_metric and not self.folder.run(cell.name).exists():
                    self.cells[number] = self._cell(cell.name, cell.axes)
                    self.folder.write_config(self.cells[number])
        if kept != failures:
            log.info("%s tried again", counted(len(failures) - len(kept), "failed trial"))
            self.folder.write_failures(kept)

    def read_values(self, given: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the values of trials that the user gives.

        Raises:
            ConfigError: with every problem.
        """
        given_as = "try" if self.request.source == COMMAND_LINE else "enqueue"
        problems, found = [], []
        for one in [given] if isinstance(given, str | Mapping) else given:
            values: dict[str, Any] = dict(one) if isinstance(one, Mapping) else {}
            for part in split_list(one) if isinstance(one, str) else ():
                name, equals, text = part.partition("=")
                try:
                    values[name.strip()] = parse_value(text.strip())
                except ValueError as error:
                    problems.append(Problem(self.request.source, given_as, str(error)))
                if not equals:
                    message = f"{part!r} is not option=value, such as learning_rate=0.1."
                    problems.append(Problem(self.request.source, given_as, message))
            for name in [name for name in values if name not in self.search.space]:
                message = unknown("parameter of the space", name, self.search.space)
                problems.append(Problem(self.request.source, given_as, message))
            for name in [name for name in values if name in self.search.space]:
                parameter = self.search.space[name]
                if not parameter.exists(values):
                    message = (
                        f"{name} needs a value of {parameter.condition and parameter.condition[0]}: {parameter.text}"
                    )
                    problems.append(Problem(self.request.source, given_as, message))
            found.append(values)
        if not problems:
            for values in found:
                try:
                    self._cell("trial", values)
                except ConfigError as error:
                    problems += error.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        return found

    def enqueue(self, given: Mapping[str, Any]) -> None:
        """Adds a trial with these values, unless there is one; the sampler chooses the missing ones."""
        for number, cell in enumerate(self.cells):
            if all(name in cell.axes and inline(cell.axes[name]) == inline(value) for name, value in given.items()):
                log.info("trial %d has these values", number)
                return
        found = self._proposals().propose(self.known(), len(self.cells), given)
        assert found is not None
        self._add(*found)

    def _add(self, values: Mapping[str, Any], remembered: Mapping[str, Any]) -> Cell:
        cell = self._cell(f"trial-{len(self.cells):04}", values)
        if remembered:
            self._remembered[cell.name] = dict(remembered)
            if not self._memory.exists():
                remember_state(self._memory)
            _remember(self._memory, cell.name, remembered)
        self.folder.add(cell)
        self._numbers[cell.name] = len(self.cells)
        self.cells.append(cell)
        return cell

    # -- what the scheduler asks ------------------------------------------------------------------------------------

    def next_cell(self) -> Cell | None:
        """Returns a trial to train: one that is promoted, or a new one, whose config it writes. None if none is due."""
        known = self.known()
        if self._has_only_failed(known):
            if self._active:  # what runs may do better, and would be killed by an error
                return None
            self._raise_failures()
        if self.budget.total_steps is not None and self.steps() >= self.budget.total_steps:
            if not self._is_over:
                log.info("%s are trained", counted(self.steps(), "step"))
            self._is_over = True
            return None
        promoted = self._promoted()
        if promoted is not None:
            return promoted
        number = len(self.cells)
        found = self._proposals().propose(known, number) if number < self.budget.trials else None
        if found is not None:
            return self._add(*found)
        if number < self.budget.trials:
            log.info("the space has no other values than those of the %d trials", number)
        has_ended = any(
            one.state == DONE and one.score is not None and not self._is_too_costly(one.violations) for one in known
        )
        return None if self._active or has_ended else self._promoted(without_place=True)

    def _proposals(self) -> Proposer:
        if self._proposer is None:
            maximize = [ranking.mode == "max" for ranking in self._rankings] or [True] * len(self.search.metrics)
            self._proposer = Proposer(
                self.search.space, self.search.sampler, self.search.seed, maximize, bool(self.search.constraints)
            )
        return self._proposer

    def _has_only_failed(self, known: Sequence[Known]) -> bool:
        """Returns whether the first trials have failed, so that others would fail, too."""
        if any(one.state in (DONE, PAUSED) for one in known):
            return False
        reasons = self._failed.values()
        return len(reasons) >= _FAILURES or any(reason.startswith(BEST_METRIC) for reason in reasons)

    def _raise_failures(self) -> NoReturn:
        """Raises `UserError` with the reasons of the failures."""
        wrong = next((reason for reason in self._failed.values() if reason.startswith(BEST_METRIC)), None)
        if wrong is not None:
            raise UserError(
                f"metric{wrong.removeprefix(BEST_METRIC)}\nNothing was trained. Run the same command with another "
                "--metric."
            )
        reasons = "; ".join(dict.fromkeys(self._failed.values()))
        raise UserError(
            f"the first {len(self._failed)} trials of this search failed: {reasons}\nRun the same command again to try "
            "them again, or choose another --output for other options."
        )

    def _promoted(self, without_place: bool = False) -> Cell | None:
        """Returns a paused trial to resume; None if none is due."""
        if self.search.halving is None or not self._rankings:
            return None
        standings = {number: self._standing(cell.name) for number, cell in enumerate(self.cells)}
        number = next_promotion(standings, self.search.halving.factor, without_place)
        if number is None:
            return None
        cell = self.cells[number]
        record = self._record(cell.name)
        rung = record.next_rung(self._rungs(cell.name))
        log.info("%s is promoted at step %d, and trains to %s", cell.name, record.step, rung or "its end")
        return cell

    def state_of(self, name: str) -> str | None:
        """Returns whether a trial is done, or paused at a rung; None if it is to be trained on."""
        self._active.discard(name)
        record = self._record(name)
        if record.state == PAUSED and record.step not in self._steps_of_rungs(name, record):
            return None
        return record.state or None

    def pause_at(self, name: str) -> str | None:
        """Returns where a trial that is started pauses; None if it trains to its end."""
        rung = self._record(name).next_rung(self._rungs(name))
        self._active.add(name)
        self._records.pop(name, None)
        self._knowns.pop(name, None)
        self._standings.pop(name, None)
        return None if rung is None else str(rung)

    # -- what is known ----------------------------------------------------------------------------------------------

    def _rungs(self, name: str) -> list[Duration]:
        number = self._numbers[name]
        return [] if self.search.halving is None else self.search.halving.rungs(self.cells[number].config, number)

    def _steps_of_rungs(self, name: str, record: Record) -> list[int]:
        return [] if record.length is None else [rung.steps(record.length) for rung in self._rungs(name)]

    def _record(self, name: str) -> Record:
        if name not in self._records:
            record = read_record(self.folder.run(name), self.cells[self._numbers[name]].config)
            if name in self._active or not (record.state or name in self._failed):
                return record
            self._records[name] = record
        return self._records[name]

    def steps(self) -> int:
        """Returns how many steps all trials have trained together."""
        return sum(self._record(cell.name).step for cell in self.cells)

    def known(self) -> list[Known]:
        """Returns what is known of all trials, in their order, and tells Optuna's dashboard."""
        self._failed = self.folder.failures()
        self._active -= set(self._failed)
        found = []
        for number, cell in enumerate(self.cells):
            if cell.name not in self._knowns:
                one = self._known(number, cell)
                if one.state in (RUNNING, PAUSED) and cell.name not in self._records:
                    found.append(one)
                    continue
                self._knowns[cell.name] = one
            found.append(self._knowns[cell.name])
        if self._rankings:
            self._tell(found)
        return found

    def _known(self, number: int, cell: Cell) -> Known:
        record = self._record(cell.name)
        remembered = self._remembered.get(cell.name, {})
        if cell.name in self._failed:
            reason = self._failed[cell.name]
            return Known(
                number, cell.axes, FAILED, None, remembered, started=record.started,
                seconds=record.costs.get("seconds"), reason=reason,
            )  # fmt: skip
        if record.state:
            self._choose_metrics(cell.name, record)
        curve = self._curve(cell.name, record)
        if not record.state and not curve:
            return Known(number, cell.axes, RUNNING, None, remembered)
        scores = self._scores(record)
        score, others = (None, ()) if scores is None else (scores[0], tuple(scores[1:]))
        violations = self._violations(record)
        # A promoted trial that runs counts as at its last rung: Optuna would take it for a bad one.
        state = DONE if record.state == DONE else PAUSED
        return Known(
            number, cell.axes, state, score, remembered, others, curve, violations, record.started,
            record.costs.get("seconds"),
        )  # fmt: skip

    def _choose_metrics(self, name: str, record: Record) -> None:
        """Finds the metrics of the search, once a trial has been evaluated.

        Raises:
            UserError: if no trial measures them.
        """
        if not record.evaluations:
            raise UserError(
                f"the trial {name} was not evaluated on validation, so there is nothing to compare trials by. "
                "Give --validation_fraction, or a dataset with a validation split."
            )
        if not self._rankings:
            row = record.evaluations[max(record.evaluations)]
            self._rankings = choose_rankings(
                self.search.metrics, self.search.constraints, {**row, **record.costs}, record.modes
            )
            self._proposer = None  # it did not know what is better

    def _scores(self, record: Record) -> list[float] | None:
        """Returns the scores of the best model by all metrics; None if one is missing."""
        values = record.best(self.chooser)
        found = [values.get(ranking.metric) for ranking in self._rankings]
        return None if None in found else found  # type: ignore[return-value]

    def _violations(self, record: Record) -> tuple[float, ...]:
        """Returns by how much the best model violates each constraint."""
        limited = record.best(self.chooser)
        return tuple(one.violation(limited) for one in self.search.constraints)

    def _is_too_costly(self, violations: Sequence[float]) -> bool:
        """Returns whether the limit of a cost is violated: a metric that training improves may still meet its own."""
        limits = zip(self.search.constraints, violations, strict=True)
        return any(over > 0 for one, over in limits if one.name in COSTS)

    def _curve(self, name: str, record: Record) -> dict[int, float]:
        """Returns the scores at the rungs that a trial has reached, by thousandths of its run."""
        if not self._rankings or record.length is None or self.search.halving is None:
            return {}
        first = self._rankings[0].metric
        values = {step: {**record.costs, **record.evaluations[step]} for step in record.reached(self._rungs(name))}
        return {
            round(1000 * step / record.length.total_steps): row[first] for step, row in values.items() if first in row
        }

    def _standing(self, name: str) -> Standing:
        if name in self._standings:
            return self._standings[name]
        assert self.search.halving is not None
        record, worst = self._record(name), math.inf
        violates = self._is_too_costly(self._violations(record))
        scores = []
        for step in record.reached(self._rungs(name)):
            row = {**record.costs, **record.evaluations[step]}
            scores.append(
                [worst if violates or one.metric not in row else one.key(row[one.metric]) for one in self._rankings]
            )
        waits = record.state == PAUSED and name not in self._active and name not in self._failed
        one = Standing(self.search.halving.bracket(self._numbers[name]), scores, waits)
        if name in self._records:
            self._standings[name] = one
        return one

    def _tell(self, known: Sequence[Known], ended: bool = False) -> None:
        """Adds trials that have ended to the journal for Optuna's dashboard, which is not worth an error."""
        if not self._tells:
            return
        if self._journal is None:
            maximize = [ranking.mode == "max" for ranking in self._rankings]
            names = [ranking.metric for ranking in self._rankings]
            self._journal = Journal(self.folder.path / JOURNAL, self.search.space, maximize, names)
        try:
            self._journal.add(known, ended)
        except Exception as error:  # of the disk, or of Optuna: a dashboard may have changed the file
            self._tells = False
            log.warning("%s does not get the trials any more: %s", self.folder.path / JOURNAL, error)

    # -- the outcome ------------------------------------------------------------------------------------------------

    def is_candidate(self, trial: Trial) -> bool:
        """Returns whether a trial may be the best: it has come to its end and meets the constraints."""
        return trial.state == DONE and trial.score is not None and not trial.violates

    def result(self, results: Sequence[CellResult]) -> TuneResult:
        """Returns all trials, the best first, then those without a score."""
        known = self.known()
        if self._rankings:
            self._tell(known, ended=True)
        by_name = {result.name: result for result in results}
        found = [self._trial(one, by_name[self.cells[one.number].name]) for one in known]
        candidates = [trial for trial in found if self.is_candidate(trial)]
        keys = {
            trial.number: [ranking.key(trial.scores[ranking.metric]) for ranking in self._rankings]
            for trial in candidates
        }
        order = {number: place for place, number in enumerate(ranked(keys))}
        states = [DONE, PAUSED, "stopped", RUNNING, "waiting", FAILED]

        def key(trial: Trial) -> Any:
            at_rest = states.index(trial.state) if trial.state in states else len(states)
            score = math.inf if trial.score is None else self._rankings[0].key(trial.score)
            return order.get(trial.number, len(found)), at_rest, -trial.step, score, trial.number

        front: tuple[int, ...] = ()
        if len(self._rankings) > 1 and keys:
            numbers = dict(zip(keys, front_numbers(list(keys.values())), strict=True))
            front = tuple(number for number in order if numbers[number] == 0)
        best = str(self.folder.path / BEST) if candidates else None
        trials = tuple(sorted(found, key=key))
        why = "" if candidates else self._why_none(trials)
        return TuneResult(str(self.folder.path), self.metric, trials, None, {}, best, front, self.steps(), why)

    def _trial(self, one: Known, result: CellResult) -> Trial:
        record = self._record(result.name)
        reason = result.reason if result.state == HAS_FAILED else ""
        if one.state == DONE and one.score is None:
            reason = f"its {self.metric} is not a finite number"
        values = record.best(self.chooser) if self._rankings else {}
        names = [ranking.metric for ranking in self._rankings] + [limit.name for limit in self.search.constraints]
        violates = [str(limit) for limit in self.search.constraints if values and limit.violation(values) > 0]
        state = DONE if result.state == FINISHED else result.state
        return Trial(
            number=one.number, values=dict(one.values), state=FAILED if reason else state,
            score=None if reason else one.score, reason=reason, model_dir=result.model_dir,
            scores={name: values[name] for name in names if name in values}, step=record.step,
            violates=tuple(violates),
        )  # fmt: skip

    def _why_none(self, trials: Sequence[Trial]) -> str:
        """Returns why no trial is the best."""
        done = [trial for trial in trials if trial.state == DONE]
        if done:
            near = min(
                done,
                key=lambda trial: sum(max(0.0, one.violation(trial.scores)) for one in self.search.constraints),
            )
            values = ", ".join(f"{name} {value:.6g}" for name, value in near.scores.items())
            return (
                f"none of the {counted(len(done), 'trial')} that are done meets the constraint "
                f"{self.search.constraint}. "
                f"The nearest is trial {near.number}: {values}. All trials are kept: run the same command with another "
                "--constraint or more --trials."
            )
        if any(trial.state == PAUSED for trial in trials):
            return "no trial has come to its end. Run the same command with a larger budget: --trials, --total_steps."
        if any(trial.state in ("stopped", RUNNING, "waiting") for trial in trials):
            return "no trial is done. Run the same command again: trials that have begun go on."
        return "no trial is done."

    def write_best(self, winner: Trial, front: Sequence[int]) -> None:
        """Writes the options of the best trial, and of all trials of the front."""
        self.remove_best({_best_file(number) for number in front})
        head = f"# The options of trial {winner.number}, the best of this search by {self.metric}.\n"
        write_text(self.folder.path / BEST, head + config_text(self.cells[winner.number].config))
        for number in front:
            head = f"# The options of trial {number}: no trial of this search is better in all of {self.metric}.\n"
            write_text(self.folder.path / _best_file(number), head + config_text(self.cells[number].config))

    def remove_best(self, kept: Collection[str] = ()) -> None:
        """Removes the options of trials that were the best of an earlier start, or with other limits."""
        for path in self.folder.path.glob("best*.yaml"):
            if _BEST_FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
