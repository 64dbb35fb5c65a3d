"""The page of a search, search.html: its trials, their history, and which parameters matter.

The page is made from the folder of the search alone, while it runs, at its end, or later.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.comparison.plots import templates
from modelyard.comparison.results import RunResult, Unfinished, metrics_of, read_run, rows_of_best
from modelyard.comparison.scheduler import WAITING, CellResult
from modelyard.errors import UserError
from modelyard.loop.metric_hooks import Ranking
from modelyard.run.checkpoint import list_best
from modelyard.run.directory import is_running
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import read_metrics
from modelyard.system.files import explain, write_text
from modelyard.tuning.plots import (
    BEST,
    INFEASIBLE,
    PAUSED,
    SHADES,
    ShownSearch,
    ShownTrial,
    best_trials,
    draw,
    draw_parallel,
    front,
    history,
    kind_of,
    parallel,
    shown,
    slices,
)
from modelyard.tuning.record import costs_of
from modelyard.tuning.samplers import DONE, FAILED, RUNNING, Known, importances

PAGE = "search.html"
LEAST_TRIALS = 10
"""Of fewer trials, the importance of parameters would be chance."""
_PAUSE, _SHARE = 30.0, 20.0
"""While the search runs, the page is written after so many seconds, and takes at most one of so many of its time."""
_MOST_NAMED = 20
_OTHERS = {
    "leaderboard.html": "all trials as a leaderboard",
    "final/leaderboard.html": "the best, trained again with new seeds",
    "best.yaml": "the options of the best",
}
"""Other files of a search that the page links to."""
_LEGEND = {
    BEST: "best",
    DONE: "done",
    INFEASIBLE: "does not meet a constraint",
    PAUSED: "paused, score so far",
    FAILED: "failed",
}
_STATES = (DONE, INFEASIBLE, PAUSED, RUNNING, FAILED)
"""The order in which they are counted."""
_ENDED = ("done", "failed", "paused")
log = logging.getLogger("modelyard")


def write_page(search: ShownSearch, folder: Path, output: Path | None = None) -> Path:
    """Writes the page of a search, atomically.

    Args:
        search: the search.
        folder: its folder, which the page links to.
        output: the folder to write to; by default that of the search.

    Returns:
        Its path.
    """
    output = folder if output is None else output
    with explain(output, "make the folder"):
        output.mkdir(parents=True, exist_ok=True)
    path = output / PAGE
    write_text(path, page_text(search, folder, output))
    return path


def page_text(search: ShownSearch, folder: Path, output: Path) -> str:
    """Returns the page of a search as HTML."""

    def link(target: Path) -> str:
        try:
            return quote(os.path.relpath(target.resolve(), output.resolve()))
        except ValueError:  # on another drive
            return ""

    best = best_trials(search)
    found = Counter(kind_of(one) for one in search.trials)
    states = {state: found[state] for state in (*_STATES, *found) if found[state]}
    script = files("modelyard.tuning").joinpath("templates/search.js").read_text(encoding="utf-8")
    names = list(dict.fromkeys([*search.space, *(name for one in search.trials for name in one.values)]))
    context = {
        "search": search,
        "best": best,
        "most_named": _MOST_NAMED,
        "states": ", ".join(f"{count} {state}" for state, count in states.items()),
        "seconds": sum(one.seconds or 0 for one in search.trials),
        "steps": sum(one.steps or 0 for one in search.trials),
        "aims": ", ".join(
            f"{name} ({'higher' if mode == 'max' else 'lower'} is better)" for name, mode in search.metrics.items()
        ),
        "links": [(link(folder / name), name, text) for name, text in _OTHERS.items() if (folder / name).exists()],
        "model_links": {one.number: link(Path(one.model_dir)) for one in search.trials if one.model_dir},
        "names": names,
        "metrics": _figures(search),
        "front": [(chart, draw(chart, f"{chart.y.name} against {chart.x.name}")) for chart in front(search)]
        if search.metrics
        else [],
        "parallel": _parallel(search),
        "legend": {kind: text for kind, text in _LEGEND.items() if kind == BEST or kind in states},
        "shades": SHADES,
        "feasibility": any(not one.feasible for one in search.trials),
        "shown": shown,
        "duration": duration,
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    text: str = templates("modelyard.tuning").get_template(PAGE).render(context)
    return text


def _figures(search: ShownSearch) -> list[dict[str, Any]]:
    """Returns the plots of each metric."""
    figures = []
    for metric in search.metrics:
        chart = history(search, metric)
        scored = search.scored(metric)
        best = min((one.scores[metric] for one in scored), key=lambda score: search.key(metric, score), default=None)
        words = f"{metric} of {len(scored)} trials" + (f"; the best is {best:.4g}" if best is not None else "")
        over = [(part.x.name, draw(part, f"{metric} against {part.x.name}")) for part in slices(search, metric)]
        matters, why_not = importance(search, metric)
        figures.append(
            {"name": metric, "history": draw(chart, words), "by": chart.x.name, "beyond": chart.beyond, "slices": over,
             "importance": matters, "why_not": why_not, "scored": len(scored)}
        )  # fmt: skip
    return figures


def _parallel(search: ShownSearch) -> str:
    if not search.metrics:
        return ""
    plot = parallel(search)
    axes = ", ".join(axis.name for axis in plot.axes)
    return draw_parallel(plot, f"{len(plot.lines)} trials as lines through these axes: {axes}")


def importance(search: ShownSearch, metric: str) -> tuple[dict[str, float], str]:
    """Returns the part that each parameter has in whether a trial is among the best; or a sentence why it is not known.

    Args:
        search: the search.
        metric: one of its metrics.
    """
    trials = search.scored(metric)
    if len(search.space) < 2:
        return {}, "The space has a single parameter, so there is nothing to compare."
    if len(trials) < LEAST_TRIALS:
        return {}, f"It takes {LEAST_TRIALS} trials that are done to estimate it; there are {len(trials)}."
    known = [Known(one.number, one.values, DONE, one.scores[metric]) for one in trials]
    try:
        found = importances(search.space, known, search.metrics[metric] == "max")
    except Exception as error:  # of Optuna, whose evaluators do not say what they raise
        return {}, f"Optuna can't compute it: {str(error)[:200]}"
    total = sum(found.values())
    if not total > 0:
        return {}, "The values of the best trials do not differ from those of the others."
    return {name: value / total for name, value in sorted(found.items(), key=lambda pair: -pair[1])}, ""


def duration(seconds: float | None) -> str:
    """Returns a duration in words, such as 5 min 3 s."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


