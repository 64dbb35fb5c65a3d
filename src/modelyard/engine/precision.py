"""The types that Keras computes with and keeps variables in."""

from __future__ import annotations

import keras

from modelyard.config.schema import Config

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def set_precision(config: Config) -> None:
    """Sets them as ``config`` says."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(_POLICIES.get(config.precision, config.precision))
