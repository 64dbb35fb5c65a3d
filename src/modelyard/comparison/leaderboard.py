"""The leaderboard: models over datasets, with mean, confidence interval and standard deviation over seeds.

`significance` decides whether two models differ by more than noise. Models that do not differ from the best share its
rank.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.comparison.results import (
    RunResult,
    Unfinished,
    dataset_labels,
    example_values,
    group_by_entrant,
    read_results,
)
from modelyard.comparison.significance import Sample, interval, places
from modelyard.errors import RunError, UserError
from modelyard.loop.metric_hooks import Ranking

SPLITS = ("test", "validation")
_NO_METRICS = "no metrics"
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Score:
    """The score of one entrant on one dataset.

    Args:
        values: the score of each seed.
        mean: the mean over the seeds.
        spread: the sample standard deviation over the seeds; None with a single seed.
        interval: the 95 % confidence interval of the mean; with a single seed that of the trained model. None with a
            single seed if there are no values of examples.
        rank: the rank on this dataset, from 1; ties within noise share their mean rank.
        mark: best, within noise (of the best), worse, or unknown (a single seed, or too much noise to tell).
        p: the p-value of the difference from the best, corrected for all pairs; None for the best, and if nothing is
            known of the noise. With a single seed that of the trained models.
        examples: the number of examples; None if significance considers the seeds only.
        parameters: the number of parameters of the model.
        flops: the operations of the forward pass of one example.
        seconds: the mean duration of training.
        images_per_second: the mean speed of training.
    """

    values: dict[int, float]
    mean: float
    spread: float | None
    interval: tuple[float, float] | None
    rank: float
    mark: str
    p: float | None
    examples: int | None
    parameters: int | None
    flops: int | None
    seconds: float | None
    images_per_second: float | None

    @property
    def n(self) -> int:
        """The number of seeds."""
        return len(self.values)


@dataclass(frozen=True)
class Entrant:
    """A model, or a model with the options in which it differs from others of the same name."""

    name: str
    model: str
    options: dict[str, Any]
    scores: dict[str, Score]
    mean_rank: float | None = None


@dataclass(frozen=True)
class Leaderboard:
    """Models over datasets.

    Args:
        metric: the metric that is compared.
        split: the split that it is measured on.
        mode: "max" if higher is better, "min" if lower is better.
        datasets: the columns.
        entrants: the rows, the best mean rank first.
        ranked: the datasets of the mean rank: those where every entrant has a result.
        unfinished: runs that are not counted.
        notes: remarks for the reader.
    """

    metric: str
    split: str
    mode: str
    datasets: tuple[str, ...]
    entrants: tuple[Entrant, ...]
    ranked: tuple[str, ...]
    unfinished: tuple[Unfinished, ...] = ()
    notes: tuple[str, ...] = field(default=())


def leaderboard(
    folder: str | Path, *, metric: str | None = None, split: str | None = None, output: str | Path | None = None
) -> Leaderboard:
    """Compares all runs in a folder, and writes leaderboard.csv, leaderboard.md and leaderboard.html.

    Args:
        folder: a folder with runs at any depth, such as that of a matrix.
        metric: the metric to compare; by default accuracy, or another that the runs have.
        split: test or validation; by default test, if all runs have it.
        output: the folder to write to; by default ``folder``.

    Raises:
        RunError: if there is nothing to compare, or the runs have no metric in common.

    Example:
        >>> board = modelyard.leaderboard("runs")
        >>> board.entrants[0].name
    """
    from modelyard.comparison.pages import write_pages

    if split is not None and split not in SPLITS:
        raise UserError(f"there is no split {split!r} to compare on. Choose test or validation.")
    runs, unfinished = read_results(Path(folder).expanduser())
    if not runs:
        more = f" {len(unfinished)} have not finished." if unfinished else ""
        raise RunError(f"{folder} has no finished run to compare.{more}")
    notes: list[str] = []
    split, metric = choose_metric(runs, metric, split)
    runs = _with_metric(runs, metric, split, notes)
    ranking = Ranking.choose(metric, "auto", runs[0].scores[split])
    datasets = dataset_labels(runs)
    names, options = group_by_entrant(runs, datasets, notes)
    table = _newest_of_each_seed(runs, names, datasets, notes)
    rows = list(dict.fromkeys(names[run.name] for run in runs))
    scores: dict[str, dict[str, Score]] = {name: {} for name in rows}
    for dataset in sorted(table):
        seeds = {name: table[dataset][name] for name in rows if name in table[dataset]}
        for name, score in _scores(dataset, seeds, ranking, split, notes).items():
            scores[name][dataset] = score
    ranked = tuple(dataset for dataset in sorted(table) if len(table[dataset]) == len(rows))
    if len(ranked) < len(table) and len(rows) > 1:
        over = ", ".join(ranked) or "none, so there is no mean rank"
        notes.append(f"the mean rank is over the datasets where all have a result: {over}.")
    if any(score.n == 1 for mine in scores.values() for score in mine.values()) and len(rows) > 1:
        notes.append("with a single seed it is not known whether another seed turns a difference: it is marked '?'.")
    entrants = []
    for name, mine in scores.items():
        mean_rank = _mean(mine[dataset].rank for dataset in ranked)
        entrants.append(Entrant(name, *options[name], mine, mean_rank))
    entrants.sort(key=lambda entrant: _sort_key(entrant, ranking))
    board = Leaderboard(
        metric, split, ranking.mode, tuple(sorted(table)), tuple(entrants), ranked, tuple(unfinished), tuple(notes)
    )
    for note in notes:
        log.debug("%s", note)  # the commands print them
    write_pages(board, Path(output if output is not None else folder).expanduser())
    return board


def _sort_key(entrant: Entrant, ranking: Ranking) -> tuple[float, float, str]:
    means = [ranking.key(score.mean) for score in entrant.scores.values()]
    own_rank = statistics.fmean(score.rank for score in entrant.scores.values())
    return entrant.mean_rank if entrant.mean_rank is not None else own_rank, statistics.fmean(means), entrant.name


def choose_metric(runs: Sequence[RunResult], metric: str | None, split: str | None) -> tuple[str, str]:
    """Returns the split and the metric to compare: the first metric that enough runs have.

    Raises:
        RunError: if no two runs share one; with a single run, if it has none.
    """
    known = dict.fromkeys(name for run in runs for mine in run.scores.values() for name in mine)
    others = [name for name in known if name not in ("accuracy", "loss")]
    enough = min(2, len(runs))
    for name in ["accuracy", *others, "loss"] if metric is None else [metric]:
        counts = {where: sum(name in run.scores.get(where, {}) for run in runs) for where in SPLITS}
        where = split or max(SPLITS, key=lambda split: counts[split])
        if counts[where] >= enough:
            return where, name
    has = "; ".join(f"{run.name} has {_listed(run)}" for run in runs[:10]) + ("; …" if len(runs) > 10 else "")
    asked = f"no {'two runs' if enough == 2 else 'run'} here have {' on '.join(filter(None, (metric, split)))}"
    raise RunError(f"{asked if metric or split else 'these runs share no metric'}: {has}. Pass --metric and --split.")


def _listed(run: RunResult) -> str:
    return ", ".join(f"{split} {name}" for split, mine in run.scores.items() for name in mine) or _NO_METRICS


def _with_metric(runs: Sequence[RunResult], metric: str, split: str, notes: list[str]) -> list[RunResult]:
    without: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        if metric not in run.scores.get(split, {}):
            without[_listed(run)].append(run.name)
    for has, names in without.items():
        has = "no metrics at all" if has == _NO_METRICS else f"{has}, but no {split} {metric}"
        one = len(names) == 1
        left_out = f"{names[0]} is" if one else f"{len(names)} runs are"
        more = "" if one else f": {', '.join(names)}"
        notes.append(f"{left_out} left out, with {has}{more}.")
    return [run for run in runs if metric in run.scores.get(split, {})]


_Seeds = dict[int, RunResult]


def _newest_of_each_seed(
    runs: Sequence[RunResult], names: Mapping[str, str], datasets: Mapping[str, str], notes: list[str]
) -> dict[str, dict[str, _Seeds]]:
    """Returns the runs by dataset, entrant and seed: the newest of each seed."""
    found: dict[str, dict[str, _Seeds]] = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda run: (run.started, run.name)):
        seeds = found[datasets[run.name]][names[run.name]]
        seed = int(run.options.get("random_seed", 0))
        if seed in seeds:
            notes.append(f"{seeds[seed].name} is left out: {run.name} is newer and has the same options and seed.")
        seeds[seed] = run
    return found


def _scores(
    dataset: str, runs: Mapping[str, _Seeds], ranking: Ranking, split: str, notes: list[str]
) -> dict[str, Score]:
    """Returns the scores of all entrants on one dataset."""
    samples = _samples(dataset, runs, ranking.metric, split, notes)
    found = places(samples, ranking.key)
    is_share = "accuracy" in ranking.metric
    scores = {}
    for name, seeds in runs.items():
        mine, sample, place = list(seeds.values()), samples[name], found[name]
        scores[name] = Score(
            dict(zip(seeds, sample.scores, strict=True)),
            sample.mean,
            spread(sample.scores),
            interval(sample, is_share=is_share),
            place.rank,
            place.mark,
            place.p,
            sum(sample.shape) or None,
            next((run.parameters for run in mine if run.parameters is not None), None),
            next((run.flops for run in mine if run.flops is not None), None),
            _mean(run.seconds for run in mine),
            _mean(run.images_per_second for run in mine),
        )
    return scores


def _samples(dataset: str, runs: Mapping[str, _Seeds], metric: str, split: str, notes: list[str]) -> dict[str, Sample]:
    """Returns the results of all entrants on one dataset, with values of each example if all their runs have them."""
    found = {name: [example_values(run, split, metric) for run in seeds.values()] for name, seeds in runs.items()}
    first = next((pair for mine in found.values() for pair in mine if pair is not None), None)
    samples, without = {}, []
    for name, seeds in runs.items():
        scores = [run.scores[split][metric] for run in seeds.values()]
        known = [pair for pair in found[name] if pair is not None and first is not None and _same_examples(pair, first)]
        if len(known) == len(seeds):
            samples[name] = Sample(scores, (np.stack([values for values, _ in known]).astype(np.float32),))
        else:
            samples[name] = Sample(scores)
            without.append(name)
    if without and len(runs) > 1:
        who = "all" if len(without) == len(runs) else ", ".join(without)
        notes.append(
            f"on {dataset}, significance considers the seeds only, not the number of examples, for {who}: there are no "
            f"values of each example (runs of an earlier Modelyard), or {metric} is not a mean of such values."
        )
    return samples


def _same_examples(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (values, labels), (first, others) = one, other
    return len(values) == len(first) and (labels is None or others is None or np.array_equal(labels, others))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def spread(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None
