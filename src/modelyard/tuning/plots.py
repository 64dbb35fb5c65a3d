"""The plots of a search, as data and as SVG: history, parallel coordinates, slices and the Pareto front."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelyard.comparison.plots import HEIGHT, WIDTH, linear_range, log_range, log_ticks, templates, with_unit
from modelyard.config.yaml_file import inline
from modelyard.tuning.samplers import DONE, FAILED
from modelyard.tuning.space import Choice, Parameter, Space

PAUSED = "paused"
BEST, INFEASIBLE = "best", "infeasible"
SHADES = 5
"""The number of colours for scores."""
_SINGLE = 200
"""Of more trials, the marks of one kind are a single shape, without the name of each."""
_FAR, _KEPT = 30.0, 4.0
"""If a score is so many times as far from the best as most are, an axis ends at the second number."""
_MAX_TEXT = 300
_TICK_LETTER, _NAME_LETTERS = 6.4, 17
_GAP, _TALL = 130, 330
"""The distance of two axes of parallel coordinates, and the height of that plot."""
_SHAPES = {
    DONE: "M{x} {y}h.01",  # with round ends, a dot
    BEST: "M{x} {y}m0-8l2.4 5.2 5.6.6-4.2 3.8 1.2 5.6-5-2.9-5 2.9 1.2-5.6-4.2-3.8 5.6-.6z",
    PAUSED: "M{x} {y}m0-4.5l4.5 8h-9z",
    INFEASIBLE: "M{x} {y}m-3.5-3.5h7v7h-7z",
    FAILED: "M{x} {y}m-3.5-3.5l7 7m0-7l-7 7",
}
"""The marks of trials; each has a shape of its own."""


@dataclass(frozen=True, kw_only=True)
class ShownTrial:
    """A trial as its page shows it.

    Args:
        number: its number.
        values: the values of its parameters.
        state: done, failed, running, paused, or another word.
        scores: its metrics on validation; of a paused trial, so far.
        steps: the steps that it was trained.
        seconds: how long that took.
        reason: why it failed.
        model_dir: its run folder; empty if there is none yet.
        feasible: whether it meets all constraints.
        costs: parameters, seconds and so on, as far as they are known.
        evaluations: the metrics of each evaluation on validation.
    """

    number: int
    values: Mapping[str, Any]
    state: str
    scores: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None
    seconds: float | None = None
    reason: str = ""
    model_dir: str = ""
    feasible: bool = True
    costs: Mapping[str, float] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class ShownSearch:
    """A search as its page shows it.

    Args:
        name: its name.
        space: the parameters.
        options: the options of all trials.
        sampler: the name of the sampler.
        seed: the seed of the proposals.
        metrics: what is searched for, each "max" or "min"; empty if no trial has a score.
        trials: the trials, by number.
    """

    name: str
    space: Space
    options: Mapping[str, Any]
    sampler: str
    seed: int
    metrics: Mapping[str, str]
    trials: Sequence[ShownTrial]

    def scored(self, metric: str) -> list[ShownTrial]:
        """Returns the trials that are done, meet all constraints and have a metric."""
        return [one for one in self.trials if one.state == DONE and one.feasible and metric in one.scores]

    def key(self, metric: str, score: float) -> float:
        """Returns a sort key: the best first."""
        return -score if self.metrics[metric] == "max" else score


def best_trials(search: ShownSearch) -> list[ShownTrial]:
    """Returns the best trial; with several metrics, the trials than which none is better: the Pareto front."""
    if not search.metrics:
        return []
    first, *others = search.metrics

    def keys(trial: ShownTrial) -> tuple[float, ...]:
        return tuple(search.key(metric, trial.scores[metric]) for metric in search.metrics)

    trials = [one for one in search.scored(first) if all(metric in one.scores for metric in others)]
    trials.sort(key=lambda one: (keys(one), one.number))
    if not others:
        return trials[:1]
    front: list[ShownTrial] = []
    for one in trials:  # which is dominated only by one before it
        mine = keys(one)
        if not any(
            keys(better) != mine and all(a <= b for a, b in zip(keys(better), mine, strict=True)) for better in front
        ):
            front.append(one)
    return front


def shades(search: ShownSearch, metric: str) -> dict[int, int]:
    """Returns the colour of each trial with a score, from 0 for the worst fifth to 4 for the best, by its rank."""
    keys = {one.number: search.key(metric, one.scores[metric]) for one in search.scored(metric)}
    ranked = sorted(keys.values(), reverse=True)
    return {
        number: SHADES * bisect.bisect_left(ranked, -key, key=lambda k: -k) // len(ranked)
        for number, key in keys.items()
    }


def shown(value: Any) -> str:
    """Returns a value as text that fits into a table."""
    text = f"{value:.4g}" if isinstance(value, float) else inline(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def named(trial: ShownTrial, metrics: Iterable[str]) -> str:
    """Returns a trial in words: its number, scores and values."""
    scores = [f"{metric} {trial.scores[metric]:.4g}" for metric in metrics if metric in trial.scores]
    state = [] if trial.state == DONE and trial.feasible else [kind_of(trial)]
    values = [f"{name}={shown(value)}" for name, value in trial.values.items()]
    return f"trial {trial.number}: {', '.join([*state, *scores, *values])}"[:_MAX_TEXT]


def kind_of(trial: ShownTrial) -> str:
    """Returns which mark a trial has: its state, or infeasible."""
    return INFEASIBLE if trial.state == DONE and not trial.feasible else trial.state


# -- axes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis of numbers, perhaps on a logarithmic scale, or of categories.

    Args:
        name: what it shows.
        low, high: its ends; their logarithms if ``is_log``.
        is_log: whether it is logarithmic.
        categories: its values as text, if it is of categories.
        ticks: positions from 0 to 1, and their texts.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    is_log: bool = False
    categories: tuple[str, ...] = ()
    ticks: tuple[tuple[float, str], ...] = ()

    def place(self, value: Any) -> float | None:
        """Returns the position of a value, from 0 to 1; None if it has none. Values beyond an end are at that end."""
        if self.categories:
            text = inline(value)
            return (self.categories.index(text) + 0.5) / len(self.categories) if text in self.categories else None
        if not _is_number(value) or (self.is_log and value <= 0):
            return None
        part = ((math.log10(value) if self.is_log else value) - self.low) / (self.high - self.low)
        return min(max(part, 0.0), 1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def parameter_axis(parameter: Parameter, values: Sequence[Any]) -> Axis:
    """Returns the axis of a parameter: of its space, and of ``values``, which may be of an earlier space."""
    domain = parameter.domain
    if isinstance(domain, Choice):
        texts = tuple(dict.fromkeys(inline(value) for value in (*domain.values, *values)))
        step = -(-len(texts) // 12)
        ticks = tuple(((number + 0.5) / len(texts), text) for number, text in enumerate(texts) if number % step == 0)
        return Axis(parameter.name, categories=texts, ticks=ticks)
    numbers = [one for one in values if _is_number(one) and (one > 0 or not domain.is_log)]
    low, high = min((domain.low, *numbers)), max((domain.high, *numbers))
    if domain.is_log:
        start, end = log_range([low, high])
        marks = [(math.log10(tick), tick) for tick in log_ticks(start, end)]
    else:
        start, end, found = linear_range(low, high)
        marks = [(tick, tick) for tick in found if low <= tick <= high]
    if domain.is_int:
        marks = [(at, tick) for at, tick in marks if math.isclose(tick, round(tick))]
    ticks = tuple(((at - start) / (end - start), _number(tick)) for at, tick in marks)
    return Axis(parameter.name, start, end, domain.is_log, ticks=ticks)


def score_axis(search: ShownSearch, metric: str) -> tuple[Axis, int]:
    """Returns the axis of a metric, and how many scores of trials are beyond it, since they are so much worse."""
    scores = [one.scores[metric] for one in search.trials if metric in one.scores and one.state in (DONE, PAUSED)]
    keys = sorted(search.key(metric, score) for score in scores) or [0.0]
    usual, limit = keys[(3 * len(keys)) // 4] - keys[0], keys[-1]
    if usual > 0 and limit - keys[0] > _FAR * usual:
        limit = keys[0] + _KEPT * usual
    inside = [score for score in scores if search.key(metric, score) <= limit] or [0.0]
    low, high, found = linear_range(min(inside), max(inside))
    ticks = tuple(((tick - low) / (high - low), f"{tick:.6g}") for tick in found)
    return Axis(metric, low, high, ticks=ticks), len(scores) - len(inside)


def _plain_axis(name: str, values: Sequence[float]) -> Axis:
    low, high, found = linear_range(min(values, default=0), max(values, default=1))
    marks = [tick for tick in found if tick >= 0 and math.isclose(tick, round(tick))]
    return Axis(name, low, high, ticks=tuple(((tick - low) / (high - low), _number(tick)) for tick in marks))


def _number(value: float) -> str:
    value = float(f"{value:.12g}")  # a multiple of a step has an error in its last bits
    return with_unit(value) if abs(value) >= 1e4 else f"{value:.4g}"


# -- what the plots show --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A mark of a plot: its position, from 0 to 1, its kind, and its trial. Without a score, y is None."""

    x: float
    y: float | None
    kind: str
    trial: ShownTrial


