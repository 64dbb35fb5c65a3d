"""Commands that train and evaluate."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.cli.output import Json, exit_interrupted, keywords, program, show, table
from modelyard.errors import COMMAND_LINE, DataError, Interrupted, unknown

if TYPE_CHECKING:
    from modelyard.config import Config

Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|latest|STEP", help="checkpoint to use (default: best if there is one)")
]


def train_and_evaluate(options: dict[str, Any], json: Json = False) -> None:
    """Train, evaluate during training, and keep the best model.

    Without options, it trains simple_cnn on digits. If --model_dir exists, the run is resumed.
    """
    from modelyard.config import resolve

    _train(resolve(options), evaluates=True, as_json=json)


def train(options: dict[str, Any], json: Json = False) -> None:
    """Train and save, without evaluating.

    If --model_dir exists, the run is resumed.
    """
    from modelyard.config import resolve

    _train(resolve(options), evaluates=False, as_json=json)


def resume(
    options: dict[str, Any],
    run: str,
    restore_config: Annotated[
        bool, typer.Option("--restore_config", help="first restore config.yaml from the newest checkpoint")
    ] = False,
    json: Json = False,
) -> None:
    """Resume a run with its own config.

    Options may change its length, cadences, hooks and devices. By default, they are those of the run.
    """
    from modelyard.loop.existing_run import resume_config
    from modelyard.run import directory

    if restore_config:
        directory.restore_config(directory.find_run_folder(run, options.get("cache_dir")))
    config, evaluates = resume_config(run, options, COMMAND_LINE)
    _train(config, evaluates, as_json=json)


def _train(config: Config, evaluates: bool, as_json: bool) -> None:
    from modelyard import api
    from modelyard.cluster.environment import find_cluster

    try:
        result = api.run(config, evaluates)
    except api.ExportFailedError as error:
        _show_result(error.result, as_json)  # the run itself is complete
        raise
    except Interrupted as interrupt:
        again = f"{program()} resume {shlex.quote(interrupt.model_dir)}"
        together = "the same command for every process of the cluster"
        exit_interrupted(interrupt, f" at step {interrupt.step}", again if find_cluster().is_alone else together)
    _show_result(result, as_json)


def evaluate(
    options: dict[str, Any],
    run: str,
    checkpoint: Checkpoint = None,
    split: Annotated[
        str | None, typer.Option(metavar="validation|test|train", help="split to evaluate on (default: validation)")
    ] = None,
    json: Json = False,
) -> None:
    """Evaluate a checkpoint of a run.

    Options may change how it is computed, such as devices and batch size. By default, they are those of the run.
    """
    from modelyard import api
    from modelyard.data.dataset import SPLITS

    if split is not None and split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    result = api.evaluate(
        run, checkpoint=checkpoint, split=split, source=COMMAND_LINE, **keywords(options, api.evaluate)
    )
    _show_result(result, as_json=json)


def _show_result(result: Any, as_json: bool) -> None:
    from modelyard.cluster.description import CHIEF, EVALUATOR

    if result.role not in (CHIEF, EVALUATOR):  # the chief shows it
        return
    rows: dict[str, Any] = {name: float(value) for name, value in result.metrics.items()}
    if result.best:
        rows[f"best validation {result.best['metric']}"] = float(result.best["value"])
        rows["best at step"] = result.best["step"]
    if result.seconds:
        rows["seconds"] = f"{result.seconds:.1f}"
    paused = "; paused, `modelyard resume` goes on" if result.paused else ""
    title = f"{result.split}, model of step {result.model_step}{paused}"
    results = table(("", ""), rows.items(), title=title, show_header=False)
    text = [results, f"run folder: {result.model_dir}", *(f"exported: {path}" for path in result.exports)]
    show(result.as_json(), text, as_json=as_json, text_too=True)


def find_learning_rate(
    options: dict[str, Any],
    lowest: Annotated[float, typer.Option(help="learning rate of the first step")] = 1e-6,
    highest: Annotated[float, typer.Option(help="learning rate of the last step")] = 1.0,
    steps: Annotated[int, typer.Option(help="number of steps; fewer if the loss diverges")] = 100,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="folder for table and plot (default: a new one in runs_dir)")
    ] = None,
    json: Json = False,
) -> None:
    """Train a few steps with a growing learning rate, and suggest one.

    Give the model, dataset and other options of the run that you plan.
    """
    from modelyard.config import resolve
    from modelyard.loop import learning_rate_finder
    from modelyard.storage import inside

    config = resolve(options)
    found = learning_rate_finder.find_learning_rate(config, lowest=lowest, highest=highest, steps=steps, output=output)
    shown = sorted({round(i * (len(found.losses) - 1) / 11) for i in range(12)})
    values = {i: (found.learning_rates[i], found.losses[i], found.smoothed[i]) for i in shown}
    rows = [(step, *(f"{value:.3g}" for value in values[step])) for step in shown]
    text: list[Any] = [table(("step", "learning rate", "loss", "smoothed"), rows)]
    points = {
        "the loss falls fastest at": found.steepest,
        "the loss diverges at": found.diverged,
        "a tenth of this rate is": found.tenth,
    }
    text += [f"{name:<26} {'–' if rate is None else f'{rate:.2g}'}" for name, rate in points.items()]
    if found.suggestion is None:
        text.append(
            "no suggestion: the loss neither fell, beyond noise, nor diverged. Try a higher --highest or more --steps."
        )
    else:
        which = "where the loss falls fastest" if found.suggestion == found.steepest else "a tenth of where it diverges"
        text.append(f"suggestion: --learning_rate {found.suggestion:.2g} ({which})")
    text.append(f"{inside(found.folder, learning_rate_finder.TABLE)}, {learning_rate_finder.PLOT}")
    show(found.as_json(), text, as_json=json)
