"""From a config to its dataset."""

from __future__ import annotations

from pathlib import Path

from modelyard.config.schema import Config, is_path
from modelyard.data.dataset import DataContext, Dataset
from modelyard.data.npz import read_npz
from modelyard.errors import DataError


def load_dataset(config: Config) -> Dataset:
    """The dataset that ``config`` names."""
    context = DataContext(Path(config.data_dir).expanduser(), config.split_seed, config.validation_fraction)
    if is_path(config.dataset):
        return read_npz(Path(config.dataset).expanduser(), context)
    loaded = config.entry("dataset").load()(config.options_of("dataset"), context)
    if not isinstance(loaded, Dataset):
        raise DataError(
            f"the dataset {config.dataset!r} returned {type(loaded).__name__}; it must return a modelyard.Dataset, "
            "such as modelyard.ArrayDataset({'train': {'image': …, 'label': …}})."
        )
    return loaded
