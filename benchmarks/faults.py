"""Injects faults into small runs, and reports what becomes of them: docs/failures.md has the table.

    python benchmarks/faults.py [--quick] [--only "2 workers"] [--minutes 60]

Each run trains a small model on the digits, read from records, with MODELYARD_FAULTS set, and is started again like a
user or a cluster manager would until it is finished. With `--deterministic`, it must end with the weights, optimizer
and best models of an undisturbed run, to the bit; parameter servers must finish with all steps. Runs at a URL use the
S3 server of moto in this process (`pip install s3fs 'moto[server]'`).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from modelyard import storage
from modelyard.faults import SLOW, VARIABLE
from modelyard.run.checkpoint import OPTIMIZER, WEIGHTS, folder_name

STEPS = 80
COMMAND = [sys.executable, "-m", "modelyard"]
TRAIN = (
    "train-and-evaluate --model mlp --deterministic --threads 1 --train_batch_size 32 --eval_every 20 --log_every 5 "
    f"--save_every 10 --train_steps {STEPS}"
).split()
SECONDS = 240
"""A start that takes longer hangs."""
_INJECTED = re.compile(r"^\S[^|\n]*FAULT INJECTED: (.*), at (\w+) (\d+)$", re.MULTILINE)
_TRAINED = re.compile(r"step (\d+)  epoch|FAULT INJECTED: .*, at step (\d+)$|(resuming) at step (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A fault, or several.

    Args:
        faults: the value of the variable.
        quick: whether it is part of `--quick`.
        elsewhere: later starts are on another machine: without the local copy of a run at a URL, and without faults.
    """

    faults: str
    quick: bool = False
    elsewhere: bool = False


