"""YAML files of options: sets, inheritance, and mistakes that are pointed at."""

from pathlib import Path
from typing import Any

import pytest

from modelyard.config.yaml_file import MAX_BYTES, dump, is_run_config, read_flat, read_set
from modelyard.errors import Problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


def read(file: Path, text: str | bytes, name: str | None = None) -> tuple[dict[str, Any], list[Problem]]:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[Problem] = []
    return {key: value.value for key, value in read_set(file, name, problems).items()}, problems


def only_problem(file: Path, text: str | bytes, name: str | None = None) -> Problem:
    _, problems = read(file, text, name)
    assert len(problems) == 1, problems
    return problems[0]


INHERITING = """
base: &base
  random_seed: 1
  learning_rate: 0.1
default:
  <<: *base
  learning_rate: 0.2
big: &big
  train_batch_size: 512
  random_seed: 3
both:
  <<: [*big, *base]
grandchild:
  <<: {<<: *base, xla: true}
  random_seed: 4
"""


def test_a_set_inherits_by_merge_key_and_its_own_values_win(file: Path) -> None:
    assert read(file, INHERITING) == ({"random_seed": 1, "learning_rate": 0.2}, [])


def test_of_several_parents_the_first_wins(file: Path) -> None:
    values, problems = read(file, INHERITING, "both")
    assert values == {"train_batch_size": 512, "random_seed": 3, "learning_rate": 0.1}
    assert problems == []


def test_inheritance_goes_over_generations(file: Path) -> None:
    values, _ = read(file, INHERITING, "grandchild")
    assert values == {"random_seed": 4, "learning_rate": 0.1, "xla": True}


def test_own_values_win_also_when_they_stand_before_the_merge_key(file: Path) -> None:
    assert read(file, "a: &a {x: 1}\ndefault:\n  x: 2\n  <<: *a\n")[0] == {"x": 2}


def test_each_value_knows_its_line_the_inherited_ones_too(file: Path) -> None:
    file.write_text(INHERITING)
    values = read_set(file, None, [])
    assert values["random_seed"].where == f"{file}:3"
    assert values["learning_rate"].where == f"{file}:7"


@pytest.mark.parametrize(
    "text",
    [
        "default: &a\n  x: 1\n  <<: *a\n",
        "default: &a\n  x: 1\n  <<: {<<: *a}\n",
        "default: &a\n  x: 1\n  <<: [{y: 1}, *a]\n",
    ],
)
def test_a_set_that_inherits_from_itself_is_a_mistake_and_not_a_hang(file: Path, text: str) -> None:
    values, problems = read(file, text)
    assert values["x"] == 1
    assert [problem.message for problem in problems] == ["this set inherits from itself."]


@pytest.mark.parametrize("text", ["<<: base", "<<: [*base, base]", "<<: 5", "<<:"])
def test_a_merge_key_without_the_star_of_an_anchor_is_a_mistake(file: Path, text: str) -> None:
    problem = only_problem(file, f"base: &base {{x: 1}}\ndefault:\n  {text}\n")
    assert (problem.where, problem.key) == (f"{file}:3", "<<")


def test_a_key_given_twice_is_a_mistake_that_names_both_lines(file: Path) -> None:
    problem = only_problem(file, "default:\n  train_steps: 1\n  random_seed: 1\n  train-steps: 2\n")
    assert (problem.where, problem.key) == (f"{file}:4", "train_steps")
    assert f"{file}:2" in problem.message


def test_a_set_given_twice_is_a_mistake(file: Path) -> None:
    problem = only_problem(file, "default:\n  x: 1\ndefault:\n  x: 2\n")
    assert (problem.where, problem.key) == (f"{file}:3", "default")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("default:\n  a: [1, 2\n", 3),
        ("default:\n\tx: 1\n", 2),
        ("default:\n  x: 1\n y: 2\n", 3),
        ("default:\n  x: *nobody\n", 2),
        ("default: {x: 1}}\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
    ],
)
def test_a_file_that_is_not_valid_yaml_is_named_with_the_line(file: Path, text: str, line: int) -> None:
    problem = only_problem(file, text)
    assert problem.where == f"{file}:{line}"
    assert "is not valid YAML" in problem.message


