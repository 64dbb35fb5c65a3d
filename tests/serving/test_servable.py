"""The model of a run sees an image as it did in training, the user's preprocessing included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import modelyard
from conftest import engine_name, environment
from waiting import PATIENCE

CENTRE = """
import modelyard, numpy as np

@modelyard.register_preprocessing("centre_for_serving")
class Centre:
    def __init__(self, options): ...

    def example(self, example, training):
        example["image"] = np.asarray(example["image"], np.float32) / 255 - 0.5
        return example
"""

ASKED_FIRST = """
import sys
from modelyard.serving.run_model import open_run

run = open_run("run", engine=sys.argv[1])
assert run.recorded_data().image.shape == (8, 8, 1)
print(type(run.engine()[0]).__name__)
"""


def test_what_a_run_remembers_may_be_asked_before_its_engine(two_devices: None) -> None:
    modelyard.train(model="mlp", dataset="digits", train_steps=2, engine=engine_name(), model_dir="run")
    other = "jax" if engine_name() == "tensorflow" else "tensorflow"
    words = [sys.executable, "-c", ASKED_FIRST, engine_name()]
    extra = environment(KERAS_BACKEND=other, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(words, env=extra, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].lower().startswith(engine_name())


def test_what_the_user_does_to_examples_is_done_to_those_of_requests(two_devices: None, tmp_path: Path) -> None:
    from modelyard.serving.run_model import RunServable, open_run

    (tmp_path / "centre.py").write_text(CENTRE)
    options = {"plugins": "centre.py", "preprocess": "centre_for_serving", "engine": engine_name()}
    modelyard.train(model="mlp", dataset="digits", train_epochs=5, model_dir="run", **options)
    servable = RunServable(open_run("run", engine=engine_name()))
    assert (servable.info.image.dtype, servable.info.task_type, servable.info.step) == ("uint8", "classification", 102)
    servable.warm_up([2])
    digits = load_digits()
    images = (digits.images[:64] * 255 / 16).astype(np.uint8)[..., None]
    found = servable.predict({"image": images})
    assert np.mean(found["label"] == digits.target[:64].astype(str)) > 0.85
    assert set(servable.outputs) == {"class", "probabilities", "label"}
