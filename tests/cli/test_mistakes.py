"""All mistakes in what was typed are in one list, before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import environment
from modelyard.cli.app import main
from waiting import PATIENCE

HEAVY = ("keras", "tensorflow", "jax")


def mistakes(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of the list of mistakes of a command, each from its key on."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    heading, *lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert heading.endswith(f"{len(lines)} mistake{'s' if len(lines) != 1 else ''} in the config:"), heading
    return [line.strip().partition("command line: ")[2] for line in lines]


def test_nothing_heavy_is_imported_to_list_all_kinds_of_mistakes() -> None:
    words = [
        *("train-and-evaluate", "maybe", "--plugins", "nowhere.py", "--model", "resnet50", "--dataset", "./photos"),
        *("--checkpoint_path", "weights.h5", "--pretrained", "imagenets.h5", "--train_batch_sise", "8"),
    ]
    program = (
        "import json, sys\n"
        "from modelyard.cli.app import main\n"
        "try:\n    main(json.loads(sys.argv[1]))\n"
        "finally:\n    print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(words)],
        capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert set(HEAVY).isdisjoint(done.stdout.split())
    assert [line.split(": ")[1] for line in done.stderr.splitlines()[1:]] == [
        *("plugins", "maybe", "train_batch_sise", "dataset", "checkpoint_path", "pretrained"),
    ]


@pytest.mark.parametrize("command", ["train", "train-and-evaluate", "find-learning-rate", "config"])
def test_a_stray_word_hides_no_mistake(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = mistakes(capsys, command, "maybe", "--model", "resnet21", "--train_steps", "many")
    assert sorted(line.split(":")[0] for line in found) == ["maybe", "model", "train_steps"]
    assert "maybe: is not an option." in found


def test_a_word_that_lacks_its_option_is_named_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("clothing").mkdir()
    (meant,) = mistakes(capsys, "train-and-evaluate", "clothing")
    assert meant == "clothing: is not an option. Did you mean --dataset clothing?"
    (meant,) = mistakes(capsys, "train", "mlp")
    assert meant == "mlp: is not an option. Did you mean --model mlp?"
    (meant,) = mistakes(capsys, "train", "--dataset", "clothng")
    assert meant.endswith("Did you mean the folder 'clothing'?")


def test_a_part_of_a_step_is_named_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = mistakes(capsys, "train", "--model", "mlp", "--dataset", "digits", "--fine_tune", "head(until=0.5), all")
    assert (
        "until must be a whole number of steps, got 0.5. A part of the run is '50 %', of an epoch '0.5 epochs'" in found
    )


def test_a_missing_plugin_hides_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    found = mistakes(capsys, "config", "--plugins", "nowhere.py,no.such.module", "--model", "tiny", "--xla=maybe")
    assert sorted(line.split(":")[0] for line in found) == ["model", "plugins", "plugins", "xla"]
    (unknown,) = [line for line in found if line.startswith("model")]
    assert unknown.endswith("Perhaps a plugin has it; they were not imported.")


def test_a_plugin_is_not_imported_for_a_config_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("open('imported', 'w')\n")
    mistakes(capsys, "config", "--plugins", "mine.py", "--train_steps", "many")
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("dataset", ()),
        ("checkpoint_path", ()),
        ("pretrained", ("--model", "mobilenet_v2")),
        ("train_files", ("--dataset", "files")),
        ("labels_file", ("--dataset", "files")),
    ],
)
def test_files_that_are_missing_are_mistakes(key: str, more: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/weights.h5").touch()
    found = mistakes(capsys, "config", f"--{key}", "data/wieghts.h5", *more, "--train_steps", "many")
    assert [line.split(":")[0] for line in found] == ["train_steps", key]
    assert found[1] == f"{key}: there is no file or folder data/wieghts.h5. Did you mean 'data/weights.h5'?"


@pytest.mark.parametrize(
    "words",
    [
        ("--checkpoint_path", "tf/model.ckpt-7"),  # the prefix of a checkpoint of TensorFlow
        ("--dataset", "files", "--train_files", "photos/*/*.jpg"),
        ("--model", "resnet50", "--pretrained", "imagenet"),
        ("--dataset", "s3://nowhere/photos"),
        ("--model_dir", "run", "--checkpoint_path", "gone.h5"),  # a run that exists has its weights
    ],
)
def test_files_that_are_there_or_not_needed_are_no_mistakes(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("tf/model.ckpt-7.index", "photos/cat/1.jpg", "run/config.yaml"):
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    with pytest.raises(SystemExit) as left:
        main(["config", *words])
    assert left.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--modles", "mlp"], ["output", "modles"]),
        (["-models", "mlp"], ["output", "-models", "mlp"]),
        (["--seeds", "none", "--jobs", "0", "maybe.yaml"], ["output", "jobs", "seeds", "maybe.yaml"]),
        (["--models", "mlp", "--datasets", "digits,./gone", "maybe", "--output", "m"], ["maybe", "dataset"]),
    ],
)
def test_a_matrix_lists_all_mistakes_and_takes_no_option_for_its_file(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["matrix", *words])
    assert left.value.code == 2
    text = capsys.readouterr().err
    for key in expected:
        assert f"{key}: " in text, text
    assert os.listdir() == []  # noqa: PTH208 - names only


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["predict", "--outpt", "x"], ["outpt: there is no such option. Did you mean 'output'?", "no run is given"]),
        (
            ["predict", "nowhere", "x.png", "--topp", "3"],
            ["topp: there is no such option. Did you", "nowhere does not"],
        ),
        (
            ["evaluate", "nowhere", "--eval_batch_sise", "3"],
            ["eval_batch_sise: there is no such option", "nowhere does"],
        ),
    ],
)
def test_a_missing_run_hides_no_misspelt_option(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    found = mistakes(capsys, *words)
    assert len(found) == len(expected)
    for line, text in zip(found, expected, strict=True):
        assert text in line


def test_whole_numbers_of_commands_may_have_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = mistakes(capsys, "find-learning-rate", "--model", "mlp", "--steps", "1e1", "--train_step", "3")
    assert line.startswith("train_step: ")  # and not one about --steps
    with pytest.raises(SystemExit):
        main(["find-learning-rate", "--model", "mlp", "--steps=1.5e0"])
    assert "Invalid value for '--steps'" in capsys.readouterr().err
