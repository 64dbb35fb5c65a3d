"""The recipes train as they stand, on a small stand-in for their data."""

from __future__ import annotations

import numpy as np
import pytest

import modelyard
from modelyard.config.resolve import recipe_names

pytestmark = pytest.mark.usefixtures("two_devices")
RECIPES = [name for name in recipe_names() if name.startswith("cifar10")]


@pytest.mark.parametrize(
    "name", [n if n in ("cifar10-94", "cifar10-resnet20") else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES]
)
def test_a_recipe_trains_and_is_tested(name: str) -> None:
    stand_in = {"dataset": "synthetic", "synthetic_examples": 40, "train_steps": 2, "train_batch_size": 8}
    result = modelyard.train_and_evaluate(recipe=name, **stand_in, model_dir="run", eval_batch_size=8)
    assert (result.step, result.split) == (2, "test")
    assert all(np.isfinite(value) for value in result.metrics.values())
