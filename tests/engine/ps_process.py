"""One process of a small cluster with parameter servers, for the tests: `ROLE INDEX SPEC`.

A server says "up" and serves until its standard input ends. The chief takes one JSON object a line, calls what it
names, and answers with one line.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

import modelyard
from modelyard.cluster.description import Cluster, Member, ProcessGroup
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import UserError
from modelyard.loop.run import build


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


class Said(logging.Handler):
    """Passes on what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        say({"log": record.getMessage()})


class Chief:
    """What a test may ask for."""

    def __init__(self, cluster: Cluster, spec: dict[str, list[str]]) -> None:
        self.group = ProcessGroup()
        self.group.cluster, self.group.spec = cluster, spec
        self.engine: Any = None

    def build(self, **options: Any) -> dict[str, Any]:
        from modelyard.engine.parameter_server import ParameterServerEngine

        config = modelyard.load_config(**options)
        data = load_dataset(config)
        self.engine = ParameterServerEngine(config, self.group)
        run = RunLength(data.size("train"), config.train_batch_size, config.train_steps or 0)
        build(self.engine, config, data, run)
        return {}

    def train(self, step: int, count: int, under_way: int | None = None, abort: str | None = None) -> dict[str, Any]:
        """Trains; says so when ``under_way`` steps were handed out, or ends it then from another thread."""
        batches = self.engine._training_batches

        def watched(step: int, count: int) -> Iterator[Any]:
            for number, each in enumerate(batches(step, count)):
                yield each
                if number + 1 == under_way:
                    say({"under_way": number + 1})
                    if abort is not None:
                        threading.Timer(0.2, self.engine.abort, [abort]).start()

        self.engine._training_batches = watched
        try:
            return {name: values.tolist() for name, values in self.engine.train(step, count).items()}
        finally:
            self.engine._training_batches = batches

    def evaluate(self, split: str) -> dict[str, float]:
        result: dict[str, float] = self.engine.evaluate(split)
        return result

    def save(self, path: str) -> dict[str, Any]:
        state = self.engine.state()
        np.savez(
            path, **{f"w:{k}": v for k, v in state.weights.items()}, **{f"o:{k}": v for k, v in state.optimizer.items()}
        )
        return {}

    def load(self, path: str) -> dict[str, Any]:
        from modelyard.engine.base import State

        with np.load(path) as held:
            parts = [{key[2:]: held[key] for key in held if key.startswith(f"{part}:")} for part in "wo"]
        self.engine.load(State(*parts))
        return {}

    def placement(self) -> dict[str, Any]:
        """Where every variable lies, and its bytes."""
        found = {
            **self.engine.network.weights,
            **{f"{name} (slot)": v for name, v in self.engine.network.slots.items()},
        }
        return {name: [v.value.device, v.value.dtype.size * int(np.prod(v.shape))] for name, v in found.items()}


def main() -> None:
    me, spec = Member(sys.argv[1], int(sys.argv[2])), json.loads(sys.argv[3])
    select_engine("tensorflow")
    cluster = Cluster(me, {role: tuple(at) for role, at in spec.items()})
    if me.role != "chief":
        from modelyard.engine.parameter_server import serve_tensorflow

        serve_tensorflow(cluster, spec, threads=1)
        say({"up": str(me)})
        sys.stdin.read()
        return
    import parts  # noqa: F401 - registers the models of the tests

    logging.getLogger("modelyard").setLevel(logging.INFO)
    logging.getLogger("modelyard").addHandler(Said())
    chief = Chief(cluster, spec)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say({"result": getattr(chief, asked.pop("call"))(**asked)})
        except UserError as error:
            say({"error": type(error).__name__, "message": str(error), "status": error.status})


if __name__ == "__main__":
    main()
