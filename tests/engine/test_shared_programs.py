"""Runs in one process that differ only in numbers share programs and data, and end with the bits of a run alone."""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import TESTS, Make, environment
from waiting import PATIENCE

pytestmark = pytest.mark.jax_only("TensorFlow's engine shares nothing")

GROUPS = "sgd(match='*/bias', learning_rate={rate}, momentum={momentum}, nesterov=true, weight_decay={decay})"
COMMON: dict[str, Any] = {
    "model": "mlp", "hidden_units": [16], "dropout_rate": 0.2, "dataset": "digits", "engine": "jax",
    "optimizer": "muon", "nesterov": True, "train_batch_size": 64, "test_at_end": True, "log_every": "100 %",
    "epochs_between_evals": 100, "augment": "pad_and_crop(padding=1), flip_left_right",
}  # fmt: skip
CELLS: dict[str, dict[str, Any]] = {
    "first": {
        "random_seed": 1, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 1e-3, "label_smoothing": 0.1,
        "clip_norm": 1.0, "ema_decay": 0.9, "l2_regularization": 1e-4, "train_steps": 12,
        "optimizer_groups": [GROUPS.format(rate=0.1, momentum=0.9, decay=1e-4)],
    },
    "second": {
        "random_seed": 7, "learning_rate": 0.05, "momentum": 0.6, "weight_decay": 1e-2, "label_smoothing": 0.2,
        "clip_norm": 0.3, "ema_decay": 0.95, "l2_regularization": 1e-2, "train_steps": 15, "warmup": "5 steps",
        "learning_rate_schedule": "polynomial", "decay_power": 1.5,
        "optimizer_groups": [GROUPS.format(rate=0.3, momentum=0.5, decay=1e-2)],
    },
    "third": {
        "random_seed": 7, "learning_rate": 0.05, "momentum": 0.7, "weight_decay": 1e-2, "label_smoothing": 0.3,
        "clip_norm": 2.0, "ema_decay": 0.8, "l2_regularization": 1e-3, "train_steps": 15,
        "learning_rate_schedule": "cosine", "optimizer_groups": [GROUPS.format(rate=0.2, momentum=0.8, decay=1e-3)],
    },
}  # fmt: skip
PROCESS = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
from modelyard.engine.jax_cache import counted_compilations
import engine.test_shared_programs as tests
for name in sys.argv[1:]:
    with counted_compilations() as counts:
        found = tests.bits_of(name)
    print(json.dumps([name, found, sum(counts.values())]))
"""


def bits_of(name: str) -> str:
    """Trains a cell, and returns the SHA-256 of its last weights and of its metrics."""
    result = modelyard.train_and_evaluate({**COMMON, **CELLS[name], "threads": 1})
    last = max((Path(result.model_dir) / "checkpoints").iterdir())
    files = [(last / f"{kind}.safetensors").read_bytes() for kind in ("weights", "optimizer")]
    metrics = json.dumps([result.metrics, result.validation], sort_keys=True).encode()
    return hashlib.sha256(b"".join([*files, metrics])).hexdigest()


def run_cells(*names: str) -> list[tuple[str, str, int]]:
    """Trains cells one after the other in a process of their own: for each its bits, and how often JAX compiled."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *names],
        capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def test_cells_in_one_process_have_the_bits_of_each_alone_and_compile_once() -> None:
    alone = {name: run_cells(name)[0][1] for name in CELLS}
    assert len(set(alone.values())) == len(CELLS)
    together = run_cells("first", "second", "third", "first", "third")
    assert [(name, bits) for name, bits, _ in together] == [(name, alone[name]) for name, _, _ in together]
    compilations = [count for _, _, count in together]
    assert compilations[0] > 0
    # The operations of a new schedule are compiled one by one; no program is.
    assert compilations[3:] == [0, 0]


def test_the_starts_of_a_run_that_is_paused_share_programs() -> None:
    from modelyard.engine.jax_programs import _options

    starts = [modelyard.load_config(**COMMON, **stop) for stop in ({"pause_at": "10 %"}, {"pause_at": "30 %"}, {})]
    first, *others = [_options(start, []) for start in starts]
    assert others == [first, first]


