"""Compares training on one GPU with Keras's `fit` on JAX and with PyTorch, in images per second.

    python benchmarks/gpu.py [--data_dir DIR] [--only 1,3,loop] [--quick] [--no-peers] [--output FILE]
    python benchmarks/gpu.py --only photos [--photos FOLDER]

Modelyard is measured through its command with the default hooks, by the wall-clock time in metrics.jsonl: the time
between late rows, when nothing is compiled. Peers run in separate processes, one after the other. They keep their data
on the GPU too, and the best of several configurations counts: for PyTorch also whole steps as CUDA graphs. The goal for
`fit` applies to the best way with the same augmentation and Keras's own train_step; other ways are shown too. Speeds
are medians of three chunks. If a part fails, the error is printed and the others continue.

`photos` trains ResNet-50 from JPEG files, with random crops and flips. It compares that with the same training from
arrays in device memory, and with PyTorch's DataLoader; the input alone is measured on both sides, too. Without
--photos, 9,000 files are made of noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from input import make_photos

HERE = Path(__file__).resolve().parent
CROPS = "pad_and_crop(padding=4), flip_left_right"


@dataclass(frozen=True)
class Case:
    """A training run to measure, and the ratios it must reach."""

    name: str
    model: str
    batch: int
    precision: str
    torch: tuple[str, ...]
    torch_goal: float
    fit_goal: float | None = None
    side: int = 32
    examples: int = 50_000
    augment: str = CROPS
    log_every: str = "100 steps"
    learning_rate: float = 0.05

    @property
    def padding(self) -> int:
        """Pixels around the images before they are cropped."""
        return 4 if self.augment == CROPS else 0


EAGER = "eager/channels_last"
COMPILED = "compiled/channels_last"
GRAPHS = ("graph/channels_last", "graph-eager/channels_last", "graph-max/channels_last")
"""Whole steps as CUDA graphs, compiled or not; the one that compiles for minutes is the last."""
FLOAT32 = ("eager/channels_last/float32", "graph/channels_last/float32")
"""At small batches the number of kernels decides, and mixed precision has more."""
CASES = {
    "1": Case(
        "ResNet-20, batch 128",
        "resnet20",
        128,
        "bfloat16",
        (FLOAT32[0], COMPILED, FLOAT32[1], *GRAPHS),
        1.1,
        fit_goal=2.5,
    ),
    "2": Case("ResNet-20, batch 1024", "resnet20", 1024, "bfloat16", (EAGER, COMPILED, *GRAPHS), 1.2),
    "3": Case("ResNet-18, batch 512", "resnet18", 512, "bfloat16", (EAGER, COMPILED, *GRAPHS), 1.1),
    "4": Case(
        "ResNet-50, 224×224, batch 128",
        "resnet50",
        128,
        "bfloat16",
        (COMPILED, "graph/channels_last"),
        1.0,
        side=224,
        examples=1024,
        augment="flip_left_right",
        log_every="20 steps",  # with the default of 100 there would be one row in five seconds
        learning_rate=0.01,
    ),
}
PHOTOS = Case(
    "ResNet-50 from JPEG files, 224×224, batch 256",
    "resnet50",
    256,
    "bfloat16",
    ("graph/torchvision", "compiled/torchvision", "graph/pil", "graph/nvjpeg"),
    2.0,
    side=224,
    examples=4096,
    augment="flip_left_right",
    log_every="10 steps",
    learning_rate=0.01,
)
FROM_FILES = "random_resized_crop, flip_left_right"
RESIDENT_GOAL = 0.95
NOISE_FILES, COPIES = 360, 25
PARTS = (*CASES, "photos", "loop")
LOOP_GOAL = 0.97
WIDTH = 86
"""Of the names in the table."""


class PartFailedError(Exception):
    """A process failed; the text is the end of its output."""


class Bench:
    """The settings of this benchmark, and the results so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.seconds = 0.3 if arguments.tiny else 1.0 if arguments.quick else 2.0
        self.warm_up = 2 if arguments.tiny else 20
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self.began = time.monotonic()
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        source = str(HERE.parent / "src")
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self.environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.environment.setdefault("KERAS_BACKEND", arguments.engine)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Returns the result of ``work``, or prints the error and returns None."""
        left = self.arguments.minutes * 60 - (time.monotonic() - self.began)
        began = time.monotonic()
        try:
            if left <= 0:
                raise PartFailedError(f"left out: {self.arguments.minutes} minutes are over.")
            result = work()
        except Exception as error:  # the other parts are still worth measuring
            self.failed.append(name)
            print(f"    {name} FAILED: {type(error).__name__}: {error}", flush=True)
            result = None
        self.found.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
        if self.arguments.output:
            self.arguments.output.write_text(json.dumps({**self.found, "failed": self.failed}, indent=1))
        return result

    def child(self, script: str, *words: str, python: str = sys.executable, limit: float | None = None) -> Any:
        """Runs another script of this folder and returns its results: what there is of them, if time runs out."""
        output = self.folder / "child.json"
        output.unlink(missing_ok=True)
        command = [python, str(HERE / script), *words, "--output", str(output)]
        log = self.folder / "child.log"
        with log.open("w") as file:
            limit = limit or self.arguments.limit
            status: int | str
            try:
                status = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, env=self.environment, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"none after {limit:.0f} s"
        if not output.is_file():
            raise PartFailedError(f"{script} {words[0]}, status {status}:\n{tail(log)}")
        return json.loads(output.read_text())

    def timing(self) -> list[str]:
        """Returns how long peers are measured."""
        return ["--seconds", str(self.seconds), "--warm_up", str(self.warm_up)]

    def npz(self) -> Path | None:
        """Returns the file of CIFAR-10, if it exists."""
        folders = [] if self.arguments.tiny else [self.arguments.data_dir, self.arguments.data_dir / "cifar10"]
        return next((path for path in (folder / "cifar10.npz" for folder in folders) if path.is_file()), None)

    def options(self, case: Case) -> dict[str, Any]:
        """Returns the options of Modelyard for a case."""
        npz = self.npz() if case.side == 32 else None
        data: dict[str, Any] = {"dataset": "cifar10", "data_dir": str(npz.parent)} if npz else {
            "dataset": "synthetic",
            "synthetic_examples": case.examples,
            "synthetic_shape": f"{case.side},{case.side},3",
        }  # fmt: skip
        model = {"model": case.model}
        if case.model == "resnet50":  # the built-in one has its strides elsewhere, so it computes less
            model = {"model": "benchmark_resnet50", "plugins": str(HERE / "gpu_resnet50.py")}
        return {
            **model,
            **data,
            "train_batch_size": case.batch,
            "precision": case.precision,
            "augment": case.augment,
            "optimizer": "sgd",
            "learning_rate": case.learning_rate,
            "resident": "always",
        }


def tail(log: Path, lines: int = 15) -> str:
    """Returns the last lines of a log."""
    return "\n".join(f"      {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


# -- the sides ------------------------------------------------------------------------------------------------------


def modelyard_speeds(bench: Bench, case: Case, **changed: Any) -> list[float]:
    """Runs the command, ends it with SIGTERM, and returns images per second in three chunks.

    Args:
        bench: the settings.
        case: what to train.
        changed: options that differ from those of the case; None: left out.
    """
    words = ["train", "--engine", bench.arguments.engine, "--log_every", case.log_every, "--train_steps", "10000000"]
    for key, value in {**bench.options(case), **changed}.items():
        words += [f"--{key}", str(value)] if value is not None else []
    run, log = Path(tempfile.mkdtemp(dir=bench.folder)) / "run", bench.folder / "modelyard.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "modelyard", *words, "--model_dir", str(run)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=bench.environment,
        )
    try:
        return watch(bench, case, process, run / "metrics.jsonl", log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def watch(bench: Bench, case: Case, process: subprocess.Popen[bytes], metrics: Path, log: Path) -> list[float]:
    """Waits until the rows cover the requested time. Rows soon after the first are not used."""
    settle, wanted, began = bench.seconds, 3 * bench.seconds, time.monotonic()
    while True:
        time.sleep(0.1)
        if process.poll() is not None:
            raise PartFailedError(f"the command ended with status {process.returncode}:\n{tail(log)}")
        if time.monotonic() - began > bench.arguments.limit:
            raise PartFailedError(f"not enough rows after {bench.arguments.limit} s:\n{tail(log)}")
        rows = train_rows(metrics)
        late = [row for row in rows if row["seconds"] >= rows[0]["seconds"] + settle]
        if len(late) >= 4 and late[-1]["seconds"] - late[0]["seconds"] >= wanted:
            return thirds(late, case.batch)


def train_rows(metrics: Path) -> list[dict[str, Any]]:
    """Reads the training rows of an active run; its last line may be incomplete."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    return [row for row in map(json.loads, lines) if row["split"] == "train"]


