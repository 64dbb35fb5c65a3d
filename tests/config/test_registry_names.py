"""Parts by name."""

import subprocess
import sys

import pytest

from modelyard.errors import UserError, nearest, unknown
from modelyard.registry import Options, Registry


def test_an_unknown_name_lists_the_near_ones_best_first() -> None:
    colours = Registry("colour")
    for name in ("red", "green", "grey"):
        colours.register(name)(lambda: None)
    with pytest.raises(UserError, match=r"there is no colour 'gren'\. Did you mean 'green' or 'grey'"):
        colours.get("gren")


def test_case_does_not_keep_a_name_from_being_near() -> None:
    assert nearest("RESNET20", ["resnet20", "mlp"]) == ["resnet20"]
    assert nearest("resnet20", ["ResNet20"]) == ["ResNet20"]


def test_a_long_list_is_cut() -> None:
    names = [f"name{i:03d}" for i in range(100)]
    text = unknown("thing", "zzz", names)
    assert "name029" in text
    assert "name030" not in text
    assert text.endswith("….")
    assert unknown("thing", "zzz", []).endswith("Known: none.")


def test_a_name_that_is_taken_is_refused_and_the_same_function_again_is_not() -> None:
    colours = Registry("colour")

    def red() -> None:
        """The colour of tomatoes.

        More.
        """

    def other() -> None: ...

    colours.register()(red)
    colours.register("red")(red)
    with pytest.raises(UserError, match="exists already"):
        colours.register("red")(other)
    assert colours.get("red").load() is red
    assert colours.get("red").summary == "The colour of tomatoes."


def test_a_part_may_carry_its_options_itself() -> None:
    class Own(Options):
        size: int = 3

    class Part:
        Options = Own

    parts = Registry("part")
    parts.register()(Part)
    assert parts.get("Part").options is Own


def test_names_options_and_config_errors_need_neither_tensorflow_nor_keras() -> None:
    """Promise 8: every config error that needs neither devices nor a user's code comes before the heavy imports."""
    program = """
import sys
from modelyard.cli.options import normalize, part_fields
from modelyard.config import load_config
from modelyard.errors import ConfigError
from modelyard.registry import AUGMENTATIONS, DATASETS, ENGINES, HOOKS, MODELS, OPTIMIZERS, SCHEDULES
for registry in (AUGMENTATIONS, DATASETS, ENGINES, HOOKS, MODELS, OPTIMIZERS, SCHEDULES):
    assert registry.names()
normalize(["--xla"]), part_fields()
load_config(model="resnet20", augment="flip_left_right", hooks="+early_stop")
try:
    load_config(model="resnet21")
except ConfigError:
    pass
heavy = {"tensorflow", "jax", "keras", "sklearn", "tensorboard"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)
