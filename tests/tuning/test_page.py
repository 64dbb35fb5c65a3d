"""The page of a search, from made-up trials and from folders of runs."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import modelyard
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.config import load_config
from modelyard.errors import UserError
from modelyard.run.directory import config_text
from modelyard.tuning import page
from modelyard.tuning.page import LivePage, importance, page_text, write_page
from modelyard.tuning.plots import (
    Axis,
    Chart,
    ShownSearch,
    ShownTrial,
    best_trials,
    draw,
    front,
    history,
    parallel,
    parameter_axis,
    shades,
    slices,
)
from modelyard.tuning.search import _shown, write_search_page
from modelyard.tuning.search_file import Search
from modelyard.tuning.space import Space, parse_parameter, read_space
from waiting import PATIENCE

SPACE = "x=log(1e-3, 1), y=[1, 2, [3, 4]], z=int(1, 9) if y=1"
EVIL = "<script>alert('1')</script>\"&{{ 7 * 7 }}"


def space_of(text: str = SPACE) -> Space:
    return read_space(text, "here")[0]


def trial(number: int, score: float | None = None, state: str = "done", **more: Any) -> ShownTrial:
    values = more.pop("values", {"x": 10 ** -(number % 4), "y": 2})
    scores = more.pop("scores", {} if score is None else {"accuracy": score})
    return ShownTrial(number=number, values=values, state=state, scores=scores, **more)


def search(*trials: ShownTrial, space: Space | None = None, **metrics: str) -> ShownSearch:
    return ShownSearch(
        name="one", space=space or space_of(), options={"model": "mlp"}, sampler="tpe", seed=3,
        metrics=metrics or {"accuracy": "max"}, trials=trials,
    )  # fmt: skip


def value_at(axis: Axis, position: float) -> float:
    return axis.low + position * (axis.high - axis.low)


def points(chart: Chart) -> list[tuple[float, float | None, str]]:
    return [
        (
            round(value_at(chart.x, mark.x), 6),
            None if mark.y is None else round(value_at(chart.y, mark.y), 6),
            mark.kind,
        )
        for mark in chart.marks
    ]


# -- the data of the plots ------------------------------------------------------------------------------------------


def test_the_history_has_the_best_so_far_and_another_mark_for_what_failed() -> None:
    found = history(
        search(
            trial(0, 0.5), trial(1, 0.4), trial(2, state="failed"), trial(3, 0.7), trial(4, 0.9, feasible=False),
            trial(5, state="running"),
        ),
        "accuracy",
    )  # fmt: skip
    assert points(found) == [
        (0, 0.5, "done"), (1, 0.4, "done"), (2, None, "failed"), (3, 0.7, "best"), (4, 0.9, "infeasible"),
    ]  # fmt: skip
    line = [(round(value_at(found.x, x), 6), round(value_at(found.y, y), 6)) for x, y in found.line]
    assert line == [(0, 0.5), (3, 0.5), (3, 0.7), (5, 0.7)], "a trial that does not meet a constraint is not the best"


def test_the_history_of_paused_trials_is_over_the_steps_that_were_spent() -> None:
    trials = [trial(0, 0.5, steps=100), trial(1, 0.6, "paused", steps=10), trial(2, 0.55, steps=100)]
    found = history(search(*trials), "accuracy")
    assert found.x.name == "steps of all trials so far"
    assert points(found) == [(100, 0.5, "done"), (110, 0.6, "paused"), (210, 0.55, "best")]
    assert history(search(trials[0], trials[2]), "accuracy").x.name == "trial"


def test_where_lower_is_better_the_best_is_the_lowest() -> None:
    found = search(trial(0, scores={"loss": 0.5}), trial(1, scores={"loss": 0.2}), loss="min")
    assert [one.number for one in best_trials(found)] == [1]
    assert value_at(found_axis := history(found, "loss").y, history(found, "loss").line[-1][1]) == pytest.approx(0.2)
    assert found_axis.name == "loss"


def test_scores_that_are_far_worse_do_not_hide_the_others() -> None:
    trials = [trial(number, scores={"loss": 0.2 + number / 100}) for number in range(20)]
    trials.append(trial(20, scores={"loss": 1e12}))
    found = history(search(*trials, loss="min"), "loss")
    assert found.y.high < 1
    assert found.beyond == 1
    assert found.marks[20].y == 1, "it is drawn at the end of the axis"
    assert history(search(*trials[:20], loss="min"), "loss").beyond == 0


def test_the_pareto_front_has_all_trials_than_which_none_is_better() -> None:
    scores = [(0.9, 9.0), (0.8, 5.0), (0.8, 6.0), (0.7, 1.0), (0.6, 2.0), (0.9, 9.0)]
    trials = [trial(n, scores={"accuracy": a, "latency": b}) for n, (a, b) in enumerate(scores)]
    trials.append(trial(6, scores={"accuracy": 0.99, "latency": 0.1}, feasible=False))
    trials.append(trial(7, scores={"accuracy": 0.99}))
    found = search(*trials, accuracy="max", latency="min")
    assert sorted(one.number for one in best_trials(found)) == [0, 1, 3, 5]
    (chart,) = front(found)
    assert [mark.trial.number for mark in chart.marks if mark.kind == "best"] == [0, 1, 3, 5]
    corners = [(round(value_at(chart.x, x), 6), round(value_at(chart.y, y), 6)) for x, y in chart.line]
    # Between two of its trials, the line is where only known trials are reached.
    assert corners[:3] == [(0.7, 1), (0.7, 5), (0.8, 5)]
    assert len(page_text(found, Path(), Path()).split("4 trials are on the Pareto front")) == 2


def test_parallel_coordinates_have_a_gap_for_what_a_trial_does_not_have() -> None:
    found = parallel(
        search(
            trial(0, 0.5, values={"x": 1e-3, "y": 1, "z": 9}), trial(1, 0.7, values={"x": 1.0, "y": [3, 4]}),
            trial(2, state="failed", values={"x": 0.1, "y": 2}), trial(3, state="running"),
        )
    )  # fmt: skip
    assert [axis.name for axis in found.axes] == ["accuracy", "x", "y", "z"]
    lines = {line.trial.number: line for line in found.lines}
    assert list(lines) == [2, 0, 1], "the best is drawn over the others"
    assert [lines[number].is_best for number in (0, 1, 2)] == [False, True, False]
    assert lines[1].positions[3] is None
    assert lines[2].positions[0] is None
    assert lines[2].shade is None
    low, high, middle = (lines[number].positions[1] for number in (0, 1, 2))
    assert low is not None
    assert high is not None
    assert middle is not None
    assert (middle - low) / (high - low) == pytest.approx(2 / 3), "x is logarithmic"
    assert [lines[number].positions[2] for number in (0, 2, 1)] == pytest.approx([1 / 6, 3 / 6, 5 / 6])


def test_colours_are_ranks_and_equal_scores_are_alike() -> None:
    found = shades(search(*(trial(n, score) for n, score in enumerate([0.1, 0.2, 0.2, 0.5, 0.9]))), "accuracy")
    assert found == {0: 0, 1: 1, 2: 1, 3: 3, 4: 4}
    assert shades(search(trial(0, scores={"l": 1.0}), trial(1, scores={"l": 9.0}), l="min"), "l") == {0: 2, 1: 0}


@pytest.mark.parametrize(
    ("text", "values", "ticks"),
    [
        ("log(1e-3, 1)", [], ["0.001", "0.01", "0.1", "1"]),
        ("int(1, 4)", [2, 3], ["1", "2", "3", "4"]),
        ("uniform(0, 0.5)", [2.0], ["0", "0.5", "1", "1.5", "2"]),
        ("[a, b]", ["b", "c", [1, 2]], ["a", "b", "c", "[1, 2]"]),
    ],
)
def test_the_axis_of_a_parameter_has_its_values_and_those_of_an_earlier_space(
    text: str, values: list[Any], ticks: list[str]
) -> None:
    axis = parameter_axis(parse_parameter("p", text), values)
    assert [shown for _, shown in axis.ticks] == ticks
    assert all(0 <= at <= 1 for at, _ in axis.ticks)
    assert all((at := axis.place(value)) is not None and 0 < at < 1 for value in values)


def test_slices_have_the_trials_with_the_parameter() -> None:
    trials = (
        trial(0, 0.5, values={"x": 0.01, "y": 1, "z": 4}), trial(1, 0.7, values={"x": 1.0, "y": 2}),
        trial(2, state="failed", values={"x": 0.1, "y": 1, "z": 2}), trial(3, 0.6, values={"x": True, "y": {"a": 1}}),
    )  # fmt: skip
    by_name = {chart.x.name: chart for chart in slices(search(*trials), "accuracy")}
    assert [mark.trial.number for mark in by_name["z"].marks] == [0, 2]
    assert [mark.trial.number for mark in by_name["x"].marks] == [0, 1, 2], "True is no number"
    assert 10 ** value_at(by_name["x"].x, by_name["x"].marks[0].x) == pytest.approx(0.01)
    assert [mark.kind for mark in by_name["z"].marks] == ["done", "failed"]


def test_marks_of_different_states_have_different_shapes() -> None:
    trials = (trial(0, 0.5), trial(1, 0.6, "paused"), trial(2, 0.4, feasible=False), trial(3, state="failed"))
    drawn = draw(history(search(*trials, trial(4, 0.9)), "accuracy"), "all of them")
    outlines = {
        kind: re.sub(r"^M[\d.]+ [\d.]+", "", outline)
        for kind, outline in re.findall(r'<path class="mark (\w+)" d="([^"]+)"', drawn)
    }
    assert set(outlines) == {"done", "paused", "infeasible", "failed", "best"}
    assert len(set(outlines.values())) == 5
    assert 'aria-label="all of them"' in drawn


# -- importance -----------------------------------------------------------------------------------------------------


def many(count: int, **more: Any) -> list[ShownTrial]:
    """Trials whose score depends on x alone."""
    found = []
    for number in range(count):
        x = 10 ** (-3 * ((number * 0.618) % 1))
        y = (1, 2, [3, 4])[number % 3]
        values = {"x": x, "y": y, **({"z": 1 + number % 9} if y == 1 else {})}
        found.append(trial(number, 1 - abs(math.log10(x) + 2) / 3, values=values, steps=30, seconds=1.5, **more))
    return found


def test_the_parameter_that_decides_is_the_most_important_and_it_is_the_same_every_time() -> None:
    found, why_not = importance(search(*many(40)), "accuracy")
    assert why_not == ""
    assert next(iter(found)) == "x"
    assert found["x"] > 0.5
    assert sum(found.values()) == pytest.approx(1)
    assert importance(search(*many(40)), "accuracy")[0] == found


def test_why_the_importance_is_not_known_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importance(search(*many(9)), "accuracy") == (
        {}, "It takes 10 trials that are done to estimate it; there are 9.",
    )  # fmt: skip
    single = space_of("x=log(1e-3, 1)")
    assert "single parameter" in importance(search(*many(40), space=single), "accuracy")[1]
    monkeypatch.setattr(page, "importances", lambda *_: {}["no such thing"])
    assert importance(search(*many(40)), "accuracy")[1] == "Optuna can't compute it: 'no such thing'"
    text = page_text(search(*many(40)), Path(), Path())
    assert "Optuna can&#39;t compute it" in text


# -- the page -------------------------------------------------------------------------------------------------------


def test_a_trial_has_the_scores_of_its_best_model_by_the_metric_that_the_search_has_now(tmp_path: Path) -> None:
    kept, other = {"accuracy": 0.9, "loss": 0.5}, {"accuracy": 0.8, "loss": 0.3}
    one = ShownTrial(number=0, values={}, state="done", scores=kept, evaluations=[kept, other])
    for metric, expected in (("accuracy", kept), ("loss", other)):
        shown = _shown(MatrixFolder(tmp_path / "search"), Search(space_of(), {}, metric=metric), [one], {})
        assert shown.trials[0].scores == expected


class Tags(html.parser.HTMLParser):
    """Collects tags, addresses and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self.policy += "".join(value or "" for name, value in attrs if name == "content" and value and "src" in value)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def test_what_comes_from_a_folder_is_text_and_no_code(tmp_path: Path) -> None:
    space = read_space({f"m.{number}": [EVIL, "b"] for number in range(2)}, "here")[0]
    trials = [
        trial(0, 0.5, values={"m.0": EVIL, EVIL: [EVIL]}, model_dir=str(tmp_path / "javascript:alert(1)")),
        trial(1, state="failed", reason=EVIL, values={"m.1": EVIL}),
        trial(2, state=EVIL, scores={EVIL: 1.0}),
    ]
    found = ShownSearch(
        name=EVIL, space=space, options={EVIL: EVIL}, sampler=EVIL, seed=0, metrics={"accuracy": "max", EVIL: "min"},
        trials=trials,
    )  # fmt: skip
    text = write_page(found, tmp_path).read_text()
    tags = Tags(text)
    assert tags.tags.count("script") == 1
    assert not {"img", "link", "iframe", "object", "base"} & set(tags.tags)
    digest = base64.b64encode(hashlib.sha256(tags.scripts[0].encode()).digest()).decode()
    assert tags.policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert tags.urls == ["javascript%3Aalert%281%29/"] * tags.urls.count("javascript%3Aalert%281%29/")
    assert "alert(&#39;1&#39;)" in text
    assert "49" not in re.sub(r"[\d.]*49[\d.]+|[\d.]+49", "", text.split("<body>")[1]), (
        "no template in a value is filled in"
    )


