"""NVIDIA's MPS, with which processes that share a GPU compute at the same time instead of in turns.

The daemon is ours: it has a folder of its own, and ends with the process that asked for it. A keeper ends it, run as a
file, by path: ``mps.py FOLDER``. It imports nothing of Modelyard, so that it is quick.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PIPES, _LOGS, _VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
CONTROL = "nvidia-cuda-mps-control"
_CHILD = Path(__file__).with_name("child.py")
_ANSWER_SECONDS, _START_SECONDS, _QUIT_SECONDS = 5.0, 10.0, 10.0
_POLL_SECONDS = 0.2
_QUESTION = "get_default_active_thread_percentage"
log = logging.getLogger("modelyard")


@contextlib.contextmanager
def shared_gpus(gpus: Sequence[str], environ: Mapping[str, str]) -> Iterator[dict[str, dict[str, str]]]:
    """Runs a daemon while the block runs, if MPS is installed and no daemon runs already.

    Args:
        gpus: the GPUs to share, as ``CUDA_VISIBLE_DEVICES`` names them.
        environ: the environment variables of this process.

    Yields:
        For each GPU, the environment variables of the processes that share it; nothing without a daemon of ours.
    """
    if PIPES in environ or not gpus or shutil.which(CONTROL) is None or _answers(environ):
        yield {}
        return
    folder = Path(tempfile.mkdtemp(prefix="modelyard-mps-"))
    # The daemon numbers the GPUs that it sees from 0 on, and its clients use those numbers.
    own = {**environ, PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs"), _VISIBLE: ",".join(gpus)}
    for name in (PIPES, _LOGS):
        Path(own[name]).mkdir()
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=own,
        start_new_session=True,  # a terminal's Ctrl-C is not for it
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (is_ready := _answers(own)) and keeper.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_ready:
            log.info("runs that share a GPU use NVIDIA's MPS")
            names = {gpu: gpu if gpu.startswith(("GPU-", "MIG-")) else str(i) for i, gpu in enumerate(gpus)}
            yield {gpu: {PIPES: own[PIPES], _LOGS: own[_LOGS], _VISIBLE: name} for gpu, name in names.items()}
        else:
            log.info("NVIDIA's MPS did not start, so runs that share a GPU compute in turns%s", _reason(folder))
            yield {}
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(environ: Mapping[str, str]) -> bool:
    """Returns whether the daemon of an environment answers."""
    try:
        done = subprocess.run(
            [CONTROL], input=f"{_QUESTION}\n", capture_output=True, text=True, env=dict(environ),
            timeout=_ANSWER_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    # Without a daemon, it says so, and not every version of it has another status then.
    return done.returncode == 0 and bool(done.stdout.strip()) and "Cannot find" not in done.stdout + done.stderr


def _reason(folder: Path) -> str:
    """Returns the last line of the daemon's log, for a message."""
    for path in sorted((folder / "logs").glob("control.log")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            return f": {lines[-1][:300]}" if lines else ""
    return ""


# -- the keeper ------------------------------------------------------------------------------------------------------


def keep(folder: str) -> None:
    """Runs the daemon until standard input ends, which it does with the process that has started this one."""
    words = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), "", CONTROL, "-f"]
    daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    while daemon.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([CONTROL], input=b"quit\n", timeout=_QUIT_SECONDS, check=False)
                daemon.wait(_QUIT_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
            break
    os.killpg(0, signal.SIGKILL)  # this process, and what the daemon has started


if __name__ == "__main__":
    keep(sys.argv[1])
