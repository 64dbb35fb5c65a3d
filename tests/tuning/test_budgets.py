"""Searches of runs that train nothing: what is trained, promoted and chosen within a budget."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import modelyard
from modelyard.cli.comparison import runs as runs_command
from modelyard.errors import ConfigError, UserError
from modelyard.tuning.halving import Halving
from modelyard.tuning.trials import TuneResult

PROGRAM = [sys.executable, str(Path(__file__).with_name("quick_run.py"))]
OPTIONS: dict[str, Any] = {"model": "mlp", "dataset": "digits", "train_steps": 90, "eval_every": "10 steps"}
SPACE = "learning_rate=uniform(0.01, 0.9), hidden_units=[[8], [16], [32]]"


def go(space: str | None = SPACE, **options: Any) -> TuneResult:
    given = OPTIONS if not Path("search").exists() else {}
    more = {"seeds": 0, "program": PROGRAM, "jobs": 2, **options}
    return modelyard.tune(space, output="search", **{**given, **more})


def starts(number: int) -> list[int]:
    """The steps at which a trial was started."""
    manifest = json.loads(Path(f"search/cells/trial-{number:04}/manifest.json").read_text())
    return [start["step"] for start in manifest["starts"]]


def test_the_best_of_a_rung_are_resumed_within_a_budget_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    first = go(halving=3, first_rung="1/9", total_steps=150, jobs=1, metric="loss")
    assert 150 <= first.steps < 150 + 60, "the trial that ran at the end was finished"
    assert first.steps == sum(trial.step for trial in first.trials)
    again = go(None, total_steps=first.steps)
    assert again.trials == first.trials, "nothing is left of the budget"
    result = go(None, total_steps=400, jobs=1)
    assert 400 <= result.steps < 400 + 60
    by_step = Counter(trial.step for trial in result.trials)
    assert set(by_step) == {10, 30, 90}
    reached = {at: sum(count for step, count in by_step.items() if step >= at) for at in (10, 30, 90)}
    assert reached[10] > reached[30] >= reached[10] // 3, "a trial that was among the best may not be any more"
    assert reached[30] > reached[90] >= reached[30] // 3 >= 1
    for trial in result.trials:
        assert starts(trial.number) == [at for at in (0, 10, 30) if at < trial.step], "resumed, not trained anew"
        assert trial.state == ("done" if trial.step == 90 else "paused")
    rung = sorted((t for t in result.trials), key=lambda t: -rows(t.number)[0]["accuracy"])
    assert {trial.number for trial in rung[:2]} <= {trial.number for trial in result.trials if trial.step > 10}
    done = [trial for trial in result.trials if trial.state == "done"]
    assert result.trials[: len(done)] == tuple(done), "only those that came to the end are candidates"
    assert f"trial {done[0].number}, the best" in Path("search/best.yaml").read_text()
    with pytest.raises(ConfigError, match=r"(?s)halving: is 4 here, but 3 in .*brackets: is 2 here, but 1"):
        go(None, halving=4, brackets=2)
    capsys.readouterr()
    for arguments in ({"folders": ["search"]}, {"runs_dir": "search"}):
        runs_command(**arguments)  # type: ignore[arg-type]
        listed = capsys.readouterr().out
        assert "trial-0000" in listed
        assert "paused at" in listed
    # The same search, in one go, has the same trials and decisions.
    Path("search").rename("parts")
    whole = go(halving=3, first_rung="1/9", total_steps=400, jobs=1, metric="loss")
    assert [(t.number, t.values, t.step, t.score) for t in whole.trials] == [
        (t.number, t.values, t.step, t.score) for t in result.trials
    ]


def rows(number: int) -> list[dict[str, Any]]:
    text = Path(f"search/cells/trial-{number:04}/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_search_without_full_rungs_trains_its_best_trial_to_the_end() -> None:
    result = go(halving=3, first_rung="10 steps", trials=2)
    assert [(trial.step, trial.state) for trial in result.trials] == [(90, "done"), (10, "paused")]
    assert rows(result.trials[0].number)[0]["accuracy"] > rows(result.trials[1].number)[0]["accuracy"]
    few = "no trial has come to its end. Run the same command with a larger budget"
    Path("search").rename("first")
    assert go(halving=3, first_rung="10 steps", total_steps=20).why.startswith(few)


def test_brackets_begin_at_other_rungs() -> None:
    result = go(halving=3, first_rung="1/9", brackets=3, trials=6)
    halving = Halving(3, "1/9", 3)
    for trial in result.trials:
        first = starts(trial.number)[1:2] or [trial.step]
        assert first == [(10, 30, 90)[halving.bracket(trial.number)]]


def test_several_metrics_limits_and_values_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    tried = ["learning_rate=0.02, hidden_units=[8]", {"hidden_units": [32], "learning_rate": 0.02}]
    result = go(metric="accuracy, parameters", trials=5, enqueue=tried, top=2)
    values = {trial.number: trial.values for trial in result.trials}
    assert values[0] == {"learning_rate": 0.02, "hidden_units": [8]}
    assert values[1] == {"learning_rate": 0.02, "hidden_units": [32]}
    assert {0, 1} <= set(result.front)
    assert [trial.number for trial in result.trials[: len(result.front)]] == list(result.front)
    assert result.trials[0].number == 1, "the best by the first metric"
    for trial in result.trials:
        worse = [
            other.number
            for other in result.trials
            if other.scores["accuracy"] >= trial.scores["accuracy"]
            and other.scores["parameters"] <= trial.scores["parameters"]
            and other.scores != trial.scores
        ]
        assert (trial.number in result.front) == (not worse)
    written = {path.name for path in Path("search").glob("best*.yaml")}
    assert written == {"best.yaml", *(f"best-{number:04}.yaml" for number in result.front)}
    assert "in all metrics" not in str(go(None, trials=5, metric="accuracy", enqueue=tried)), "no trial is new"

    none = go(None, trials=6, constraint="parameters<=100")
    assert len(none.trials) == 6
    assert none.best is None
    assert not list(Path("search").glob("best*.yaml")), "those of before do not meet it"
    assert "none of the 6 trials that are done meets the constraint parameters<=100. The nearest is trial" in none.why
    assert all(trial.violates == ("parameters<=100",) for trial in none.trials)
    small = go(None, trials=6, constraint="parameters<=1000, accuracy>=0.1")
    assert small.trials[0].number == 0
    assert {trial.scores["parameters"] <= 1000 for trial in small.trials if not trial.violates} == {True}
    with pytest.raises(UserError, match=r"(?s)constraint: .*'parametres'.* the same command with another --constraint"):
        go(None, constraint="parametres<=1000")
    assert go(None, trials=6, constraint="", metric="loss").trials[0].number == 1


def test_values_of_the_user_may_be_outside_of_the_space_and_incomplete() -> None:
    result = go(trials=3, enqueue="learning_rate=0.005")
    assert result.trials[0].number == 0
    assert result.trials[0].values["learning_rate"] == 0.005
    assert result.trials[0].values["hidden_units"] in ([8], [16], [32])
    more = go(None, trials=3, enqueue=["learning_rate=0.3, hidden_units=[16]"])
    assert len(more.trials) == 4, "it is trained although there are enough"
    for wrong, message in (
        ("learning_rat=1", "enqueue: there is no parameter of the space 'learning_rat'"),
        ("learning_rate", r"enqueue: 'learning_rate' is not option=value"),
        ("learning_rate=-1", "learning_rate: must be greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(None, trials=3, enqueue=wrong)
    assert len(list(Path("search/configs").iterdir())) == 4


def test_a_trial_that_failed_for_the_disk_is_tried_again_and_others_are_not() -> None:
    assert go(trials=1).trials[0].state == "done"
    for number, reason in ((1, "the loss became nan at step 3"), (2, "the disk is full: can't write /x. Make space")):
        Path("fails").write_text(f"raise SystemExit({'error: ' + reason!r})")
        failed = go(None, trials=number + 1, program=[sys.executable, "fails"])
        assert [trial.reason for trial in failed.trials if trial.number == number] == [reason]
    result = go(None, trials=3)
    assert {trial.number: trial.state for trial in result.trials} == {0: "done", 1: "failed", 2: "done"}


def test_a_limit_that_training_may_still_meet_does_not_end_a_trial() -> None:
    result = go(halving=3, first_rung="1/9", trials=3, constraint="accuracy>=0.95", jobs=1)
    assert all(row["accuracy"] < 0.95 for trial in result.trials for row in rows(trial.number)[:1])
    assert (result.trials[0].state, result.trials[0].violates) == ("done", ())
    Path("search").rename("first")
    costs = go(halving=3, first_rung="1/9", trials=3, constraint="parameters<=1", jobs=1)
    assert {trial.state for trial in costs.trials} == {"paused"}, "it will never meet this one"


WAITS = f"""
import json, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from quick_run import main
failed = Path("search/failed.json")
if "trial-0000" not in " ".join(sys.argv):
    raise SystemExit("error: too large")
