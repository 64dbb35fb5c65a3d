"""The words of a command line, before they are parsed."""

import pytest

from modelyard.cli.options import is_flag, normalize, part_fields, reworded, unknown_options
from modelyard.cli.training import train
from modelyard.config import resolve
from modelyard.config.schema import COMPONENTS, CORE_FIELDS
from modelyard.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "normal"),
    [
        (["--train-batch-size", "5"], ["--train_batch_size", "5"]),
        (["--train_batch_size=5"], ["--train_batch_size=5"]),
        (["--run-name=a-b"], ["--run_name=a-b"]),
        (["--run-name", "a-b"], ["--run_name", "a-b"]),
        (["train-and-evaluate", "--xla"], ["train-and-evaluate", "--xla"]),
        (["--xla", "true"], ["--xla"]),
        (["--xla=True"], ["--xla"]),
        (["--xla", "False"], ["--no_xla"]),
        (["--xla=0"], ["--no_xla"]),
        (["--no-xla"], ["--no_xla"]),
        (["--sync-batch-norm", "off", "--xla"], ["--no_sync_batch_norm", "--xla"]),
        (["--nesterov", "no"], ["--no_nesterov"]),
        (["--xla", "run"], ["--xla", "run"]),
        (["--", "--train-steps"], ["--", "--train-steps"]),
        (["-h"], ["-h"]),
    ],
)
def test_dashes_are_underscores_and_flags_take_true_and_false(words: list[str], normal: list[str]) -> None:
    assert normalize(words) == normal


def test_a_flag_with_another_value_is_a_config_error_with_the_others() -> None:
    given = unknown_options(normalize(["--xla=maybe", "--random-seed", "x"]))
    assert given == {"xla": "maybe", "random_seed": "x"}
    with pytest.raises(ConfigError) as caught:
        resolve(given, pick_up_files=False)
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages["xla"] == "must be true or false, got 'maybe'."
    assert messages["random_seed"] == "must be a whole number, got 'x'."


def test_options_of_a_users_part_are_taken_as_they_are() -> None:
    words = ["--my_depth", "3", "--my_flag", "--my_width=5"]
    assert unknown_options(words) == {"my_depth": "3", "my_flag": True, "my_width": "5"}


def test_words_that_are_no_options_are_named_with_the_other_mistakes() -> None:
    given = unknown_options(["train_steps", "5", "my-photos", "--train_stepps", "7"])
    with pytest.raises(ConfigError) as caught:
        resolve(given, pick_up_files=False)
    messages = [str(reworded(problem, train)) for problem in caught.value.problems]
    assert messages == [
        "command line: train_steps: is not an option. Did you mean --train_steps?",
        "command line: 5: is not an option.",
        "command line: my-photos: is not an option.",
        "command line: train_stepps: there is no such option. Did you mean 'train_steps' or 'train_epochs'?",
    ]


def test_flags_are_known_in_the_core_and_in_the_parts() -> None:
    assert is_flag("xla")
    assert is_flag("nesterov")
    assert not is_flag("train_steps")
    assert not is_flag("no_such_option")


def test_every_option_has_a_help_text() -> None:
    fields = {**CORE_FIELDS, **{name: info for name, (info, _, _) in part_fields().items()}}
    assert [name for name, info in fields.items() if not info.description] == []


def test_no_built_in_part_has_an_option_named_like_one_of_the_core() -> None:
    assert set(part_fields()) & set(CORE_FIELDS) == set()
    assert set(COMPONENTS) <= set(CORE_FIELDS)
