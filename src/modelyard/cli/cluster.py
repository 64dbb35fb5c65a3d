"""What the commands for clusters do: call the library and print."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from modelyard.cli.commands import program
from modelyard.cli.options import given_options, normalize
from modelyard.cluster.description import Cluster
from modelyard.config import Config, resolve
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import ConfigError, Interrupted, Problem
from modelyard.system.console import console, show_log


def launch(words: list[str], model_dir: str | None, layout: dict[str, Any], app: typer.Typer | None) -> None:
    """Launches a cluster; mistakes in its command are shown before anything is started.

    Args:
        words: the command of its processes.
        model_dir: the run folder, where it was said before the command.
        layout: how many processes, and how they are kept going.
        app: the command line that knows the command.
    """
    from modelyard.distributed.agreement import config_in_cluster
    from modelyard.launcher.job import check_command, with_model_dir
    from modelyard.launcher.local import check_layout
    from modelyard.launcher.local import launch as launch_cluster

    given = list(words)
    words, folder = with_model_dir(check_command(normalize(words)), model_dir)
    config = _config_of(words, app)
    addresses = check_layout(layout["workers"], layout["ps"], layout["evaluator"], layout["max_restarts"])
    config_in_cluster(config, Cluster(addresses=addresses, source="launch", model_dir=folder or "runs/new"))
    show_log()
    if folder is None:
        from modelyard.run.directory import new_run_path

        words, folder = with_model_dir(words, str(new_run_path(config)))
    ours = program() == "modelyard"
    runner = None if ours else [sys.executable, str(Path(sys.argv[0]))]
    try:
        launch_cluster(words, model_dir=folder, cache_dir=config.cache_dir, program=runner, **layout)
    except Interrupted as interrupt:
        again = shlex.join(["launch", *_flags(layout), "--model_dir", str(folder), "--", *given])
        with contextlib.suppress(OSError):  # the terminal may have been closed
            saved = f"step {interrupt.step} is saved" if interrupt.step else "no step was trained"
            console().print(f"[bold]stopped; {saved}.[/] Go on with:")
            console().print(f"  {program()} {again}", soft_wrap=True, markup=False)
        sys.exit(128 + interrupt.signal)


def _config_of(words: list[str], app: typer.Typer | None) -> Config:
    """The config that the processes will find, so that a mistake in it is shown once and at once."""
    from modelyard.launcher.job import RESUME

    verb, *rest = words
    group: Any = typer.main.get_command(app) if app is not None else None
    command = group.commands[verb]
    with command.make_context(verb, rest) as context:
        own = ("run", "json")
        context.obj = {name: value for name, value in context.params.items() if value is not None and name not in own}
        options = given_options(context)
        run = context.params.get("run")
    if verb == RESUME:
        from modelyard.loop.existing_run import resume_config

        config, _ = resume_config(str(run), options, COMMAND_LINE)
    else:
        config = resolve(options)
    if config.cluster == "none":
        message = "is none, and then every process would train alone; leave it out."
        raise ConfigError([Problem(config.origin("cluster"), "cluster", message)])
    return config


def _flags(layout: dict[str, Any]) -> list[str]:
    """The options of `launch` as they were given."""
    flags = [] if layout["workers"] is None else ["--workers", str(layout["workers"])]
    flags += ["--ps", str(layout["ps"])] if layout["ps"] else []
    flags += ["--evaluator"] if layout["evaluator"] else []
    flags += ["--max_restarts", str(layout["max_restarts"])] if layout["max_restarts"] != 3 else []
    return flags + ([] if layout["pin"] else ["--no_pin"])


def stop(model_dir: str, force: bool, timeout_secs: float) -> None:
    """Stops a run."""
    from modelyard.launcher.local import stop as stop_run

    show_log()
    with console().status("") as status:
        shown: list[Any] = []
        names = stop_run(model_dir, force=force, timeout_secs=timeout_secs, waiting=_show_waiting(status, shown))
    if names:
        console().print(f"{', '.join(names)} {'killed' if force else 'stopped'}", soft_wrap=True, markup=False)
    else:
        console().print(f"nothing is running in {model_dir}", soft_wrap=True, markup=False)


def _show_waiting(status: Any, shown: list[Any]) -> Callable[[list[Any]], None]:
    """Says who is waited for: on a terminal all the time, elsewhere whenever that changes."""

    def show(running: list[Any]) -> None:
        if running == shown:
            return
        shown[:] = running
        text = f"waiting for {', '.join(str(holder) for holder in running)}"
        status.update(text)
        if not console().is_terminal:
            console().print(text, soft_wrap=True, markup=False)

    return show