@pytest.mark.parametrize(
    "text",
    [
        "default:\n  x: 'a\x00b'\n",
        "default:\n  x: 'a\x07b'\n",
        b"default:\n  x: \xff\xfe\n",
        "default:\n  x: " + "[" * 5000,
        "default:\n  x: " + "[" * 330 + "]" * 330 + "\n",
        "[]\n",
        "just words\n",
        "? [a, b]\n: {x: 1}\n",
        "default:\n  ? {a: 1}\n  : 2\n",
        "default:\n  run_name: 2024-13-45\n",
        "default:\n  run_name: 0x_\n",
        "default:\n  random_seed: !!int many\n",
        "default:\n  x: {[1]: 2}\n",
        "default:\n  x: &x [*x]\n",
        "default: 5\n",
        "default: [a, b]\n",
    ],
)
def test_whatever_is_in_the_file_it_is_a_problem_of_that_file_and_no_traceback(file: Path, text: str | bytes) -> None:
    assert only_problem(file, text).where.startswith(str(file))


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "+1e-4", "10e-5", "0.0001"])
def test_one_e_minus_4_is_a_number_already_in_the_file(file: Path, text: str) -> None:
    value = read(file, f"default:\n  x: {text}\n")[0]["x"]
    assert isinstance(value, float)
    assert value == 1e-4


@pytest.mark.parametrize("text", ["1e", "e4", "1e4x", "v1e4", "1e-", "'1e4'"])
def test_what_only_resembles_a_number_is_text(file: Path, text: str) -> None:
    assert read(file, f"default:\n  x: {text}\n")[0]["x"] == text.strip("'")


def test_a_file_that_is_too_large_is_refused_unread(file: Path) -> None:
    assert "larger than 1 MiB" in only_problem(file, b"#" * (MAX_BYTES + 1)).message


def test_a_folder_is_no_file(file: Path) -> None:
    file.mkdir()
    problems: list[Problem] = []
    assert read_set(file, None, problems) == {}
    assert "can't be read" in problems[0].message


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{}']]",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/name:os.system",
        "!something x",
    ],
)
def test_a_tag_that_would_run_code_is_refused_and_runs_nothing(file: Path, tmp_path: Path, tag: str) -> None:
    trace = tmp_path / "it-ran"
    problem = only_problem(file, f"default:\n  random_seed: 1\n  run_name: {tag.format(trace)}\n")
    assert (problem.where, problem.key) == (f"{file}:3", "run_name")
    assert not trace.exists()


def test_options_outside_a_set_are_a_mistake_that_says_what_to_do(file: Path) -> None:
    problem = only_problem(file, "random_seed: 1\nlearning_rate: 2\n")
    assert (problem.where, problem.key) == (f"{file}:1", "random_seed")
    assert "default:" in problem.message


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "default:\n", "other:\n  x: 1\n"])
def test_a_file_without_options_by_default_gives_none(file: Path, text: str) -> None:
    assert read(file, text) == ({}, [])


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "default:\n  x: 1\n"])
def test_a_set_that_was_asked_for_and_is_not_there_is_a_mistake(file: Path, text: str) -> None:
    assert "'big'" in only_problem(file, text, "big").message


def test_a_recipe_is_flat(file: Path) -> None:
    file.write_text("model: mlp\nlearning-rate: 1e-3\n")
    values = read_flat(file, [])
    assert {key: value.value for key, value in values.items()} == {"model": "mlp", "learning_rate": 1e-3}


def test_the_config_of_a_run_is_known_by_its_version_and_has_no_sets(file: Path) -> None:
    file.write_text("# a run\nconfig_version: 1\nmodel: mlp\n")
    assert is_run_config(file)
    values, problems = read(file, file.read_text())
    assert values == {"config_version": 1, "model": "mlp"}
    assert problems == []
    assert "has no set 'big'" in only_problem(file, file.read_text(), "big").message
    file.write_text("default:\n  config_version: 1\n")
    assert not is_run_config(file)


@pytest.mark.parametrize(
    "value", ["1e4", "2e-5", "1E3", "12e4", "1_0e3", "0x10", "010", "no", "null", "~", "2024-01-01", "1:30", "", "a: b"]
)
def test_text_that_looks_like_something_else_stays_text(file: Path, value: str) -> None:
    file.write_text(dump({"run_name": value}))
    assert read_flat(file, [])["run_name"].value == value


@pytest.mark.parametrize("value", [1e-4, 1e22, 0.1, 1e-300, 5, True, None, [1, 2], "ünïcode ×", "two\nlines"])
def test_what_is_dumped_is_read_back(file: Path, value: object) -> None:
    file.write_text(dump({"x": value}), encoding="utf-8")
    read_back = read_flat(file, [])["x"].value
    assert read_back == value
    assert type(read_back) is type(value)
