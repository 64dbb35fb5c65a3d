"""Finds a learning rate: trains a few steps with a growing learning rate and inspects the loss (L. Smith, 2015).

It trains a new model with the schedule ``range_test``, without a run folder.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.config import Config
from modelyard.config.calls import Call
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import UserError
from modelyard.loop.run import as_config, build, create_engine, run_length
from modelyard.system.console import bar
from modelyard.system.files import PARTIAL, explain, whole_folder
from modelyard.system.process import random_state_kept

log = logging.getLogger("modelyard")

DIVERGED = 4.0
"""Training has diverged if the smoothed loss is this many times the best."""
_CERTAIN = 4.0
"""A fall of the loss is significant if it is this many standard errors."""
TABLE, PLOT = "learning_rates.csv", "learning_rates.svg"
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 736, 62, 384
"""The axes of the plot."""
_FAR_ABOVE = -1e4
"""Far above the plot, but not too far for SVG viewers."""
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="760" height="440" viewBox="0 0 760 440"><style>
text {{ font: 13px sans-serif; fill: #222 }} .title {{ font-size: 16px; font-weight: bold }} .faint {{ stroke: #ddd }}
.raw {{ fill: none; stroke: #9ab; stroke-width: 1 }} .smooth {{ fill: none; stroke: #0b5cad; stroke-width: 2.5 }}
.mark {{ stroke-width: 1.5; stroke-dasharray: 5 4 }}</style>
<rect width="760" height="440" fill="white"/>
<clipPath id="plot"><rect x="70" y="62" width="666" height="322"/></clipPath>
{body}
<text x="403" y="428" text-anchor="middle">learning rate</text>
<text transform="translate(18 223) rotate(-90)" text-anchor="middle">loss of a batch</text>
</svg>
"""


@dataclass(frozen=True)
class LearningRates:
    """The result of a search.

    Args:
        learning_rates: the learning rate of each step.
        losses: the loss of each step's batch; the last may be infinite or NaN.
        smoothed: the losses, averaged over neighbouring steps.
        steepest: the learning rate at which the smoothed loss falls fastest; None if it never falls.
        diverged: the learning rate at which training diverged; None if it did not.
        tenth: one tenth of ``diverged``.
        suggestion: the smaller of ``steepest`` and ``tenth``; None if there is neither.
        folder: the folder of table and plot.
    """

    learning_rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    diverged: float | None
    tenth: float | None
    suggestion: float | None
    folder: str

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; a loss that is not finite is None."""
        values = asdict(self)
        for key in ("losses", "smoothed"):
            values[key] = [value if math.isfinite(value) else None for value in values[key]]
        return values


def find_learning_rate(
    config: Config | Mapping[str, Any] | None = None,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    output: str | Path | None = None,
    **options: Any,
) -> LearningRates:
    """Trains a new model with a learning rate that grows from ``lowest`` to ``highest``, and suggests one.

    It stops early if the loss diverges. Model, data, optimizer and batch size are those of ``config``.

    Args:
        config: a config, or options as a dictionary.
        lowest: the learning rate of the first step.
        highest: the learning rate of the last step.
        steps: the maximum number of steps.
        output: folder for the table and the plot, or its URL; by default a new one in ``runs_dir``.
        **options: options of a run by name, instead of ``config``.

    Example:
        >>> found = modelyard.find_learning_rate(model="mlp", dataset="digits", optimizer="sgd")
        >>> found.suggestion
    """
    config = as_config(config, options)
    if not 0 < lowest < highest < math.inf:
        raise UserError(f"lowest {lowest:g} and highest {highest:g} must be greater than 0, and lowest the smaller.")
    if steps < 10:
        raise UserError(f"steps is {steps}; at least 10 are needed.")
    if config.checkpoint_path is not None:
        log.warning("checkpoint_path has no effect here: the search trains new weights")
    folder = _folder(config, output)
    rates, losses = _measure(_range_test(config, lowest, highest, steps), steps)
    found = _read(rates, losses, steps, folder)
    with _new_folder(folder, storage.cache_folder(config.cache_dir)) as partial:
        rows = zip(found.learning_rates, found.losses, found.smoothed, strict=True)
        lines = [f"{step},{r:.9g},{raw:.9g},{s:.9g}\n" for step, (r, raw, s) in enumerate(rows)]
        (partial / TABLE).write_text("step,learning_rate,loss,smoothed_loss\n" + "".join(lines), encoding="utf-8")
        (partial / PLOT).write_text(
            draw(found, f"{config.model} on {config.dataset}, {config.optimizer}"), encoding="utf-8"
        )
    return found


def smooth(losses: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Returns the mean over a window around each step, narrower at the ends; unlike a running mean it does not lag."""
    half = max(steps // 20, 1)
    out = np.empty(len(losses))
    for index in range(len(losses)):
        reach = min(half, index, len(losses) - 1 - index)
        out[index] = losses[index - reach : index + reach + 1].mean()
    return out


def divergence(losses: NDArray[np.float64], steps: int) -> int | None:
    """Returns the first step at which the smoothed loss is four times the best before it, or a loss is not finite."""
    wrong = np.flatnonzero(~np.isfinite(losses))
    finite = losses[: wrong[0]] if len(wrong) else losses
    smoothed = smooth(finite, steps)
    best = np.minimum.accumulate(smoothed)
    over = np.flatnonzero(smoothed > best + (DIVERGED - 1) * np.abs(best))  # a custom loss may be below 0
    if len(over):
        return int(over[0])
    return int(wrong[0]) if len(wrong) else None


def _folder(config: Config, output: str | Path | None) -> str:
    """Returns the folder of the results, or its URL.

    Raises:
        UserError: if it has other files.
    """
    if output is None:
        name = f"lr-finder-{datetime.now():%Y-%m-%d-%H_%M_%S}"
        runs = config.runs_dir if storage.is_remote(config.runs_dir) else str(Path(config.runs_dir).expanduser())
        paths = (storage.inside(runs, f"{name}-{n}" if n > 1 else name) for n in itertools.count(1))
        return next(path for path in paths if not storage.exists(path if storage.is_remote(path) else Path(path)))
    if storage.is_remote(str(output)):
        folder, names = str(output).rstrip("/"), storage.names_below(str(output))
        is_file = "" in names
    else:
        local = Path(output).expanduser()
        names = [path.name for path in local.iterdir()] if local.is_dir() else []
        folder, is_file = str(local), local.exists() and not local.is_dir()
    unexpected = [name for name in names if name not in (TABLE, PLOT)]
    if unexpected or is_file:
        reason = "is a file" if is_file else f"holds {unexpected[0]}"
        raise UserError(f"{folder} {reason}; name a new folder for the results with --output.")
    return folder


@contextlib.contextmanager
def _new_folder(folder: str, cache: Path) -> Iterator[Path]:
    """Yields a folder to fill, which becomes ``folder`` at the end of the block."""
    if not storage.is_remote(folder):
        with whole_folder(Path(folder)) as partial:
            yield partial
        return
    with explain(cache, "write to the cache"):
        cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=cache) as partial:
        yield Path(partial)
        storage.upload_folder(Path(partial), folder)


