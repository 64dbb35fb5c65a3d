"""Commands for several processes: launch, stop, submit."""

from __future__ import annotations

import inspect
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.cli.output import Json, exit_interrupted, keywords, program, program_of_processes, show
from modelyard.errors import COMMAND_LINE, ConfigError, Interrupted, Problem, StorageError, UserError

if TYPE_CHECKING:
    from modelyard.config import Config
    from modelyard.launcher.job import Job
    from modelyard.launcher.targets import Target

log = logging.getLogger("modelyard")


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="train, train-and-evaluate or resume, with its options"),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="number of processes that train (default: 1)")] = None,
    ps: Annotated[
        int, typer.Option(help="number of parameter servers; with them, a chief coordinates the workers")
    ] = 0,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="evaluate in a separate process")] = False,
    model_dir: Annotated[
        str | None,
        typer.Option(
            "--model_dir", metavar="RUN", help="run folder of all processes (default: of COMMAND, or a new one)"
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max_restarts", help="restarts in a row without progress before it fails")
    ] = 3,
    no_pin: Annotated[
        bool, typer.Option("--no_pin", help="do not bind each training process to its part of the cores")
    ] = False,
) -> None:
    """Run a command as several processes on this machine.

    If a process is lost, all restart from the last checkpoint; with --ps, only a lost worker restarts.
    """
    from modelyard.cli.app import replace_alias
    from modelyard.cli.options import normalize
    from modelyard.cluster.description import Cluster
    from modelyard.distributed.agreement import config_in_cluster
    from modelyard.launcher.job import check_command, with_model_dir
    from modelyard.launcher.local import check_layout
    from modelyard.launcher.local import launch as launch_processes
    from modelyard.run.directory import new_run_path

    words, folder = with_model_dir(check_command(normalize(replace_alias(command or []))), model_dir)
    config = _config_of(words)
    addresses = check_layout(workers, ps, evaluator, max_restarts)
    config_in_cluster(config, Cluster(addresses=addresses, source="launch", model_dir=folder or "runs/new"))
    if folder is None:
        words, folder = with_model_dir(words, str(new_run_path(config)))
    if (config.plugins or config.cache_dir) and "--trust" not in words:  # here they are, and the processes can't ask
        words = [*words, "--trust"]
    try:
        launch_processes(
            words, workers=workers, ps=ps, evaluator=evaluator, model_dir=folder, max_restarts=max_restarts,
            pin=not no_pin, cache_dir=config.cache_dir, program=program_of_processes(),
        )  # fmt: skip
    except Interrupted as interrupt:
        flags = [] if workers is None else ["--workers", str(workers)]
        flags += ["--ps", str(ps)] if ps else []
        flags += ["--evaluator"] if evaluator else []
        flags += ["--max_restarts", str(max_restarts)] if max_restarts != 3 else []
        flags += ["--no_pin"] if no_pin else []
        again = shlex.join(["launch", *flags, "--model_dir", str(folder), "--", *(command or [])])
        saved = f"step {interrupt.step} is saved" if interrupt.step else "no step was trained"
        exit_interrupted(interrupt, f"; {saved}", f"{program()} {again}")


def _config_of(words: list[str], *, check_files: bool = True, **overriding: Any) -> Config:
    """Returns the config that the processes will find, so that mistakes in it are reported before they start."""
    from modelyard.cli.options import as_typer_command
    from modelyard.config import resolve
    from modelyard.launcher.job import RESUME

    def new_run(options: dict[str, Any], json: Json = False) -> Any:
        return resolve(options | overriding, check_files=check_files)

    def existing_run(options: dict[str, Any], run: str, json: Json = False) -> Any:
        from modelyard.loop.existing_run import resume_config

        return resume_config(run, options | overriding, COMMAND_LINE, check_files=check_files)[0]

    verb, *rest = words
    app = typer.Typer(add_completion=False)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    app.command(context_settings=settings)(as_typer_command(existing_run if verb == RESUME else new_run, None))
    command = typer.main.get_command(app)
    with command.make_context(verb, rest) as context:
        config: Config = command.invoke(context)
    if config.cluster == "none":
        message = "is none, and then every process would train alone. Leave it out."
        raise ConfigError([Problem(config.origin("cluster"), "cluster", message)])
    return config


