"""From a config to its dataset."""

from __future__ import annotations

from pathlib import Path

from modelyard.config.schema import Config, is_path
from modelyard.data.dataset import DataContext, Dataset
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.sources.generator import GeneratorDataset
from modelyard.errors import DataError
from modelyard.storage import cache_folder


def load_dataset(config: Config) -> Dataset:
    """The dataset that ``config`` names, with the user's own preprocessing of examples."""
    return with_example_preprocessing(open_dataset(config, config.validation_fraction), config.preprocess)


def open_dataset(config: Config, validation_fraction: float) -> Dataset:
    """The dataset that ``config`` names, as it is stored.

    Args:
        config: the resolved config.
        validation_fraction: share of train to set aside where there is no validation split; 0 for none.
    """
    context = DataContext(
        Path(config.data_dir).expanduser(),
        config.split_seed,
        validation_fraction,
        cache_folder(config.cache_dir),
        config.dataset if is_path(config.dataset) else "",
    )
    entry, options = config.entry("dataset"), config.options_of("dataset")
    loaded = entry.load()(options, context)
    if isinstance(loaded, GeneratorDataset):
        from modelyard.data.sources.generated import materialise

        return materialise(loaded, entry, options, context)
    if not isinstance(loaded, Dataset):
        raise DataError(
            f"the dataset {config.dataset!r} returned {type(loaded).__name__}; it must return a modelyard.Dataset, "
            "such as modelyard.ArrayDataset({'train': {'image': …, 'label': …}})."
        )
    return loaded
