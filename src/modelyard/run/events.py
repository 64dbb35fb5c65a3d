"""TensorBoard's event files: scalars, images and the graph, without TensorFlow."""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from modelyard import faults
from modelyard.system.files import explain

_SHEET = 32
_PER_ROW = 8


class EventWriter:
    """Writes one split's events. The file is made at the first event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Any = None
        self._records: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars by name."""
        summary = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=summary)))

    def images(self, step: int, tag: str, images: NDArray[Any]) -> None:
        """Adds the first images of a batch as one image."""
        sheet = contact_sheet(images[:_SHEET])
        height, width, channels = sheet.shape
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png(sheet))
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)])))

    def graph(self, model: Any) -> None:
        """Adds a Keras model as a graph with a node per layer."""
        from modelyard.compat.keras import input_layers

        graph = GraphDef()
        for layer in model.layers:
            graph.node.add(name=layer.name, op=type(layer).__name__, input=input_layers(layer))
        self._write(Event(graph_def=graph.SerializeToString()))

    def flush(self) -> None:
        """Writes buffered events to the file."""
        if self._file is not None:
            with explain(self.folder, "write"):
                self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with explain(self.folder, "write"):
                file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with explain(self.folder, "write"):
            faults.reach(faults.FILE)
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                stem = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
                self._file = open(self.folder / stem, "ab")  # noqa: SIM115 - closed by close()
                self._records = RecordWriter(self._file)
                first = Event(wall_time=event.wall_time, file_version="brain.Event:2")
                self._records.write(first.SerializeToString())
            self._records.write(event.SerializeToString())


def event_offsets(folder: Path) -> dict[str, int]:
    """The length of each event file."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("events.out.tfevents.*")}


def cut_events(folder: Path, step: int, known: Mapping[str, int] | None = None) -> None:
    """Removes the events after ``step``, so that a resumed run writes none twice.

    Args:
        folder: the event files of all splits.
        step: the last step to keep.
        known: lengths up to which the files have no later events. These parts are not read.
    """
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        size, end = path.stat().st_size, (known or {}).get(str(path.relative_to(folder)), 0)
        end = end if size >= end else 0
        for stop, event in _events(path, end):
            if event.step > step:
                break
            end = stop
        if end != size:
            with explain(path, "write"):
                faults.reach(faults.FILE)
                os.truncate(path, end)


def _events(path: Path, start: int = 0) -> Iterator[tuple[int, Event]]:
    """Yields every complete event from ``start`` with its end. A record: length, its CRC, the event, its CRC."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    offset = 0
    while offset + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        end = offset + 12 + length + 4
        if end > len(data):
            return
        try:
            event = Event.FromString(data[offset + 12 : end - 4])
        except DecodeError:  # a damaged file must not prevent a resume
            return
        yield start + end, event
        offset = end


def contact_sheet(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Tiles images, eight per row. Floats are scaled to the full range."""
    if images.dtype != np.uint8:
        low, high = float(images.min()), float(images.max())
        images = ((images - low) * (255 / max(high - low, 1e-9))).astype(np.uint8)
    if images.shape[-1] not in (1, 3, 4):
        images = images[..., :1]
    count, height, width, channels = images.shape
    columns = min(count, _PER_ROW)
    rows = -(-count // columns)
    sheet = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image
    return sheet


def png(image: NDArray[np.uint8]) -> bytes:
    """A PNG file of height × width × channels bytes. Training needs no Pillow."""
    height, width, channels = image.shape
    kind = {1: 0, 3: 2, 4: 6}[channels]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, width * channels)], axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body
