"""Processes that read batches: the same bits at any number of them, also if they are killed; nothing is left behind."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from PIL import Image
from test_pipeline import BATCH, CROP, Made, same

import modelyard
from conftest import COMMAND, environment, on_engine
from modelyard.data import input_workers as module
from modelyard.data import pipeline as pipeline_module
from modelyard.data.dataset import Arrays, Dataset, DerivedSplits, Feature, _DividedDataset
from modelyard.data.decoded import DecodedDataset
from modelyard.data.preprocess import _PreprocessedDataset
from modelyard.errors import UNAVAILABLE, DataError
from photos import photo_folder
from waiting import wait_until

OPTIONS = {"resident": "never", "augment": CROP}
MANY = 400
"""More batches than are read ahead."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos") / "photos", 47)


@pytest.fixture
def make() -> Any:
    made: list[Made] = []

    def build(*args: Any, **options: Any) -> Made:
        made.append(Made(*args, **{**OPTIONS, **options}))
        return made[-1]

    yield build
    for one in made:
        one.pipeline.close()


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    caplog.set_level(logging.INFO, "modelyard")


class Numbers(Dataset):
    """Examples that tell their index."""

    classes = ("even", "odd")

    def __init__(self, size: int = 64) -> None:
        self.size_ = size

    @property
    def features(self) -> dict[str, Feature]:
        return {"image": Feature((2,), "float32"), "label": Feature((), "int32")}

    def sizes(self) -> dict[str, int]:
        return {"train": self.size_}

    def fingerprint(self) -> str:
        return str(self.size_)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        self.note(indices)
        return {"image": np.stack([indices, indices], 1).astype(np.float32), "label": (indices % 2).astype(np.int32)}

    def note(self, indices: NDArray[np.int64]) -> None:
        """Does more, in subclasses."""


class Deadly(Numbers):
    def note(self, indices: NDArray[np.int64]) -> None:
        if 13 in indices:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyTogether(Numbers):
    def note(self, indices: NDArray[np.int64]) -> None:
        if 13 in indices and len(indices) > 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Failing(Numbers):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def note(self, indices: NDArray[np.int64]) -> None:
        if isinstance(self.error, OSError):
            raise DataError("photo.jpg can't be read.") from self.error
        raise self.error


class Talking(Numbers):
    def note(self, indices: NDArray[np.int64]) -> None:
        logging.getLogger("modelyard").warning("reading %d from process %d", len(indices), os.getpid())


class Local(Numbers):
    """One that can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: None


class Huge(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.values = np.zeros(module.MOST_BYTES + 1, np.uint8)


class ManyTexts(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.texts = [b"x" * (module.MOST_BYTES // 4) for _ in range(5)]


class FormattedError(Exception):
    """Formats its message, so that a copy has another one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bad file {name}")


class FailingFormatted(Numbers):
    def note(self, indices: NDArray[np.int64]) -> None:
        raise FormattedError("x.jpg")


class Stopping(Numbers):
    """Stops for ever when it reads, as code does that waits for a thread that was lost."""

    def note(self, indices: NDArray[np.int64]) -> None:
        print(os.getpid(), file=open("reading", "a"), flush=True)  # noqa: SIM115
        threading.Event().wait()


def workers_of(made: Made) -> list[int]:
    assert made.pipeline._workers is not None
    return made.pipeline._workers.pids()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def evaluated(made: Made) -> list[tuple[dict[str, Any], Any]]:
    return [({k: v.copy() for k, v in b.items()}, w) for b, w in made.pipeline.evaluation("validation", 3)]


