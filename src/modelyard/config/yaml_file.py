"""Reads YAML files of options, and remembers the line of each value for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from modelyard.errors import Problem, StorageError, unknown
from modelyard.storage import is_remote, read_bytes

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""In a file, after its anchors are replaced by what they stand for. The plan of a large matrix has 70,000."""
MAX_DEPTH = 50
MAX_DIGITS = 100
"""Characters of a number. YAML has numbers in base 60, whose time grows with the square of their length."""
_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
CONFIG_VERSION = 1
NO_DEFAULT = "has no set 'default'"
RUN_CONFIG_KEY = "config_version"
"""A file with this key is the config of a run: flat and complete, without sets."""


class TooLargeError(yaml.MarkedYAMLError):
    """A file that would take too long or too much memory. A few lines of anchors can stand for any number of values."""


class LimitedLoader(yaml.SafeLoader):
    """Reads YAML of any origin: the number of values and their depth are limited, with anchors and merge keys."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._level = 0
        self._composed = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # of each node: values in it, and levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Reads a node and all below it. For a value in a mapping, ``index`` is its key."""
        if self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        self._level, self._composed = self._level + 1, self._composed + 1
        self._check(self._composed, self._level)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None:
            inherits = isinstance(index, yaml.Node) and index.tag == _MERGE
            self._sizes[node] = self._measure(node, inherits)
            self._check(*self._sizes[node])
        return node

    def _measure(self, node: yaml.Node, inherits: bool) -> tuple[int, int]:
        """Returns how many values a node stands for, and how deep they are. What it contains is measured already."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        children = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in pairs for child in pair]
        if not all(child in self._sizes for child in children):
            inherits = inherits or any(key.tag == _MERGE for key, child in pairs if child not in self._sizes)
            raise TooLargeError(problem="this set inherits from itself." if inherits else "it contains itself.")
        sizes = [self._sizes[child] for child in children]
        return 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Returns an integer that can be shown: Python converts no more than 4,300 digits to text."""
        self._check_digits(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Returns a number."""
        self._check_digits(node)
        return super().construct_yaml_float(node)

    def _check_digits(self, node: yaml.ScalarNode) -> None:
        if len(str(node.value)) > MAX_DIGITS:
            raise TooLargeError(problem=f"a number has more than {MAX_DIGITS} characters.")

    def _check(self, values: int, levels: int) -> None:
        if values > MAX_VALUES:
            raise TooLargeError(problem=f"it has more than {MAX_VALUES:,} values, with those that anchors stand for.")
        if levels > MAX_DEPTH:
            raise TooLargeError(problem=f"it is nested more than {MAX_DEPTH} levels deep.")


class _Loader(LimitedLoader):
    """Reads ``1e-4`` as a number, which YAML 1.1 reads as a string."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number: a run named ``1e4`` keeps its name."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


for _kind in ("int", "float"):
    LimitedLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(LimitedLoader, f"construct_yaml_{_kind}"))


@dataclass(frozen=True)
class Value:
    """A value and its source."""

    value: Any
    where: str
    inherited: bool = False


def config_path(name: str) -> Path | str:
    """Returns the path of a config file as the other functions take it; a URL stays text."""
    return name if is_remote(name) else Path(name)


def read_set(
    path: Path | str, set_name: str | None, problems: list[Problem], choose_with: str = ""
) -> dict[str, Value]:
    """Reads a named set of options, with what it inherits by merge keys.

    Args:
        path: the file, or its URL.
        set_name: the name; None is ``default``, or nothing if the file has no such set.
        problems: receives the errors in the file.
        choose_with: the option that names a set; if it is given, a file without the set ``default`` is an error.
    """
    before = len(problems)
    file = _File(path, problems)
    if file.root is None:
        if set_name is not None and len(problems) == before:
            file.report(f"is empty and has no set {set_name!r}.")
        return {}
    sets: dict[str, yaml.Node] = {}
    for key, value in file.entries(file.root):
        if key.value in sets:
            file.report("is given twice.", key, key.value)
        sets[key.value] = value
    if RUN_CONFIG_KEY in sets:
        if set_name is not None:
            file.report(f"is the config of a run and has no set {set_name!r}.")
        return file.values(file.root)
    for option, node in sets.items():
        if not isinstance(node, yaml.MappingNode) and node.tag != _NULL:
            message = "is outside a set. Put options into a named set: 'default:', then the options indented below it."
            file.report(message, node, option)
            return {}
    name = set_name or "default"
    if name not in sets:
        if set_name is not None:
            file.report(unknown("set", name, sets))
        elif choose_with and sets:
            names = ", ".join(map(str, sets))
            file.report(f"{NO_DEFAULT}, so nothing in it applies. Choose one with --{choose_with}: {names}.")
        return {}
    found = sets[name]
    return file.values(found) if isinstance(found, yaml.MappingNode) else {}


def is_run_config(path: Path | str) -> bool:
    """Whether ``path`` is the config.yaml of a run."""
    try:
        return any(line.startswith(f"{RUN_CONFIG_KEY}:") for line in _read_text(path).splitlines())
    except (OSError, ValueError, StorageError):
        return False


