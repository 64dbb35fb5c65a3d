"""The file of a search: what varies, the options of all trials, and what is looked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelyard.comparison.matrix import SEARCH
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.config.calls import parse_list
from modelyard.config.named_files import SAVED_MODEL_PATH
from modelyard.config.trust import is_own_file, trust_cache, trust_plugins, trust_saved_model
from modelyard.config.yaml_file import Value, dump, inline, read_sections
from modelyard.errors import ConfigError, Problem, nearest
from modelyard.tuning.halving import Halving
from modelyard.tuning.objectives import AUTO, Constraint, parse_constraints, parse_metrics
from modelyard.tuning.space import OPTIONS, SPACE, Choice, Space, parse_value, read_space

_VERSION, _VERSION_KEY = 1, "search_version"
KINDS = {str: "text", int: "a whole number", dict: "'option: values' lines"}
_FILES = {"recipe", "config_file", "hyperparameter_file"}
"""Options that name files with options, plugins among them."""
_OPTIONAL = {"constraint": str, "halving": int, "first_rung": str, "brackets": int}
"""Entries of the file that a search may do without, in the order of `Request`."""
_BUDGET = ("trials", "total_steps")
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Request:
    """The arguments of a search from the command line or Python; None keeps the value of the search, or the default."""

    metric: str | None = None
    sampler: str | None = None
    search_seed: int | None = None
    constraint: str | None = None
    halving: int | None = None
    first_rung: str | None = None
    brackets: int | None = None


@dataclass(frozen=True)
class Search:
    """A search: a space, options of all trials, what it looks for, and how.

    Args:
        space: the options that vary.
        options: the options of all trials.
        metric: one metric or several, separated by commas.
        sampler: the name of the sampler.
        seed: the seed of the proposals.
        constraint: limits of metrics and costs, separated by commas.
        halving: the rungs; None trains every trial to its end.
        trials: the last budget: how many trials. A start that is given no budget has this one.
        total_steps: and how many steps of all trials together.
        names_own_files: whether the user has named the files with options, such as a recipe; else they may be those of
            a stranger.
    """

    space: Space
    options: dict[str, Any]
    metric: str = AUTO
    sampler: str = "tpe"
    seed: int = 0
    constraint: str = ""
    halving: Halving | None = None
    trials: int | None = None
    total_steps: int | None = None
    names_own_files: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return parse_metrics(self.metric)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The limits."""
        return parse_constraints(self.constraint)

    def text(self) -> str:
        """Returns the content of its file."""
        values = {_VERSION_KEY: _VERSION, "metric": self.metric, "sampler": self.sampler, "seed": self.seed}
        values |= {"constraint": self.constraint} if self.constraint else {}
        if self.halving is not None:
            values |= {"halving": self.halving.factor, "brackets": self.halving.brackets}
            values |= {"first_rung": self.halving.first} if self.halving.first else {}
        budget = {"trials": self.trials, "total_steps": self.total_steps}
        values |= {key: number for key, number in budget.items() if number is not None}
        values |= {
            SPACE: {name: parameter.text for name, parameter in self.space.items()},
            OPTIONS: self.options,
        }
        return f"# What this search varies. Its trials are the cells of matrix.yaml.\n{dump(values)}"


