"""The leaderboard: models over datasets, with mean, confidence interval and standard deviation over seeds.

`significance` decides whether two models differ by more than noise. Models that do not differ from the best share its
rank.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from modelyard import storage
from modelyard.comparison.results import (
    RunResult,
    Unfinished,
    baseline,
    dataset_labels,
    default_metrics,
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
        folds: the number of folds of cross-validation; 0 without.
        looks: of how many evaluations of a run on this split the score is the best.
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
    folds: int
    looks: int
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
    """Models over datasets. It prints as a table.

    Args:
        metric: the metric that is compared.
        split: the split that it is measured on.
        mode: "max" if higher is better, "min" if lower is better.
        datasets: the columns.
        entrants: the rows, the best mean rank first.
        ranked: the datasets of the mean rank: those where every entrant has a result.
        baselines: the score of a model that ignores its input, by dataset; where there is one for this metric.
        baseline: what that model predicts: the majority class, or the mean of the labels.
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
    baselines: dict[str, float] = field(default_factory=dict)
    baseline: str = ""

    @property
    def looks(self) -> int:
        """Of how many evaluations of a run on this split its score is the best, at most."""
        return max(score.looks for entrant in self.entrants for score in entrant.scores.values())

    def __str__(self) -> str:
        from modelyard.comparison.pages import as_text

        return as_text(self)


def leaderboard(
    folder: str | Path, *, metric: str | None = None, split: str | None = None, output: str | Path | None = None
) -> Leaderboard:
    """Compares all runs in a folder, and writes leaderboard.csv, leaderboard.md and leaderboard.html.

    Args:
        folder: a folder with runs at any depth, such as that of a matrix; or its URL.
        metric: the metric to compare; by default accuracy, or another that the runs have.
        split: test or validation; by default test, if all runs have it, and validation for folds.
        output: the folder to write to, or its URL; by default ``folder``.

    Raises:
        RunError: if there is nothing to compare, or the runs have no metric in common.

    Example:
        >>> board = modelyard.leaderboard("runs")
        >>> board.entrants[0].name
    """
    from modelyard.comparison.pages import write_pages

    if split is not None and split not in SPLITS:
        raise UserError(f"there is no split {split!r} to compare on. Choose test or validation.")
    folder, output = (_address(path) for path in (folder, folder if output is None else output))
    runs, unfinished = read_results(folder)
    if not runs:
        more = f" {len(unfinished)} have not finished." if unfinished else ""
        raise RunError(f"{folder} has no finished run to compare.{more}")
    notes: list[str] = []
    split, metric = choose_metric(runs, metric, split)
    runs = _with_metric(runs, metric, split, notes)
    ranking = Ranking.choose(metric, "auto", runs[0].scores[split], runs[0].modes)
    datasets = dataset_labels(runs)
    names, options = group_by_entrant(runs, datasets, notes)
    table = _newest_of_each_seed(runs, names, datasets, notes)
    rows = list(dict.fromkeys(names[run.name] for run in runs))
    scores: dict[str, dict[str, Score]] = {name: {} for name in rows}
    baselines: dict[str, float] = {}
    ignorant = ""
    for dataset in sorted(table):
        mine = _same_folds(dataset, {name: table[dataset][name] for name in rows if name in table[dataset]}, notes)
        for name, score in _scores(dataset, mine, ranking, split, notes).items():
            scores[name][dataset] = score
        found = baseline(list({run.fold: run for run in next(iter(mine.values())).values()}.values()), metric, split)
        if found is not None:
            ignorant, baselines[dataset] = found
    rows = [name for name in rows if scores[name]]
    ranked = tuple(dataset for dataset in sorted(table) if all(dataset in scores[name] for name in rows))
    board = Leaderboard(
        metric,
        split,
        ranking.mode,
        tuple(sorted(table)),
        tuple(sorted(_entrants(scores, options, ranked), key=lambda entrant: _sort_key(entrant, ranking))),
        ranked,
        tuple(unfinished),
        baselines=baselines,
        baseline=ignorant,
    )
    board = replace(board, notes=(*notes, *_remarks(board, ranking)))
    for note in board.notes:
        log.debug("%s", note)  # the commands print them
    write_pages(board, output)
    return board


def _entrants(
    scores: Mapping[str, dict[str, Score]], options: Mapping[str, tuple[str, dict[str, Any]]], ranked: Sequence[str]
) -> list[Entrant]:
    return [
        Entrant(name, *options[name], mine, _mean(mine[dataset].rank for dataset in ranked))
        for name, mine in scores.items()
        if mine
    ]


