"""What pydantic finds, in words for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelyard.errors import nearest

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
}


def sentence(detail: Mapping[str, Any], given: Any) -> str:
    """One of pydantic's findings about the value ``given``."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in ("too_long", "too_short") or (kind == "missing" and len(detail.get("loc", ())) > 1):
        return f"has too {'many' if kind == 'too_long' else 'few'} values, got {given!r}."
    if kind == "missing":
        return "must be given: it has no default."
    if kind == "literal_error":
        allowed = [part.strip("' ") for part in str(context["expected"]).replace(" or ", ", ").split(", ")]
        if len(detail.get("loc", ())) > 1 and isinstance(detail["loc"][1], int):
            given = detail["input"]  # the one of a list
        near = nearest(str(given), allowed, most=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{given!r} is none of {', '.join(allowed)}.{hint}"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}, got {given!r}."
    message = str(detail["msg"]).replace("Input should be", "must be")
    return f"{message}, got {given!r}."