def check_order(command: str, function: Callable[..., None], words: Sequence[str]) -> None:
    """Checks on which side of -- the options stand that ``launch`` and ``submit`` do not know.

    Raises:
        UserError: if they belong to the command that follows --, with the line to type.
    """
    from modelyard.cli.options import part_fields
    from modelyard.config.schema import CORE_FIELDS
    from modelyard.launcher.job import TRAIN, is_launchable

    own = list(words[words.index(command) + 1 :])
    end = own.index("--") if "--" in own else len(own)
    rest, own = own[end + 1 :], own[:end]
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    takes_value = {p.name: bool not in getattr(p.annotation, "__args__", (p.annotation,)) for p in parameters}
    verb, unknown, position = len(own), [], 0
    while position < len(own):
        word = own[position]
        name, equals, _ = word[2:].partition("=")
        if not word.startswith("--"):
            verb = min(verb, position) if is_launchable(word) else verb
        elif name not in takes_value:
            unknown.append((position, name))
        elif takes_value[name] and not equals:
            position += 1
        position += 1
    options = {*CORE_FIELDS, *part_fields()}
    misplaced = [(at, name) for at, name in unknown if name.removeprefix("no_") in options]
    if not misplaced:
        return
    called, named = f"{program()} {command}", f"--{misplaced[0][1]}"
    if verb < misplaced[0][0] and not rest:
        typed = f"{called} {shlex.join([*own[:verb], '--', *own[verb:]])}"
        raise UserError(f"{named} is an option of {own[verb]}, so -- must stand before {own[verb]}:\n  {typed}")
    other = rest[0] if rest else own[verb] if verb < len(own) else TRAIN
    raise UserError(f"{named} is not an option of {command}. Write it after --: {called} … -- {other} {named} …")


def stop(
    run: str,
    force: Annotated[bool, typer.Option("--force", help="kill the processes; nothing more is saved")] = False,
    timeout_secs: Annotated[float, typer.Option("--timeout_secs", help="how long to wait", min=0)] = 60.0,
) -> None:
    """Stop a run: its processes on this machine save and exit."""
    from modelyard.launcher.local import stop as stop_run
    from modelyard.system.console import console, live_table

    shown = ""
    with live_table(keep=False) as live:

        def waiting(running: list[Any]) -> None:
            nonlocal shown
            text = f"waiting for {', '.join(map(str, running))}"
            if live is not None:
                live(text)
            elif text != shown:
                console().print(text, soft_wrap=True)
            shown = text

        names = stop_run(run, force=force, timeout_secs=timeout_secs, waiting=waiting)
    done = f"{', '.join(names)} {'killed' if force else 'stopped'}" if names else f"nothing is running in {run}"
    console().print(done, soft_wrap=True)


