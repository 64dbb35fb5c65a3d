"""One config decides everything: precedence, origins, and every mistake at once."""

from pathlib import Path

import pytest

from modelyard.config import load_config, resolve
from modelyard.config.resolve import DEFAULT_RECIPE, recipe_names
from modelyard.errors import ConfigError, Problem, UserError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def problems_of(**given: object) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    return caught.value.problems


def only_problem(**given: object) -> Problem:
    problems = problems_of(**given)
    assert len(problems) == 1, problems
    return problems[0]


# -- precedence -----------------------------------------------------------------------------------------------------


def five_levels(upto: int) -> dict[str, object]:
    """The same option at more and more levels: recipe, project.yaml, hyperparameters.yaml, command line."""
    if upto >= 1:
        write("mine.yaml", "model: mlp\ntrain_batch_size: 1\n")
    if upto >= 2:
        write("project.yaml", "default:\n  recipe: mine.yaml\n  train_batch_size: 2\n")
    if upto >= 3:
        write("hyperparameters.yaml", "default:\n\n  train_batch_size: 3\n")
    given: dict[str, object] = {"train_batch_size": "4"} if upto >= 4 else {}
    return given | ({"recipe": "mine.yaml"} if upto == 1 else {})


@pytest.mark.parametrize(
    ("upto", "value", "origin"),
    [
        (0, 64, "default"),
        (1, 1, "mine.yaml:2"),
        (2, 2, "project.yaml:3"),
        (3, 3, "hyperparameters.yaml:3"),
        (4, 4, "command line"),
    ],
)
def test_default_recipe_project_hyperparameters_command_line_in_this_order(upto: int, value: int, origin: str) -> None:
    given = five_levels(upto) or {"model": "mlp"}
    config = resolve(given)
    assert config.train_batch_size == value
    assert config.origin("train_batch_size") == origin


def test_each_level_keeps_what_the_higher_ones_do_not_say() -> None:
    write("project.yaml", "default:\n  model: mlp\n  hidden_units: [7]\n  random_seed: 1\n")
    write("hyperparameters.yaml", "default:\n  random_seed: 2\n  learning_rate: 0.5\n")
    config = resolve({"learning_rate": "0.25"})
    assert (config.model, config.random_seed, config.learning_rate) == ("mlp", 2, 0.25)
    assert config.component_options["hidden_units"] == [7]
    assert config.origin("hidden_units") == "project.yaml:3"


def test_named_files_and_sets_replace_the_usual_ones() -> None:
    write("project.yaml", "default:\n  random_seed: 1\n")
    write("other.yaml", "default:\n  random_seed: 2\nbig:\n  random_seed: 3\n  hyperparameter_set: wide\n")
    write("hyperparameters.yaml", "default:\n  learning_rate: 1\nwide:\n  learning_rate: 2\n")
    assert resolve({}).random_seed == 1
    assert resolve({"config_file": "other.yaml"}).random_seed == 2
    named = resolve({"config_file": "other.yaml", "config_set": "big"})
    assert (named.random_seed, named.learning_rate) == (3, 2)


def test_files_are_not_picked_up_from_python() -> None:
    write("project.yaml", "default:\n  random_seed: 1\n")
    assert load_config(model="mlp").random_seed == 0
    assert load_config(model="mlp", config_file="project.yaml").random_seed == 1


def test_nothing_said_is_the_default_recipe() -> None:
    config = resolve({})
    assert (config.recipe, config.model, config.dataset) == (DEFAULT_RECIPE, "simple_cnn", "digits")
    assert config.test_at_end
    assert config.origin("test_at_end") == f"recipe {DEFAULT_RECIPE}"


def test_a_named_model_or_dataset_is_not_the_default_recipe() -> None:
    for given in ({"model": "mlp"}, {"dataset": "digits"}):
        config = resolve(given)
        assert config.recipe is None
        assert not config.test_at_end


def test_every_recipe_that_comes_with_the_package_resolves() -> None:
    assert DEFAULT_RECIPE in recipe_names()
    for name in recipe_names():
        assert resolve({"recipe": name}).recipe == name


