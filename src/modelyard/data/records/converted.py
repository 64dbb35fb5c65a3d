"""A folder of converted examples: records, their indexes, labels.txt, and dataset.json, which says what is there.

dataset.json is written last: a folder that has one is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelyard.data.raw_examples import RawExamples
from modelyard.data.records.feature_map import FeatureMap
from modelyard.data.records.items import RecordExamples
from modelyard.errors import DataError
from modelyard.system.console import bar

DATASET_JSON, LABELS, BAD = "dataset.json", "labels.txt", "bad.txt"
SETTINGS = ".convert.json"
"""There while a conversion is not finished."""
FORMAT: Literal[1] = 1
_LONGEST = 1 << 28
_SHOWN = 5

Encoding = Literal["keep", "jpeg", "raw"]
Count = Annotated[int, Field(ge=0)]


class ShardInfo(BaseModel):
    """One file of records."""

    model_config = ConfigDict(frozen=True)
    # A name, never a path: what it says comes from strangers.
    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    records: Count
    bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SplitInfo(BaseModel):
    """The examples of one split, in order."""

    model_config = ConfigDict(frozen=True)
    examples: Count
    class_counts: list[Count]
    shards: list[ShardInfo]


class ConvertedInfo(BaseModel):
    """What dataset.json says."""

    model_config = ConfigDict(frozen=True)
    format: Literal[1]
    name: str
    encoding: Encoding
    shape: list[Annotated[int, Field(ge=1)]] | None
    """Of every example, if all have the same."""
    channels: int | None
    classes: list[str]
    features: FeatureMap
    splits: dict[Literal["train", "validation", "test"], SplitInfo]
    skipped: Count
    """Examples left out because they could not be read; bad.txt lists them."""
    reencoded: Count
    """Examples that were made smaller and so are not the original bytes, where those were to be kept."""
    source: dict[str, Any]
    settings: dict[str, Any]
    """What it was made from and how: the same gives the same bytes."""


def read_dataset_json(folder: Path) -> ConvertedInfo:
    """What a converted folder holds.

    Raises:
        DataError: if there is no dataset.json, or it is damaged, or names files outside the folder.
    """
    path = folder / DATASET_JSON
    try:
        if path.stat().st_size > _LONGEST:
            raise DataError(f"{path} is too large for a description of a dataset.")
        return ConvertedInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no {DATASET_JSON}: it is no converted dataset, or unfinished.") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'file'}: {p['msg']}" for p in error.errors()[:_SHOWN]]
        raise DataError(f"{path} is damaged or of another version: {'; '.join(problems)}.") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def open_converted(folder: Path, cache: Path | None = None) -> tuple[dict[str, RawExamples], tuple[str, ...]]:
    """The stored examples of each split and the classes of a converted folder.

    Args:
        folder: with a dataset.json.
        cache: a folder for indexes that are missing and can't be written beside their files.

    Raises:
        DataError: if a file is missing or not as dataset.json says.
    """
    info = read_dataset_json(folder)
    splits: dict[str, RawExamples] = {}
    for split, parts in info.splits.items():
        for shard in parts.shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                raise DataError(f"{path} is missing: {DATASET_JSON} names it. Copy the whole folder again.")
            if size != shard.bytes:
                raise DataError(f"{path} has {size:,} bytes, but {DATASET_JSON} says {shard.bytes:,}. Copy it again.")
        paths = [folder / shard.file for shard in parts.shards]
        with bar(f"indexing {split}") as progress:
            items = RecordExamples(paths, info.features, cache, progress=progress)
        if len(items) != parts.examples:
            raise DataError(f"{folder} has {len(items):,} {split} examples; {DATASET_JSON} says {parts.examples:,}.")
        if len(items) and int(items.labels.max()) >= len(info.classes):
            worst = int(items.labels.argmax())
            raise DataError(
                f"{folder}, {items.name(worst)}: its label {int(items.labels[worst])} is out of range, "
                f"there are {len(info.classes)} classes."
            )
        splits[split] = items
    return splits, tuple(info.classes)
