"""The leaderboard: models over datasets, mean and spread over seeds, with differences within noise marked as such."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard.comparison import scores
from modelyard.comparison.entrants import dataset_labels, distinguish
from modelyard.comparison.gather import ScoredRun, Unfinished, gather
from modelyard.errors import RunError, UserError
from modelyard.loop.ranking import Ranking

BEST, TIED, WORSE, UNKNOWN = "best", "within noise", "worse", "unknown"
SPLITS = ("test", "validation")
_NOTHING = "no metrics"
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Score:
    """What one entrant has on one dataset.

    Args:
        values: the score of each seed.
        mean: over the seeds.
        spread: sample standard deviation over the seeds; None of a single one.
        rank: on this dataset, from 1; ties within noise share the mean of their places.
        mark: best, within noise (of the best), worse, or unknown (a single seed).
        p: how likely such a difference from the best is by chance; None for the best and where it is not known.
        parameters: of the model.
        flops: of the forward pass of one example.
        seconds: of training, the mean.
        images_per_second: while training, the mean.
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
        """How many seeds."""
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
        metric: what is compared.
        split: on which split.
        mode: "max" if more is better, "min" if less is.
        datasets: the columns.
        entrants: the rows, the best mean rank first.
        ranked: the datasets that the mean rank is over: those where every entrant has a result.
        unfinished: runs that are not counted.
        notes: what to know when reading it.
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
        folder: a folder with runs, at any depth; that of a matrix or any other.
        metric: what to compare; by default accuracy, or what the runs have instead.
        split: test or validation; by default test, if all runs have it.
        output: where to write; the folder itself if None.

    Raises:
        RunError: if there is nothing to compare, or the runs have no metric in common.

    Example:
        >>> board = modelyard.leaderboard("runs")
        >>> board.entrants[0].name
    """
    from modelyard.comparison.pages import write_pages

    runs, unfinished = gather(Path(folder).expanduser())
    board = compare(runs, unfinished, metric, split, str(folder))
    for note in board.notes:
        log.debug("%s", note)  # whoever shows the board shows them
    write_pages(board, Path(output if output is not None else folder).expanduser())
    return board


def compare(
    runs: Sequence[ScoredRun],
    unfinished: Sequence[Unfinished] = (),
    metric: str | None = None,
    split: str | None = None,
    where: str = "this folder",
) -> Leaderboard:
    """The leaderboard of some runs; arguments as for `leaderboard`."""
    if split is not None and split not in SPLITS:
        raise UserError(f"there is no split {split!r} to compare on. Say test or validation.")
    if not runs:
        more = f" {len(unfinished)} have not finished." if unfinished else ""
        raise RunError(f"{where} has no finished run to compare.{more}")
    notes: list[str] = []
    chosen_split, chosen = choose(runs, metric, split)
    counted = _with_metric(runs, chosen, chosen_split, notes)
    ranking = Ranking.choose(chosen, "auto", counted[0].scores[chosen_split])
    datasets = dataset_labels(counted)
    names, options = distinguish(counted, datasets, notes)
    table = _by_place(counted, names, datasets, notes)
    columns = tuple(dict.fromkeys(dataset for _, dataset in sorted(table, key=lambda place: place[1])))
    rows = list(dict.fromkeys(names[run.name] for run in counted))
    found: dict[str, dict[str, Score]] = {name: {} for name in rows}
    for dataset in columns:
        for name, score in _column(
            {n: table[n, dataset] for n in rows if (n, dataset) in table}, ranking, chosen_split
        ):
            found[name][dataset] = score
    ranked = tuple(dataset for dataset in columns if all(dataset in found[name] for name in rows))
    if len(ranked) < len(columns) and len(rows) > 1:
        over = ", ".join(ranked) or "none, so there is no mean rank"
        notes.append(f"the mean rank is over the datasets where all have a result: {over}.")
    if any(score.n == 1 for mine in found.values() for score in mine.values()) and len(rows) > 1:
        notes.append("with a single seed nobody knows what is noise: such differences are marked '?'.")
    entrants = [
        Entrant(
            name,
            *options[name],
            found[name],
            statistics.fmean(found[name][dataset].rank for dataset in ranked) if ranked else None,
        )
        for name in rows
    ]
    entrants.sort(key=lambda entrant: _place(entrant, ranking))
    return Leaderboard(
        chosen, chosen_split, ranking.mode, columns, tuple(entrants), ranked, tuple(unfinished), tuple(notes)
    )


def _place(entrant: Entrant, ranking: Ranking) -> tuple[float, float, str]:
    means = [ranking.key(score.mean) for score in entrant.scores.values()]
    alone = statistics.fmean(score.rank for score in entrant.scores.values())
    return entrant.mean_rank if entrant.mean_rank is not None else alone, statistics.fmean(means), entrant.name


def choose(runs: Sequence[ScoredRun], metric: str | None, split: str | None) -> tuple[str, str]:
    """The split and the metric to compare.

    Raises:
        RunError: if no two runs share one (of a single run, if it has none).
    """
    splits = [split] if split is not None else SPLITS
    enough = min(2, len(runs))

    def having(name: str, where: str) -> int:
        return sum(name in run.scores.get(where, {}) for run in runs)

    known = list(dict.fromkeys(name for run in runs for mine in run.scores.values() for name in mine))
    wanted = (
        [metric] if metric is not None else ["accuracy", *(n for n in known if n not in ("accuracy", "loss")), "loss"]
    )
    candidates = [(having(name, where), name, where) for name in wanted for where in splits]
    best = max((count for count, _, _ in candidates), default=0)
    if best < enough:
        has = "; ".join(f"{run.name} has {_listed(run)}" for run in runs[:10]) + ("; …" if len(runs) > 10 else "")
        asked = f"no {'two runs' if enough == 2 else 'run'} here have {' on '.join(filter(None, (metric, split)))}"
        raise RunError(
            f"{asked if metric or split else 'these runs share no metric'}: {has}. Pass --metric and --split."
        )
    if metric is None:  # accuracy before others, even if another metric, such as the loss, is everywhere
        candidates = [one for one in candidates if one[0] >= enough and one[1] == _first(candidates, enough)]
        best = max(count for count, _, _ in candidates)
    return next((where, name) for count, name, where in candidates if count == best)


def _first(candidates: Sequence[tuple[int, str, str]], enough: int) -> str:
    return next(name for count, name, _ in candidates if count >= enough)


def _listed(run: ScoredRun) -> str:
    return ", ".join(f"{split} {name}" for split, mine in run.scores.items() for name in mine) or _NOTHING


def _with_metric(runs: Sequence[ScoredRun], metric: str, split: str, notes: list[str]) -> list[ScoredRun]:
    without: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        if metric not in run.scores.get(split, {}):
            without[_listed(run)].append(run.name)
    for has, names in without.items():
        has = "no metrics at all" if has == _NOTHING else f"{has}, but no {split} {metric}"
        one = len(names) == 1
        left_out = f"{names[0]} is" if one else f"{len(names)} runs are"
        more = "" if one else f": {', '.join(names)}"
        notes.append(f"{left_out} left out, with {has}{more}.")
    return [run for run in runs if metric in run.scores.get(split, {})]


def _by_place(
    runs: Sequence[ScoredRun], names: Mapping[str, str], datasets: Mapping[str, str], notes: list[str]
) -> dict[tuple[str, str], list[ScoredRun]]:
    """The runs of each entrant on each dataset, one for each seed: the newest."""
    places: dict[tuple[str, str], dict[int, ScoredRun]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: (run.started, run.name)):
        seeds = places[names[run.name], datasets[run.name]]
        seed = int(run.options.get("random_seed", 0))
        if seed in seeds:
            notes.append(f"{seeds[seed].name} is left out: {run.name} is newer and has the same options and seed.")
        seeds[seed] = run
    return {place: list(seeds.values()) for place, seeds in places.items()}


def _column(runs: Mapping[str, list[ScoredRun]], ranking: Ranking, split: str) -> list[tuple[str, Score]]:
    """The scores of all entrants on one dataset."""
    names = list(runs)
    values = [
        {int(run.options.get("random_seed", 0)): ranking.value(run.scores[split]) for run in runs[name]}
        for name in names
    ]
    means = [statistics.fmean(mine.values()) for mine in values]

    def differ(one: int, other: int) -> bool | None:
        p = scores.p_value(values[one], values[other])
        return None if p is None else p < scores.LEVEL

    places = scores.ranks(means, ranking.key, differ)
    best = min(range(len(names)), key=lambda number: ranking.key(means[number]))
    column = []
    for number, name in enumerate(names):
        is_best = means[number] == means[best]  # several may have the same
        p = None if is_best else scores.p_value(values[best], values[number])
        mark = BEST if is_best else UNKNOWN if p is None else WORSE if p < scores.LEVEL else TIED
        mine = runs[name]
        column.append(
            (
                name,
                Score(
                    values[number],
                    means[number],
                    scores.spread(list(values[number].values())),
                    places[number],
                    mark,
                    p,
                    next((run.parameters for run in mine if run.parameters is not None), None),
                    next((run.flops for run in mine if run.flops is not None), None),
                    _mean(mine, lambda run: run.seconds),
                    _mean(mine, lambda run: run.images_per_second),
                ),
            )
        )
    return column


def _mean(runs: Sequence[ScoredRun], of: Callable[[ScoredRun], float | None]) -> float | None:
    known = [value for run in runs if (value := of(run)) is not None]
    return statistics.fmean(known) if known else None
