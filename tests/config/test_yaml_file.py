"""YAML files of options: sets, inheritance, and mistakes that are pointed at."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

import modelyard
from modelyard.config import load_config, yaml_file
from modelyard.config.yaml_file import MAX_BYTES, dump, is_run_config, read_flat, read_set
from modelyard.errors import ConfigError, Problem
from modelyard.launcher.template import fill_yaml


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
    assert only_problem(file, text).message == "this set inherits from itself."


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


def merges(levels: int) -> str:
    """Sets that inherit from the one before three times."""
    sets = [f"s{n}: &s{n} {{<<: [{', '.join([f'*s{n - 1}'] * 3)}]}}" for n in range(1, levels)]
    return "\n".join(["s0: &s0 {train_steps: 5}", *sets, f"default: {{<<: *s{levels - 1}}}"])


def lists(levels: int) -> str:
    """Lists that have the one before nine times."""
    lists = [f"  v{n}: &v{n} [{', '.join([f'*v{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(["x:", "  v0: &v0 [a]", *lists, f"default: {{hooks: *v{levels - 1}}}"])


_LIMITS = "more than (1,000 values|50 levels)|itself"
BOMBS = {
    "merge keys": merges(30),
    "lists": lists(12),
    "inner merge keys": "x: 1\n" + merges(30).replace("default: ", "default: {hooks: ").rstrip() + "}",
    "deep": "default: {hooks: " + "[" * 2000,
    "deep by lines": "default:\n" + "\n".join(" " * level + "a:" for level in range(1, 300)),
    "deep by anchors": "x:\n  v0: &v0 [a]\n" + "\n".join(f"  v{n}: &v{n} [*v{n - 1}]" for n in range(1, 500)),
    "wide": "default: {hooks: [" + "a," * 2000 + "]}",
    "itself": "x: &x [*x, *x]\ndefault: {hooks: *x}",
    "itself by merge keys": "default: {hooks: &x {" + "<<: *x, " * 40 + "a: 1}}",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_one_mistake(file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MAX_VALUES", 1000)  # 100,000 take a while
    message = only_problem(file, text).message
    assert re.search(_LIMITS, message), message


_LONG = {
    "decimal": "9" * 5000,
    "hexadecimal": "0x" + "f" * 5000,
    "base 60": "1" + ":59" * 200_000,
    "base 60 with a fraction": "1" + ":59" * 200_000 + ".5",
}


@pytest.mark.parametrize("number", _LONG.values(), ids=_LONG)
def test_a_long_number_is_one_mistake(file: Path, number: str) -> None:
    """Those in base 60 take minutes, and no integer of more than 4,300 digits can be shown."""
    for text in (
        f"default: {{train_steps: {number}}}",
        f"default: {{hooks: [{{early_stop: {{patience: {number}}}}}]}}",
    ):
        assert "a number has more than 100 characters" in only_problem(file, text).message


@pytest.mark.parametrize("text", ["hooks: ['a{}!']", "hooks: ['{}!']", "eval_every: '1{}!'"])
def test_a_long_text_is_refused_at_once(file: Path, text: str) -> None:
    """Blanks that may belong to either of two parts of a pattern take the square of their number: minutes here."""
    file.write_text("default: {model: mlp, dataset: digits, " + text.format(" " * 500_000) + "}")
    with pytest.raises(ConfigError, match=r"is not a (name or|duration)"):
        load_config(config_file=str(file))


@pytest.mark.parametrize("bomb", ["merge keys", "lists", "itself by merge keys"])
def test_no_file_is_read_without_limits(file: Path, bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a file is named: as config, hyperparameters, recipe, matrix, resources, template."""
    monkeypatch.setattr(yaml_file, "MAX_VALUES", 1000)
    file.write_text(BOMBS[bomb])
    for option in ("config_file", "hyperparameter_file", "recipe"):
        with pytest.raises(ConfigError, match=_LIMITS):
            load_config(**{option: str(file)})
    with pytest.raises(ConfigError, match=_LIMITS):
        modelyard.matrix(file, output="m")
    with pytest.raises(ConfigError, match=_LIMITS):
        modelyard.submit("kubernetes", ["train", "--model_dir", "gs://runs/a"], dry_run=True, resources=file)
    with pytest.raises(ConfigError, match=_LIMITS):
        fill_yaml(file.read_text(), {}, (), str(file))


def test_arguments_in_text_are_limited_too() -> None:
    doubled = ", ".join(f"&v{n} [*v{n - 1}, *v{n - 1}]" for n in range(1, 25))
    arguments = f"[&v0 [x], {doubled}]"
    with pytest.raises(ConfigError):
        load_config(hooks=f"+early_stop(patience={'[' * 500})")
    with pytest.raises(ConfigError):
        load_config(hooks=f"+early_stop(patience={arguments})")


def test_sets_that_inherit_from_many_are_read(file: Path) -> None:
    values, problems = read(file, merges(8))
    assert (values, problems) == ({"train_steps": 5}, [])


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "pipe"])
def test_a_link_to_a_device_or_a_pipe_is_no_file(file: Path, target: str) -> None:
    if target == "pipe":
        os.mkfifo("pipe")
    file.symlink_to(Path(target).absolute())
    problems: list[Problem] = []
    assert read_set(file, None, problems) == {}
    assert "is not a file" in problems[0].message
    assert not is_run_config(file)