@dataclass(frozen=True)
class Chart:
    """A plot of marks, with a line from left to right. ``beyond`` scores are drawn at the end of the axis."""

    metrics: tuple[str, ...]
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    line: tuple[tuple[float, float], ...] = ()
    beyond: int = 0


def history(search: ShownSearch, metric: str) -> Chart:
    """Returns the score of each trial by its number, and the best so far.

    If trials are paused, by the steps that all trials up to it were trained: their numbers say little of their cost.
    """
    by_steps = any(one.state == PAUSED for one in search.trials)
    places: dict[int, float] = {}
    spent = 0
    for one in search.trials:
        spent += one.steps or 0
        places[one.number] = spent if by_steps else one.number
    x = _plain_axis("steps of all trials so far" if by_steps else "trial", list(places.values()))
    y, beyond = score_axis(search, metric)
    marks, line = [], []
    best: float | None = None
    tops = {one.number for one in best_trials(search)}
    for one in search.trials:
        at = x.place(places[one.number])
        assert at is not None
        marks += _marks(one, at, y, metric, tops)
        if one.state != DONE or not one.feasible or metric not in one.scores:
            continue
        score = one.scores[metric]
        if best is None or search.key(metric, score) < search.key(metric, best):
            line += [] if best is None else [(at, _at(y, best))]
            best = score
            line.append((at, _at(y, best)))
    if best is not None:
        line.append((x.place(max(places.values())) or 0.0, _at(y, best)))
    return Chart(tuple(search.metrics), x, y, tuple(marks), tuple(line), beyond)


