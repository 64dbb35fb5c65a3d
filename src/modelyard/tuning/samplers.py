"""Optuna, as far as a search needs it: a study is made anew for each proposal, from the trials that are known.

The proposal of trial k depends on the seed of the search, on k and on the results that are known to it, and on nothing
that is kept in memory. A search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from modelyard.data.draws import fold
from modelyard.errors import UserError, unknown
from modelyard.tuning.space import Choice, Space, text_of

DONE, FAILED, RUNNING, PAUSED = "done", "failed", "running", "paused"
_STATES = {DONE: "COMPLETE", FAILED: "FAIL", RUNNING: "RUNNING", PAUSED: "PRUNED"}
_LARGEST = 1e9
"""A violation that is not finite: a cost that is not known."""
_ATTEMPTS = 20
"""How often another proposal is asked for, if one is that of an earlier trial."""
_MOST = 100_000
"""How many combinations of values are looked through for one that is left."""
_PACKAGES = {"cmaes": ("cmaes",), "gp": ("torch", "scipy"), "qmc": ("scipy",)}
"""Packages that samplers import when they first need them, which may be after many trials."""
_PICKLING = ("cmaes",)
"""Samplers whose state Optuna keeps with the trials as a pickle."""
_CONSTRAINTS = "constraints"
"""The attribute of a trial in which Optuna looks for violations."""
JOURNAL = "optuna.log"


log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Known:
    """A trial as the sampler knows it.

    Args:
        number: its number.
        values: the values of its parameters.
        state: done, paused, failed or running.
        score: its score, if it is done or paused.
        remembered: what the sampler keeps with the trial, and with the whole search.
        others: its scores by further metrics.
        curve: its scores at the rungs of the search, by thousandths of the run.
        violations: by how much it violates each constraint; 0 or less if it does not.
        started: when it was first started, as in its manifest.
        seconds: how long it was trained.
        reason: why it failed.
    """

    number: int
    values: Mapping[str, Any]
    state: str
    score: float | None = None
    remembered: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[float, ...] = ()
    curve: Mapping[int, float] = field(default_factory=dict)
    violations: tuple[float, ...] = ()
    started: str = ""
    seconds: float | None = None
    reason: str = ""


def import_optuna() -> Any:
    """Imports Optuna, without its log: it warns of proposals that are not used, and of options that do not exist here.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError("a search needs Optuna. Install it: pip install 'modelyard[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def sampler_names() -> list[str]:
    """Returns the names of Optuna's samplers."""
    samplers = import_optuna().samplers
    names = [name.removesuffix("Sampler").lower() for name in dir(samplers) if name.endswith("Sampler")]
    return sorted(set(names) - {"base", "basega", "partialfixed"})


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def keeps_pickles(sampler: str) -> bool:
    """Returns whether a sampler keeps a pickle with the trials, which is a program for who reads it."""
    return _plain(sampler) in _PICKLING


def make_sampler(name: str, seed: int, space: Space, constrained: bool = False) -> Any:
    """Returns a sampler of Optuna by its name.

    Args:
        name: its name.
        seed: its seed.
        space: the space of the search.
        constrained: whether trials have constraints.

    Raises:
        UserError: if there is none, or if it can't be used for this space or here.
    """
    optuna = import_optuna()
    classes = {one.removesuffix("Sampler").lower(): one for one in dir(optuna.samplers) if one.endswith("Sampler")}
    wanted = _plain(name)
    if wanted not in sampler_names():
        raise UserError(unknown("sampler", name, sampler_names()))
    missing = [package for package in _PACKAGES.get(wanted, ()) if find_spec(package) is None]
    if missing:
        raise UserError(
            f"the sampler {name} needs {' and '.join(missing)}. Install what is missing: pip install "
            f"{' '.join(missing)}. Or choose another sampler."
        )
    target = getattr(optuna.samplers, classes[wanted])
    arguments: dict[str, Any] = {"seed": seed}
    if wanted == "grid":
        ranges = [one.name for one in space.values() if not isinstance(one.domain, Choice) or one.condition]
        if ranges:
            raise UserError(
                f"the sampler grid needs a list of values for every parameter, without conditions; see {ranges[0]}."
            )
        arguments["search_space"] = {one.name: one.domain.texts for one in space.values()}  # type: ignore[union-attr]
    if wanted == "tpe":
        arguments["constant_liar"] = True  # trials that run beside each other should differ
    if constrained:  # an older Optuna asks for it; the violations are with the trials
        arguments["constraints_func"] = lambda trial: trial.system_attrs[_CONSTRAINTS]
    known = inspect.signature(target).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is experimental in Optuna
        try:
            return target(**{key: value for key, value in arguments.items() if key in known})
        except ImportError as error:
            raise UserError(f"the sampler {name} needs another package: {error}") from error


def propose(
    space: Space, known: Sequence[Known], number: int, sampler: str, seed: int, maximize: bool
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Proposes one trial, as `Proposer.propose` does."""
    return Proposer(space, sampler, seed, (maximize,)).propose(known, number)


class Proposer:
    """Proposes trials. What it keeps in memory saves time only.

    Args:
        space: the space.
        sampler: the name of the sampler.
        seed: the seed of the search.
        maximize: for each metric, whether higher is better.
        constrained: whether trials have constraints.
    """

    def __init__(
        self, space: Space, sampler: str, seed: int, maximize: Sequence[bool], constrained: bool = False
    ) -> None:
        self._optuna = import_optuna()
        self._space, self._sampler, self._seed = space, sampler, seed
        self._maximize, self._constrained = tuple(maximize), constrained
        self._keys: dict[int, tuple[Known, str]] = {}
        self._trials: dict[int, tuple[Known, Any]] = {}

    def propose(
        self, known: Sequence[Known], number: int, given: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Returns the values of trial ``number``, and what the sampler keeps with it.

        None if the space has no other values than those of the known trials.

        Args:
            known: the known trials.
            number: the number of the new one.
            given: values that it has in any case.
        """
        taken = {self._key(one) for one in known}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = make_study(self._optuna, self._make_sampler(number, 0), self._maximize)
            for one in known:
                self._add(study, one)
            for attempt in range(1 if given else _ATTEMPTS):
                study.sampler = self._make_sampler(number, attempt)
                try:
                    trial = study.ask()
                    values = _suggested(trial, self._space, given or {})
                except ImportError as error:
                    raise UserError(f"the sampler {self._sampler} needs another package: {error}") from error
                if given or _key(values) not in taken:
                    of_trial = study._storage.get_trial_system_attrs(trial._trial_id)
                    of_study = study._storage.get_study_system_attrs(study._study_id)
                    remembered = {"trial": dict(of_trial), "study": dict(of_study)}
                    return values, {key: value for key, value in remembered.items() if value}
        # The sampler repeats itself, as those do that stay near the best trials. What it leaves out is drawn.
        draw = random.Random(fold(self._seed, number))
        left = [values for values in islice(_combinations(self._space, draw), _MOST) if _key(values) not in taken]
        return (draw.choice(left), {}) if left else None

    def _make_sampler(self, number: int, attempt: int) -> Any:
        seed = fold(self._seed, number, attempt) & 0x7FFFFFFF
        return make_sampler(self._sampler, seed, self._space, self._constrained)

    def _add(self, study: Any, one: Known) -> None:
        kept = self._trials.get(one.number)
        if kept is None or kept[0] is not one:
            made = frozen(self._optuna, self._space, one) if fits(self._space, one.values) else None
            kept = self._trials[one.number] = one, made
        if kept[1] is None:
            return
        study._storage.create_new_trial(study._study_id, template_trial=kept[1])
        for key, value in one.remembered.get("study", {}).items():
            study._storage.set_study_system_attr(study._study_id, key, value)

    def _key(self, one: Known) -> str:
        kept = self._keys.get(one.number)
        if kept is None or kept[0] is not one:
            kept = self._keys[one.number] = one, _key(one.values)
        return kept[1]


def _combinations(
    space: Space, draw: random.Random, known: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the values that a trial can have; of a range without steps, one that is drawn."""
    known = known or {}
    rest = {name: parameter for name, parameter in space.items() if name not in known}
    name = next((name for name, parameter in rest.items() if parameter.exists(known)), None)
    if name is None:
        yield dict(known)
        return
    domain = space[name].domain
    values: Sequence[Any]
    if isinstance(domain, Choice):
        values = domain.values
    elif domain.is_int:
        values = range(int(domain.low), int(domain.high) + 1, int(domain.step or 1))
    elif domain.step:
        values = [
            number * domain.step + domain.low
            for number in range(int((domain.high - domain.low) / domain.step + 1 + 1e-9))
        ]
    elif domain.is_log:
        value = math.exp(draw.uniform(math.log(domain.low), math.log(domain.high)))
        values = [min(max(value, domain.low), domain.high)]  # the logarithm rounds
    else:
        values = [draw.uniform(domain.low, domain.high)]
    for value in values:
        yield from _combinations(space, draw, {**known, name: value})


def make_study(optuna: Any, sampler: Any, maximize: Sequence[bool], **more: Any) -> Any:
    """Makes a study of Optuna."""
    directions = ["maximize" if one else "minimize" for one in maximize]
    return optuna.create_study(sampler=sampler, directions=directions, **more)


def _key(values: Mapping[str, Any]) -> str:
    # Of numbers that differ only in their last bits, Optuna makes both.
    texts = {name: f"{one:.12g}" if isinstance(one, float) else text_of(one) for name, one in values.items()}
    return json.dumps(texts, sort_keys=True)


def fits(space: Space, values: Mapping[str, Any]) -> bool:
    """Returns whether a trial is one of this space: its limits may have changed since."""
    existing = {name for name, parameter in space.items() if parameter.exists(values)}
    return existing == set(values) and all(space[name].domain.contains(value) for name, value in values.items())


def _suggested(trial: Any, space: Space, given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, parameter in space.items():
        if not parameter.exists(values):
            continue
        domain = parameter.domain
        if name in given:
            values[name] = given[name]
        elif isinstance(domain, Choice):
            text = trial.suggest_categorical(name, domain.texts)
            values[name] = domain.values[domain.texts.index(text)]
        elif domain.is_int:
            step = {} if domain.is_log else {"step": int(domain.step or 1)}
            values[name] = trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.is_log, **step)
        else:
            values[name] = trial.suggest_float(name, domain.low, domain.high, log=domain.is_log, step=domain.step)
    return values


def frozen(optuna: Any, space: Space, one: Known) -> Any:
    """Returns a trial as Optuna has it."""
    distributions, parameters = {}, {}
    for name, value in one.values.items():
        domain = space[name].domain
        if isinstance(domain, Choice):
            distributions[name] = optuna.distributions.CategoricalDistribution(domain.texts)
            parameters[name] = text_of(value)
        elif domain.is_int:
            steps = int(domain.step or 1)
            distributions[name] = optuna.distributions.IntDistribution(
                int(domain.low), int(domain.high), log=domain.is_log, step=steps
            )
            parameters[name] = value
        else:
            distributions[name] = optuna.distributions.FloatDistribution(
                domain.low, domain.high, log=domain.is_log, step=domain.step
            )
            parameters[name] = value
    scores = None if one.score is None else [one.score, *one.others]
    state = one.state
    if state == PAUSED and one.others:  # Optuna prunes no trials of several metrics
        state = DONE
    if state == DONE and scores is None:
        state = FAILED
    attributes = dict(one.remembered.get("trial", {}))
    if one.violations:
        attributes[_CONSTRAINTS] = [min(violation, _LARGEST) for violation in one.violations]
    trial = optuna.trial.create_trial(
        state=optuna.trial.TrialState[_STATES[state]],
        params=parameters,
        distributions=distributions,
        values=scores if state == DONE else None,
        intermediate_values={} if one.others else dict(one.curve),
        system_attrs=attributes,
        user_attrs={"trial": one.number, **({"reason": one.reason} if one.reason else {})},
    )
    with contextlib.suppress(ValueError, OverflowError):  # without times, those of now stay
        began = datetime.fromisoformat(one.started).astimezone().replace(tzinfo=None)
        if trial.datetime_complete is not None:
            trial.datetime_start, trial.datetime_complete = began, began + timedelta(seconds=one.seconds or 0)
    return trial


def importances(space: Space, known: Sequence[Known], maximize: bool) -> dict[str, float]:
    """Returns how much each parameter matters for the score, by Optuna's PED-ANOVA; trials outside of the space don't.

    Args:
        space: the space.
        known: trials that are done.
        maximize: whether higher scores are better.
    """
    optuna = import_optuna()
    usable = [one for one in known if one.state == DONE and one.score is not None and fits(space, one.values)]
    study = make_study(optuna, make_sampler("random", 0, space), [maximize])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is experimental in Optuna
        study.add_trials([frozen(optuna, space, one) for one in usable])
        best = max(0.1, min(5 / max(len(usable), 1), 0.5))  # it takes some trials to say where the good ones are
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    return {str(name): float(value) for name, value in found.items()}


class Journal:
    """A journal of Optuna with all trials that have ended, for its dashboard. The search never reads their results.

    Args:
        path: its file. It is written anew if it has other trials, or trials of another space.
        space: the space; trials outside of it are left out.
        maximize: for each metric, whether higher is better.
        metrics: the names of the metrics.
    """

    def __init__(self, path: Path, space: Space, maximize: Sequence[bool], metrics: Sequence[str]) -> None:
        self._optuna, self._space, self._path = import_optuna(), space, path
        self._maximize, self._metrics = tuple(maximize), list(metrics)
        self._added: dict[int, Any] = {}
        self._study: Any = None

    def add(self, known: Sequence[Known], ended: bool = False) -> None:
        """Adds the trials that have ended since the last call; those that are paused, at the end of the search."""
        wanted = (DONE, FAILED, PAUSED) if ended else (DONE, FAILED)
        new = [one for one in known if one.state in wanted and one.number not in self._added]
        trials = [(one, frozen(self._optuna, self._space, one)) for one in new if fits(self._space, one.values)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._study is None:
                self._open({one.number: trial for one, trial in trials})
            for one, trial in trials:
                if one.number not in self._added:
                    self._added[one.number] = trial
                    self._study.add_trial(trial)

    def _open(self, trials: Mapping[int, Any]) -> None:
        """Opens the journal, or begins a new one."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        name = self._path.parent.name
        try:
            self._study = self._optuna.load_study(
                study_name=name, storage=JournalStorage(JournalFileBackend(str(self._path)))
            )
            found = {trial.user_attrs.get("trial"): trial for trial in self._study.trials}
            same = self._study.metric_names == self._metrics and self._study.directions == self._directions()
            if same and all(_is_same(trial, trials.get(number)) for number, trial in found.items()):
                self._added = found
                return
        except Exception:  # of another version of Optuna, cut off, or missing
            log.debug("a new %s is written", self._path)
        self._path.unlink(missing_ok=True)
        storage = JournalStorage(JournalFileBackend(str(self._path)))
        self._study = make_study(self._optuna, None, self._maximize, storage=storage, study_name=name)
        self._study.set_metric_names(self._metrics)

    def _directions(self) -> list[Any]:
        direction = self._optuna.study.StudyDirection
        return [direction.MAXIMIZE if one else direction.MINIMIZE for one in self._maximize]


def _is_same(one: Any, other: Any) -> bool:
    fields = ("state", "values", "params", "distributions", "intermediate_values")
    return other is not None and all(getattr(one, name) == getattr(other, name) for name in fields)
