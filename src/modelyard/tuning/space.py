"""The space of a search: which options vary, between which values, and under which conditions.

learning_rate=log(1e-4, 1), weight_decay=[0, 1e-4], model=[mlp, simple_cnn], hidden=int(32, 256) if model=mlp
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from modelyard.config.calls import Call, parse_list, split_list
from modelyard.config.yaml_file import LimitedLoader, Value, inline, read_sections
from modelyard.errors import ConfigError, Problem, unknown

SPACE, OPTIONS = "space", "options"
_FUNCTIONS = {"uniform": (False, False), "log": (False, True), "int": (True, False), "logint": (True, True)}
"""Names of ranges: whether they are of whole numbers, and whether on a logarithmic scale."""
_FORMS = "[a, b, c], uniform(low, high), log(low, high), int(low, high) or logint(low, high)"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*")
_CONDITION = re.compile(r"^(.*\S)\s+if\s+([\w.-]+)\s*=\s*(.+)$", re.DOTALL)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    step: float | None = None
    is_int: bool = False
    is_log: bool = False

    def contains(self, value: Any) -> bool:
        """Returns whether a value is in the range, on its grid if it has steps."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.is_int and value != int(value):
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Returns whether it is one of the values."""
        return text_of(value) in self.texts

    @cached_property
    def texts(self) -> list[str]:
        """The values as text: Optuna has no lists as values."""
        return [inline(value) for value in self.values]


@dataclass(frozen=True)
class Parameter:
    """An option that varies.

    Args:
        name: the option; ``augment.cutout.size`` is an argument of one of the names in a list.
        domain: its values.
        text: as the user wrote it.
        condition: another parameter, and its values with which this one exists.
    """

    name: str
    domain: Range | Choice
    text: str
    condition: tuple[str, tuple[Any, ...]] | None = None

    def exists(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the parameter exists beside the ``values`` of others."""
        if self.condition is None:
            return True
        other, wanted = self.condition
        return other in values and text_of(values[other]) in map(text_of, wanted)


Space = dict[str, Parameter]


_TEXTS: dict[str, str] = {}
_MOST_TEXTS = 10_000


def text_of(value: Any) -> str:
    """Returns a value as text. Texts are kept: making one takes longer than all else that is done with a value."""
    key = f"{type(value).__name__} {value!r}"
    text = _TEXTS.get(key)
    if text is None:
        if len(_TEXTS) > _MOST_TEXTS:
            _TEXTS.clear()
        text = _TEXTS[key] = inline(value)
    return text


