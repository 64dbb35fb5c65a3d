"""Which processes make up a run, and which of them this one is."""

from __future__ import annotations

from dataclasses import dataclass, field

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
ROLES = (CHIEF, WORKER, PS, EVALUATOR)
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
        source: where this was read: TF_CONFIG, SLURM, or nowhere.
        model_dir: the run folder that came with it.
        environment: "local" or "cloud", as TF_CONFIG says.
    """

    me: Member = Member(CHIEF, 0)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""
    model_dir: str | None = None
    environment: str = "local"

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to keep in touch with."""
        return self.me.role != EVALUATOR and len(self.members) <= 1

    @property
    def members(self) -> list[Member]:
        """Everyone, the lead first."""
        everyone = [Member(role, i) for role in ROLES for i in range(len(self.addresses.get(role, ())))]
        return sorted(everyone, key=lambda member: member != self.lead)

    @property
    def lead(self) -> Member:
        """Who decides and writes: the chief, or the first worker where there is none."""
        return Member(CHIEF, 0) if self.addresses.get(CHIEF) or not self.addresses.get(WORKER) else Member(WORKER, 0)

    @property
    def leads(self) -> bool:
        """Whether this process is the lead."""
        return self.me == self.lead

    @property
    def mode(self) -> str:
        """How it trains: all together step by step, or every worker for itself with parameter servers."""
        return PARAMETER_SERVERS if self.addresses.get(PS) else SYNCHRONOUS

    @property
    def trainers(self) -> list[Member]:
        """Those that compute training steps, in the order of their shares of a batch."""
        roles = (WORKER,) if self.mode == PARAMETER_SERVERS else (CHIEF, WORKER)
        return [member for member in self.members if member.role in roles]

    @property
    def has_evaluator(self) -> bool:
        """Whether a process of its own evaluates, so that the lead does not."""
        return bool(self.addresses.get(EVALUATOR))

    def address(self, member: Member) -> str:
        """host:port of a process."""
        return self.addresses[member.role][member.index]

    def describe(self) -> str:
        """This process in words, for the log and `modelyard doctor`."""
        if self.is_alone:
            return "alone: it trains, evaluates and writes"
        if self.me.role == EVALUATOR:
            duty = "evaluates every new checkpoint and keeps the best"
        elif self.me.role == PS:
            duty = "keeps its part of the variables"
        elif self.mode == PARAMETER_SERVERS:
            duty = "coordinates and writes, does not train" if self.leads else "trains at its own pace"
        else:
            duty = f"trains its share of every batch{', decides and writes' if self.leads else ''}"
        return f"{self.me}, {self.mode}: {duty}"

    def listed(self) -> str:
        """How many of each role."""
        found = ((role, len(hosts)) for role, hosts in self.addresses.items() if hosts)
        return ", ".join(f"{count} {role}{'s' if count > 1 and role != PS else ''}" for role, count in found)
