"""Learning rates at given steps, against their formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.config.durations import RunLength
from modelyard.errors import UserError

RUN = RunLength(examples=1000, batch_size=10, total_steps=1000)


def rates(steps: list[int], **options: Any) -> list[float]:
    from modelyard.models.schedules import build_schedule

    schedule = build_schedule(modelyard.load_config(model="mlp", learning_rate=0.5, **options), RUN)
    return [float(np.asarray(schedule(step))) for step in steps]


@pytest.mark.usefixtures("two_devices")
class TestSchedules:
    def test_constant_stays(self) -> None:
        assert rates([0, 999]) == [0.5, 0.5]

    def test_piecewise_is_cut_where_the_boundaries_say(self) -> None:
        got = rates([0, 499, 500, 749, 750, 999], learning_rate_schedule="piecewise")
        assert got == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
        got = rates([199, 200], learning_rate_schedule="piecewise", decay_boundaries="2 epochs", decay_factor=0.5)
        assert got == pytest.approx([0.5, 0.25])

    def test_piecewise_takes_a_factor_for_each_boundary(self) -> None:
        options = {"learning_rate_schedule": "piecewise", "decay_boundaries": "20 %,50 %,6 epochs"}
        got = rates([0, 199, 200, 499, 500, 600, 999], **options, decay_factors="0.1,0.5,4")
        assert got == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.025, 0.1, 0.1])

    def test_piecewise_takes_values_as_keras_does(self) -> None:
        import keras

        options = {"learning_rate_schedule": "piecewise", "decay_boundaries": "200,500", "decay_values": "0.1,0.03,2"}
        # Keras changes after a boundary, which counts from 0: one step later.
        theirs = keras.optimizers.schedules.PiecewiseConstantDecay([199, 499], [0.1, 0.03, 2.0])
        steps = [0, 199, 200, 499, 500, 999]
        assert rates(steps, **options) == pytest.approx([float(theirs(step)) for step in steps])

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"decay_factors": "0.1"}, r"decay_factors has 1 value\(s\), but .* 2 point\(s\): give 2"),
            ({"decay_values": "0.1,0.2"}, r"decay_values has 2 value\(s\), but .* 2 point\(s\): give 3"),
            ({"decay_values": "0.3,0.2,0.1", "decay_factor": 0.5}, "decay_factor and decay_values exclude each other"),
            ({"decay_factors": "0.1,0"}, "greater than 0"),
        ],
    )
    def test_piecewise_values_must_fit_their_boundaries(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            rates([0], learning_rate_schedule="piecewise", **given)

    def test_piecewise_values_need_boundaries_in_order(self) -> None:
        given = {"decay_boundaries": "2 epochs,10 %", "decay_values": "3,2,1"}
        with pytest.raises(UserError, match=r"decay_boundaries in order; they are the steps \[200, 100\]"):
            rates([0], learning_rate_schedule="piecewise", **given)

    def test_exponential_falls_by_its_rate_each_period(self) -> None:
        options = {"learning_rate_schedule": "exponential", "decay_rate": 0.5, "decay_period": "1 epochs"}
        assert rates([0, 50, 100, 200], **options) == pytest.approx([0.5, 0.5 * 0.5**0.5, 0.25, 0.125])
        assert rates([99, 100], **options, staircase=True) == pytest.approx([0.5, 0.25])

    def test_polynomial_ends_at_its_end(self) -> None:
        options = {"learning_rate_schedule": "polynomial", "end_learning_rate": 0.1}
        assert rates([0, 500, 1000], **options) == pytest.approx([0.5, 0.3, 0.1])
        assert rates([500], **options, decay_power=2) == pytest.approx([0.1 + 0.4 * 0.25])

        assert rates([0, 250, 999, 1000], learning_rate_schedule="polynomial") == pytest.approx(
            [0.5, 0.375, 0.0005, 0.0], abs=1e-6
        )

    def test_triangular_goes_straight_up_and_straight_down(self) -> None:
        got = rates([0, 100, 200, 600, 1000], learning_rate_schedule="triangular")
        assert got == pytest.approx([0.1, 0.3, 0.5, 0.25, 0.0], abs=1e-6)
        options = {"start_factor": 0, "peak_at": "1 epochs", "end_learning_rate": 0.1}
        got = rates([0, 50, 100, 550, 1000], learning_rate_schedule="triangular", **options)
        assert got == pytest.approx([0.0, 0.25, 0.5, 0.3, 0.1], abs=1e-6)

    def test_one_cycle_goes_up_and_down_in_half_cosines(self) -> None:
        got = rates([0, 150, 300, 650, 1000, 1200], learning_rate_schedule="one_cycle")
        assert got == pytest.approx([0.02, (0.02 + 0.5) / 2, 0.5, 0.25, 0.0, 0.0], abs=1e-6)
        assert rates([75], learning_rate_schedule="one_cycle") == pytest.approx(
            [0.02 + 0.48 * 0.5 * (1 - math.cos(math.pi / 4))]
        )
        options = {"start_factor": 0.5, "peak_at": "1 epochs", "end_learning_rate": 0.1}
        got = rates([0, 50, 100, 325, 550, 1000], learning_rate_schedule="one_cycle", **options)
        quarter = 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi / 4))
        assert got == pytest.approx([0.25, 0.375, 0.5, quarter, 0.3, 0.1], abs=1e-6)

    def test_one_cycle_may_peak_at_the_last_step(self) -> None:
        got = rates([0, 500, 999, 1000], learning_rate_schedule="one_cycle", peak_at="100 %")
        assert got == pytest.approx([0.02, 0.26, 0.5, 0.5], abs=1e-4)

    def test_a_range_test_grows_by_the_same_factor_each_step(self) -> None:
        got = rates([0, 1, 333, 666, 999], learning_rate_schedule="range_test", lowest_learning_rate=5e-4)
        assert got == pytest.approx([5e-4, 5e-4 * 1000 ** (1 / 999), 5e-3, 5e-2, 0.5], rel=1e-5)

    def test_cosine_is_half_a_cosine_after_the_warm_up(self) -> None:
        got = rates([0, 49, 99, 100, 550, 1000], learning_rate_schedule="cosine", warmup="10 %")
        half = 0.25 * (1 + math.cos(math.pi * 0.5))
        assert got == pytest.approx([0.005, 0.25, 0.5, 0.5, half, 0.0], abs=1e-6)

    def test_every_schedule_takes_a_warm_up(self) -> None:
        for name in ("constant", "piecewise", "exponential", "polynomial", "cosine", "triangular", "one_cycle"):
            first, second = rates([0, 9], learning_rate_schedule=name, warmup="20 steps")
            assert 0 < first < second < 0.3