def slices(search: ShownSearch, metric: str) -> list[Chart]:
    """Returns the score over each parameter. Trials without the parameter are left out."""
    y, beyond = score_axis(search, metric)
    tops = {one.number for one in best_trials(search)}
    charts = []
    for name, parameter in search.space.items():
        mine = [one for one in search.trials if name in one.values]
        x = parameter_axis(parameter, [one.values[name] for one in mine])
        marks: list[Mark] = []
        for one in mine:
            at = x.place(one.values[name])
            if at is not None:
                # Within a category, trials are beside each other, in an order that does not look like one.
                shift = ((one.number * 0.618034) % 1 - 0.5) * 0.5 / len(x.categories) if x.categories else 0.0
                marks += _marks(one, at + shift, y, metric, tops)
        charts.append(Chart(tuple(search.metrics), x, y, tuple(marks), beyond=beyond))
    return charts


def front(search: ShownSearch) -> list[Chart]:
    """Returns each other metric against the first, with the trials of the Pareto front marked."""
    first, *others = search.metrics
    tops = best_trials(search)
    charts = []
    for other in others:
        (x, left_out), (y, beyond) = score_axis(search, first), score_axis(search, other)
        marks: list[Mark] = []
        for one in search.trials:
            if first in one.scores and other in one.scores:
                marks += _marks(one, _at(x, one.scores[first]), y, other, {top.number for top in tops})
        corners = sorted((_at(x, one.scores[first]), _at(y, one.scores[other])) for one in tops)
        line = [] if len(others) > 1 else [*corners[:1]]
        for before, after in itertools.pairwise(corners) if len(others) == 1 else ():
            # The front is a stair: between two trials, no score is known that is better than the worse of both.
            worse = min(before[0], after[0]) if search.metrics[first] == "max" else max(before[0], after[0])
            corner = (worse, after[1] if worse == before[0] else before[1])
            line += [corner, after]
        charts.append(Chart(tuple(search.metrics), x, y, tuple(marks), tuple(line), left_out + beyond))
    return charts


