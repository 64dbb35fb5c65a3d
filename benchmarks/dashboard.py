"""The dashboard over 2,000 runs of 1,000 points: seconds until the table is there, to sort and to filter, and memory.

    python benchmarks/dashboard.py --folder /tmp/many [--runs 2000] [--rows 1000]

The runs are made without training. A browser measures (`pip install playwright`, and Chromium at --chromium).
TensorBoard reads the same folders in the same run: the time until its API lists as many runs, and its memory. Each is
measured --times times, in turn. Files are in the page cache: they were just written or read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from modelyard.config import load_config
from modelyard.run.checkpoint import Checkpoint, write_checkpoint
from modelyard.run.directory import config_text
from modelyard.run.events import EventWriter
from modelyard.run.integrity import with_checksum

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 600.0


def make_runs(folder: Path, runs: int, rows: int) -> None:
    """Writes run folders as Modelyard writes them: config, manifest, metrics, checkpoints, events, log, journal."""
    draw = random.Random(0)
    for number in range(runs):
        path = folder / f"run-{number:04}"
        if (path / "runlogs").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "model": draw.choice(["mlp", "simple_cnn"]),
            "optimizer": draw.choice(["sgd", "adam"]),
            "learning_rate": round(10 ** draw.uniform(-4, -1), 6),
            "random_seed": number,
        }
        config = load_config(dataset="digits", train_steps=rows, **options)
        (path / "config.yaml").write_text(with_checksum(config_text(config)))
        final = draw.uniform(0.5, 1)
        lines, last = [], {"loss": 0.0, "accuracy": 0.0}
        for step in range(1, rows + 1):
            value = final * (1 - 0.99 ** (1000 * step / rows)) + draw.gauss(0, 0.005)
            last = {"loss": 2.3 * (1 - value) + 0.01, "accuracy": value}
            row = {"step": step, "epoch": step / 20, "split": "train", **last, "learning_rate": 0.001}
            lines.append(json.dumps(row | {"seconds": step / 10, "examples_per_second": 6400.0}))
            if step % 100 == 0:
                row = {"step": step, "epoch": step / 20, "split": "validation", **last, "seconds": step / 10}
                lines.append(json.dumps(row))
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        best = {"metric": "accuracy", "mode": "max", "value": last["accuracy"], "step": rows}
        loop = {"config": config.flat(), "total_steps": rows, "best": best, "metrics": last}
        plain: dict[str, Any] = json.loads(json.dumps(loop, default=str))
        for kind in ("best", "checkpoints"):
            write_checkpoint(path / kind, Checkpoint(rows, {}, {}, plain))
        start = {"time": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}+00:00", "step": 0}
        manifest = {"dataset": {"sizes": {"train": 1295}, "classes": [str(n) for n in range(10)]}, "starts": [start]}
        (path / "manifest.json").write_text(json.dumps(manifest | {"model": {"parameters": 26124}}, indent=1))
        writer = EventWriter(path / "events" / "train")
        for step in range(1, rows + 1):
            writer.scalars(step, {"loss": last["loss"], "accuracy": last["accuracy"]})
        writer.close()
        (path / ".lock").touch()
        (path / "runlogs").mkdir()
        (path / "runlogs" / "chief.log").write_text("2026-01-01 00:00:00,000 INFO    step 1\n" * 200)
        print(f"\rmaking runs: {number + 1:,}", end="", file=sys.stderr)
    print(file=sys.stderr)


def measure_dashboard(folder: Path, runs: int, chromium: str) -> dict[str, float]:
    """Starts the dashboard and opens it in a browser."""
    from playwright.sync_api import sync_playwright

    began = time.monotonic()
    command = [sys.executable, "-m", "modelyard", "dashboard", str(folder), "--port", "0"]
    with sync_playwright() as play, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        found = {"listening": time.monotonic() - began}
        try:
            browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            opened = time.monotonic()
            page.goto(address)
            page.wait_for_selector("tr[data-id]", timeout=PATIENCE * 1000)
            found["first row"] = time.monotonic() - opened
            while page.evaluate("document.querySelector('#counts').textContent") != f"{runs} runs":
                time.sleep(0.01)
            found["table complete"] = time.monotonic() - opened
            used = psutil.Process(server.pid).cpu_times()
            found["processor time of the server"] = used.user + used.system
            found["from the command to the table"] = time.monotonic() - began
            found |= page.evaluate(_INTERACTIONS)
            page.goto(f"{address}#runs=")
            memory = psutil.Process(server.pid).memory_info().rss
            boxes = page.locator("tbody [data-kind=box]")
            page.wait_for_selector("tr[data-id]", timeout=PATIENCE * 1000)
            clicked = time.monotonic()
            for number in range(10):
                boxes.nth(number).check()
            page.wait_for_selector(".legend li:nth-child(10)", timeout=PATIENCE * 1000)
            page.wait_for_selector("canvas", timeout=PATIENCE * 1000)
            found["curves of 10 runs"] = time.monotonic() - clicked
            memory = max(memory, psutil.Process(server.pid).memory_info().rss)
            found["server MB"] = memory / 1e6
            processor = psutil.Process(server.pid).cpu_times()
            time.sleep(5)
            after = psutil.Process(server.pid).cpu_times()
            found["% of a core, watching"] = 20 * (after.user + after.system - processor.user - processor.system)
            browser.close()
        finally:
            server.terminate()
    return found


# From the event to the frame that shows its effect.
_INTERACTIONS = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const measured = async (act) => {
    await frame();
    const began = performance.now();
    act();
    await frame();
    return (performance.now() - began) / 1000;
  };
  const heads = () => [...document.querySelectorAll("thead th button")];
  const found = {};
  for (const name of ["run", "validation accuracy", "learning_rate"]) {
    found["sort by " + name] = await measured(() => heads().find((b) => b.textContent.startsWith(name)).click());
  }
  const filter = document.querySelector("#filter");
  const type = (text) => { filter.value = text; filter.dispatchEvent(new Event("input")); };
  found["filter by a word"] = await measured(() => type("simple"));
  found["filter by conditions"] = await measured(() => type("accuracy>0.8 optimizer=adam"));
  found["filter shows all again"] = await measured(() => type(""));
  const scroll = document.querySelector("#runs");
  found["scroll to the end"] = await measured(() => (scroll.scrollTop = scroll.scrollHeight));
  scroll.scrollTop = 0;
  return found;
}"""


