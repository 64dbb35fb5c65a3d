"""The page of all options, docs/options.md: ``python -m modelyard.cli.option_page > docs/options.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from pydantic.fields import FieldInfo

from modelyard.cli.help import group_name
from modelyard.cli.options import choices, part_fields, shown_default, shown_owners
from modelyard.config.resolve import field_kind
from modelyard.config.schema import COMPONENTS, GROUPS, is_mutable

_INTRO = """# Options

All options of a run. Each is a flag (`--train_steps 1000`), a key in [config files](config.md), and an argument in
Python. `modelyard train --help GROUP` shows the same on the command line. Options with ✓ may change when a run is
resumed.

This page is written by `make options`.
"""
_PARTS = """
## Options of components

These exist only with the named model, dataset, optimizer or schedule. The arguments of hooks, augmentations and metrics
are in [hooks](hooks.md), [data](data.md) and `modelyard metrics`.
"""


def option_page() -> str:
    """Returns the page as Markdown."""
    parts = [_INTRO]
    for group in GROUPS:
        rows = [_row(name, info, "✓" if is_mutable(name) else "") for name, info in group.model_fields.items()]
        title = f"{group.title} (`--help {group_name(group)}`)"
        parts += [f"\n## {title}\n\n", _table(("option", "value", "default", "", "✓"), rows)]
    parts.append(_PARTS)
    for part, registry in COMPONENTS.items():
        rows = []
        for name, (info, _, owners) in part_fields((part,)).items():
            same = len({repr(registry.get(owner).options.model_fields[name].default) for owner in owners}) == 1
            rows.append(_row(name, info, _cell(shown_owners(owners)), has_default=same))
        title = part.replace("_", " ").capitalize()
        parts += [f"\n### {title}\n\n", _table(("option", "value", "default", "", "of"), rows)]
    return "".join(parts)


def _row(name: str, info: FieldInfo, last: str, has_default: bool = True) -> tuple[str, ...]:
    kind = field_kind(info.annotation)
    value = {"flag": "true, false", "CHOICE": ", ".join(choices(info.annotation))}.get(kind, kind.lower())
    default = shown_default(info) if has_default else ""
    return f"`--{name}`", _cell(value), f"`{_cell(default)}`" if default else "", _cell(info.description or ""), last


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.buffer.write(option_page().encode())
