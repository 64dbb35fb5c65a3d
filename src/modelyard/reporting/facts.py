"""The facts of a report, as plain values: the page shows them, report.json has them.

Texts come from run folders of anybody. They are cut, and what can't be written as UTF-8 is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from modelyard.charts.curves import Curve
from modelyard.reporting.calibration import Calibration
from modelyard.reporting.scores import ClassScore, Confused, Mistake

REPORT_FORMAT = 1
LONGEST_TEXT = 300
_LONGEST_LIST = 50
_MATRIX_CLASSES = 200
"""report.json has the confusion matrix of at most so many classes."""


@dataclass(frozen=True)
class Score:
    """A metric of the split.

    Args:
        name: its name.
        value: its value, as `evaluate` has it.
        low, high: the ends of its 95 % interval, if known.
        baseline: what a model that ignores its input scores, if known.
        lower_is_better: which way is better.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    lower_is_better: bool = False


@dataclass(frozen=True)
class Finding:
    """A finding of a rule about a run.

    Args:
        rule: the name of the rule.
        level: problem, warning, note, or fine.
        text: one sentence with its numbers.
        advice: what to do about it.
        numbers: the numbers behind it.
    """

    rule: str
    level: str
    text: str
    advice: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """Facts that are missing in the report, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Option:
    """An option that differs from its default, and where it came from as far as that is known."""

    name: str
    value: str
    default: str
    source: str


@dataclass(frozen=True)
class Start:
    """A start of the run: when, at which step, where."""

    time: str
    step: int
    host: str


@dataclass(frozen=True)
class RunFacts:
    """Facts that the run folder has, without the data.

    Args:
        name: the name of the run.
        address: its folder or URL.
        status: finished, stopped early, interrupted, running, not begun, or damaged.
        model, dataset: their names.
        classes: the names of the classes, or of the numbers that are predicted.
        step: the steps that were trained.
        total_steps: the steps that the run was to have.
        best_step: the step of the best model.
        best_metric, lower_is_better: what it is the best by.
        rows: the metrics by split and step.
        curves: the curves by metric and split.
        scores: the metrics of each evaluated split, of the best model.
        looks: the number of evaluations on validation.
        sizes: the examples of each split.
        counts: of each split, the examples of each class.
        options: the options that differ from their defaults.
        starts: the starts.
        machine: hardware and versions.
        parameters, flops: the size of the model.
        seconds: the time of training.
        hypothesis: what the user expected.
        modes: what is better of each metric, min or max, where it says so.
        missing: what could not be read.
    """

    name: str
    address: str
    status: str = ""
    model: str = ""
    dataset: str = ""
    classes: tuple[str, ...] = ()
    step: int = 0
    total_steps: int | None = None
    best_step: int | None = None
    best_metric: str = ""
    rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict, repr=False)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    looks: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    starts: tuple[Start, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    parameters: int | None = None
    flops: int | None = None
    seconds: float | None = None
    hypothesis: str = ""
    modes: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()

    def lower_is_better(self, metric: str) -> bool:
        """Returns which way a metric is better: what it says itself, else by its name."""
        words = ("loss", "error", "perplexity", "distance", "mae", "mse", "rmse", "mape")
        return self.modes.get(metric, "min" if any(word in metric for word in words) else "max") == "min"


@dataclass(frozen=True)
class NumberScore:
    """Scores of one of the numbers that a regression predicts."""

    name: str
    mae: float
    rmse: float
    r2: float | None
    bias: float
    label_mean: float
    label_spread: float


@dataclass(frozen=True)
class Regression:
    """A regression on the split: scores of each number, and a sample of labels, predictions and all residuals' bins."""

    numbers: tuple[NumberScore, ...]
    labels: tuple[tuple[float, ...], ...]
    predicted: tuple[tuple[float, ...], ...]
    histograms: tuple[tuple[tuple[float, int], ...], ...]


@dataclass(frozen=True)
class SplitFacts:
    """Facts about the predictions on a split.

    Args:
        split: the split.
        task: classification, multi_label, regression, or empty.
        step: the step of the model.
        examples: the number of examples.
        scores: the metrics, the most important one first.
        baseline: the model that ignores its input, in words.
        classes: scores of each class.
        order: the classes in the order in which confusions stand together.
        matrix: the confusion matrix in the order of the classes.
        confused: the pairs of classes with the most mistakes.
        mistakes: the worst mistakes.
        doubtful: the examples whose label is probably wrong.
        doubtful_count: their number; ``doubtful`` has the first of them.
        wrong: the number of examples that are wrong.
        calibration: of the probabilities.
        thresholds: of multi-label, precision, recall and F1 over thresholds.
        regression: of a regression.
        from_records: whether these are the values that the run has recorded, without predictions.
    """

    split: str
    task: str
    step: int
    examples: int
    scores: tuple[Score, ...]
    baseline: str = ""
    classes: tuple[ClassScore, ...] = ()
    order: tuple[int, ...] = ()
    matrix: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    confused: tuple[Confused, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    doubtful: tuple[Mistake, ...] = ()
    doubtful_count: int = 0
    wrong: int = 0
    calibration: Calibration | None = None
    thresholds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    regression: Regression | None = None
    from_records: bool = False


@dataclass(frozen=True)
class Facts:
    """All facts of a report."""

    run: RunFacts
    split: SplitFacts | None
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """Returns plain values: numbers that are not finite are null, long lists are cut."""
        run = {key: value for key, value in asdict(self.run).items() if key not in ("rows", "missing")}
        run["curves"] = {
            metric: {split: {"steps": curve.steps, "values": curve.values} for split, curve in splits.items()}
            for metric, splits in self.run.curves.items()
        }
        split = None if self.split is None else asdict(self.split)
        if split is not None and len(split["matrix"]) > _MATRIX_CLASSES:
            split["matrix"] = None
        found = {
            "modelyard_report": REPORT_FORMAT,
            "verdict": self.verdict,
            "findings": [asdict(one) for one in self.findings],
            "missing": [asdict(one) for one in self.missing],
            "split": split,
            "run": run,
        }
        plain: dict[str, Any] = _plain(found)
        return plain


def text(value: Any, most: int = LONGEST_TEXT) -> str:
    """Returns any value as text of one line that can be shown: cut, and without what is no character."""
    whole = value if isinstance(value, str) else str(value)
    cut = whole[:most].encode("utf-8", "replace").decode()
    cut = "".join(letter if letter.isprintable() else " " for letter in cut)
    return f"{cut}…" if len(whole) > most else cut


def number(value: float | None) -> str:
    """Returns a score as text, as `evaluate` prints it."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.1f}"
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def percent(share: float, digits: int = 0) -> str:
    """Returns a share as text."""
    return f"{100 * share:.{digits}f} %"


def some(names: Sequence[str], most: int = 5) -> str:
    """Returns the first names of a list as text."""
    listed = ", ".join(text(name, 60) for name in names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {text(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "item"):
        return _plain(value.item())
    return text(value, 10 * LONGEST_TEXT) if isinstance(value, str) else value
