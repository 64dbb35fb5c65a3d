"""Templates with ``@NAME@`` where a value goes: the shell's own ``$NAME`` stays what it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from modelyard.config.yaml_file import MOST_BYTES
from modelyard.errors import ConfigError, Problem, unknown

_PLACE = re.compile(r"@([A-Z][A-Z0-9_]*)@")
_LINES = re.compile(r"(?! )(?:[ -~]*[!-~]\n)+(?:[ -~]*[!-~])?")


class _Given(str):
    """A text that was put in: always quoted, since other readers of YAML know other numbers (0o17) than ours."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if _LINES.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)


_Dumper.add_representer(_Given, _represent)


def shipped(name: str) -> str:
    """A template that comes with the package."""
    return (resources.files("modelyard") / "launcher" / "templates" / name).read_text(encoding="utf-8")


def read_template(path: str | Path) -> str:
    """A template of the user's.

    Raises:
        ConfigError: if it can't be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem(str(path), "", f"can't be read: {getattr(error, 'strerror', None) or error}")]
        ) from error
    if len(text) > MOST_BYTES:
        raise ConfigError([Problem(str(path), "", "is larger than 1 MiB; that is no template.")])
    return text


def fill_text(text: str, values: Mapping[str, str], needed: Iterable[str], where: str) -> str:
    """Puts values, which are quoted already, into a text. They are not looked into again.

    Raises:
        ConfigError: for places without a value, and values without a place.
    """
    _check(text, values, needed, where)
    return _PLACE.sub(lambda match: values[match[1]], text)


def fill_yaml(text: str, values: Mapping[str, Any], needed: Iterable[str], where: str) -> str:
    """Puts values into the tree that a YAML template is, so that none can be read as more than a value.

    ``"@NAME@"`` alone becomes the value with its type; a None or an empty one takes its key away. Inside a longer text
    it must be text or a number.

    Raises:
        ConfigError: for places without a value, values without a place, and what is no YAML.
    """
    _check(text, values, needed, where)
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if mark else where
        message = f'is not valid YAML: {getattr(error, "problem", None) or error}. Put places into quotes: "@NAME@".'
        raise ConfigError([Problem(line, "", message)]) from error
    filled = [_filled(document, values) for document in documents if document is not None]
    return yaml.dump_all(filled, Dumper=_Dumper, sort_keys=False, width=1 << 30)


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        filled = {key: _filled(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if not (_empty(value) and not _empty(node[key]))}
    if isinstance(node, list):
        items = [(item, _filled(item, values)) for item in node]
        return [new for old, new in items if not (_empty(new) and not _empty(old))]
    if not isinstance(node, str) or not _PLACE.search(node):
        return node
    alone = _PLACE.fullmatch(node)
    return _given(values[alone[1]] if alone else _PLACE.sub(lambda match: str(values[match[1]]), node))


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key if re.fullmatch(r"[A-Za-z_][\w./-]*", key) else _Given(key): _given(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_given(item) for item in value]
    return _Given(value) if isinstance(value, str) else value


def _empty(value: Any) -> bool:
    return value is None or value in ({}, [])


def _check(text: str, values: Mapping[str, Any], needed: Iterable[str], where: str) -> None:
    problems = []
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        for name in _PLACE.findall(line):
            found.add(name)
            if name not in values:
                problems.append(Problem(f"{where}:{number}", f"@{name}@", unknown("value", name, values)))
    for name in needed:
        if name not in found:
            problems.append(
                Problem(where, f"@{name}@", "is missing: without it the job would not run what you asked for.")
            )
    if problems:
        raise ConfigError(problems)