def test_dashes_are_underscores_in_files_and_in_python() -> None:
    write("project.yaml", "default:\n  train-batch-size: 5\n")
    assert resolve({}).train_batch_size == 5
    assert resolve({"train-batch-size": 6}).train_batch_size == 6


def test_none_on_the_command_line_is_not_given() -> None:
    config = resolve({"model": "mlp", "train_batch_size": None})
    assert config.train_batch_size == 64
    assert config.origin("train_batch_size") == "default"


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "+1e-4", "0.0001", "'1e-4'", "10e-5"])
def test_one_e_minus_4_in_yaml_is_a_number(text: str) -> None:
    write("project.yaml", f"default:\n  learning_rate: {text}\n")
    assert resolve({}).learning_rate == 1e-4


@pytest.mark.parametrize("text", ["False", "false", "no", "off", "0", "'False'", "'false'", "'no'"])
def test_false_is_false_however_it_is_written(text: str) -> None:
    write("project.yaml", f"default:\n  sync_batch_norm: {text}\n")
    assert resolve({}).sync_batch_norm is False
    assert resolve({"sync_batch_norm": text.strip("'")}).sync_batch_norm is False


@pytest.mark.parametrize("text", ["True", "yes", "on", "1", "'True'"])
def test_true_is_true_however_it_is_written(text: str) -> None:
    write("project.yaml", f"default:\n  xla: {text}\n")
    assert resolve({}).xla is True


def test_lists_are_the_same_in_yaml_and_on_the_command_line() -> None:
    write("project.yaml", "default:\n  model: mlp\n  hidden_units: [64, 32]\n")
    assert resolve({}).component_options["hidden_units"] == [64, 32]
    for text in ("64,32", "64, 32", "[64, 32]", [64, 32], (64, 32)):
        assert resolve({"model": "mlp", "hidden_units": text}).component_options["hidden_units"] == [64, 32]


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("key", ["train_epochs", "learning_rate", "clip_norm", "adam_epsilon"])
def test_numbers_must_be_finite(key: str, text: str) -> None:
    write("project.yaml", f"default:\n  {key}: {text}\n")
    problem = only_problem(model="mlp")
    assert (problem.where, problem.key) == ("project.yaml:2", key)
    assert "finite" in problem.message or "greater than 0" in problem.message


# -- two ways to say one thing --------------------------------------------------------------------------------------

PAIRS = [("train_steps", "5", "train_epochs", "3"), ("eval_every", "5 steps", "epochs_between_evals", "3")]


@pytest.mark.parametrize(("one", "a", "other", "b"), PAIRS)
def test_both_of_a_pair_at_one_level_is_an_error(one: str, a: str, other: str, b: str) -> None:
    on_the_line = only_problem(**{one: a, other: b})
    assert (on_the_line.where, on_the_line.key) == ("command line", one)
    assert other in on_the_line.message
    write("project.yaml", f"default:\n  {other}: {b}\n  {one}: {a}\n")
    assert only_problem().where == "project.yaml:3"


@pytest.mark.parametrize(("one", "a", "other", "b"), PAIRS)
def test_a_higher_level_displaces_the_other_of_a_pair(one: str, a: str, other: str, b: str) -> None:
    for low, low_value, high, high_value in ((one, a, other, b), (other, b, one, a)):
        write("project.yaml", f"default:\n  {low}: {low_value}\n")
        config = resolve({high: high_value})
        assert getattr(config, low) is None
        assert str(getattr(config, high)).split()[0].rstrip(".0") == high_value.split()[0]
        assert config.origin(low) == f"command line, displaced by {high}"


def test_the_other_of_a_pair_may_stand_beside_it_empty() -> None:
    write("project.yaml", "default:\n  train_steps: 5\n  train_epochs:\n")
    config = resolve({})
    assert (config.train_steps, config.train_epochs) == (5, None)


