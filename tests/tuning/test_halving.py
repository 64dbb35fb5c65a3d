"""Which trials of a search with rungs are trained further."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from modelyard.config import Config, resolve
from modelyard.tuning.halving import Halving, Standing, next_promotion
from modelyard.tuning.objectives import Constraint, front_numbers, parse_constraints, parse_metrics, ranked


def config(**options: Any) -> Config:
    return resolve({"model": "mlp", "dataset": "digits", **options}, pick_up_files=False)


def texts(halving: Halving, number: int = 0, **options: Any) -> list[str]:
    return [str(rung) for rung in halving.rungs(config(**options), number)]


def test_rungs_are_parts_of_a_run_at_its_evaluations() -> None:
    assert texts(Halving(3), train_steps=2700, eval_every="50 steps") == ["100 steps", "300 steps", "900 steps"]
    assert texts(Halving(3), train_steps=2700, eval_every="80 steps") == ["160 steps", "320 steps", "960 steps"]
    assert texts(Halving(3), train_steps=2700) == ["100 steps", "300 steps", "900 steps"], "epochs are another unit"
    assert texts(Halving(3), train_epochs=27) == ["1 epochs", "3 epochs", "9 epochs"]
    assert texts(Halving(3), train_epochs=10) == ["1 epochs", "2 epochs", "4 epochs"]
    assert texts(Halving(3), train_epochs=2) == ["1 epochs"], "rungs at the same step are one"
    assert texts(Halving(2, "5 %"), train_epochs=10, eval_every="10 %") == [
        "1 epochs",
        "2 epochs",
        "4 epochs",
        "8 epochs",
    ]
    assert texts(Halving(4, "100 steps"), train_steps=1000) == ["100 steps", "400 steps"]
    assert texts(Halving(4, "100 steps"), train_epochs=3)[:2] == ["100 steps", "400 steps"]
    third = texts(Halving(3), train_epochs=1, eval_every="1 steps")
    assert third == ["0.037037037037 epochs", "0.111111111111 epochs", "0.333333333333 epochs"]


@pytest.mark.parametrize("first", ["0", "3/2", "1/0", "a/b", "100 %", "1 h", "-1", "1.5 steps"])
def test_a_first_rung_that_is_none_is_told(first: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        _ = Halving(3, first).first_rung


def test_brackets_have_the_trials_of_hyperband() -> None:
    halving = Halving(3, "1/27", brackets=4)
    brackets = [halving.bracket(number) for number in range(98)]
    assert Counter(brackets) == {0: 54, 1: 24, 2: 12, 3: 8}
    assert set(brackets[:8]) == {0, 1, 2, 3}, "they are mixed"
    rungs = [texts(halving, brackets.index(bracket), train_steps=270) for bracket in range(4)]
    assert rungs == [["10 steps", "30 steps", "90 steps"], ["30 steps", "90 steps"], ["90 steps"], []]


def standing(*scores: float, waits: bool = True, bracket: int = 0) -> Standing:
    return Standing(bracket, [[score] for score in scores], waits)


def test_the_best_third_of_a_rung_is_promoted_and_the_highest_rung_first() -> None:
    first = {number: standing(score) for number, score in enumerate([0.5, 0.4])}
    assert next_promotion(first, 3) is None
    assert next_promotion(first, 3, without_place=True) == 1
    first[2] = standing(0.6)
    assert next_promotion(first, 3) == 1
    first[1] = standing(0.4, waits=False)
    assert next_promotion(first, 3) is None, "it was promoted and runs"
    first[1] = standing(0.4, 0.3)
    assert next_promotion(first, 3) is None, "one of three is promoted already"
    more = {**first, **{number: standing(0.1 * number, 0.05 * number) for number in (3, 4, 5)}}
    assert next_promotion(more, 3) == 3, "of the second rung"
    worse = {**first, 3: standing(0.9), 4: standing(0.8), 5: standing(float("inf"))}
    assert next_promotion(worse, 3) == 0, "two of six"
    assert next_promotion({number: standing(float("inf")) for number in range(9)}, 3) is None


def test_without_a_place_the_best_that_can_go_on_is_promoted() -> None:
    failed = {0: standing(0.1, waits=False), 1: standing(0.3), 2: standing(0.2)}
    assert next_promotion(failed, 3) is None
    assert next_promotion(failed, 3, without_place=True) == 2
    assert next_promotion({0: standing(float("inf"))}, 3, without_place=True) is None


def test_trials_are_compared_within_their_bracket() -> None:
    mixed = {0: standing(0.1), 1: standing(0.2), 2: standing(0.3, bracket=1)}
    assert next_promotion(mixed, 3) is None
    mixed |= {3: standing(0.4, bracket=1), 4: standing(0.25, bracket=1), 5: standing(0.6)}
    assert next_promotion(mixed, 3) == 4, "its rung is later"
    assert next_promotion({**mixed, 4: standing(0.25, 0.2, bracket=1)}, 3) == 0


def test_several_metrics_have_fronts() -> None:
    points = [[1, 5], [2, 2], [5, 1], [3, 3], [2, 2], [6, 6]]
    assert front_numbers(points) == [0, 0, 0, 1, 0, 2]
    assert ranked(dict(enumerate(points))) == [0, 1, 4, 2, 3, 5]
    assert ranked({3: [2.0], 7: [1.0], 1: [2.0]}) == [7, 1, 3]
    two = {number: Standing(0, [point], True) for number, point in enumerate(points)}
    assert next_promotion(two, 3) == 0


def test_metrics_and_limits_are_read_or_told() -> None:
    assert parse_metrics("accuracy, parameters") == ("accuracy", "parameters")
    for text, message in (("", "names separated"), ("a,a", "twice"), ("seconds, flops", "costs only")):
        with pytest.raises(ValueError, match=message):
            parse_metrics(text)
    limits = parse_constraints("parameters<=1e5, accuracy >= .9")
    assert limits == (Constraint("parameters", 1e5, True), Constraint("accuracy", 0.9, False))
    assert [str(limit) for limit in limits] == ["parameters<=100000", "accuracy>=0.9"]
    assert limits[0].violation({"parameters": 2e5}) == 1
    assert limits[1].violation({"accuracy": 0.99}) < 0
    assert limits[1].violation({}) == float("inf"), "what is not known is not met"
    for text in ("parameters", "a<=b", "a<=1e999", "a=3", "a<=1,,"):
        with pytest.raises(ValueError, match="is not a limit"):
            parse_constraints(text)
