"""The model of a run at one of its checkpoints, built from its manifest, without the data it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.backend import import_engine, keras_backend
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, TEST, Dataset, Feature
from modelyard.data.decoded import dataset_to_predict, examples_of
from modelyard.data.inputs import Inputs, spec_of
from modelyard.data.open_dataset import load_dataset
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.raw_examples import RawExamples
from modelyard.loop.existing_run import find_checkpoint
from modelyard.loop.run import create_engine
from modelyard.run.checkpoint import Checkpoint, read_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import read_manifest
from modelyard.run.summary import summarize
from modelyard.serving.servable import ModelInfo, Outputs, Servable, finite_numbers, task_type_of
from modelyard.system.process import random_state_kept

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.models.data_info import RecordedData


@dataclass
class OpenRun:
    """A run and one of its checkpoints.

    Args:
        directory: the run folder.
        config: the config of the run, with the options that were changed for predictions.
        path: the folder of the checkpoint.
        checkpoint: its content.
    """

    directory: RunDirectory
    config: Config
    path: Path
    checkpoint: Checkpoint
    _engine: Engine | None = field(default=None, init=False, repr=False)
    """Made before `engine` is called."""

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.step

    @property
    def address(self) -> str:
        """The path or URL of the run."""
        return self.directory.address

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes. Imports no engine, if the manifest has them."""
        manifest = read_manifest(self.directory)
        recorded = manifest.get("data") or manifest.get("dataset")
        names = self.recorded_data().data.classes if recorded is None else recorded.get("classes", [])
        return tuple(str(name) for name in names)

    @property
    def label(self) -> Feature:
        """Shape and type of a stored label. Imports no engine, if the manifest has it."""
        recorded = read_manifest(self.directory).get("data")
        if recorded is None:
            return self.recorded_data().features.get(LABEL, Feature((), "int32"))
        label = recorded.get("stored", {}).get(LABEL)
        return Feature(tuple(label["shape"]), label["dtype"]) if label else Feature((), "int32")

    @cached_property
    def inputs(self) -> Inputs:
        """What predictions read of an example, before the run's own preprocessing. Builds the network, if needed."""
        if self.takes_image_only:
            return {IMAGE: self.recorded_data().image}
        self._engine = self._engine or create_engine(self.config)  # it chooses devices before anything runs on them
        from modelyard.serving.model_inputs import model_inputs

        return model_inputs(self.config, self.recorded_data())

    @property
    def takes_image_only(self) -> bool:
        """Whether examples have nothing else to predict from. Imports no engine, if the manifest says it."""
        recorded = read_manifest(self.directory).get("data")
        names = self.recorded_data().features if recorded is None else recorded.get("stored", {})
        return set(names) - {ID, LABEL} == {IMAGE}

    @cached_property
    def features(self) -> Mapping[str, Feature]:
        """Shape and type of each array of a stored example."""
        return self.recorded_data().features

    @property
    def value_columns(self) -> Sequence[str]:
        """The names of the columns of vectors, if the run was trained on a data frame."""
        names = read_manifest(self.directory).get("data", {}).get("value_columns", ())
        return [str(name) for name in names]

    def recorded_data(self) -> RecordedData:
        """Returns the facts about the run's data. Older runs have not recorded them: their data is opened."""
        if keras_backend() is None:  # the imports below import Keras, which fixes its backend
            import_engine(self.config.engine)
        from modelyard.models.data_info import read_recorded_data, record_data

        recorded = read_manifest(self.directory).get("data")
        if recorded is None:
            from modelyard.models.choose_task import build_task

            dataset = load_dataset(self.config)
            recorded = record_data(self.config, dataset, build_task(self.config, dataset).data)
        return read_recorded_data(recorded)

    @random_state_kept()
    def engine(
        self, examples: RawExamples | None = None, *, labelled: bool = False, skip_bad: bool = False
    ) -> tuple[Engine, Dataset]:
        """Returns an engine with the weights, and a dataset with the examples as its split `test`.

        Args:
            examples: the examples to predict; None for an engine that receives batches.
            labelled: whether their labels are of the run's classes.
            skip_bad: skip unreadable examples instead of raising an error.
        """
        if not self.takes_image_only:
            _ = self.inputs  # makes the engine
        engine, self._engine = self._engine or create_engine(self.config), None
        engine.config = self.config
        from modelyard.engine.network import build_network
        from modelyard.models.choose_task import task_for

        recorded, inputs = self.recorded_data(), dict(self.inputs)
        if examples is None:
            examples = examples_of({name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in inputs.items()})
        inputs |= {
            name: spec_of(recorded.features[name]) for name in examples.others(np.arange(1)) if name not in inputs
        }
        classes = recorded.data.classes
        raw = dataset_to_predict(examples, classes, inputs, labelled=labelled, skip_bad=skip_bad)
        dataset = with_example_preprocessing(raw, self.config.preprocess)
        length = RunLength(dataset.size(TEST), self.config.train_batch_size, 1)
        with engine.model_scope():
            network = build_network(self.config, task_for(self.config, recorded.data, recorded.label), length)
        engine.build(network, dataset, length)
        engine.load(self.checkpoint, weights_only=True)
        return engine, dataset


def open_run(
    model_dir: str | Path, checkpoint: str | int | None = None, source: str = "Python", **options: Any
) -> OpenRun:
    """Opens a checkpoint of a run.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        source: where the options come from, for error messages.
        **options: options that change how it is computed, such as eval_batch_size or engine.

    Raises:
        RunError: if there is no run, or no such checkpoint.
    """
    directory, config, path = find_checkpoint(model_dir, checkpoint, options, source)
    # Options of training alone: pieces of batches, phases, augmentation.
    plain = {"augment": (), "gradient_accumulation": 1, "fine_tune": (), "freeze_batch_norm": False, "cluster": "none"}
    return OpenRun(directory, config.model_copy(update=plain), path, read_checkpoint(path))


class RunServable(Servable):
    """A checkpoint of a run with its engine. Build it in the thread that predicts: Keras has settings per thread."""

    def __init__(self, run: OpenRun) -> None:
        self._engine, self._dataset = run.engine()  # first: it chooses Keras's backend
        data, config = run.recorded_data(), run.config
        classes, task_type = tuple(data.data.classes), task_type_of(self._engine.task)
        test = finite_numbers(summarize(run.directory).get("test") or {})
        dataset = Path(config.dataset).name
        super().__init__(ModelInfo(config.model, dataset, run.step, task_type, classes, run.inputs, test))
        self.batch_multiple = len(self._engine.devices)
        self._classes = np.array(classes, object)

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """Predicts with the engine, after the run's own preprocessing of examples."""
        batch = dict(inputs)
        if self._dataset.stored is not self._dataset:
            examples = examples_of(inputs)
            self._dataset.stored.splits[TEST] = examples  # type: ignore[attr-defined]
            read = self._dataset.read(TEST, np.arange(len(examples)))
            batch = {name: values for name, values in read.items() if name not in (ID, LABEL)}
        found = {name: np.asarray(values) for name, values in self._engine.predict_batch(batch).items()}
        if "class" in found and len(self._classes):
            found["label"] = self._classes[found["class"]]
        return found
