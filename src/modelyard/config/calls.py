"""Parts named in a list, with arguments: ``early_stop(patience=5)``; in YAML also ``{early_stop: {patience: 5}}``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import yaml
from pydantic import PlainSerializer, PlainValidator, ValidationError

from modelyard.config.wording import sentence
from modelyard.errors import UserError, nearest
from modelyard.registry import Entry, Options, Registry

# A quoted text is one token, any other character too. An apostrophe inside a word opens no quotes.
_TOKENS = re.compile(r"""(?<!\w)'(?:[^']|'')*'|(?<!\w)"(?:\\.|[^"\\])*"|.""", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A name and its arguments, as the user wrote them."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Call:
        """Reads a name, ``name(key=value, …)`` or a mapping with one key."""
        if isinstance(value, Call):
            return value
        if isinstance(value, Mapping) and len(value) == 1:
            name, arguments = next(iter(value.items()))
            if arguments is None:
                arguments = {}
            if not isinstance(arguments, Mapping):
                raise ValueError(f"the arguments of {name!r} must be key: value pairs, got {arguments!r}.")
            return cls(str(name), {str(key): argument for key, argument in arguments.items()})
        match = re.fullmatch(r"\s*([+-]?[\w.-]+)\s*(?:\((.*)\))?\s*", str(value), re.DOTALL)
        if match is None:
            raise ValueError(f"{value!r} is not a name or name(key=value, …).")
        arguments = {}
        for argument in split_list(match[2] or ""):
            key, equals, text = argument.partition("=")
            if not equals or not key.strip().isidentifier():
                raise ValueError(f"in {value!r}, {argument!r} is not key=value.")
            try:
                arguments[key.strip()] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"in {value!r}, {text.strip()!r} can't be read as a value.") from error
        return cls(match[1], arguments)

    def __str__(self) -> str:
        if not self.arguments:
            return self.name
        listed = ", ".join(f"{key}={_scalar(value)}" for key, value in self.arguments.items())
        return f"{self.name}({listed})"

    def options(self, registry: Registry) -> Options:
        """The arguments, checked against the options of the part this call names."""
        return self.checked(registry.get(self.name))

    def checked(self, entry: Entry, schema: type[Options] | None = None) -> Options:
        """The arguments, checked against ``schema``; by default the options of ``entry``."""
        options = schema or entry.options
        fields = options.model_fields
        for key in self.arguments:
            if key not in fields:
                near = nearest(key, fields)
                hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(fields) or 'no arguments'}."
                raise UserError(f"{entry.kind} {self.name!r} takes no argument {key!r}.{hint}")
        try:
            return options(**self.arguments)
        except ValidationError as error:
            found = [(str(e["loc"][0]) if e["loc"] else "", e) for e in error.errors()]
            wrong = [f"{key} {sentence(e, self.arguments.get(key))}".strip() for key, e in found]
            raise UserError(f"{entry.kind} {self.name!r}: {' '.join(wrong)}") from None


def build_part(call: Call, registry: Registry) -> Any:
    """The part that ``call`` names, made with its options.

    Raises:
        UserError: if it can't be made with options.
    """
    target, options = registry.get(call.name).load(), call.options(registry)
    try:
        inspect.signature(target).bind(options)
    except TypeError as error:
        raise UserError(
            f"{registry.kind} {call.name!r} can't be made with its options ({error}): "
            "it needs `def __init__(self, options)`."
        ) from None
    return target(options)


def split_list(text: str) -> list[str]:
    """Splits at commas that stand outside brackets and quotes: ``"a, b(c=1, d='x, y')"`` has two parts."""
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
    """A list from YAML, or the same written on the command line with commas."""
    if value is None:
        return []
    if isinstance(value, str):
        return list(split_list(value.strip().removeprefix("[").removesuffix("]")))
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _scalar(value: Any) -> str:
    # In a list, since commas and brackets in a text are quoted only there.
    text: str = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip().removeprefix("[").removesuffix("]")


class _Dumper(yaml.SafeDumper):
    """Quotes text that `split_list` would take apart."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, "'" if re.search(r"[^\w./%+-]", text) else None)


_Dumper.add_representer(str, _represent_text)


CallList = Annotated[
    tuple[Call, ...],
    PlainValidator(lambda value: tuple(Call.parse(part) for part in parse_list(value))),
    PlainSerializer(lambda calls: [str(call) for call in calls]),
]
"""A config field that holds parts with arguments."""