def _at(axis: Axis, value: float) -> float:
    return axis.place(value) or 0.0


def _marks(trial: ShownTrial, x: float, y: Axis, metric: str, tops: set[int]) -> list[Mark]:
    """Returns the mark of a trial; none if it has neither a score nor failed."""
    kind = BEST if trial.number in tops else kind_of(trial)
    if kind == FAILED or metric not in trial.scores or trial.state not in (DONE, PAUSED):
        return [Mark(x, None, FAILED, trial)] if kind == FAILED else []
    return [Mark(x, y.place(trial.scores[metric]), kind, trial)]


@dataclass(frozen=True)
class Line:
    """A trial as a line through the axes: None where it has no value. ``shade`` is None without a score."""

    positions: tuple[float | None, ...]
    shade: int | None
    is_best: bool
    trial: ShownTrial


@dataclass(frozen=True)
class Parallel:
    """Parallel coordinates: the metrics and the parameters as axes, and each trial as a line; the best come last."""

    metrics: tuple[str, ...]
    axes: tuple[Axis, ...]
    lines: tuple[Line, ...]


def parallel(search: ShownSearch) -> Parallel:
    """Returns the parallel coordinates of all trials that have ended or are paused."""
    ended = [one for one in search.trials if one.state in (DONE, FAILED, PAUSED)]
    axes = [score_axis(search, metric)[0] for metric in search.metrics]
    for name, parameter in search.space.items():
        axes.append(parameter_axis(parameter, [one.values[name] for one in ended if name in one.values]))
    colours = shades(search, next(iter(search.metrics)))
    tops = {one.number for one in best_trials(search)}
    lines = []
    for one in ended:
        scores = {} if one.state == FAILED else one.scores
        given = [*((m in scores, scores.get(m)) for m in search.metrics)]
        given += [(name in one.values, one.values.get(name)) for name in search.space]
        positions = tuple(
            axis.place(value) if known else None for axis, (known, value) in zip(axes, given, strict=True)
        )
        lines.append(Line(positions, colours.get(one.number), one.number in tops, one))
    lines.sort(key=lambda line: (line.is_best, -1 if line.shade is None else line.shade))
    return Parallel(tuple(search.metrics), tuple(axes), tuple(lines))


# -- SVG ------------------------------------------------------------------------------------------------------------