def thirds(rows: list[dict[str, Any]], batch: int) -> list[float]:
    """Returns images per second in three chunks of about equal length."""
    last = len(rows) - 1
    cuts = [rows[round(last * third / 3)] for third in range(4)]
    return [
        batch * (stop["step"] - start["step"]) / (stop["seconds"] - start["seconds"])
        for start, stop in itertools.pairwise(cuts)
    ]


def torch_speeds(bench: Bench, case: Case) -> dict[str, Any]:
    """Measures each PyTorch configuration."""
    npz = bench.npz() if case.side == 32 else None
    words = ["--model", case.model, "--batch", str(case.batch), "--side", str(case.side)]
    words += ["--padding", str(case.padding), "--examples", str(case.examples)]
    words += ["--precision", case.precision, "--npz", str(npz or ""), *bench.timing()]
    return torch_variants(bench, "gpu_torch.py", words, case.torch)


def torch_variants(bench: Bench, script: str, words: list[str], variants: tuple[str, ...]) -> dict[str, Any]:
    """Measures variants in one process. After one that fails, the others are measured in another process."""
    found: dict[str, Any] = {"speeds": {}, "errors": {}}
    waiting, ends = list(variants), time.monotonic() + bench.arguments.limit
    while waiting:
        left = ends - time.monotonic()
        if left < 1:
            found["errors"] |= dict.fromkeys(waiting, "no time left")
            break
        command = [*words, "--variants", ",".join(waiting)]
        try:
            part = bench.child(script, *command, python=bench.arguments.torch_python, limit=left)
        except PartFailedError as error:
            part = {"speeds": {}, "errors": {waiting[0]: str(error)}}
        for kind in ("speeds", "errors"):
            found[kind] |= part[kind]
        waiting = [name for name in waiting if name not in found["speeds"] and name not in found["errors"]]
    if variants and not found["speeds"]:
        raise PartFailedError("no configuration was measured:\n" + "\n".join(found["errors"].values()))
    return found