def _remarks(board: Leaderboard, ranking: Ranking) -> Iterator[str]:
    """Yields what a reader has to know of the scores."""
    scores = [score for entrant in board.entrants for score in entrant.scores.values()]
    if board.looks > 1:
        yield (
            f"the scores are optimistic: each is the best of up to {board.looks} evaluations of its run on "
            f"{board.split}, by which the model was chosen. --test_at_end evaluates that model once, on examples that "
            "were not used to choose it; without a test split, add --test_fraction."
        )
    if len(board.ranked) < len(board.datasets) and len(board.entrants) > 1:
        over = ", ".join(board.ranked) or "none, so there is no mean rank"
        yield f"the mean rank is over the datasets where all have a result: {over}."
    if any(score.n == 1 and score.folds < 2 for score in scores) and len(board.entrants) > 1:
        yield "with a single seed it is not known whether another seed turns a difference: it is marked '?'."
    for dataset, level in board.baselines.items():
        scored = {entrant.name: entrant.scores[dataset] for entrant in board.entrants if dataset in entrant.scores}
        weak = [name for name, score in scored.items() if not _is_above(score, level, ranking)]
        # The interval of two seeds is so wide that it has the baseline in it, also for a much better model.
        unknown = [name for name in weak if scored[name].n == 2 and ranking.is_better(scored[name].mean, level)]
        weak = [name for name in weak if name not in unknown]
        if unknown:
            yield (
                f"on {dataset}, two seeds are too few to tell whether these are better than the {board.baseline}: "
                f"{', '.join(unknown)}."
            )
        if weak:
            yield f"on {dataset}, not better than the {board.baseline} by more than noise: {', '.join(weak)}."


def _is_above(score: Score, level: float, ranking: Ranking) -> bool:
    ends = score.interval or (score.mean, score.mean)
    return all(ranking.is_better(end, level) for end in ends)


def _address(path: str | Path) -> str:
    return str(path) if storage.is_remote(str(path)) else str(Path(path).expanduser())


def _sort_key(entrant: Entrant, ranking: Ranking) -> tuple[float, float, str]:
    means = [ranking.key(score.mean) for score in entrant.scores.values()]
    own_rank = statistics.fmean(score.rank for score in entrant.scores.values())
    return entrant.mean_rank if entrant.mean_rank is not None else own_rank, statistics.fmean(means), entrant.name


def choose_metric(runs: Sequence[RunResult], metric: str | None, split: str | None) -> tuple[str, str]:
    """Returns the split and the metric to compare: the first metric that enough runs have.

    Raises:
        RunError: if no two runs share one; with a single run, if it has none.
    """
    known = default_metrics(name for run in runs for mine in run.scores.values() for name in mine)
    enough = min(2, len(runs))
    # Cross-validation is about the folds, even if there is a test split.
    preferred = SPLITS[::-1] if all(run.fold is not None for run in runs) else SPLITS
    for name in known if metric is None else [metric]:
        counts = {where: sum(name in run.scores.get(where, {}) for run in runs) for where in SPLITS}
        where = split or max(preferred, key=lambda split: counts[split])
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


_Runs = dict[tuple[int, int], RunResult]
"""The runs of one entrant on one dataset, by seed and fold, which is 0 without cross-validation."""


def _newest_of_each_seed(
    runs: Sequence[RunResult], names: Mapping[str, str], datasets: Mapping[str, str], notes: list[str]
) -> dict[str, dict[str, _Runs]]:
    """Returns the runs by dataset and entrant: the newest of each seed and fold."""
    found: dict[str, dict[str, _Runs]] = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda run: (run.started, run.name)):
        mine = found[datasets[run.name]][names[run.name]]
        key = int(run.options.get("random_seed", 0)), run.fold or 0
        if key in mine:
            same = "the same options and seed" if run.fold is None else "the same options, seed and fold"
            notes.append(f"{mine[key].name} is left out: {run.name} is newer and has {same}.")
        mine[key] = run
    return found


