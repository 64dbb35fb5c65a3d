"""What comes out of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Args:
        model_dir: the run folder.
        step: how many steps were trained.
        split: the split that ``metrics`` are of.
        metrics: ``loss``, ``accuracy`` and whatever else the task measures.
        model_step: the step of the model that ``metrics`` are of; the best model's for test at the end.
        best: the best model by validation: metric, value, step, path; empty where none was kept.
        validation: metrics on validation at the last evaluation.
        seconds: wall-clock time of training, all starts together.
    """

    model_dir: str
    step: int
    split: str
    metrics: dict[str, float]
    model_step: int
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