def fit_speeds(bench: Bench, case: Case) -> dict[str, Any]:
    """Measures Keras's `fit` on the same model."""
    options = json.dumps({**bench.options(case), "engine": bench.arguments.engine})
    return dict(
        bench.child(
            "gpu_jax.py",
            "fit",
            "--engine",
            bench.arguments.engine,
            "--options",
            options,
            *bench.timing(),
            "--budget",
            str(0.7 * bench.arguments.limit),
        )
    )


# -- the table ------------------------------------------------------------------------------------------------------


def show(name: str, speed: float, against: float, goal: float | None) -> None:
    """Prints one row."""
    ratio = speed / against
    verdict = "–" if goal is None or math.isnan(ratio) else f"{goal:.2f} {'ok' if ratio >= goal else 'MISSED'}"
    print(f"{name:<{WIDTH}} {speed:10.0f} {against:10.0f} {ratio:7.3f}   {verdict}", flush=True)


def show_peers(
    speed: float, peers: dict[str, Any], kind: str, goal: float | None, counted: Collection[str] | None = None
) -> None:
    """Prints one row per configuration of a peer; the goal applies to the best of all or of the ``counted`` ones."""
    middle = {name: statistics.median(values) for name, values in peers["speeds"].items()}
    eligible = [name for name in middle if counted is None or name in counted]
    best = max(eligible, key=lambda name: middle[name], default=None)
    for name, against in middle.items():
        show(f"    {kind} {name}", speed, against, goal if name == best else None)
    for name, error in peers["errors"].items():
        print(f"    {kind} {name} FAILED: {error[:300]}", flush=True)