def test_any_number_of_workers_reads_the_same_batches(make: Any, photos: Path) -> None:
    threads = make(photos, input_workers=0)
    batches, evaluation = threads.batches(4, 20), evaluated(threads)
    for count in (1, 2, 5):
        made = make(photos, input_workers=count)
        assert same(made.batches(4, 20), batches)
        assert same(made.batches(9, 11), {k: v[5 * BATCH : 7 * BATCH] for k, v in batches.items()}), "after a jump"
        for (one, weights), (other, others) in zip(evaluated(made), evaluation, strict=True):
            assert same(one, other)
            assert np.array_equal(weights, others)
        assert len(workers_of(made)) == count, "training and evaluation share them"


def test_a_large_resident_split_is_read_by_workers_which_then_end(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = module.InputWorkers._start

    def count(workers: module.InputWorkers) -> None:
        start(workers)
        started.extend(workers.pids())

    monkeypatch.setattr(module.InputWorkers, "_start", count)
    expected = make(photos, resident="always", augment="", input_workers=2).pipeline.resident("train")
    assert not started, "it is small"
    monkeypatch.setattr(pipeline_module, "_LEAST_BY_PROCESSES", 40)
    made = make(photos, resident="always", augment="", input_workers=2)
    assert same(made.pipeline.resident("train"), expected)
    assert len(started) == 2
    for pid in started:
        wait_until(lambda: is_gone(pid), "the end of a worker")  # noqa: B023
    # Those that read ahead stay.
    made = make(photos, input_workers=2)
    made.pipeline.start(0)
    monkeypatch.setattr(made.pipeline, "_why_not_resident", lambda split: "" if split == "train" else None)
    assert made.pipeline.resident("validation") is not None
    made.batches(0, 2)
    assert not any(map(is_gone, workers_of(made)))


def test_reading_begins_before_the_first_batch_is_wanted(make: Any, photos: Path) -> None:
    expected = make(photos, input_workers=0).batches(5, 9)
    for later in (5, 0):  # the second start is elsewhere than the batches that are wanted
        made = make(photos, input_workers=2)
        made.pipeline.start(later)
        stream = made.pipeline._training.result()
        wait_until(lambda: stream._missing.get(later) == 0, "the first batch")  # noqa: B023
        workers = workers_of(made)
        assert same(made.batches(5, 9), expected)
        assert workers_of(made) == workers
    made = make(photos, input_workers=2)
    made.pipeline.start(0)
    made.pipeline.close()  # while they start
    assert made.pipeline._workers is None


def test_a_worker_that_is_killed_is_replaced_and_its_examples_are_read_again(
    make: Any, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make(photos, input_workers=0).batches(0, MANY)
    made = make(photos, input_workers=2)
    first = made.batches(0, 4)
    killed = workers_of(made)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    rest = made.batches(4, MANY)
    assert same({name: np.concatenate([first[name], rest[name]]) for name in first}, expected)
    assert not set(killed) & set(workers_of(made))
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(messages) == [
        f"input worker {number} was killed (SIGKILL); another takes its place" for number in (0, 1)
    ]


def test_if_all_processes_are_killed_reading_goes_on(make: Any, photos: Path) -> None:
    expected = make(photos, input_workers=0).batches(0, MANY)
    made = make(photos, input_workers=2)
    first = made.batches(0, 4)
    template = psutil.Process(workers_of(made)[0]).parent()
    assert template is not None
    for pid in (template.pid, *workers_of(made)):
        os.kill(pid, signal.SIGKILL)
    rest = made.batches(4, MANY)
    assert same({name: np.concatenate([first[name], rest[name]]) for name in first}, expected)


def test_workers_that_cannot_be_started_again_are_an_error_in_words(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(photos, input_workers=2)
    made.batches(0, 4)
    template = psutil.Process(workers_of(made)[0]).parent()
    assert template is not None
    monkeypatch.setattr(module.sys, "executable", "/none")
    for pid in (template.pid, *workers_of(made)):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"can't be started again .*--input_workers 0"):
        made.batches(4, MANY)


def test_examples_that_kill_every_worker_are_an_error(make: Any) -> None:
    made = make(Deadly(), input_workers=2, augment="")
    with pytest.raises(
        DataError, match=r"3 input .* died while they read the example 13, .* was killed \(SIGKILL\).*--input_workers 0"
    ):
        made.batches(0, 8)


def test_examples_that_kill_only_together_are_read_one_by_one(make: Any) -> None:
    expected = make(Numbers(), input_workers=0, augment="").batches(0, 8)
    assert same(make(DeadlyTogether(), input_workers=2, augment="").batches(0, 8), expected)


def test_memory_that_is_too_small_to_decode_an_image_is_no_damaged_image(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photo_folder(tmp_path / "photos", 20)
    Image.new("RGB", (9000, 9000)).save(folder / "cat" / "huge.png")
    start = module.InputWorkers._start

    def start_limited(workers: module.InputWorkers) -> None:
        start(workers)
        for pid in workers.pids():
            resource.prlimit(pid, resource.RLIMIT_AS, (600 << 20, 600 << 20))

    monkeypatch.setattr(module.InputWorkers, "_start", start_limited)
    made = make(folder, input_workers=2, augment="")
    with pytest.raises(MemoryError, match=r"cat/huge\.png can't be decoded"):
        made.batches(0, 8)


def test_an_error_of_a_worker_is_that_of_the_run(make: Any, tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "photos", 40)
    made = make(folder, input_workers=2)
    index = int(made.pipeline.rows(4, 1)[0, 3])
    name = made.dataset.name("train", index)
    (folder / name).write_bytes((folder / name).read_bytes()[:300])
    made.batches(0, 4)
    with pytest.raises(DataError, match=f"{name}.*modelyard data verify"):
        made.batches(4, 5)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_keeps_its_exit_status(make: Any, number: int) -> None:
    made = make(Failing(OSError(number, os.strerror(number))), input_workers=1, augment="")
    with pytest.raises(DataError, match=r"photo\.jpg can't be read") as raised:
        made.batches(0, 1)
    assert raised.value.exit_status == (UNAVAILABLE if number == errno.EIO else 2)


def test_a_mistake_in_a_dataset_keeps_its_type_and_its_traceback(make: Any) -> None:
    made = make(Failing(KeyError("colour")), input_workers=1, augment="")
    with pytest.raises(KeyError, match="colour") as raised:
        made.batches(0, 1)
    assert "in note" in raised.value.__notes__[0]


@pytest.mark.parametrize("dataset", [FailingFormatted(), Failing(SystemExit(3))])  # type: ignore[arg-type]
def test_other_errors_keep_their_message(make: Any, dataset: Dataset) -> None:
    made = make(dataset, input_workers=1, augment="")
    with pytest.raises(RuntimeError, match=r"FormattedError: bad file x\.jpg$|SystemExit: 3$") as raised:
        made.batches(0, 1)
    assert "In a process that reads the input" in raised.value.__notes__[0]


def test_if_no_process_can_be_started_threads_read(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make(photos, input_workers=0).batches(0, 3)
    monkeypatch.setattr(module.sys, "executable", "/none")
    assert same(make(photos, input_workers=2).batches(0, 3), expected)
    assert "threads of this process: no process can be started (FileNotFoundError" in caplog.text


def test_what_notes_bad_examples_is_read_in_this_process(photos: Path) -> None:
    made = Made(photos, **OPTIONS, input_workers=2)
    bad = DecodedDataset(made.dataset.splits, made.dataset.classes, made.dataset.image_spec, skip_bad=True)
    wrapped = _PreprocessedDataset(bad, [])
    divided = _DividedDataset(wrapped, DerivedSplits({"train": np.arange(3)}, {}), ())
    for dataset in (bad, wrapped, divided):
        assert pipeline_module.input_workers(made.config, dataset) == 0


def test_what_a_worker_logs_is_in_the_log_of_the_run(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = make(Talking(), input_workers=1, augment="")
    made.batches(0, 1)
    assert f"from process {workers_of(made)[0]}" in caplog.text


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Local, "can't be copied to another process"),
        (Huge, "an array of 256 MiB"),
        (ManyTexts, "more than 256 MiB in memory"),
    ],
)
def test_what_cannot_be_copied_is_read_in_this_process_with_one_line(
    make: Any, dataset: type[Numbers], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(dataset(), input_workers=2, augment="")
    assert same(made.batches(0, 3), make(Numbers(), input_workers=0, augment="").batches(0, 3))
    made.pipeline.close()
    made.batches(3, 4)
    lines = [record.getMessage() for record in caplog.records if "threads of this process" in record.getMessage()]
    assert len(lines) == 1
    assert re.search(reason, lines[0])


def test_without_shared_memory_threads_read(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    made = make(photos, input_workers=2)
    assert same(made.batches(0, 3), make(photos, input_workers=0).batches(0, 3))
    assert "read by threads of this process: there is no shared memory of" in caplog.text


def test_under_a_limit_of_file_sizes_threads_read(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make(photos, input_workers=0).batches(0, 3)
    made = make(photos, input_workers=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    try:
        found = made.batches(0, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(found, expected)
    assert "read by threads of this process: there is no shared memory of" in caplog.text


def test_without_files_in_memory_one_on_disk_is_shared(
    make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")  # as on macOS
    monkeypatch.delattr(os, "posix_fallocate")
    made = make(photos, input_workers=2)
    assert same(made.batches(0, 3), make(photos, input_workers=0).batches(0, 3))
    assert "read ahead by 2 processes" in caplog.text


def test_a_tiny_dev_shm_limits_nothing(photos: Path, tmp_path: Path) -> None:
    within = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"',
    ]
    if not shutil.which("unshare") or subprocess.run([*within, "sh", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    options = f"train --model mlp --image_size 64 --train_steps 5 --resident never --input_workers 2 --dataset {photos}"
    words = [*within, "sh", *COMMAND, *options.split(), *on_engine(), "--model_dir", str(tmp_path / "run")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "read ahead by 2 processes" in done.stderr


def test_small_and_resident_data_starts_no_process(make: Any, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "InputWorkers", None)
    monkeypatch.setattr(pipeline_module, "InputWorkers", None)
    monkeypatch.setattr(pipeline_module, "available_cores", lambda: 16)
    made = make(photos, resident="always", augment="")
    assert made.pipeline.resident("train") is not None
    arrays = modelyard.ArrayDataset({"train": {"image": np.zeros((99, 3), np.float32), "label": np.arange(99) % 2}})
    make(arrays, augment="").batches(0, 2)


@pytest.mark.parametrize(
    ("cores", "options", "expected"),
    [
        (2, {}, 0), (3, {}, 0), (4, {}, 4), (16, {}, 16), (16, {"threads": 3}, 0), (16, {"threads": 8}, 8),
        (16, {"input_threads": 4}, 0), (2, {"input_workers": 3}, 3), (16, {"input_workers": 0}, 0),
    ],
)  # fmt: skip
def test_the_number_of_workers(
    photos: Path, monkeypatch: pytest.MonkeyPatch, cores: int, options: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(pipeline_module, "available_cores", lambda: cores)
    made = Made(photos, **OPTIONS, **options)
    assert pipeline_module.input_workers(made.config, made.dataset) == expected
    if "input_workers" not in options:  # code of a user may need what only this process has
        assert pipeline_module.input_workers(made.config, Numbers()) == 0


PLUGIN = """
import os
import sys
import keras
import numpy as np
import modelyard


class Told(modelyard.Dataset):
    classes = ("a", "b")
    features = {"image": modelyard.Feature((3,), "float32"), "label": modelyard.Feature((), "int32")}

    def sizes(self):
        return {"train": 40}

    def fingerprint(self):
        return ""

    def read(self, split, indices):
        engines = "tensorflow" in sys.modules or len(os.listdir("/proc/self/task")) > 2
        image = np.stack([indices, indices * 0 + engines, indices * 0 + os.getpid()], 1)
        return {"image": image.astype(np.float32), "label": (indices % 2).astype(np.int32)}


@modelyard.register_dataset("told")
def told(options, context):
    return Told()


@modelyard.register_preprocessing("doubled")
class Doubled:
    def __init__(self, options):
        pass

    def example(self, example, training):
        return {**example, "image": example["image"] * np.float32([2, 1, 1])}
"""


def test_plugins_are_imported_in_workers_without_an_engine(make: Any, tmp_path: Path) -> None:
    Path("mine.py").write_text(PLUGIN)
    config = {"plugins": ["mine.py"], "preprocess": "doubled", "augment": "", "image_size": None}
    made = make("told", input_workers=2, **config)
    found = made.batches(0, 5)["image"]
    expected = made.dataset.read("train", made.pipeline.rows(0, 5).reshape(-1))["image"]
    assert np.array_equal(found[:, 0], expected[:, 0])
    assert set(found[:, 1]) == {0.0}, "no engine runs there"
    assert set(found[:, 2].astype(int)) <= {np.float32(pid).astype(int) for pid in workers_of(made)}


RUN = """
import sys
from modelyard.config import load_config
from modelyard.config.durations import RunLength
from modelyard.data.open_dataset import load_dataset
from modelyard.data.pipeline import Pipeline

if __name__ == "__main__":
    config = load_config(
        model="mlp", dataset=sys.argv[1], image_size=12, augment="random_resized_crop", resident="never",
        input_workers=3, train_batch_size=8,
    )
    dataset = load_dataset(config)
    pipeline = Pipeline(config, dataset, RunLength(dataset.size("train"), 8, 10))
    step = 0
    while True:
        with pipeline.training(step, 1):
            step += 1
        if step == 5:
            print(*pipeline._workers.pids(), flush=True)
"""


def test_a_run_that_is_killed_leaves_no_process_and_no_shared_memory(photos: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, str(script), str(photos)],
            stdout=subprocess.PIPE,
            env=environment(PYTHONPATH=os.pathsep.join(sys.path)),
            text=True,
        )
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        template = psutil.Process(pids[0]).ppid()
        process.send_signal(number)
        assert process.wait() == -number
        for pid in (template, *pids):
            wait_until(lambda: is_gone(pid), "the end of a worker")  # noqa: B023
    assert (set(shared.iterdir()) if shared.is_dir() else set()) - before == set()


HANGING = """
import threading
from modelyard.data.input_workers import InputWorkers, SharedArrays
from modelyard.data.batch_reader import BatchReader, SplitRows
from modelyard.data.order import Order
import numpy as np, sys
from test_input_workers import Stopping

dataset = Stopping()
workers = InputWorkers(BatchReader(dataset, Order(0, 64), 8, np.arange(8), None), 1)
workers.read(SharedArrays(dataset.features, 8), 0, 8, SplitRows("train", np.arange(8)))
"""


def test_a_worker_that_hangs_ends_with_the_run() -> None:
    tests = Path(__file__).parent
    folders = os.pathsep.join([str(tests), str(tests.parent), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", HANGING], env=environment(PYTHONPATH=folders))
    pid = int(wait_until(lambda: Path("reading").exists() and Path("reading").read_text().strip(), "it", process))
    process.kill()
    process.wait()
    wait_until(lambda: is_gone(pid), "the end of the worker")


def test_closing_ends_the_processes(make: Any, photos: Path) -> None:
    made = make(photos, input_workers=2)
    made.batches(0, 2)
    pids = workers_of(made)
    made.pipeline.close()
    for pid in pids:
        wait_until(lambda: is_gone(pid), "the end of a worker")  # noqa: B023
    made.batches(3, 5)  # and it can be used again