@dataclass
class Setting:
    """A way to run.

    Args:
        name: its name in the table.
        command: returns the command for a run folder.
        cases: the faults.
        runs: the folders of the runs in it, relative; the matrix has several.
        logs: patterns of the logs with all that was said; else what the command prints.
        exact: whether the result must be that of an undisturbed run.
        remote: whether the run folder is at a URL.
    """

    name: str
    command: Callable[[str], list[str]]
    cases: list[Case]
    runs: tuple[str, ...] = ("",)
    logs: tuple[str, ...] = ("runlogs/*.log",)
    exact: bool = True
    remote: bool = False
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a case."""

    injected: int = 0
    delays: int = 0
    starts: int = 0
    frozen: int = 0
    hangs: int = 0
    steps_lost: int = 0
    finished: bool = False
    exact: bool = False
    seconds: float = 0.0
    said: str = ""


def settings(data: Path, url: str | None) -> list[Setting]:
    """Returns all settings. Data is a folder of records; without a URL, no run is remote."""
    train = [*TRAIN, "--dataset", str(data)]
    cluster = [*train, "--engine", "tensorflow", "--peer_timeout_secs", "10"]
    single = [
        Case("kill@step=35", quick=True),
        Case("kill@step=0.05"),
        Case("kill@save=4", quick=True),
        Case("kill@file=45"),
        Case("crash@step=25"),
        Case("crash@evaluate=2"),
        Case("hang@step=45"),
        Case("enospc@save=3", quick=True),
        Case("enospc@file=40"),
        Case("eio@save=3"),
        Case("eio@read=0.005", quick=True),
        Case("slow@save=300ms, slow@file=5ms, slow@read=1ms"),
    ]
    workers = [
        Case("kill@step=35:worker-1", quick=True),
        Case("kill@step=35:worker-0"),
        Case("kill@save=4"),
        Case("hang@step=35:worker-1", quick=True),
        Case("hang@step=35:worker-0"),
        Case("crash@step=25:worker-1"),
        Case("enospc@save=3"),
        Case("eio@read=0.005"),
        Case("eio@file=20:worker-0"),
        Case("network@message=20:worker-1"),
        Case("network@join=1, network@join=2, slow@save=300ms"),
        Case("slow@step=200ms:worker-0, kill@time=15s:launch"),
    ]
    servers = [
        Case("kill@step=35:chief", quick=True),
        Case("slow@step=300ms:chief, kill@time=18s:worker-1"),
        Case("slow@step=300ms:chief, kill@time=18s:ps-0"),
        Case("slow@step=300ms:chief, hang@time=18s:worker-0"),
        Case("enospc@save=3:chief"),
    ]
    cells = [
        Case("kill@step=35", quick=True),
        Case("enospc@save=3:run=mlp-records-seed0, crash@step=25:run=mlp-records-seed1"),
        Case("slow@step=200ms, kill@time=12s:matrix"),
    ]
    remote = [
        Case("kill@upload=12", quick=True),
        Case("kill@save=4"),
        Case("kill@step=35", elsewhere=True),
        Case("network@upload=10, network@upload=15", quick=True),
        Case("network@upload=0.1"),
        Case("network@download=2"),
        Case("slow@upload=50ms"),
    ]

    def launch(*layout: str) -> Callable[[str], list[str]]:
        words = [word for word in cluster if word != "--deterministic" or "--ps" not in layout]
        return lambda run: ["launch", *layout, "--model_dir", run, "--", *words]

    def alone(engine: str) -> Callable[[str], list[str]]:
        return lambda run: [*train, "--engine", engine, "--model_dir", run]

    options = [*train[1 : train.index("--model")], *train[train.index("--model") + 2 :]]
    options = [word for word in options if word not in ("--dataset", str(data))]
    both = ["--engine", "tensorflow", "--seeds", "2", "--jobs", "2"]

    def matrix(run: str) -> list[str]:
        return ["matrix", "--models", "mlp", "--datasets", str(data), *both, *options, "--output", run]

    found = [
        Setting("one process, TensorFlow", alone("tensorflow"), single),
        Setting("one process, JAX", alone("jax"), single),
        Setting("2 workers", launch("--workers", "2"), workers),
        Setting("parameter servers", launch("--workers", "2", "--ps", "1"), servers, exact=False),
        Setting(
            "matrix",
            matrix,
            cells,
            ("cells/mlp-records-seed0", "cells/mlp-records-seed1"),
            ("runlogs/matrix.log", "cells/*/runlogs/*.log"),
        ),
    ]
    if url is not None:
        found.append(
            Setting("at a URL", lambda run: [*alone("tensorflow")(f"{url}/{run}")], remote, logs=(), remote=True)
        )
    return found


# -- one run ----------------------------------------------------------------------------------------------------------


def play(setting: Setting, case: Case | None, top: Path, reference: list[dict[str, bytes]] | None) -> Outcome:
    """Starts a run until it is finished. Without a case, it is not disturbed."""
    number = sum(1 for _ in top.iterdir())
    run = f"run-{number}" if setting.remote else str(top / f"run-{number}")
    cache = top / f"cache-{number}"
    outcome, began = Outcome(), time.monotonic()
    most = 1 if case is None else 12
    while not outcome.finished and outcome.starts < most:
        later = case is not None and case.elsewhere and outcome.starts > 0
        if later:
            shutil.rmtree(cache, ignore_errors=True)
        on = case is not None and not later
        environ = {**os.environ, VARIABLE: case.faults if on and case is not None else ""}
        environ |= {storage.CACHE_VARIABLE: str(cache), "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "200"}
        status = start([*COMMAND, *setting.command(run)], environ, top / f"run-{number}.txt", outcome)
        outcome.starts += 1
        outcome.finished = status == 0
    outcome.seconds = time.monotonic() - began
    outcome.said = (top / f"run-{number}.txt").read_text(errors="replace")
    logs = [path.read_text(errors="replace") for pattern in setting.logs for path in sorted(Path(run).glob(pattern))]
    texts = list(dict.fromkeys(logs)) or [outcome.said]
    happened = [fault for text in texts for fault, *_ in _INJECTED.findall(text)]
    outcome.delays = sum(fault.startswith(SLOW) for fault in happened)
    outcome.injected = len(happened) - outcome.delays
    outcome.steps_lost = sum(map(steps_lost, texts))
    if outcome.finished and reference is not None:
        where = storage.join(str(setting.environ.get("url")), run) if setting.remote else run
        results = [result(storage.join(where, name) if name else where) for name in setting.runs]
        outcome.exact = results == reference if setting.exact else all(map(len, results))
    return outcome


def start(words: list[str], environ: dict[str, str], output: Path, outcome: Outcome) -> int:
    """Runs a command and returns its status. One that is frozen, or takes too long, is killed and counted."""
    with open(output, "ab") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=file, start_new_session=True)
    watched, deadline = psutil.Process(process.pid), time.monotonic() + SECONDS
    try:
        while process.poll() is None:
            frozen = watched.status() == psutil.STATUS_STOPPED
            if frozen or time.monotonic() > deadline:
                outcome.frozen += frozen
                outcome.hangs += not frozen
                break
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def result(run: str) -> dict[str, bytes]:
    """The files of the last checkpoint and of the best models, by path; empty if there is no last checkpoint."""
    names = [f"checkpoints/{folder_name(STEPS)}/{file}" for file in (WEIGHTS, OPTIMIZER)]
    if not storage.exists(storage.join(run, names[0])):
        return {}
    names += [
        name[name.index("/best/") + 1 :]
        for name in storage.list_files(storage.join(run, "best"))
        if name.endswith(WEIGHTS)
    ]
    return {name: storage.read_bytes(f"{run}/{name}" if storage.is_remote(run) else Path(run) / name) for name in names}


def steps_lost(log: str) -> int:
    """Steps that were trained again, in the log of a process that coordinates."""
    newest = lost = 0
    for logged, injected, _, resumed in _TRAINED.findall(log):
        if resumed:
            lost += newest - int(resumed)
            newest = int(resumed)
        else:
            newest = max(newest, int(logged or injected))
    return lost


# -- all of them ------------------------------------------------------------------------------------------------------


@contextmanager
def object_store() -> Iterator[str | None]:
    """Yields the URL of an empty bucket of a server in this process; None if its packages are not installed."""
    try:
        import s3fs  # type: ignore[import-untyped]
        from moto.server import ThreadedMotoServer
    except ImportError:
        print("runs at a URL are left out: pip install s3fs 'moto[server]'")
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("faults")
        yield "s3://faults"
    finally:
        server.stop()


def main() -> None:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few faults of each setting")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing new after this time")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    failed = 0
    with tempfile.TemporaryDirectory() as name, object_store() as url:
        data = Path(name) / "records"
        convert = [*COMMAND, "convert", "--from", "digits", "--to", str(data)]
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("| setting | faults | injected | delays | starts | frozen | hangs | result | steps lost | seconds |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for setting in settings(data, url):
            if given.only and given.only not in setting.name:
                continue
            top = Path(name) / setting.name.replace(" ", "-")
            top.mkdir()
            setting.environ["url"] = url or ""
            first = play(setting, None, top, None)
            if not first.finished:
                raise SystemExit(f"{setting.name}: an undisturbed run failed:\n{first.said[-3000:]}")
            where = f"{url}/run-0" if setting.remote else str(top / "run-0")
            reference = [result(storage.join(where, run) if run else where) for run in setting.runs]
            assert all(reference), f"{setting.name}: there is no result to compare with"
            outcomes = []
            for case in setting.cases:
                if (given.quick and not case.quick) or time.monotonic() > deadline:
                    continue
                outcome = play(setting, case, top, reference)
                outcomes.append(outcome)
                show(
                    setting.name,
                    setting.exact,
                    f"`{case.faults}`{', then another machine' if case.elsewhere else ''}",
                    outcome,
                )
                if not outcome.exact or outcome.hangs:
                    failed += 1
                    print(outcome.said[-3000:], file=sys.stderr)
            total = Outcome(
                **{
                    key: sum(getattr(outcome, key) for outcome in outcomes)
                    for key in ("injected", "delays", "starts", "frozen", "hangs", "steps_lost", "seconds")
                }
            )
            exact = sum(outcome.exact for outcome in outcomes)
            total.said = f"{exact} of {len(outcomes)} {'exact' if setting.exact else 'finished'}"
            show(f"**{setting.name}**", setting.exact, f"all {len(outcomes)}", total)
    sys.exit(1 if failed else 0)


def show(setting: str, exact: bool, faults: str, outcome: Outcome) -> None:
    """Prints a row of the table."""
    words = "NOT FINISHED"
    if setting.startswith("**"):
        words = outcome.said
    elif outcome.finished:
        words = "exact" if outcome.exact and exact else "finished" if outcome.exact else "NOT EXACT"
    counts = (outcome.injected, outcome.delays, outcome.starts, outcome.frozen, outcome.hangs, words)
    print(f"| {setting} | {faults} | {' | '.join(map(str, counts))} | ", end="")
    print(f"{outcome.steps_lost} | {outcome.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