def bench_case(bench: Bench, number: str, case: Case) -> None:
    """Measures Modelyard, then its peers."""
    print(f"{number} {case.name}, {case.precision}", flush=True)
    found: dict[str, Any] = {"name": case.name, "precision": case.precision}
    bench.found.setdefault("cases", {})[number] = found
    speeds = bench.attempt(f"{number} Modelyard", lambda: modelyard_speeds(bench, case))
    if speeds:
        found["modelyard"] = speeds
    speed = statistics.median(speeds) if speeds else float("nan")
    spread = f"{min(speeds):.0f} to {max(speeds):.0f}" if speeds else ""
    print(f"{'    Modelyard':<{WIDTH}} {speed:10.0f}   {spread}", flush=True)
    show_use(bench, case, speed)
    if not bench.arguments.peers:
        return
    if case.fit_goal is not None:
        peers = bench.attempt(f"{number} fit", lambda: fit_speeds(bench, case))
        if peers:
            found["fit"] = peers
            show_peers(speed, peers, "Keras", case.fit_goal, peers["counted"])
    peers = bench.attempt(f"{number} PyTorch", lambda: torch_speeds(bench, case))
    if peers:
        found["torch"] = peers
        show_peers(speed, peers, "PyTorch", case.torch_goal)


def show_use(bench: Bench, case: Case, speed: float) -> None:
    """Prints the fraction of the chip's peak that the network reaches."""
    work, peak = bench.found.get("work") or {}, bench.found.get("peak") or {}
    if case.model in work and peak and not math.isnan(speed):
        flops = work[case.model] * speed
        share = flops / peak["flops"]
        print(f"    model FLOP/s {flops / 1e12:.1f} T, {share:.1%} of the peak in bfloat16", flush=True)


def bench_photos(bench: Bench, case: Case) -> None:
    """Trains from JPEG files and from arrays in device memory, then PyTorch from the same files."""
    print(f"photos {case.name}, {case.precision}", flush=True)
    folder = bench.arguments.photos or bench.attempt("photos: files", lambda: make_files(bench))
    if not folder:
        return
    found: dict[str, Any] = {"name": case.name, "precision": case.precision}
    bench.found["photos"] = found
    short, bench.seconds = bench.seconds, 2 * bench.seconds  # input is less steady than arithmetic
    files: dict[str, Any] = {"dataset": str(folder), "image_size": case.side, "augment": FROM_FILES}
    files |= {"resident": None, "synthetic_examples": None, "synthetic_shape": None}
    middle = {}
    sides: dict[str, dict[str, Any]] = {"files": files, "resident": {}}
    for name in sides:
        speeds = bench.attempt(f"photos {name}", partial(modelyard_speeds, bench, case, **sides[name]))
        found[name] = speeds
        middle[name] = statistics.median(speeds) if speeds else float("nan")
        spread = f"{min(speeds):.0f} to {max(speeds):.0f}" if speeds else ""
        print(f"{f'    Modelyard, {name}':<{WIDTH}} {middle[name]:10.0f}   {spread}", flush=True)
        show_use(bench, case, middle[name])
    show("    from files against resident arrays", middle["files"], middle["resident"], RESIDENT_GOAL)
    without = ("model", "plugins")  # the input needs no network
    options = {k: v for k, v in {**bench.options(case), **files}.items() if v is not None and k not in without}
    words = ["--engine", bench.arguments.engine, "--options", json.dumps(options), *bench.timing()]
    found["input"] = bench.attempt("photos input", lambda: bench.child("gpu_jax.py", "input", *words))
    alone = statistics.median(found["input"]["speeds"]) if found["input"] else float("nan")
    print(f"{'    input alone: Modelyard':<{WIDTH}} {alone:10.0f}", flush=True)
    if bench.arguments.peers:
        bench_photos_torch(bench, case, folder, middle["files"], alone)
    bench.seconds = short


