"""The cells of a matrix and the errors in a request, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelyard.comparison.matrix_folder import MatrixFolder, merge_plan
from modelyard.comparison.plan import MatrixRequest, make_cells, read_request, with_folds
from modelyard.errors import ConfigError, RunError
from waiting import PATIENCE


def cells(axes: dict[str, Any], **more: Any) -> list[Any]:
    return make_cells(MatrixRequest(axes, source="here", **more))


def problems(axes: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        cells(axes, **more)
    return str(caught.value)


def test_early_cells_cover_every_model_and_every_dataset() -> None:
    Path("a").mkdir()
    found = cells(
        {"model": ["mlp", "simple_cnn", "resnet20"], "dataset": ["digits", "a", "mnist"], "random_seed": [0, 1]}
    )
    assert len(found) == 18
    assert len({cell.axes["model"] for cell in found[:3]}) == 3
    assert len({cell.axes["dataset"] for cell in found[:3]}) == 3
    assert {cell.axes["random_seed"] for cell in found[:9]} == {0}
    assert found[0].name == "mlp-digits-seed0"
    assert found[0].config.test_at_end
    assert found[0].config.cluster == "none"
    assert Path(found[1].config.dataset).is_absolute()


def test_any_option_may_be_an_axis_and_exclusions_take_cells_away() -> None:
    axes = {
        "model": ["mlp", "resnet20"],
        "dataset": ["digits"],
        "optimizer": ["sgd", "adam"],
        "learning_rate": [0.1, 0.01],
    }
    found = cells(
        axes, exclude=[{"model": "resnet20", "learning_rate": 0.1}, {"optimizer": ["sgd"], "model": "resnet20"}]
    )
    assert [cell.name for cell in found if cell.axes["model"] == "resnet20"] == [
        "resnet20-digits-optimizer=adam-learning_rate=0.01"
    ]
    assert len(found) == 5
    assert found[0].config.learning_rate == 0.1


def test_folds_are_an_axis() -> None:
    axes = {"model": ["mlp", "simple_cnn"], "dataset": ["digits"], "random_seed": [0, 1]}
    found = make_cells(with_folds(MatrixRequest(axes, options={"folds": 3}, source="here")))
    assert len(found) == 12
    assert found[0].name == "mlp-digits-fold1-seed0"
    assert {(cell.config.folds, cell.config.fold) for cell in found} == {(3, 1), (3, 2), (3, 3)}
    assert {cell.axes["random_seed"] for cell in found[:6]} == {0}
    one = make_cells(with_folds(MatrixRequest(axes, options={"folds": 3, "fold": 2}, source="here")))
    assert {cell.config.fold for cell in one} == {2}
    with pytest.raises(ConfigError, match="folds"):
        make_cells(with_folds(MatrixRequest(axes, options={"folds": "many"}, source="here")))


def test_all_problems_are_reported_at_once() -> None:
    text = problems(
        {"model": ["mlp", "resnet2O"], "dataset": ["digit"], "lerning_rate": [1]}, options={"train_steps": "x"}
    )
    assert "resnet20" in text
    assert "'digits'" in text
    assert "lerning_rate: there is no such option. Did you mean 'learning_rate'" in text
    assert "train_steps: must be a whole number" in text


@pytest.mark.parametrize(
    ("axes", "more", "message"),
    [
        ({}, {}, "there are none"),
        ({"model": ["mlp", "mlp"]}, {}, "lists mlp twice"),
        ({"model": []}, {}, "has no values"),
        ({"model": ["mlp"]}, {"exclude": [{"model": "mlp"}]}, "leaves no cell"),
        ({"model": ["mlp"]}, {"exclude": [{"model": "mpl"}]}, "Did you mean 'mlp'"),
        ({"model": ["mlp"]}, {"exclude": [{"modell": "mlp"}]}, "there is no axis 'modell'"),
        ({"model": ["mlp"]}, {"options": {"model": "mlp"}}, "both an axis of this matrix and an option"),
        ({"model": ["mlp"]}, {"options": {"model_dir": "x"}}, "its own run folder"),
        ({"model": ["mlp"], "dataset": ["nowhere/x.npz"]}, {}, "there is no file or folder"),
        ({"model": ["resnet20"]}, {"options": {"hidden_units": [3]}}, "no cell has the model, dataset or other part"),
        ({"model": ["resnet20"], "hidden_units": [[3]]}, {}, "has no effect with model resnet20"),
        ({"model": ["mlp"], "threads": [1, 2]}, {}, "is the same run as"),
        ({"model": ["mlp"]}, {"options": {"best_model_dir": "x"}}, "its own run folder"),
        ({"random_seed": list(range(5001))}, {}, "at most 5,000"),
    ],
)
def test_an_invalid_request_is_refused(axes: dict[str, Any], more: dict[str, Any], message: str) -> None:
    assert message in problems(axes, **more)


def test_an_option_of_one_model_is_for_the_cells_that_have_it() -> None:
    found = cells({"model": ["mlp", "simple_cnn"], "dataset": ["digits"]}, options={"hidden_units": [7]})
    assert found[0].config.component_options["hidden_units"] == [7]
    assert "hidden_units" not in found[1].config.component_options


def test_files_of_the_same_name_make_cells_with_different_names() -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "x.npz").touch()
    one, other = cells({"model": ["mlp"], "dataset": ["a/x.npz", "b/x.npz"]})
    assert one.name != other.name
    assert one.name.startswith("mlp-x-")


def test_the_command_line_takes_precedence_over_a_file() -> None:
    path = Path("plan.yaml")
    path.write_text("axes: {model: [mlp], random_seed: [0, 1]}\noptions: {train_epochs: 2, learning_rate: 0.1}\n")
    found = make_cells(read_request(path, MatrixRequest({"random_seed": [5]}, options={"train_steps": 7})))
    assert [cell.axes for cell in found] == [{"model": "mlp", "random_seed": 5}]
    assert (found[0].config.train_steps, found[0].config.learning_rate) == (7, 0.1)


def in_file(text: str, **more: Any) -> list[str]:
    """Returns the problems of a matrix in a file."""
    Path("plan.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        merge_plan(MatrixFolder("m"), read_request(Path("plan.yaml"), MatrixRequest(**{"axes": {}, **more})))
    return [str(problem) for problem in caught.value.problems]


def test_everything_wrong_in_a_file_is_reported_at_once_with_its_line() -> None:
    found = in_file(
        "axes:\n  model: [mlp, simple_cn]\n  optimizer: adam\n  sede: [0, 1]\n"
        "exclud:\n  - {model: mlp}\n  - {modell: mlp}\n  - {model: mpl}\n  - 7\n"
        "options:\n  learning_rat: 0.1\n  train_steps: x\n"
    )
    for line in (
        "plan.yaml:2: model: there is no model 'simple_cn'. Did you mean 'simple_cnn'",
        "plan.yaml:3: optimizer: must be a list of values, got adam.",
        "plan.yaml:4: sede: there is no such option. Did you mean 'random_seed'",
        "plan.yaml:5: exclud: there is no section 'exclud'. Did you mean 'exclude'?",
        "plan.yaml:7: exclude: there is no axis 'modell'. Did you mean 'model'?",
        "plan.yaml:8: exclude: there is no value of model 'mpl'. Did you mean 'mlp'?",
        "plan.yaml:9: exclude: must be a list of combinations",
        "plan.yaml:11: learning_rat: there is no such option. Did you mean 'learning_rate'",
        "plan.yaml:12: train_steps: must be a whole number",
    ):
        assert any(one.startswith(line) for one in found), (line, found)
    assert len(found) == 9


def test_a_misspelt_section_is_read_all_the_same() -> None:
    found = in_file("axis: {model: [mpl]}\noption: {train_steps: x}\nexclude: 7\n")
    assert [one.split(": ")[1] for one in found] == ["axis", "option", "exclude", "train_steps", "model"]
    assert in_file("axes: [1]\n") == ["plan.yaml:1: axes: must hold 'option: value' lines."]
    assert in_file("axes: {model: []}\n") == ["plan.yaml:1: model: has no values."]
    assert in_file("axes:\n  model: [mlp]\n  model: [mlp]\n") == [
        "plan.yaml:3: model: is given twice; first in plan.yaml:2."
    ]
    (line,) = in_file("axes: {model: [mlp]}\n", options={"lerning_rate": 1}, source="command line")
    assert line.startswith("command line: lerning_rate")


def test_the_test_at_the_end_can_be_left_out_and_a_cluster_is_not_used() -> None:
    Path("project.yaml").write_text("default:\n  test_at_end: false\n  cluster: auto\n")
    request = MatrixRequest({"model": ["mlp"], "dataset": ["digits"]}, pick_up_files=True)
    (cell,) = make_cells(request)
    assert not cell.config.test_at_end
    assert cell.config.cluster == "none"
    assert cell.notes == ("project.yaml:3: cluster has no effect here: every cell is a run of one process.",)
    Path("project.yaml").unlink()
    (cell,) = make_cells(request)
    assert cell.config.test_at_end
    assert cell.notes == ()


def plan(folder: MatrixFolder, axes: dict[str, Any], **options: Any) -> list[str]:
    made = merge_plan(folder, MatrixRequest(axes, options=options, source="here"))
    folder.create()
    folder.write(made)
    return [cell.name for cell in made]


def test_a_plan_may_grow_but_its_cells_stay_as_they_are() -> None:
    folder = MatrixFolder("m")
    axes = {"model": ["mlp"], "dataset": ["digits"], "random_seed": [0, 1]}
    assert plan(folder, axes, train_epochs=2) == ["mlp-digits-seed0", "mlp-digits-seed1"]
    assert plan(folder, {}) == ["mlp-digits-seed0", "mlp-digits-seed1"]
    assert plan(folder, {}, log_every="7 steps") == ["mlp-digits-seed0", "mlp-digits-seed1"]
    with pytest.raises(
        ConfigError, match=r"train_epochs: is 3\.0 here, but 2\.0 in the cell mlp-digits-seed0"
    ) as caught:
        plan(folder, axes, train_epochs=3)
    assert "Choose another --output" in str(caught.value)
    with pytest.raises(ConfigError, match="train_epochs"):
        plan(folder, {}, train_epochs=3)
    grown = plan(folder, {**axes, "model": ["simple_cnn"], "random_seed": [1]}, train_epochs=2)
    assert grown == ["simple_cnn-digits-seed1", "mlp-digits-seed0", "mlp-digits-seed1"]


def test_a_plan_does_not_grow_by_cells_without_its_options() -> None:
    folder = MatrixFolder("m")
    plan(folder, {"model": ["mlp"], "dataset": ["digits"], "random_seed": [0, 1]}, train_epochs=3, hidden_units=[7])
    before = folder.plan.read_bytes()
    with pytest.raises(ConfigError) as caught:
        plan(folder, {"model": ["mlp", "simple_cnn"], "dataset": ["digits"], "random_seed": [2]})
    assert [problem.key for problem in caught.value.problems] == ["train_epochs", "hidden_units"]
    assert "is 3.0 in the cells of this plan, but the new cell mlp-digits-seed2 has the default" in str(caught.value)
    assert "give these options again" in str(caught.value)
    assert folder.plan.read_bytes() == before
    new = {"model": ["simple_cnn"], "dataset": ["digits"]}
    with pytest.raises(ConfigError, match="train_epochs: is 3"):
        plan(folder, new)
    assert plan(folder, new, train_epochs=3)[0] == "simple_cnn-digits"
    assert plan(folder, {**new, "random_seed": [1]}, train_epochs=10)[0] == "simple_cnn-digits-seed1"  # it is meant


def test_missing_steps_are_named_and_not_the_epochs_they_displace() -> None:
    folder = MatrixFolder("m")
    plan(folder, {"model": ["mlp"], "dataset": ["digits"]}, train_steps=40)
    with pytest.raises(ConfigError) as caught:
        plan(folder, {"model": ["simple_cnn"], "dataset": ["digits"]})
    assert [problem.key for problem in caught.value.problems] == ["train_steps"]


def test_an_existing_cell_is_recognized_under_another_name() -> None:
    folder = MatrixFolder("m")
    assert plan(folder, {"model": ["mlp"], "dataset": ["digits"]}) == ["mlp-digits"]
    wider = plan(folder, {"model": ["mlp"], "dataset": ["digits"], "optimizer": ["adam", "sgd"]})
    assert wider == ["mlp-digits", "mlp-digits-optimizer=sgd"]


def test_an_untrusted_plan_cannot_leave_its_folder() -> None:
    folder = MatrixFolder("m")
    folder.create()
    folder.plan.write_text("matrix_version: 1\ncells: {../../x: {model: mlp}}\n")
    with pytest.raises(ConfigError, match="is not a valid name of a cell"):
        folder.cells()
    folder.plan.write_text("cells: [1]\n")
    with pytest.raises(ConfigError, match="is not a plan"):
        folder.cells()


def test_a_folder_with_other_files_is_not_a_matrix() -> None:
    Path("m").mkdir()
    Path("m/thesis.tex").touch()
    with pytest.raises(RunError, match=r"thesis\.tex"):
        MatrixFolder("m")
    with pytest.raises(RunError, match="on this machine"):
        MatrixFolder("s3://bucket/m")


def test_problems_are_found_without_keras_and_leave_no_files() -> None:
    code = (
        "import sys, modelyard\n"
        "try: modelyard.matrix(models='mlp,nosuch', datasets='digits', seeds=2, output='m')\n"
        "except modelyard.UserError as error: print(error)\n"
        "assert not {'keras', 'tensorflow', 'jax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "nosuch" in done.stdout
    assert not Path("m").exists()


@pytest.mark.parametrize("seeds", ["x", 0, "", "1,b", 10**6])
def test_seeds_are_a_number_or_a_list(seeds: Any) -> None:
    import modelyard

    with pytest.raises(modelyard.UserError, match="the number of seeds"):
        modelyard.matrix(models="mlp", seeds=seeds, output="m")