@pytest.mark.parametrize("key", ["train_epochs", "epochs_between_evals"])
def test_a_pair_with_neither_is_an_error_where_it_was_emptied(key: str) -> None:
    write("project.yaml", f"default:\n  random_seed: 1\n  {key}: null\n")
    problem = only_problem()
    assert (problem.where, problem.key) == ("project.yaml:3", key)


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("model", "resnet21", "resnet20"),
        ("dataset", "cifra10", "cifar10"),
        ("optimizer", "adma", "adam"),
        ("learning_rate_schedule", "cosin", "cosine"),
        ("hooks", "+early_stopp", "early_stop"),
        ("augment", "pad_and_corp", "pad_and_crop"),
        ("recipe", "digit", "digits"),
        ("engine", "tensorflw", "tensorflow"),
        ("precision", "bfloat_16", "bfloat16"),
        ("resume", "nevr", "never"),
    ],
)
def test_an_unknown_name_brings_the_nearest(key: str, value: str, near: str) -> None:
    problem = only_problem(**{key: value})
    assert (problem.where, problem.key) == ("command line", key)
    assert repr(near) in problem.message


def test_an_unknown_name_with_nothing_near_lists_all() -> None:
    message = only_problem(optimizer="zzzzzz").message
    assert all(name in message for name in ("sgd", "adam", "adamw", "rmsprop", "muon"))


def test_an_unknown_key_brings_the_nearest() -> None:
    write("project.yaml", "default:\n  trian_batch_size: 5\n")
    problem = only_problem()
    assert (problem.where, problem.key) == ("project.yaml:2", "trian_batch_size")
    assert "'train_batch_size'" in problem.message


def test_a_misspelt_option_of_the_chosen_model_brings_the_nearest() -> None:
    assert "'hidden_units'" in only_problem(model="mlp", hiden_units="3").message


def test_an_unknown_set_brings_the_nearest() -> None:
    write("project.yaml", "default:\n  random_seed: 1\nlarge:\n  random_seed: 2\n")
    problem = only_problem(config_set="larg")
    assert problem.where == "project.yaml"
    assert "'large'" in problem.message


@pytest.mark.parametrize(
    ("key", "file"), [("config_set", "project.yaml"), ("hyperparameter_set", "hyperparameters.yaml")]
)
def test_a_set_without_a_file_says_which_file_is_missing(key: str, file: str) -> None:
    problem = only_problem(**{key: "big"})
    assert problem.key == key
    assert file in problem.message


@pytest.mark.parametrize("key", ["config_file", "hyperparameter_file", "recipe"])
def test_a_file_that_is_not_there_is_named(key: str) -> None:
    assert "missing.yaml: there is no such file" in str(only_problem(**{key: "missing.yaml"}))


def test_five_mistakes_are_five_problems_at_once() -> None:
    write(
        "project.yaml",
        "default:\n  model: resnet21\n  trian_steps: 5\n  learning_rate: fast\n"
        "  precision: float23\n  optimizer: adma\n",
    )
    with pytest.raises(ConfigError) as caught:
        resolve({})
    found = {problem.key: problem for problem in caught.value.problems}
    expected = {
        "model": (2, "'resnet20'"),
        "trian_steps": (3, "'train_steps'"),
        "learning_rate": (4, "a number, got 'fast'"),
        "precision": (5, "'float32'"),
        "optimizer": (6, "'adam'"),
    }
    assert len(caught.value.problems) == 5
    assert set(found) == set(expected)
    for key, (line, right) in expected.items():
        assert found[key].where == f"project.yaml:{line}"
        assert right in found[key].message
        assert f"project.yaml:{line}: {key}: " in str(caught.value)
    assert str(caught.value).startswith("5 mistakes in the config:")


def test_mistakes_of_all_levels_are_gathered() -> None:
    write("project.yaml", "default:\n  train_batch_size: 0\n")
    write("hyperparameters.yaml", "default:\n  momentun: 1\n")
    wheres = {(p.where, p.key) for p in problems_of(optimizer="sgd", random_seed="-1")}
    assert wheres == {
        ("project.yaml:2", "train_batch_size"),
        ("hyperparameters.yaml:2", "momentun"),
        ("command line", "random_seed"),
    }


def test_several_wrong_calls_are_each_reported() -> None:
    keys = [p.message for p in problems_of(model="mlp", hooks="+early_stop(patiense=3),+stop_at,+nothing")]
    assert len(keys) == 3
    assert "'patience'" in keys[0]
    assert "value" in keys[1]
    assert "'nothing'" in keys[2]