def test_the_page_says_all_without_its_script(tmp_path: Path) -> None:
    trials = [*many(12), trial(12, state="failed", reason="the disk is full"), trial(13, state="running")]
    (tmp_path / "cells" / "trial 0").mkdir(parents=True)
    (tmp_path / "best.yaml").touch()
    trials[0] = trial(0, 0.25, model_dir=str(tmp_path / "cells" / "trial 0"), steps=30, seconds=90.0)
    text = write_page(search(*trials), tmp_path).read_text()
    assert "14 trials: 12 done, 1 running, 1 failed" in text
    assert text.count('<th scope="row" data-value=') == 14
    best = max(trials[:12], key=lambda one: one.scores["accuracy"])
    assert f"Best: trial {best.number}</b>, accuracy {best.scores['accuracy']:.4g}" in text
    assert "<td>log(1e-3, 1)</td>" in text
    assert "<td>int(1, 9) if y=1</td>" in text
    assert "Sampler tpe, seed 3." in text
    assert "the disk is full</td>" in text
    urls = Tags(text).urls
    assert "cells/trial%200/" in urls
    assert "best.yaml" in urls
    assert "http:" not in text
    assert "https:" not in text


def test_a_page_elsewhere_links_to_the_folder_of_the_search(tmp_path: Path) -> None:
    (tmp_path / "search" / "cells").mkdir(parents=True)
    found = search(trial(0, 0.5, model_dir=str(tmp_path / "search" / "cells" / "trial-0000")))
    text = write_page(found, tmp_path / "search", tmp_path / "other").read_text()
    assert "../search/cells/trial-0000/" in Tags(text).urls


