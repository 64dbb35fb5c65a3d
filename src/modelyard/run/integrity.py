"""Checksums inside the small files of a run folder, so that damage, a cut and an edit are noticed.

JSON has the checksum of all its other values in a field, text in its last line. Files that an earlier Modelyard wrote
have none. One flipped bit must not make a file look like one of those, so a second mark says that a checksum belongs to
the file: in JSON, any field that earlier versions did not have; in text, the first line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
_MARK = "# The last line is a checksum of the lines above it.\n"
_LAST_LINE = re.compile(r"# checksum ([0-9a-f]{64})\n")


def json_checksum(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of all ``values`` but their field `CHECKSUM`, whatever their order and layout in a file.

    Raises:
        ValueError: if they are nested too deeply. `parse_json` accepts a few levels more.
    """
    rest = {key: value for key, value in values.items() if key != CHECKSUM}
    try:
        plain = json.loads(json.dumps(rest))  # a key that is a number is text in a file
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return hashlib.sha256(text.encode()).hexdigest()


def parse_json(data: bytes) -> dict[str, Any]:
    """Returns the object in ``data``.

    Raises:
        ValueError: if there is none.
    """
    try:
        values = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def with_checksum(text: str) -> str:
    """Returns lines of text with the mark before them and their checksum after them, both as comments."""
    marked = _MARK + text
    return f"{marked}# checksum {_sha256(marked)}\n"


def is_unchanged(text: str) -> bool:
    """Returns whether ``text`` is as `with_checksum` returned it, or has neither mark nor checksum."""
    above, newline, last = text.removesuffix("\n").rpartition("\n")
    found = _LAST_LINE.fullmatch(f"{last}\n")
    if found is None:
        return _MARK not in text
    return text.endswith("\n") and found[1] == _sha256(above + newline)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
