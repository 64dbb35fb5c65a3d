"""Who competes: what makes two runs entrants of their own, and what their datasets are called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelyard.comparison.gather import ScoredRun
from modelyard.comparison.plan import DATASET, MODEL, SEED, counts
from modelyard.config.schema import is_path
from modelyard.config.yaml_file import inline
from modelyard.registry import DATASETS

_ASIDE = (MODEL, DATASET, SEED, "recipe", "best_model_dir", "best_metric", "test_at_end", "split_seed")
_NOBODYS = "–"


def distinguish(
    runs: Sequence[ScoredRun], datasets: Mapping[str, str], notes: list[str]
) -> tuple[dict[str, str], dict[str, tuple[str, dict[str, Any]]]]:
    """The entrant of each run, by its name, and of each entrant its model and the options that tell it from others.

    Options tell apart only what was run on the same dataset: one that a model has otherwise on each dataset, as recipes
    do it, makes no new entrant. It is noted.
    """
    of_datasets = {key for entry in DATASETS.entries() for key in entry.options.model_fields}
    names: dict[str, str] = {}
    options: dict[str, tuple[str, dict[str, Any]]] = {}
    by_model: dict[str, list[ScoredRun]] = defaultdict(list)
    for run in runs:
        by_model[str(run.options.get(MODEL))].append(run)
    for model, mine in by_model.items():
        keys = [
            key
            for key in dict.fromkeys(key for run in mine for key in run.options)
            if counts(key) and key not in _ASIDE and key not in of_datasets and _varies(mine, key)
        ]
        telling = [key for key in keys if any(_varies(group, key) for group in _groups(mine, datasets))]
        telling = _without_echoes(mine, telling)
        silent = [key for key in keys if key not in telling and not _follows(mine, key, telling)]
        if silent:
            notes.append(f"{model} does not have the same {', '.join(silent)} on all datasets.")
        for run in mine:
            own = {key: run.options.get(key) for key in telling}
            more = ", ".join(f"{key}={inline(value)}" for key, value in own.items())
            names[run.name] = f"{model} ({more})" if more else model
            options[names[run.name]] = (model, own)
    return names, options


def _varies(runs: Sequence[ScoredRun], key: str) -> bool:
    return len({inline(run.options.get(key)) for run in runs}) > 1


def _groups(runs: Sequence[ScoredRun], datasets: Mapping[str, str]) -> list[list[ScoredRun]]:
    groups: dict[str, list[ScoredRun]] = defaultdict(list)
    for run in runs:
        groups[datasets[run.name]].append(run)
    return list(groups.values())


def _without_echoes(runs: Sequence[ScoredRun], keys: list[str]) -> list[str]:
    """Without options that follow from those before them, such as the momentum that only SGD has."""
    kept: list[str] = []
    for key in keys:
        if not kept or not _follows(runs, key, kept):
            kept.append(key)
    return kept


def _follows(runs: Sequence[ScoredRun], key: str, others: Sequence[str]) -> bool:
    values: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for run in runs:
        values[tuple(inline(run.options.get(other)) for other in others)].add(inline(run.options.get(key)))
    return bool(others) and all(len(found) == 1 for found in values.values())


def dataset_labels(runs: Sequence[ScoredRun]) -> dict[str, str]:
    """What the dataset of each run is called, by the name of the run. The same name is the same data."""
    found: dict[str, dict[str, list[ScoredRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[_short(run)][run.fingerprint].append(run)
    labels = {}
    for short, by_data in found.items():
        for fingerprint, mine in by_data.items():
            label = short if len(by_data) == 1 else f"{short} ({_difference(mine[0], by_data) or fingerprint[:8]})"
            labels.update(dict.fromkeys((run.name for run in mine), label))
    return labels


def _short(run: ScoredRun) -> str:
    name = str(run.options.get(DATASET, _NOBODYS))
    return (Path(name.rstrip("/")).stem or name) if is_path(name) else name


def _difference(run: ScoredRun, by_data: Mapping[str, list[ScoredRun]]) -> str:
    """The options of the dataset, or its folder, that tell this data from the others of the same name."""
    firsts = [mine[0] for mine in by_data.values()]
    keys = {key for entry in DATASETS.entries() for key in entry.options.model_fields}
    telling = [key for key in run.options if key in keys and _varies(firsts, key)]
    text = ", ".join(f"{key}={inline(run.options[key])}" for key in telling)
    folders = [str(Path(str(first.options.get(DATASET))).parent.name) for first in firsts]
    if not text and len(set(folders)) == len(firsts):
        text = Path(str(run.options.get(DATASET))).parent.name
    return text if text and sum(_text(first, telling) == _text(run, telling) for first in firsts) == 1 else ""


def _text(run: ScoredRun, keys: Sequence[str]) -> str:
    return inline([run.options.get(key) for key in keys] or [run.options.get(DATASET)])
