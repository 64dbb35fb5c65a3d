"""The command dashboard."""

from __future__ import annotations

from typing import Annotated

import typer

from modelyard.cli.output import program_of_processes
from modelyard.errors import COMMAND_LINE


def dashboard(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDER", help="folders with runs, at any depth, or their URLs (default: runs)"),
    ] = None,
    port: Annotated[int, typer.Option(help="port to listen on; 0: the system chooses")] = 8600,
    host: Annotated[str, typer.Option(help="address to listen on; by default only this machine can connect")] = (
        "127.0.0.1"
    ),
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed_host",
            metavar="NAME",
            help="another name by which browsers may call the server, such as a proxy's; may be repeated; *: any",
        ),
    ] = None,
) -> None:
    """Show live pages over many runs: a table, curves and notes; stop, resume and delete runs.

    Open the address that it prints. It has a token, without which nobody sees or changes anything.
    """
    from modelyard.dashboard.server import dashboard as serve_dashboard
    from modelyard.system.console import visible

    def tell(address: str) -> None:
        typer.echo(f"dashboard at {visible(address)}")

    serve_dashboard(
        *(folders or ()), host=host, port=port, allowed_host=allowed_host, ready=tell, program=program_of_processes(),
        source=COMMAND_LINE,
    )  # fmt: skip
