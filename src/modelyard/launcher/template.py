"""Templates with ``@NAME@`` as placeholders, so that ``$NAME`` keeps its meaning in a shell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from modelyard.config.yaml_file import MAX_BYTES, LimitedLoader
from modelyard.errors import ConfigError, Problem, unknown

_PLACEHOLDER = re.compile(r"@([A-Z][A-Z0-9_]*)@")
_LINES = re.compile(r"(?! )(?:[ -~]*[!-~]\n)+(?:[ -~]*[!-~])?")
_PLAIN = re.compile(r"[A-Za-z][\w./-]+", re.ASCII)


class _Dumper(yaml.SafeDumper):
    """Quotes all text but names, since other YAML readers take more texts for numbers (0o17) than ours."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if _LINES.fullmatch(text) else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def shipped_template(name: str) -> str:
    """Reads a template that comes with the package."""
    return (resources.files("modelyard") / "launcher" / "templates" / name).read_text(encoding="utf-8")


def read_template(path: str | Path) -> str:
    """Reads a template of the user.

    Raises:
        ConfigError: if it can't be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        message = f"can't be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError([Problem(str(path), "", message)]) from error
    if len(text) > MAX_BYTES:
        raise ConfigError([Problem(str(path), "", "is larger than 1 MiB, the limit for a template.")])
    return text


def fill_text(text: str, values: Mapping[str, str], needed: Iterable[str], where: str) -> str:
    """Inserts values, which are quoted already, into a text. Placeholders inside of values are kept.

    Raises:
        ConfigError: for unknown and for missing placeholders.
    """
    _check(text, values, needed, where)
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def fill_yaml(text: str, values: Mapping[str, Any], needed: Iterable[str], where: str) -> str:
    """Inserts values into the parsed YAML, so that none can be read as more than a value.

    ``"@NAME@"`` alone becomes the value with its type; a None or empty value removes its key. Inside a longer text, the
    value must be text or a number.

    Raises:
        ConfigError: for unknown and for missing placeholders, and for invalid YAML.
    """
    _check(text, values, needed, where)
    try:
        documents = list(yaml.load_all(text, Loader=LimitedLoader))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if mark else where
        what = getattr(error, "problem", None) or error
        message = f'is not valid YAML: {what}. Put placeholders in quotes: "@NAME@".'
        raise ConfigError([Problem(line, "", message)]) from error
    filled = [_filled(document, values) for document in documents if document is not None]
    return yaml.dump_all(filled, Dumper=_Dumper, sort_keys=False, width=1 << 30)


def without_repeated_documents(texts: Iterable[str]) -> str:
    """Returns the YAML documents of all texts, each once."""
    documents = dict.fromkeys(document for text in texts for document in text.removeprefix("---\n").split("\n---\n"))
    return "\n---\n".join(document.removesuffix("\n") for document in documents) + "\n"


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        filled = {key: _filled(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if _empty(node[key]) or not _empty(value)}
    if isinstance(node, list):
        items = [(item, _filled(item, values)) for item in node]
        return [new for old, new in items if _empty(old) or not _empty(new)]
    if not isinstance(node, str) or not _PLACEHOLDER.search(node):
        return node
    alone = _PLACEHOLDER.fullmatch(node)
    return values[alone[1]] if alone else _PLACEHOLDER.sub(lambda match: str(values[match[1]]), node)


def _empty(value: Any) -> bool:
    return value is None or value in ({}, [])


def _check(text: str, values: Mapping[str, Any], needed: Iterable[str], where: str) -> None:
    problems = []
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        for name in _PLACEHOLDER.findall(line):
            found.add(name)
            if name not in values:
                problems.append(Problem(f"{where}:{number}", f"@{name}@", unknown("placeholder", name, values)))
    missing = "is missing: without it the job would not run your command."
    problems += [Problem(where, f"@{name}@", missing) for name in needed if name not in found]
    if problems:
        raise ConfigError(problems)
