"""Cells as tasks of a Ray cluster. A task runs the command of its cell as a process on its node.

The folder of the matrix must be at the same path on all nodes: runs, configs and logs are there, as on one machine. A
cell whose node is lost is started again elsewhere and goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modelyard import __version__
from modelyard.comparison.executor import GPU_SHARING, CellJob, RunningCell, Slot
from modelyard.errors import UserError
from modelyard.launcher.processes import HOST, Process, ProcessSpec, Tail
from modelyard.system.activity import Activity
from modelyard.system.files import explain, write_text
from modelyard.system.machine import available_cores
from modelyard.system.network import join_address, split_address

ADDRESS = "RAY_ADDRESS"
_MARKER = ".seen-by-nodes"
_PASSED_ON = ("MODELYARD_", "TF_", "XLA_", "JAX_")
"""Environment variables of this process that the cells get, too."""
_CONNECT_SECONDS, _POLL_SECONDS = 10.0, 0.2
_FAILED = 1
log = logging.getLogger("modelyard")


def import_ray() -> Any:
    """Imports Ray, which then sends no statistics of its use.

    Raises:
        UserError: if it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it prints advice on that
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."  # Ray writes its own log to standard output
    try:
        import ray
    except ImportError as error:
        raise UserError("--on ray needs Ray. Install it: pip install 'modelyard[ray]'") from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connects to a cluster: at ``address``, else an existing one of this machine, else a new one of this machine.

    Raises:
        UserError: if it can't be reached.
    """
    ray = import_ray()
    settings = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    logging.getLogger("ray").setLevel(logging.ERROR)
    wanted = address or os.environ.get(ADDRESS) or "auto"
    if wanted not in ("auto", "local"):
        _check_reachable(ray, wanted)
    elif wanted == "auto":
        wanted = _cluster_here() or "local"
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if wanted != "local":
            ray.init(address=wanted, **settings)
        else:
            log.info("there is no Ray cluster on this machine, so one is started")
            # All of it is on loopback.
            ray.init(
                address="local", num_cpus=available_cores(), include_dashboard=False, _node_ip_address=HOST, **settings
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        ray.shutdown()
        raise UserError(f"can't connect to the Ray cluster {wanted}: {str(error).strip().splitlines()[0]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray sets its own
            for number, handler in before.items():
                signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(ray: Any, address: str) -> None:
    """Raises if nothing listens at an address: Ray would try for minutes."""
    is_client = address.startswith("ray://")
    try:
        host, port = split_address(address.removeprefix("ray://"))
    except ValueError as error:
        raise UserError(
            f"{address} is not the address of a Ray cluster, such as head:6379 or ray://head:10001."
        ) from error
    if not is_client and host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray does
    reason = _why_unreachable(host, port)
    if reason:
        raise UserError(
            f"can't connect to the Ray cluster {address}: {join_address(host, port)}: {reason}. On its head node, "
            "`ray status` says whether it runs."
        )


def _why_unreachable(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _cluster_here() -> str | None:
    """Returns the address of the cluster that this machine is part of, if it runs."""
    try:  # `ray start` writes it
        address = (
            Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
        )
        host, port = split_address(address)
    except (OSError, ValueError):
        return None
    return None if _why_unreachable(host, port) else address


def room(ray: Any, jobs: int | None, threads: int) -> list[Slot]:
    """Returns the room for cells in a cluster.

    Args:
        ray: Ray.
        jobs: the number of cells at a time; None for as many as there is room for.
        threads: the option threads; 0 to divide the cores.
    """
    nodes = _nodes(ray)
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    if jobs is None and gpus:
        jobs = int(gpus)
    elif jobs is None:
        jobs = sum(int(node.get("CPU", 0) // max(threads, 1)) for node in nodes)
    jobs = max(jobs, 1)
    largest = max((node.get("CPU", 0) for node in nodes), default=1)
    share = threads or max(1, int(min(cpus // jobs, largest)))
    return [Slot({}, share)] * jobs


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class RayTasks:
    """Runs each cell as a task.

    Args:
        ray: Ray, connected to a cluster.
        program: the program of the user that runs the command of a cell; None for Modelyard.
        folder: the folder of the matrix.
        jobs: how many cells run at a time.
    """

    def __init__(self, ray: Any, program: Sequence[str] | None, folder: Path, jobs: int) -> None:
        self._ray, self._folder, self._jobs = ray, folder.absolute(), jobs
        # The Python of a node may be elsewhere.
        self._program = ["-m", "modelyard"] if program is None else list(program)[1:]
        self._mark = secrets.token_hex(16)
        write_text(self._folder / _MARKER, self._mark)

    def start(self, job: CellJob, ended: Callable[[RunningCell], None]) -> RunningCell:
        """Starts a task, which waits until a node has room for it."""
        nodes = _nodes(self._ray)
        most = max((node.get("CPU", 0) for node in nodes), default=1)
        gpus = self._gpus(job, nodes)
        environ = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
        environ |= GPU_SHARING if 0 < gpus < 1 else {}
        # One that is lost is not started again by Ray, but by the scheduler, which counts.
        task = self._ray.remote(run_on_node).options(
            num_cpus=min(job.threads, most), num_gpus=gpus, max_retries=0, name=f"modelyard {job.name}"
        )
        words = (*self._program, *job.words)
        reference = task.remote(
            job.name,
            words,
            environ,
            str(Path.cwd()),
            str(self._folder),
            str(job.logs.absolute()),
            self._mark,
            __version__,
        )
        return _Task(self._ray, reference, job, ended)

    def close(self) -> None:
        """Removes the file by which nodes know the folder."""
        (self._folder / _MARKER).unlink(missing_ok=True)

    def _gpus(self, job: CellJob, nodes: Iterable[dict[str, float]]) -> float:
        """Returns how many GPUs a cell gets; if there are fewer than cells, they are shared."""
        counts = [node.get("GPU", 0) for node in nodes]
        wanted = job.config.num_gpus
        if wanted == "all":
            return max(counts, default=0)
        if wanted != "auto":
            return wanted
        total = sum(counts)
        return 0 if not total else 1 if total >= self._jobs else int(total / self._jobs * 1000) / 1000


class _Task:
    """A cell that runs on a node, or waits for one."""

    def __init__(self, ray: Any, reference: Any, job: CellJob, ended: Callable[[RunningCell], None]) -> None:
        self.name = job.name
        self.activity = Activity("on a node")
        self.why_lost = ""
        self._ray, self._reference, self._ended = ray, reference, ended
        self._log = job.logs / f"{job.name}.log"
        with explain(self._log, "write"):
            self._log.touch()
            self._tail = Tail(self._log)
        self._status: int | None = None
        threading.Thread(target=self._wait, daemon=True, name=f"wait for {job.name}").start()

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log that were read."""
        return list(self._tail.last)

    def _wait(self) -> None:
        errors = self._ray.exceptions
        try:
            status, message = self._ray.get(self._reference)
            self._note(message)
            self._status = status
        except errors.TaskCancelledError:
            self._status = -signal.SIGTERM
        except errors.OutOfMemoryError:  # Ray's own guard of the memory of a node
            self._status = -signal.SIGKILL
        except (errors.NodeDiedError, errors.WorkerCrashedError, errors.LocalRayletDiedError) as error:
            self.why_lost = type(error).__name__  # the cell is a process of its own, so it is not the cause
            self._status = -signal.SIGKILL
        except errors.RayError as error:
            log.debug("the task of %s failed", self.name, exc_info=error)
            self._note(f"its task failed: {' '.join(str(error).split())[-400:]}")
            self._status = _FAILED
        self._ended(self)

    def _note(self, message: str) -> None:
        """Writes why it was not started to its log."""
        if message:
            with suppress(OSError), open(self._log, "a", encoding="utf-8") as file:
                file.write(f"error: {message}\n")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process of the cell; one that waits for a node does not start."""
        if self._status is None:
            self._ray.cancel(self._reference, force=number == signal.SIGKILL)

    def read_log(self) -> list[str]:
        """Returns the new lines of its log."""
        return self._tail.read(final=self._status is not None)

    def reap(self) -> int:
        """Returns its exit status, or minus a signal."""
        assert self._status is not None
        return self._status


def run_on_node(
    name: str, words: Sequence[str], environ: dict[str, str], cwd: str, folder: str, logs: str, mark: str, version: str
) -> tuple[int, str]:
    """Runs a cell as a process of this node. Runs in a task of Ray.

    Returns:
        Its exit status or minus a signal, and why it was not started, if it was not.
    """
    host = socket.gethostname()
    try:
        seen = (Path(folder) / _MARKER).read_text(encoding="utf-8")
        os.chdir(cwd)
    except OSError as error:
        seen = f"{error.strerror}: {error.filename}"
    if seen != mark:
        return _FAILED, (
            f"the node {host} does not see {folder} ({seen if ':' in seen else 'it is another folder there'}). With "
            "--on ray, --output must be in a folder that all nodes share, at the same path, and so must this folder."
        )
    if version != __version__:
        return _FAILED, f"the node {host} has Modelyard {__version__}, not {version}. Install the same on all nodes."
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it, which would change the last digits
    has_ended = threading.Event()
    process = Process(ProcessSpec(name, (sys.executable, *words), environ), Path(logs), lambda _: has_ended.set())
    try:
        while not has_ended.is_set():
            try:
                has_ended.wait(_POLL_SECONDS)
            except KeyboardInterrupt:  # the task is cancelled: the cell saves and exits
                process.signal(signal.SIGTERM)
    except BaseException:
        process.signal(signal.SIGKILL)
        raise
    return process.reap(), ""