def draw(chart: Chart, label: str) -> str:
    """Returns a chart as SVG; ``label`` says in words what it shows."""
    failures = any(mark.y is None for mark in chart.marks)
    left = int(14 + 6.8 * max([len(text) for _, text in chart.y.ticks] + [len(FAILED) if failures else 3]))
    right, top, bottom = WIDTH - 14, 14, HEIGHT - (62 if failures else 44)

    def across(x: float) -> float:
        return round(left + x * (right - left), 1)

    def down(y: float | None) -> float:
        return float(bottom + 13) if y is None else round(bottom - y * (bottom - top), 1)

    ordered = sorted(chart.marks, key=lambda mark: list(_SHAPES).index(mark.kind) if mark.kind != BEST else 9)
    found = [
        (f"mark {mark.kind}", _SHAPES[mark.kind].format(x=across(mark.x), y=down(mark.y)), mark.trial)
        for mark in ordered
    ]
    line = "M" + "L".join(f"{across(x)} {down(y)}" for x, y in chart.line) if len(chart.line) > 1 else ""
    x_ticks = [(across(at), text) for at, text in _fitting(chart.x.ticks, right - left)]
    y_ticks = [(down(at), text) for at, text in chart.y.ticks]
    return _rendered(
        "chart.svg", chart=chart, label=label, shapes=_shapes(found, chart.metrics), many=len(found) > _SINGLE,
        line=line, x_ticks=x_ticks, y_ticks=y_ticks,
        width=WIDTH, height=HEIGHT, left=left, right=right, top=top, bottom=bottom, failures=failures,
    )  # fmt: skip


def draw_parallel(plot: Parallel, label: str) -> str:
    """Returns parallel coordinates as SVG. Where a trial has no value, its line passes below the axis."""
    left, top, bottom = 46, 44, _TALL - 42
    width = left + _GAP * (len(plot.axes) - 1) + 96
    below = bottom + 24

    def down(y: float | None) -> float:
        return below if y is None else round(bottom - y * (bottom - top), 1)

    found = []
    for line in plot.lines:
        points = [f"{left + _GAP * number} {down(y)}" for number, y in enumerate(line.positions)]
        unscored = "unscored paused" if line.trial.state == PAUSED else "unscored"
        shade = unscored if line.shade is None else f"s{line.shade}"
        found.append((f"way {BEST if line.is_best else shade}", "M" + "L".join(points), line.trial))
    gaps = [any(line.positions[number] is None for line in plot.lines) for number in range(len(plot.axes))]
    nothing = ["no score" if number < len(plot.metrics) else "not set" for number in range(len(plot.axes))]
    axes = [
        (left + _GAP * number, _short(axis.name, _NAME_LETTERS), axis.name, nothing[number] if gap else "",
         [(down(at), _short(text, 13)) for at, text in axis.ticks])
        for number, (axis, gap) in enumerate(zip(plot.axes, gaps, strict=True))
    ]  # fmt: skip
    return _rendered(
        "parallel.svg", axes=axes, label=label, shapes=_shapes(found, plot.metrics), many=len(found) > _SINGLE,
        width=width, height=_TALL, top=top,
        bottom=bottom, below=below,
    )  # fmt: skip


def _shapes(found: Sequence[tuple[str, str, ShownTrial]], metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns the style, outline and title of each shape.

    Of many, those of one style are a single shape without a title, so that a page of many trials stays small.
    """
    if len(found) <= _SINGLE:
        return [(style, outline, named(trial, metrics)) for style, outline, trial in found]
    joined: dict[str, list[str]] = {}
    for style, outline, _ in found:
        joined.setdefault(style, []).append(outline)
    return [(style, "".join(outlines), "") for style, outlines in joined.items()]


def _fitting(ticks: Sequence[tuple[float, str]], width: float) -> list[tuple[float, str]]:
    """Returns the ticks of a horizontal axis, with texts so short that they do not overlap."""
    if len(ticks) < 2:
        return [(at, _short(text, 40)) for at, text in ticks]
    room = int(width * min(after[0] - before[0] for before, after in itertools.pairwise(ticks)) / _TICK_LETTER)
    if room < 4:
        return _fitting(ticks[::2], width)
    return [(at, _short(text, room - 1)) for at, text in ticks]


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: max(letters - 1, 1)]}…"


def _rendered(template: str, **context: Any) -> str:
    plot: str = templates("modelyard.tuning").get_template(template).render(context)
    return plot