while not failed.exists() or len(json.loads(failed.read_text())) < 3:
    time.sleep(0.01)
main(sys.argv[1:])
"""


def test_trials_that_fail_do_not_kill_one_that_runs() -> None:
    Path("waits").write_text(WAITS)
    result = go(trials=5, program=[sys.executable, "waits"])
    assert {trial.number: trial.state for trial in result.trials} == {0: "done", **dict.fromkeys(range(1, 5), "failed")}


def test_a_journal_that_cannot_be_written_does_not_end_the_search(caplog: pytest.LogCaptureFixture) -> None:
    go(trials=1)
    Path("search/optuna.log").unlink()
    Path("search/optuna.log").mkdir()
    assert [trial.state for trial in go(None, trials=3).trials] == ["done"] * 3
    assert caplog.text.count("search/optuna.log does not get the trials any more") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"halving": 1}, "halving: must be 2 to 100, got 1"),
        ({"halving": "3"}, "halving: must be a whole number, got '3'"),
        ({"halving": 3, "brackets": 0}, "brackets: must be 1 to 10"),
        ({"halving": 3, "first_rung": "1 h"}, "first_rung: must be a part of a run"),
        ({"first_rung": "1/9"}, "first_rung: has no effect without halving"),
        ({"metric": "seconds"}, "metric: has costs only"),
        ({"constraint": "parameters=1"}, "constraint: 'parameters=1' is not a limit"),
        ({"time": "3 epochs"}, "time: must be a time such as '30 min' or '2 h', got '3 epochs'"),
        ({"total_steps": 0}, "total_steps: must be 1 to"),
        ({"pause_at": "1 epochs"}, "pause_at: is not supported here"),
    ],
)
def test_arguments_that_make_no_sense_are_told_before_anything_is_written(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(**options)
    assert not Path("search").exists()
