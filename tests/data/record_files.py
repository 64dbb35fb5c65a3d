"""Files of records for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelyard.data.records.example import FeatureMap, encode_example, find_features
from modelyard.data.records.tfrecord import frame

PLAIN = FeatureMap(image="image", label="label")


def parse_example(record: bytes) -> dict[str, Any]:
    return {name: feature.values(record) for name, feature in find_features(record).items()}


def payload(number: int) -> bytes:
    return f"image {number} ".encode() * (number % 7 + 1)


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(frame(encode_example(record)) for record in records))
    return path


def numbered(path: Path, count: int = 5, first: int = 0) -> Path:
    return write(path, [{"image": payload(n), "label": n % 3} for n in range(first, first + count)])
