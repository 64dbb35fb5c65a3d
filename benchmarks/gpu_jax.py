"""Parts of `gpu.py` that need Keras or an engine in a separate process.

The chip's peak, the FLOPs of a network, Keras's `fit`, Modelyard's loop against its bare compiled steps, and its input
alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelyard
from modelyard.config import Config
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.loop.run import build
from modelyard.registry import ENGINES


def main() -> None:
    """Runs one part and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["peak", "work", "fit", "loop", "input"])
    parser.add_argument("--engine", default="jax")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the config, as JSON")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm_up", type=int, default=20)
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which no further configuration is measured"
    )
    parser.add_argument("--size", type=int, default=8192, help="of the matrices whose product is the peak")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.part not in ("peak", "input"):  # these need no Keras
        select_engine(arguments.engine)
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "peak": peak,
        "work": work,
        "fit": fit,
        "loop": loop,
        "input": read_input,
    }
    arguments.output.write_text(json.dumps(parts[arguments.part](arguments)))


# -- the chip and the networks --------------------------------------------------------------------------------------


def peak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the FLOP/s of a large product of bfloat16 matrices: the peak in practice."""
    import jax
    import jax.numpy as jnp

    size, rounds = arguments.size, 20
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16) / math.sqrt(size)

    # Each product needs the one before it, so XLA cannot skip any.
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, rounds, lambda _, x: x @ b, a))
    chain(a, b).block_until_ready()
    speeds = []
    for _ in range(5):
        began = time.perf_counter()
        chain(a, b).block_until_ready()
        speeds.append(rounds * 2 * size**3 / (time.perf_counter() - began))
    device = jax.devices()[0]
    return {"flops": max(speeds), "device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def work(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the FLOPs to train on one example: those of three forward passes.

    A backward pass is twice a forward one: gradients of the inputs and of the weights of each layer.
    """
    from modelyard.models.flops import flops

    found: dict[str, Any] = {"flops": {}, "errors": {}}
    for name, options in arguments.options.items():
        try:
            found["flops"][name] = 3 * flops(network(modelyard.load_config(**options)))
        except Exception as error:
            found["errors"][name] = f"{type(error).__name__}: {error}"
    return found


def network(config: Config) -> Any:
    """Builds the Keras model of a config."""
    from modelyard.data.open_dataset import load_dataset
    from modelyard.models.choose_task import build_task

    return build_task(config, load_dataset(config)).network()


# -- Keras's fit ----------------------------------------------------------------------------------------------------


def augmented(network: Any) -> Any:
    """Adds Keras's layers for shifts of up to four pixels and flips before the network."""
    import keras

    inputs = keras.Input(network.input_shape[1:], dtype="uint8")
    share = 4 / network.input_shape[1]
    move = keras.layers.RandomTranslation(share, share, fill_mode="constant", interpolation="nearest", dtype="float32")
    x = keras.layers.RandomFlip("horizontal", dtype="float32")(move(keras.ops.cast(inputs, "float32")))
    return keras.Model(inputs, network(keras.ops.cast(x, "uint8")))


@dataclass(frozen=True)
class Way:
    """A way to use `fit`: the precision, what it reads, and how much happens at once.

    What it reads: "layers", arrays, with Keras's augmentation layers in front of the network; "batches", of a generator
    that crops and flips on the device; "arrays", without augmentation; "device arrays", the same in device memory.
    """

    policy: str
    reads: str
    together: int = 1
    scan: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        more = {
            "layers": "arrays, Keras's augmentation layers",
            "batches": "crops and flips on the device",
            "arrays": "arrays, no augmentation",
            "device arrays": "arrays on the device, no augmentation",
        }[self.reads]
        how = "own train_step, scan of" if self.scan else "steps_per_execution"
        return f"fit, {self.policy}, {more}" + (f", {how} {self.together}" if self.together > 1 else "")


# The most important ones first: time may run out.
WAYS = [
    Way("mixed_bfloat16", "batches", 32),
    Way("float32", "batches", 32),
    Way("float32", "arrays", 1),
    Way("mixed_bfloat16", "batches", 32, scan=True),
    Way("float32", "batches", 32, scan=True),
    Way("float32", "arrays", 32),
    Way("float32", "device arrays", 32),
    Way("mixed_bfloat16", "arrays", 32),
    Way("float32", "batches", 1),
    Way("mixed_bfloat16", "batches", 1),
    Way("float32", "layers", 1),
]


