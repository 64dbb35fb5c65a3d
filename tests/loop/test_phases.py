"""What a run says of its phases, and what they do to its speed."""

from __future__ import annotations

from typing import Any

import pytest

import modelyard
from conftest import engine_name
from modelyard.errors import Interrupted
from modelyard.loop.trainer import Trainer

pytestmark = pytest.mark.usefixtures("two_devices")
PHASES = "head(until=4), layers(match='conv|norm', until=8, factor=0.1), all"
RUN = {
    "model": "tiny_norm", "dataset": "digits", "train_batch_size": 32, "log_every": 12, "save_every": 3,
    "keep_checkpoints": 9, "engine": engine_name(),
}  # fmt: skip


def said(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """What a run logs of its phases."""
    caplog.clear()
    with caplog.at_level("INFO", "modelyard"):
        modelyard.train(**{**RUN, "hooks": "-tensorboard", **options})
    return [message for message in caplog.messages if "are trained" in message]


def test_each_phase_is_announced_with_what_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {name: array.size for name, array in _weights(caplog).items()}
    whole = sum(sizes.values())
    head = sizes["logits/kernel"] + sizes["logits/bias"]
    body = sum(size for name, size in sizes.items() if name.startswith(("conv", "norm")) and "moving" not in name)
    assert said(caplog, model_dir="run", train_steps=12, fine_tune=PHASES) == [
        f"phase 1 of 3 from step 0 on: head, {head:,} of {whole:,} parameters are trained",
        f"phase 2 of 3 from step 4 on: layers(match='conv|norm'), {body:,} of {whole:,} parameters are trained, "
        "learning rate × 0.1",
        f"phase 3 of 3 from step 8 on: all, {head + body:,} of {whole:,} parameters are trained",
    ]
    assert said(caplog, model_dir="one", train_steps=2, fine_tune="head") == [
        f"fine_tune: head, {head:,} of {whole:,} parameters are trained"
    ]


def _weights(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    assert not said(caplog, model_dir="plain", train_steps=1), "no phases, no lines"
    return modelyard.load_weights("plain")


def test_a_resumed_run_says_in_which_phase_it_resumes(caplog: pytest.LogCaptureFixture) -> None:
    @modelyard.register_hook("killed_at_6")
    class Killed(modelyard.Hook):
        order = 100  # after the checkpoint

        def on_boundary(self, loop: Trainer) -> None:
            if loop.step == 6:
                raise Interrupted(15, 6, "run")

    options = {"model_dir": "run", "train_steps": 12, "fine_tune": PHASES}
    with pytest.raises(Interrupted):
        modelyard.train(**RUN, **options, hooks="-tensorboard,+killed_at_6")
    lines = said(caplog, **options)
    assert lines[0].startswith("resuming in phase 2 of 3 from step 4 on: layers(match='conv|norm'), ")
    assert lines[1].startswith("phase 3 of 3 from step 8 on: all, ")
    assert len(lines) == 2


def test_compiling_a_phase_is_no_part_of_the_speed() -> None:
    counted: list[int] = []

    @modelyard.register_hook("counts_steps")
    class Counts(modelyard.Hook):
        def end(self, loop: Trainer) -> None:
            counted.append(loop.pace.steps)

    options = {"model_dir": "run", "train_steps": 12, "fine_tune": PHASES}
    modelyard.train(**RUN, **options, hooks="-tensorboard,+counts_steps")
    # JAX compiles all phases before the clock runs; TensorFlow each of them in its first step.
    assert counted == [12 if engine_name() == "jax" else 9]
