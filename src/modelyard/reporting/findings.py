"""The rules of a report: what may be wrong with a model, each with the number behind it.

A rule returns a `Finding`, also if all is well (``fine``), or None if the run does not have what it needs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from modelyard.charts.curves import Curve
from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION
from modelyard.reporting.facts import Finding, RunFacts, Score, SplitFacts, number, percent, some

PROBLEM, WARNING, NOTE, FINE = "problem", "warning", "note", "fine"
LEVELS = (PROBLEM, WARNING, NOTE, FINE)
_GAP = 0.05
"""A training accuracy that is so much above that of validation is worth a word."""
_RISE = 0.1
_MUCH = 0.2
_RISE_MUCH = 0.5
_LATE_GAIN = 0.05
_DECAYED = 0.05
_MISCALIBRATED = 0.05
_FEW_TRAINING, _FEW_TESTED = 20, 10
_UNBALANCED = 10
_CONFUSED_SHARE, _CONFUSED_COUNT = 0.15, 3
_WIDE = 0.05
_SPIKE = 1.5


def find(run: RunFacts, split: SplitFacts | None) -> tuple[Finding, ...]:
    """Returns what all rules say, the gravest first."""
    rules: Sequence[Callable[[RunFacts, SplitFacts | None], Finding | None]] = (
        _completeness, _against_baseline, _overfitting, _stability, _test_against_validation, _dead_classes,
        _confusions, _weak_classes, _labels, _calibration, _outliers, _bias, _progress, _underfitting, _few_examples,
        _balance, _uncertainty,
    )  # fmt: skip
    found = [finding for rule in rules if (finding := rule(run, split)) is not None]
    return tuple(sorted(found, key=lambda one: LEVELS.index(one.level)))


def main_score(run: RunFacts, split: SplitFacts | None) -> Score | None:
    """Returns the score of the verdict, which is the first."""
    return split.scores[0] if split is not None and split.scores else None


# -- the training ------------------------------------------------------------------------------------------------------


def _completeness(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    goal = f" of {run.total_steps:,}" if run.total_steps else ""
    numbers = {"step": run.step, "total_steps": run.total_steps}
    if run.status == "running":
        text = f"The run is training: step {run.step:,}{goal}. The report shows what there is so far."
        return Finding("completeness", NOTE, text, "Make the report again at the end.", numbers)
    if run.status.startswith("paused"):
        text = f"The run is {run.status}. The report shows what there is so far."
        return Finding("completeness", NOTE, text, f"Resume it: {_resume(run)}", numbers)
    if run.status in ("interrupted", "not begun"):
        text = f"The run did not finish: it ended at step {run.step:,}{goal}."
        return Finding("completeness", WARNING, text, f"Resume it: {_resume(run)}", numbers)
    if run.status.startswith("damaged"):
        return Finding("completeness", PROBLEM, f"The run folder is {run.status}.", "", numbers)
    if run.status == "stopped early":
        return Finding(
            "completeness", FINE, f"The run was stopped early at step {run.step:,}{goal}, as asked.", "", numbers
        )
    return (
        Finding("completeness", FINE, f"The run finished after {run.step:,} steps.", "", numbers)
        if run.status
        else None
    )


def _resume(run: RunFacts) -> str:
    """Returns the command that resumes a run."""
    return f"modelyard resume {shlex.quote(run.address)}"


def _values(curve: Curve | None) -> list[tuple[int, float]]:
    """Returns the steps and values of a curve that are numbers."""
    if curve is None:
        return []
    return [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]


def _curve(run: RunFacts, metric: str, split: str) -> list[tuple[int, float]]:
    return _values(run.curves.get(metric, {}).get(split))


def _near(curve: Sequence[tuple[int, float]], step: int) -> float:
    """Returns the mean of the last values up to a step: three, of a short curve fewer."""
    count = max(1, min(3, len(curve) // 4))
    before = [value for at, value in curve if at <= step][-count:] or [curve[0][1]]
    return sum(before) / len(before)


def _overfitting(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    validation, training = _curve(run, "loss", "validation"), _curve(run, "loss", "train")
    if not validation or not training:
        return None
    (last, end), (at, least) = validation[-1], min(validation, key=lambda pair: pair[1])
    rise = (end - least) / abs(least) if least else 0.0
    then, now = _near(training, at), _near(training, last)
    after = sum(step > at for step, _ in validation)
    numbers = {"validation_loss": end, "lowest_validation_loss": least, "at_step": at, "training_loss": now}
    kept = f" The model of step {run.best_step:,} is kept." if run.best_step not in (None, last) else ""
    advice = "More data, augmentation, regularization or fewer steps (early_stop) help; a larger model does not."
    if rise > _RISE and now < then and after >= max(2, len(validation) // 10):
        text = (
            f"It overfits from step {at:,} on: the validation loss rose from {number(least)} to {number(end)} "
            f"({percent(rise)} more) while the training loss fell from {number(then)} to {number(now)}.{kept}"
        )
        return Finding(
            "overfitting", PROBLEM if rise > _RISE_MUCH else WARNING, text, advice, {**numbers, "rise": rise}
        )
    for metric in ("accuracy", "binary_accuracy"):
        tested, trained = _curve(run, metric, "validation"), _curve(run, metric, "train")
        if tested and trained:
            seen, unseen = _near(trained, tested[-1][0]), tested[-1][1]
            gap, noise = seen - unseen, _half_width(unseen, run.sizes.get("validation"))
            numbers |= {f"training_{metric}": seen, f"validation_{metric}": unseen, "gap": gap}
            if gap > max(_GAP, noise):
                text = (
                    f"It fits the training examples better than others: {metric} {number(seen)} in training, "
                    f"{number(unseen)} on validation, a gap of {gap:.3f}."
                )
                return Finding("overfitting", PROBLEM if gap > _MUCH else WARNING, text, advice, numbers)
            text = f"No overfitting: {metric} {number(seen)} in training, {number(unseen)} on validation."
            return Finding("overfitting", FINE, text, "", numbers)
    if end > 0 and now > 0 and end > 3 * now:
        text = f"The validation loss {number(end)} is {end / now:.1f} times the training loss {number(now)}."
        return Finding("overfitting", WARNING, text, advice, numbers)
    text = f"No overfitting: the validation loss {number(end)} did not rise after its lowest, {number(least)}."
    return Finding("overfitting", FINE, text, "", numbers) if rise <= _RISE else None


def _half_width(share: float, size: int | None) -> float:
    """Returns half of the 95 % interval of a share of ``size`` examples."""
    return 0.0 if not size else 1.96 * math.sqrt(max(share * (1 - share), 1 / size) / size)


def _progress(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    """Whether the last quarter of the run still made it better."""
    metric = run.best_metric if run.best_metric in run.curves else "loss"
    curve = _curve(run, metric, "validation")
    if len(curve) < 4 or run.status == "running":
        return None
    sign = -1 if run.lower_is_better(metric) else 1
    gains = [(step, sign * value) for step, value in curve]
    end = gains[-1][0]
    before = max(value for step, value in gains if step <= max(0.75 * end, gains[0][0]))
    best_at, best = max(gains, key=lambda pair: pair[1])
    whole, late = best - gains[0][1], best - before
    numbers = {"metric": metric, "best_step": best_at, "late_gain": late, "whole_gain": whole}
    if whole > 0 and late / whole > _LATE_GAIN and best_at > 0.85 * end:
        rates = _curve(run, "learning_rate", "train")
        decayed = bool(rates) and rates[-1][1] <= _DECAYED * max(value for _, value in rates)
        text = (
            f"It was still improving when it ended: validation {metric} went from {number(sign * before)} to "
            f"{number(sign * best)} in the last quarter, {percent(late / whole)} of all progress."
        )
        advice = "Train longer: more --train_epochs."
        if run.status == "interrupted" or run.status.startswith("paused"):
            advice = f"Resume it: {_resume(run)}"
        elif decayed:
            advice = (
                "Start a run with more --train_epochs: the learning rate of this one has already fallen to its end."
            )
        return Finding("progress", WARNING, text, advice, numbers)
    text = f"Validation {metric} was at its best, {number(sign * best)}, at step {best_at:,} of {end:,}."
    return Finding("progress", FINE, text, "", numbers)


def _underfitting(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    trained, tested = _curve(run, "accuracy", "train"), _curve(run, "accuracy", "validation")
    if not trained or not tested:
        return None
    seen, unseen = _near(trained, trained[-1][0]), tested[-1][1]
    if max(seen, unseen) >= 0.9 or seen - unseen > _GAP:
        return None
    text = f"It gets only {number(seen)} of the training examples right, and {number(unseen)} on validation."
    advice = "Longer training, a larger model or pretrained weights can help; more data or regularization hardly."
    return Finding("underfitting", NOTE, text, advice, {"training_accuracy": seen, "validation_accuracy": unseen})


def _stability(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    whole = run.curves.get("loss", {}).get("train")
    if whole is None or len(whole.steps) < 8:
        return None
    broken = [step for step, value in zip(whole.steps, whole.values, strict=True) if value is None]
    if broken:
        text = (
            f"The training loss was no number in {len(broken)} of {len(whole.steps)} rows, first at step {broken[0]:,}."
        )
        return Finding(
            "stability",
            PROBLEM,
            text,
            "Lower the learning rate, or clip gradients: --clip_norm 1.",
            {"rows": len(broken)},
        )
    curve = _values(whole)
    spikes = []
    for n in range(2, len(curve)):
        around = [value for _, value in [*curve[max(n - 3, 0) : n], *curve[n + 1 : n + 3]]]
        middle = median(around)
        if middle > 0 and curve[n][1] > _SPIKE * middle and curve[n][1] > _SPIKE * curve[n - 1][1]:
            spikes.append(curve[n])
    numbers = {"spikes": len(spikes), "rows": len(curve)}
    if spikes:
        step, value = max(spikes, key=lambda pair: pair[1])
        times = "once" if len(spikes) == 1 else f"{len(spikes)} times, most"
        text = f"The training loss jumps {times} at step {step:,}, to {number(value)}."
        return Finding(
            "stability",
            WARNING,
            text,
            "A lower learning rate, a warm-up or --clip_norm 1 makes training steadier.",
            numbers,
        )
    return Finding("stability", FINE, f"The training loss has no jumps in {len(curve)} rows.", "", numbers)


# -- the score ---------------------------------------------------------------------------------------------------------


def _against_baseline(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    score = main_score(run, split)
    if score is None or split is None or score.baseline is None:
        return None
    numbers = {
        "metric": score.name,
        "value": score.value,
        "baseline": score.baseline,
        "low": score.low,
        "high": score.high,
    }
    worse = score.value >= score.baseline if score.lower_is_better else score.value <= score.baseline
    end = score.high if score.lower_is_better else score.low
    near = end is not None and (end >= score.baseline if score.lower_is_better else end <= score.baseline)
    if worse or near:
        text = (
            f"It is {'no better' if worse else 'not clearly better'} than {split.baseline}: {score.name} "
            f"{number(score.value)} against {number(score.baseline)}."
        )
        advice = "It may have learned nothing: check labels, learning rate (modelyard find-learning-rate) and images."
        return Finding("baseline", PROBLEM, text, advice, numbers)
    text = f"It is better than {split.baseline}: {score.name} {number(score.value)} against {number(score.baseline)}."
    return Finding("baseline", FINE, text, "", numbers)


def _uncertainty(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    score = main_score(run, split)
    if score is None or split is None or score.low is None or score.high is None:
        return None
    numbers = {"low": score.low, "high": score.high, "examples": split.examples}
    share = 0 <= score.value <= 1 and split.task in (CLASSIFICATION, MULTI_LABEL)
    half = (score.high - score.low) / 2
    if half > (_WIDE if share else 0.2 * abs(score.value)):
        text = (
            f"The score is uncertain by ±{number(half)}, since {split.split} has only {split.examples:,} examples. "
            "Smaller differences between models are chance."
        )
        return Finding(
            "uncertainty", NOTE, text, "More examples, or --folds with modelyard matrix, make it more certain.", numbers
        )
    return Finding("uncertainty", FINE, f"The score is known to ±{number(half)}.", "", numbers)


def _test_against_validation(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    there, here = run.scores.get("validation", {}), run.scores.get("test", {})
    score = main_score(run, split)
    metric = score.name if score is not None else "accuracy"
    if metric not in there or metric not in here:
        return None
    before, after = there[metric], here[metric]
    drop = (after - before) if run.lower_is_better(metric) else (before - after)
    if 0 <= before <= 1 and 0 <= after <= 1 and not run.lower_is_better(metric):
        halves = [_half_width(value, run.sizes.get(name)) for name, value in (("validation", before), ("test", after))]
        noise, least = math.hypot(*halves), 0.02
    elif score is not None and score.low is not None and score.high is not None:
        noise, least = (score.high - score.low) * 0.7, 0.05 * abs(before)
    else:
        return None
    numbers = {"metric": metric, "validation": before, "test": after, "noise": noise}
    if drop > max(noise, least):
        text = f"Test is much worse than validation: {metric} {number(after)} against {number(before)}."
        advice = (
            "Validation may have near copies of training examples (modelyard data check), test may come from "
            f"elsewhere, or the best of {run.looks} evaluations was lucky."
        )
        return Finding("test", PROBLEM if drop > 2 * max(noise, least) else WARNING, text, advice, numbers)
    return Finding(
        "test", FINE, f"Test and validation agree: {metric} {number(after)} and {number(before)}.", "", numbers
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def _dead_classes(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or not split.classes or split.from_records:
        return None
    dead = [one for one in split.classes if one.examples and not one.recall]
    if not dead:
        return Finding("never found", FINE, "Every class is found at least once.", "", {"classes": 0})
    text = f"{_classes(len(dead))} never found: {some([_short(one.name) for one in dead])}."
    numbers = {"classes": len(dead), "names": [one.name for one in dead[:50]]}
    return Finding(
        "never found", PROBLEM, text, "Look at their examples; --class_weights balanced helps rare classes.", numbers
    )


def _classes(count: int) -> str:
    return f"{count} class{'es are' if count != 1 else ' is'}"


def _confusions(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or split.task != CLASSIFICATION or split.from_records or not split.wrong:
        return None
    pairs = [p for p in split.confused if p.share >= _CONFUSED_SHARE and p.count >= _CONFUSED_COUNT][:3]
    if not pairs:
        return Finding("confusions", FINE, "No two classes are often confused.", "", {})
    parts = [
        f"{_short(one.label)} is taken for {_short(one.predicted)} in {one.count} of {round(one.count / one.share)} "
        f"({percent(one.share)})"
        for one in pairs
    ]
    numbers = {
        "pairs": [{"label": p.label, "predicted": p.predicted, "count": p.count, "share": p.share} for p in pairs]
    }
    return Finding(
        "confusions", WARNING, f"Classes are confused: {'; '.join(parts)}.",
        "Look at these examples: are their labels consistent? More examples of both help.", numbers,
    )  # fmt: skip


def _short(name: str) -> str:
    """Returns the name of a class in quotes: it may be a number."""
    return f"‘{some([name], 1)}’"


def _weak_classes(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or len(split.classes) < 3 or split.task not in (CLASSIFICATION, MULTI_LABEL):
        return None
    recalls = [one.recall for one in split.classes if one.recall is not None]
    usual = float(np.mean(recalls)) if recalls else 0.0
    weak = [one for one in split.classes if one.recall and one.examples >= 5 and one.recall < 0.6 * usual]
    if not weak:
        return None
    weak.sort(key=lambda one: one.recall or 0)
    parts = [f"{_short(one.name)} {number(one.recall)} (of {one.examples})" for one in weak[:3]]
    more = f" and {len(weak) - 3} more" if len(weak) > 3 else ""
    text = f"Some classes are found less than others. The mean recall is {number(usual)}: {', '.join(parts)}{more}."
    return Finding("weak classes", WARNING, text, "", {"mean_recall": usual, "names": [one.name for one in weak[:50]]})


def _few_examples(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    counts = run.counts.get("train")
    if not counts or (split is not None and split.task == REGRESSION):
        return None
    few = sorted((count, name) for count, name in zip(counts, run.classes, strict=False) if count < _FEW_TRAINING)
    tested = [one.name for one in split.classes if one.examples < _FEW_TESTED] if split is not None else []
    numbers = {"classes": len(few), "least": min(counts), "tested_on_few": len(tested)}
    if few:
        listed = [f"{_short(name)} ({count})" for count, name in few]
        text = f"{_classes(len(few))} trained on fewer than {_FEW_TRAINING} examples: {some(listed)}."
        return Finding("few examples", WARNING, text, "Collect more of them, or leave these classes out.", numbers)
    if tested and split is not None:
        text = f"{_classes(len(tested))} tested on fewer than {_FEW_TESTED} examples: their scores are chance."
        return Finding("few examples", NOTE, text, "", numbers)
    return Finding("few examples", FINE, f"Every class is trained on {min(counts):,} examples or more.", "", numbers)


def _balance(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    counts = [count for count in run.counts.get("train", ()) if count]
    if len(counts) < 2 or max(counts) < _UNBALANCED * min(counts):
        return None
    text = f"Classes are unbalanced: the largest has {max(counts):,} training examples, the smallest {min(counts):,}."
    advice = "Accuracy hides the small ones: look at recall by class, or train with --class_weights balanced."
    return Finding("balance", NOTE, text, advice, {"largest": max(counts), "smallest": min(counts)})


def _labels(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or split.task != CLASSIFICATION or split.from_records:
        return None
    count = split.doubtful_count
    numbers = {"examples": count, "share": count / max(split.examples, 1)}
    if not count:
        return Finding("labels", FINE, "No label is contradicted with confidence.", "", numbers)
    text = (
        f"{count} label{'s' if count != 1 else ''} of {split.split} ({percent(count / split.examples, 2)}) may be "
        f"wrong: the model contradicts {'it' if count == 1 else 'them'} with great confidence."
    )
    return Finding(
        "labels",
        WARNING,
        text,
        "See below. modelyard data check DATA --run RUN looks through all splits.",
        numbers,
    )


def _calibration(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    found = split.calibration if split is not None else None
    if found is None or split is None:
        return None
    numbers = {
        "error": found.error, "mean_probability": found.probability, "right": found.right,
        "temperature": found.temperature, "error_after": found.error_after,
    }  # fmt: skip
    noise = 0.6 / math.sqrt(split.examples)  # of a calibrated model with so few examples
    if found.error > max(_MISCALIBRATED, noise):
        if split.task == CLASSIFICATION:
            over = found.probability > found.right
            what = (
                f"Its probabilities are too {'high' if over else 'low'}: {number(found.probability)} on average, and "
                f"{number(found.right)} are right"
            )
        else:
            what = "Its probabilities are not those of the labels"
        text = f"{what} (calibration error {number(found.error)})."
        advice = (
            f"Divide the logits by {found.temperature:.2f}: on this split, that leaves a calibration error of "
            f"{number(found.error_after)}."
        )
        return Finding("calibration", WARNING, text, advice, numbers)
    text = f"Its probabilities are what they say: the calibration error is {number(found.error)}."
    return Finding("calibration", FINE, text, "", numbers)


# -- regression --------------------------------------------------------------------------------------------------------


def _outliers(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or split.regression is None:
        return None
    for n, one in enumerate(split.regression.numbers):
        true, said = (
            np.array([row[n] for row in rows]) for rows in (split.regression.labels, split.regression.predicted)
        )
        squares = np.sort((said - true) ** 2)[::-1]
        top = max(1, len(squares) // 100)
        share = float(squares[:top].sum() / squares.sum()) if squares.sum() else 0.0
        if len(squares) >= 30 and share > 0.3:
            text = f"Few examples make most of the error of {_short(one.name)}: the worst 1 % have {percent(share)}."
            return Finding(
                "outliers",
                WARNING,
                text,
                "Look at the worst examples below; --regression_loss huber minds them less.",
                {"share": share},
            )
        distance = np.abs(said - true)
        if len(true) >= 30 and np.ptp(said) > 0 and np.ptp(distance) > 0:
            ranks = [np.argsort(np.argsort(values)) for values in (said, distance)]
            grows = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
            if grows > 0.3:
                text = f"The error of {_short(one.name)} grows with its value (rank correlation {grows:.2f})."
                return Finding(
                    "outliers",
                    NOTE,
                    text,
                    "Train on the logarithm of the labels if their relative error matters.",
                    {"correlation": grows},
                )
    return Finding("outliers", FINE, "The error is spread over many examples.", "", {})


def _bias(run: RunFacts, split: SplitFacts | None) -> Finding | None:
    if split is None or split.regression is None:
        return None
    for one in split.regression.numbers:
        noise = 2 * one.rmse / math.sqrt(max(split.examples, 1))
        if abs(one.bias) > max(noise, 0.25 * one.mae):
            way = "high" if one.bias > 0 else "low"
            text = f"Predictions of {_short(one.name)} are too {way} by {number(abs(one.bias))} on average."
            return Finding("bias", WARNING, text, "", {"bias": one.bias, "noise": noise})
    return Finding("bias", FINE, "Predictions are neither too high nor too low on average.", "", {})
