"""Commands for several processes: what may stand behind each word."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, Run


def launch(
    command: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="-- COMMAND …", help="train, train-and-evaluate or resume, with its options"),
    ] = None,
    workers: Annotated[Optional[int], typer.Option(help="processes that train (default: 1)")] = None,  # noqa: UP045
    ps: Annotated[int, typer.Option(help="parameter servers; with some, a chief coordinates the workers")] = 0,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="a process of its own evaluates")] = False,
    model_dir: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model_dir", help="run folder that all share (default: as the command says, or a new one)"),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max_restarts", help="how often in a row to start again without progress")
    ] = 3,
    no_pin: Annotated[
        bool, typer.Option("--no_pin", help="don't bind each training process to its share of the cores")
    ] = False,
) -> None:
    """Run a command as a cluster of processes on this machine, and start it again when one is lost."""
    from modelyard.cli import cluster
    from modelyard.cli.app import COMMANDS, build_app, command_of

    layout = {"workers": workers, "ps": ps, "evaluator": evaluator, "max_restarts": max_restarts, "pin": not no_pin}
    words = command or []
    verb = command_of(words)
    cluster.launch(words, model_dir, layout, build_app(verb) if verb in COMMANDS else None)


def stop(
    run: Run,
    force: Annotated[bool, typer.Option("--force", help="kill; nothing more is saved")] = False,
    timeout_secs: Annotated[float, typer.Option("--timeout_secs", help="how long to wait", min=0)] = 60.0,
) -> None:
    """Stop a run: its processes on this machine save and end."""
    from modelyard.cli import cluster

    cluster.stop(run, force, timeout_secs)


def submit(
    target: Annotated[str, typer.Argument(metavar="slurm|kubernetes|vertex", help="where to")],
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="-- COMMAND …", help="what to run, such as -- train-and-evaluate --model_dir runs/mine"),
    ] = None,
    workers: Annotated[int, typer.Option(help="processes that train")] = 1,
    ps: Annotated[int, typer.Option(help="parameter servers")] = 0,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="a process of its own evaluates")] = False,
    name: Annotated[Optional[str], typer.Option(help="of the job (default: that of the run folder)")] = None,  # noqa: UP045
    resources: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="YAML with what the job asks for: cpus, memory, image, …"),
    ] = None,
    time: Annotated[Optional[str], typer.Option(help="how long it may run, such as 12h")] = None,  # noqa: UP045
    gpus: Annotated[Optional[int], typer.Option(help="GPUs of each process")] = None,  # noqa: UP045
    partition: Annotated[Optional[str], typer.Option(help="SLURM's queue")] = None,  # noqa: UP045
    image: Annotated[Optional[str], typer.Option(help="container image")] = None,  # noqa: UP045
    region: Annotated[Optional[str], typer.Option(help="of Vertex AI")] = None,  # noqa: UP045
    template: Annotated[Optional[str], typer.Option(metavar="FILE", help="use this instead of Modelyard's")] = None,  # noqa: UP045
    output: Annotated[Optional[str], typer.Option(metavar="FILE", help="file to write (default: by the name)")] = None,  # noqa: UP045
    dry_run: Annotated[bool, typer.Option("--dry_run", help="print it; write and submit nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace a file that exists")] = False,
    print_template: Annotated[bool, typer.Option("--print_template", help="print the template and leave")] = False,
    print_dockerfile: Annotated[
        bool, typer.Option("--print_dockerfile", help="print a Dockerfile for the command and leave")
    ] = False,
    json: Json = False,
) -> None:
    """Hand a run of several processes to SLURM, Kubernetes or Vertex AI."""
    from modelyard.cli import submit as submission

    if print_template:
        submission.print_template(target)
    elif print_dockerfile:
        submission.print_dockerfile(words or [], gpus)
    else:
        asked = {"time": time, "gpus": gpus, "partition": partition, "image": image, "region": region}
        settings = {"workers": workers, "ps": ps, "evaluator": evaluator, "name": name, "resources": resources}
        settings |= {"template": template, "output": output, "dry_run": dry_run, "force": force}
        submission.run(target, words or [], settings | asked, as_json=json)
