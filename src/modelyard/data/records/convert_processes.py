"""The shards of a conversion, spread over processes of their own.

They are started afresh rather than forked: a fork of a process with threads (TensorFlow's) may hang.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from modelyard.data.raw_examples import RawExamples
from modelyard.data.records.convert_shard import OnBad, Recipe, ShardResult, ShardTask, write_shard
from modelyard.errors import DataError

_LOOK_SECONDS = 0.2
_worker: Any = None


def write_shards(
    tasks: Sequence[ShardTask],
    splits: Mapping[str, RawExamples],
    classes: Sequence[str],
    recipe: Recipe,
    on_bad: OnBad,
    processes: int,
    progress: Callable[[int], None] | None,
) -> list[ShardResult]:
    """Writes the shards; the first error in their order is raised, and all work ends.

    Args:
        tasks: the shards.
        splits: the examples of each split.
        classes: the names of the classes.
        recipe: how examples are stored.
        on_bad: what to do with examples that can't be read.
        processes: how many work; 1 is this one.
        progress: called with numbers of examples.
    """
    if processes == 1:
        tick = (lambda: progress(1)) if progress is not None else lambda: None
        return [write_shard(task, splits[task.split], classes, recipe, on_bad, tick) for task in tasks]
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("Q", 0), context.Event()
    with ProcessPoolExecutor(
        processes, context, _start, (dict(splits), classes, recipe, on_bad, counter, stop)
    ) as pool:
        with _without_the_users_script():
            futures = [pool.submit(_write, task) for task in tasks]
        told = 0
        try:
            for future in futures:
                while not future.done():
                    wait([future], _LOOK_SECONDS, FIRST_COMPLETED)
                    told = _tell(progress, counter, told)
                future.result()
            _tell(progress, counter, told)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise DataError(
                "a process of the conversion was ended from outside, perhaps for want of memory. Start it again: "
                "finished shards are kept. Fewer --processes need less memory."
            ) from error
        except BaseException:
            stop.set()  # also on Ctrl-C: the others end at their next example and leave nothing unfinished
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _without_the_users_script() -> Iterator[None]:
    """Processes that are started here do not import what called us: a script without a guard would convert again, and
    what was typed or piped into Python can't be imported at all.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _tell(progress: Callable[[int], None] | None, counter: Any, told: int) -> int:
    now: int = counter.value
    if progress is not None and now > told:
        progress(now - told)
    return now


class _StoppedError(Exception):
    """Someone else has failed."""


def _start(*work: Any) -> None:
    """Begins a process of the pool."""
    global _worker
    _worker = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process tells the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A pool outlives a parent that is killed, and would wait for work for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(task: ShardTask) -> ShardResult:
    splits, classes, recipe, on_bad, counter, stop = _worker

    def tick() -> None:
        if stop.is_set():
            raise _StoppedError
        with counter.get_lock():
            counter.value += 1

    return write_shard(task, splits[task.split], classes, recipe, on_bad, tick)
