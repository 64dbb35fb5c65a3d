"""A model of a run, ready to predict: built from what the run remembers, without the data it was trained on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.config.backend import import_engine, keras_backend
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.dataset import LABEL, TEST, Dataset, Feature
from modelyard.data.decoded import DecodedDataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.raw_examples import ArrayExamples, RawExamples
from modelyard.loop.existing_run import find_checkpoint
from modelyard.loop.run import create_engine
from modelyard.run.checkpoint import Checkpoint, read_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import read_manifest

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.models.data_info import RecordedData

log = logging.getLogger("modelyard")


@dataclass
class OpenRun:
    """A run and one of its checkpoints, before an engine is chosen.

    Args:
        directory: the run folder.
        config: its config, with what was asked for otherwise.
        path: the folder of the checkpoint.
        checkpoint: what it holds.
    """

    directory: RunDirectory
    config: Config
    path: Path
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.checkpoint.step

    @property
    def address(self) -> str:
        """Where the run is."""
        return self.directory.address

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names; without an engine."""
        kept = read_manifest(self.directory)
        return tuple(str(name) for name in (kept.get("data") or kept.get("dataset") or {}).get("classes", []))

    @property
    def label(self) -> Feature:
        """Of an example as it is stored; without an engine."""
        kept = (read_manifest(self.directory).get("data") or {}).get("stored", {}).get(LABEL)
        return Feature(tuple(kept["shape"]), kept["dtype"]) if kept else Feature((), "int32")

    def recorded_data(self) -> RecordedData:
        """What the run knows of its data; of runs that did not write it down yet, from the data itself."""
        if keras_backend() is None:  # what follows imports Keras, whose backend is then fixed
            import_engine(self.config.engine)
        from modelyard.models.data_info import read_recorded_data, record_data

        kept = read_manifest(self.directory).get("data")
        if kept is None:
            from modelyard.models.task_types import build_task

            dataset = load_dataset(self.config)
            kept = record_data(self.config, dataset, build_task(self.config, dataset).data)
        return read_recorded_data(kept)

    def engine(
        self, examples: RawExamples | None = None, *, labelled: bool = False, skips: bool = False
    ) -> tuple[Engine, Dataset]:
        """An engine that has the weights, and the dataset of the examples, which are its split `test`.

        Args:
            examples: what to predict; none for an engine that is given batches.
            labelled: whether their labels are of the run's classes.
            skips: what can't be read is left out, not an error.
        """
        engine = create_engine(self.config)
        from modelyard.engine.network import build_network
        from modelyard.models.task_types import task_for

        kept = self.recorded_data()
        if examples is None:
            examples = ArrayExamples(np.zeros((1, *kept.image.shape), kept.image.dtype), np.zeros(1, np.int32))
        raw = DecodedDataset({TEST: examples}, kept.data.classes, kept.image, labelled=labelled, skip_bad=skips)
        dataset = with_example_preprocessing(raw, self.config.preprocess)
        size = dataset.size(TEST)
        length = RunLength(size, self.config.train_batch_size, 1)
        with engine.model_scope():
            network = build_network(self.config, task_for(self.config, kept.data, kept.label), length)
        engine.build(network, dataset, length)
        engine.load(self.checkpoint, weights_only=True)
        return engine, dataset


def open_run(
    model_dir: str | Path, checkpoint: str | int | None = None, source: str = "Python", **options: Any
) -> OpenRun:
    """A checkpoint of the run in ``model_dir``.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        source: where the options come from, for error messages.
        **options: options that change how it is computed, such as eval_batch_size or engine.

    Raises:
        RunError: if there is no run, or no such checkpoint.
    """
    directory, config, path = find_checkpoint(model_dir, checkpoint, options, source)
    # What only training needs is left out: pieces of batches, phases, augmentation.
    plain = {"augment": (), "gradient_accumulation": 1, "fine_tune": (), "freeze_batch_norm": False, "cluster": "none"}
    return OpenRun(directory, config.model_copy(update=plain), path, read_checkpoint(path))