def batches_on_device(images: Any, labels: Any, batch: int, together: int) -> Iterator[tuple[Any, Any]]:
    """Shuffled batches, cropped and flipped by one gather on the device; several in one array if ``together`` is more.

    The images are there already, and arrays of JAX stay there when `fit` takes them.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    side, padding = images.shape[1], 4
    padded = jax.device_put(np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0))))
    classes, count = jax.device_put(labels), batch * together
    shape = (together, batch) if together > 1 else (batch,)

    def make(padded: Any, classes: Any, rows: Any, step: Any) -> tuple[Any, Any]:
        move, mirror = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        moves = jax.random.randint(move, (2, count, 1), 0, 2 * padding + 1)
        along = jnp.arange(side)
        down = along + moves[0]
        across = jnp.where(jax.random.bernoulli(mirror, 0.5, (count, 1)), side - 1 - along, along) + moves[1]
        taken = padded[rows[:, None, None], down[:, :, None], across[:, None, :]]
        return taken.reshape(*shape, *taken.shape[1:]), classes[rows].reshape(shape)

    take = jax.jit(make)
    random = np.random.default_rng(0)
    order, place = np.empty(0, np.int32), 0
    for step in itertools.count():
        if place + count > len(order):
            epochs = -(-count // len(labels))
            order, place = np.concatenate([random.permutation(len(labels)) for _ in range(epochs)]).astype(np.int32), 0
        yield take(padded, classes, order[place : place + count], np.uint32(step))
        place += count


def scanned(network: Any) -> Any:
    """The model with a `train_step` of its own that makes several steps, as Keras's guide for JAX allows it."""
    import jax
    import keras

    class Scanned(keras.Model):
        """Its batches have one more axis in front: the steps."""

        def train_step(self, state: Any, data: Any) -> Any:
            """Makes a step with each batch. Returns the last metrics and the state."""

            def one(state: Any, batch: Any) -> Any:
                logs, state = keras.Model.train_step(self, state, batch)
                return state, logs

            state, logs = jax.lax.scan(one, state, data)
            return {name: values[-1] for name, values in logs.items()}, state

    return Scanned(network.inputs, network.outputs)


