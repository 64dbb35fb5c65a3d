"""Runs that begin with weights from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import Make
from modelyard.errors import CheckpointError, ConfigError, UserError
from modelyard.loop.warm_start import read_initial_weights, warm_start
from modelyard.run.checkpoint import read_checkpoint
from weight_files import FORMATS, keras_objects

pytestmark = pytest.mark.usefixtures("two_devices")
MLP = {"model": "mlp", "dataset": "digits", "hidden_units": [8], "train_batch_size": 64, "train_steps": 4}


def go(folder: str, **options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(
        **{**MLP, "model_dir": folder, "save_every": "2 steps", "keep_checkpoints": 9, **options}
    )


def saved(folder: str, step: int) -> dict[str, np.ndarray]:
    return read_checkpoint(Path(folder) / "checkpoints" / f"step-{step:08d}").weights


class Source:
    """A model with weights that nobody would draw, and what it makes of the validation images."""

    def __init__(self, make: Make, **options: Any) -> None:
        from modelyard.engine.base import State

        engine = make(**options)
        random = np.random.default_rng(5)
        drawn = {
            name: (np.abs(random.normal(0, 0.3, value.shape)) + 0.05).astype(np.float32)
            for name, value in engine.state().weights.items()
        }
        engine.load(State(drawn, {}), weights_only=True)
        self.loss = engine.evaluate("validation")["loss"]
        # The JAX engine keeps what is learned outside of the model's variables.
        for variable in engine.model.variables:
            if variable.path in drawn:
                variable.assign(drawn[variable.path])
        self.weights, self.model = drawn, engine.model
        engine.close()


def started(make: Make, path: Path, **options: Any) -> dict[str, float]:
    """The validation metrics of a model that starts from ``path``."""
    engine = make(checkpoint_path=str(path), random_seed=9, strict=True, **options)
    weights = read_initial_weights(engine.config)
    assert weights is not None
    warm_start(engine, weights)
    found = engine.evaluate("validation")
    engine.close()
    return found


@pytest.mark.parametrize("write", FORMATS.values(), ids=list(FORMATS))
def test_the_same_weights_predict_the_same_from_every_format(
    make: Make, write: Callable[..., Path], tmp_path: Path
) -> None:
    source = Source(make)
    assert started(make, write(tmp_path, source.weights, source.model))["loss"] == pytest.approx(source.loss, abs=1e-6)


@pytest.mark.tensorflow_only("tf.train.Checkpoint knows only Keras models of that backend")
def test_a_checkpoint_of_a_keras_3_model_is_one_of_them(make: Make, tmp_path: Path) -> None:
    source = Source(make)
    path = keras_objects(tmp_path, source.weights, source.model)
    assert started(make, path)["loss"] == pytest.approx(source.loss, abs=1e-6)


@pytest.mark.slow
def test_a_resnet_starts_from_every_format_and_from_a_run(make: Make, tmp_path: Path) -> None:
    options = {"model": "resnet20", "width": 4}
    source = Source(make, **options)
    for name, write in FORMATS.items():
        folder = tmp_path / name
        folder.mkdir()
        path = write(folder, source.weights, source.model)
        assert started(make, path, **options)["loss"] == pytest.approx(source.loss, abs=1e-6, rel=1e-6), name
    train = {**options, "dataset": "digits", "train_steps": 1, "learning_rate": 1e-30, "train_batch_size": 32}
    modelyard.train(**train, checkpoint_path=str(path), strict=True, model_dir="run", keep_checkpoints=2)
    first = modelyard.evaluate("run", checkpoint=0).metrics["loss"]
    again = started(make, Path("run/checkpoints/step-00000000"), **options)["loss"]
    assert [first, again] == pytest.approx([source.loss] * 2, abs=1e-6, rel=1e-6)


def test_it_happens_once_and_no_kind_of_resume_reads_the_file_again(tmp_path: Path) -> None:
    go("first", random_seed=3)
    file = tmp_path / "w.safetensors"
    file.write_bytes(Path("first/checkpoints/step-00000004/weights.safetensors").read_bytes())
    go("run", checkpoint_path=str(file))
    np.testing.assert_equal(saved("run", 0), saved("first", 4))
    file.unlink()
    assert modelyard.resume("run", train_steps=6).step == 6
    assert go("run", checkpoint_path=str(file), train_steps=8).step == 8
    assert go("run", checkpoint_path=str(file), train_steps=10, resume="must").step == 10
    assert modelyard.evaluate("run", checkpoint=0).model_step == 0
    assert (
        modelyard.train(
            **MLP | {"train_steps": 12}, model_dir="run", checkpoint_path=str(file), save_every="2 steps"
        ).step
        == 12
    )
    with pytest.raises(ConfigError, match="checkpoint_path: there is no file or folder"):
        go("fresh", checkpoint_path=str(file))


def test_another_head_keeps_its_first_values_and_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    go("first", dataset="synthetic", synthetic_classes=7, synthetic_shape="8,8,1", synthetic_examples=200)
    with caplog.at_level(logging.DEBUG, "modelyard"):
        go("second", checkpoint_path="first")
    np.testing.assert_equal(saved("second", 0)["dense1/kernel"], modelyard.load_weights("first")["dense1/kernel"])
    assert saved("second", 0)["logits/kernel"].shape == (8, 10)
    text = caplog.text
    assert "loaded 4 of 6 weights" in text
    assert "logits/kernel (8×7 in the file, 8×10 here)" in text
    assert "of another shape" in text
    with pytest.raises(UserError, match=r"checkpoint_path \S*first: strict, but not everything.*logits/bias"):
        go("third", checkpoint_path="first", strict=True)
    assert not Path("third").exists()


def test_patterns_and_renames_come_from_the_config(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    go("first", random_seed=3)
    mine = saved("first", 4)
    save_file({f"net-{name}": value for name, value in mine.items()}, tmp_path / "w.safetensors")
    options = {"checkpoint_path": str(tmp_path / "w.safetensors"), "checkpoint_exclude": "logits/*"}
    with pytest.raises(UserError, match=r"The closest \(model ~ file\): .*dense1/kernel ~ net-dense1/kernel"):
        go("second", **options)
    go("second", **options, checkpoint_rename="^net-=", checkpoint_include="dense1/*,logits/*")
    np.testing.assert_equal(saved("second", 0)["dense1/kernel"], mine["dense1/kernel"])
    assert not np.array_equal(saved("second", 0)["logits/kernel"], mine["logits/kernel"])
    assert "checkpoint_rename:\n- ^net-=\n" in Path("second/config.yaml").read_text()


@pytest.mark.parametrize("rule", ["backbone", "=x", "(=x", r"a=\2"])
def test_a_rename_that_is_none_is_an_error_of_the_config(rule: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_rename"):
        modelyard.load_config(checkpoint_rename=[rule])


def test_a_little_that_fits_by_chance_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    go("first", hidden_units=[9])
    with caplog.at_level(logging.WARNING, "modelyard"):
        go("second", checkpoint_path="first")
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING and "weights" in r.message] == [
        "loaded 3 of 6 weights, 2.0 % of the parameters"
    ]


def test_weights_that_are_no_numbers_are_refused_at_the_load_unless_left_out(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    go("first")
    weights = saved("first", 4)
    weights["logits/kernel"][:2, 3] = np.nan, np.inf
    save_file(weights, tmp_path / "w.safetensors")
    file = str(tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError, match=r"w\.safetensors: logits/kernel holds 2 values of 80 that are not finite"
    ):
        go("second", checkpoint_path=file)
    assert not Path("second").exists()
    assert go("second", checkpoint_path=file, checkpoint_exclude="logits/*").step == 4


def test_options_without_checkpoint_path_are_said_to_have_no_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "modelyard"):
        assert read_initial_weights(modelyard.load_config(strict=True, checkpoint_exclude="logits/*")) is None
    assert [r.message for r in caplog.records] == [
        "checkpoint_exclude (Python) has no effect without checkpoint_path",
        "strict (Python) has no effect without checkpoint_path",
    ]
