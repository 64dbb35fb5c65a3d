"""What `modelyard models` says of each model is what it is."""

from __future__ import annotations

import numpy as np
import pytest

from modelyard.models.catalog import SIZES
from modelyard.registry import MODELS

QUICK = ("mlp", "simple_cnn", "resnet20", "vit")


def test_every_built_in_model_has_a_size() -> None:
    built_in = [entry.name for entry in MODELS.entries() if isinstance(entry.target, str)]
    assert set(built_in) - set(SIZES) == {"saved_model"}, "which depends on its file"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SIZES])
def test_a_size_is_that_of_the_model(two_devices: None, name: str) -> None:
    from conftest import engine_name
    from modelyard.cli.components import build_model
    from modelyard.models.flops import flops

    size = SIZES[name]
    model = build_model(MODELS.get(name), size.shape, size.classes, {"engine": engine_name()})
    weights = [v for v in model.variables if not v.path.endswith("seed_generator_state")]
    assert sum(int(np.prod(v.shape)) for v in weights) == size.parameters
    assert flops(model) == size.flops