def test_a_config_error_is_a_mistake_of_the_user() -> None:
    assert issubclass(ConfigError, UserError)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"gpu_id": "1", "num_gpus": "2"}, "gpu_id"),
        ({"train_batch_size": "10", "gradient_accumulation": "3"}, "gradient_accumulation"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], key: str) -> None:
    assert only_problem(**given).key == key


def test_wall_clock_time_is_refused_where_it_would_change_training() -> None:
    assert "wall-clock" in only_problem(model="mlp", warmup="5 min").message
    assert "wall-clock" in only_problem(model="mlp", eval_every="5 min").message
    assert resolve({"model": "mlp", "save_every": "5 min"}).save_every.seconds == 300


# -- options of parts -----------------------------------------------------------------------------------------------


def test_options_of_the_chosen_parts_are_complete() -> None:
    config = resolve({"model": "mlp", "optimizer": "sgd", "learning_rate_schedule": "cosine", "dataset": "synthetic"})
    assert set(config.component_options) == {
        "hidden_units", "dropout_rate", "label_smoothing", "class_weights", "focal_gamma", "regression_loss",
            "huber_delta", "momentum", "nesterov", "weight_decay",
        "end_learning_rate", "synthetic_examples", "synthetic_shape", "synthetic_classes", "synthetic_noise",
    }  # fmt: skip
    assert set(config.component_options) <= set(config.flat())


def test_an_option_of_a_part_that_was_not_chosen_is_an_error_on_the_command_line() -> None:
    problem = only_problem(model="mlp", optimizer="adam", nesterov="true")
    assert (problem.where, problem.key) == ("command line", "nesterov")
    assert "optimizer sgd" in problem.message


def test_an_option_of_a_part_that_was_not_chosen_is_a_note_from_a_file() -> None:
    write("hyperparameters.yaml", "default:\n  momentum: 0.5\n")
    config = resolve({"model": "mlp", "optimizer": "adam"})
    assert "momentum" not in config.flat()
    assert len(config.notes) == 1
    assert config.notes[0].startswith("hyperparameters.yaml:2: momentum has no effect here")
    assert resolve({"model": "mlp", "optimizer": "sgd"}).component_options["momentum"] == 0.5


def test_an_option_of_one_schedule_names_the_flag_that_chooses_it() -> None:
    with pytest.raises(ConfigError, match="Add --learning_rate_schedule piecewise, or leave it out"):
        load_config(model="mlp", dataset="digits", decay_values=[0.1, 0.2])


def test_groups_given_beside_a_mistake_are_read_as_ever() -> None:
    groups = "sgd(match='logits/*', learning_rate=0.1), adam(match='*/bias')"
    assert only_problem(model="mlp", ema_decay="2", optimizer_groups=groups).key == "ema_decay"
    both = problems_of(model="mlp", ema_decay="2", optimizer_groups=groups.replace("adam", "adan"))
    assert [problem.key for problem in both] == ["ema_decay", "optimizer_groups"]


def test_of_a_list_the_wrong_name_is_said_and_no_name_counts_twice() -> None:
    for given in ("flip,shfit", ["flip", "shfit"]):
        said = only_problem(model="mlp", test_time_augmentation=given).message
        assert said == "must be one of flip, shift, got 'shfit'. Did you mean 'shift'?"
    assert only_problem(model="mlp", test_time_augmentation="flip, flip").message == "names 'flip' twice."


def test_parameters_are_divided_on_jax_only_and_that_is_said_with_the_other_mistakes() -> None:
    found = problems_of(model="mlp", engine="tensorflow", shard_parameters="true", ema_decay="2")
    assert [problem.key for problem in found] == ["ema_decay", "shard_parameters"]
    resolve({"model": "mlp", "engine": "jax", "shard_parameters": "true"})


def test_alternating_flips_leave_no_probability() -> None:
    said = only_problem(model="mlp", augment="flip_left_right(alternate=true, probability=0.3)").message
    assert "probability and alternate exclude each other" in said
    resolve({"model": "mlp", "augment": "flip_left_right(alternate=false, probability=0.3)"})