def bench_photos_torch(bench: Bench, case: Case, folder: Path, speed: float, alone: float) -> None:
    """Measures PyTorch's input alone, and its training with the better number of batches ahead."""
    found, size = bench.found["photos"], ["--folder", str(folder), "--batch", str(case.batch), "--side", str(case.side)]
    words = [*size, "--precision", case.precision, *bench.timing()]
    script = "gpu_torch_photos.py"
    decoders = list(dict.fromkeys(variant.split("/")[1] for variant in case.torch))
    ways = tuple(f"{decoder}/{ahead}" for decoder in decoders for ahead in (2, 4)[: 1 if decoder == "nvjpeg" else 2])
    loaders = bench.attempt("photos PyTorch input", lambda: torch_variants(bench, script, ["input", *words], ways))
    best = dict.fromkeys(decoders, "2")
    if loaders:
        found["torch_input"] = loaders
        show_peers(alone, loaders, "input alone: PyTorch", None)
        for decoder in decoders:
            middle = {way: statistics.median(speeds) for way, speeds in loaders["speeds"].items() if decoder in way}
            best[decoder] = max(middle, key=lambda way: middle[way]).split("/")[1] if middle else "2"
    variants = tuple(f"{variant}/{best[variant.split('/')[1]]}" for variant in case.torch)
    peers = bench.attempt("photos PyTorch", lambda: torch_variants(bench, script, ["train", *words], variants))
    if peers:
        found["torch"] = peers
        show_peers(speed, peers, "PyTorch", case.torch_goal)


def make_files(bench: Bench) -> Path:
    """Makes JPEGs of noise, and copies them: making them takes longer."""
    folder = bench.folder / "photos"
    files, copies = (20, 2) if bench.arguments.tiny else (NOISE_FILES, COPIES)
    make_photos(folder, files)
    for path in list(folder.rglob("*.jpg")):
        for copy in range(1, copies):
            shutil.copyfile(path, path.with_name(f"{path.stem}-{copy}.jpg"))
    return folder


def bench_loop(bench: Bench, case: Case) -> None:
    """Measures the cost of the loop against bare steps."""
    options = json.dumps(bench.options(case))
    words = ["--engine", bench.arguments.engine, "--options", options, *bench.timing()]
    words[words.index("--seconds") + 1] = str(2 * bench.seconds)
    found = bench.attempt("loop", lambda: bench.child("gpu_jax.py", "loop", *words))
    if found:
        bench.found["loop"] = found
        print(f"loop, {case.name}, {case.precision}", flush=True)
        show("    whole loop against bare steps", found["speed"], found["speed"] / found["of_bare"], LOOP_GOAL)
        pairs = ", ".join(f"{pair:.3f}" for pair in sorted(found["pairs"]))
        print(
            f"    of the pairs: {pairs}; time in the engine, of the loop's: {found['share_in_engine']:.3f}", flush=True
        )


