"""Processes that read, decode and crop examples into memory that they share with the run.

Decoding holds Python's lock for a part of its time, so the threads of one process stop being faster at about eight.
Here each core has a process. What a batch holds is arithmetic (`batch_reader.py`): it does not depend on which process
reads it, or on whether one was killed and its part was read again.

    run ── socket ──► template      imports NumPy and the decoders, unpickles the reader; starts no engine
     │                   │ fork     for each worker, and again for one that was killed
     ├── socket ──► worker ─┐
     └── socket ──► worker ─┴──► shared memory, which has no name: it ends with the processes, also after SIGKILL

The processes end when their socket is closed, which the system does for a run that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import io
import itertools
import json
import logging
import mmap
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.batch_reader import BatchReader, Request
from modelyard.data.dataset import Feature
from modelyard.errors import DataError, UserError

log = logging.getLogger("modelyard")

MOST_BYTES = 256 << 20
"""A larger dataset is not copied to another process: its examples are in memory already, where threads read them."""
_TRIES = 3
_UNKNOWN = -1
_ALIGNMENT = 64
_PLUGIN = "modelyard_plugin_"
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from modelyard.data.input_workers import main; main()"


_Answer = tuple[tuple[Exception, OSError | None] | None, list[logging.LogRecord]]


class CannotShareError(Exception):
    """The dataset can't be used in another process, or there is no shared memory. Says why."""


class SharedArrays:
    """Uninitialized arrays in memory without a name, for ``count`` examples.

    Args:
        features: shape and type of each array of an example.
        count: the number of examples.

    Raises:
        CannotShareError: if there is not enough memory.
    """

    _numbers = itertools.count()

    def __init__(self, features: Mapping[str, Feature], count: int) -> None:
        self.number = next(self._numbers)
        self.features, self.count = dict(features), count
        size = _places(self.features, count)[1]
        try:
            self.file = _unnamed_file()
            weakref.finalize(self, os.close, self.file)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file, 0, size)  # an error here, and not a bus error when it is written
            else:
                os.ftruncate(self.file, size)
            self.arrays = _map(self.file, self.features, count)
        except (OSError, ValueError, MemoryError) as error:
            raise CannotShareError(f"there is no shared memory of {size / 2**20:,.0f} MiB ({error})") from error


