"""A run from the config.yaml of another is the same run."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelyard.config import Config, load_config, resolve
from modelyard.errors import ConfigError
from modelyard.loop.run import run_length
from modelyard.run.directory import config_text

TOLD_ANEW = ("model_dir", "resume", "config_file", "config_set", "hyperparameter_file", "hyperparameter_set")


def again(config: Config, folder: Path, **given: Any) -> Config:
    path = folder / "config.yaml"
    path.write_text(config_text(config), encoding="utf-8")
    return resolve({"config_file": str(path), **given})


def options(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.flat().items() if key not in TOLD_ANEW}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "mlp", "hidden_units": [7, 5], "dataset": "synthetic", "synthetic_shape": "4,4"},
        {"train_steps": 100, "eval_every": "7 steps", "save_every": "1.5 h", "log_every": "0.00001 epochs"},
        {"learning_rate_schedule": "piecewise", "decay_boundaries": "30 %,60 %", "warmup": "0.1 epochs"},
        {"learning_rate": 1e-5, "l2_regularization": 5e-324, "random_seed": 2**63 - 1},
        {"augment": "pad_and_crop(padding=2),flip_left_right", "hooks": "+early_stop(patience=3, metric='a, (b')"},
        {"hooks": [{"+early_stop": {"metric": "it's"}}, "-progress"]},
        {"run_name": "1e4", "hypothesis": "0x10: 'ünïcode' # no\ncomment"},
        {"dataset": "some/where.npz", "num_gpus": 0, "gpu_id": None, "xla": True, "clip_norm": 0.1},
        {"recipe": "digits", "model_dir": "somewhere", "resume": "never"},
    ],
)
def test_a_run_config_gives_the_same_options(given: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(**given)
    assert options(again(config, tmp_path)) == options(config)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hypothesis=st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20),
    learning_rate=st.floats(1e-300, 1e300),
    train_epochs=st.floats(1e-3, 1e6),
    warmup=st.decimals("0.0001", 100, places=4).map(lambda d: f"{d} epochs"),
)
def test_any_value_survives_config_yaml(tmp_path: Path, **given: Any) -> None:
    config = load_config(model="mlp", **given)
    assert options(again(config, tmp_path)) == options(config)


def test_a_run_config_is_complete_no_other_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(model="mlp", random_seed=3)
    Path("project.yaml").write_text("default:\n  random_seed: 4\n")
    Path("hyperparameters.yaml").write_text("default:\n  learning_rate: 0.5\n")
    (tmp_path / "run").mkdir()
    assert options(again(config, tmp_path / "run")) == options(config)


def test_the_command_line_wins_over_a_run_config(tmp_path: Path) -> None:
    config = load_config(model="mlp", train_epochs=3)
    other = again(config, tmp_path, train_steps="5")
    assert (other.train_steps, other.train_epochs) == (5, None)
    assert other.origin("train_epochs") == "command line, displaced by train_steps"
    assert other.origin("random_seed").startswith(f"{tmp_path / 'config.yaml'}:")


def test_where_a_run_is_does_not_go_into_its_config() -> None:
    text = config_text(load_config(model="mlp", model_dir="here", resume="never"))
    assert not [key for key in TOLD_ANEW if f"\n{key}:" in text]


def test_a_mistake_in_a_run_config_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    lines = config_text(load_config(model="mlp")).splitlines()
    line = next(number for number, text in enumerate(lines) if text.startswith("train_batch_size"))
    lines[line] = "train_batch_size: few"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"config.yaml:{line + 1}: train_batch_size: must be a whole number"):
        resolve({"config_file": str(path)})


class Sized:
    def size(self, split: str) -> int:
        return 100


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (1.1, 11), (2.2, 22), (0.01, 1), (1.101, 12), (10, 100)])
def test_n_epochs_are_n_times_examples_over_batch_rounded_up(epochs: float, steps: int) -> None:
    config = load_config(model="mlp", train_epochs=epochs, train_batch_size=10)
    assert run_length(config, Sized()).total_steps == steps  # type: ignore[arg-type]