def submit(
    target: Annotated[str, typer.Argument(metavar="slurm|kubernetes|vertex", help="where to run it")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="command to run, such as -- train --model_dir runs/mine"),
    ] = None,
    workers: Annotated[int, typer.Option(help="number of processes that train")] = 1,
    ps: Annotated[int, typer.Option(help="number of parameter servers")] = 0,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="evaluate in a separate process")] = False,
    name: Annotated[str | None, typer.Option(help="name of the job (default: name of the run folder)")] = None,
    resources: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file with the resources of the job: cpus, memory, image, …"),
    ] = None,
    time: Annotated[str | None, typer.Option(help="time limit, such as 12h")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each process")] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM partition")] = None,
    image: Annotated[str | None, typer.Option(help="container image")] = None,
    region: Annotated[str | None, typer.Option(help="region of Vertex AI")] = None,
    template: Annotated[str | None, typer.Option(metavar="FILE", help="template to use instead of Modelyard's")] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="file to write (default: named by the job)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="print the file; write and submit nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    print_template: Annotated[bool, typer.Option("--print_template", help="print the template and exit")] = False,
    print_dockerfile: Annotated[
        bool, typer.Option("--print_dockerfile", help="print a Dockerfile for the command and exit")
    ] = False,
    json: Json = False,
) -> None:
    """Submit a run to SLURM, Kubernetes or Vertex AI.

    Without the target's tool on this machine, only the script or manifest is written.
    """
    from modelyard.launcher import submit as submission
    from modelyard.launcher.dockerfile import dockerfile
    from modelyard.launcher.job import MATRIX, TUNE
    from modelyard.system.console import console

    if print_dockerfile and target == "slurm":
        raise UserError("--print_dockerfile has no effect with slurm: its processes use the Python of the machines.")
    verb = (words or [""])[0]
    if print_template or print_dockerfile:
        of_matrix = verb == MATRIX
        text = submission.template_text(target, of_matrix) if print_template else dockerfile(words or [], bool(gpus))
        sys.stdout.write(text)
        return
    if verb == TUNE:
        raise UserError(
            "the trials of a search can't be the tasks of a job: each depends on the results before it. Search on Ray "
            "(tune --on ray), or on one machine: a job of your own with `modelyard tune --jobs N`, which resumes."
        )
    done = submission.submit(
        target, words or [], workers=workers, ps=ps, evaluator=evaluator, name=name, resources=resources, time=time,
        gpus=gpus, partition=partition, image=image, region=region, template=template, output=output,
        dry_run=dry_run, force=force, check=_check_job,
        matrix=partial(_matrix_job, words or [], dry_run) if verb == MATRIX else None,
    )  # fmt: skip
    if done.path is None:
        if not json:
            sys.stdout.write(done.text)
        lines = [f"nothing was written or submitted. Without --dry_run: {done.command}"]
    else:
        tool = done.command.split()[0]
        waits = f"{tool} is not installed here. Submit the job with: {done.command}"
        lines = [f"wrote {done.path}", done.answer if done.submitted else waits]
    for line in lines:
        console().print(line, soft_wrap=True)
    if json:
        result = asdict(done) | {"path": str(done.path) if done.path else None}
        if done.path is not None:
            del result["text"]
        show(result, [], as_json=True)


def _matrix_job(words: Sequence[str], plans_nothing: bool, name: str | None, target: Target) -> Job:
    """Returns the job of a matrix, one task for each cell.

    Where the processes see this folder, the plan is written now. Else each task makes the same plan.

    Raises:
        UserError: with every mistake in the command.
    """
    from modelyard.cli.comparison import matrix
    from modelyard.cli.options import as_typer_command, normalize
    from modelyard.comparison.matrix import NAME, requested
    from modelyard.comparison.matrix_folder import merge_plan
    from modelyard.comparison.single_cell import write_plan
    from modelyard.launcher.job import MATRIX, make_matrix_job

    def keep(**given: Any) -> dict[str, Any]:
        return given

    keep.__signature__ = inspect.signature(matrix, eval_str=True)  # type: ignore[attr-defined]
    verb, *rest = normalize(list(words))
    app = typer.Typer(add_completion=False)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    app.command(context_settings=settings)(as_typer_command(keep, None))
    command = typer.main.get_command(app)
    with command.make_context(verb, rest) as context:
        given = command.invoke(context)
    options = given.pop("options")
    unused = [key for key in ("jobs", "ray_address", "only", "json") if given.pop(key)]
    unused += ["on"] if given.pop("on") != "local" else []
    if unused:
        message = "has no effect here: every cell is a task of the job."
        raise ConfigError([Problem(COMMAND_LINE, key, message) for key in unused])
    writes = target.name == "slurm"
    if writes and given["output"]:
        given["output"] = str(Path(given["output"]).expanduser().absolute())
    folder, request = requested(
        **given, source=COMMAND_LINE, check_files=target.sees_this_folder, **keywords(options, requested)
    )
    job = make_matrix_job((MATRIX, "--output", str(given["output"])), name, str(given["output"]), 1)
    if not writes:
        return replace(job, words=tuple(words), cells=len(merge_plan(folder, request)))
    cells = merge_plan(folder, request) if plans_nothing else write_plan(folder, request, NAME)
    # What is trusted here: the list of that is not where the job runs.
    trusts = any(cell.config.plugins or cell.config.cache_dir for cell in cells)
    return replace(job, words=(*job.words, *(("--trust",) if trusts else ())), cells=len(cells))


