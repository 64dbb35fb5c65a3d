"""A checkpoint of one engine is a checkpoint of the other: training goes on, and means the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TESTS, environment
from modelyard.run.checkpoint import Checkpoint, read_checkpoint
from modelyard.run.metrics import read_metrics
from waiting import PATIENCE

ENGINES = ("tensorflow", "jax")
FIRST, LAST = 20, 40
COMMON = {
    "model": "tiny_norm",
    "dataset": "digits",
    "train_batch_size": 32,
    "log_every": 1,
    "augment": "flip_left_right",
}
CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "learning_rate": 2e-3, "ema_decay": 0.9},
    "muon": {"optimizer": "muon", "learning_rate": 2e-3},
    "bfloat16": {"optimizer": "sgd", "learning_rate": 0.02, "precision": "bfloat16"},
}
MIXED = ("bfloat16",)
EVALUATED = ("adam", "bfloat16")


@dataclass(frozen=True)
class Runs:
    """All runs: those that began on one engine, and where each engine took them."""

    folder: Path
    evaluations: dict[str, dict[tuple[str, str], dict[str, float]]]
    """Metrics of a first engine's checkpoint, by the engine that evaluated it."""

    def checkpoint(self, case: str, first: str, then: str, step: int = LAST) -> Checkpoint:
        return read_checkpoint(self.folder / f"{case}-{first}-{then}" / "checkpoints" / f"step-{step:08d}")

    def losses(self, case: str, first: str, then: str) -> np.ndarray:
        rows = read_metrics(self.folder / f"{case}-{first}-{then}" / "metrics.jsonl")
        return np.array([row["loss"] for row in rows if row["split"] == "train"])


def on_both(orders: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The answers of two processes that work side by side, each on its own engine."""
    program = [sys.executable, str(Path(__file__).with_name("portable_process.py"))]
    started = {}
    for engine in ENGINES:
        started[engine] = subprocess.Popen(
            [*program, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(PARTS=str(TESTS)),
        )  # fmt: skip
    answers = {}
    for engine, process in started.items():
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders[engine]))
        process.stdin.close()
        process.stdin = None
    for engine, process in started.items():
        out, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        answers[engine] = json.loads(out.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("portable")
    begin = {
        engine: [
            ("train", [], {**COMMON, **options, "train_steps": FIRST, "model_dir": str(folder / f"{case}-{engine}")})
            for case, options in CASES.items()
        ]
        for engine in ENGINES
    }
    on_both(begin)
    pairs = [(case, first) for case in CASES for first in ENGINES]
    orders: dict[str, list[Any]] = {}
    for then in ENGINES:
        for case, first in pairs:
            shutil.copytree(folder / f"{case}-{first}", folder / f"{case}-{first}-{then}")
        names = [str(folder / f"{case}-{first}-{then}") for case, first in pairs]
        some = [name for name, (case, _) in zip(names, pairs, strict=True) if case in EVALUATED]
        orders[then] = [("evaluate", [name], {"split": "test", "checkpoint": str(FIRST)}) for name in some]
        orders[then] += [("resume", [name], {"train_steps": LAST}) for name in names]
    answers = on_both(orders)
    evaluated = [(case, first) for case, first in pairs if case in EVALUATED]
    assert all(answer["step"] == LAST for given in answers.values() for answer in given[len(evaluated) :])
    found = {then: {pair: a["metrics"] for pair, a in zip(evaluated, answers[then], strict=False)} for then in ENGINES}
    return Runs(folder, found)


BOTH_WAYS = pytest.mark.parametrize(("first", "then"), [ENGINES, ENGINES[::-1]], ids=["to jax", "to tensorflow"])


@BOTH_WAYS
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_where_the_other_engine_left_it(runs: Runs, case: str, first: str, then: str) -> None:
    stayed, moved = runs.losses(case, first, first), runs.losses(case, first, then)
    assert len(stayed) == len(moved) == LAST
    np.testing.assert_array_equal(stayed[:FIRST], moved[:FIRST])
    close = 3e-2 if case in MIXED else 1e-3
    np.testing.assert_allclose(moved[FIRST:], stayed[FIRST:], rtol=close)
    begun = runs.checkpoint(case, first, first, FIRST).weights["conv/kernel"]
    way = runs.checkpoint(case, first, first).weights["conv/kernel"] - begun
    other = runs.checkpoint(case, first, then).weights["conv/kernel"] - begun
    # Both have gone the same way, which is long beside the distance between their ends.
    assert np.linalg.norm(other - way) < (0.2 if case in MIXED else 0.02) * np.linalg.norm(way)


@pytest.mark.slow
@BOTH_WAYS
@pytest.mark.parametrize("case", CASES)
def test_optimizer_slots_and_the_count_of_steps_survive(runs: Runs, case: str, first: str, then: str) -> None:
    stayed, moved = runs.checkpoint(case, first, first), runs.checkpoint(case, first, then)
    counters = [name for name in stayed.optimizer if name.endswith("iteration")]
    assert counters
    for name in counters:
        assert int(moved.optimizer[name]) == int(stayed.optimizer[name])
    assert int(max(stayed.optimizer[name] for name in counters)) == LAST
    momenta = [name for name in stayed.optimizer if name.startswith("conv/kernel/")]
    assert momenta
    for name in momenta:
        one, other = stayed.optimizer[name], moved.optimizer[name]
        assert np.linalg.norm(one - other) < (0.3 if case in MIXED else 0.05) * np.linalg.norm(one), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_engines_store_the_same_names_shapes_and_types(runs: Runs, case: str) -> None:
    one, other = (runs.checkpoint(case, engine, engine, FIRST) for engine in ENGINES)
    for mine, theirs in ((one.weights, other.weights), (one.optimizer, other.optimizer)):
        assert {n: (a.shape, a.dtype) for n, a in mine.items()} == {n: (a.shape, a.dtype) for n, a in theirs.items()}


@pytest.mark.parametrize("first", ENGINES)
@pytest.mark.parametrize("case", EVALUATED)
def test_one_checkpoint_is_worth_the_same_on_both_engines(runs: Runs, case: str, first: str) -> None:
    one, other = (runs.evaluations[engine][case, first] for engine in ENGINES)
    assert one.keys() == other.keys()
    assert 0.3 < one["accuracy"] <= 1
    assert one == pytest.approx(other, abs=2e-2 if case in MIXED else 1e-5)
