"""The command line as a user meets it: real processes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import COMMAND, environment, last_json
from modelyard.cli import output
from modelyard.cli.app import main
from modelyard.cli.output import cell
from modelyard.config import load_config
from modelyard.run.directory import config_text
from modelyard.system.console import SafeConsole
from waiting import PATIENCE

Command = Callable[..., "subprocess.CompletedProcess[str]"]
HEAVY = ("tensorflow", "jax", "keras", "sklearn", "tensorboard")
QUICK = ("--model", "mlp", "--dataset", "digits", "--train_steps", "20", "--hidden_units", "8")


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def with_import_times(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "modelyard", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["config"], ["models"], ["datasets"], ["hooks"]])
def test_looking_around_imports_nothing_heavy(words: list[str]) -> None:
    done = with_import_times(*words)
    assert done.returncode == 0, done.stderr
    assert imported(done) >= {"modelyard"}
    assert imported(done).isdisjoint(HEAVY)


def test_help_imports_the_command_line_and_little_else() -> None:
    done = with_import_times("--help")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rsplit("|", 1)[1].strip() for line in lines}
    ours = {name for name in modules if name.startswith("modelyard")}
    others = {name for name in ours if not name.startswith("modelyard.cli")}
    assert others <= {"modelyard", "modelyard.errors", "modelyard.system", "modelyard.system.interrupt"}
    assert imported(done).isdisjoint({*HEAVY, "numpy", "pydantic", "yaml", "PIL", "cv2", "scipy", "psutil"})
    assert len(modules) < 600


def test_the_command_after_launch_has_its_help() -> None:
    done = with_import_times("launch", "--", "train", "-h")
    assert done.returncode == 0, done.stderr
    assert "--learning_rate" in done.stdout


def test_five_mistakes_get_five_messages_before_any_heavy_import() -> None:
    Path("project.yaml").write_text("default:\n  train_batch_sise: 32\n  train_epochs: many\n  model: resnet21\n")
    Path("hyperparameters.yaml").write_text("default:\n  optimizer: adamm\n")
    done = with_import_times("train-and-evaluate", "--hooks", "+erly_stop")
    assert done.returncode == 2
    assert imported(done).isdisjoint(HEAVY)
    text = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert "5 mistakes" in text
    for where, key, near in (
        ("project.yaml:2", "train_batch_sise", "train_batch_size"),
        ("project.yaml:3", "train_epochs", "must be a number, got 'many'"),
        ("project.yaml:4", "model", "'resnet20'"),
        ("hyperparameters.yaml:2", "optimizer", "'adam' or 'adamw'"),
        ("command line", "hooks", "'early_stop'"),
    ):
        assert any(where in line and f" {key}: " in line and near in line for line in text.splitlines()), (where, text)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--learning_rat", "1"], ["there is no such option", "'learning_rate'"]),
        (["--learning_rate", "fast"], ["must be a number, got 'fast'"]),
        (["--xla=perhaps"], ["xla: must be true or false, got 'perhaps'"]),
        (["--train_batch_size", "0"], ["greater than or equal to 1, got '0'"]),
        (["--train_batch_size", "2.5"], ["must be a whole number"]),
        (["--save_every", "5 parsecs"], ["is not a duration", "'10 min'"]),
        (["--eval_every", "10 min"], ["wall-clock time"]),
        (["--train_steps", "5", "--train_epochs", "2"], ["cannot be combined with train_epochs"]),
        (["--engine", "tensorflou"], ["there is no engine", "'tensorflow'"]),
        (["--dataset", "cifar11"], ["there is no dataset", "cifar10"]),
        (["--hooks", "stop_at(walue=1)"], ["takes no argument 'walue'", "'value'"]),
        (["--augment", "flip_left_right(probability=2)"], ["probability"]),
        (["--model", "mlp", "--filters", "3"], ["has no effect here: it is an option of model simple_cnn"]),
        (["--model", "mlp", "--pretrained", "x"], ["mobilenet_v2, ", "and 35 more (modelyard models lists them)"]),
        (["--config_set", "big"], ["there is no ./project.yaml"]),
        (["--recipe", "digitss"], ["there is no recipe", "'digits'"]),
        (["--gradient_accumulation", "7"], ["must divide train_batch_size"]),
        (["--plugins", "nowhere.py"], ["there is no plugin file"]),
        (["digits"], ["digits: is not an option"]),
    ],
)
def test_a_mistake_is_explained_and_exits_with_2(command: Command, words: list[str], texts: list[str]) -> None:
    done = command("config", *words, code=2)
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["serve", "--model_dir", "run", "--prot", "80"], "Did you mean 'port'?"),
        (["serve", "run", "photos"], "photos: is not an option."),
    ],
)
def test_options_of_a_command_are_named_too(command: Command, words: list[str], text: str) -> None:
    command("train", *QUICK, "--model_dir", "run")
    assert text in command(*words, code=2).stderr


def test_arguments_of_the_functions_in_python_are_not_options(command: Command) -> None:
    command("train", *QUICK, "--model_dir", "run")
    for words in (
        ["serve", "run", "--poll_secs", "1"],
        ["serve", "--export", "run", "--ready", "x"],
        ["evaluate", "run", "--source", "x"],
        ["export", "run", "--source", "x"],
        ["predict", "run", "photo.png", "--source", "x"],
        ["matrix", "--program", "x"],
        ["data", "info", "digits", "--source", "x"],
        ["data", "check", "digits", "--origin", "x"],
        ["data", "verify", "digits", "--origin", "x"],
        ["data", "show", "digits", "--origin", "x"],
        ["convert", "--from", "digits", "--to", "records", "--origin", "x"],
    ):
        found = command(*words, code=2).stderr
        assert f"{words[-2]}: is not an option" in found, words
        assert "Traceback" not in found, words


def test_train_prints_for_people_on_stderr_and_one_json_object_on_stdout(command: Command) -> None:
    done = command("train_and_eval", *QUICK, "--model-dir", "run", "--test-at-end", "--json")
    assert len(done.stdout.splitlines()) == 1
    result = last_json(done)
    assert result["model_dir"] == "run"
    assert result["step"] == 20
    assert set(result["metrics"]) == {"loss", "accuracy"}
    assert set(result["best"]) == {"metric", "value", "step", "path"}
    assert "run folder: run" in done.stderr
    assert "│ accuracy" in done.stderr

    done = command("evaluate", "run", "--split", "test", "--eval_batch_size", "7", "--json")
    assert last_json(done)["metrics"]["accuracy"] == pytest.approx(result["metrics"]["accuracy"])

    done = command("resume", "run", "--train_steps", "30", "--json")
    assert last_json(done)["step"] == 30

    done = command("runs", "--runs_dir", ".", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["run"], row["step"], row["status"]) == ("run", 30, "finished")

    done = command("train-and-evaluate", *QUICK, "--model_dir", "run", "--learning_rate", "0.5", code=2)
    assert "learning_rate: is 0.5 here, 0.001 in the run run" in done.stderr


def test_config_says_where_each_value_came_from(command: Command) -> None:
    Path("project.yaml").write_text("default: &D\n  train_batch_size: 16\nbig:\n  <<: *D\n  train-batch-size: 512\n")
    Path("hyperparameters.yaml").write_text("default:\n  learning_rate: 1e-4\n  adam_beta1: 0.8\n")
    done = command(
        "config", "--config_set", "big", "--model", "mlp", "--no-deterministic", "--optimizer", "sgd", "--json"
    )
    values: dict[str, Any] = last_json(done)
    assert values["train_batch_size"] == {"value": 512, "origin": "project.yaml:5"}
    assert values["learning_rate"] == {"value": 1e-4, "origin": "hyperparameters.yaml:2"}
    assert values["model"] == {"value": "mlp", "origin": "command line"}
    assert values["deterministic"] == {"value": False, "origin": "command line"}
    assert values["momentum"] == {"value": 0.9, "origin": "default"}
    done = command("config", "--config_set", "big", "--optimizer", "sgd")
    assert "learning_rate: 0.0001" in done.stdout
    assert "adam_beta1 has no effect here" in done.stderr


def test_runs_are_compared_side_by_side(command: Command) -> None:
    for name, rate in (("slow", "0.001"), ("fast", "0.01")):
        command("train", *QUICK, "--model_dir", name, "--learning_rate", rate)
    done = command("runs", "slow", "fast", "--json")
    compared = json.loads(done.stdout)
    assert compared["options"] == {"learning_rate": [0.001, 0.01]}
    assert [row["run"] for row in compared["runs"]] == ["slow", "fast"]
    done = command("runs", "slow", "fast")
    assert "learning_rate" in done.stdout


def test_lists_show_names_and_options(command: Command) -> None:
    assert "resnet110" in command("models").stdout
    assert "fashion_mnist" in command("datasets").stdout
    assert "patience = 5" in command("hooks").stdout
    names = [entry["name"] for entry in json.loads(command("hooks", "--json").stdout)]
    assert {"progress", "log", "metrics", "throughput", "tensorboard", "profiler", "checkpoint", "best"} <= set(names)
    assert {"early_stop", "stop_at", "nan_guard"} <= set(names)


def test_doctor_examines_the_machine(command: Command) -> None:
    done = command("doctor", "--json", JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    checks = {check["check"]: check for check in json.loads(done.stdout)}
    assert checks["engine"]["result"] == "tensorflow (auto: no accelerator seen)"
    assert checks["python"]["ok"]
    for engine in ("tensorflow", "jax"):
        assert re.match(r"\d+\.\d+\.\d+ sees no accelerator", checks[engine]["result"])


def test_a_script_of_the_user_gets_every_command_and_option() -> None:
    Path("mine.py").write_text(
        """
