"""Names with arguments: ``early_stop(patience=5)``; in YAML also ``{early_stop: {patience: 5}}``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import yaml
from pydantic import PlainSerializer, PlainValidator, ValidationError

from modelyard.config.yaml_file import LimitedLoader
from modelyard.errors import UserError, nearest
from modelyard.registry import Options, Registry

# Quoted text is one token, any other character too. An apostrophe inside a word opens no quotes.
_TOKENS = re.compile(r"""(?<!\w)'(?:[^']|'')*'|(?<!\w)"(?:\\.|[^"\\])*"|.""", re.DOTALL)
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}


@dataclass(frozen=True)
class Call:
    """A name and its arguments, as the user wrote them."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Call:
        """Parses a name, ``name(key=value, …)`` or a mapping with one key."""
        if isinstance(value, Call):
            return value
        if isinstance(value, Mapping) and len(value) == 1:
            name, arguments = next(iter(value.items()))
            if not isinstance(arguments, Mapping | None):
                raise ValueError(f"the arguments of {name!r} must be key: value pairs, got {arguments!r}.")
            return cls(str(name), {str(key): argument for key, argument in (arguments or {}).items()})
        match = re.fullmatch(r"([+-]?[\w.-]+)\s*(?:\((.*)\))?", str(value).strip(), re.DOTALL)
        if match is None:
            raise ValueError(f"{value!r} is not a name or name(key=value, …).")
        arguments = {}
        for argument in split_list(match[2] or ""):
            key, equals, text = argument.partition("=")
            if not equals or not key.strip().isidentifier():
                raise ValueError(f"in {value!r}, {argument!r} is not key=value.")
            try:
                arguments[key.strip()] = yaml.load(text, Loader=LimitedLoader)
            except yaml.YAMLError as error:
                raise ValueError(f"in {value!r}, {text.strip()!r} is not a valid YAML value.") from error
        return cls(match[1], arguments)

    def __str__(self) -> str:
        if not self.arguments:
            return self.name
        listed = ", ".join(f"{key}={_inline(value)}" for key, value in self.arguments.items())
        return f"{self.name}({listed})"

    def options(self, registry: Registry, schema: type[Options] | None = None) -> Options:
        """The validated arguments.

        Args:
            registry: the registry that has the name.
            schema: the arguments that are allowed; by default the options of the entry.

        Raises:
            UserError: for an unknown name or argument, or a wrong value.
        """
        schema = schema or registry.get(self.name).options
        known = schema.model_fields
        for key in self.arguments:
            if key not in known:
                near = nearest(key, known)
                hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(known) or 'no arguments'}."
                raise UserError(f"{registry.kind} {self.name!r} takes no argument {key!r}.{hint}")
        try:
            return schema(**self.arguments)
        except ValidationError as error:
            messages = []
            for detail in error.errors():
                key = str(detail["loc"][0]) if detail["loc"] else ""
                messages.append(f"{key} {validation_message(detail, self.arguments.get(key))}".strip())
            raise UserError(f"{registry.kind} {self.name!r}: {' '.join(messages)}") from None


def build_component(call: Call, registry: Registry) -> Any:
    """Makes the registered class with its options.

    Raises:
        UserError: if its constructor does not take options.
    """
    target, options = registry.get(call.name).load(), call.options(registry)
    try:
        inspect.signature(target).bind(options)
    except TypeError as error:
        raise UserError(
            f"{registry.kind} {call.name!r} cannot be constructed with its options: {error}. "
            "Define `def __init__(self, options)`."
        ) from None
    return target(options)


def validation_message(detail: Mapping[str, Any], given: Any) -> str:
    """Words an error of pydantic about the value ``given``; its subject, the option, is put before it."""
    kind, context, location = detail["type"], detail.get("ctx", {}), detail.get("loc", ())
    if kind in ("too_long", "too_short") or (kind == "missing" and len(location) > 1):
        return f"has too {'many' if kind == 'too_long' else 'few'} values, got {given!r}."
    if kind == "missing":
        return "is required: it has no default."
    if kind == "literal_error":
        allowed = [part.strip("' ") for part in str(context["expected"]).replace(" or ", ", ").split(", ")]
        if len(location) > 1 and isinstance(location[1], int):
            given = detail["input"]  # the item of a list
        near = nearest(str(given), allowed, most=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"must be one of {', '.join(allowed)}, got {given!r}.{hint}"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    expected, _, problem = kind.partition("_")
    if expected in _TYPES and problem in ("type", "parsing", "from_float"):
        return f"must be {_TYPES[expected]}, got {given!r}."
    return f"{str(detail['msg']).replace('Input should be', 'must be')}, got {given!r}."


# -- lists -------------------------------------------------------------------------------------------------------------


def split_list(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes: ``"a, b(c=1, d='x, y')"`` has two parts."""
    parts, depth, current = [], 0, ""
    for token in _TOKENS.findall(text):
        if len(token) == 1:
            depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += token
    parts.append(current)
    return [part.strip() for part in parts if part.strip()]


def parse_list(value: Any) -> list[Any]:
    """Returns a list from YAML as it is, and splits text from the command line at commas."""
    if value is None:
        return []
    if isinstance(value, str):
        return split_list(value.strip().removeprefix("[").removesuffix("]"))
    return list(value) if isinstance(value, list | tuple) else [value]


class _Dumper(yaml.SafeDumper):
    """Quotes text that `split_list` would split."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if re.search(r"[^\w./%+-]", text) else None)


_Dumper.add_representer(str, _represent_text)


def _inline(value: Any) -> str:
    # As an item of a list, since only there text with commas and brackets is quoted.
    text: str = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip().removeprefix("[").removesuffix("]")


CallList = Annotated[
    tuple[Call, ...],
    PlainValidator(lambda value: tuple(Call.parse(part) for part in parse_list(value))),
    PlainSerializer(lambda calls: [str(call) for call in calls]),
]
"""The type of a config field that holds calls."""
