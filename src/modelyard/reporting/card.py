"""MODEL_CARD.md: what a model is, what it was trained on, and how good it is, for people and for model hubs.

It begins with YAML that Hugging Face reads. There is no licence in it: only the owner of a model knows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelyard.charts.axes import with_unit
from modelyard.comparison.plots import templates
from modelyard.comparison.results import metrics_of
from modelyard.config.yaml_file import dump
from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION
from modelyard.reporting.facts import RunFacts, number, text

CARD = "MODEL_CARD.md"
_MOST_CLASSES, _MOST_OPTIONS = 50, 60
_TASKS = {
    (CLASSIFICATION, True): ("image-classification", "Image Classification"),
    (CLASSIFICATION, False): ("tabular-classification", "Tabular Classification"),
    (MULTI_LABEL, True): ("image-classification", "Multi-label Image Classification"),
    (MULTI_LABEL, False): ("tabular-classification", "Multi-label Classification"),
    (REGRESSION, False): ("tabular-regression", "Tabular Regression"),
}
"""The type and the name of a task at Hugging Face, by task and by whether the model takes images."""
_HUB_METRICS = {"accuracy", "f1", "precision", "recall", "mae", "mse"}
"""Metrics that are called the same there."""
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_[]<>|#~&"})


def model_card(run: RunFacts, step: int, task: str, takes_images: bool, form: str = "") -> str:
    """Returns the card of a model as Markdown.

    Args:
        run: the facts of its run.
        step: the step of the model.
        task: classification, multi_label, regression or another.
        takes_images: whether it takes an image.
        form: the format of the export beside the card.
    """
    scores = {split: found for split in ("test", "validation") if (found := _scores_at(run, split, step))}
    environment = templates("modelyard.reporting")
    environment.filters["plain"] = lambda value: text(value).translate(_MARKDOWN)
    card: str = environment.get_template(CARD).render(
        head=dump(_front_matter(run, task, takes_images, scores)).rstrip(),
        run=run,
        step=step,
        form=form,
        task=task.replace("_", "-"),
        scores=scores,
        metrics=list(dict.fromkeys(name for metrics in scores.values() for name in metrics)),
        classes=run.classes[:_MOST_CLASSES],
        more_classes=max(0, len(run.classes) - _MOST_CLASSES),
        options=run.options[:_MOST_OPTIONS],
        number=number,
        with_unit=with_unit,
    )
    return card


def _scores_at(run: RunFacts, split: str, step: int) -> dict[str, float]:
    """Returns the metrics of a split by the model of a step; empty if it was not evaluated there."""
    rows = [row for row in run.rows if row.get("split") == split and row.get("step") == step]
    return metrics_of(rows[-1]) if rows else {}


def _front_matter(
    run: RunFacts, task: str, takes_images: bool, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    kind = _TASKS.get((task, takes_images))
    names = list(dict.fromkeys(name for metrics in scores.values() for name in metrics))
    dataset = text(run.dataset, 100)
    head: dict[str, Any] = {"library_name": "keras"}
    if kind is not None:
        head["pipeline_tag"] = kind[0]
    head["tags"] = ["keras", "modelyard", *(["vision"] if takes_images else []), _tag(run.model)]
    if names:
        head["metrics"] = [text(name, 100) for name in names if name != "loss"] or ["loss"]
    results = [
        {
            **({"task": {"type": kind[0], "name": kind[1]}} if kind is not None else {}),
            "dataset": {"name": dataset or "unknown", "type": _tag(dataset), "split": split},
            "metrics": [
                {"type": name if name in _HUB_METRICS else _tag(name), "name": text(name, 100), "value": value}
                for name, value in metrics.items()
            ],
        }
        for split, metrics in scores.items()
    ]
    if kind is not None and results:  # a result without a task is not valid there
        head["model-index"] = [{"name": text(run.name, 100), "results": results}]
    return head


def _tag(name: str) -> str:
    """Returns a name as an identifier."""
    return re.sub(r"[^\w.-]+", "-", text(name, 100)).strip("-") or "unknown"
