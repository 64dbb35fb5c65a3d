"""TensorBoard's event files, read by TensorBoard itself."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from modelyard.run.events import EventWriter, _events, contact_sheet, cut_events, png


def write(folder: Path, *steps: int) -> None:
    writer = EventWriter(folder)
    for step in steps:
        writer.scalars(step, {"loss": 1 / step, "accuracy": 0.5})
    writer.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("events.out.tfevents.*"))


def read_events(folder: Path) -> list[Event]:
    """As a resumed run reads them."""
    return [event for path in files(folder) for _, event in _events(path)]


def steps(folder: Path) -> list[int]:
    return [event.step for event in read_events(folder) if event.summary.value]


def as_tensorboard_reads(path: Path) -> list[Event]:
    """By TensorBoard's own reader, which checks every checksum and needs no TensorFlow."""
    reader, events = PyRecordReader_New(str(path)), []
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return events
        events.append(Event.FromString(reader.record()))


def decode(data: bytes) -> NDArray[np.uint8]:
    """A PNG without filters, in plain zlib; checks every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, offset = {}, 8
    while offset < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        name, body = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, offset + 8 + length)
        assert checksum == zlib.crc32(name + body)
        chunks[name] = body
        offset += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, kind, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3, 6: 4}[kind]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def test_scalars_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, 1, 4)
    (path,) = files(tmp_path)
    first, *events = as_tensorboard_reads(path)
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in events] == [1, 4]
    values = {value.tag: value.simple_value for value in events[1].summary.value}
    assert values == {"loss": 0.25, "accuracy": 0.5}
    assert [event.step for event in read_events(tmp_path)] == [0, 1, 4]


def test_no_event_no_file(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "train")
    writer.flush()
    writer.close()
    assert not (tmp_path / "train").exists()


def test_flushed_events_can_be_read_while_the_run_continues(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.scalars(1, {"loss": 1.0})
    writer.flush()
    assert steps(tmp_path) == [1]
    writer.close()


@pytest.mark.parametrize(("step", "kept"), [(0, []), (10, [10]), (15, [10]), (30, [10, 20, 30])])
def test_what_came_after_a_step_is_cut_in_every_split(tmp_path: Path, step: int, kept: list[int]) -> None:
    for split in ("train", "validation"):
        write(tmp_path / split, 10, 20, 30)
    cut_events(tmp_path, step)
    for split in ("train", "validation"):
        assert steps(tmp_path / split) == kept
        (path,) = files(tmp_path / split)
        assert [event.step for event in as_tensorboard_reads(path)] == [0, *kept]


def test_a_resumed_run_writes_nothing_twice(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30)
    cut_events(tmp_path, 10)
    write(tmp_path, 20, 30, 40)
    assert steps(tmp_path) == [10, 20, 30, 40]


def test_a_file_torn_at_any_byte_keeps_its_whole_events(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    kept = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        cut_events(tmp_path, 99)
        assert whole.startswith(path.read_bytes())
        events = as_tensorboard_reads(path)
        assert steps(tmp_path) == [event.step for event in events if event.summary.value]
        kept.add(len(events))
    assert kept == {0, 1, 2}


@pytest.mark.parametrize("tail", [b"\xff" * 40, struct.pack("<QI", 5, 0) + b"\xff" * 9, b"\0" * 11])
def test_a_damaged_tail_does_not_prevent_a_resume(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, 10, 20)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert steps(tmp_path) == [10, 20]
    cut_events(tmp_path, 99)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_holds_the_pixels(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    assert np.array_equal(decode(png(image)), image)


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (3, 1, 3), (8, 1, 8), (9, 2, 8), (32, 4, 8)])
def test_a_contact_sheet_contains_every_image_at_its_position(count: int, rows: int, columns: int) -> None:
    images = np.random.default_rng(0).integers(1, 256, (count, 4, 6, 3), dtype=np.uint8)
    sheet = contact_sheet(images)
    assert sheet.shape == (rows * 5 - 1, columns * 7 - 1, 3)
    for i, image in enumerate(images):
        top, left = i // 8 * 5, i % 8 * 7
        assert np.array_equal(sheet[top : top + 4, left : left + 6], image)
    assert np.count_nonzero(sheet) == images.size


def test_floats_are_stretched_to_the_full_range() -> None:
    images = np.linspace(-1, 3, 16, dtype=np.float32).reshape(1, 4, 4, 1)
    sheet = contact_sheet(images)
    assert (sheet.min(), sheet.max(), sheet.dtype) == (0, 255, np.uint8)
    assert not contact_sheet(np.full((1, 4, 4, 1), 7.0)).any()


def test_other_channels_are_shown_by_their_first() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 7), dtype=np.uint8)
    assert np.array_equal(contact_sheet(images)[:, :4], images[0, :, :, :1])


def test_a_sheet_of_the_first_images_is_an_event(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 3), dtype=np.uint8)
    writer = EventWriter(tmp_path)
    writer.images(0, "train/images", images)
    writer.close()
    (path,) = files(tmp_path)
    value = as_tensorboard_reads(path)[1].summary.value[0]
    assert value.tag == "train/images"
    decoded = decode(value.image.encoded_image_string)
    assert (value.image.height, value.image.width, value.image.colorspace) == decoded.shape
    assert np.array_equal(decoded, contact_sheet(images[:32]))