COMPILER = """
import logging, os, sys, time
from pathlib import Path
import jax, numpy as np
import modelyard
from modelyard.engine import jax_cache

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=True)
jax_cache.use_cache(modelyard.load_config(cache_dir=sys.argv[1]))
gate = Path(sys.argv[2]) if len(sys.argv) > 2 else None
compile = jax.stages.Lowered.compile

def held(self, *arguments, **named):
    if gate is not None:
        print("compiling", flush=True)
        while not gate.exists():
            time.sleep(0.01)
    return compile(self, *arguments, **named)

jax.stages.Lowered.compile = held
with jax_cache.counted_compilations() as counts:
    jax_cache.compile_all([jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((4,), np.float32))])
print(counts, flush=True)
"""


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed")


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_that_need_one_program_compile_it_once(tmp_path: Path, is_killed: bool) -> None:
    def start(*gate: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", COMPILER, str(tmp_path / "cache"), *gate]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())

    with start(str(tmp_path / "gate")) as first, ExitStack() as at_end:
        at_end.callback(first.kill)
        wait_for_line(first, "compiling")
        second = at_end.enter_context(start())
        at_end.callback(second.kill)
        wait_for_line(second, "another process compiles this program")
        if is_killed:
            first.kill()
            wait_for_line(second, "{'found': 0, 'compiled': 1}")
        else:
            (tmp_path / "gate").touch()
            wait_for_line(first, "{'found': 0, 'compiled': 1}")
            wait_for_line(second, "{'found': 1, 'compiled': 0}")


# -- what is shared -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_shared(two_devices: None) -> Iterator[None]:
    from modelyard.engine.jax_data import device_data
    from modelyard.engine.jax_programs import forget_programs

    forget_programs()
    device_data(None)
    yield
    forget_programs()
    device_data(None)


CHANGES: list[dict[str, Any]] = [
    {"random_seed": 9}, {"learning_rate": 0.5}, {"momentum": 0.3}, {"weight_decay": 0.3}, {"label_smoothing": 0.05},
    {"clip_norm": 3.0}, {"ema_decay": 0.5}, {"l2_regularization": 0.5}, {"train_steps": 100},
    {"learning_rate_schedule": "cosine", "warmup": "3 steps"}, {"learning_rate_schedule": "exponential"},
    {"learning_rate_schedule": "piecewise", "decay_boundaries": "2,4", "decay_values": "0.1,0.2,0.1"},
    {"optimizer_groups": [GROUPS.format(rate=0.2, momentum=0.4, decay=0.1)]},
    {"save_every": "3 steps", "run_name": "another", "hooks": "-tensorboard"},
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"momentum": 0.0}, {"weight_decay": 0.0}, {"label_smoothing": 0.0}, {"clip_norm": None}, {"ema_decay": 0.0},
    {"nesterov": False}, {"muon_steps": 3}, {"optimizer": "adamw", "momentum": None, "nesterov": None},
    {"focal_gamma": 1.0}, {"hidden_units": [17]},
    {"dropout_rate": 0.3}, {"augment": "pad_and_crop(padding=2), flip_left_right"}, {"train_batch_size": 32},
    {"class_weights": "0=2"}, {"precision": "bfloat16"}, {"adam_beta1": 0.8}, {"optimizer_groups": ()},
    {"optimizer_groups": [GROUPS.format(rate=0.1, momentum=0.0, decay=1e-4)]}, {"validation_fraction": 0.3},
    {"split_seed": 3}, {"test_time_augmentation": "flip"}, {"fine_tune": "head"}, {"metrics": "top_k(k=3)"},
    {"gradient_accumulation": 2}, {"test_fraction": 0.2, "dataset": "synthetic"},
]  # fmt: skip


def key_and_texts(make: Make, lowers: bool = True, **options: Any) -> tuple[str | None, list[str]]:
    """Returns the key of an engine's programs, and the programs themselves, which are not compiled."""
    engine: Any = make(**{**COMMON, **CELLS["first"], **options})
    texts: list[str] = []

    def lowered(kind: str, lengths: set[int], batches: list[Any]) -> None:
        if lowers:
            programs = [engine._lowered(kind, length, 0) for length in lengths]
            programs += [engine._lowered_for("evaluate", *engine._placed(*batch)) for batch in batches]
            texts.extend(program.as_text() for program in programs)

    engine._compile = lowered
    engine.prepare([10], ["test"])
    key: str | None = engine._program_key()
    engine.close()
    return key, texts


def test_runs_with_one_key_have_the_same_programs(make: Make) -> None:
    key, texts = key_and_texts(make)
    assert key is not None
    for change in CHANGES:
        other, found = key_and_texts(make, **change)
        assert other == key, change
        assert found == texts, f"another program with {change}"


def test_all_else_has_another_key(make: Make) -> None:
    keys = [key_and_texts(make, lowers=False, **change)[0] for change in [{}, *OTHERS]]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "ftrl", "muon"]
)
def test_every_optimizer_shares_programs_over_its_numbers(make: Make, optimizer: str) -> None:
    from modelyard.registry import OPTIMIZERS

    fields = OPTIMIZERS.get(optimizer).options.model_fields
    options = {"optimizer": optimizer, "optimizer_groups": (), "nesterov": None, "momentum": None, "weight_decay": None}
    known = {name: value for name, value in options.items() if name in ("optimizer", "optimizer_groups")}

    def keyed(decay: float, momentum: float) -> tuple[str | None, list[str]]:
        cell = {name: value for name, value in CELLS["first"].items() if name not in options}
        common = {name: value for name, value in COMMON.items() if name not in options}
        given = {"weight_decay": decay} if "weight_decay" in fields else {}
        given |= {"momentum": momentum} if "momentum" in fields else {}
        engine: Any = make(**common, **cell, **known, **given)
        engine._compile = lambda *_: None
        engine.prepare([10])
        engine.train_chunk = None
        text = engine._lowered("resident", 1, 0).as_text()
        return engine._program_key(), [text]

    shares_momentum = optimizer in ("sgd", "momentum", "muon")
    one, other = keyed(0.1, 0.5), keyed(0.2, 0.6 if shares_momentum else 0.5)
    assert one == other
    if "momentum" in fields and not shares_momentum:
        assert keyed(0.1, 0.6)[0] != one[0]


