"""What a run folder says about its run, without the data and without predictions.

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
from modelyard.run.directory import RunDirectory, open_run_folder, recorded_options, run_options
from modelyard.run.manifest import read_manifest, started_by
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize

T = TypeVar("T")
MOST_CLASSES = 100_000
_ERRORS = (UserError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
_SHOWN_VERSIONS = ("modelyard", "keras", "tensorflow", "tensorflow-cpu", "jax", "numpy", "python")
_NOT_SHOWN = ("model", "dataset", "hypothesis")
"""Options that the page shows elsewhere."""


def read_run_facts(directory: RunDirectory, config: Config | None = None) -> RunFacts:
    """Returns the facts of a run folder.

    Args:
        directory: the run folder.
        config: its config, if it could be resolved.
    """
    missing: list[Missing] = []

    def tried(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except _ERRORS as error:
            missing.append(Missing(what, text(error, 1000)))
            return otherwise

    if directory.mirror is None:
        directory = tried("the folder of the best models", lambda: open_run_folder(directory.path), directory)
    options: dict[str, Any] = tried("the config", lambda: run_options(directory), {})
    manifest: dict[str, Any] = tried("the manifest", lambda: read_manifest(directory), {})
    rows = tried("the metrics", lambda: [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)], [])
    best = tried("the best model", lambda: list_best(directory.best), [])
    saved = tried("the checkpoints", lambda: list_saved(directory.checkpoints, directory.best), {})
    state: dict[str, Any] = {}
    if saved:
        state = tried("the state of the newest checkpoint", lambda: read_loop_state(saved[max(saved)]), {})
    summary = tried("the status", lambda: summarize(directory), {})
    data, model = _mapping(manifest.get("dataset")), _mapping(manifest.get("model"))
    curves = curves_of(rows)
    steps = [step for splits in curves.values() for curve in splits.values() for step in curve.steps]
    scores = tried("the scores", lambda: {s: metrics_of(row) for s, row in rows_of_best(rows, best).items()}, {})
    classes = data.get("classes") or _mapping(manifest.get("data")).get("classes") or []
    classes = [text(name) for name in classes[:MOST_CLASSES]] if isinstance(classes, list) else []
    dataset = text(options.get("dataset", ""))
    starts = [_mapping(start) for start in manifest.get("starts") or []]
    best_state: dict[str, Any] = {}
    if best:
        best_state = _mapping(tried("the best metric", lambda: read_loop_state(best[0]), {}).get("best"))
    total = state.get("total_steps")
    return RunFacts(
        name=text(directory.name),
        address=text(directory.address, 1000),
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
        options=tuple(tried("the options", lambda: _options(options, config, manifest), [])),
        starts=tuple(_start(start) for start in starts),
        machine=_machine(starts[-1]) if starts else {},
        parameters=_whole(model.get("parameters")),
        flops=_whole(model.get("flops")),
        seconds=max((float(r["seconds"]) for r in rows if is_number(r.get("seconds"))), default=None),
        hypothesis=text(options.get("hypothesis") or "", 2000),
        modes={text(name): text(mode) for name, mode in _mapping(manifest.get("metrics")).items()},
        missing=tuple(missing),
    )


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
    if config is not None:
        defaults = config.defaults()
        names = [name for name in config.changed() if name in recorded_options(config)]
    else:
        defaults = {name: info.default for name, info in CORE_FIELDS.items()}
        names = [n for n, value in options.items() if n in defaults and inline(value) != inline(_plain(defaults[n]))]
    words, recipe = _command(manifest), _recipe(options.get("recipe"))
    script = started_by(dict(manifest))
    found = []
    for name in names:
        if name in _NOT_SHOWN or name not in options:
            continue
        source = "a file, or Python"
        if name in words:
            source = "command line"
        elif script is not None:
            source = f"Python: {text(script)}"
        elif name in recipe:
            source = f"recipe {text(options['recipe'])}"
        default = inline(_plain(defaults.get(name)))
        found.append(Option(text(name), text(inline(options[name])), text(default), source))
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
