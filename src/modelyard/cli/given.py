"""What commands have in common: arguments that many take, and what was typed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Json = Annotated[
    bool,
    typer.Option("--json", help="print one JSON object as the last line of standard output", rich_help_panel="Output"),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="the run folder")]


def given(context: typer.Context) -> dict[str, Any]:
    """The options of the config that the user typed."""
    from modelyard.cli.options import given_options

    return given_options(context)


def resolved(options: dict[str, Any]) -> Any:
    """The config that they make."""
    from modelyard.config import resolve

    return resolve(options)
