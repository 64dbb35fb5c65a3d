"""The run folder: names of files, lock, config. No other module knows the names."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from modelyard import storage
from modelyard.config.schema import Config, is_mutable, is_path
from modelyard.config.yaml_file import CONFIG_VERSION, RUN_CONFIG_KEY, dump, inline, read_set
from modelyard.errors import CheckpointError, ConfigError, DamagedConfigError, Interrupted, Problem, RunError
from modelyard.run.checkpoint import DAMAGED, list_checkpoints, read_loop_state
from modelyard.run.integrity import is_unchanged, with_checksum
from modelyard.run.metrics import read_metrics
from modelyard.system.files import PARTIAL, explain, remove_partial, write_text
from modelyard.system.untrusted import read_regular

if TYPE_CHECKING:
    from modelyard.run.mirror import Mirror

CONFIG, MANIFEST, METRICS, MARK = "config.yaml", "manifest.json", "metrics.jsonl", ".cluster"
SPLITS = "splits.csv"
LOCK, EVALUATION_LOCK = ".lock", ".lock-evaluation"
"""Held by the process that trains and writes, and by the process that evaluates and keeps the best models."""
EVENTS, CHECKPOINTS, BEST, LOGS, PROFILE, EVALUATOR, EXPORT, EXAMPLES, TRACKERS = (
    "events", "checkpoints", "best", "runlogs", "profile", "evaluator", "export", "examples", "trackers",
)  # fmt: skip
JOURNAL = "training_log.md"
"""The journal is beside the run folders."""
BIN = ".bin"
"""Runs that were deleted in the dashboard, in a folder beside the others."""
_NOT_IN_CONFIG = (
    "model_dir", "resume", "config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "pause_at",
)  # fmt: skip
"""Options that say where a run is, how its config was found, and how far this start trains."""
CONFIG_COPY = "config"
"""The copy of the options of a run in the state of the loop in every checkpoint."""
_SHOWN_PROBLEMS = 8
LARGEST_JSON = 64 << 20
_LOCK_SECONDS = 0.5
"""`is_running` holds the lock for a moment."""

log = logging.getLogger("modelyard")


class RunDirectory:
    """Paths in a run folder, and the lock that makes this process its only writer.

    Args:
        path: the run folder.
        best: the folder of the best models, if it is not in the run folder.
        mirror: uploads the run folder, if the run is on an object store.
    """

    def __init__(self, path: Path, best: Path | None = None, mirror: Mirror | None = None) -> None:
        self.path = path
        self.name = path.name
        self.mirror = mirror
        self.config = path / CONFIG
        self.manifest = path / MANIFEST
        self.metrics = path / METRICS
        self.events = path / EVENTS
        self.checkpoints = path / CHECKPOINTS
        self.best = best if best is not None else path / BEST
        self.logs = path / LOGS
        self.profile = path / PROFILE
        self.mark = path / MARK
        self.splits = path / SPLITS
        self.evaluations = path / EVALUATOR / METRICS
        self.examples = path / EXAMPLES
        self.trackers = path / TRACKERS
        self.journal = path.parent / JOURNAL
        self._lock: TextIO | None = None
        self._place: os.stat_result | None = None
        self._evaluation_lock: TextIO | None = None

    def of_evaluator(self) -> RunDirectory:
        """The same folder for an evaluator process, which has its own metrics and events."""
        own = RunDirectory(self.path, self.best, self.mirror)
        own.metrics, own.events = self.evaluations, self.path / EVALUATOR / EVENTS
        own.examples = self.path / EVALUATOR / EXAMPLES
        with explain(own.metrics.parent, "make the folder"):
            for folder in (own.metrics.parent, own.best):
                folder.mkdir(parents=True, exist_ok=True)
            own._place = self.path.stat()
        return own

    def evaluations_of(self, split: str) -> list[dict[str, Any]]:
        """The rows of a split, of the process that trains and of an evaluator."""
        files = (self.path / METRICS, self.evaluations)
        return [row for file in files for row in read_metrics(file) if row.get("split") == split]

    @property
    def all_examples(self) -> tuple[Path, Path]:
        """The folders with values of examples, of the process that trains and of an evaluator."""
        return self.path / EXAMPLES, self.path / EVALUATOR / EXAMPLES

    def export(self, form: str) -> Path:
        """The folder of the exports of a format. TensorFlow Serving reads that of SavedModels."""
        return self.path / (EXPORT if form == "saved_model" else f"{EXPORT}-{form}")

    @property
    def address(self) -> str:
        """The run's path, or its URL."""
        return self.address_of(self.path)

    def address_of(self, path: Path) -> str:
        """A path in the folder, or its URL."""
        return str(path) if self.mirror is None else self.mirror.address(path)

    def exists(self) -> bool:
        """Whether the folder has a run."""
        if self.mirror is not None and not self.mirror.fetched:
            return self.mirror.exists()
        return self.config.is_file()

    def push(self, keep_checkpoints: int | None = None) -> None:
        """Uploads what changed, if the run is on an object store. Called while training continues."""
        if self.mirror is not None:
            self.mirror.push(keep_checkpoints)

    def refresh(self, now: bool = False) -> None:
        """Fetches what the process that trains has saved, if the run is on an object store. For evaluators.

        Args:
            now: look at once; by default, at most every few seconds.
        """
        if self.mirror is not None:
            self.mirror.refresh(now)

    def download_weights(self, path: Path) -> None:
        """Downloads the weights of a checkpoint, if the run is on an object store."""
        if self.mirror is not None:
            self.mirror.download_weights(path)

    def create(self) -> None:
        """Creates the folder and the folders in it."""
        with explain(self.path, "make the run folder"):
            for folder in (self.path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)

    def unexpected_files(self) -> list[str]:
        """Files in the folder that do not come from an earlier start that failed."""
        if self.mirror is not None and not self.mirror.fetched:
            return self.mirror.unexpected_files()
        if not self.path.is_dir():
            return []
        ours = (LOCK, EVALUATION_LOCK, MARK, self.logs.name, self.checkpoints.name)
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if name not in ours and not name.startswith(PARTIAL)]

    def start_over(self) -> None:
        """Removes the files of a start that trained nothing."""
        with explain(self.path, "clear"):
            for path in (self.checkpoints, self.events, self.evaluations.parent, self.examples, self.trackers):
                shutil.rmtree(path, ignore_errors=True)
            for path in (self.config, self.manifest, self.metrics, self.splits):
                path.unlink(missing_ok=True)
        self.create()

    def lock(self) -> None:
        """Makes this process the only writer.

        Raises:
            RunError: if another process holds the folder.
        """
        self._check_own_files()
        deadline = time.monotonic() + _LOCK_SECONDS
        while (file := self._try_lock(LOCK)) is None:
            if time.monotonic() > deadline:
                holder = self._holder(LOCK) or "another process"
                raise RunError(
                    f"{self.address} is in use by {holder}. Wait for it to end, stop it, or name another --model_dir."
                )
            time.sleep(0.05)
        self._lock, self._place = file, self.path.stat()
        for folder in (self.path, self.checkpoints):
            remove_partial(folder)
        if self.mirror is not None:
            try:
                self.mirror.open()
            except BaseException:
                self._let_go()
                raise

    def _check_own_files(self) -> None:
        """Checks that what is appended to and cut is in this folder: a stranger's links may lead to the user's files.

        Raises:
            RunError: if there is a link or a pipe. Checkpoints may be elsewhere: only whole ones are written.
        """
        files = [self.path / name for name in (LOCK, EVALUATION_LOCK)] + [self.config, self.manifest, self.metrics]
        files.append(self.trackers)  # in it, W&B makes links of its own
        folders = [self.events, self.logs, self.evaluations.parent, self.examples]
        with explain(self.path, "read"):
            check_own_files(
                [*files, *folders, *(inside for folder in folders for inside in folder.rglob("*"))], "a run"
            )

    def is_in_place(self) -> bool:
        """Whether the folder at the path is still the one that this process opened to write."""
        if self._place is None:
            return True
        try:
            if self._lock is not None:
                with contextlib.suppress(FileNotFoundError):  # the lock alone may have been removed
                    return os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.fileno()))
            return os.path.samestat(self.path.stat(), self._place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a network disk may be away for a moment
            return True

    def check_in_place(self) -> None:
        """Checks before a write, which would make a new folder with a part of the run.

        Raises:
            RunError: if the folder was removed, renamed or replaced.
        """
        if not self.is_in_place():
            raise RunError(
                f"{self.path} was removed, renamed or replaced while this run was writing to it. Nothing more was "
                "written there. If it was renamed, resume the run by its new name."
            )

    def take_evaluation(self) -> bool:
        """Makes this process the one that evaluates and keeps the best models; False if another one is."""
        if self.mirror is not None:
            return self.mirror.take_evaluation()
        if self._evaluation_lock is None:
            self._evaluation_lock = self._try_lock(EVALUATION_LOCK)
        return self._evaluation_lock is not None

    def who_evaluates(self) -> str:
        """The process that evaluates, for messages."""
        holder = self._holder(EVALUATION_LOCK) if self.mirror is None else self.mirror.who_evaluates()
        return holder or "another process"

    def _try_lock(self, name: str) -> TextIO | None:
        """Opens and locks a file in the folder; None if another process holds it."""
        with explain(self.path, "write to"):
            file = open(self.path / name, "a+", encoding="utf-8")  # noqa: SIM115 - held until unlock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            raise RunError(f"{self.path} can't be locked: {error.strerror}.") from error
        try:
            with explain(self.path, "write to"):
                # Without a buffer: on a full disk, it would fail again when the file is closed.
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        except RunError:
            file.close()
            raise
        return file

    def _holder(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.path / name).read_text(encoding="utf-8").strip()
        return ""

    def unlock(self, failed: bool = False) -> None:
        """Lets others write.

        Args:
            failed: another error is being raised; it is not replaced by one of the last upload.
        """
        try:
            if self.mirror is not None:
                self.mirror.close(failed)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for file in (self._lock, self._evaluation_lock):
            if file is not None:
                file.close()
        self._lock = self._evaluation_lock = None

    def __enter__(self) -> RunDirectory:
        self.lock()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        # After an interrupt the user believes that everything is saved, so a failed upload is reported.
        self.unlock(failed=error is not None and not isinstance(error, Interrupted))


def new_run_path(config: Config, now: datetime | None = None) -> Path | str:
    """The folder or URL of a run: model_dir, or a new folder, created now and named by time, model and dataset."""
    if config.model_dir is not None:
        return config.model_dir if storage.is_remote(config.model_dir) else Path(config.model_dir).expanduser()
    dataset = Path(config.dataset).stem if is_path(config.dataset) else config.dataset
    dataset = re.sub(r"[^\w.+=,@-]+", "_", dataset).strip("_") or "dataset"
    name = config.run_name or f"{config.model}-{dataset}"
    if not re.fullmatch(r"[\w][\w.+=,@-]*", name):
        message = f"{name!r} must be made of letters, digits and . + = , @ - _"
        raise ConfigError([Problem(config.origin("run_name"), "run_name", message)])
    first = f"{(now or datetime.now()).strftime('%Y-%m-%d-%H_%M_%S')}-{name}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    if storage.is_remote(config.runs_dir):
        urls = (storage.join(config.runs_dir, name) for name in names)
        return next(url for url in urls if not storage.exists(url))
    folder = Path(config.runs_dir).expanduser()
    with explain(folder, "make a run folder in"):
        folder.mkdir(parents=True, exist_ok=True)
        return next(folder / name for name in names if _make_new(folder / name))


def _make_new(path: Path) -> bool:
    """Creates the folder; False if it exists: two runs may start at the same moment."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def run_folder(config: Config) -> RunDirectory:
    """Returns the folder of the run with this config, which may not exist yet."""
    address = new_run_path(config)
    if not isinstance(address, Path):
        return remote_run_folder(address, storage.cache_folder(config.cache_dir))
    best = Path(config.best_model_dir).expanduser().absolute() if config.best_model_dir else None
    return RunDirectory(address, best)


def remote_run_folder(url: str, cache: Path) -> RunDirectory:
    """A run folder on an object store, to train in. The run works in a folder of the cache."""
    from modelyard.run.mirror import Mirror, working_folder

    folder = working_folder(url, cache)
    return RunDirectory(folder, mirror=Mirror(url, folder, cache))


def evaluated_run_folder(config: Config) -> RunDirectory:
    """The run folder for an evaluator. If it is at a URL, the evaluator has a local folder of its own."""
    address = config.model_dir
    if address is None or not storage.is_remote(address):
        return run_folder(config)
    from modelyard.run.mirror import Mirror, working_folder

    cache = storage.cache_folder(config.cache_dir)
    folder = working_folder(address, cache, EVALUATOR)
    return RunDirectory(folder, mirror=Mirror(address, folder, cache, evaluator=True))


def open_run_folder(path: str | Path, cache_dir: str | None = None, runs_dir: str = "runs") -> RunDirectory:
    """Opens an existing run to read it.

    Args:
        path: its folder, its name in ``runs_dir``, or its URL on an object store.
        cache_dir: the folder for copies of remote files; None is the default.
        runs_dir: the folder of runs, or its URL.

    Raises:
        RunError: if ``path`` is not a run folder.
        ConfigError: if its config is damaged.
    """
    directory = find_run_folder(path, cache_dir, runs_dir)
    options = run_options(directory)
    if directory.mirror is not None:
        return directory
    best = options.get("best_model_dir")
    return RunDirectory(directory.path, Path(str(best)).expanduser() if best else None)


def find_run_folder(path: str | Path, cache_dir: str | None = None, runs_dir: str = "runs") -> RunDirectory:
    """Finds an existing run like `open_run_folder`, without reading its config."""
    if isinstance(path, str) and storage.is_remote(path):
        return _open_remote(path, cache_dir)
    directory = RunDirectory(Path(path).expanduser())
    with explain(directory.path, "read"):
        if not _is_run(directory):  # `modelyard runs` shows names; a folder here may have one of them
            if storage.is_remote(runs_dir) and storage.exists(storage.join(runs_dir, str(path), CONFIG)):
                return _open_remote(storage.join(runs_dir, str(path)), cache_dir)
            named = RunDirectory(Path(runs_dir).expanduser() / path)
            directory = named if named.exists() else directory
        if not _is_run(directory):
            what = f"is not a run folder: it has no {CONFIG}" if directory.path.is_dir() else "does not exist"
            raise RunError(f"{path} {what}. {_hint(directory.path)}")
    return directory


def _is_run(directory: RunDirectory) -> bool:
    return directory.exists() or bool(list_checkpoints(directory.checkpoints))


def _hint(folder: Path) -> str:
    """The hint for a folder that is not a run: it may be an export."""
    files = ("modelyard.json", "saved_model.pb")
    if any((path / name).is_file() for path in (folder, *folder.glob("[0-9]*")) for name in files):
        return (
            "It looks like an export. `predict` and `serve --export` accept complete SavedModels "
            "(saved_model.pb, modelyard.json, variables). Other commands need the run."
        )
    return "`modelyard runs` lists the runs."


def _open_remote(url: str, cache_dir: str | None) -> RunDirectory:
    from modelyard.run.mirror import open_mirror

    mirror = open_mirror(url, storage.cache_folder(cache_dir))
    directory = RunDirectory(mirror.folder, mirror=mirror)
    if not directory.config.is_file():
        raise RunError(f"{url} is not a run folder: it has no {CONFIG}. `modelyard runs --runs_dir …` lists the runs.")
    return directory


def run_options(directory: RunDirectory) -> dict[str, Any]:
    """The options in the config.yaml of a run.

    Raises:
        DamagedConfigError: if the file is not as the run wrote it.
    """
    problems: list[Problem] = []
    values = read_set(directory.config, None, problems)
    options = {key: value.value for key, value in values.items() if key != RUN_CONFIG_KEY}
    # Also a file that ends in its first lines, which are comments.
    if problems or RUN_CONFIG_KEY not in values or not is_unchanged(directory.config.read_text(encoding="utf-8")):
        raise _damaged_config(directory, options, problems)
    return options


def _damaged_config(directory: RunDirectory, options: Mapping[str, Any], problems: list[Problem]) -> ConfigError:
    """Says what differs from the copy in the newest checkpoint, and how to go on."""
    file, run = directory.address_of(directory.config), shlex.quote(directory.address)
    copy = find_config_copy(directory)
    if copy is not None and not problems:
        where, there = copy
        for key in {**there, **options}:
            here, was = (inline(some[key]) if key in some else "missing" for some in (options, there))
            if here != was:
                problems.append(Problem(file, key, f"is {here}; {was} in {where}."))
        more = len(problems) - _SHOWN_PROBLEMS
        if more > 0:
            problems[_SHOWN_PROBLEMS:] = [Problem(file, "", f"and {more} more options.")]
    if not problems:
        problems.append(Problem(file, "", "its last line, the checksum of the others, is missing or does not fit."))
    error = DamagedConfigError(problems)
    if copy is None:
        error.add_hint(f"Restore {file} from a copy.")
    else:
        error.add_hint(f"To restore it as it is in {copy[0]}: modelyard resume {run} --restore_config")
    if options:
        error.add_hint(f"To change an option, give it to the command: modelyard resume {run} --train_steps 1000")
        error.add_hint("To keep the file as it is, delete its lines that begin with #.")
    return error


def find_config_copy(directory: RunDirectory) -> tuple[str, dict[str, Any]] | None:
    """Returns the copy of the config in the newest checkpoint that can be read, and the name of that checkpoint."""
    for folder in (directory.checkpoints, directory.best):
        for path in reversed(list_checkpoints(folder).values()):
            with contextlib.suppress(CheckpointError):
                copy = read_loop_state(path).get(CONFIG_COPY)
                return (f"{folder.name}/{path.name}", copy) if copy else None
    return None


def restore_config(directory: RunDirectory) -> None:
    """Writes config.yaml as it is in the newest checkpoint. The file that was there is kept as ``damaged-config.yaml``.

    Raises:
        RunError: if there is no copy, or a process writes to the folder.
    """
    copy = find_config_copy(directory)
    if copy is None:
        raise RunError(f"no checkpoint in {directory.address} has a copy of {CONFIG}. Restore it from elsewhere.")
    if is_running(directory):
        raise RunError(f"{directory.address} is in use. Wait for the process that writes to it, or stop it.")
    aside = directory.path / f"{DAMAGED}{CONFIG}"
    with explain(aside, "write"):
        if directory.config.exists():
            aside.write_bytes(directory.config.read_bytes())
    _write_options(directory, copy[1])
    if directory.mirror is not None:
        for path in (aside, directory.config):
            storage.write_bytes(directory.address_of(path), path.read_bytes())
    log.info("%s was restored from %s", directory.address_of(directory.config), copy[0])


def recorded_options(config: Config) -> dict[str, Any]:
    """The options that a run records: all but those that say where it is and how its config was found."""
    return {key: value for key, value in config.flat().items() if key not in _NOT_IN_CONFIG}


def config_text(config: Config) -> str:
    """The resolved config as the text of config.yaml."""
    return _options_text(recorded_options(config))


def _options_text(options: Mapping[str, Any]) -> str:
    return (
        "# The complete config of this run. `modelyard train-and-evaluate --config_file` with this file\n"
        "# starts a new run like it. `modelyard resume` with the folder resumes this one.\n"
        f"{RUN_CONFIG_KEY}: {CONFIG_VERSION}\n{dump(dict(options))}"
    )


def write_config(directory: RunDirectory, config: Config) -> None:
    """Writes config.yaml with its checksum."""
    _write_options(directory, recorded_options(config))


def _write_options(directory: RunDirectory, options: Mapping[str, Any]) -> None:
    write_text(directory.config, with_checksum(_options_text(options)))


def differences(recorded: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any, bool]]:
    """The differences of ``config`` from the options of a run: (option, there, here, whether it may change)."""
    there = {**config.defaults(), **recorded}  # an option may be newer than the run
    here = config.flat()
    paths = path_options(config)
    return [
        (key, there.get(key), here.get(key), is_mutable(key) or _is_moved(key, there.get(key), here.get(key), paths))
        for key in sorted((set(there) | set(here)) - set(_NOT_IN_CONFIG))
        if there.get(key) != here.get(key)
    ]


def path_options(config: Config) -> set[str]:
    """Options of the chosen dataset and model that name files. Some may be set to a keyword instead."""
    found = set()
    for part in ("dataset", "model"):
        for key, field in config.entry(part).options.model_fields.items():
            extra: Any = field.json_schema_extra
            is_path_option = isinstance(extra, dict) and extra.get("path")
            if is_path_option and config.component_options.get(key) not in extra.get("words", ()):
                found.add(key)
    return found


def _is_moved(key: str, there: Any, here: Any, paths: set[str]) -> bool:
    """Whether two values name files in two folders: data may move, and its fingerprint is checked."""
    if not isinstance(there, str) or not isinstance(here, str):
        return False
    return key in paths or (key == "dataset" and is_path(there) and is_path(here))


def find_runs(folder: Path | str) -> list[RunDirectory]:
    """All runs in ``folder``, which may be a URL, by name."""
    if isinstance(folder, str) and storage.is_remote(folder):
        configs = storage.list_files(storage.join(folder, "*", CONFIG))
        return [_open_remote(storage.parent(config), None) for config in configs]
    folder = Path(folder)
    if not folder.is_dir():
        return []
    with explain(folder, "read"):
        runs = [RunDirectory(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [run for run in runs if _exists(run)]


def _exists(run: RunDirectory) -> bool:
    try:
        return run.exists()
    except PermissionError:  # somebody else's folder
        log.warning("%s is skipped: it can't be read", run.path)
        return False


def is_running(directory: RunDirectory) -> bool:
    """Whether a process holds the folder now."""
    if directory.mirror is not None:
        return directory.mirror.is_held()
    with contextlib.suppress(OSError), open(directory.path / LOCK, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_own_files(paths: Iterable[Path], owner: str) -> None:
    """Checks that files and folders are in their place, those that exist.

    Args:
        paths: the files, which are appended to or cut.
        owner: what they are of, for the message.

    Raises:
        RunError: if there is a link or a pipe.
    """
    for path in paths:
        if not path.is_symlink() and (not path.exists() or path.is_file() or path.is_dir()):
            continue
        what = f"a link to {path.resolve()}" if path.is_symlink() else "no regular file"
        raise RunError(
            f"{path} is {what}, and {owner} writes to files of its own folder only. Put a copy of the file in its "
            "place, or remove it."
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the run folder; empty if it is missing or unreadable."""
    try:
        value = json.loads(read_regular(path, LARGEST_JSON, RunError))
    except (OSError, RunError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