# -- read from the folder of a search -------------------------------------------------------------------------------


def read_trials(
    folder: MatrixFolder, ended: dict[str, ShownTrial] | None = None
) -> tuple[list[ShownTrial], dict[str, str]]:
    """Reads the trials of a search from their run folders, and what is better of their metrics. Runs none of its code.

    Args:
        folder: the folder of the search.
        ended: trials that have ended, by name; they are not read again, and others are added.
    """
    ended = {} if ended is None else ended
    failures, trials = folder.failures(), []
    modes: dict[str, str] = {}
    for number, (name, values) in enumerate(folder.cell_axes().items()):
        if name not in ended:
            one, mine = _read_trial(folder, name, number, values, failures.get(name, ""))
            modes |= mine
            if one.state == DONE:
                ended[name] = one
        trials.append(ended.get(name) or one)
    return trials, modes


def _read_trial(
    folder: MatrixFolder, name: str, number: int, values: Mapping[str, Any], failure: str
) -> tuple[ShownTrial, dict[str, str]]:
    directory = folder.run(name)
    found: RunResult | Unfinished = Unfinished(name, WAITING)
    if directory.exists():
        found = read_run(str(directory.path), name, failure)
    rows: list[Any] = []
    with contextlib.suppress(UserError, OSError, ValueError):
        rows = read_metrics(directory.metrics)
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    times = [
        row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float) and row.get("split") != "test"
    ]
    scores: Mapping[str, float] = {}
    modes: Mapping[str, Any] = {}
    if isinstance(found, RunResult):
        state, reason, scores, modes = DONE, "", found.scores.get("validation", {}), found.modes
    else:
        state, reason = found.status, found.reason
        if state.startswith(PAUSED):
            with contextlib.suppress(UserError, OSError, ValueError, TypeError, AttributeError, KeyError):
                scores = metrics_of(rows_of_best(rows, list_best(directory.best)).get("validation", {}))
                modes = read_manifest(directory).get("metrics") or {}
            state = PAUSED
    costs: Mapping[str, float] = {}
    if directory.exists():
        with contextlib.suppress(UserError, OSError, ValueError, TypeError, AttributeError, KeyError):
            costs = costs_of(read_manifest(directory), rows)
    if failure:
        state, reason = (RUNNING, "") if is_running(directory) else (FAILED, failure)
    trial = ShownTrial(
        number=number, values={str(key): value for key, value in values.items()}, state=str(state), scores=scores,
        steps=max(steps, default=None), seconds=max(times, default=None), reason=str(reason),
        model_dir=str(directory.path) if directory.path.exists() else "", costs=costs,
        evaluations=[metrics_of(row) for row in rows if row.get("split") == "validation"] if scores else (),
    )  # fmt: skip
    return trial, {str(key): str(mode) for key, mode in modes.items()}


def directions(metrics: Sequence[str], trials: Sequence[ShownTrial], modes: Mapping[str, str]) -> dict[str, str]:
    """Returns which way each metric is better. ``auto`` becomes the metric of the trials; unknown ones are left out."""
    found: dict[str, str] = {}
    for metric in metrics:
        for one in trials:
            if one.scores and (metric in ("auto", *one.scores)):
                with contextlib.suppress(UserError):
                    ranking = Ranking.choose(metric, "auto", one.scores, modes)
                    found[ranking.metric] = ranking.mode
                    break
    return found


class LivePage:
    """The page of a search that runs: written when trials have ended, though not often, and at the end.

    A page that can't be written is told in the log and does not end the search.

    Args:
        write: writes the page.
        clock: the time in seconds.
    """

    def __init__(self, write: Callable[[], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._next, self._ended = -float("inf"), 0

    def update(self, trials: Sequence[CellResult]) -> None:
        """Writes the page if trials have ended since and a while has passed."""
        ended = sum(one.state in _ENDED for one in trials)
        if ended != self._ended and self._clock() >= self._next:
            self._ended = ended
            self.write()

    def write(self) -> None:
        """Writes the page."""
        began = self._clock()
        try:
            self._write()
        except Exception as error:
            log.warning("%s was not written: %s", PAGE, error)
        self._next = self._clock() + max(_PAUSE, _SHARE * (self._clock() - began))


@contextlib.contextmanager
def live_page(
    folder: MatrixFolder, make: Callable[[list[ShownTrial], Mapping[str, str]], ShownSearch]
) -> Iterator[LivePage]:
    """Yields the page of a search that runs, and writes it at the end of the block.

    Args:
        folder: the folder of the search.
        make: makes the search from its trials and from what is better of their metrics.
    """
    ended: dict[str, ShownTrial] = {}
    modes: dict[str, str] = {}

    def write() -> None:
        trials, new = read_trials(folder, ended)
        modes.update(new)
        write_page(make(trials, modes), folder.path)

    page = LivePage(write)
    try:
        yield page
    finally:
        page.write()