def _range_test(config: Config, lowest: float, highest: float, steps: int) -> Config:
    """Returns the config with a learning rate that grows."""
    return config.model_copy(
        update={
            "learning_rate": highest,
            "learning_rate_schedule": "range_test",
            "component_options": {**config.component_options, "lowest_learning_rate": lowest},
            "warmup": None,
            "train_steps": steps,
            "train_epochs": None,
            "ema_decay": 0.0,
            "cluster": "none",
            "fine_tune": _first_phase(config.fine_tune),
            "scale_learning_rate": False,  # a run multiplies what is found here
        }
    )


def _first_phase(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Returns the first phase of the run, for the whole search."""
    kept = {key: value for call in calls[:1] for key, value in call.arguments.items() if key not in ("until", "factor")}
    return tuple(Call(call.name, kept) for call in calls[:1])


@random_state_kept()
def _measure(config: Config, steps: int) -> tuple[list[float], list[float]]:
    """Trains until the end or until it diverges; returns the learning rate and the loss of each step."""
    dataset = load_dataset(config)
    engine = create_engine(config)
    build(engine, config, dataset, run_length(config, dataset))
    engine.initialize()
    rates: list[float] = []
    losses: list[float] = []
    try:
        engine.prepare([steps, 10])
        with bar("trying learning rates", steps) as show:
            while len(losses) < steps:
                count = min(max(engine.steps_per_call, 5), steps - len(losses))
                metrics = engine.train(len(losses), count)
                rates += metrics["learning_rate"].tolist()
                losses += metrics["loss"].tolist()
                show(len(losses), steps)
                if divergence(np.array(losses, np.float64), steps) is not None:
                    break
    finally:
        engine.close()
    return rates, losses


def _read(rates: list[float], losses: list[float], steps: int, folder: str) -> LearningRates:
    """Returns the result for the losses."""
    raw = np.array(losses, np.float64)
    wrong = np.flatnonzero(~np.isfinite(raw))
    raw = raw[: wrong[0] + 1] if len(wrong) else raw  # later losses mean nothing
    smoothed = smooth(raw, steps)
    at = divergence(raw, steps)
    index = _steepest(np.log10(rates), raw, smoothed, len(raw) if at is None else at)
    diverged = None if at is None else rates[at]
    tenth = None if diverged is None else diverged / 10
    steepest = None if index is None else rates[index]
    suggestion = min((rate for rate in (steepest, tenth) if rate is not None), default=None)
    curve = tuple(rates[: len(raw)]), tuple(raw.tolist()), tuple(smoothed.tolist())
    return LearningRates(*curve, steepest, diverged, tenth, suggestion, folder)


def _falls(losses: NDArray[np.float64]) -> bool:
    """Returns whether the last losses are lower than the first by more than the noise between batches."""
    few = max(len(losses) // 5, 2)
    noise = float(np.std(np.diff(losses))) / math.sqrt(2)
    return bool(losses[:few].mean() - losses[-few:].mean() > _CERTAIN * noise * math.sqrt(2 / few))


def _steepest(
    decades: NDArray[np.float64], raw: NDArray[np.float64], smoothed: NDArray[np.float64], end: int
) -> int | None:
    """Returns the step before ``end`` at which the smoothed loss falls fastest on its way to the minimum."""
    finite = smoothed[:end][np.isfinite(smoothed[:end])]
    lowest = int(finite.argmin()) if len(finite) else 0
    if lowest < 2 or not _falls(raw[: lowest + 1]):
        return None
    slope = np.gradient(finite[: lowest + 1], decades[: lowest + 1])
    return int(slope.argmin()) if slope.min() < 0 else None


# -- the plot, as SVG -----------------------------------------------------------------------------------------------


def draw(found: LearningRates, title: str) -> str:
    """Plots the loss over the learning rate as SVG, on a logarithmic scale, with the suggestion."""
    rates, smoothed = found.learning_rates, [loss for loss in found.smoothed if math.isfinite(loss)]
    first, last = math.log10(rates[0]), math.log10(rates[-1])
    low, high = _range(smoothed, [loss for loss in found.losses if math.isfinite(loss)])

    def x(rate: float) -> float:
        return _LEFT + (math.log10(rate) - first) / max(last - first, 1e-9) * (_RIGHT - _LEFT)

    def y(loss: float) -> float:
        return _BOTTOM - (loss - low) / (high - low) * (_BOTTOM - _TOP)

    def curve(losses: Iterable[float], kind: str) -> str:
        pairs = [(x(r), max(y(v), _FAR_ABOVE)) for r, v in zip(rates, losses, strict=True) if math.isfinite(v)]
        points = " ".join(f"{right:.1f},{down:.1f}" for right, down in pairs)
        return f'<polyline class="{kind}" clip-path="url(#plot)" points="{points}"/>'

    def vertical(at: float, attributes: str) -> str:
        return f'<line {attributes} x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'

    parts = [f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>']
    for decade in range(math.ceil(first - 0.01), math.floor(last + 0.01) + 1):
        at = x(10.0**decade)
        parts.append(vertical(at, 'class="faint"'))
        parts.append(f'<text x="{at:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{10.0**decade:g}</text>')
    for value in _ticks(low, high):
        at = y(value)
        parts.append(f'<line class="faint" x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    parts += [curve(found.losses, "raw"), curve(found.smoothed, "smooth")]
    marks = (("steepest", found.steepest, "#187a2f"), ("a tenth of divergence", found.tenth, "#b3261e"))
    for number, (name, rate, colour) in enumerate(marks):
        if rate is None:
            continue
        text = f"{name}: {rate:.2g}" + (" (suggested)" if rate == found.suggestion else "")
        parts.append(f'<text style="fill:{colour}" x="{_LEFT + 280 * number}" y="46">{text}</text>')
        if rates[0] <= rate <= rates[-1]:
            parts.append(vertical(x(rate), f'class="mark" stroke="{colour}"'))
    return _SVG.format(body="\n".join(parts))


def _range(smoothed: list[float], raw: list[float]) -> tuple[float, float]:
    """Returns the range of losses to show, without those of the last steps, which may be huge."""
    if not smoothed:
        return 0.0, 1.0
    low, begin = min(raw), smoothed[0]
    high = min(max(smoothed), low + 1.8 * max(begin - low, 0.1 * abs(begin)))
    high = max(high, begin)
    margin = max(high - low, abs(high) * 0.01, 1e-9) * 0.06
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Returns four to eight round numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 8)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
