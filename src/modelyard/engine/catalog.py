"""The engines: names, help, and options that parameter servers do not support. Their code is imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelyard.errors import Problem
from modelyard.registry import ENGINES

if TYPE_CHECKING:
    from modelyard.config.schema import Config

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


def parameter_server_problems(config: Config) -> list[Problem]:
    """Returns the options of ``config`` that asynchronous training does not support."""
    several = config.num_gpus == "all" or (config.num_gpus != "auto" and config.num_gpus > 1)
    asked = {
        "deterministic": (config.deterministic, "asynchronous workers are not reproducible."),
        "scale_learning_rate": (
            config.scale_learning_rate,
            "a step has one worker's batch, however many workers there are; set learning_rate instead.",
        ),
        "precision": (
            config.precision == "float16",
            "float16 needs a loss scale, which concurrent workers would overwrite; use bfloat16 or float32.",
        ),
        "ema_decay": (config.ema_decay > 0, "concurrent workers would overwrite the averages."),
        "xla": (config.xla, "it cannot compile steps whose variables are in other processes."),
        "num_gpus": (several, "a worker computes on one GPU; start a worker for each."),
    }
    return [
        Problem(config.origin(key), key, f"is not supported with parameter servers: {reason}")
        for key, (wrong, reason) in asked.items()
        if wrong
    ]
