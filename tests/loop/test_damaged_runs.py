"""Run folders that were damaged or edited: noticed, explained, and resumed where that is possible."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.errors import CheckpointError, ConfigError, RunError
from modelyard.run.checkpoint import CHECKSUM, STATE, list_best, list_checkpoints, read_checkpoint
from modelyard.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("two_devices")


def go(folder: str = "run", **options: Any) -> modelyard.Result:
    settings = {"model": "mlp", "dataset": "digits", "hidden_units": [4], "train_batch_size": 64, "log_every": 20}
    steps = {"train_steps": 60, "eval_every": 20, "save_every": "20 steps", "deterministic": True}
    return modelyard.train_and_evaluate(**{**settings, **steps, "model_dir": folder, **options})


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def rows(folder: str) -> list[dict[str, Any]]:
    timeless = ("seconds", "examples_per_second", "average_examples_per_second")
    return [{k: v for k, v in row.items() if k not in timeless} for row in read_metrics(Path(folder) / "metrics.jsonl")]


def weights(folder: str, step: int) -> dict[str, np.ndarray]:
    return read_checkpoint(Path(folder) / "checkpoints" / f"step-{step:08d}").weights


def without_comments(folder: str) -> str:
    lines = Path(folder, "config.yaml").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))


def saved(folder: str = "run", step: int = 60) -> Path:
    return Path(folder) / "checkpoints" / f"step-{step:08d}"


def test_a_run_with_a_damaged_state_resumes_from_the_checkpoint_before_and_ends_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    go()
    go("whole", train_steps=80)
    edit(saved() / STATE, '"step": 60', '"step": 50')
    result = modelyard.resume("run", train_steps=80)
    assert result.step == 80
    assert "set aside as damaged-step-00000060; the one before it is used" in caplog.text
    np.testing.assert_equal(weights("run", 80), weights("whole", 80))
    assert rows("run") == rows("whole")


def test_a_config_that_was_cut_is_not_filled_with_defaults() -> None:
    """A cut at the end of a line leaves valid YAML."""
    go(optimizer="sgd", weight_decay=0.1)
    go("whole", optimizer="sgd", weight_decay=0.1, train_steps=80)
    config = Path("run/config.yaml")
    whole = config.read_text()
    config.write_text(whole[: whole.index("weight_decay:")])
    for verb in (modelyard.resume, modelyard.evaluate):
        with pytest.raises(ConfigError, match=r"weight_decay: is missing; 0\.1 in checkpoints/step-00000060"):
            verb("run")
    with pytest.raises(ConfigError, match="edited, cut or damaged"):
        go(optimizer="sgd", weight_decay=0.1, train_steps=80)
    assert modelyard.resume("run", restore_config=True, train_steps=80).step == 80
    np.testing.assert_equal(weights("run", 80), weights("whole", 80))


def test_a_run_is_not_resumed_with_the_config_of_another() -> None:
    go()
    go("other", label_smoothing=0.5)
    shutil.copy("other/config.yaml", "run/config.yaml")
    for verb in (modelyard.resume, modelyard.evaluate):
        with pytest.raises(ConfigError, match=r"label_smoothing: is 0\.5; 0\.0 in step-000000") as caught:
            verb("run")
        assert "--restore_config" in str(caught.value)
    shutil.copytree("run", "copy")
    assert modelyard.resume("run", restore_config=True, train_steps=60).step == 60
    Path("copy/config.yaml").write_text(without_comments("other"))  # deliberate, but what can't change still can't
    with pytest.raises(ConfigError, match=r"label_smoothing: is 0\.5; 0\.0 in step-00000060"):
        modelyard.resume("copy", train_steps=80)


def test_options_that_changed_since_the_newest_checkpoint_are_no_damage() -> None:
    go()
    with pytest.raises(RunError, match="60"):  # config.yaml is written before training, and nothing is saved after it
        modelyard.resume("run", train_steps=40)
    assert modelyard.resume("run", train_steps=80, save_every="1 h", log_every=10).step == 80
    assert modelyard.resume("run").step == 80


def test_without_its_manifest_a_run_resumes_and_keeps_its_best_models() -> None:
    go()
    before = json.loads(Path("run/manifest.json").read_text())
    edit(Path("run/manifest.json"), '"0"', '"1"')
    for verb in (modelyard.resume, modelyard.evaluate):
        with pytest.raises(RunError, match=r"manifest\.json is damaged: .*or delete it"):
            verb("run")
    Path("run/manifest.json").unlink()
    assert modelyard.resume("run", train_steps=80).step == 80
    assert json.loads(Path("run/manifest.json").read_text())["run_id"] == before["run_id"]


def test_a_damaged_best_model_is_never_the_best(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    go(keep_best=2)
    first, second = list_best(Path("run/best"))
    edit(second / STATE, '"mode": "max",\n   "value": 0.', '"mode": "max",\n   "value": 9.')
    assert modelyard.evaluate("run").best["path"] == str(first)
    assert f"{second} is skipped" in caplog.text


class Mover(modelyard.Hook):
    """Does something to the run folder at step 20."""

    act: Callable[[], None]

    def on_log(self, loop: Any, row: dict[str, Any]) -> None:
        """Acts once."""
        if loop.step == 20:
            Mover.act()


modelyard.register_hook("mover")(Mover)


def replace(old: str, new: str) -> None:
    Path(old).rename(new)
    Path(old).mkdir()


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("removed", {}),
        ("removed", {"eval_every": 1000, "save_every": "1 h"}),
        ("renamed", {"hooks": "-metrics, +mover"}),
        ("replaced", {}),
        ("its folder renamed", {}),
    ],
)
def test_a_run_whose_folder_is_gone_ends_with_an_error_and_makes_no_new_one(how: str, options: dict[str, Any]) -> None:
    act = {
        "removed": lambda: shutil.rmtree("above/run"),
        "renamed": lambda: Path("above/run").rename("above/new"),
        "replaced": lambda: replace("above/run", "above/new"),
        "its folder renamed": lambda: Path("above").rename("new"),
    }[how]
    Mover.act = staticmethod(act)  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"above/run was removed, renamed or replaced while this run was writing"):
        go("above/run", **{"hooks": "+mover", **options})
    if how == "replaced":
        assert list(Path("above/run").iterdir()) == []
    else:
        assert not Path("above/run").exists()
    if how != "removed":
        moved = Path("new/run" if how == "its folder renamed" else "above/new")
        assert modelyard.resume(moved, hooks="", train_steps=30).step == 30


def test_a_run_whose_lock_is_removed_goes_on() -> None:
    Mover.act = staticmethod(lambda: Path("run/.lock").unlink())  # type: ignore[assignment]
    assert go(hooks="+mover").step == 60


def without_checksum(path: Path, **loop_state: Any) -> None:
    """Makes state.json one of an earlier version, with these values in the state of the loop."""
    state = json.loads((path / STATE).read_text())
    del state[CHECKSUM], state["memory"]["config"]
    state["memory"].update(loop_state)
    (path / STATE).write_text(json.dumps(state))


def test_a_run_of_an_earlier_version_resumes() -> None:
    go()
    go("whole", train_steps=80)
    for folder in ("checkpoints", "best"):
        for path in list_checkpoints(Path("run") / folder).values():
            without_checksum(path)
    Path("run/config.yaml").write_text(f"# The complete config of this run.\n{without_comments('run')}")
    manifest = json.loads(Path("run/manifest.json").read_text())
    del manifest["starts"][0][CHECKSUM]
    Path("run/manifest.json").write_text(json.dumps(manifest))
    modelyard.resume("run", train_steps=80)
    np.testing.assert_equal(weights("run", 80), weights("whole", 80))
    assert rows("run") == rows("whole")


@pytest.mark.parametrize("state", [{"offset": "x"}, {"offset": None}, {}, [], 3])
def test_a_hook_that_can_not_take_back_its_state_is_named(state: Any) -> None:
    go(train_steps=20)
    for path in list_checkpoints(Path("run/checkpoints")).values():
        without_checksum(path, hooks={"metrics": state})
    with pytest.raises(CheckpointError, match=r"the hook 'metrics' can't take back its state .* leaves the hook out"):
        modelyard.resume("run", train_steps=40)
