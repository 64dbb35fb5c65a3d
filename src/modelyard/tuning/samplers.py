"""Optuna, as far as a search needs it: a study is made anew for each proposal, from the trials that are known.

The proposal of trial k depends on the seed of the search, on k and on the results that are known to it, and on nothing
that is kept in memory. A search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from modelyard.config.yaml_file import inline
from modelyard.data.draws import fold
from modelyard.errors import UserError, unknown
from modelyard.tuning.space import Choice, Parameter, Space

DONE, FAILED, RUNNING = "done", "failed", "running"
_STATES = {DONE: "COMPLETE", FAILED: "FAIL", RUNNING: "RUNNING"}
_ATTEMPTS = 20
"""How often another proposal is asked for, if one is that of an earlier trial."""
_MOST = 100_000
"""How many combinations of values are looked through for one that is left."""
_PACKAGES = {"cmaes": ("cmaes",), "gp": ("torch", "scipy"), "qmc": ("scipy",)}
"""Packages that samplers import when they first need them, which may be after many trials."""
JOURNAL = "optuna.log"


@dataclass(frozen=True)
class Known:
    """A trial as the sampler knows it.

    Args:
        number: its number.
        values: the values of its parameters.
        state: done, failed or running.
        score: its score, if it is done.
        remembered: what the sampler keeps with the trial, and with the whole search.
    """

    number: int
    values: Mapping[str, Any]
    state: str
    score: float | None = None
    remembered: Mapping[str, Any] = field(default_factory=dict)


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


def make_sampler(name: str, seed: int, space: Space) -> Any:
    """Returns a sampler of Optuna by its name.

    Raises:
        UserError: if there is none, or if it can't be used for this space or here.
    """
    optuna = import_optuna()
    classes = {one.removesuffix("Sampler").lower(): one for one in dir(optuna.samplers) if one.endswith("Sampler")}
    wanted = name.lower().replace("_", "").replace("-", "")
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
        arguments["search_space"] = {one.name: _texts(one) for one in space.values()}
    if wanted == "tpe":
        arguments["constant_liar"] = True  # trials that run beside each other should differ
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
    """Returns the values of trial ``number``, and what the sampler keeps with it.

    None if the space has no other values than those of the known trials.
    """
    optuna = import_optuna()
    taken = {_key(one.values) for one in known}
    usable = [one for one in known if _fits(space, one.values)]
    for attempt in range(_ATTEMPTS):
        study = _study(optuna, make_sampler(sampler, fold(seed, number, attempt) & 0x7FFFFFFF, space), maximize)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in usable:
                study.add_trial(_frozen(optuna, space, one))
                for key, value in one.remembered.get("study", {}).items():
                    study._storage.set_study_system_attr(study._study_id, key, value)
            try:
                trial = study.ask()
                values = _suggested(trial, space)
            except ImportError as error:
                raise UserError(f"the sampler {sampler} needs another package: {error}") from error
        if _key(values) not in taken:
            of_trial = study._storage.get_trial_system_attrs(trial._trial_id)
            of_study = study._storage.get_study_system_attrs(study._study_id)
            remembered = {"trial": dict(of_trial), "study": dict(of_study)}
            return values, {key: value for key, value in remembered.items() if value}
    # The sampler repeats itself, as those do that stay near the best trials. What it leaves out is chosen at random.
    draw = random.Random(fold(seed, number))
    left = [values for values in islice(_combinations(space, draw), _MOST) if _key(values) not in taken]
    return (draw.choice(left), {}) if left else None


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


def _study(optuna: Any, sampler: Any, maximize: bool) -> Any:
    return optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")


def _key(values: Mapping[str, Any]) -> str:
    # Of numbers that differ only in their last bits, Optuna makes both.
    rounded = {name: float(f"{one:.12g}") if isinstance(one, float) else one for name, one in values.items()}
    return json.dumps({name: inline(value) for name, value in rounded.items()}, sort_keys=True)


def _fits(space: Space, values: Mapping[str, Any]) -> bool:
    """Returns whether a trial is one of this space: its limits may have changed since."""
    existing = {name for name, parameter in space.items() if parameter.exists(values)}
    return existing == set(values) and all(space[name].domain.contains(value) for name, value in values.items())


def _suggested(trial: Any, space: Space) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, parameter in space.items():
        if not parameter.exists(values):
            continue
        domain = parameter.domain
        if isinstance(domain, Choice):
            text = trial.suggest_categorical(name, _texts(parameter))
            values[name] = next(value for value in domain.values if inline(value) == text)
        elif domain.is_int:
            step = {} if domain.is_log else {"step": int(domain.step or 1)}
            values[name] = trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.is_log, **step)
        else:
            values[name] = trial.suggest_float(name, domain.low, domain.high, log=domain.is_log, step=domain.step)
    return values


def _texts(parameter: Parameter) -> list[str]:
    """Returns the values of a choice as text: Optuna has no lists as values."""
    assert isinstance(parameter.domain, Choice)
    return [inline(value) for value in parameter.domain.values]


def _frozen(optuna: Any, space: Space, one: Known) -> Any:
    distributions, parameters = {}, {}
    for name, value in one.values.items():
        domain = space[name].domain
        if isinstance(domain, Choice):
            distributions[name] = optuna.distributions.CategoricalDistribution(_texts(space[name]))
            parameters[name] = inline(value)
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
    state = one.state if one.state != DONE or one.score is not None else FAILED
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[_STATES[state]],
        params=parameters,
        distributions=distributions,
        value=one.score if state == DONE else None,
        system_attrs=dict(one.remembered.get("trial", {})),
        user_attrs={"trial": one.number},
    )


def importances(space: Space, known: Sequence[Known], maximize: bool) -> dict[str, float]:
    """Returns how much each parameter matters for the score, by Optuna's PED-ANOVA; trials outside of the space don't.

    Args:
        space: the space.
        known: trials that are done.
        maximize: whether higher scores are better.
    """
    optuna = import_optuna()
    usable = [one for one in known if one.state == DONE and one.score is not None and _fits(space, one.values)]
    study = _study(optuna, make_sampler("random", 0, space), maximize)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is experimental in Optuna
        study.add_trials([_frozen(optuna, space, one) for one in usable])
        best = max(0.1, min(5 / max(len(usable), 1), 0.5))  # it takes some trials to say where the good ones are
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    return {str(name): float(value) for name, value in found.items()}


class Journal:
    """A journal of Optuna with all trials that have ended, for its dashboard. The search never reads it.

    Args:
        path: its file, which is written anew.
        space: the space; trials outside of it are left out.
        maximize: whether higher scores are better.
    """

    def __init__(self, path: Path, space: Space, maximize: bool) -> None:
        self._optuna, self._space, self._added = import_optuna(), space, set[int]()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study = self._optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=path.parent.name,
                direction="maximize" if maximize else "minimize",
            )

    def add(self, known: Sequence[Known]) -> None:
        """Adds the trials that have ended since the last call."""
        for one in known:
            if one.state != RUNNING and one.number not in self._added and _fits(self._space, one.values):
                self._added.add(one.number)
                self._study.add_trial(_frozen(self._optuna, self._space, one))