def measure_tensorboard(folder: Path, runs: int) -> dict[str, float]:
    """Starts TensorBoard and waits until it lists all runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:  # type: ignore[call-overload]
        found: dict[str, float] = {}
        listed, memory = 0, 0
        try:
            while listed < runs and time.monotonic() - began < PATIENCE:
                time.sleep(0.1)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=60) as answer:
                        listed = len(json.load(answer))
                        found.setdefault("listening", time.monotonic() - began)
                except OSError:
                    continue
            found["all runs listed"] = time.monotonic() - began
            found["runs listed"] = listed
            time.sleep(5)
            processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            memory = sum(process.memory_info().rss for process in processes)
            found["server MB"] = memory / 1e6
        finally:
            for process in reversed(psutil.Process(server.pid).children(recursive=True)):
                process.terminate()
            server.terminate()
    return found


def main() -> None:
    """Makes the runs, measures, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    make_runs(given.folder, given.runs, given.rows)
    size = sum(path.stat().st_size for path in given.folder.glob("*/metrics.jsonl")) / 1e6
    print(f"{given.runs:,} runs, {size:,.0f} MB of metrics.jsonl, {os.cpu_count()} cores")
    results: dict[str, list[dict[str, float]]] = {"dashboard": [], "tensorboard": []}
    for _ in range(given.times):
        results["dashboard"].append(measure_dashboard(given.folder, given.runs, given.chromium))
        results["tensorboard"].append(measure_tensorboard(given.folder, given.runs))
    for name, found in results.items():
        print(f"\n{name}")
        for key in found[0]:
            values = [one[key] for one in found if key in one]
            unit = "" if re.search("MB|%|runs listed", key) else " s"
            print(f"  {key:32} {statistics.median(values):8.3f}{unit}   ({', '.join(f'{v:.3g}' for v in values)})")


if __name__ == "__main__":
    main()
