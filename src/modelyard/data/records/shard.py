"""The shards of a conversion: examples are encoded and written as records with an index, in one or several processes.

Worker processes import little more than this module. They are spawned: a fork of a process with threads, such as those
of TensorFlow, may hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from modelyard.data.catalog import RawType
from modelyard.data.images import decode, resize
from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.example import FeatureMap, Value, encode_example
from modelyard.data.records.index import build_index, index_path, write_index
from modelyard.data.records.reader import Encoding, ShardInfo
from modelyard.data.records.tfrecord import frame
from modelyard.errors import DataError
from modelyard.system.files import explain, whole_file

OnBad = Literal["fail", "skip"]
Size = tuple[int, int, int]
"""Height, width and channels."""

_FORMATS = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
_PROGRESS_SECONDS = 0.2
_work: Any = None  # of a worker process: the writer, the number of examples done, the event to stop


@dataclass(frozen=True)
class EncodedExample:
    """An example as it is stored in a record. The size is None for values that are not an image."""

    payload: bytes
    format: str
    size: Size | None
    resized: bool = False


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes all examples of a conversion in the same way; see `convert_examples`."""

    encoding: Encoding
    max_edge: int | None
    quality: int
    features: FeatureMap
    arrays: bool
    """Whether the examples are arrays, not image files."""

    @classmethod
    def of(
        cls, first: RawExample, name: str, encoding: Encoding = "keep", max_edge: int | None = None, quality: int = 95
    ) -> RecordEncoder:
        """Returns an encoder for examples like ``first``.

        Raises:
            DataError: if they can't be stored with this encoding.
        """
        sizes: dict[str, Any] = {"height": "image/height", "width": "image/width"}
        arrays = not isinstance(first, bytes)
        if isinstance(first, bytes):
            features = FeatureMap(coding="raw" if encoding == "raw" else "encoded", **sizes)
        elif encoding == "jpeg":
            _as_pixels(first, name)
            features = FeatureMap(**sizes)
        else:
            dtype: Any = first.dtype.name
            if dtype not in get_args(RawType):
                known = ", ".join(get_args(RawType))
                raise DataError(f"{name}: values of type {dtype} are not supported. Supported: {known}.")
            if first.ndim not in (2, 3):
                sizes = {"shape": first.shape}
            features = FeatureMap(coding="raw", dtype=dtype, **sizes)
        return cls(encoding, max_edge, quality, features, arrays)

    def encode(self, example: RawExample, name: str) -> EncodedExample:
        """Encodes an example. Image files are always decoded, to find damaged ones.

        Raises:
            DataError: if that fails, with its name.
        """
        if isinstance(example, bytes) == self.arrays:
            found, others = ("an image file", "arrays") if self.arrays else ("an array", "image files")
            raise DataError(f"{name} is {found}; those before it are {others}.")
        if not isinstance(example, bytes):
            return self._encode_array(example, name)
        # Raw pixels always have three channels: grey images among them would have another shape.
        pixels = decode(example, 3 if self.encoding == "raw" else None, name)
        fitted = self._shrink(pixels)
        size: Size = fitted.shape
        if self.encoding == "raw":
            return EncodedExample(fitted.tobytes(), "raw", size)
        kept, kind = self.encoding == "keep", _image_format(example)
        if kept and fitted is pixels:
            return EncodedExample(example, kind, size)
        if kept and kind == "png":
            return EncodedExample(_png(fitted), "png", size, resized=True)
        return EncodedExample(self._jpeg(fitted, name), "jpeg", size, resized=kept)

    def _encode_array(self, array: NDArray[np.generic], name: str) -> EncodedExample:
        if self.encoding == "jpeg":
            pixels = self._shrink(_as_pixels(array, name))
            return EncodedExample(self._jpeg(pixels, name), "jpeg", pixels.shape)
        dtype, shape = self.features.dtype, self.features.shape
        if array.dtype.name != dtype:
            raise DataError(f"{name} has values of {array.dtype}, those before it of {dtype}.")
        values = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if shape is not None:
            if array.shape != shape:
                raise DataError(f"{name} has shape {array.shape}, those before it {shape}.")
            return EncodedExample(values.tobytes(), "raw", None)
        if array.ndim not in (2, 3) or not array.size:
            raise DataError(f"{name} has shape {array.shape}; height × width × channels are needed.")
        if self.max_edge is not None and max(array.shape[:2]) > self.max_edge:
            pixels = self._shrink(_as_pixels(array, name))
            return EncodedExample(pixels.tobytes(), "raw", pixels.shape, resized=self.encoding == "keep")
        return EncodedExample(values.tobytes(), "raw", (*array.shape, 1)[:3])

    def _shrink(self, image: NDArray[Any]) -> NDArray[Any]:
        """Returns ``image`` itself, or a smaller one whose longer edge is `max_edge`."""
        longer = max(image.shape[:2])
        if self.max_edge is None or longer <= self.max_edge:
            return image
        return resize(image, *(max((2 * edge * self.max_edge + longer) // (2 * longer), 1) for edge in image.shape[:2]))

    def _jpeg(self, image: NDArray[Any], name: str) -> bytes:
        grey = image.shape[2] == 1
        try:
            data: bytes = simplejpeg.encode_jpeg(
                np.ascontiguousarray(image),
                quality=self.quality,
                colorspace="GRAY" if grey else "RGB",
                colorsubsampling="Gray" if grey else "420",
            )
        except ValueError as error:
            raise DataError(f"{name} can't be stored as JPEG: {error}.") from error
        return data


def _png(image: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(out, "PNG")
    return out.getvalue()


def _image_format(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _FORMATS.items() if data.startswith(magic)), "other")


def _as_pixels(array: NDArray[np.generic], name: str) -> NDArray[Any]:
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise DataError(
            f"{name} has shape {'×'.join(map(str, array.shape))} of {array.dtype}; an image has height × width × 1 or "
            "3 of uint8. Other values can only be stored unchanged (encoding keep, no max_edge)."
        )
    return pixels


# -- one shard ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardTask:
    """The examples of one shard: those of a split from ``start`` on."""

    path: Path
    split: str
    start: int
    labels: NDArray[np.int32]


class ShardResult(ShardInfo):
    """The facts about a finished shard, kept in a file beside it until the conversion is complete."""

    class_counts: dict[int, int]
    sizes: set[Size]
    reencoded: int
    bad: list[tuple[str, str]]


def result_path(path: Path) -> Path:
    """Returns the path of the result of a shard."""
    return path.with_name(f".{path.name}.json")


def bad_example_error(problem: str) -> DataError:
    """Returns the error for an unreadable example, with a hint how to skip it."""
    return DataError(f"{problem} To skip examples that can't be read, use --on_bad skip. Finished shards are kept.")


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards; sent to each worker process."""

    splits: Mapping[str, RawExamples]
    classes: Sequence[str]
    encoder: RecordEncoder
    on_bad: OnBad

    def write(self, task: ShardTask, example_done: Callable[[], None]) -> ShardResult:
        """Writes the records of a shard, their index, and last the result, which marks the shard as finished.

        Raises:
            DataError: if the disk is full, or at the first example that can't be read unless those are skipped.
        """
        examples, features = self.splits[task.split], self.encoder.features
        digest, reencoded = hashlib.sha256(), 0
        counts: Counter[int] = Counter()
        sizes: set[Size] = set()
        bad: list[tuple[str, str]] = []
        with explain(task.path, "write", DataError):
            with whole_file(task.path) as out:
                for number, label in enumerate(task.labels.tolist(), task.start):
                    example_done()
                    name = examples.name(number)
                    try:
                        encoded = self.encoder.encode(examples.load(number), name)
                    except DataError as error:
                        if self.on_bad == "fail":
                            raise bad_example_error(str(error)) from error
                        bad.append((name, str(error)))
                        continue
                    record = frame(encode_example(self._features(encoded, label, name)))
                    out.write(record)
                    digest.update(record)
                    counts[label] += 1
                    reencoded += encoded.resized
                    if encoded.size is not None:
                        sizes.add(encoded.size)
                size = out.tell()
            index = build_index(task.path, features)  # reads the file back, so errors of the disk are found
            with whole_file(index_path(task.path)) as out:
                write_index(out, index, features, size)
            result = ShardResult(
                file=task.path.name,
                records=counts.total(),
                bytes=size,
                sha256=digest.hexdigest(),
                class_counts=dict(counts),
                sizes=sizes,
                reencoded=reencoded,
                bad=bad,
            )
            with whole_file(result_path(task.path)) as out:
                out.write(result.model_dump_json().encode(errors="replace"))
        return result

    def _features(self, encoded: EncodedExample, label: int, name: str) -> Mapping[str, Value]:
        features: dict[str, Value] = {
            "image/encoded": encoded.payload,
            "image/format": encoded.format,
            "image/class/label": label,
            "image/class/text": self.classes[label],
            "image/filename": name.encode(errors="replace"),
        }
        if encoded.size is not None:
            features |= zip(("image/height", "image/width", "image/channels"), encoded.size, strict=True)
        return features


# -- processes ------------------------------------------------------------------------------------------------------


def write_shards(
    writer: ShardWriter, tasks: Sequence[ShardTask], processes: int, progress: Callable[[int], None]
) -> list[ShardResult]:
    """Writes shards and reports the number of examples that are done. One process is this one.

    On failure, all work ends, and the first error in the order of the shards is raised.
    """
    if processes == 1:
        numbers = itertools.count(1)
        return [writer.write(task, lambda: progress(next(numbers))) for task in tasks]
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("Q", 0), context.Event()
    with ProcessPoolExecutor(processes, context, _start_worker, (writer, done, stop)) as pool:
        with _without_main_module():
            futures = [pool.submit(_write, task) for task in tasks]
        try:
            for future in futures:
                while not future.done():
                    wait([future], _PROGRESS_SECONDS)
                    progress(done.value)
                future.result()
            progress(done.value)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise DataError(
                "a process of the conversion was killed, perhaps because memory ran out. Run the command again: "
                "finished shards are kept. Fewer --processes need less memory."
            ) from error
        except BaseException:
            stop.set()  # also on Ctrl-C: the others stop at their next example and remove their unfinished shard
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps workers from importing the user's script: without a `__main__` guard it would start another conversion.

    Code from a prompt or a pipe can't be imported at all.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


class _StoppedError(Exception):
    """Another process has failed."""


def _start_worker(*work: Any) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one stops the others
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    # Workers of a pool do not notice that their parent was killed: they would wait for work forever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(task: ShardTask) -> ShardResult:
    writer: ShardWriter
    writer, done, stop = _work

    def example_done() -> None:
        if stop.is_set():
            raise _StoppedError
        with done.get_lock():
            done.value += 1

    return writer.write(task, example_done)
