"""What a job asks of a cluster: a small YAML file, checked whole before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from modelyard.config.resolve import COMMAND_LINE
from modelyard.config.wording import sentence
from modelyard.config.yaml_file import Value, read_flat
from modelyard.errors import ConfigError, Problem, nearest

_UNITS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}


def _seconds(value: Any) -> int:
    """``1d12h``, ``90m``, or as SLURM writes it: ``1-12:00:00``, ``12:00:00``."""
    hint = "write it as 12h, 90m, 1d12h or '1-12:00:00'"
    if not isinstance(value, str):  # YAML reads 12:00:00 as a number
        raise ValueError(f"{value!r} has no unit; {hint} (with the quotes).")
    text = value.strip().lower()
    parts = re.findall(r"([0-9]{1,6})\s*(min|[dhms])\s*", text)
    clock = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text)
    total = 0
    if clock:
        total = sum(int(part or 0) * unit for part, unit in zip(clock.groups(), (86400, 3600, 60, 1), strict=True))
    elif parts and re.fullmatch(r"(?:[0-9]{1,6}\s*(?:min|[dhms])\s*)+", text):
        total = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if total <= 0:
        raise ValueError(f"{value!r} is no length of time; {hint}.")
    return total


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Seconds = Annotated[int, BeforeValidator(_seconds)]
Word = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9_.,:/@+=-]+$", max_length=500)]
"""Names, paths and URLs: nothing that a shell, YAML or SLURM would read as more than that."""

Memory = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[1-9][0-9]{0,8}(K|M|G|T|Ki|Mi|Gi|Ti)$")]
"""``16G`` or ``16Gi``."""


class Resources(BaseModel):
    """What every target has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: int = Field(0, ge=0, le=64, description="GPUs of each process")
    time: Seconds | None = Field(None, description="how long the job may run, such as 12h")
    max_restarts: int = Field(10, ge=0, le=1000, description="how often crashed processes are started again")


Kind = TypeVar("Kind", bound=Resources)


def read_resources(
    schema: type[Kind], target: str, file: str | Path | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Kind:
    """The resources of a file, over which options take precedence.

    Args:
        schema: what the target knows.
        target: its name, for messages.
        file: a YAML file of ``key: value`` lines, or such values.
        options: what was given beside it; None is not given.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems: list[Problem] = []
    values: dict[str, Value] = {}
    if isinstance(file, Mapping):
        values = {key: Value(value, "resources") for key, value in file.items()}
    elif file is not None:
        values = read_flat(Path(file), problems)
    values |= {key: Value(value, COMMAND_LINE) for key, value in options.items() if value is not None}
    known = schema.model_fields
    for key, value in values.items():
        if key not in known:
            near = nearest(key, known)
            hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(known))}."
            problems.append(Problem(value.where, key, f"{target} has no such resource. {hint}"))
    plain = {key: value.value for key, value in values.items() if key in known and value.value is not None}
    try:
        resources = schema(**plain)
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else ""
            where = values[key].where if key in values else f"resources of {target}"
            text = "must be given, as an option or in --resources FILE." if detail["type"] == "missing" else None
            problems.append(Problem(where, key, text or _sentence(detail, plain.get(key))))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return resources


def _sentence(detail: Mapping[str, Any], given: Any) -> str:
    if detail["type"] == "string_pattern_mismatch":
        memory = "Ki" in detail["ctx"]["pattern"]
        return f"{given!r} {'is no size such as 16G' if memory else 'has characters that do not belong there'}."
    return sentence(detail, given)
