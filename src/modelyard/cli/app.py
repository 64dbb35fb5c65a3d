"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import typer

from modelyard.errors import UserError

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_ALIASES = {
    "train_and_evaluate": "train-and-evaluate",
    "train_and_eval": "train-and-evaluate",
    "train-and-eval": "train-and-evaluate",
    "find_learning_rate": "find-learning-rate",
}
Json = Annotated[
    bool,
    typer.Option("--json", help="print one JSON object as the last line of standard output", rich_help_panel="Output"),
]
_FINDER = "Learning rates"
Run = Annotated[str, typer.Argument(metavar="RUN", help="the run folder")]


@dataclass(frozen=True)
class Command:
    """A command: its function, its panel in the help, and which options of the config it takes (all, data, show,
    model)."""

    function: Callable[..., None]
    panel: str | None = None
    takes: str = ""


def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and leave", is_eager=True)] = False,
) -> None:
    """Train many models on many datasets from one config. A killed run goes on bit for bit."""
    if version:
        from modelyard import __version__

        typer.echo(__version__)
        raise typer.Exit


def train_and_evaluate(ctx: typer.Context, json: Json = False) -> None:
    """Train, evaluate on validation on the way, and keep the best (also: train_and_eval).

    Alone, it trains simple_cnn on digits. A --model_dir that exists is gone on with.
    """
    from modelyard.cli import commands

    commands.train(_resolve(_given(ctx)), evaluates=True, as_json=json)


def train(ctx: typer.Context, json: Json = False) -> None:
    """Train and save, without evaluating."""
    from modelyard.cli import commands

    commands.train(_resolve(_given(ctx)), evaluates=False, as_json=json)


def resume(ctx: typer.Context, run: Run, json: Json = False) -> None:
    """Go on with a run from its own config; options may change its length, cadences, hooks and devices."""
    from modelyard.cli import commands

    commands.resume(run, _given(ctx), as_json=json)


def evaluate(
    ctx: typer.Context,
    run: Annotated[Optional[str], typer.Argument(metavar="RUN", help="the run folder (or --model_dir)")] = None,  # noqa: UP045
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="best, latest or a step (default: best if there is one)", rich_help_panel="Evaluate"),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="validation|test|train", help="split to evaluate on", rich_help_panel="Evaluate")
    ] = "validation",
    json: Json = False,
) -> None:
    """Evaluate a checkpoint of a run."""
    from modelyard.cli import commands

    options = _given(ctx)
    folder = run or options.pop("model_dir", None)
    if folder is None:
        raise UserError("which run? Give its folder: modelyard evaluate RUN")
    commands.evaluate(str(folder), checkpoint, split, options, as_json=json)


def find_learning_rate(
    ctx: typer.Context,
    lowest: Annotated[float, typer.Option(help="learning rate of the first step", rich_help_panel=_FINDER)] = 1e-6,
    highest: Annotated[float, typer.Option(help="learning rate of the last step", rich_help_panel=_FINDER)] = 1.0,
    steps: Annotated[int, typer.Option(help="how many steps at most", rich_help_panel=_FINDER)] = 100,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="folder for table and plot (default: a new one in runs_dir)", rich_help_panel=_FINDER),
    ] = None,
    json: Json = False,
) -> None:
    """Train a few steps with a growing learning rate and suggest one; takes the options of a run."""
    from modelyard.cli import learning_rate

    settings = {"lowest": lowest, "highest": highest, "steps": steps, "output": output}
    learning_rate.find(_resolve(_given(ctx)), settings, as_json=json)


def config(ctx: typer.Context, json: Json = False) -> None:
    """Print the resolved config, and of every value where it came from."""
    from modelyard.cli import commands

    commands.show_config(_resolve(_given(ctx)), as_json=json)


def models(
    ctx: typer.Context,
    name: Annotated[Optional[str], typer.Argument(metavar="[NAME]", help="the one to look at")] = None,  # noqa: UP045
    image_shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--image_shape", metavar="H,W,C", help="build it for such images (default: its usual ones)"),
    ] = None,
    classes: Annotated[Optional[int], typer.Option(help="and so many classes", min=1)] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the models with parameters and FLOPs, or show the layers and options of one."""
    from modelyard.cli import models as listing

    options = _given(ctx)
    if name is None:
        listing.show_all(options, as_json=json)
    else:
        listing.show(name, image_shape, classes, options, as_json=json)


def datasets(
    plugins: Annotated[Optional[str], typer.Option(help="your own modules or .py files")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the datasets with their options."""
    from modelyard.cli import commands

    commands.list_parts("dataset", plugins, as_json=json)


