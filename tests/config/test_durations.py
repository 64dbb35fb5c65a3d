"""Durations as people write them, and the steps at which a cadence fires."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.config.durations import Duration, InSteps, RunLength

relaxed = settings(deadline=None)
UNITS = ("steps", "epochs", "examples", "percent", "seconds", "minutes", "hours")


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        (500, 500, "steps"),
        ("500", 500, "steps"),
        (500.0, 500, "steps"),
        ("3 epochs", 3, "epochs"),
        ("0.5 epoch", Fraction(1, 2), "epochs"),
        ("3epochs", 3, "epochs"),
        ("  3   Epochs ", 3, "epochs"),
        ("1,000 steps", 1000, "steps"),
        ("1,234,567.5 examples", Fraction("1234567.5"), "examples"),
        ("10_000 examples", 10000, "examples"),
        ("2e3 steps", 2000, "steps"),
        ("1e-05 epochs", Fraction(1, 100_000), "epochs"),
        ("50 %", 50, "percent"),
        ("50%", 50, "percent"),
        ("12.5 percent", Fraction(25, 2), "percent"),
        ("30 s", 30, "seconds"),
        ("10 min", 10, "minutes"),
        ("1.5 h", Fraction(3, 2), "hours"),
    ],
)
def test_a_duration_is_read_as_written(text: object, value: Fraction, unit: str) -> None:
    assert Duration.parse(text) == Duration(Fraction(value), unit)


@pytest.mark.parametrize(
    "text",
    [
        "", "steps", "five steps", "-5 steps", "5 fortnights", "1.2.3 epochs", "5 steps 3", "1e400 steps",
        "1,5 epochs", "0,5 epochs", "1,50 epochs", ",5 epochs", None, True, [5], "nan epochs", "inf steps",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_what_would_be_right(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration\. Write a number and a unit: '500 steps'"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "message"), [("0 steps", "greater than zero"), ("0.0 epochs", "greater than zero"), ("1.5 steps", "whole")]
)
def test_zero_and_half_steps_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Duration.parse(text)


@relaxed
@given(st.integers(1, 10**9), st.integers(0, 9), st.sampled_from(UNITS))
def test_a_duration_written_out_and_read_again_is_the_same(digits: int, places: int, unit: str) -> None:
    duration = Duration(Fraction(digits, 10 ** (places if unit != "steps" else 0)), unit)
    assert Duration.parse(str(duration)) == duration


@relaxed
@given(st.floats(1e-9, 1e9))
def test_a_float_of_epochs_is_read_as_it_is_shown(value: float) -> None:
    assert Duration.parse(f"{value} epochs").value == Fraction(repr(value))


def test_wall_clock_time_has_seconds_and_no_steps() -> None:
    assert Duration.parse("10 min").seconds == 600
    assert Duration.parse("1.5 h").seconds == 5400
    assert Duration.parse("3 epochs").seconds is None
    with pytest.raises(ValueError, match="wall-clock"):
        Duration.parse("10 min").steps(RunLength(100, 10, 100))


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7 steps", 7), ("1 epochs", 16), ("2 epochs", 32), ("64 examples", 1), ("65 examples", 2), ("10 %", 5)],
)
def test_durations_in_steps_are_rounded_up(text: str, steps: int) -> None:
    assert Duration.parse(text).steps(RunLength(examples=1000, batch_size=64, total_steps=50)) == steps


periods = st.fractions(min_value=1, max_value=1000, max_denominator=97)


@relaxed
@given(periods, st.integers(1, 60))
def test_a_cadence_fires_exactly_where_the_kth_period_ends(period: Fraction, turns: int) -> None:
    """The k-th time at ceil(k × period), and nowhere else."""
    expected = [math.ceil(k * period) for k in range(1, turns + 1)]
    cadence = InSteps(period)
    fired, step = [], 0
    while len(fired) < turns:
        step = cadence.next_after(step)
        fired.append(step)
    assert fired == expected
    around = {step + d for step in expected[:5] for d in (-1, 0, 1)}
    last = expected[min(4, turns - 1)]
    assert {s for s in around if s <= last and cadence.fires_at(s)} == set(expected[:5])


@relaxed
@given(periods, st.integers(0, 10**9))
def test_the_next_firing_is_the_same_from_wherever_it_is_asked(period: Fraction, step: int) -> None:
    """No state: a run that is resumed fires where an undisturbed one does."""
    near = math.floor(step / period)
    firings = [math.ceil(turn * period) for turn in range(max(near - 1, 1), near + 3)]
    assert InSteps(period).next_after(step) == min(firing for firing in firings if firing > step)


@relaxed
@given(st.fractions(min_value=Fraction(1, 1000), max_value=1, max_denominator=1000))
def test_a_cadence_shorter_than_a_step_fires_at_every_step(period: Fraction) -> None:
    assert [InSteps(period).next_after(step) for step in range(5)] == [1, 2, 3, 4, 5]


def test_a_cadence_never_fires_at_step_zero() -> None:
    assert not InSteps(Fraction(5)).fires_at(0)


def test_the_seventh_epoch_ends_where_seven_epochs_end() -> None:
    run = RunLength(examples=1000, batch_size=64, total_steps=1000)
    cadence = InSteps(Duration.parse("1 epochs").period(run))
    step, ends = 0, []
    for _ in range(7):
        step = cadence.next_after(step)
        ends.append(step)
    assert ends == [16, 32, 47, 63, 79, 94, 110]
