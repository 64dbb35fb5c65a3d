"""What Keras keeps for the whole process: the types it computes with, and the seed of its initializers."""

from __future__ import annotations

import random

import keras
import numpy as np
from keras.src.backend.common import dtypes

from modelyard.config.schema import Config

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def set_precision(config: Config) -> None:
    """Sets them as ``config`` says."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(_POLICIES.get(config.precision, config.precision))
    if config.precision == "float64":
        # On JAX Keras takes it that 64 bits are off, and computes batch norm in 32. A program without them has none.
        getattr(dtypes, "BIT64_TO_BIT32_DTYPE", {})["float64"] = "float64"


def seed_initializers(seed: int) -> None:
    """Has the next model begin with weights that only ``seed`` decides.

    `keras.utils.set_random_seed` would import TensorFlow and PyTorch where they are installed, to seed them too.
    """
    random.seed(seed)
    np.random.seed(seed)