def test_code_of_a_user_is_never_shared(make: Make) -> None:
    assert key_and_texts(make, lowers=False, model="tiny_norm", hidden_units=None, dropout_rate=None)[0] is None


def train(data: Any = "digits", **options: Any) -> dict[str, int]:
    """Trains two steps, and returns how many programs were compiled or found in the cache."""
    from modelyard.engine.jax_cache import counted_compilations

    fixed = {"model": "mlp", "hidden_units": [8], "engine": "jax", "train_steps": 2, "hooks": "-tensorboard"}
    with counted_compilations() as counts:
        modelyard.train_and_evaluate({**fixed, "test_at_end": True, "dataset": data, **options})
    return counts


def programs() -> int:
    from modelyard.engine import jax_programs

    return sum(map(len, jax_programs._shared.values()))


def live_bytes() -> int:
    import jax

    gc.collect()  # Keras's models refer to themselves
    return sum(array.nbytes for array in jax.live_arrays())


def test_the_memory_of_the_device_does_not_grow_from_run_to_run() -> None:
    found = []
    for number in range(4):
        train(random_seed=number)
        found.append(live_bytes())
    assert found[1:] == found[:1] * 3
    train(model="simple_cnn", hidden_units=None, filters=[4])
    train()
    assert live_bytes() == found[0]


def test_the_programs_of_the_last_configs_are_kept_and_no_others() -> None:
    from modelyard.engine import jax_programs

    for units in range(3, 10):
        train(hidden_units=[units])
    assert len(jax_programs._shared) == jax_programs._KEPT
    before = programs()
    train(hidden_units=[9])
    assert programs() == before
    train(hidden_units=[3])
    assert len(jax_programs._shared) == jax_programs._KEPT


def write_npz(path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    images, labels = draw.integers(0, 256, (64, 8, 8, 1), np.uint8), np.arange(64) % 4
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)


def metrics_with(data: Any) -> dict[str, float]:
    options = {"model": "mlp", "hidden_units": [8], "engine": "jax", "train_steps": 2, "validation_fraction": 0}
    found = modelyard.train_and_evaluate({**options, "test_at_end": True, "hooks": "-tensorboard", "dataset": data})
    return found.metrics


def metrics_alone(data: Any) -> dict[str, float]:
    """Returns those of a run for which nothing was kept."""
    from modelyard.engine.jax_data import device_data

    device_data(None)
    return metrics_with(data)


def test_files_that_changed_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    found = []
    for seed in (0, 1, 0):
        write_npz(path, seed)
        found.append(metrics_with(str(path)))
    assert found[0] == found[2]
    write_npz(path, 1)
    assert found[1] == metrics_alone(str(path))


def test_arrays_that_were_changed_in_place_are_copied_to_the_device_again() -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (64, 8, 8, 1), np.uint8), np.arange(64) % 4
    data = modelyard.ArrayDataset({split: {"image": images, "label": labels} for split in ("train", "test")})
    first = metrics_with(data)
    assert metrics_with(data) == first == metrics_alone(data)
    images[...] = 255 - images[::-1]
    changed = metrics_with(data)
    assert changed != first
    assert changed == metrics_alone(data)


# -- learning rates -------------------------------------------------------------------------------------------------


def test_learning_rates_do_not_depend_on_the_chunks_and_are_those_of_the_schedule(make: Make) -> None:
    options = {"learning_rate_schedule": "cosine", "warmup": "300 steps", "train_steps": 3000}
    engine: Any = make(**COMMON | CELLS["first"] | options)
    whole = engine._rates.of(0, 3000)
    pieces = [engine._rates.of(start, min(77, 3000 - start)) for start in range(0, 3000, 77)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_allclose(whole[[0, 299, 1650, 2999]], [0.02 / 300, 0.02, 0.01, 0], rtol=1e-5, atol=1e-8)


def test_a_schedule_of_a_user_may_be_a_function_of_one_step_only(make: Make) -> None:
    import jax

    @modelyard.register_schedule("halved_by_cond")
    def halved(options: Any, run: Any, warmup: int, peak: float) -> Any:
        return lambda step: jax.lax.cond(step < 3, lambda: 1.0, lambda: 0.5)

    engine: Any = make(**COMMON | CELLS["first"] | {"learning_rate_schedule": "halved_by_cond"})
    np.testing.assert_allclose(engine._rates.of(1, 4), [0.02, 0.02, 0.01, 0.01], rtol=1e-6)
