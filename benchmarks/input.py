"""Compares Modelyard's input pipeline with peers: JPEG records to batches of 224×224 random crops.

    python benchmarks/input.py [--photos FOLDER] [--torch PYTHON] [--quick]
    python benchmarks/input.py --scaling [--photos FOLDER] [--torch PYTHON]

The peers do the same work with the same number of threads or worker processes:
- TensorFlow: a plain sequential `TFRecordDataset` over the same records, with decode-and-crop and a bilinear resize in
  its map, as in TensorFlow's own examples;
- bare: libjpeg-turbo (simplejpeg) and the fastest resize (OpenCV) on JPEGs in memory; no records, order or batches;
- PyTorch: a `DataLoader` with Pillow, over the same JPEGs as files. It needs torch, numpy and pillow in the environment
  of PYTHON (default: this one).

Without --photos, JPEGs are made of smooth noise. Modelyard, TensorFlow and the bare loop take turns of 1.5 seconds in
one process, so that other load affects all equally. PyTorch runs in separate processes, which take turns with
processes of Modelyard. Ratios are medians of consecutive turns. Then come the memory with 1,000 and 100,000 records,
and resident against streaming data for a model that costs nothing.

--scaling reads JPEG files by 1, 2, 4, … threads of one process, and by as many worker processes. If PYTHON has
torchvision, PyTorch's DataLoader does the same in as many worker processes, with Pillow and with torchvision's decoder.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE, BATCH = 224, 64
GOALS = {"tensorflow": 0.9, "bare": 0.9, "torch": 2.0}


def main() -> None:
    """Measures all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="folder per class of JPEGs (default: made of noise)")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch, numpy and pillow")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter")
    parser.add_argument("--scaling", action="store_true", help="threads against worker processes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(CASES[chosen.case](chosen.data, chosen.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if chosen.scaling:
            _measure_scaling(Path(folder), chosen.photos or make_photos(Path(folder) / "photos"), chosen.torch)
            return
        _measure(Path(folder), chosen.photos, chosen.torch, 3 if chosen.quick else 7, 3.0 if chosen.quick else 5.0)


def _measure(folder: Path, photos: Path | None, torch: str, rounds: int, seconds: float) -> None:
    import modelyard

    source = photos or make_photos(folder / "photos")
    modelyard.convert(str(source), folder / "records")
    (folder / "source").symlink_to(source.absolute())
    speeds = _in_process(sys.executable, "turns", folder, seconds)
    print(f"{f'images/s, {SIZE}×{SIZE} random crops':38s} {'median':>8s} {'least':>8s} {'most':>8s}")
    for case, values in speeds.items():
        _print(case, values, "8.0f")
    for case in ("tensorflow", "bare"):
        _print_ratios(case, speeds["modelyard"], speeds[case])
    if _has_torch(torch):
        pairs = [
            [_in_process(python, case, folder, seconds)["images_per_second"] for python, case in both]
            for both in [((sys.executable, "modelyard"), (torch, "torch"))] * rounds
        ]
        _print("torch", [pair[1] for pair in pairs], "8.0f")
        _print_ratios("torch", *map(list, zip(*pairs, strict=True)))
    else:
        print(f"PyTorch is left out: {torch} has no torch")
    _measure_memory(folder, seconds)
    _measure_resident(folder, seconds, rounds)


def _measure_scaling(folder: Path, photos: Path, torch: str) -> None:
    """Reads batches of 256 crops from JPEG files, as training does, by threads and by processes."""
    counts = sorted({*(2**power for power in range(_cores().bit_length())), _cores()})
    print(f"{'images/s':20s}" + "".join(f"{count:>10d}" for count in counts))
    for option, more in (("input_threads", {"input_workers": 0}), ("input_workers", {})):
        speeds = []
        for count in counts:
            pipeline = _pipeline(str(photos), SIZE, batch=256, resident="never", **{option: count, **more})
            steps = itertools.count()

            def read(pipeline: Any = pipeline, steps: Iterator[int] = steps) -> int:
                with pipeline.training(next(steps), 1) as (arrays, _):
                    return len(arrays["image"])

            speeds.append(_rate(read, 4.0)["images_per_second"])
            pipeline.close()
        _print_scaling(option.removeprefix("input_"), speeds)
    if not _has_torch(torch, "torchvision"):
        print(f"PyTorch is left out: {torch} has no torchvision")
        return
    for decoder in ("pil", "torchvision"):
        _print_scaling(f"torch, {decoder}", [_torch_files(folder, photos, torch, decoder, count) for count in counts])


def _print_scaling(name: str, speeds: list[float]) -> None:
    print(f"{name:20s}" + "".join(f"{speed:>10,.0f}" for speed in speeds), flush=True)


def _torch_files(folder: Path, photos: Path, python: str, decoder: str, workers: int) -> float:
    """Returns images per second of a `DataLoader`, the better of two and four batches ahead in each worker."""
    output = folder / "torch.json"
    words = [python, str(Path(__file__).with_name("gpu_torch_photos.py")), "input", "--folder", str(photos)]
    words += ["--variants", f"{decoder}/2,{decoder}/4", "--workers", str(workers), "--repeats", "1"]
    done = subprocess.run([*words, "--output", str(output)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"PyTorch failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(output.read_text())
    if not found["speeds"]:
        sys.exit(f"PyTorch failed: {found['errors']}")
    return float(max(speeds[0] for speeds in found["speeds"].values()))


def _print(name: str, values: list[float], form: str, more: str = "") -> None:
    print(f"{name:38s} {statistics.median(values):{form}} {min(values):{form}} {max(values):{form}}{more}")


def _print_ratios(case: str, mine: list[float], others: list[float]) -> None:
    ratios = [one / other for one, other in zip(mine, others, strict=True)]
    _print(f"modelyard / {case}", ratios, "8.2f", f"   goal {GOALS[case]}")


def _measure_memory(folder: Path, seconds: float) -> None:
    found = {}
    for count in (1_000, 100_000):
        records = folder / f"many-{count}"
        records.mkdir()
        _make_thumbnails(records, count)
        found[count] = _in_process(sys.executable, "memory", records, seconds)["megabytes"]
    ratio = found[100_000] / found[1_000]
    print(f"memory: {found[1_000]:.0f} MB at 1,000 records, {found[100_000]:.0f} MB at 100,000: {ratio:.3f}  goal 1.10")


def _measure_resident(folder: Path, seconds: float, rounds: int) -> None:
    for case in ("records", "arrays"):
        ratios = []
        for _ in range(max(rounds // 2, 1)):
            pair = [
                _in_process(sys.executable, f"{case}-{how}", folder, seconds)["images_per_second"]
                for how in ("always", "never")
            ]
            ratios.append(pair[0] / pair[1])
        goal = "   goal 5" if case == "records" else "   (memory to memory)"
        print(
            f"resident / streaming, small set of {case}: {statistics.median(ratios):.1f}{goal}; last {pair[0]:,.0f} / s"
        )


def _in_process(python: str, case: str, folder: Path, seconds: float) -> dict[str, Any]:
    command = [python, __file__, "--case", case, "--data", str(folder), "--seconds", str(seconds)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _has_torch(python: str, more: str = "PIL") -> bool:
    return subprocess.run([python, "-c", f"import torch, {more}"], capture_output=True, check=False).returncode == 0


def _rate(read: Callable[[], int], seconds: float) -> dict[str, float]:
    """Returns images per second after a warmup; ``read`` reads some and returns how many."""
    warm = time.perf_counter()
    while time.perf_counter() - warm < 1.0:
        read()
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        images += read()
    return {"images_per_second": images / (time.perf_counter() - began)}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# -- the cases, each in a separate process --------------------------------------------------------------------------


def _pipeline(dataset: str, image_size: int, batch: int = BATCH, **options: Any) -> Any:
    from modelyard.config import load_config
    from modelyard.config.durations import RunLength
    from modelyard.data.open_dataset import load_dataset
    from modelyard.data.pipeline import Pipeline

    config = load_config(
        dataset=dataset, image_size=image_size, augment="random_resized_crop", train_batch_size=batch, train_steps=1,
        **options,
    )  # fmt: skip
    opened = load_dataset(config)
    return Pipeline(config, opened, RunLength(opened.size("train"), batch, 1))


Reader = tuple[Callable[[], int], Callable[[], None]]
"""Reads some images and returns how many; skips what was read ahead while others were measured."""


def read_modelyard(folder: Path) -> Reader:
    """The stream that training reads: order, records, checksums, crops, batches."""
    from modelyard.data.pipeline import STREAM_BYTES
    from modelyard.data.stream import slots_for

    pipeline = _pipeline(str(folder / "records"), SIZE)
    step = 0

    def read() -> int:
        nonlocal step
        with pipeline.training(step, 1) as (arrays, count):
            assert arrays["image"].shape[0] == BATCH * count
        step += count
        return BATCH * int(count)

    def skip() -> None:
        # Skip what the threads read ahead while others were measured.
        for _ in range(slots_for(pipeline.features, BATCH, STREAM_BYTES)):
            read()

    return read, skip


def read_tensorflow(folder: Path) -> Reader:
    """Sequential records through `tf.data`."""
    import tensorflow as tf

    files = sorted(str(path) for path in (folder / "records").glob("train-*.tfrecord"))
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        "image/height": tf.io.FixedLenFeature([], tf.int64),
        "image/width": tf.io.FixedLenFeature([], tf.int64),
    }

    def example(record: Any) -> tuple[Any, Any]:
        parsed = tf.io.parse_single_example(record, features)
        height, width = tf.cast(parsed["image/height"], tf.float32), tf.cast(parsed["image/width"], tf.float32)
        area = tf.random.uniform([], 0.08, 1.0) * height * width
        ratio = tf.exp(tf.random.uniform([], float(np.log(3 / 4)), float(np.log(4 / 3))))
        wide = tf.minimum(tf.round(tf.sqrt(area * ratio)), width)
        tall = tf.minimum(tf.round(tf.sqrt(area / ratio)), height)
        top = tf.floor(tf.random.uniform([]) * (height - tall + 1))
        left = tf.floor(tf.random.uniform([]) * (width - wide + 1))
        box = tf.cast(tf.stack([top, left, tall, wide]), tf.int32)
        image = tf.image.decode_and_crop_jpeg(parsed["image/encoded"], box, channels=3)
        return tf.cast(tf.image.resize(image, (SIZE, SIZE)), tf.uint8), parsed["image/class/label"]

    dataset = tf.data.TFRecordDataset(files).repeat().map(example, num_parallel_calls=_cores())
    options = tf.data.Options()
    options.threading.private_threadpool_size = _cores()
    batches = iter(dataset.batch(BATCH, drop_remainder=True).prefetch(2).with_options(options))
    return lambda: int(next(batches)[0].shape[0]), lambda: None


def read_bare(folder: Path) -> Reader:
    """Decode, crop and resize in threads, and nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    import cv2
    import simplejpeg

    from modelyard.data.draws import SCALARS, crop_box

    cv2.setNumThreads(0)
    files = [path.read_bytes() for path in _jpegs(folder)]
    random = np.random.default_rng(0)
    sizes = [simplejpeg.decode_jpeg_header(data)[:2] for data in files]
    # The same crops that Modelyard draws: their size decides the cost of a resize.
    drawn = [crop_box(random.random(4).tolist(), height, width, ops=SCALARS) for height, width in sizes]
    boxes = [[int(value) for value in box] for box in drawn]
    out = np.empty((_cores(), SIZE, SIZE, 3), np.uint8)

    def some(worker: int) -> int:
        for number in range(worker, len(files), _cores()):
            pixels = simplejpeg.decode_jpeg(files[number], "RGB")
            top, left, tall, wide = boxes[number]
            cv2.resize(pixels[top : top + tall, left : left + wide], (SIZE, SIZE), dst=out[worker])
        return len(range(worker, len(files), _cores()))

    pool = ThreadPoolExecutor(_cores())
    return lambda: sum(pool.map(some, range(_cores()))), lambda: None


READERS = {"modelyard": read_modelyard, "tensorflow": read_tensorflow, "bare": read_bare}


def case_turns(folder: Path, seconds: float) -> dict[str, list[float]]:
    """Measures all readers of this environment in turns."""
    readers = {name: make(folder) for name, make in READERS.items()}
    speeds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(round(4 * seconds) + 1):
        for name, (read, skip) in readers.items():
            skip()
            for _ in range(3):
                read()
            began, images = time.perf_counter(), 0
            while time.perf_counter() - began < 1.5:
                images += read()
            speeds[name].append(images / (time.perf_counter() - began))
            time.sleep(1.0)  # until the read-ahead queue is full
    return {name: values[1:] for name, values in speeds.items()}  # the first turn warms up


def case_modelyard(folder: Path, seconds: float) -> dict[str, float]:
    """Modelyard alone."""
    return _rate(read_modelyard(folder)[0], seconds)


def case_torch(folder: Path, seconds: float) -> dict[str, float]:
    """A `DataLoader` with Pillow in worker processes."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)

    class Photos(Dataset):
        """JPEG files, a random crop of each."""

        def __init__(self) -> None:
            self.paths = _jpegs(folder)

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> Any:
            random = np.random.default_rng(index)
            image = Image.open(self.paths[index % len(self.paths)]).convert("RGB")
            top, left, tall, wide = _box(random, image.height, image.width)
            small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + tall))
            return torch.from_numpy(np.array(small))

    loader = DataLoader(Photos(), BATCH, shuffle=True, num_workers=_cores(), persistent_workers=True)
    batches = iter(loader)
    return _rate(lambda: len(next(batches)), seconds)


def case_memory(folder: Path, seconds: float) -> dict[str, float]:
    """Returns the peak memory of streaming."""
    pipeline = _pipeline(str(folder), 64)
    for step in range(200):
        with pipeline.training(step, 1):
            pass
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {"megabytes": int(peak.split()[1]) / 1024}


def _train_for_nothing(dataset: str, resident: str, seconds: float, **options: Any) -> dict[str, float]:
    """Returns examples per second through the engine, with a model that reads one pixel."""
    import modelyard
    from modelyard.config import load_config
    from modelyard.config.backend import select_engine
    from modelyard.config.durations import RunLength
    from modelyard.data.open_dataset import load_dataset

    select_engine("tensorflow")
    import keras

    from modelyard.engine.tensorflow import TensorFlowEngine
    from modelyard.loop.run import build

    @modelyard.register_model("one_pixel")
    def one_pixel(data: Any, options: Any) -> Any:
        inputs = keras.Input(data.image_shape, dtype=data.features["image"].dtype, name="image")
        pixel = keras.ops.cast(inputs[:, 0, 0, :], "float32")
        return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(pixel))

    config = load_config(
        model="one_pixel", dataset=dataset, resident=resident, train_batch_size=BATCH, train_steps=100_000, **options
    )
    opened = load_dataset(config)
    engine = TensorFlowEngine(config)
    build(engine, config, opened, RunLength(opened.size("train"), BATCH, 100_000))
    step = 0

    def read() -> int:
        nonlocal step
        engine.train(step, 64)
        step += 64
        return 64 * BATCH

    return _rate(read, seconds)


def _small(case: str, resident: str) -> Callable[[Path, float], dict[str, float]]:
    def run(folder: Path, seconds: float) -> dict[str, float]:
        if case == "records":
            return _train_for_nothing(str(folder / "records"), resident, seconds, image_size=64)
        return _train_for_nothing("synthetic", resident, seconds, synthetic_examples=10_000)

    return run


CASES: dict[str, Callable[[Path, float], Any]] = {
    "turns": case_turns,
    "modelyard": case_modelyard,
    "torch": case_torch,
    "memory": case_memory,
    **{f"{case}-{how}": _small(case, how) for case in ("records", "arrays") for how in ("always", "never")},
}


# -- the data -------------------------------------------------------------------------------------------------------


def _jpegs(folder: Path) -> list[Path]:
    source = folder / "source"
    train = source / "train" if (source / "train").is_dir() else source
    return sorted(path for path in train.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def _box(random: Any, height: int, width: int) -> tuple[int, int, int, int]:
    area = random.uniform(0.08, 1.0) * height * width
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
    wide, tall = min(round(float(np.sqrt(area * ratio))), width), min(round(float(np.sqrt(area / ratio))), height)
    return int(random.integers(height - tall + 1)), int(random.integers(width - wide + 1)), tall, wide


def make_photos(folder: Path, count: int = 360) -> Path:
    """Makes noise at several scales, which compresses about as well as photographs."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        height, width = (400, 533) if number % 3 else (533, 400)
        layers = np.zeros((height, width, 3), np.float32)
        for cell in (4, 16, 64):
            small = random.uniform(0, 255, (height // cell + 2, width // cell + 2, 3)).astype(np.uint8)
            big = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
            layers += np.asarray(big, np.float32) * (cell / 84)
        target = folder / f"class-{number % 10}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(layers.clip(0, 255).astype(np.uint8)).save(target / f"{number:04}.jpg", quality=90)
    return folder


def _make_thumbnails(folder: Path, count: int) -> None:
    """Writes records of small JPEGs, the same few repeated."""
    from PIL import Image

    from modelyard.data.raw_examples import RawExamples
    from modelyard.data.records.convert import convert_examples

    random = np.random.default_rng(0)
    files = []
    for _ in range(50):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (80, 80, 3), np.uint8)).save(buffer, "jpeg", quality=50)
        files.append(buffer.getvalue())

    class Repeated(RawExamples):
        """The same files, repeated."""

        labels = (np.arange(count) % 10).astype(np.int32)

        def load(self, index: int) -> bytes:
            """Returns one of them."""
            return files[index % len(files)]

        def name(self, index: int) -> str:
            """Returns its number."""
            return str(index)

        def fingerprint(self) -> str:
            """Returns how many."""
            return str(count)

    folder.rmdir()
    convert_examples({"train": Repeated()}, [str(i) for i in range(10)], folder)


if __name__ == "__main__":
    main()
