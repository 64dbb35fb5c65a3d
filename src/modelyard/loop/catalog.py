"""The built-in hooks: names, options and help. Their code is imported when used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from modelyard.registry import HOOKS, Options


class EarlyStopOptions(Options):
    """Options of early stopping."""

    metric: str = Field("loss", description="validation metric to watch")
    mode: Literal["auto", "max", "min"] = Field("auto", description="whether higher or lower is better")
    patience: int = Field(5, ge=1, description="evaluations without improvement before training stops")
    min_delta: float = Field(0.0, ge=0, description="the minimum change that counts as improvement")


class StopAtOptions(Options):
    """The value to stop at."""

    metric: str = Field("accuracy", description="validation metric to watch")
    value: float = Field(description="stop once it is reached")
    mode: Literal["auto", "max", "min"] = Field("auto", description="whether higher or lower is better")


class ProfilerOptions(Options):
    """The steps to profile."""

    start: int = Field(10, ge=1, description="first step to profile, counted from the step this process continues from")
    steps: int = Field(10, ge=1, description="number of steps")


class TensorBoardOptions(Options):
    """Optional contents of the event files."""

    images: bool = Field(True, description="a sheet of the first training images")
    graph: bool = Field(True, description="the layers of the model")


class TrackerOptions(Options):
    """Options of every tracker."""

    run_name: str | None = Field(None, description="name of the run there; by default that of the run folder")
    artifacts: bool = Field(False, description="upload the exports, not only their paths")
    wait: float = Field(30.0, ge=0, description="seconds to wait at the end for a server that does not answer")


class MLflowOptions(TrackerOptions):
    """Where the run is in MLflow."""

    tracking_uri: str | None = Field(None, description="URL of the server; by default MLFLOW_TRACKING_URI")
    experiment: str | None = Field(None, description="name of the experiment; by default MLFLOW_EXPERIMENT_NAME")


class WandbOptions(TrackerOptions):
    """Where the run is in Weights & Biases."""

    project: str | None = Field(None, description="name of the project; by default WANDB_PROJECT, or modelyard")
    entity: str | None = Field(None, description="user or team; by default WANDB_ENTITY, or your own")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline writes files for `wandb sync`; by default WANDB_MODE, or online"
    )


_HERE = "modelyard.loop"
HOOKS.declare("progress", f"{_HERE}.recording:Progress", summary="a progress bar on the terminal")
HOOKS.declare("log", f"{_HERE}.recording:Log", summary="training and evaluation metrics in the log")
HOOKS.declare("metrics", f"{_HERE}.recording:Metrics", summary="training and evaluation metrics in metrics.jsonl")
HOOKS.declare(
    "throughput", f"{_HERE}.recording:Throughput", summary="examples per second, current and average, in the metrics"
)
HOOKS.declare(
    "tensorboard",
    f"{_HERE}.recording:TensorBoard",
    options=TensorBoardOptions,
    summary="scalars, images and the graph for TensorBoard",
)
HOOKS.declare(
    "profiler",
    f"{_HERE}.recording:Profiler",
    options=ProfilerOptions,
    summary="a profile of some steps, for TensorBoard",
)
HOOKS.declare("checkpoint", f"{_HERE}.hooks:SaveCheckpoints", summary="checkpoints to resume from, every save_every")
HOOKS.declare("best", f"{_HERE}.metric_hooks:KeepBest", summary="the best models by best_metric")
HOOKS.declare(
    "early_stop",
    f"{_HERE}.metric_hooks:EarlyStop",
    options=EarlyStopOptions,
    summary="stop when a validation metric no longer improves",
)
HOOKS.declare(
    "stop_at",
    f"{_HERE}.metric_hooks:StopAt",
    options=StopAtOptions,
    summary="stop when a validation metric reaches a value",
)
HOOKS.declare("nan_guard", f"{_HERE}.metric_hooks:NanGuard", summary="stop with an error when the loss is NaN")
HOOKS.declare(
    "mlflow",
    f"{_HERE}.mlflow_tracker:MLflow",
    options=MLflowOptions,
    summary="metrics, options and results in MLflow; a resumed run is the same run there",
)
HOOKS.declare(
    "wandb",
    f"{_HERE}.wandb_tracker:Wandb",
    options=WandbOptions,
    summary="metrics, options and results in Weights & Biases; a resumed run is the same run there",
)
