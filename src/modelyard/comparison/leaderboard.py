"""The leaderboard: models over datasets, with mean and standard deviation over seeds.

A t-test decides whether two models differ by more than noise. Models that do not differ share a rank.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modelyard.comparison.results import RunResult, Unfinished, dataset_labels, group_by_entrant, read_results
from modelyard.errors import RunError, UserError
from modelyard.loop.metric_hooks import Ranking

BEST, TIED, WORSE, UNKNOWN = "best", "within noise", "worse", "unknown"
SPLITS = ("test", "validation")
_NO_METRICS = "no metrics"
SIGNIFICANCE_LEVEL = 0.05
"""Two-sided: of 20 pairs of equal models, one is taken to be different."""
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Score:
    """The score of one entrant on one dataset.

    Args:
        values: the score of each seed.
        mean: the mean over the seeds.
        spread: the sample standard deviation over the seeds; None with a single seed.
        rank: the rank on this dataset, from 1; ties within noise share their mean rank.
        mark: best, within noise (of the best), worse, or unknown (a single seed).
        p: the p-value of the difference from the best; None for the best and with a single seed.
        parameters: the number of parameters of the model.
        flops: the operations of the forward pass of one example.
        seconds: the mean duration of training.
        images_per_second: the mean speed of training.
    """

    values: dict[int, float]
    mean: float
    spread: float | None
    rank: float
    mark: str
    p: float | None
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
        for name, score in _scores(seeds, ranking, split).items():
            scores[name][dataset] = score
    ranked = tuple(dataset for dataset in sorted(table) if len(table[dataset]) == len(rows))
    if len(ranked) < len(table) and len(rows) > 1:
        over = ", ".join(ranked) or "none, so there is no mean rank"
        notes.append(f"the mean rank is over the datasets where all have a result: {over}.")
    if any(score.n == 1 for mine in scores.values() for score in mine.values()) and len(rows) > 1:
        notes.append("significance cannot be tested with a single seed: such differences are marked '?'.")
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


def _scores(runs: Mapping[str, _Seeds], ranking: Ranking, split: str) -> dict[str, Score]:
    """Returns the scores of all entrants on one dataset."""
    values = {
        name: {seed: ranking.value(run.scores[split]) for seed, run in seeds.items()} for name, seeds in runs.items()
    }
    means = {name: statistics.fmean(mine.values()) for name, mine in values.items()}

    def differ(one: str, other: str) -> bool | None:
        p = p_value(values[one], values[other])
        return None if p is None else p < SIGNIFICANCE_LEVEL

    shared_ranks = ranks(means, ranking.key, differ)
    best = min(means, key=lambda name: ranking.key(means[name]))
    scores = {}
    for name, seeds in runs.items():
        is_best = means[name] == means[best]  # several may have the same mean
        p = None if is_best else p_value(values[best], values[name])
        mine = seeds.values()
        scores[name] = Score(
            values[name],
            means[name],
            spread(list(values[name].values())),
            shared_ranks[name],
            BEST if is_best else UNKNOWN if p is None else WORSE if p < SIGNIFICANCE_LEVEL else TIED,
            p,
            next((run.parameters for run in mine if run.parameters is not None), None),
            next((run.flops for run in mine if run.flops is not None), None),
            _mean(run.seconds for run in mine),
            _mean(run.images_per_second for run in mine),
        )
    return scores


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# -- statistics of a few seeds --------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Returns the two-sided p-value of the difference of two means; None with a single seed.

    If the smaller set of seeds is part of the other, this is the paired t-test over those seeds, else Welch's t-test.
    """
    common = sorted(set(one) & set(other))
    fewest = min(len(one), len(other))
    if fewest < 2:
        return None
    is_paired = len(common) == fewest
    if is_paired:
        samples = [[one[seed] - other[seed] for seed in common]]
        difference = statistics.fmean(samples[0])
    else:
        samples = [list(one.values()), list(other.values())]
        difference = statistics.fmean(samples[0]) - statistics.fmean(samples[1])
    error = math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in samples))
    # Rounding gives scores that agree exactly a deviation of some 1e-17, which must not decide.
    if error <= 1e-12 * max(abs(difference), 1e-12):
        return 1.0 if abs(difference) < 1e-12 else 0.0
    from scipy import stats

    test = stats.ttest_1samp(samples[0], 0.0) if is_paired else stats.ttest_ind(*samples, equal_var=False)
    return float(test.pvalue)


Key = TypeVar("Key")


def ranks(
    means: Mapping[Key, float], key: Callable[[float], float], differ: Callable[[Key, Key], bool | None]
) -> dict[Key, float]:
    """Returns ranks from 1, the best first. All that do not differ from the best of their group share its mean rank.

    A group ends at the first that differs: a noisier result is never ranked before one with a better mean. ``differ``
    returns None if it is unknown whether two differ by more than noise, and then the means decide.
    """
    order = sorted(means, key=lambda name: key(means[name]))
    result: dict[Key, float] = {}
    while order:
        tied = [order.pop(0)]
        while order and (means[order[0]] == means[tied[0]] or differ(tied[0], order[0]) is False):
            tied.append(order.pop(0))
        result |= dict.fromkeys(tied, len(result) + (len(tied) + 1) / 2)
    return result