def hooks(
    plugins: Annotated[Optional[str], typer.Option(help="your own modules or .py files")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the hooks with their arguments."""
    from modelyard.cli import commands

    commands.list_parts("hook", plugins, as_json=json)


def runs(
    folders: Annotated[Optional[list[str]], typer.Argument(metavar="[RUN …]", help="runs to compare")] = None,  # noqa: UP045
    runs_dir: Annotated[str, typer.Option("--runs_dir", help="folder of the runs")] = "runs",
    json: Json = False,
) -> None:
    """List all runs, or compare some: their different options and their results side by side."""
    from modelyard.cli import commands

    commands.runs(folders or [], runs_dir, as_json=json)


def doctor(json: Json = False) -> None:
    """Check this machine: versions, engine, CPU, GPUs, memory, disk, and its place in a cluster."""
    from modelyard.cli import doctor as examination

    examination.run(as_json=json)


def _given(context: typer.Context) -> dict[str, Any]:
    from modelyard.cli.options import given_options

    return given_options(context)


def _resolve(options: dict[str, Any]) -> Any:
    from modelyard.config import resolve

    return resolve(options)


def convert(
    ctx: typer.Context,
    source: Annotated[str, typer.Option("--from", metavar="SOURCE", help="a path, or the name of a dataset")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="the folder to make")],
    encoding: Annotated[str, typer.Option(metavar="keep|jpeg|raw", help="original bytes, JPEG, or pixels")] = "keep",
    max_edge: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--max_edge", help="make images smaller whose longer edge is longer", min=1),
    ] = None,
    quality: Annotated[int, typer.Option(help="of JPEGs that have to be encoded", min=1, max=100)] = 95,
    shards: Annotated[Optional[int], typer.Option(help="files a split (default: about 128 MB each)", min=1)] = None,  # noqa: UP045
    validation_fraction: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--validation_fraction", help="share of each class to set aside (default: splits stay)"),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="of the dataset (default: that of the folder)")] = None,  # noqa: UP045
    processes: Annotated[int, typer.Option(help="0: as many as there are cores; the bytes are the same", min=0)] = 0,
    on_bad: Annotated[
        str, typer.Option("--on_bad", metavar="fail|skip", help="what to do with an image that can't be read")
    ] = "fail",
    json: Json = False,
) -> None:
    """Turn any source into records with an index, labels and a dataset.json. Killed, it goes on when started again."""
    from modelyard.cli import data

    settings = {
        "encoding": encoding,
        "max_edge": max_edge,
        "quality": quality,
        "shards": shards,
        "validation_fraction": validation_fraction,
        "name": name,
        "processes": processes,
        "on_bad": on_bad,
    }
    data.convert(source, to, settings, _given(ctx), as_json=json)


def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100")],
    data_dir: Annotated[str, typer.Option("--data_dir", help="folder for the files")] = "data",
    archive: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--from", metavar="ARCHIVE", help="a local copy: the file, or a folder with the files"),
    ] = None,
) -> None:
    """Bring the official files of a dataset, checked; a broken download goes on."""
    from modelyard.cli import data

    data.fetch(name, data_dir, archive)


Source = Annotated[str, typer.Argument(metavar="DATASET", help="a path, or the name of a dataset")]


def data_info(ctx: typer.Context, source: Source, json: Json = False) -> None:
    """Show splits, classes and sizes; of records, the features they have."""
    from modelyard.cli import data

    data.info(source, _given(ctx), as_json=json)


def data_verify(ctx: typer.Context, source: Source, json: Json = False) -> None:
    """Read everything: every checksum, every image, the labels; list what is wrong."""
    from modelyard.cli import data

    data.verify(source, _given(ctx), as_json=json)


def data_show(
    ctx: typer.Context,
    source: Source,
    output: Annotated[str, typer.Option(help="the PNG file to write")] = "sheet.png",
    split: Annotated[str, typer.Option(metavar="train|validation|test", help="which split")] = "train",
    examples: Annotated[int, typer.Option(help="how many", min=1, max=200)] = 8,
    copies: Annotated[int, typer.Option(help="how often each is shown augmented", min=0, max=20)] = 5,
) -> None:
    """Make a picture of examples, as they are and as training sees them."""
    from modelyard.cli import data

    data.show(source, output, split, examples, copies, _given(ctx))


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

    layout = {"workers": workers, "ps": ps, "evaluator": evaluator, "max_restarts": max_restarts, "pin": not no_pin}
    words = command or []
    verb = _command_of(words)
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


def matrix(
    ctx: typer.Context,
    file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[FILE.yaml]", help="axes, exclude and options of the matrix"),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="folder of the matrix; one that exists is gone on with")
    ] = "",
    models: Annotated[Optional[str], typer.Option(metavar="LIST", help="models, separated by commas")] = None,  # noqa: UP045
    datasets: Annotated[Optional[str], typer.Option(metavar="LIST", help="datasets, by name or path")] = None,  # noqa: UP045
    seeds: Annotated[Optional[str], typer.Option(metavar="NUMBER", help="how many seeds, or which: 0,7,11")] = None,  # noqa: UP045
    jobs: Annotated[int, typer.Option(help="cells side by side, each with its share of cores and GPUs")] = 1,
    json: Json = False,
) -> None:
    """Train every combination of models, datasets and seeds, and compare them; started again, it goes on."""
    from modelyard.cli import matrix as many

    if not output:
        raise UserError("where to? Name the folder of the matrix: modelyard matrix --output FOLDER …")
    settings = {"output": output, "models": models, "datasets": datasets, "seeds": seeds, "jobs": jobs}
    many.matrix(file, settings, _given(ctx), as_json=json)


def leaderboard(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="folder with runs, at any depth")],
    metric: Annotated[Optional[str], typer.Option(help="what to compare (default: accuracy if there is)")] = None,  # noqa: UP045
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="test|validation", help="on which split (default: test if all runs have it)"),
    ] = None,
    output: Annotated[Optional[str], typer.Option(metavar="FOLDER", help="where to write (default: there)")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Compare runs: mean and spread over seeds for each model and dataset, ranks, costs; as CSV, Markdown, HTML too."""
    from modelyard.cli import matrix as many

    many.leaderboard(folder, metric, split, output, as_json=json)


_RUN, _DATA, _CLUSTER, _LOOK = "Run", "Data", "Cluster", "Look"
_OF_DATA = ("plugins", "data_dir", "cache_dir", "split_seed")
COMMANDS: dict[str, Command] = {
    "train-and-evaluate": Command(train_and_evaluate, _RUN, "all"),
    "train": Command(train, _RUN, "all"),
    "resume": Command(resume, _RUN, "all"),
    "evaluate": Command(evaluate, _RUN, "all"),
    "matrix": Command(matrix, _RUN, "all"),
    "find-learning-rate": Command(find_learning_rate, _RUN, "all"),
    "convert": Command(convert, _DATA, "data"),
    "data fetch": Command(data_fetch),
    "data info": Command(data_info, takes="data"),
    "data verify": Command(data_verify, takes="data"),
    "data show": Command(data_show, takes="show"),
    "launch": Command(launch, _CLUSTER),
    "stop": Command(stop, _CLUSTER),
    "submit": Command(submit, _CLUSTER),
    "config": Command(config, _LOOK, "all"),
    "models": Command(models, _LOOK, "model"),
    "datasets": Command(datasets, _LOOK),
    "hooks": Command(hooks, _LOOK),
    "runs": Command(runs, _LOOK),
    "leaderboard": Command(leaderboard, _LOOK),
    "doctor": Command(doctor, _LOOK),
}
"""By name; two words are a command of a group."""


def build_app(command: str | None = None) -> typer.Typer:
    """The application. Only ``command`` gets the options of the config: for all of them, that takes longer than the
    rest of the start; None gives them to all.
    """
    app = typer.Typer(
        name="modelyard",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    group = typer.Typer(no_args_is_help=True, help="Fetch, look at and check datasets.", rich_markup_mode="rich")
    for name, entry in COMMANDS.items():
        function = entry.function
        if entry.takes and command in (name, None):
            from modelyard.cli.options import Taken, with_config_options

            taken = {
                "all": Taken(),
                "data": Taken(_OF_DATA, ("dataset",)),
                "show": Taken((*_OF_DATA, "augment", "preprocess", "random_seed"), ("dataset",)),
                "model": Taken(("plugins", "engine"), ("model",)),
            }
            function = with_config_options(function, taken[entry.takes])
        *above, last = name.split()
        place = group if above else app
        place.command(last, context_settings=_EXTRA if entry.takes else None, rich_help_panel=entry.panel)(function)
    app.add_typer(group, name="data", rich_help_panel=_DATA)
    return app


def _command_of(words: list[str]) -> str:
    """The command that ``words`` call; an old spelling in them is replaced by today's."""
    places = [i for i, word in enumerate(words) if not word.startswith("-")][:2]
    if not places:
        return ""
    words[places[0]] = _ALIASES.get(words[places[0]], words[places[0]])
    named = [words[place] for place in places]
    return " ".join(named) if " ".join(named) in COMMANDS else named[0]


def _underscored(word: str) -> str:
    """Dashes in the name of an option are underscores."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def main(arguments: list[str] | None = None) -> None:
    """The command ``modelyard``. A user's own script gets every command and option by calling it.

    Example:
        A file with ``@modelyard.register_model`` functions ends with ``modelyard.main()``; then
        ``python my_file.py train-and-evaluate --model my_model`` works.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _command_of(words)
    completing = any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ)
    try:
        if command in COMMANDS and COMMANDS[command].takes:
            from modelyard.cli.options import normalize

            words = normalize(words)
        elif command in COMMANDS:
            own = words.index("--") if "--" in words else len(words)  # what follows is for another command
            words = [_underscored(word) for word in words[:own]] + words[own:]
        build_app(None if completing else command)(words, standalone_mode=True)
    except UserError as error:
        _print_error(error)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _print_error(error: UserError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(str(error)))
