"""Facts of a run from its folder alone, without the data and without predictions.

The folder may be that of a run that trains, of one that was killed, or of somebody else. What can't be read is left out
with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from modelyard.charts.curves import curves_of
from modelyard.charts.draw import is_number
from modelyard.comparison.results import metrics_of, rows_of_best
from modelyard.config.resolve import recipe_names, recipe_path
from modelyard.config.schema import CORE_FIELDS, Config, is_path
from modelyard.config.yaml_file import inline, read_set
from modelyard.errors import UserError
from modelyard.reporting.facts import Missing, Option, RunFacts, Start, text
from modelyard.run.checkpoint import list_best, list_saved, read_loop_state, step_of
from modelyard.run.directory import RunDirectory, open_run_folder, run_options
from modelyard.run.manifest import read_manifest, started_by
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize

T = TypeVar("T")
MOST_CLASSES = 100_000
_ERRORS = (UserError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
_SHOWN_VERSIONS = ("modelyard", "keras", "tensorflow", "tensorflow-cpu", "jax", "numpy", "python")
_NOT_SHOWN = ("model", "dataset", "hypothesis", "data_dir")
"""Options that the page shows elsewhere."""


def read_run_facts(directory: RunDirectory, config: Config | None = None) -> RunFacts:
    """Returns the facts of a run folder.

    Args:
        directory: the run folder.
        config: its config, if it could be resolved.
    """
    missing: list[Missing] = []

    def tried(what: str, read: Callable[[], T], otherwise: Callable[[], T]) -> T:
        try:
            return read()
        except _ERRORS as error:
            missing.append(Missing(what, text(error, 1000)))
            return otherwise()

    opened = directory
    if directory.mirror is None:
        opened = tried("the folder of the best models", lambda: open_run_folder(directory.path), lambda: directory)
    rows: list[dict[str, Any]] = tried("the metrics", lambda: _rows(opened), list)
    options: dict[str, Any] = tried("the config", lambda: run_options(opened), dict)
    manifest: dict[str, Any] = tried("the manifest", lambda: read_manifest(opened), dict)
    best: list[Path] = tried("the best model", lambda: list_best(opened.best), list)
    saved: dict[int, Path] = tried("the checkpoints", lambda: list_saved(opened.checkpoints, opened.best), dict)
    summary: dict[str, Any] = tried("the status", lambda: summarize(opened), dict)
    state: Mapping[str, Any] = {}
    if saved:
        state = tried("the state of the newest checkpoint", lambda: read_loop_state(saved[max(saved)]), dict)
    best_state: Mapping[str, Any] = {}
    if best:
        of_best: dict[str, Any] = tried("the best metric", lambda: read_loop_state(best[0]), dict)
        best_state = _mapping(of_best.get("best"))
    scores: dict[str, dict[str, float]] = tried("the scores", lambda: _scores(rows, best), dict)
    shown: list[Option] = tried("the options", lambda: _options(options, config, manifest), list)
    data, model = _mapping(manifest.get("dataset")), _mapping(manifest.get("model"))
    curves = curves_of(rows)
    steps = [step for splits in curves.values() for curve in splits.values() for step in curve.steps]
    classes = data.get("classes") or _mapping(manifest.get("data")).get("classes") or []
    classes = [text(name) for name in classes[:MOST_CLASSES]] if isinstance(classes, list) else []
    dataset = text(options.get("dataset", ""))
    starts = [_mapping(start) for start in manifest.get("starts") or []]
    total = state.get("total_steps")
    return RunFacts(
        name=text(opened.name),
        address=text(opened.address, 1000),
        status=text(summary.get("status", "")),
        model=text(options.get("model", "")),
        dataset=(Path(dataset.rstrip("/")).name or dataset) if is_path(dataset) else dataset,
        classes=tuple(classes),
        step=max([*steps, *saved], default=0),
        total_steps=total if isinstance(total, int) else None,
        best_step=step_of(best[0]) if best else None,
        best_metric=text(best_state.get("metric", "")),
        rows=tuple(rows),
        curves=curves,
        scores=scores,
        looks=len({row.get("step") for row in rows if row.get("split") == "validation"}),
        sizes={text(split): size for split, size in _mapping(data.get("sizes")).items() if isinstance(size, int)},
        counts=_counts(_mapping(data.get("splits")), len(classes)),
        options=tuple(shown),
        starts=tuple(_start(start) for start in starts),
        machine=_machine(starts[-1]) if starts else {},
        parameters=_whole(model.get("parameters")),
        flops=_whole(model.get("flops")),
        seconds=max((float(r["seconds"]) for r in rows if is_number(r.get("seconds"))), default=None),
        hypothesis=text(options.get("hypothesis") or "", 2000),
        modes={text(name): text(mode) for name, mode in _mapping(manifest.get("metrics")).items()},
        missing=tuple(missing),
    )


def _rows(directory: RunDirectory) -> list[dict[str, Any]]:
    return [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)]


def _scores(rows: Sequence[Mapping[str, Any]], best: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Returns the metrics of each evaluated split, of the best model if there is one."""
    return {split: metrics_of(row) for split, row in rows_of_best(rows, best).items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _counts(splits: Mapping[str, Any], classes: int) -> dict[str, list[int]]:
    """Returns the examples of each class of the splits that have recorded them."""
    found = {text(split): _mapping(about).get("classes") for split, about in splits.items()}
    return {
        split: counts
        for split, counts in found.items()
        if isinstance(counts, list) and len(counts) == classes and all(_whole(count) is not None for count in counts)
    }


def _start(start: Mapping[str, Any]) -> Start:
    return Start(
        text(start.get("time", "")),
        _whole(start.get("step")) or 0,
        text(_mapping(start.get("hardware")).get("host", "")),
    )


def _machine(start: Mapping[str, Any]) -> dict[str, str]:
    hardware, engine, versions = (_mapping(start.get(key)) for key in ("hardware", "engine", "versions"))
    gpus = hardware.get("gpus")
    found = {
        "engine": engine.get("engine"),
        "devices": ", ".join(map(str, engine["devices"])) if isinstance(engine.get("devices"), list) else None,
        "CPU": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "memory": f"{hardware['memory_gib']} GiB" if is_number(hardware.get("memory_gib")) else None,
        "GPUs": ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else None,
        "system": hardware.get("system"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if name in versions),
        "git commit": start.get("git_commit"),
        "command": shlex.join(map(str, start["command"])) if isinstance(start.get("command"), list) else None,
    }
    return {name: text(value, 2000) for name, value in found.items() if value}


def _options(options: Mapping[str, Any], config: Config | None, manifest: Mapping[str, Any]) -> list[Option]:
    """Returns the options that differ from their defaults."""
    core = {name: info.default for name, info in CORE_FIELDS.items()}
    defaults = core if config is None else config.defaults()  # those of the model and of the dataset, too
    names = [n for n, value in options.items() if n in defaults and inline(value) != inline(_yaml(defaults[n]))]
    words, recipe = _command(manifest), _recipe(options.get("recipe"))
    script = started_by(dict(manifest))
    found = []
    for name in names:
        if name in _NOT_SHOWN:
            continue
        source = "a file, or Python"
        if name in words:
            source = "command line"
        elif script is not None:
            source = f"Python: {text(script)}"
        elif name in recipe:
            source = f"recipe {text(options['recipe'])}"
        found.append(Option(text(name), _typed(options[name]), _typed(_yaml(defaults[name])), source))
    return found


def _yaml(value: Any) -> Any:
    """Returns a default as YAML has it."""
    return list(value) if isinstance(value, tuple) else value


def _typed(value: Any) -> str:
    """Returns a value as it was typed: 6 and not 6.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return text(inline(value))


def _command(manifest: Mapping[str, Any]) -> set[str]:
    """Returns the names of the options that were typed at the first start."""
    starts: Sequence[Any] = manifest.get("starts") or [{}]
    words = _mapping(starts[0]).get("command")
    typed = [str(word) for word in words if str(word).startswith("--")] if isinstance(words, list) else []
    return {word[2:].partition("=")[0].replace("-", "_") for word in typed}


def _recipe(name: Any) -> set[str]:
    """Returns the options that a built-in recipe sets. No other file that a stranger's config names is read."""
    if name not in recipe_names():
        return set()
    try:
        return set(read_set(recipe_path(name), None, []))
    except _ERRORS:  # of a later Modelyard, or of nobody
        return set()
