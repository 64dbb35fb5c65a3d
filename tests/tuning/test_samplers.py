"""Proposals depend on the seed, the number of the trial and the results that are known, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from modelyard.errors import UserError
from modelyard.tuning.samplers import (
    DONE,
    FAILED,
    PAUSED,
    RUNNING,
    Journal,
    Known,
    Proposer,
    make_sampler,
    propose,
    sampler_names,
)
from modelyard.tuning.space import Space, read_space

SPACE = "x=log(1e-3, 1), y=[1, 2, [3, 4]], z=int(1, 9) if y=1"


def space_of(text: str = SPACE) -> Space:
    return read_space(text, "here")[0]


def search(
    sampler: str, count: int, *, seed: int = 0, space: Space | None = None, known: list[Known] | None = None
) -> list[Known]:
    """A search for small x and y=1, one trial at a time."""
    space, known = space or space_of(), list(known or [])
    while len(known) < count:
        found = propose(space, known, len(known), sampler, seed, maximize=False)
        if found is None:
            break
        values, remembered = found
        score = values["x"] + (0 if values.get("y", 1) == 1 else 5)
        known.append(Known(len(known), values, DONE, score, remembered))
    return known


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsgaii"])
def test_a_search_that_begins_anew_after_any_trial_goes_on_the_same(sampler: str) -> None:
    whole = search(sampler, 14)
    assert search(sampler, 14, known=whole[:6]) == whole
    assert search(sampler, 14, known=whole[:13]) == whole
    assert search(sampler, 14, seed=1) != whole
    assert all(("z" in one.values) == (one.values["y"] == 1) for one in whole)
    assert len({str(one.values) for one in whole}) == 14, "no trial is that of another"


def test_the_default_sampler_finds_what_is_better() -> None:
    def good(sampler: str) -> int:
        return sum(one.score is not None and one.score < 0.1 for one in search(sampler, 40)[20:])

    assert good("tpe") > good("random")


def test_a_space_without_other_values_ends_the_search() -> None:
    space = space_of("a=[1, 2], b=[x, y] if a=1")
    known: list[Known] = []
    while (found := propose(space, known, len(known), "random", 0, True)) is not None:
        known.append(Known(len(known), found[0], DONE, 0.5))
    assert sorted(str(one.values) for one in known) == [
        "{'a': 1, 'b': 'x'}", "{'a': 1, 'b': 'y'}", "{'a': 2}"
    ]  # fmt: skip


def test_trials_outside_of_a_changed_space_are_kept_and_not_used() -> None:
    known = search("tpe", 12)
    narrow = space_of("x=log(1e-3, 1e-1), y=[1, 5], z=int(1, 9) if y=1")
    found = search("tpe", 20, space=narrow, known=known)
    assert found[:12] == known
    assert all(one.values["x"] <= 0.1 and one.values["y"] in (1, 5) for one in found[12:])


def test_no_two_trials_that_run_beside_each_other_are_the_same() -> None:
    space = space_of("a=[1, 2, 3, 4]")
    known: list[Known] = []
    for number, state in enumerate((DONE, FAILED, RUNNING)):
        found = propose(space, known, number, "tpe", 0, maximize=True)
        assert found is not None
        known.append(Known(number, found[0], state, 0.5 if state == DONE else None, found[1]))
    last = propose(space, known, 3, "tpe", 0, maximize=True)
    assert last is not None
    assert {str(one.values) for one in known} | {str(last[0])} == {f"{{'a': {value}}}" for value in (1, 2, 3, 4)}


def test_the_samplers_of_optuna_have_their_names() -> None:
    assert {"tpe", "random", "cmaes", "gp", "qmc", "grid", "nsgaii"} <= set(sampler_names())
    with pytest.raises(UserError, match=r"no sampler 'tpa'.*tpe"):
        make_sampler("tpa", 0, space_of())
    with pytest.raises(UserError, match="grid needs a list of values for every parameter"):
        make_sampler("grid", 0, space_of())
    assert isinstance(make_sampler("grid", 0, space_of("a=[1, 2]")), optuna.samplers.GridSampler)


def test_a_journal_has_the_trials_for_optunas_dashboard(tmp_path: Path) -> None:
    known: list[Any] = [*search("tpe", 3), Known(4, {"x": 0.4, "y": 2}, RUNNING)]
    known[1] = replace(known[1], started="2026-01-01T10:00:00+00:00", seconds=90.0)
    known.insert(3, Known(3, {"x": 0.5, "y": 2}, FAILED, reason="the disk is full"))
    sizes = []
    for _ in range(2):  # the second time, nothing is added
        journal = Journal(tmp_path / "optuna.log", space_of(), [False], ["loss"])
        journal.add(known[:2])
        journal.add(known)
        sizes.append((tmp_path / "optuna.log").stat().st_size)
    assert sizes[0] == sizes[1]
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "optuna.log")))
    (study,) = optuna.get_all_study_summaries(storage)
    loaded = optuna.load_study(study_name=study.study_name, storage=storage)
    trials = loaded.trials
    assert loaded.metric_names == ["loss"]
    assert trials[1].duration is not None
    assert trials[1].duration.total_seconds() == 90
    assert trials[3].user_attrs == {"trial": 3, "reason": "the disk is full"}
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3 + ["FAIL"]
    assert [trial.value for trial in trials[:3]] == [one.score for one in known[:3]]


def test_a_package_that_a_sampler_needs_later_is_missed_before_the_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.tuning.samplers.find_spec", lambda name: None)
    for sampler, package in (("cmaes", "cmaes"), ("gp", "torch scipy"), ("qmc", "scipy")):
        with pytest.raises(UserError, match=rf"{sampler} needs .*pip install {package}\. Or choose another sampler"):
            make_sampler(sampler, 0, space_of())
    make_sampler("tpe", 0, space_of())


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsgaii"])
def test_a_search_ends_only_when_every_combination_was_tried(sampler: str) -> None:
    space = space_of("x=uniform(0.1, 0.7, step=0.1), y=[1, 2, [3]], z=int(1, 5, step=2) if y=1, w=logint(1, 3) if y=2")
    known = search(sampler, 99, space=space)
    assert len(known) == 7 * (3 + 3 + 1)
    assert len({str(one.values) for one in known}) == len(known)
    assert len(search(sampler, 30, space=space_of("x=log(1e-3, 1), y=[1, 2]"))) == 30


def test_optuna_warns_of_nothing_that_the_user_can_not_change(caplog: pytest.LogCaptureFixture) -> None:
    search("qmc", 4)  # has a parameter with a condition
    search("grid", 5, space=space_of("x=[1, 2], y=[1, 2]"))
    assert not caplog.records


def states(path: Path) -> list[str]:
    storage = JournalStorage(JournalFileBackend(str(path)))
    return [trial.state.name for trial in optuna.load_study(study_name=path.parent.name, storage=storage).trials]


def test_a_journal_of_other_trials_or_another_space_is_written_anew(tmp_path: Path) -> None:
    path, known = tmp_path / "optuna.log", search("tpe", 2)
    paused = Known(2, {"x": 0.5, "y": 2}, PAUSED, 0.7, curve={111: 0.7})
    journal = Journal(path, space_of(), [False], ["loss"])
    journal.add([*known, paused])
    assert states(path) == ["COMPLETE"] * 2, "a paused trial may be promoted"
    journal.add([*known, paused], ended=True)
    assert states(path) == ["COMPLETE", "COMPLETE", "PRUNED"]
    done = Known(2, {"x": 0.5, "y": 2}, DONE, 0.6, curve={111: 0.7})
    Journal(path, space_of(), [False], ["loss"]).add([*known, done], ended=True)
    assert states(path) == ["COMPLETE"] * 3
    Journal(path, space_of("x=log(1e-3, 2)"), [False], ["loss"]).add([*known, done], ended=True)
    assert states(path) == []
    path.write_text("cut o")
    Journal(path, space_of(), [True, False], ["accuracy", "flops"]).add([Known(0, {"x": 0.5, "y": 2}, FAILED)])
    assert states(path) == ["FAIL"]


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii"])
def test_samplers_learn_from_limits_and_from_several_metrics(sampler: str) -> None:
    space = space_of("x=uniform(0, 1), y=uniform(0, 1)")

    def trials(limited: bool) -> list[Known]:
        known: list[Known] = []
        proposer = Proposer(space, sampler, 0, [True, False], limited)
        while len(known) < 90:
            found = proposer.propose(known, len(known))
            assert found is not None
            values, remembered = found
            over = (values["x"] - 0.3,) if limited else ()
            known.append(Known(len(known), values, DONE, values["x"], remembered, (values["y"],), violations=over))
        return known[50:]

    if sampler == "nsgaii":  # whose first generation is of 50 trials
        assert len(trials(True)) == 40
        return
    limited, free = (sum(one.values["x"] <= 0.3 for one in trials(is_limited)) for is_limited in (True, False))
    assert limited > free + 5


def test_paused_trials_count_by_their_last_rung() -> None:
    space = space_of("x=uniform(0, 1)")

    def near(curves: bool) -> int:
        known = [
            Known(i, {"x": i / 40}, PAUSED if curves else RUNNING, curve={100: abs(i / 40 - 0.2)} if curves else {})
            for i in range(40)
        ]
        found = [propose(space, known, number, "tpe", 0, maximize=False) for number in range(40, 60)]
        return sum(one is not None and abs(one[0]["x"] - 0.2) < 0.15 for one in found)

    assert near(True) > near(False) + 3


def test_values_of_the_user_replace_those_of_the_sampler() -> None:
    proposer = Proposer(space_of(), "tpe", 0, [False])
    found = proposer.propose([], 0, {"y": 1, "x": 7.0})
    assert found is not None
    assert found[0]["x"] == 7.0
    assert 1 <= found[0]["z"] <= 9, "the rest is the sampler's"
