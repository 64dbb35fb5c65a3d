"""What a matrix was asked to be, by a file, a command line or Python, and where each word of it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard.config.resolve import COMMAND_LINE
from modelyard.config.schema import EXCLUSIVE
from modelyard.config.yaml_file import Value, inline, read_sections
from modelyard.errors import Problem, nearest, unknown

_SECTIONS = ("axes", "exclude", "options")


@dataclass(frozen=True)
class Request:
    """What was asked for, before it is checked.

    Args:
        axes: for each option that varies, its values.
        exclude: combinations to leave out.
        options: options that all cells have.
        source: where this was said, for error messages.
        pick_up_files: whether ./project.yaml counts, as for a run from the command line.
        places: where single words stand, if that is known better: options, sections, ``exclude 0`` and so on.
        problems: what is wrong with it already; it is told with everything else.
    """

    axes: Mapping[str, Sequence[Any]]
    exclude: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = COMMAND_LINE
    pick_up_files: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[Problem] = ()

    def where(self, word: str) -> str:
        """Where ``word`` stands."""
        return self.places.get(word, self.source)


def read_request(path: Path, more: Request) -> Request:
    """The matrix that a YAML file asks for; axes and options of ``more`` take the place of the file's.

    What is wrong with the file is in the ``problems`` of the result, which has whatever could be read all the same.
    """
    problems: list[Problem] = []
    found = read_sections(path, problems)
    for key in [key for key in found if key not in _SECTIONS]:
        problems.append(Problem(found[key].where, key, unknown("section", key, _SECTIONS)))
        near = nearest(key, _SECTIONS, 1)
        if near:  # what stands in it is looked at all the same
            found.setdefault(near[0], found[key])
    axes, options = (_options(found, section, problems) for section in ("axes", "options"))
    for key, value in axes.items():
        if not isinstance(value.value, list):
            problems.append(Problem(value.where, key, f"must be a list of values, got {inline(value.value)}."))
            axes[key] = Value([value.value], value.where)
    for pair in EXCLUSIVE:
        if set(pair) & set(more.options):
            options = {key: value for key, value in options.items() if key not in pair}
    exclude = _exclusions(found, problems)
    places = {"axes": str(path), "exclude": str(path)}
    places |= {key: value.where for key, value in {**found, **options, **axes}.items()}
    places |= {f"exclude {number}": value.where for number, value in enumerate(exclude)}
    places |= dict.fromkeys((*more.options, *more.axes), more.source)
    return Request(
        {**{key: value.value for key, value in axes.items()}, **more.axes},
        [*(value.value for value in exclude), *more.exclude],
        {**{key: value.value for key, value in options.items()}, **more.options},
        f"{path} or {more.source}" if more.options or more.axes else str(path),
        more.pick_up_files,
        places,
        [*more.problems, *problems],
    )


def _options(found: Mapping[str, Value], section: str, problems: list[Problem]) -> dict[str, Value]:
    if section not in found or found[section].value is None:
        return {}
    if isinstance(found[section].value, dict):
        return dict(found[section].value)
    problems.append(Problem(found[section].where, section, "must hold 'option: value' lines."))
    return {}


def _exclusions(found: Mapping[str, Value], problems: list[Problem]) -> list[Value]:
    if "exclude" not in found or found["exclude"].value is None:
        return []
    listed = found["exclude"].value
    right = [value for value in listed if isinstance(value.value, dict) and value.value] if _is_list(listed) else []
    wrong = [value for value in listed if value not in right] if _is_list(listed) else [found["exclude"]]
    for value in wrong:
        problems.append(Problem(value.where, "exclude", "must be a list of combinations of the axes."))
    return [Value({str(key).replace("-", "_"): one for key, one in v.value.items()}, v.where) for v in right]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