def fit(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures `fit` in several ways; "counted" are those with the same augmentation and nothing written by hand.

    Keras 3.15 on JAX has no scan over steps: with `steps_per_execution` it calls the compiled step in a loop of Python
    and reports to the callbacks less often. A scan needs a `train_step` of one's own.
    """
    import keras

    from modelyard.data.dataset import TRAIN
    from modelyard.data.open_dataset import load_dataset
    from modelyard.models.choose_task import build_task

    config = modelyard.load_config(**{k: v for k, v in arguments.options.items() if k != "augment"})
    dataset = load_dataset(config)
    arrays, batch = dataset.arrays(TRAIN), config.train_batch_size
    assert arrays is not None
    on_jax = keras.backend.backend() == "jax"
    ways = [way for way in WAYS if on_jax or way.reads in ("arrays", "layers")]
    started = time.perf_counter()
    counted = [way.name for way in ways if way.reads in ("batches", "layers") and not way.scan]
    found: dict[str, Any] = {"version": keras.__version__, "speeds": {}, "errors": {}, "counted": counted}
    with tempfile.TemporaryDirectory() as folder:
        if on_jax:  # the same step is compiled once
            import jax

            jax.config.update("jax_compilation_cache_dir", folder)
        for way in ways:
            if time.perf_counter() - started > arguments.budget:
                found["errors"][way.name] = "no time left"
                continue
            try:
                keras.config.set_dtype_policy(way.policy)
                network = build_task(config, dataset).network()
                if way.reads == "layers":
                    network = augmented(network)
                elif way.scan:
                    network = scanned(network)
                network.compile(
                    keras.optimizers.SGD(config.learning_rate, momentum=0.9),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=["accuracy"],
                    steps_per_execution=1 if way.scan else way.together,
                )
                found["speeds"][way.name] = fit_speeds(arguments, way, network, arrays, batch)
            except Exception as error:
                found["errors"][way.name] = f"{type(error).__name__}: {error}"
            print(f"{way.name}: {time.perf_counter() - started:.1f} s", flush=True)
            arguments.output.write_text(json.dumps(found))
    return found


def fit_speeds(arguments: argparse.Namespace, way: Way, model: Any, arrays: Any, batch: int) -> list[float]:
    """Returns images per second of `fit`, one number per repeat."""
    import numpy as np

    images, labels, together = arrays["image"], arrays["label"], way.together
    feed: Iterator[tuple[Any, Any]] | None = None
    if way.reads == "batches":
        feed = batches_on_device(images, labels, batch, together if way.scan else 1)
    if way.scan:  # builds the loss and the metrics, from a batch without the axis of steps
        model.test_on_batch(images[:batch], labels[:batch])

    def timed(steps: int) -> float:
        if feed is not None:
            began = time.perf_counter()
            model.fit(feed, steps_per_epoch=steps // together if way.scan else steps, verbose=0)
            return time.perf_counter() - began
        rows = np.resize(np.arange(len(labels)), steps * batch)
        some, classes = images[rows], labels[rows]
        if way.reads == "device arrays":
            import jax

            some, classes = jax.block_until_ready(jax.device_put((some, classes)))
        began = time.perf_counter()
        model.fit(some, classes, batch_size=batch, verbose=0)  # returns metrics, so the work is done
        return time.perf_counter() - began

    warm_up = -(-arguments.warm_up // together) * together
    timed(warm_up)
    steps = max(3, round(arguments.seconds * warm_up / timed(warm_up)))
    steps = -(-steps // together) * together  # a remainder would be compiled again
    return [steps * batch / timed(steps) for _ in range(arguments.repeats)]


# -- Modelyard's loop against its bare steps ------------------------------------------------------------------------


def loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares the trainer with its default hooks to the same compiled steps called directly, in turns.

    The checkpoint at the end of a run is not counted: it is one for a run, however long that is.
    """
    from modelyard.data.open_dataset import load_dataset

    config = modelyard.load_config(engine=arguments.engine, **{**arguments.options, "train_steps": 10**6})
    dataset = load_dataset(config)
    engine = ENGINES.get(arguments.engine).load()(config, None)
    run = RunLength(dataset.size("train"), config.train_batch_size, 10**6)
    build(engine, config, dataset, run)

    def bare(steps: int) -> float:
        began = time.perf_counter()
        engine.train(0, steps)
        return time.perf_counter() - began

    # A multiple of log_every, so that the number of steps per compiled call does not change.
    report = int(config.log_every.period(run))
    unit = report if arguments.warm_up >= 20 else 4
    engine.prepare([unit, report])
    bare(unit)
    whole_loop(config, engine, unit)
    steps = unit * max(1, round(arguments.seconds / bare(unit)))
    pairs, shares, speeds = [], [], []
    for _ in range(arguments.repeats):
        alone = steps / bare(steps)
        speed, share = whole_loop(config, engine, steps)
        pairs.append(speed / alone)
        shares.append(share)
        speeds.append(speed)
    engine.close()
    batch = config.train_batch_size
    return {
        "steps": steps,
        "speed": batch * statistics.median(speeds),
        "of_bare": statistics.median(pairs),
        "pairs": pairs,
        "share_in_engine": statistics.median(shares),
    }


def make_clock() -> Any:
    """Makes a hook that records when setup is done, and when the last log row is written."""

    class Clock(modelyard.Hook):  # defined here: hooks import Keras, and its backend must be chosen first
        began = ended = 0.0

        def next_step(self, loop: Any) -> int | None:
            self.began = self.began or time.perf_counter()
            return None

        def reported(self, loop: Any, row: dict[str, Any]) -> None:
            self.ended = time.perf_counter()

    return Clock(modelyard.Options())


def whole_loop(config: Config, engine: Any, steps: int) -> tuple[float, float]:
    """Returns the steps per second of the trainer, and the fraction of its time in the engine."""
    from modelyard.loop.hooks import build_hooks
    from modelyard.loop.trainer import Trainer
    from modelyard.run.directory import RunDirectory

    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        directory.create()
        run = RunLength(engine.dataset.size("train"), config.train_batch_size, steps)
        clock = make_clock()
        trainer = Trainer(config, engine, directory, run, "benchmark", build_hooks(config.hooks), False, None)
        trainer.hooks.append(clock)
        trainer.train()
        seconds = clock.ended - clock.began
        return steps / seconds, trainer.pace.seconds / seconds


# -- the input alone ------------------------------------------------------------------------------------------------


def read_input(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the batches that training reads, in images per second. Those read ahead at first are not counted."""
    from modelyard.data.open_dataset import load_dataset
    from modelyard.data.pipeline import Pipeline

    config = modelyard.load_config(engine=arguments.engine, **arguments.options)
    dataset, batch = load_dataset(config), config.train_batch_size
    pipeline = Pipeline(config, dataset, RunLength(dataset.size("train"), batch, 10**6))
    steps = itertools.count()

    def read(seconds: float, least: int) -> float:
        began, images = time.perf_counter(), 0
        while images < least * batch or time.perf_counter() - began < seconds:
            with pipeline.training(next(steps), 1) as (arrays, _):
                images += len(arrays["image"])
        return images / (time.perf_counter() - began)

    read(arguments.seconds, arguments.warm_up)
    speeds = [read(arguments.seconds, 1) for _ in range(arguments.repeats)]
    pipeline.close()
    return {"speeds": speeds}


if __name__ == "__main__":
    main()
