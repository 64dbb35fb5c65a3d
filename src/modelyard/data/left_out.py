"""`--on_bad skip`: examples that can't be decoded are left out, before splits and batches are decided.

All examples are decoded when a run starts. So the order of the others never depends on which batch meets a bad file,
and the fingerprint of the data says which were left out: a file that becomes bad, or is repaired, is other data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from modelyard.data.dataset import Dataset
from modelyard.data.decoded import DecodedDataset
from modelyard.data.image_spec import UndecodableError
from modelyard.data.raw_examples import ArrayExamples, FileExamples, RawExamples
from modelyard.data.records.reader import RecordExamples
from modelyard.errors import DataError
from modelyard.system.console import bar
from modelyard.system.files import whole_file

log = logging.getLogger("modelyard")

_BATCH = 32
_SHOWN = 5


def leave_out_bad(dataset: Dataset, cache: Path, threads: int) -> Dataset:
    """Returns the dataset without the examples that can't be decoded.

    Args:
        dataset: the dataset as it is stored.
        cache: a folder, where the result of decoding unchanged files is kept.
        threads: the number of threads that decode.

    Raises:
        DataError: if there are no other training examples, or a file can't be read at the moment.
    """
    if not isinstance(dataset, DecodedDataset):
        log.info("on_bad has no effect: the examples are not files")
        return dataset
    bad = {split: _bad_of(split, examples, cache, threads) for split, examples in dataset.splits.items()}
    bad = {split: found for split, found in bad.items() if found}
    if not bad:
        return dataset
    names = [dataset.name(split, row) for split, found in bad.items() for row in found]
    more = f" and {len(names) - _SHOWN:,} more; manifest.json names them" if len(names) > _SHOWN else ""
    log.warning("%d example(s) can't be decoded and are left out: %s%s", len(names), ", ".join(names[:_SHOWN]), more)
    return dataset.without(bad)


def _bad_of(split: str, examples: RawExamples, cache: Path, threads: int) -> dict[int, str]:
    """Returns the reason for each row that can't be decoded."""
    if isinstance(examples, ArrayExamples):
        return {}
    key = _key(examples)
    kept = None if key is None else cache / "decoded" / f"{key}.json"
    if kept is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return {int(row): str(reason) for row, reason in json.loads(kept.read_text()).items()}
    with bar(f"checking {split}", len(examples)) as progress:
        found = _decode_all(examples, threads, progress)
    if kept is not None and key == _key(examples):
        with contextlib.suppress(OSError):  # the cache saves time; it is not needed
            kept.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(kept) as file:
                file.write(json.dumps(found).encode())
    return found


def _decode_all(examples: RawExamples, threads: int, progress: Callable[[int], None]) -> dict[int, str]:
    def check(start: int) -> dict[int, str]:
        problems = {row: _problem(examples, row) for row in range(start, min(start + _BATCH, len(examples)))}
        return {row: problem for row, problem in problems.items() if problem is not None}

    found: dict[int, str] = {}
    pool = ThreadPoolExecutor(threads)
    try:
        for number, problems in enumerate(pool.map(check, range(0, len(examples), _BATCH)), 1):
            found |= problems
            progress(min(number * _BATCH, len(examples)))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _problem(examples: RawExamples, row: int) -> str | None:
    from modelyard.data.images import decode

    try:
        raw = examples.load(row)
        if isinstance(raw, bytes):
            decode(raw, None, examples.name(row))
    except DataError as error:
        # An error of the disk says nothing of the image. Pillow's errors are OSErrors, too.
        if isinstance(error.__cause__, OSError) and not isinstance(error, UndecodableError):
            raise
        return str(error)
    return None


def _key(examples: RawExamples) -> str | None:
    """Returns a hash of the files and of when they changed; None if the examples are not in files."""
    if isinstance(examples, FileExamples):
        paths = [examples.root / path for path in examples.paths]
    elif isinstance(examples, RecordExamples):
        paths = examples.paths
    else:
        return None
    digest = hashlib.sha256(examples.fingerprint().encode())
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
        # The time of change, too: a tool that copies times may write other bytes.
        times = f"{path.absolute()}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
        digest.update(times.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]