def _read_text(path: Path | str) -> str:
    """Reads a config file.

    Raises:
        ValueError: if it can't be one.
    """
    if isinstance(path, str):
        return _as_text(read_bytes(path))
    if path.exists() and not (path.is_file() or path.is_dir()):  # a stranger's may be a link to /dev/zero or a pipe
        raise ValueError("is not a file.")
    with open(path, "rb") as file:
        return _as_text(file.read(MAX_BYTES + 1))


def _as_text(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise ValueError("is larger than 1 MiB, so it is not a config file.")
    return data.decode("utf-8")


def read_flat(path: Path | str, problems: list[Problem]) -> dict[str, Value]:
    """Reads a file of options without sets, such as a recipe."""
    file = _File(path, problems)
    return file.values(file.root) if file.root is not None else {}


def read_sections(path: Path | str, problems: list[Problem]) -> dict[str, Value]:
    """Reads a file like `read_flat`. The items of its mappings and lists are `Value` objects, too."""
    file = _File(path, problems)
    if file.root is None:
        return {}
    found = file.values(file.root)
    for key, node in file.entries(file.root, quiet=True):
        name = str(key.value).replace("-", "_")
        if name not in found:  # it is not valid
            continue
        if isinstance(node, yaml.MappingNode):
            found[name] = Value(file.values(node), found[name].where)
        elif isinstance(node, yaml.SequenceNode):
            items = [Value(file.construct(item), file.at(item)) for item in node.value]
            found[name] = Value(items, found[name].where)
    return found


def parse_value(text: str) -> Any:
    """Returns the value in a short text of YAML, read as in a file of options.

    Raises:
        ValueError: if it is no YAML, or stands for too many values.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def dump(values: dict[str, Any]) -> str:
    """Plain values as YAML, in the given order."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def inline(value: Any) -> str:
    """One value as YAML, on one line."""
    return _known_line(value) if isinstance(value, str | int) else _line(value)


@lru_cache(maxsize=4096, typed=True)
def _known_line(value: str | int) -> str:
    """Returns a value as YAML: the same few names are compared many thousand times in a search."""
    return _line(value)


def _line(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=100_000)
    return text.strip().removesuffix("...").strip()


class _File:
    """A parsed file. ``root`` is None if it is empty or not valid."""

    def __init__(self, path: Path | str, problems: list[Problem]) -> None:
        self.path, self._problems = path, problems
        self.root = self._parse()

    def at(self, node: yaml.Node | None) -> str:
        return str(self.path) if node is None else f"{self.path}:{node.start_mark.line + 1}"

    def report(self, message: str, node: yaml.Node | None = None, key: str = "") -> None:
        self._problems.append(Problem(self.at(node), key, message))

    def _parse(self) -> yaml.MappingNode | None:
        try:
            self._loader = _Loader(_read_text(self.path))
            root = self._loader.get_single_node()
        except FileNotFoundError:
            self.report("there is no such file.")
        except StorageError as error:
            self.report(str(error).removeprefix(f"can't read {self.path}: "))
        except (OSError, UnicodeDecodeError) as error:
            self.report(f"can't be read: {error}")
        except ValueError as error:
            self.report(str(error))
        except TooLargeError as error:
            line = self._loader.line + 1
            self._problems.append(Problem(f"{self.path}:{line}", "", str(error.problem)))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}:{mark.line + 1}" if mark else str(self.path)
            what = getattr(error, "problem", None) or str(error)
            self._problems.append(Problem(where, "", f"is not valid YAML: {what}"))
        else:
            if root is None or isinstance(root, yaml.MappingNode):
                return root
            self.report("must contain 'key: value' lines.", root)
        return None

    def construct(self, node: yaml.Node) -> Any:
        return self._loader.construct_object(node, deep=True)

    def values(self, node: yaml.MappingNode) -> dict[str, Value]:
        own: dict[str, Value] = {}
        inherited: dict[str, Value] = {}
        for key, value in self.entries(node):
            if key.tag == _MERGE:
                for parent in self._parents(value):
                    for name, merged in self.values(parent).items():
                        inherited.setdefault(name, Value(merged.value, merged.where, inherited=True))
                continue
            name = str(key.value).replace("-", "_")
            if name in own:
                self.report(f"is given twice; first in {own[name].where}.", key, name)
            try:
                own[name] = Value(self.construct(value), self.at(key))
            except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # 2024-13-45 is a ValueError
                self.report(f"can't be read: {getattr(error, 'problem', error)}", key, name)
        return {**inherited, **own}

    def entries(self, node: yaml.MappingNode, quiet: bool = False) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key, value
            elif not quiet:
                self.report("a name must be plain text, not a list or a mapping.", key)

    def _parents(self, node: yaml.Node) -> Iterator[yaml.MappingNode]:
        for parent in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(parent, yaml.MappingNode):
                yield parent
            else:
                self.report("must name a set by its anchor, such as '<<: *default'.", parent, "<<")