def test_an_unknown_model_is_one_problem_though_its_options_are_unknown_too() -> None:
    assert only_problem(model="mpl", hidden_units="3").key == "model"


def test_a_dataset_may_be_a_file() -> None:
    Path("data.npz").touch()
    config = resolve({"model": "mlp", "dataset": "./data.npz"})
    assert config.entry("dataset").name == "files"


def test_a_resolved_config_can_not_be_changed() -> None:
    config = resolve({"model": "mlp"})
    with pytest.raises(ValueError, match="frozen"):
        config.random_seed = 5


# -- whole numbers, sets and the default recipe ------------------------------------------------------------------


def test_a_whole_number_may_have_an_exponent() -> None:
    config = resolve(
        {"model": "mlp", "train_steps": "1e3", "num_gpus": "1E0", "hidden_units": "1.5e2,64", "run_name": "1e4"}
    )
    assert (config.train_steps, config.num_gpus, config.run_name) == (1000, 1, "1e4")
    assert config.component_options["hidden_units"] == [150, 64]
    write("project.yaml", "default:\n  train_batch_size: 1e2\n")
    assert resolve({"model": "mlp"}).train_batch_size == 100
    for wrong in ("1.5e0", "1e-3", "1e3x", "e3"):
        assert only_problem(model="mlp", train_steps=wrong).message == f"must be a whole number, got '{wrong}'."


def test_a_file_that_is_named_and_has_no_default_set_is_not_ignored() -> None:
    write("mine.yaml", "big:\n  train_batch_size: 7\nsmall:\n  train_batch_size: 2\n")
    for kind in ("config", "hyperparameter"):
        problem = only_problem(model="mlp", **{f"{kind}_file": "mine.yaml"})
        assert problem.where == "mine.yaml"
        assert problem.message.startswith("has no set 'default'")
        assert problem.message.endswith(f"Choose one with --{kind}_set: big, small.")
        assert resolve({"model": "mlp", f"{kind}_file": "mine.yaml", f"{kind}_set": "big"}).train_batch_size == 7


def test_a_file_that_is_picked_up_and_has_no_default_set_is_ignored_aloud(caplog: pytest.LogCaptureFixture) -> None:
    write("project.yaml", "big:\n  train_batch_size: 7\n")
    assert resolve({"model": "mlp"}).train_batch_size == 64
    assert (
        "project.yaml: has no set 'default', so nothing in it applies. Choose one with --config_set: big."
        in caplog.text
    )
    caplog.clear()
    assert resolve({"model": "mlp", "config_set": "big"}).train_batch_size == 7
    assert not caplog.records


def test_the_recipe_of_a_run_without_a_model_is_said() -> None:
    assert any("this is the run of --recipe digits" in note for note in resolve({}).notes)
    for given in ({"dataset": "digits"}, {"recipe": "digits"}, {"model": "mlp"}):
        assert not resolve(given).notes


def test_an_option_of_another_dataset_says_what_to_add() -> None:
    assert "Add --dataset files" in only_problem(model="mlp", train_files="photos/*.jpg").message


def test_a_loss_scale_is_for_float16() -> None:
    with pytest.raises(ConfigError, match=r"loss_scale: is only for precision float16; the precision is bfloat16"):
        load_config(precision="bfloat16", loss_scale=128)
    assert load_config(precision="float16", loss_scale="128").loss_scale == 128.0
    assert load_config(precision="float16", loss_scale="dynamic").loss_scale == "dynamic"
    for wrong in ("0", "-1", "inf", "big"):
        with pytest.raises(ConfigError, match="loss_scale"):
            load_config(precision="float16", loss_scale=wrong)


@pytest.mark.parametrize(("key", "kind"), [("model", "model"), ("optimizer", "optimizer")])
def test_an_object_in_place_of_a_name_is_one_mistake_that_says_what_to_do(key: str, kind: str) -> None:
    problem = only_problem(**{"model": "mlp", key: object()})
    assert problem.key == key
    assert "must be a name, not an object. Register" in problem.message
    assert f"@modelyard.register_{kind}('my_name')" in problem.message


def test_a_number_is_no_name() -> None:
    assert "there is no model '5'" in only_problem(model=5).message
