"""Modelyard: train many models on many datasets from one config. A killed run resumes bit for bit."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if "tensorflow" not in sys.modules:
    # TensorFlow reads it when it is imported, and its default depends on the CPU: without AVX-512 VNNI, oneDNN's faster
    # kernels are off. It is set here, so that all processes compute the same bits, whichever module imports TensorFlow.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

if TYPE_CHECKING:
    from modelyard.api import ExportFailedError, evaluate, resume, runs, train, train_and_evaluate
    from modelyard.cli.app import main
    from modelyard.comparison.leaderboard import Leaderboard, leaderboard
    from modelyard.comparison.matrix import MatrixResult, matrix
    from modelyard.config import Config, load_config
    from modelyard.data.dataset import ArrayDataset, DataContext, Dataset, Feature, GeneratorDataset
    from modelyard.data.inspection import data_info, verify_data
    from modelyard.data.records.convert import convert
    from modelyard.data.sheet import show_data
    from modelyard.data.sources.fetch import fetch
    from modelyard.errors import Interrupted, UserError
    from modelyard.launcher.local import launch, stop
    from modelyard.launcher.submit import submit
    from modelyard.loop.hooks import Hook
    from modelyard.loop.learning_rate_finder import LearningRates, find_learning_rate
    from modelyard.loop.run import Result
    from modelyard.models.catalog import ClassifierOptions, RegressorOptions
    from modelyard.models.data_info import DataInfo
    from modelyard.models.metric import Metric
    from modelyard.models.task import Task, any_input, image_input
    from modelyard.models.task_types import Classifier, MultiLabel, Regressor
    from modelyard.registry import (
        Options,
        register_augmentation,
        register_dataset,
        register_hook,
        register_metric,
        register_model,
        register_optimizer,
        register_preprocessing,
        register_schedule,
    )
    from modelyard.run.weights.read import load_weights
    from modelyard.serving.check_data import check_data
    from modelyard.serving.exporting.export import Exported, export
    from modelyard.serving.http.server import serve
    from modelyard.serving.loaded_run import Predicted, Rows, Run, load
    from modelyard.serving.prediction.predict import Predictions, predict
    from modelyard.serving.report import Report, report
    from modelyard.tuning.search import tune
    from modelyard.tuning.trials import TuneResult

# Imported on first use: `import modelyard` must be quick and must not choose Keras's backend.
_HOMES = {
    "modelyard.cli.app": ("main",),
    "modelyard.config": ("Config", "load_config"),
    "modelyard.data.dataset": ("ArrayDataset", "DataContext", "Dataset", "Feature", "GeneratorDataset"),
    "modelyard.data.inspection": ("data_info", "verify_data"),
    "modelyard.data.records.convert": ("convert",),
    "modelyard.data.sheet": ("show_data",),
    "modelyard.data.sources.fetch": ("fetch",),
    "modelyard.errors": ("Interrupted", "UserError"),
    "modelyard.launcher.local": ("launch", "stop"),
    "modelyard.launcher.submit": ("submit",),
    "modelyard.loop.hooks": ("Hook",),
    "modelyard.loop.learning_rate_finder": ("LearningRates", "find_learning_rate"),
    "modelyard.loop.run": ("Result",),
    "modelyard.comparison.leaderboard": ("Leaderboard", "leaderboard"),
    "modelyard.comparison.matrix": ("MatrixResult", "matrix"),
    "modelyard.tuning.search": ("tune",),
    "modelyard.tuning.trials": ("TuneResult",),
    "modelyard.models.catalog": ("ClassifierOptions", "RegressorOptions"),
    "modelyard.models.task_types": ("Classifier", "MultiLabel", "Regressor"),
    "modelyard.models.data_info": ("DataInfo",),
    "modelyard.models.metric": ("Metric",),
    "modelyard.models.task": ("Task", "any_input", "image_input"),
    "modelyard.run.weights.read": ("load_weights",),
    "modelyard.serving.prediction.predict": ("Predictions", "predict"),
    "modelyard.serving.report": ("Report", "report"),
    "modelyard.serving.check_data": ("check_data",),
    "modelyard.serving.exporting.export": ("Exported", "export"),
    "modelyard.serving.http.server": ("serve",),
    "modelyard.serving.loaded_run": ("Predicted", "Rows", "Run", "load"),
    "modelyard.api": ("ExportFailedError", "evaluate", "resume", "runs", "train", "train_and_evaluate"),
    "modelyard.registry": (
        "Options",
        "register_augmentation",
        "register_dataset",
        "register_hook",
        "register_metric",
        "register_model",
        "register_optimizer",
        "register_preprocessing",
        "register_schedule",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_NEED_KERAS = (
    "modelyard.models.data_info",
    "modelyard.models.task",
    "modelyard.models.task_types",
    "modelyard.loop.hooks",
)

__all__ = [
    "ArrayDataset",
    "Classifier",
    "ClassifierOptions",
    "Config",
    "DataContext",
    "DataInfo",
    "Dataset",
    "ExportFailedError",
    "Exported",
    "Feature",
    "GeneratorDataset",
    "Hook",
    "Interrupted",
    "Leaderboard",
    "LearningRates",
    "MatrixResult",
    "Metric",
    "MultiLabel",
    "Options",
    "Predicted",
    "Predictions",
    "Regressor",
    "RegressorOptions",
    "Report",
    "Result",
    "Rows",
    "Run",
    "Task",
    "TuneResult",
    "UserError",
    "any_input",
    "check_data",
    "convert",
    "data_info",
    "evaluate",
    "export",
    "fetch",
    "find_learning_rate",
    "image_input",
    "launch",
    "leaderboard",
    "load",
    "load_config",
    "load_weights",
    "main",
    "matrix",
    "predict",
    "register_augmentation",
    "register_dataset",
    "register_hook",
    "register_metric",
    "register_model",
    "register_optimizer",
    "register_preprocessing",
    "register_schedule",
    "report",
    "resume",
    "runs",
    "serve",
    "show_data",
    "stop",
    "submit",
    "train",
    "train_and_evaluate",
    "tune",
    "verify_data",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'modelyard' has no attribute {name!r}")
    if module in _NEED_KERAS:
        from modelyard.config.backend import prefer_engine

        prefer_engine()
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