def find_search(
    folder: MatrixFolder,
    space: str | Path | Mapping[str, Any] | None,
    given: dict[str, Any],
    request: Request,
    source: str,
    trust: bool,
) -> Search:
    """Returns what to search: what is given, or what is in the folder.

    The space, the sampler, the metric and the constraint may change. The options, the seed and the rungs may not.

    Raises:
        ConfigError: with every problem.
        UntrustedPluginError: for plugins that a file of somebody else names, without ``trust``.
    """
    before = read_search(folder)
    named: set[str] = set()
    """The options that only files of somebody else have given."""
    if before is not None:
        path = folder.path / SEARCH
        named |= {*before.options, *(before.space if space is None else ())}
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
            named |= set() if is_own_file(file) else {*in_file, *found}
            _check_trust(
                {key: _plain(value) for key, value in in_file.items()}, found, file, is_own_file(file), given, trust
            )
    options = {**{key: _plain(value) for key, value in in_file.items()}, **given}
    search = _asked(before or Search(found, options), request, source)
    search = replace(search, names_own_files=not named & _FILES - {*given})
    if before is None:
        return search
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
    fixed: list[tuple[str, Any, Any]] = [("search_seed", search.seed, before.seed)]
    for key, attribute in (("halving", "factor"), ("first_rung", "first"), ("brackets", "brackets")):
        fixed.append((key, getattr(search.halving, attribute, None), getattr(before.halving, attribute, None)))
    for key, new, old in fixed:
        if new != old:
            problems.append(
                Problem(source, key, f"is {new} here, but {'not used' if old in (None, '') else old} in this search.")
            )
    if problems:
        error = ConfigError(problems)
        error.add_hint("The space of a search may change, its options may not. Choose another --output for others.")
        raise error
    for name in before.space:
        if name not in found:
            log.warning(
                "%s is not in the space any more: new trials have its default. To fix a value: --space '%s=[VALUE], …'",
                name,
                name,
            )
    return replace(search, space=found, options=before.options)


def _asked(search: Search, request: Request, source: str) -> Search:
    """Returns the search with what is asked for.

    Raises:
        ConfigError: with every problem.
    """
    problems = []
    for key, parse, text in (
        ("metric", parse_metrics, request.metric),
        ("constraint", parse_constraints, request.constraint),
    ):
        try:
            if text is not None:
                parse(text)
        except ValueError as error:
            problems.append(Problem(source, key, str(error)))
    halving = search.halving
    rungs = {"factor": request.halving, "first": request.first_rung, "brackets": request.brackets}
    asked: dict[str, Any] = {key: value for key, value in rungs.items() if value is not None}
    if asked and halving is None and "factor" not in asked:
        named = "first_rung" if "first" in asked else "brackets"
        problems.append(Problem(source, named, "has no effect without halving. Give --halving 3."))
    elif asked:
        halving = replace(halving, **asked) if halving is not None else Halving(**asked)
        try:
            _ = halving.first_rung
        except ValueError as error:
            problems.append(Problem(source, "first_rung", str(error)))
    if problems:
        raise ConfigError(problems)
    return replace(
        search,
        metric=search.metric if request.metric is None else request.metric,
        sampler=search.sampler if request.sampler is None else request.sampler,
        seed=search.seed if request.search_seed is None else request.search_seed,
        constraint=search.constraint if request.constraint is None else request.constraint,
        halving=halving,
    )


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


def read_search(folder: MatrixFolder) -> Search | None:
    """Reads the file of a search; None if there is none.

    Raises:
        ConfigError: if it is damaged.
    """
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
    types |= {key: kind for key, kind in (_OPTIONAL | dict.fromkeys(_BUDGET, int)).items() if key in plain}
    for key, kind in types.items():
        if not isinstance(plain.get(key), kind) or isinstance(plain[key], bool):
            message = f"must be {KINDS[kind]}, got {inline(plain.get(key))}. The file is damaged; restore it."
            problems.append(Problem(found[key].where if key in found else str(path), key, message))
    if problems:
        raise ConfigError(problems)
    space = read_space(plain[SPACE], str(path))[0]
    request = Request(
        plain["metric"],
        plain["sampler"],
        plain["seed"],
        *(plain.get(key) for key in _OPTIONAL),
    )
    check_halving(request, str(path))
    budget = {key: max(plain[key], 1) for key in _BUDGET if key in plain}
    return _asked(Search(space, plain[OPTIONS], **budget), request, str(path))


def check_halving(request: Request, source: str) -> None:
    """Raises `ConfigError` if the numbers of the rungs are out of range."""
    problems = []
    for key, number, most in (("halving", request.halving, 100), ("brackets", request.brackets, 10)):
        least = 2 if key == "halving" else 1
        if number is not None and not least <= number <= most:
            problems.append(Problem(source, key, f"must be {least} to {most}, got {number}."))
    if problems:
        raise ConfigError(problems)


def _plain(value: Any) -> Any:
    """Returns a value without the lines that it was read from."""
    value = value.value if isinstance(value, Value) else value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