def test_a_page_of_a_thousand_trials_stays_small() -> None:
    trials = [*many(1000), *(trial(number, state="failed", reason="x" * 90) for number in range(1000, 1020))]
    text = page_text(search(*trials), Path(), Path())
    assert len(text) < 2_000_000
    assert text.count("<path") < 200
    assert text.count("<tr") > 1020


@pytest.mark.parametrize(
    "trials", [[], [trial(0, state="running")], [trial(0, state="failed", reason="no")], [trial(0, 0.5)]]
)
def test_a_search_that_has_just_begun_has_a_page(trials: list[ShownTrial]) -> None:
    metrics = {"accuracy": "max"} if any(one.scores for one in trials) else {}
    found = ShownSearch(name="s", space=space_of(), options={}, sampler="tpe", seed=0, metrics=metrics, trials=trials)
    text = page_text(found, Path(), Path())
    assert ("No trial has a score yet." in text) == (not metrics)
    assert "nan" not in text


# -- while the search runs ------------------------------------------------------------------------------------------


class Ended:
    state = "done"


def test_while_a_search_runs_its_page_is_written_after_trials_and_not_often() -> None:
    now, cost, written = 0.0, 0.0, []

    def write() -> None:
        nonlocal now
        written.append(now)
        now += cost

    live = LivePage(write, lambda: now)
    live.update([])
    assert written == [], "no trial has ended"
    ended: list[Any] = [Ended()]
    live.update(ended)
    live.update([*ended, Ended()])
    assert written == [0], "not again so soon"
    now = 31
    live.update(ended)
    assert written == [0], "nothing is new"
    live.update([*ended, Ended()])
    assert written == [0, 31]
    cost = 10.0
    live.write()
    now += 100
    live.update([*ended, Ended(), Ended()])
    assert len(written) == 3, "what takes long is not done all the time"
    now += 110
    live.update([*ended, Ended(), Ended()])
    assert len(written) == 4