import keras
from pydantic import Field
import modelyard

class Wide(modelyard.Options):
    how_wide: int = Field(4, description="units")

@modelyard.register_model("mine", options=Wide)
def mine(data, options):
    inputs, x = modelyard.image_input(data)
    x = keras.layers.Dense(options.how_wide, name="dense")(keras.layers.Flatten(name="flatten")(x))
    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(x))

if __name__ == "__main__":
    modelyard.main()
"""
    )
    words = [
        "train-and-evaluate",
        "--model",
        "mine",
        "--how-wide",
        "3",
        "--train_steps",
        "5",
        "--model_dir",
        "run",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "mine.py", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "how_wide: 3" in Path("run/config.yaml").read_text()
    done = subprocess.run(
        [*COMMAND, "evaluate", "run", "--plugins", "mine.py", "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert last_json(done)["step"] == 5


def test_the_version_is_printed(command: Command) -> None:
    import modelyard

    assert command("--version").stdout.strip() == modelyard.__version__


def test_small_numbers_are_shown_and_not_rounded_to_nothing() -> None:
    assert [cell(value) for value in (1e-5, -2.5e-6, 0.0, 0.001, 2.30891, float("nan"))] == [
        "1e-05",
        "-2.5e-06",
        "0.0000",
        "0.0010",
        "2.3089",
        "nan",
    ]


@pytest.mark.parametrize("words", [["runs"], ["runs", "--model_dir"], ["evaluate"], ["leaderboard"]])
def test_a_name_of_a_run_cannot_control_the_terminal(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;owned\x07[bold]\x1b[2J"
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text('config_version: 1\nmodel: "\\e[31m[/]"\ntrain_steps: "\\e[2J"\n')
    with pytest.raises(SystemExit):
        main([*words, str(run)] if words != ["runs"] else words)
    printed = "".join(capfd.readouterr())
    assert not {"\x1b", "\x07"} & set(printed)
    assert "\\x1b" in printed


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "/dev/zero"])
@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl"])
@pytest.mark.parametrize("words", [["runs"], ["runs", "runs/theirs"], ["leaderboard", "runs"], ["evaluate", "theirs"]])
def test_a_file_of_a_strangers_run_is_no_traceback_and_no_hang(words: list[str], name: str, content: str) -> None:
    run = Path("runs/theirs")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config_text(load_config(model="mlp")))
    if content.startswith("/"):
        (run / name).symlink_to(content)
    else:
        (run / name).write_text(content + "\n")
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == (0 if words[0] == "runs" else 2)


@pytest.mark.parametrize("words", [["--version"], ["datasets"], ["datasets", "--json"]])
def test_a_full_standard_output_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False,
            timeout=PATIENCE,
        )  # fmt: skip
    assert done.stderr == "error: can't write to standard output: No space left on device.\n"
    assert done.returncode == 2


def test_a_closed_standard_output_is_no_error() -> None:
    words = " ".join([*COMMAND, "--version", ">&-"])
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, env=environment(), check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def lines_at_80(made: Any) -> list[str]:
    """The lines of a table in a terminal of 80 columns."""
    text = io.StringIO()
    SafeConsole(file=text, width=80).print(made)
    return text.getvalue().splitlines()


def test_tables_of_80_columns_break_no_short_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "width", lambda: 80)
    columns = ("run", "model", "dataset", "step", "status", "best", "test")
    row = ("2026-11-16-09_30_00-resnet20-clothing", "mlp", "clothing", 40, "interrupted", *[{"accuracy": 0.5}] * 2)
    lines = lines_at_80(output.table(columns, [row]))
    assert max(map(len, lines)) <= 80
    for word in ("mlp", "clothing", "interrupted", "accuracy", "0.5000", "test"):
        assert any(f" {word} " in line for line in lines), word
    models = [("majority class (baseline)", *["26.1 k – 116 k"] * 6)]
    lines = lines_at_80(output.table(("model", *["parameters"] * 3, "a b", "c d", "e f"), models))
    assert max(map(len, lines)) <= 80
    assert sum(line.count(" majority ") for line in lines) == 1


def test_the_list_of_runs_has_names_of_datasets_and_one_metric(command: Command) -> None:
    np.savez("mine.npz", x_train=np.zeros((40, 4, 4), np.uint8), y_train=np.arange(40) % 2)
    words = ("--model", "mlp", "--dataset", "mine.npz", "--train_steps", "2", "--test_fraction", "0.2", "--test_at_end")
    command("train-and-evaluate", *words, "--model_dir", "runs/one")
    (row,) = [line for line in command("runs").stdout.splitlines() if "one" in line]
    assert row.split()[5:6] == ["mine.npz"]
    assert row.count("accuracy") == 2
    assert "loss" not in row