def _same_folds(dataset: str, runs: Mapping[str, _Runs], notes: list[str]) -> dict[str, _Runs]:
    """Returns the runs of the folds that all entrants have, of the seeds that have all of these."""
    every = {fold for mine in runs.values() for _, fold in mine}
    if len(every) == 1:
        return dict(runs)
    folds = every.intersection(*({fold for _, fold in mine} for mine in runs.values())) or every
    kept, left = {}, []
    for name, mine in runs.items():
        seeds = {seed for seed, _ in mine if all((seed, fold) in mine for fold in folds)}
        kept[name] = {key: run for key, run in sorted(mine.items()) if key[0] in seeds and key[1] in folds}
        left += [run.name for key, run in mine.items() if key not in kept[name]]
    if not any(kept.values()):
        return dict(runs)
    if left:
        listed = ", ".join(map(str, sorted(folds)))
        notes.append(f"on {dataset}, folds {listed} are compared, which all have; left out: {', '.join(left)}.")
    return {name: mine for name, mine in kept.items() if mine}


def _scores(
    dataset: str, runs: Mapping[str, _Runs], ranking: Ranking, split: str, notes: list[str]
) -> dict[str, Score]:
    """Returns the scores of all entrants on one dataset."""
    samples = _samples(dataset, runs, ranking.metric, split, notes)
    found = places(samples, ranking.key)
    is_share = "accuracy" in ranking.metric
    scores = {}
    for name, own in runs.items():
        mine, sample, place = list(own.values()), samples[name], found[name]
        values = _by_seed(own, ranking.metric, split)
        folds = len({fold for _, fold in own if fold})
        scores[name] = Score(
            values,
            sample.mean,
            spread(list(values.values()) if len(values) > 1 else [run.scores[split][ranking.metric] for run in mine]),
            interval(sample, is_share=is_share),
            place.rank,
            place.mark,
            place.p,
            sum(sample.shape) or None,
            folds,
            max(run.looks[split] for run in mine),
            next((run.parameters for run in mine if run.parameters is not None), None),
            next((run.flops for run in mine if run.flops is not None), None),
            _mean(run.seconds for run in mine),
            _mean(run.images_per_second for run in mine),
        )
    return scores


def _by_seed(runs: _Runs, metric: str, split: str) -> dict[int, float]:
    """Returns the score of each seed: with folds, the mean over their examples."""
    values = {}
    for seed in sorted({seed for seed, _ in runs}):
        mine = [run for (own, _), run in runs.items() if own == seed]
        sizes = [run.sizes.get(split, 1) for run in mine]
        values[seed] = statistics.fmean([run.scores[split][metric] for run in mine], sizes)
    return values


def _samples(dataset: str, runs: Mapping[str, _Runs], metric: str, split: str, notes: list[str]) -> dict[str, Sample]:
    """Returns the results of all entrants on one dataset, with values of each example if all their runs have them."""
    first: dict[int, _Values] = {}
    samples, without = {}, []
    for name, mine in runs.items():
        found = {key: example_values(run, split, metric) for key, run in mine.items()}
        known: dict[tuple[int, int], Any] = {}
        for (seed, fold), pair in found.items():
            part = fold if split == "validation" else 0  # all folds are tested on the same examples
            if pair is not None and _same_examples(pair, first.setdefault(part, pair)):
                known[seed, fold] = pair[0]
        samples[name] = _sample(mine, metric, split, known)
        if not samples[name].parts:
            without.append(name)
    if without and len(runs) > 1:
        who = "all" if len(without) == len(runs) else ", ".join(without)
        notes.append(
            f"on {dataset}, significance considers the seeds only, not the number of examples, for {who}: there are no "
            f"values of each example (runs of an earlier Modelyard), or {metric} is not a mean of such values."
        )
    return samples


def _sample(runs: _Runs, metric: str, split: str, known: Mapping[tuple[int, int], Any]) -> Sample:
    """Returns the results of an entrant. Folds of the validation split are disjoint; on test they are like seeds."""
    folds = sorted({fold for _, fold in runs})
    each = [run.scores[split][metric] for run in runs.values()]
    pooled = split == "validation" and len(folds) > 1
    by_seed = list(_by_seed(runs, metric, split).values())
    if len(known) < len(runs):  # with one seed, the folds show the noise
        return Sample(by_seed if pooled and len(by_seed) > 1 else each)
    if not pooled:
        return Sample(each, (np.stack(list(known.values())).astype(np.float32),))
    parts = [np.stack([values for (_, own), values in known.items() if own == fold]) for fold in folds]
    return Sample(by_seed, tuple(part.astype(np.float32) for part in parts))


_Values = tuple[Any, Any]


def _same_examples(one: _Values, other: _Values) -> bool:
    (values, labels), (first, others) = one, other
    return len(values) == len(first) and (labels is None or others is None or np.array_equal(labels, others))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def spread(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None