def test_a_page_that_can_not_be_written_does_not_end_the_search(caplog: pytest.LogCaptureFixture) -> None:
    def write() -> None:
        raise UserError("the disk is full")

    LivePage(write).write()
    assert "search.html was not written: the disk is full" in caplog.text


# -- from a folder --------------------------------------------------------------------------------------------------


STAND_IN = """
import pathlib, sys, time
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
run = pathlib.Path(words["--model_dir"])
page = run.parent.parent / "search.html"
end = time.monotonic() + PATIENCE
while run.name == "trial-0001" and not (page.exists() and "1 done" in page.read_text()):
    if time.monotonic() > end:
        sys.exit("error: there is no page")
    time.sleep(0.05)
state = run / "checkpoints" / "step-00000005"
state.mkdir(parents=True)
(run / "config.yaml").write_bytes(pathlib.Path(words["--config_file"]).read_bytes())
(run / "manifest.json").write_text("{}")
(run / "metrics.jsonl").write_text('{"step": 5, "split": "validation", "accuracy": 0.5}\\n')
(state / "state.json").write_text('{"format_version": 1, "step": 5, "sha256": {}, "memory": {"total_steps": 5}}')
"""


def test_the_page_is_written_while_trials_run_and_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.replace("PATIENCE", str(PATIENCE)))
    result = modelyard.tune(
        "learning_rate=log(1e-4, 1)", output="search", trials=2, seeds=0, jobs=2, model="mlp", dataset="digits",
        program=[sys.executable, "-S", str(script)],
    )  # fmt: skip
    assert [one.state for one in result.trials] == ["done", "done"], "the second waits for the page of the first"
    text = Path("search/search.html").read_text()
    assert "2 trials: 2 done" in text
    assert "best.yaml" in Tags(text).urls


