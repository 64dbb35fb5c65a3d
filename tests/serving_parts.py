"""A model for tests of the server: NumPy instead of a network, so that what is tested is the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http.app import Metrics, Service
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.http.limits import Limits
from modelyard.serving.http.model_versions import Found, ModelVersions, VersionSource
from modelyard.serving.servable import ModelInfo, Outputs, Servable
from waiting import PATIENCE

CLASSES = ("dark", "grey", "<b>bright</b>")


def facts(kind: str = "classification", image: ImageSpec | None = None, **more: Any) -> ModelInfo:
    inputs = {"image": image or ImageSpec((4, 4, 3), "uint8")}
    return ModelInfo("brightness", "made up", 7, kind, CLASSES, inputs, **more)


class Brightness(Servable):
    """Says how bright an image is. It can be told to wait, and keeps what it was given."""

    def __init__(self, given: ModelInfo | None = None, shift: float = 0.0) -> None:
        super().__init__(given or facts())
        self.shift = shift
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()
        self.batches: list[NDArray[Any]] = []

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        images = inputs["image"]
        self.asked.set()
        self.go.wait(PATIENCE)
        self.batches.append(images.copy())
        with np.errstate(all="ignore"):
            mean = images.reshape(len(images), -1).astype(np.float32).mean(axis=1) / 255 + self.shift
        if self.info.task_type == "regression":
            return {"values": mean}
        distance = -8 * np.abs(mean[:, None] - np.array([0, 0.5, 1], np.float32))
        shares = np.exp(distance) / np.exp(distance).sum(axis=1, keepdims=True)
        if self.info.task_type == "multi_label":
            return {"probabilities": shares, "labels": (shares > 0.5).astype(np.uint8)}
        best = np.where(np.isfinite(shares).all(axis=1), shares.argmax(axis=1), 0)
        return {"class": best, "probabilities": shares, "label": np.array(CLASSES, object)[best]}


class Given(VersionSource):
    """ModelVersions that a test hands out."""

    def __init__(self, **servables: Servable) -> None:
        self.servables = {int(name.removeprefix("v")): servable for name, servable in servables.items()}

    def find(self) -> Found:
        return dict.fromkeys(self.servables, "whole")

    def load(self, version: int) -> Servable:
        found = self.servables[version]
        if isinstance(found, Exception):
            raise found
        return found

    def explain_missing(self) -> str:
        return "there is nothing."


def service(
    servable: Servable | None = None,
    limits: Limits | None = None,
    batching: BatchingOptions | None = None,
    source: VersionSource | None = None,
) -> Service:
    metrics = Metrics()
    used = source or Given(v3=servable or Brightness())
    versions = ModelVersions(used, batching or BatchingOptions(8, 0.001, 64), metrics.batch_done, poll=0.02)
    versions.load_newest()
    return Service("mine", versions, limits or Limits(timeout=60), metrics)


def write_export(folder: Path, bias: float = 0.0, shape: tuple[int, ...] = (4, 4, 1)) -> None:
    """A version as `modelyard export` writes it; its probabilities depend on ``bias`` alone."""
    import tensorflow as tf

    module = tf.Module()
    module.bias = tf.Variable([0.0, bias])

    @tf.function(input_signature=[tf.TensorSpec((None, *shape), tf.uint8, name="image")])
    def call(image: Any) -> dict[str, Any]:
        logits = tf.zeros((tf.shape(image)[0], 2)) + module.bias
        best = tf.argmax(logits, -1)
        return {
            "class": best,
            "label": tf.gather(tf.constant(["no", "yés"]), best),
            "probabilities": tf.nn.softmax(logits),
        }

    tf.saved_model.save(module, str(folder), signatures={"serving_default": call})
    description = {
        "format": "saved_model",
        "model": "bias",
        "dataset": "none",
        "step": 5,
        "image": {"shape": list(shape), "dtype": "uint8"},
        "fit": "crop",
        "shares": False,
        "kind": "classification",
        "classes": ["no", "yés"],
        "outputs": ["class", "label", "probabilities"],
        "metrics": {},
        "test": {"accuracy": 0.5},
        "modelyard": "0.1.0",
    }
    (folder / "modelyard.json").write_text(json.dumps(description))
