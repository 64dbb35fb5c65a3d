"""The help of the commands: short, whole, and true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from conftest import environment
from modelyard.cli.app import COMMANDS, build_app, main
from modelyard.config.schema import CORE_FIELDS, GROUPS, is_mutable
from waiting import PATIENCE

COMMON = {"model", "dataset", "train_epochs", "train_batch_size", "learning_rate", "engine", "model_dir", "hooks"}


def shown(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == status
    return "".join(capsys.readouterr())


def options(text: str) -> set[str]:
    """The options that a help lists."""
    found = [line.split()[0] for line in text.splitlines() if line.startswith("  -")]
    return {name.replace("[no_]", "").strip("-,") for name in found}


@pytest.mark.parametrize("command", ["train", "train-and-evaluate", "matrix", "config", "find-learning-rate"])
def test_the_short_help_has_what_most_runs_need(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, command, "--help")
    own = set(options(text)) - set(CORE_FIELDS)
    assert options(text) >= COMMON
    assert len(options(text) - own) <= 20
    assert "More options: --help GROUP. Groups: all, model, data, training, " in " ".join(text.split())


def test_the_whole_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = options(shown(capsys, "train", "--help", "all"))
    assert found >= {*CORE_FIELDS, "hidden_units", "momentum", "synthetic_shape", "decay_rate", "trust"}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__.lower())
def test_the_help_of_a_group_has_its_options(group: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(shown(capsys, "train", f"--help={group.__name__.lower()}"))
    assert found & set(CORE_FIELDS) == set(group.model_fields)


def test_an_unknown_group_brings_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no group of options 'dat'. Did you mean 'data'?" in shown(
        capsys, "train", "--help", "dat", status=2
    )


def test_help_may_come_first_or_after_launch(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train", "--help")
    assert shown(capsys, "-h", "train") == text
    assert shown(capsys, "launch", "--workers", "2", "--", "train", "-h") == text


def test_options_of_what_is_named_are_in_the_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = options(shown(capsys, "train", "--model", "mlp", "--dataset=./photos", "--optimizer", "sgd", "--help"))
    assert found >= {"hidden_units", "image_fit", "momentum"}
    assert not found & {"filters", "adam_beta1", "synthetic_noise"}
    assert "value_columns" in options(shown(capsys, "data", "info", "table.csv", "--help"))
    Path("project.yaml").write_text("default:\n  model: vit\n")
    found = options(shown(capsys, "train", "--help"))
    assert "patch_size" in found
    assert "hidden_units" not in found


def test_options_of_a_plugin_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import modelyard\nfrom pydantic import Field\n"
        "class Wide(modelyard.Options):\n    how_wide: int = Field(4, description='units of the layer')\n"
        "@modelyard.register_model('of_a_plugin_for_help', options=Wide)\ndef model(data, options): ...\n"
    )
    text = shown(capsys, "train", "--plugins", "mine.py", "--model", "of_a_plugin_for_help", "--help")
    assert "--how_wide NUMBER" in text
    assert "units of the layer (default: 4)" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_cut_and_all_placeholders_are_of_one_style(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, *command.split(), "--help", *(["all"] if COMMANDS[command].flags else []))
    group: Any = typer.main.get_command(build_app(command))
    for word in command.split():
        group = group.commands[word]
    for parameter in group.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert parameter.opts[0].removeprefix("--") in options(text)
    assert "…" not in "".join(line[:34] for line in text.splitlines() if line.startswith("  -"))
    assert not re.search(r"<\w", text.partition("Options:")[2])  # a placeholder; <= is one of a limit
    assert "INTEGER" not in text


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_the_help_of_an_evaluation_has_no_option_of_training(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(shown(capsys, command, "--help", "all"))
    assert found >= {"eval_batch_size", "engine", "threads", "dataset", "label_column"}
    assert not found & {"train_steps", "save_every", "hooks", "log_every", "eval_every", "test_at_end", "hypothesis"}
    own = {"dataset", "on_bad"} if command == "predict" else {"dataset"}
    assert all(is_mutable(name) for name in (found & set(CORE_FIELDS)) - own)


@pytest.mark.parametrize("words", [["evaluate", "run"], ["predict", "run", "x.jpg"], ["data", "info", "digits"]])
def test_an_option_of_training_is_refused_where_nothing_is_trained(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from modelyard.config import load_config
    from modelyard.run.directory import config_text

    Path("run").mkdir()
    Path("run/config.yaml").write_text(config_text(load_config(model="mlp")))
    text = shown(capsys, *words, "--train_steps", "5", "--log_every=3", status=2)
    for key in ("train_steps", "log_every"):
        assert f"command line: {key}: has no effect here: it is for training." in text


def test_the_page_of_all_options_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs/options.md").read_text(encoding="utf-8")
    # In a process of its own: tests have registered components here.
    done = subprocess.run(
        [sys.executable, "-m", "modelyard.cli.option_page"],
        capture_output=True, encoding="utf-8", env=environment(), timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert written == done.stdout, "an option has changed: write docs/options.md with `make options`"
    for name in (*CORE_FIELDS, "hidden_units", "momentum", "train_files", "end_learning_rate"):
        assert f"| `--{name}` |" in written
