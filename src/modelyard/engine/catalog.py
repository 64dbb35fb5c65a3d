"""The engines: names and help. Their code is imported when used."""

from __future__ import annotations

from modelyard.registry import ENGINES

ENGINES.declare(
    "tensorflow",
    "modelyard.engine.tensorflow:TensorFlowEngine",
    summary="CPUs, one GPU, all GPUs of a machine",
)
ENGINES.declare(
    "jax",
    "modelyard.engine.jax:JaxEngine",
    summary="one or many accelerators; CPUs too",
)
