"""What comes out of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from modelyard.cluster.roles import CHIEF, EVALUATOR, Cluster
from modelyard.data.dataset import TEST, TRAIN, VALIDATION
from modelyard.run.checkpoint import best_first, read_state, step_of
from modelyard.run.directory import RunDirectory
from modelyard.run.journal import log_result

if TYPE_CHECKING:
    from modelyard.loop.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Args:
        model_dir: the run folder.
        step: how many steps were trained.
        split: the split that ``metrics`` are of.
        metrics: ``loss``, ``accuracy`` and whatever else the task measures.
        model_step: the step of the model that ``metrics`` are of; the best model's for test at the end.
        best: the best model by validation: metric, value, step, path; empty where none was kept.
        validation: metrics on validation at the last evaluation.
        seconds: wall-clock time of training, all starts together.
        role: whose it is; in a cluster, workers and parameter servers have nothing to tell that the chief does not.
        exports: folders of the exports that the config asked for (export_at_end).
    """

    model_dir: str
    step: int
    split: str
    metrics: dict[str, float]
    model_step: int
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    role: str = "chief"
    exports: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def conclude(directory: RunDirectory, trainer: Trainer, cluster: Cluster) -> Result:
    """Gathers the results and adds them to the journal."""
    role = EVALUATOR if cluster.me.role == EVALUATOR else CHIEF
    best = {} if cluster.has_evaluator and role == CHIEF else best_of(directory)  # it is still at work
    validation = {k: float(v) for k, v in trainer.last_evaluation.items()}
    split, metrics, model_step = VALIDATION, validation, trainer.step
    if trainer.last_test:
        split, metrics = TEST, {k: float(v) for k, v in trainer.last_test.items()}
        model_step = best.get("step", trainer.step)
    elif not validation:
        split, metrics = TRAIN, trainer.last_report
    seconds = round(trainer.seconds, 2)
    result = Result(directory.address, trainer.step, split, metrics, model_step, best, validation, seconds, role)
    shown: dict[str, Any] = {f"{split} {name}": value for name, value in metrics.items()}
    shown |= {f"best validation {best['metric']}": f"{best['value']:.6g} at step {best['step']}"} if best else {}
    ended = f"{trainer.step}" + (f" ({trainer.stop_reason})" if trainer.stop_reason else "")
    log_result(directory.journal, directory.name, {"step": ended, **shown, "seconds": result.seconds})
    return result


def best_of(directory: RunDirectory) -> dict[str, Any]:
    """The best model of the run, if one was kept."""
    paths = best_first(directory.best)
    if not paths:
        return {}
    won = read_state(paths[0])["memory"]["best"]
    path = directory.address_of(paths[0])
    return {"metric": won["metric"], "value": won["value"], "step": step_of(paths[0]), "path": path}
