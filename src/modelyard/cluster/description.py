"""The processes that make up a run, and which of them this one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from modelyard.errors import UserError
from modelyard.system.network import are_local

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
ROLES = (CHIEF, WORKER, PS, EVALUATOR)  # in the order of processes, the coordinator first
SYNCHRONOUS, PARAMETER_SERVERS = "synchronous", "parameter servers"


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    role: str
    index: int

    @property
    def file_name(self) -> str:
        """The name of its log and pid files."""
        return self.role if self.role in (CHIEF, EVALUATOR) else f"{self.role}-{self.index}"

    def __str__(self) -> str:
        return f"the {self.role}" if self.role in (CHIEF, EVALUATOR) else f"{self.role} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and which of them this one is.

    Args:
        me: this process.
        addresses: host:port of every process, by role.
        source: where this was read: TF_CONFIG, SLURM, or empty.
        model_dir: the run folder in TF_CONFIG, if any.
        environment: "local" or "cloud", from TF_CONFIG.
    """

    me: Member = Member(CHIEF, 0)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""
    model_dir: str | None = None
    environment: str = "local"

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole run."""
        return self.me.role != EVALUATOR and len(self.members) <= 1

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, at addresses that no other machine reaches."""
        return are_local(address for hosts in self.addresses.values() for address in hosts)

    @property
    def members(self) -> list[Member]:
        """All processes, the coordinator first."""
        return [Member(role, i) for role in ROLES for i in range(len(self.addresses.get(role, ())))]

    @property
    def coordinator(self) -> Member:
        """The process that decides and writes: the chief, or the first worker where there is none."""
        return Member(CHIEF, 0) if self.addresses.get(CHIEF) or not self.addresses.get(WORKER) else Member(WORKER, 0)

    @property
    def is_coordinator(self) -> bool:
        """Whether this process is the coordinator."""
        return self.me == self.coordinator

    @property
    def mode(self) -> str:
        """The mode of training: synchronous, or asynchronous with parameter servers."""
        return PARAMETER_SERVERS if self.addresses.get(PS) else SYNCHRONOUS

    @property
    def trainers(self) -> list[Member]:
        """The processes that compute training steps, in the order of their parts of a batch."""
        roles = (WORKER,) if self.mode == PARAMETER_SERVERS else (CHIEF, WORKER)
        return [member for member in self.members if member.role in roles]

    @property
    def has_evaluator(self) -> bool:
        """Whether a separate process evaluates, so that the coordinator does not."""
        return bool(self.addresses.get(EVALUATOR))

    @property
    def is_outside(self) -> bool:
        """Whether this is an evaluator that the cluster does not list. It has no connection to the others."""
        return self.me.role == EVALUATOR and not self.has_evaluator

    def address(self, member: Member) -> str:
        """Returns host:port of a process."""
        return self.addresses[member.role][member.index]

    def describe(self) -> str:
        """Describes this process, for the log and `modelyard doctor`."""
        if self.is_alone:
            return "single process: it trains, evaluates and writes"
        if self.me.role == EVALUATOR:
            duty = "evaluates every new checkpoint and keeps the best"
        elif self.me.role == PS:
            duty = "holds its part of the variables"
        elif self.mode == PARAMETER_SERVERS:
            duty = "coordinates and writes, does not train" if self.is_coordinator else "trains at its own pace"
        else:
            duty = f"trains its part of every batch{', decides and writes' if self.is_coordinator else ''}"
        return f"{self.me}, {self.mode}: {duty}"

    def listed(self) -> str:
        """Returns the number of processes of each role as text."""
        found = ((role, len(hosts)) for role, hosts in self.addresses.items() if hosts)
        return ", ".join(f"{count} {role}{'s' if count > 1 and role != PS else ''}" for role, count in found)


class ProcessGroup:
    """The processes that train together. This one is alone; `modelyard.distributed` has groups of several.

    Args:
        cluster: all processes of the run.
    """

    grace_seconds = 15.0
    """The time that this process has to exit by itself after a peer was lost."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster or Cluster()
        self.spec: dict[str, list[str]] = {}
        """The addresses of the framework's own servers, by the framework's role names."""
        self.signal: int | None = None
        """A signal that reached another process of the run."""
        self.failure: UserError | None = None
        """The first failure of any process of the run."""
        self.lost = False
        """Whether the failure came from another process while this one was running."""

    @property
    def rank(self) -> int:
        """The index of this process among those that train together."""
        trainers = self.cluster.trainers
        return trainers.index(self.cluster.me) if self.cluster.me in trainers else 0

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        return max(len(self.cluster.trainers), 1)

    def explain(self, error: Exception) -> Exception:
        """Returns the reason behind ``error`` if it is that a peer was lost, else ``error``."""
        return error

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Registers ``callback`` to be called, from another thread, when a peer is lost."""