def _check_job(job: Job, target: Target) -> Job:
    """Reports what is wrong with a command before it waits in a queue. Returns the job to submit.

    What may exist only where the job runs, such as a plugin in an image, is a warning.

    Raises:
        UserError: with every mistake that does not depend on those machines.
    """
    from modelyard.cli.options import normalize
    from modelyard.cluster.description import Cluster
    from modelyard.distributed.agreement import config_in_cluster
    from modelyard.launcher.job import RESUME, named_files, option
    from modelyard.storage import is_remote

    words = normalize(job.words)
    elsewhere = "" if target.sees_this_folder else f"where {target.name} runs it"
    missing = [name for name in named_files(words) if not is_remote(name) and not Path(name).is_file()]
    if words[0] == RESUME and not is_remote(job.model_dir) and not Path(job.model_dir).exists():
        missing.append(job.model_dir)
    if elsewhere and missing:
        log.warning("%s is not here, so the options are not checked; it must exist %s", ", ".join(missing), elsewhere)
        return job
    try:
        config = _config_of(words, check_files=False)
    except StorageError as error:
        log.warning("the options are not checked: %s", error)
        return job
    except ConfigError as error:
        if not elsewhere:
            raise
        plugins = [problem for problem in error.problems if problem.key == "plugins"]
        if not plugins:
            if any(not _is_certain(problem) for problem in error.problems):
                error.add_hint("If a package registers it where the job runs, name that package with --plugins.")
            raise
        log.warning("%s It must exist %s; what it registers is not checked", plugins[0].message, elsewhere)
        checked = _config_without_plugins(words)
        if checked is None:
            return job
        config = checked
    # The machine that submits need not have an engine.
    engine = "tensorflow" if config.engine == "auto" else config.engine
    addresses = {role: ("",) * count for role, count in job.roles.items()}
    config_in_cluster(
        config, Cluster(addresses=addresses, source=f"submit {target.name}", model_dir=job.model_dir), engine
    )
    if not elsewhere:
        _warn_of_missing_paths(config)
    # What a run names and the user trusts here: the list of that is not where the job runs.
    trusts = config.plugins or config.cache_dir
    opens_run = words[0] == RESUME or option(words, "config_file") is not None
    if trusts and opens_run and "--trust" not in words and option(words, "plugins") is None:
        return replace(job, words=(*job.words, "--trust"))
    return job


def _config_without_plugins(words: list[str]) -> Config | None:
    """Returns the config without plugins; None if it names what only they can know, which is logged."""
    try:
        return _config_of(words, check_files=False, plugins=())
    except ConfigError as error:
        certain = [problem for problem in error.problems if _is_certain(problem)]
        if certain:
            raise ConfigError(certain) from None
        for problem in error.problems:
            log.warning("%s (unless a plugin has it)", problem)
        return None


def _is_certain(problem: Problem) -> bool:
    """Whether a problem can't be due to a plugin that is missing here."""
    from modelyard.config.schema import COMPONENTS, CORE_FIELDS

    return problem.key in CORE_FIELDS and problem.key not in {*COMPONENTS, "augment", "hooks", "preprocess"}


def _warn_of_missing_paths(config: Config) -> None:
    """Warns of data and weights that do not exist here: the machines of the job may have other disks."""
    from modelyard.config.schema import is_path
    from modelyard.run.directory import path_options
    from modelyard.storage import is_remote

    named = {"dataset": config.dataset if is_path(config.dataset) else None, "checkpoint_path": config.checkpoint_path}
    named |= {key: config.component_options.get(key) for key in path_options(config)}
    for key, path in named.items():
        if path and not is_remote(str(path)) and not Path(path).expanduser().exists():
            log.warning("%s: %s does not exist here; the machines of the job must have it", key, path)
