"""The space of a search, as a user writes it: valid ones, and messages for mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.errors import ConfigError
from modelyard.tuning.space import Choice, Range, options_of, read_space


def test_a_space_has_lists_ranges_and_conditions() -> None:
    space, _ = read_space(
        "learning_rate=log(1e-4, 1), dropout=uniform(0, .5, step=.1) if model=[simple_cnn, mlp], "
        "model=[mlp, simple_cnn, resnet20], weight_decay=[0, 1e-4], hidden-units=[[8], [32, 16]], "
        "depth=int(2, 8, step=2)",
        "here",
    )
    assert list(space)[-1] == "dropout", "it comes after what it depends on"
    assert space["learning_rate"].domain == Range(1e-4, 1.0, is_log=True)
    assert space["weight_decay"].domain == Choice((0, 1e-4))
    assert space["hidden_units"].domain == Choice(([8], [32, 16]))
    depth, dropout = space["depth"].domain, space["dropout"].domain
    assert [value for value in range(10) if depth.contains(value)] == [2, 4, 6, 8]
    assert [dropout.contains(value) for value in (0.3, 0.35, True)] == [True, False, False]
    assert space["dropout"].exists({"model": "mlp"})
    assert not space["dropout"].exists({"model": "resnet20"})
    assert not space["dropout"].exists({})


def test_a_space_comes_from_a_file_or_from_python(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(
        "space: {learning_rate: 'log(1e-4, 1)', model: [mlp, simple_cnn]}\noptions: {train_steps: 5}\n"
    )
    space, options = read_space(str(tmp_path / "space.yaml"), "here")
    assert space == read_space({"learning_rate": "log(1e-4, 1)", "model": ["mlp", "simple_cnn"]}, "Python")[0]
    assert options["train_steps"].value == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "is empty"),
        ("learning_rate", "is not option=values"),
        ("a=[1, 2], a=[3, 4]", "in the space twice"),
        ("a=log(0, 1)", "begins above 0"),
        ("a=log(1)", "low < high"),
        ("a=uniform(2, 1)", "low < high"),
        ("a=uniform(0, x)", "of numbers"),
        ("a=uniform(0, 1, step=3)", "step that does not fit"),
        ("a=uniform(0, 1, by=.1)", "a low and a high number"),
        ("a=int(0.5, 2)", "whole numbers"),
        ("a=normal(0, 1)", "must be \\[a, b, c\\], uniform"),
        ("a=[]", "has no values"),
        ("a=[1, 1]", "lists 1 twice"),
        ("a=[1, 2] if b=1", "no parameter of the space 'b'"),
        ("a=[1, 2] if b=3, b=[1, 2]", "which b never has"),
        ("a=[1, 2] if b=1, b=[1, 2] if a=1", "depends on itself"),
        ("3a=[1, 2]", "not the name of an option"),
    ],
)
def test_what_is_no_space_is_told(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_space(given, "here")


def test_a_file_with_other_sections_is_told(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("axes: {model: [mlp, simple_cnn]}\nspace: [1]\n")
    with pytest.raises(ConfigError, match=r"(?s)space.yaml:1: axes: .*space.yaml:2: space: must hold") as raised:
        read_space(str(tmp_path / "space.yaml"), "here")
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"learning_rate": 0.1}, {"learning_rate": 0.1}),
        ({"augment.cutout.size": 4}, {"augment": ["flip_left_right", "cutout(size=4, fill=mean)"]}),
    ],
)
def test_arguments_of_names_in_a_list_vary(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options_of(values, {"augment": "flip_left_right, cutout(size=8, fill=mean)"}) == expected


def test_an_argument_of_what_is_not_in_the_list_is_told() -> None:
    with pytest.raises(ValueError, match="cutout is not in augment"):
        options_of({"augment.cutout.size": 4}, {"augment": "flip_left_right"})
    with pytest.raises(ValueError, match=r"option\.name\.argument"):
        options_of({"augment.cutout": 4}, {})
