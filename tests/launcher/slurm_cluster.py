"""A real SLURM for tests: munged, slurmctld and slurmd on this machine, all of it in one folder.

It needs root, as slurmd does. The packages are installed with apt-get where they are missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

# One machine acts as several nodes, each a slurmd with its own port. cgroups are not available in containers.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=debug
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
MinJobAge=600
InactiveLimit=0
RebootProgram=/bin/false
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def install() -> str | None:
    """Installs missing packages; returns why that failed, or None."""
    if all(shutil.which(name) for name in NEEDED):
        return None
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "SLURM is not installed here, and only root can with apt-get"
    words = ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]
    extra = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for attempt in (["apt-get", "update"], words):
        done = subprocess.run(attempt, env=extra, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            return f"{' '.join(attempt)}: {done.stderr.strip()[-300:]}"
    return None


class SlurmCluster:
    """A running cluster.

    Args:
        folder: the folder of its files.
        nodes: the number of nodes.
        cpus: of each node, as SLURM counts them.
        kill_wait: seconds between SIGTERM and SIGKILL at the end of a job's time.
        gpus: of each node, as SLURM counts them; nothing can compute on them.
    """

    def __init__(self, folder: Path, nodes: int = 1, cpus: int = 4, kill_wait: int = 30, gpus: int = 0) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname()
        self.names = [f"127.0.0.{i + 1}" for i in range(nodes)]  # by which the processes find each other
        controller_port, *ports = _free_ports(nodes + 1)
        lines = [
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus}"
            for name, port in zip(self.names, ports, strict=True)
        ]
        config = CONFIG.format(
            folder=folder, host=host, controller_port=controller_port, kill_wait=kill_wait, nodes="\n".join(lines)
        )
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(config)
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{gpus}]\n" if gpus else "")
        for name in self.names:
            (folder / f"spool-{name}").mkdir()

    def start(self) -> None:
        """Starts the daemons and waits until all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        munged += [f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munge.seed"]
        munged += [f"--log-file={self.folder}/munged.log"]
        self._start("munged", munged)
        self.wait("munged to listen", (self.folder / "munge.socket").exists)
        self._start("slurmctld", ["slurmctld", "-D", "-i"])
        for name in self.names:
            self._start(f"slurmd-{name}", ["slurmd", "-D", "-N", name])
        self.wait(
            "the nodes to be idle",
            lambda: self.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(self.names),
        )

    def ask(self, *words: str) -> str:
        """Returns the output of a command of SLURM; empty if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout if done.returncode == 0 else ""

    def succeeds(self, *words: str) -> bool:
        """Returns whether a command of SLURM succeeds."""
        done = subprocess.run(words, env=self.environment, capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def job(self, number: str) -> dict[str, str]:
        """Returns the output of ``scontrol show job``."""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def wait_for_restart(self, number: str, restarts: int, seconds: float = 120) -> None:
        """Waits until a job that was requeued runs again. SLURM itself would wait two minutes; here it waits 5 s.

        Not less: a job that starts within the second in which it was requeued is refused by slurmd.
        """
        hurried = False

        def running() -> bool:
            nonlocal hurried
            job = self.job(number)
            state = job.get("JobState")
            if int(job.get("Restarts", 0)) >= restarts and state == "RUNNING":
                return True
            if state == "PENDING" and not hurried:
                hurried = self.succeeds("scontrol", "update", f"JobId={number}", "StartTime=now+5")
            return False

        self.wait(f"job {number} to start again", running, seconds)

    def wait_for_job(self, number: str, states: set[str], seconds: float) -> str:
        """Waits until a job is in one of ``states``."""
        self.wait(f"job {number} to be {states}", lambda: self.job(number).get("JobState") in states, seconds)
        return self.job(number)["JobState"]

    def stop(self) -> None:
        """Ends the daemons that `start` started, jobs first."""
        for number in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", "--signal=KILL", "--full", number)
            self.ask("scancel", number)
        with contextlib.suppress(TimeoutError):
            self.wait("jobs to end", lambda: not self.ask("squeue", "-h"), 20)
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, words: list[str]) -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen(
                    words, env=self.environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
            )

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Waits until a condition holds.

        Raises:
            TimeoutError: with the ends of all logs.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}\n{self._logs()}")
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int = 1, kill_wait: int = 30, gpus: int = 0) -> Iterator[SlurmCluster]:
    """Runs a cluster while the block runs."""
    cluster = SlurmCluster(folder, nodes, kill_wait=kill_wait, gpus=gpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    """Returns free ports: all are reserved until all are known."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