def models(bench: Bench, cases: dict[str, Case]) -> dict[str, Any]:
    """Counts the FLOPs of each network, from the same options with little data."""
    small: dict[str, dict[str, Any]] = {}
    for case in cases.values():
        options = bench.options(case)
        shape = f"{case.side},{case.side},3"
        data = {"dataset": "synthetic", "synthetic_examples": 10, "synthetic_shape": shape}
        kept: dict[str, Any] = {key: value for key, value in options.items() if key in ("model", "plugins")}
        small[case.model] = {**kept, **data, "engine": bench.arguments.engine}
    found = bench.child("gpu_jax.py", "work", "--engine", bench.arguments.engine, "--options", json.dumps(small))
    for name, error in found["errors"].items():
        print(f"    the FLOPs of {name} are unknown: {error[:300]}", flush=True)
    return dict(found["flops"])


def main() -> None:
    """Runs the requested cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="1,2,3,4,loop", help=f"parts to run, of {', '.join(PARTS)} (default: %(default)s)"
    )
    parser.add_argument("--photos", type=Path, help="folder per class of JPEGs, for photos (default: made of noise)")
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="folder of cifar10.npz; else synthetic")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ways", help="PyTorch's ways to run, such as eager,compiled,graph/torchvision (default: all)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="for all sides of all cases")
    parser.add_argument("--quick", action="store_true", help="half the time for each measurement")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU: to see that it works")
    parser.add_argument("--engine", default="jax")
    parser.add_argument("--torch_python", default=sys.executable, help="a Python with PyTorch (default: this one)")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one process (default: 240)")
    parser.add_argument("--minutes", type=float, default=9, help="no part begins after so long (default: 9)")
    parser.add_argument("--output", type=Path, help="JSON file for everything that was measured")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}.")
    cases = {number: case for number, case in CASES.items() if number in wanted}
    for number, case in cases.items():
        cases[number] = adapted(case, arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        size = ["--size", "256"] if arguments.tiny else []
        bench.found["peak"] = bench.attempt("peak", lambda: bench.child("gpu_jax.py", "peak", *size))
        known = {**cases, "photos": PHOTOS} if "photos" in wanted else cases
        bench.found["work"] = bench.attempt("work", lambda: models(bench, known))
        if bench.found["peak"]:
            peak = bench.found["peak"]
            print(f"{peak['device']}, JAX {peak['jax']}: {peak['flops'] / 1e12:.1f} TFLOP/s in bfloat16")
        print(f"{'images/s':<{WIDTH}} {'Modelyard':>10} {'against':>10} {'ratio':>7}   goal", flush=True)
        for number, case in cases.items():
            bench_case(bench, number, case)
        if "photos" in wanted:
            bench_photos(bench, adapted(PHOTOS, arguments))
        if "loop" in wanted:
            bench_loop(bench, adapted(CASES["1"], arguments))
        bench.found["total_seconds"] = round(time.monotonic() - bench.began, 1)
        bench.attempt("end", lambda: None)
    print(f"{bench.found['total_seconds']} s in all: {bench.found['seconds']}")
    if bench.failed:
        raise SystemExit(f"failed: {', '.join(bench.failed)}")


def adapted(case: Case, arguments: argparse.Namespace) -> Case:
    """Parses a case from the command line."""
    if arguments.precision:
        case = replace(case, precision=arguments.precision)
    if arguments.ways:
        ways = arguments.ways.split(",")
        case = replace(case, torch=tuple(name for name in case.torch if {name, name.split("/")[0]} & {*ways}))
    if arguments.tiny:
        case = replace(case, batch=4, side=min(case.side, 64), examples=32, log_every="1 steps")
        case = replace(case, torch=tuple(dict.fromkeys(map(not_compiled, case.torch))))
    return case


def not_compiled(variant: str) -> str:
    """Returns the variant that is nearest to another and needs no compiler, which takes minutes on a few cores."""
    way, rest = variant.split("/", 1)
    return f"{'graph-eager' if way.startswith('graph') else 'eager'}/{rest}"


if __name__ == "__main__":
    main()
