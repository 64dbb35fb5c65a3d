"""Rules that turn names into others: ``regex=replacement``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from modelyard.config.calls import parse_list


def parse_rename(text: str) -> tuple[re.Pattern[str], str]:
    """``regex=replacement``, split at the last ``=``.

    Raises:
        ValueError: if it is not that.
    """
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"{text!r} is not 'from=to', as in '^backbone/=' or 'weights$=kernel'.")
    try:
        compiled = re.compile(pattern)
        re.compile(f"(?:{pattern})|").sub(replacement, "")  # a replacement with groups that are not there fails
    except (re.error, IndexError) as error:
        raise ValueError(f"{text!r} is no regular expression with its replacement: {error}.") from error
    return compiled, replacement


def _checked(rules: tuple[str, ...]) -> tuple[str, ...]:
    for rule in rules:
        parse_rename(rule)
    return rules


Renames = Annotated[tuple[str, ...], BeforeValidator(parse_list), AfterValidator(_checked)]