class InputWorkers:
    """Worker processes that read.

    Args:
        reader: what they read with.
        count: the number of processes.

    Raises:
        CannotShareError: if the reader can't be used in another process.
    """

    def __init__(self, reader: BatchReader, count: int) -> None:
        self.count, self._reader, self._payload = count, reader, _pickled(reader)
        self._template: _Template | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(number) for number in range(count)]
        for worker in self._workers:
            self._free.put(worker)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        _open_workers.add(self)

    def read(self, memory: SharedArrays, row: int, count: int, request: Request) -> None:
        """Has a free worker read the examples of a request into ``count`` rows of ``memory`` from ``row`` on.

        Raises:
            DataError: if they can't be read, or several workers die of it.
        """
        worker = self._free.get()
        try:
            self._read(worker, memory, row, count, request)
        finally:
            self._free.put(worker)

    def _read(self, worker: _Worker, memory: SharedArrays, row: int, count: int, request: Request) -> None:
        reason = ""
        for _ in range(_TRIES):
            try:
                error, records = worker.read(memory, row, count, request)
            except (EOFError, OSError):
                reason = self._replace(worker)
                if self._closed:
                    raise DataError("the input is closed.") from None
                log.warning("input worker %d %s; another takes its place", worker.number, reason)
                continue
            for record in records:
                log.handle(record)
            if error is not None:
                raise error[0] from error[1]
            return
        if count == 1:
            raise DataError(
                f"{_TRIES} input workers in a row died while they read the example {self._reader.name(request)}, the "
                f"last one {reason}. The machine may be out of memory (fewer --input_workers need less), or the "
                "example crashes its decoder. --input_workers 0 reads in this process."
            )
        for number in range(count):  # which may need less memory; and the one that kills is found
            self._read(worker, memory, row + number, 1, request.one(number))

    def pids(self) -> list[int]:
        """Returns the process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid]

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        with self._lock:  # none is being replaced
            for worker in self._workers:
                worker.end()
        for _ in self._workers:
            self._free.get()  # no thread reads from it any more
        for worker in self._workers:
            worker.close()
            self._free.put(worker)
        if self._template is not None:
            self._template.close()
        _open_workers.discard(self)

    def _start(self) -> None:
        try:
            self._template = _Template(self._payload)
            for worker in self._workers:
                self._template.fork(worker)
        except (EOFError, OSError) as error:
            raise CannotShareError(f"no process can be started ({_in_words(error)})") from error

    def _replace(self, worker: _Worker) -> str:
        """Starts a process in place of one that died; returns how it died."""
        with self._lock:
            if self._closed or self._template is None:
                return "was closed"
            worker.close()
            try:
                reason = self._template.end_of(worker.pid)
                self._template.fork(worker)
            except (EOFError, OSError):  # the template was killed, too
                self._template.close()
                reason = "was killed"
                try:
                    self._template = _Template(self._payload)
                    self._template.fork(worker)
                except (CannotShareError, EOFError, OSError) as error:
                    raise DataError(
                        f"the input workers were killed and can't be started again ({_in_words(error)}). "
                        "--input_workers 0 reads in this process."
                    ) from error
            return reason


_open_workers: weakref.WeakSet[InputWorkers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workers in list(_open_workers):
        workers.close()


class _Worker:
    """One process, as the run sees it. One thread uses it at a time."""

    def __init__(self, number: int) -> None:
        self.number, self.pid = number, 0
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._mapped: dict[int, weakref.ref[SharedArrays]] = {}

    def connect(self, end: socket.socket, pid: int) -> None:
        """Takes the socket of a new process."""
        self._socket, self.pid, self._mapped = end, pid, {}
        self._connection = Connection(os.dup(end.fileno()))

    def read(self, memory: SharedArrays, row: int, count: int, request: Request) -> _Answer:
        """Has the process read; returns its error with its cause, and what it logged.

        Raises:
            EOFError, OSError: if it has died.
        """
        connection, end = self._connection, self._socket
        if connection is None or end is None:
            raise EOFError
        closed = [number for number, known in self._mapped.items() if known() is None]
        for number in closed:
            del self._mapped[number]
        new = memory.number not in self._mapped
        layout = (memory.features, memory.count) if new else None
        connection.send_bytes(pickle.dumps((closed, memory.number, layout, row, count, request)))
        if new:
            socket.send_fds(end, [b"\0"], [memory.file])
            self._mapped[memory.number] = weakref.ref(memory)
        answer: _Answer = pickle.loads(connection.recv_bytes())
        return answer

    def end(self) -> None:
        """Ends the process, and what waits for it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, which ends the process."""
        for each in (self._socket, self._connection):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()
        if self._socket is not None:
            self._socket = self._connection = None


class _Template:
    """The process that workers are forks of. It has one thread, and no engine."""

    def __init__(self, payload: bytes) -> None:
        mine, its = socket.socketpair()
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        own = {**one_thread, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if importlib.util.find_spec("jax") is not None:
            # A plugin may import Keras. This backend imports JAX, but starts no threads, which a fork would lose.
            own["KERAS_BACKEND"] = "numpy"
        path = json.dumps([os.fspath(folder) for folder in sys.path])
        command = [sys.executable, "-P", "-c", _CODE, path, str(its.fileno())]
        with its:
            # In a process group of its own: Ctrl-C is for the run, which then closes the sockets.
            self._process = subprocess.Popen(
                command, pass_fds=[its.fileno()], env={**os.environ, **own}, stdin=subprocess.DEVNULL, process_group=0
            )
        self._socket, self._connection = mine, Connection(os.dup(mine.fileno()))
        try:
            self._connection.send_bytes(payload)
            problem = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            problem = f"the process that reads ended with status {self._process.wait()}"
        if problem:
            self.close()
            raise CannotShareError(problem)

    def fork(self, worker: _Worker) -> None:
        """Starts a worker.

        Raises:
            EOFError, OSError: if this process has died.
        """
        mine, its = socket.socketpair()
        with its:
            self._connection.send_bytes(b"fork")
            socket.send_fds(self._socket, [b"\0"], [its.fileno()])
            pid = int(self._connection.recv_bytes())
        worker.connect(mine, pid)

    def end_of(self, pid: int) -> str:
        """Returns how a worker ended."""
        self._connection.send_bytes(b"end %d" % pid)
        status = int(self._connection.recv_bytes())
        if status == _UNKNOWN:
            return "ended"
        if os.WIFSIGNALED(status):
            return f"was killed ({signal.Signals(os.WTERMSIG(status)).name})"
        return f"ended with status {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """Ends the process; its workers end by themselves."""
        for each in (self._socket, self._connection):
            with contextlib.suppress(OSError):
                each.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- what both sides need ---------------------------------------------------------------------------------------------


def _unnamed_file() -> int:
    """Returns a file in memory, whose limit is that of memory and not of /dev/shm; elsewhere one on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("modelyard-batches", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _places(features: Mapping[str, Feature], count: int) -> tuple[dict[str, int], int]:
    """Returns where each array begins, and the bytes of all."""
    places, size = {}, 0
    for name, feature in features.items():
        places[name] = size
        size += -(-max(feature.nbytes * count, 1) // _ALIGNMENT) * _ALIGNMENT
    return places, size


def _map(file: int, features: Mapping[str, Feature], count: int) -> dict[str, NDArray[Any]]:
    places, size = _places(features, count)
    memory = mmap.mmap(file, size)
    return {
        name: np.frombuffer(memory, feature.dtype, count * int(np.prod(feature.shape)), places[name]).reshape(
            count, *feature.shape
        )
        for name, feature in features.items()
    }


@dataclass
class _Payload:
    """The input of a template: the pickled reader, and the files of plugins by module."""

    plugins: dict[str, str]
    reader: bytes


class _LimitedFile(io.BytesIO):
    """A buffer that refuses more than the limit, so that a large dataset is not copied first."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise CannotShareError(f"the dataset has more than {MOST_BYTES / 2**20:,.0f} MiB in memory")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Refuses large arrays before it copies them: those of a file that is mapped into memory, too."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.nbytes > MOST_BYTES:
            raise CannotShareError(f"the dataset has an array of {value.nbytes / 2**20:,.0f} MiB")
        return NotImplemented


def _pickled(reader: BatchReader) -> bytes:
    """Returns the reader for another process, with the files of the plugins that it may come from."""
    head = _LimitedFile()
    try:
        _Pickler(head, protocol=5).dump(reader)
    except CannotShareError:
        raise
    except Exception as error:  # whatever a user's own class raises
        raise CannotShareError(f"the dataset can't be copied to another process ({_in_words(error)})") from error
    plugins = {
        name: str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(_PLUGIN) and getattr(module, "__file__", None)
    }
    return pickle.dumps(_Payload(plugins, head.getvalue()))


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]


# -- in the processes -------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Imports the plugins that it needs, and no others: those of models import Keras."""

    def __init__(self, payload: _Payload) -> None:
        super().__init__(io.BytesIO(payload.reader))
        self._plugins = payload.plugins

    def find_class(self, module: str, name: str) -> Any:
        if module in self._plugins and module not in sys.modules:
            from modelyard.config.plugins import load_plugins

            load_plugins((self._plugins[module],))
        return super().find_class(module, name)


def main() -> None:
    """Runs the template: starts workers until its socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run saves, then closes the sockets
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what a library prints is not the output of the run
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)  # JAX, if a plugin imports it
    control = socket.socket(fileno=int(sys.argv[2]))
    connection = Connection(os.dup(control.fileno()))
    try:
        payload = pickle.loads(connection.recv_bytes())  # from the run
        reader = _Unpickler(payload).load()
        del payload
        problem = ""
    except EOFError:
        return
    except Exception as error:
        problem = f"the dataset can't be used in another process ({_in_words(error)})"
    with contextlib.suppress(OSError):
        connection.send_bytes(problem.encode())
    if problem:
        return
    gc.collect()
    gc.freeze()  # the collector would copy the pages that workers share
    with contextlib.suppress(EOFError, OSError):
        while True:
            word, _, argument = connection.recv_bytes().partition(b" ")
            if word == b"fork":
                _, files, _, _ = socket.recv_fds(control, 1, 1)
                pid = os.fork()
                if not pid:
                    control.close()
                    connection.close()
                    _work(socket.socket(fileno=files[0]), reader)
                os.close(files[0])
                answer = pid
            else:
                answer = _status_of(int(argument))
            connection.send_bytes(str(answer).encode())


def _status_of(pid: int) -> int:
    """Returns the status of a worker whose socket is closed; it has ended, or is about to."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:  # a fork of an earlier template
        return _UNKNOWN


class _Records(logging.Handler):
    """Keeps what is logged, for the run."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)

    def take(self) -> list[logging.LogRecord]:
        """Returns the records since the last call."""
        found, self.records = self.records, []
        return found


def _work(end: socket.socket, reader: BatchReader) -> None:
    """Reads what the run asks for, until it closes the socket. Does not return."""
    status = 0
    threading.Thread(target=_end_with_the_run, args=(end,), daemon=True).start()
    try:
        connection = Connection(os.dup(end.fileno()))
        kept = _Records()
        log.addHandler(kept)
        log.propagate = False
        log.setLevel(logging.INFO)
        memories: dict[int, dict[str, NDArray[Any]]] = {}
        while True:
            try:
                closed, number, layout, row, count, request = pickle.loads(connection.recv_bytes())
                if layout is not None:
                    _, files, _, _ = socket.recv_fds(end, 1, 1)
                    memories[number] = _map(files[0], *layout)
                    os.close(files[0])
            except (EOFError, OSError):
                break
            for each in closed:
                memories.pop(each, None)
            error: tuple[Exception, OSError | None] | None = None
            try:
                reader.read(request, {name: each[row : row + count] for name, each in memories[number].items()})
            except BaseException as raised:  # also SystemExit: it is no crash
                error = _portable(raised if isinstance(raised, Exception) else RuntimeError(_in_words(raised)))
            with contextlib.suppress(OSError):  # the run may have ended meanwhile
                connection.send_bytes(pickle.dumps((error, kept.take())))
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_with_the_run(end: socket.socket) -> None:
    """Ends this process when the run has closed the socket or was killed, also if reading hangs."""
    waiting = select.poll()
    waiting.register(end, 0)  # a closed socket is always reported
    waiting.poll()
    os._exit(0)


def _portable(error: Exception) -> tuple[Exception, OSError | None]:
    """Returns an error that the run can raise, and the error of the system behind it, if there is one."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
    made = error
    try:
        again = pickle.loads(pickle.dumps(error))
        same = type(again) is type(error) and str(again) == str(error)
    except Exception:
        same = False
    if not same:
        made = DataError(str(error)) if isinstance(error, UserError) else RuntimeError(_in_words(error))
    if not isinstance(error, UserError):  # a mistake in a user's dataset, or in ours
        text = "".join(traceback.format_exception(error)).rstrip()
        made.add_note(f"In a process that reads the input:\n{text}")
    return made, cause
