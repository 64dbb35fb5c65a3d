"""`modelyard models`: the list, and one model with its layers and options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.cli.app import main


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], two_devices: None) -> Callable[..., Any]:
    """What a command prints; with a status other than 0, on standard error."""

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        printed = capsys.readouterr()
        status = int(left.value.code or 0)
        return status, printed.err if status else printed.out

    return run


def test_the_list_has_every_model_with_what_it_costs(said: Callable[..., Any]) -> None:
    status, text = said("models", "--json")
    found = {entry["name"]: entry for entry in json.loads(text.splitlines()[-1])}
    assert status == 0
    assert found["resnet50"]["parameters"] == 25_636_712
    assert found["resnet50"]["image_shape"] == [224, 224, 3]
    assert found["mobilenet_v2"]["options"]["alpha"] == 1.0
    assert "7.72 G" in said("models")[1]


def test_one_model_is_shown_with_its_options_layers_and_cost(said: Callable[..., Any]) -> None:
    status, text = said("models", "resnet20", "--width", "4", "--image_shape", "16,16,1", "--classes", "3", "--json")
    found = json.loads(text.splitlines()[-1])
    assert status == 0
    assert found["layers"][-1] == {"name": "logits", "kind": "Dense", "output": "3", "parameters": 51}
    assert found["parameters"] == sum(layer["parameters"] for layer in found["layers"])
    assert 0 < found["trained"] < found["parameters"]
    text = said("models", "resnet20", "--width", "4", "--image_shape", "16,16,1")[1]
    assert "filters of the first stage" in text
    assert "stage3_block3_conv2" in text
    assert "FLOPs for an image of 16×16×1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet21"], "there is no model 'resnet21'"),
        (["--width", "4"], "--width is an option of a model. Name the model: modelyard models NAME --width"),
        (["resnet20", "--image_shape", "32"], "must be height, width and channels"),
        (["resnet20", "--alpha", "0.5"], "alpha"),
        (["mobilenet_v2", "--image_shape", "8,8,3"], "at least 32×32"),
    ],
)
def test_mistakes_are_told(said: Callable[..., Any], words: list[str], message: str) -> None:
    status, text = said("models", *words)
    assert status == 2
    assert message in " ".join(text.split())


PLUGIN = """
import keras
import modelyard

class Options(modelyard.Options):
    scale: float = 1.5

@modelyard.register_model("of_the_project")
def build(data, options):
    inputs, x = modelyard.image_input(data)
    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(keras.layers.Flatten()(x)))

@modelyard.register_dataset("data_of_the_project", options=Options)
def open_data(options, context):
    '''Data of the project.'''
"""


def test_the_plugins_of_the_project_are_known_without_naming_them(said: Callable[..., Any]) -> None:
    Path("code").mkdir()
    Path("code/mine.py").write_text(PLUGIN)
    Path("project.yaml").write_text("default: {plugins: [code/mine.py], model: nowhere, train_stepz: 3}\n")
    status, text = said("models", "of_the_project", "--json")
    assert (status, json.loads(text.splitlines()[-1])["name"]) == (0, "of_the_project")
    status, text = said("datasets", "data_of_the_project", "--json")
    found = json.loads(text.splitlines()[-1])
    assert (status, found["summary"], found["options"]) == (0, "Data of the project.", {"scale": 1.5})
    assert "data_of_the_project" in said("datasets")[1]
    assert "there is no dataset 'data_of_the_projekt'" in said("datasets", "data_of_the_projekt")[1]
    Path("project.yaml").write_text("default: {plugins: [gone.py]}\n")
    assert "project.yaml:1: plugins: there is no plugin file 'gone.py'" in said("models")[1]