def write_folder(folder: Path) -> None:
    """A search of four trials: two are done, one failed and one waits."""
    (folder / "cells").mkdir(parents=True)
    names = [f"trial-{number:04}" for number in range(4)]
    cells = {name: {"learning_rate": 0.1**number} for number, name in enumerate(names)}
    (folder / "matrix.yaml").write_text(json.dumps({"matrix_version": 1, "cells": cells}))
    (folder / "search.yaml").write_text(
        "search_version: 1\nmetric: auto\nsampler: tpe\nseed: 0\n"
        "space: {learning_rate: 'log(1e-4, 1)'}\noptions: {model: mlp, plugins: [not_there.py]}\n"
    )
    (folder / "failed.json").write_text(json.dumps({names[2]: "the loss became nan"}))
    for number, name in enumerate(names[:2]):
        run = folder / "cells" / name
        state = run / "checkpoints" / "step-00000010"
        state.mkdir(parents=True)
        (run / "config.yaml").write_text(config_text(load_config(model="mlp", dataset="digits", train_steps=10)))
        (run / "manifest.json").write_text("{}")
        row = {"step": 10, "split": "validation", "accuracy": 0.5 + number / 10, "loss": 1.0, "seconds": 2.5}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        memory = {"total_steps": 10}
        (state / "state.json").write_text(json.dumps({"format_version": 1, "step": 10, "sha256": {}, "memory": memory}))


def test_the_leaderboard_command_writes_the_page_of_a_search_anew(tmp_path: Path, command: Any) -> None:
    folder = tmp_path / "search"
    write_folder(folder)
    done = command("leaderboard", str(folder))
    assert f"written: {folder}/search.html" in done.stdout.replace("\n", "")
    assert (folder / "leaderboard.html").exists()
    text = (folder / "search.html").read_text()
    assert "4 trials: 2 done, 1 failed, 1 waiting" in text
    assert "20 steps of training in 5 s" in text
    assert "accuracy 0.6" in text
    assert "the loss became nan</td>" in text
    assert {"cells/trial-0001/", "leaderboard.html"} & set(Tags(text).urls) == {"cells/trial-0001/"}
    assert "leaderboard.html" in Tags(write_search_page(folder).read_text()).urls, "there is one now"
    (folder / "search.yaml").write_text("search_version: 2\n")
    (folder / "leaderboard.html").unlink()
    done = command("leaderboard", str(folder))
    assert "search.html was not written" in done.stdout
    assert (folder / "leaderboard.html").exists()
    (folder / "search.yaml").unlink()
    with pytest.raises(UserError, match="no search to show"):
        write_search_page(folder)
