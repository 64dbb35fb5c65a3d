"""Compares promotion with stopping and with random search: the best validation score over the steps spent.

    python benchmarks/tune.py [--data fashion_mnist.npz] [--seeds 5] [--total_steps 20000] [--quick]

Three rules with the same steps of training in all:

- promotion: that of `modelyard tune --halving 3`. A trial pauses at its rung, and is resumed when it is among the best
  third.
- stopping: that of Optuna's SuccessiveHalvingPruner. A trial that comes to a rung goes on at once if it is among the
  best third of those that came there before, and is stopped for good if not; the next trial is a new one.
- random: every trial is trained to its end.

All draw the same trials at random, in the same order, so that only the rule differs. Each trial is trained once, to its
end, and the rules are replayed on its evaluations: a run that pauses and goes on has the same, bit for bit. The plot
has the mean over the seeds and its standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import modelyard
from modelyard.run.metrics import read_metrics
from modelyard.tuning.halving import Standing, next_promotion
from modelyard.tuning.samplers import propose
from modelyard.tuning.space import read_space

SPACE = (
    "learning_rate=log(1e-4, 1), momentum=uniform(0.5, 0.99), weight_decay=log(1e-6, 1e-2), "
    "label_smoothing=uniform(0.01, 0.2), hidden_units=[[32], [128]]"
)
FACTOR, RUNGS = 3, 3
Curve = list[tuple[int, float]]
"""The best score so far after each evaluation, by the steps that all trials have trained."""
Scores = list[tuple[int, float]]
"""The evaluations of a trial, by step; those after a loss that is not finite are missing."""
COLOURS = {"promotion": "#1f77b4", "stopping": "#d62728", "random": "#7f7f7f"}


def main() -> None:
    """Trains the trials, replays the rules, prints the steps to the same score, and writes curves and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file of a dataset, such as fashion_mnist.npz (default: digits)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train_steps", type=int, default=540, help="steps of a whole trial")
    parser.add_argument("--total_steps", type=int, default=8000, help="steps of a search")
    parser.add_argument("--engine", default="jax", help="JAX compiles two programs for all trials")
    parser.add_argument("--output", default="tune-benchmark", help="folder for the curves and the plot")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: to see that it works")
    given = parser.parse_args()
    seeds, steps, total = (1, 54, 200) if given.quick else (given.seeds, given.train_steps, given.total_steps)
    steps = max(FACTOR**RUNGS, steps - steps % FACTOR**RUNGS)
    options: dict[str, Any] = {
        "model": "mlp", "dataset": given.data or "digits", "train_steps": steps, "threads": 1, "engine": given.engine,
        "optimizer": "sgd", "eval_every": f"{steps // FACTOR**RUNGS} steps", "hooks": "-tensorboard",
        "save_every": "100 %",
    }  # fmt: skip
    output = Path(given.output)
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Curve]] = {name: [] for name in COLOURS}
    rungs = [steps // FACTOR ** (RUNGS - at) for at in range(RUNGS + 1)]
    for seed in range(seeds):
        trial = trials(options, seed)
        found["promotion"].append(promotion(trial, rungs, total))
        found["stopping"].append(in_turn(trial, rungs, total, stops=True))
        found["random"].append(in_turn(trial, rungs, total, stops=False))
        for name, curves in found.items():
            print(f"seed {seed}  {name:<10} best {curves[-1][-1][1]:.4f} after {curves[-1][-1][0]:,} steps", flush=True)
        (output / "curves.json").write_text(json.dumps(found) + "\n")
    report(found, total)
    write_plot(found, total, output / "tune")


def trials(options: dict[str, Any], seed: int) -> Callable[[int], Scores]:
    """Returns a function of the number of a trial, which trains it when it is needed."""
    space, known = read_space(SPACE, "benchmark")[0], dict[int, Scores]()

    def trial(number: int) -> Scores:
        if number not in known:
            proposed = propose(space, [], number, "random", seed, True)
            assert proposed is not None
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                try:
                    modelyard.train_and_evaluate(model_dir=str(run), **options, **proposed[0])
                except modelyard.UserError:  # the loss became infinite
                    print(f"seed {seed}  trial {number} failed", flush=True)
                rows = read_metrics(run / "metrics.jsonl")
                known[number] = [(row["step"], row["accuracy"]) for row in rows if row["split"] == "validation"]
        return known[number]

    return trial


class Search:
    """The steps that a search has spent, and its best score.

    Args:
        trial: the evaluations of each trial.
    """

    def __init__(self, trial: Callable[[int], Scores]) -> None:
        self.trial, self.spent, self.best = trial, 0, 0.0
        self.curve: Curve = []

    def train(self, number: int, start: int, end: int) -> float | None:
        """Trains a trial from one step to another; returns its score there, or None if it has failed before."""
        found = [(step, score) for step, score in self.trial(number) if start < step <= end]
        for step, score in found:
            self.best = max(self.best, score)
            self.curve.append((self.spent + step - start, self.best))
        self.spent += found[-1][0] - start if found else 1
        return found[-1][1] if found and found[-1][0] == end else None


def promotion(trial: Callable[[int], Scores], rungs: Sequence[int], total: int) -> Curve:
    """Pauses trials at rungs, and resumes the best."""
    search, standings = Search(trial), dict[int, Standing]()
    while search.spent < total:
        number = next_promotion(standings, FACTOR)
        scores = list(standings[number].scores) if number is not None else []
        number = len(standings) if number is None else number
        at = len(scores)
        score = search.train(number, rungs[at - 1] if at else 0, rungs[at])
        if score is not None:
            scores.append([-score])
        standings[number] = Standing(0, scores, score is not None and at + 1 < len(rungs))
    return search.curve


def in_turn(trial: Callable[[int], Scores], rungs: Sequence[int], total: int, stops: bool) -> Curve:
    """Trains one trial after the other; if it ``stops``, only as far as its rungs let it."""
    search, number = Search(trial), 0
    reached: dict[int, list[float]] = {rung: [] for rung in rungs}
    while search.spent < total:
        for start, rung in zip([0, *rungs], rungs, strict=False):
            score = search.train(number, start, rung)
            if score is None:
                break
            reached[rung].append(score)
            best = sorted(reached[rung], reverse=True)[: max(1, len(reached[rung]) // FACTOR)]
            if stops and score < best[-1]:
                break
        number += 1
    return search.curve


def score_at(one: Curve, steps: float) -> float:
    """Returns the best score after so many steps."""
    return max((score for at, score in one if at <= steps), default=0.0)


def steps_to(one: Curve, score: float) -> int | None:
    """Returns after how many steps a score is reached."""
    return next((at for at, best in one if best >= score), None)


def report(found: dict[str, list[Curve]], total: int) -> None:
    """Prints the scores at the end, and the steps to the score that random search has then."""
    print(f"\nbest validation accuracy after {total:,} steps, mean over {len(found['random'])} seeds")
    for name, curves in found.items():
        scores = [score_at(one, total) for one in curves]
        print(f"  {name:<10} {statistics.mean(scores):.4f}  " + " ".join(f"{score:.4f}" for score in scores))
    print("steps to the score that random search ends with, by seed")
    for name, curves in found.items():
        goals = [score_at(one, total) for one in found["random"]]
        steps = [steps_to(one, goal) for one, goal in zip(curves, goals, strict=True)]
        print(f"  {name:<10} " + " ".join("never" if one is None else f"{one:,}" for one in steps))


def write_plot(found: dict[str, list[Curve]], total: int, path: Path) -> None:
    """Writes a plot as PNG, or as SVG where there is no Matplotlib."""
    points = [total * (at + 1) / 60 for at in range(60)]
    lines = {}
    for name, curves in found.items():
        columns = [[score_at(one, at) for one in curves] for at in points]
        means = [statistics.mean(column) for column in columns]
        errors = [statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0.0 for column in columns]
        lines[name] = list(zip(points, means, errors, strict=True))
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        path.with_suffix(".svg").write_text(svg(lines, total))
        print(f"written: {path.with_suffix('.svg')}")
        return
    for name, line in lines.items():
        x, mean, error = (list(column) for column in zip(*line, strict=True))
        plt.plot(x, mean, label=name, color=COLOURS[name])
        low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
        plt.fill_between(x, low, high, color=COLOURS[name], alpha=0.2)
    plt.xlabel("steps of training, all trials together")
    plt.ylabel("best validation accuracy so far")
    plt.legend()
    plt.savefig(path.with_suffix(".png"), dpi=120)
    print(f"written: {path.with_suffix('.png')}")


def svg(lines: dict[str, list[tuple[float, float, float]]], total: int) -> str:
    """Returns the plot as SVG."""
    width, height, left, bottom = 640, 400, 60, 40
    scores = [mean for line in lines.values() for _, mean, _ in line if mean > 0]
    low, high = sorted(scores)[len(scores) // 10], max(scores)
    high = high if high > low else low + 1e-6

    def place(x: float, y: float) -> str:
        across = left + (width - left - 20) * x / total
        up = (height - bottom) - (height - bottom - 20) * (max(y, low) - low) / (high - low)
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for at in range(5):
        score, steps = low + (high - low) * at / 4, total * at / 4
        y, x = place(0, score).split(",")[1], place(steps, low).split(",")[0]
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{score:.3f}</text>')
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{steps:,.0f}</text>')
    for at, (name, line) in enumerate(lines.items()):
        above = [place(x, mean + error) for x, mean, error in line]
        below = [place(x, mean - error) for x, mean, error in reversed(line)]
        parts.append(f'<polygon points="{" ".join(above + below)}" fill="{COLOURS[name]}" opacity="0.2"/>')
        points = " ".join(place(x, mean) for x, mean, _ in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 110}" y="{height - 110 + 18 * at}" fill="{COLOURS[name]}">{name}</text>')
    parts.append(
        f'<text x="{width // 2}" y="{height - 6}" text-anchor="middle">steps of training, all trials together</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