def read_space(given: str | Mapping[str, Any], source: str) -> tuple[Space, dict[str, Value]]:
    """Returns a space, and options of all trials.

    Args:
        given: as text, the path of a YAML file with ``space`` and ``options``, or a dictionary from Python.
        source: where it comes from, for errors.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[Problem] = []
    options: dict[str, Value] = {}
    if isinstance(given, Mapping):
        parts = {str(key): Value(value, source) for key, value in given.items()}
    elif str(given).strip().endswith((".yaml", ".yml")):
        parts, options = _read_file(str(given).strip(), problems)
    else:
        parts = _split(given, source, problems)
    space: Space = {}
    for name, value in parts.items():
        try:
            name = name.replace("-", "_") if "." not in name else name
            if not _NAME.fullmatch(name):
                raise ValueError("is not the name of an option.")
            if name in ("plugins", "cache_dir"):
                raise ValueError("can't vary. Give it beside the space.")
            space[name] = parse_parameter(name, value.value)
        except ValueError as error:
            problems.append(Problem(value.where, name, str(error)))
    if not space and not problems:
        problems.append(Problem(source, SPACE, f"is empty. Give options with their values: learning_rate={_FORMS}."))
    problems += [] if problems else _check_conditions(space, source)
    if problems:
        raise ConfigError(problems)
    return _in_order(space), options


def _read_file(path: str, problems: list[Problem]) -> tuple[dict[str, Value], dict[str, Value]]:
    found = read_sections(path, problems)
    for key in [key for key in found if key not in (SPACE, OPTIONS)]:
        problems.append(Problem(found[key].where, key, unknown("section", key, (SPACE, OPTIONS))))
    sections: list[dict[str, Value]] = []
    for key in (SPACE, OPTIONS):
        value = found[key].value if key in found else None
        if value is not None and not isinstance(value, dict):
            problems.append(Problem(found[key].where, key, "must hold 'option: values' lines."))
        sections.append(dict(value) if isinstance(value, dict) else {})
    return sections[0], sections[1]


def _split(text: str, source: str, problems: list[Problem]) -> dict[str, Value]:
    parts: dict[str, Value] = {}
    for part in split_list(text):
        name, equals, values = part.partition("=")
        if not equals:
            problems.append(
                Problem(source, SPACE, f"{part!r} is not option=values, such as learning_rate=log(1e-4, 1).")
            )
        elif name.strip() in parts:
            problems.append(Problem(source, name.strip(), "is in the space twice."))
        else:
            parts[name.strip()] = Value(values.strip(), source)
    return parts


def parse_parameter(name: str, given: Any) -> Parameter:
    """Parses the values of an option.

    Raises:
        ValueError: if they are no values.
    """
    if isinstance(given, Value):
        given = given.value
    if isinstance(given, list | tuple):
        values = [one.value if isinstance(one, Value) else one for one in given]
        return Parameter(name, _choice(values), inline(values))
    text = str(given).strip()
    match = _CONDITION.match(text)
    if match is not None:
        wanted = match[3].strip()
        values = [parse_value(one) for one in parse_list(wanted)] if wanted.startswith("[") else [parse_value(wanted)]
        return replace(parse_parameter(name, match[1]), text=text, condition=(match[2], tuple(values)))
    if text.startswith("[") and text.endswith("]"):
        return Parameter(name, _choice([parse_value(one) for one in split_list(text[1:-1])]), text)
    match = re.fullmatch(r"(\w+)\s*\((.*)\)", text, re.DOTALL)
    if match is None or match[1] not in _FUNCTIONS:
        raise ValueError(f"must be {_FORMS}, got {text!r}.")
    return Parameter(name, _range(match[1], split_list(match[2]), text), text)


def parse_value(text: str) -> Any:
    """Parses one value.

    Raises:
        ValueError: if it is none.
    """
    try:
        value = yaml.load(text, Loader=LimitedLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not a valid value.") from error
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 1e-4 as text
    return value


def _choice(values: list[Any]) -> Choice:
    if not values:
        raise ValueError("has no values, such as [a, b].")
    texts = [inline(value) for value in values]
    for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
        raise ValueError(f"lists {text} twice.")
    return Choice(tuple(values))


def _range(function: str, arguments: list[str], text: str) -> Range:
    is_int, is_log = _FUNCTIONS[function]
    bounds, step = [], None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        number = parse_value(value if equals else argument)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"must be {function}(low, high) of numbers, got {text!r}.")
        if equals and name.strip() != "step":
            raise ValueError(f"takes a low and a high number and step=…, got {text!r}.")
        if equals:
            step = number
        else:
            bounds.append(number)
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ValueError(f"must be {function}(low, high) with low < high, got {text!r}.")
    if step is not None and (is_log or not 0 < step <= bounds[1] - bounds[0]):
        raise ValueError(f"has a step that does not fit, got {text!r}.")
    if is_log and bounds[0] <= 0:
        raise ValueError(f"is on a logarithmic scale, which begins above 0, got {text!r}.")
    if is_int:
        if any(number != int(number) for number in (*bounds, step or 1)):
            raise ValueError(f"must be of whole numbers, got {text!r}.")
        return Range(int(bounds[0]), int(bounds[1]), None if step is None else int(step), True, is_log)
    return Range(float(bounds[0]), float(bounds[1]), step, False, is_log)


def _check_conditions(space: Space, source: str) -> list[Problem]:
    problems = []
    for name, parameter in space.items():
        if parameter.condition is None:
            continue
        other, wanted = parameter.condition
        if other not in space:
            message = unknown("parameter of the space", other, space)
            problems.append(Problem(source, name, f"depends on {other}, but {message}"))
            continue
        for value in wanted:
            if not space[other].domain.contains(value):
                problems.append(Problem(source, name, f"depends on {other}={inline(value)}, which {other} never has."))
        seen, at = {name}, other
        while at in space and space[at].condition is not None and at not in seen:
            seen.add(at)
            at = space[at].condition[0]  # type: ignore[index] # checked above
        if at in seen and at == name:
            problems.append(Problem(source, name, "depends on itself."))
    return problems


def _in_order(space: Space) -> Space:
    """Returns the parameters so that each comes after the one that it depends on."""
    ordered: Space = {}
    while len(ordered) < len(space):
        for name, parameter in space.items():
            if name not in ordered and (parameter.condition is None or parameter.condition[0] in ordered):
                ordered[name] = parameter
    return ordered


def options_of(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a trial: ``values`` for the parameters; ``augment.cutout.size`` changes an argument.

    Raises:
        ValueError: if there is no such name in the list.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        option, *rest = name.split(".")
        if not rest:
            found[option] = value
            continue
        if len(rest) != 2:
            raise ValueError(f"{name} must be an option, or option.name.argument, such as augment.cutout.size.")
        calls = [Call.parse(one) for one in parse_list(found.get(option, options.get(option)))]
        if not any(call.name == rest[0] for call in calls):
            raise ValueError(f"{name}: {rest[0]} is not in {option}. Give --{option} with {rest[0]} beside the space.")
        found[option] = [
            str(Call(call.name, {**call.arguments, rest[1]: value}) if call.name == rest[0] else call) for call in calls
        ]
    return found
