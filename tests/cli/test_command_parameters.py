"""Every command takes a run as RUN and as --model_dir, and has the defaults of the function that it calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from modelyard.cli.app import COMMANDS, build_app, main
from modelyard.errors import UserError

OPENED_BY = {
    "resume": "modelyard.loop.existing_run.resume_config",
    "evaluate": "modelyard.api.evaluate",
    "predict": "modelyard.serving.prediction.predict.predict",
    "report": "modelyard.serving.report.report",
    "export": "modelyard.serving.exporting.export.export",
    "serve": "modelyard.serving.http.server.serve",
    "stop": "modelyard.launcher.local.stop",
    "runs": "modelyard.run.directory.open_run_folder",
}
Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command up to the function that opens the run, and returns the error: that function's arguments."""

    def opened(*arguments: Any, **options: Any) -> None:
        given = {key: options[key] for key in ("wide", "eval_batch_size") if key in options}
        raise UserError(f"opened {' '.join(map(str, arguments[:1] if 'port' in options else arguments))} {given}")

    # All are imported before one is replaced: a module that is imported now would keep what it finds.
    for name in (*OPENED_BY.values(), "modelyard.comparison.results.", "modelyard.run.summary."):
        importlib.import_module(name.rpartition(".")[0])
    for name in OPENED_BY.values():
        monkeypatch.setattr(name, opened)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        assert left.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize("command", OPENED_BY)
def test_a_run_is_an_argument_or_an_option(call: Call, command: str) -> None:
    for words in (["a"], ["--model_dir", "a"], ["--model-dir=a"], ["a", "--model_dir", "a"]):
        assert call(command, *words).startswith("error: opened a {}"), words


@pytest.mark.parametrize("command", sorted(set(OPENED_BY) - {"runs"}))
def test_two_different_runs_or_none_are_an_error(call: Call, command: str) -> None:
    Path("a").mkdir()
    Path("a/config.yaml").touch()
    assert call(command, "a", "--model_dir", "b") == (
        "error: two different runs are given, a and --model_dir b. Give one of them."
    )
    assert "opened ./a" in call(command, "./a", "--model_dir", "a")
    message = call(command)
    assert f"modelyard {command} RUN" in message
    assert f"modelyard {command} --model_dir RUN" in message


def test_every_command_that_takes_a_run_is_tested() -> None:
    taking = {name for name, entry in COMMANDS.items() if "run" in inspect.signature(entry.function).parameters}
    assert taking == set(OPENED_BY) - {"runs"}


def test_files_to_predict_follow_a_run_in_either_form(call: Call) -> None:
    assert "opened a b c {}" in call("predict", "a", "b", "c")
    assert "opened a b c {}" in call("predict", "b", "c", "--model_dir", "a")
    assert "opened a b {}" in call("predict", "a", "b", "--model_dir", "a")


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_an_option_that_only_a_plugin_knows_is_not_taken_for_the_run(call: Call, command: str) -> None:
    expected = "opened a {'wide': '3', 'eval_batch_size': '7'}"
    assert expected in call(command, "a", "--eval_batch_size", "7", "--wide", "3")
    assert expected in call(command, "--model_dir", "a", "--wide", "3", "--eval_batch_size", "7")
    assert expected in call(command, "--wide=3", "--model_dir", "a", "--eval_batch_size", "7")


def test_the_help_for_an_existing_run_shows_what_may_change() -> None:
    group: Any = typer.main.get_command(build_app("resume"))
    hidden = {parameter.name: parameter.hidden for parameter in group.commands["resume"].params if parameter.opts}
    shown = {name for name, is_hidden in hidden.items() if not is_hidden}
    assert shown >= {"train_steps", "hooks", "num_gpus", "save_every", "dataset", "train_files", "model_dir"}
    assert set(hidden) - shown >= {"model", "optimizer", "momentum", "hidden_units", "precision", "recipe", "resume"}


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("evaluate", "modelyard.api.evaluate"),
        ("find-learning-rate", "modelyard.loop.learning_rate_finder.find_learning_rate"),
        ("predict", "modelyard.serving.prediction.predict.predict"),
        ("export", "modelyard.serving.exporting.export.export"),
        ("serve", "modelyard.serving.http.server.serve"),
        ("convert", "modelyard.data.records.convert.convert"),
        ("data fetch", "modelyard.data.sources.fetch.fetch"),
        ("data show", "modelyard.data.sheet.show_data"),
        ("launch", "modelyard.launcher.local.launch"),
        ("stop", "modelyard.launcher.local.stop"),
        ("submit", "modelyard.launcher.submit.submit"),
        ("matrix", "modelyard.comparison.matrix.matrix"),
        ("leaderboard", "modelyard.comparison.leaderboard.leaderboard"),
    ],
)
def test_defaults_of_a_command_are_those_of_its_function(command: str, function: str) -> None:
    module, _, name = function.rpartition(".")
    known = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    for parameter in inspect.signature(COMMANDS[command].function).parameters.values():
        if parameter.name in known and known[parameter.name].default is not inspect.Parameter.empty:
            assert parameter.default == known[parameter.name].default, parameter.name
