"""YAML files of options: where each key stands is remembered, so that a mistake can be pointed at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modelyard.errors import Problem, unknown

MOST_BYTES = 1 << 20
CONFIG_VERSION = 1
RUN_CONFIG_KEY = "config_version"
"""A file with this key is the config of a run: flat and complete, without sets."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-4`` as a string; here it is a number."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number: a run named ``1e4`` keeps its name."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


@dataclass(frozen=True)
class Value:
    """A value and the place it was written."""

    value: Any
    where: str
    inherited: bool = False


def read_set(path: Path, set_name: str | None, problems: list[Problem]) -> dict[str, Value]:
    """The options of one named set of ``path``, what it inherits by merge keys included.

    Args:
        path: the file.
        set_name: the set; None takes ``default``, or nothing where the file has no such set.
        problems: gets whatever is wrong with the file.
    """
    found = len(problems)
    root, loader = _compose(path, problems)
    if root is None or loader is None:
        if set_name is not None and len(problems) == found:
            problems.append(Problem(str(path), "", f"is empty and has no set {set_name!r}."))
        return {}
    sets: dict[str, yaml.Node] = {}
    for key, value in _entries(root, path, problems):
        if key.value in sets:
            problems.append(Problem(_at(path, key), key.value, "is given twice."))
        sets[key.value] = value
    if RUN_CONFIG_KEY in sets:
        if set_name is not None:
            problems.append(Problem(str(path), "", f"is the config of a run and has no set {set_name!r}."))
        return _values(root, loader, path, problems)
    flat = [key for key, node in sets.items() if not isinstance(node, yaml.MappingNode) and not _empty(node)]
    if flat:
        problems.append(
            Problem(
                _at(path, sets[flat[0]]),
                flat[0],
                "stands outside a set. Put options into a named set: 'default:', then the options indented below it.",
            )
        )
        return {}
    name = set_name or "default"
    if name not in sets:
        if set_name is not None:
            problems.append(Problem(str(path), "", unknown("set", name, sets)))
        return {}
    node = sets[name]
    return _values(node, loader, path, problems) if isinstance(node, yaml.MappingNode) else {}


def is_run_config(path: Path) -> bool:
    """Whether ``path`` is the config.yaml of a run."""
    try:
        with open(path, encoding="utf-8") as file:
            return any(line.startswith(f"{RUN_CONFIG_KEY}:") for line in file)
    except (OSError, UnicodeDecodeError):
        return False


def read_flat(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """The options of a file without sets: a recipe."""
    root, loader = _compose(path, problems)
    return _values(root, loader, path, problems) if root is not None and loader is not None else {}


def read_sections(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """A file as `read_flat` reads it, but what stands in its mappings and lists is a `Value` of its own."""
    root, loader = _compose(path, problems)
    if root is None or loader is None:
        return {}
    found = _values(root, loader, path, problems)
    for key, node in _entries(root, path, []):
        name = str(key.value).replace("-", "_")
        if name not in found:  # it could not be read
            continue
        if isinstance(node, yaml.MappingNode):
            found[name] = Value(_values(node, loader, path, problems), found[name].where)
        elif isinstance(node, yaml.SequenceNode):
            items = [Value(loader.construct_object(item, deep=True), _at(path, item)) for item in node.value]
            found[name] = Value(items, found[name].where)
    return found


def dump(values: dict[str, Any]) -> str:
    """Plain values as YAML, in the order given."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def inline(value: Any) -> str:
    """One value as YAML, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=100_000)
    return text.strip().removesuffix("...").strip()


def _compose(path: Path, problems: list[Problem]) -> tuple[yaml.MappingNode | None, _Loader | None]:
    try:
        if path.stat().st_size > MOST_BYTES:
            problems.append(Problem(str(path), "", "is larger than 1 MiB; that is no config file."))
            return None, None
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.append(Problem(str(path), "", "there is no such file."))
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(str(path), "", f"can't be read: {error}"))
        return None, None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except RecursionError:
        problems.append(Problem(str(path), "", "is nested too deeply; that is no config file."))
        return None, None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        problems.append(Problem(where, "", f"is not valid YAML: {what}"))
        return None, None
    if root is None:
        return None, None
    if not isinstance(root, yaml.MappingNode):
        problems.append(Problem(_at(path, root), "", "must hold 'key: value' lines."))
        return None, None
    return root, loader


def _values(
    node: yaml.MappingNode, loader: _Loader, path: Path, problems: list[Problem], below: tuple[yaml.Node, ...] = ()
) -> dict[str, Value]:
    own: dict[str, Value] = {}
    inherited: dict[str, Value] = {}
    if node in below:
        problems.append(Problem(_at(path, node), "<<", "this set inherits from itself."))
        return {}
    for key, value in _entries(node, path, problems):
        if key.tag == "tag:yaml.org,2002:merge":
            for parent in _parents(value, path, problems):
                for name, merged in _values(parent, loader, path, problems, (*below, node)).items():
                    inherited.setdefault(name, Value(merged.value, merged.where, inherited=True))
            continue
        name = str(key.value).replace("-", "_")
        if name in own:
            problems.append(Problem(_at(path, key), name, f"is given twice; first in {own[name].where}."))
        try:
            own[name] = Value(loader.construct_object(value, deep=True), _at(path, key))
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # 2024-13-45 is a ValueError
            problems.append(Problem(_at(path, key), name, f"can't be read: {getattr(error, 'problem', error)}"))
    return {**inherited, **own}


def _entries(
    node: yaml.MappingNode, path: Path, problems: list[Problem]
) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            yield key, value
        else:
            problems.append(Problem(_at(path, key), "", "a name must be plain text, not a list or a mapping."))


def _parents(node: yaml.Node, path: Path, problems: list[Problem]) -> Iterator[yaml.MappingNode]:
    for parent in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if isinstance(parent, yaml.MappingNode):
            yield parent
        else:
            problems.append(Problem(_at(path, parent), "<<", "must name a set by its anchor, such as '<<: *default'."))


def _empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
