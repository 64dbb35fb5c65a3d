"""Examples in TFRecord files: those of TensorFlow's writer and ours, sound and damaged."""

import gzip
import io
import os
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from record_files import PLAIN, numbered, payload, write

from modelyard.data.records import tfrecord
from modelyard.data.records.example import FeatureMap, encode_example
from modelyard.data.records.index import index_path
from modelyard.data.records.reader import RecordExamples, describe_record
from modelyard.data.records.tfrecord import frame
from modelyard.errors import DataError
from modelyard.storage import DAY

CIFAR = FeatureMap(image="image", label="label", coding="raw", layout="chw", shape=(32, 32, 3))
IMAGENET = FeatureMap(height="image/height", width="image/width", first_label=1)
FLOATS = FeatureMap(image="image", label="label", coding="floats", shape=(28, 28, 1))

Write = Callable[..., Path]
random = np.random.default_rng(0)


def jpeg(height: int, width: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def theirs(two_devices: None, tmp_path: Path) -> Write:
    """Writes records as the old converters did: with TensorFlow."""
    import tensorflow as tf

    def feature(value: Any) -> Any:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if isinstance(value, int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))

    def writes(records: Sequence[dict[str, Any]], compression: str, name: str = "train.tfrecord") -> Path:
        with tf.io.TFRecordWriter(str(tmp_path / name), compression) as writer:
            for record in records:
                features = {key: feature(value) for key, value in record.items()}
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
        return tmp_path / name

    return writes


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
class TestFilesOfTensorFlow:
    """The layouts of the old converters, read exactly."""

    def test_raw_pixels_channel_by_channel(self, theirs: Write, tmp_path: Path, compression: str) -> None:
        images = random.integers(0, 256, (7, 32, 32, 3), np.uint8)
        records = [{"image": im.transpose(2, 0, 1).tobytes(), "label": n % 4} for n, im in enumerate(images)]
        items = RecordExamples([theirs(records, compression)], CIFAR, tmp_path / "cache")
        assert items.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert items.labels.dtype == np.int32
        for number, image in enumerate(images):
            loaded = items.load(number)
            assert isinstance(loaded, np.ndarray)
            assert loaded.dtype == np.uint8
            assert np.array_equal(loaded, image)

    def test_image_files_with_their_sizes(self, theirs: Write, tmp_path: Path, compression: str) -> None:
        sizes = [(20, 30), (31, 17), (8, 8)]
        files = [jpeg(*size) for size in sizes]
        records = [
            {
                "image/encoded": file,
                "image/height": h,
                "image/width": w,
                "image/class/label": n + 1,
                "image/format": b"x",
            }
            for n, (file, (h, w)) in enumerate(zip(files, sizes, strict=True))
        ]
        items = RecordExamples([theirs(records, compression)], IMAGENET, tmp_path / "cache")
        assert [items.load(n) for n in range(3)] == files
        assert items.labels.tolist() == [0, 1, 2]
        ((_, index),) = items.indexes()
        assert [(row["height"], row["width"]) for row in index.entries] == sizes

    def test_lists_of_floats(self, theirs: Write, tmp_path: Path, compression: str) -> None:
        images = random.random((4, 28, 28, 1), np.float32)
        records = [{"image": image.reshape(-1).tolist(), "label": n} for n, image in enumerate(images)]
        items = RecordExamples([theirs(records, compression)], FLOATS, tmp_path / "cache")
        for number, image in enumerate(images):
            loaded = items.load(number)
            assert isinstance(loaded, np.ndarray)
            assert loaded.dtype == np.float32
            assert np.array_equal(loaded, image)


def test_tensorflow_reads_what_we_write(two_devices: None, tmp_path: Path) -> None:
    import tensorflow as tf

    path = numbered(tmp_path / "a.tfrecord", 20)
    read = [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]
    assert [example.features.feature["image"].bytes_list.value[0] for example in read] == [
        payload(n) for n in range(20)
    ]
    assert [example.features.feature["label"].int64_list.value[0] for example in read] == [n % 3 for n in range(20)]


def test_files_are_one_after_the_other_by_name(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / "b", 3, 5), numbered(tmp_path / "a", 5), write(tmp_path / "ab", [])]
    items = RecordExamples(paths, PLAIN)
    assert [items.load(n) for n in range(8)] == [payload(n) for n in range(8)]
    assert items.labels.tolist() == [n % 3 for n in range(8)]
    assert [items.name(n) for n in (0, 4, 5, 7)] == ["a, record 0", "a, record 4", "b, record 0", "b, record 2"]
    with pytest.raises(IndexError):
        items.load(8)


def test_no_files_and_no_records_are_no_examples(tmp_path: Path) -> None:
    assert len(RecordExamples([], PLAIN)) == 0
    assert len(RecordExamples([write(tmp_path / "a", [])], PLAIN)) == 0
    assert len(RecordExamples([tmp_path / "a"], PLAIN)) == 0  # with its index


def test_text_labels_become_sorted_classes_over_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"image": b"x", "label": name} for name in ("dog", "cat", "dog")])
    write(tmp_path / "b", [{"image": b"x", "label": name} for name in ("emu", "ant")])
    for _ in range(2):  # made, then read
        items = RecordExamples([tmp_path / "a", tmp_path / "b"], PLAIN)
        assert items.class_names == ("ant", "cat", "dog", "emu")
        assert items.labels.tolist() == [2, 1, 2, 3, 0]
    given_order = RecordExamples([tmp_path / "a"], PLAIN, classes=["dog", "cat"])
    assert given_order.labels.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"b, record 0: its label 'emu' is not one of the 3 classes: ant, cat, dog"):
        RecordExamples([tmp_path / "b"], PLAIN, classes=["ant", "cat", "dog"])


def test_texts_of_an_index_do_not_depend_on_the_order_of_the_records(tmp_path: Path) -> None:
    items = RecordExamples([write(tmp_path / "a", [{"image": b"x", "label": name} for name in "cab"])], PLAIN)
    assert items.indexes()[0][1].texts == ("a", "b", "c")


def test_labels_that_are_numbers_have_no_class_names(tmp_path: Path) -> None:
    assert RecordExamples([numbered(tmp_path / "a")], PLAIN).class_names is None


def test_the_fingerprint_follows_the_content_not_the_shards(tmp_path: Path) -> None:
    whole = RecordExamples([numbered(tmp_path / "whole", 8)], PLAIN).fingerprint()
    parts = [numbered(tmp_path / "part-0", 5), numbered(tmp_path / "part-1", 3, 5)]
    assert RecordExamples(parts, PLAIN).fingerprint() == whole
    record = [{"image": payload(n), "label": n % 3} for n in range(8)]
    record[3]["image"] = payload(3)[:-1] + b"!"
    assert RecordExamples([write(tmp_path / "changed", record)], PLAIN).fingerprint() != whole


def test_raw_pixels_of_varying_size_and_wide_values(tmp_path: Path) -> None:
    features = FeatureMap("pixels", "label", "raw", height="h", width="w", dtype="uint16")
    images = [random.integers(0, 1 << 16, shape, np.uint16) for shape in ((3, 5, 1), (4, 2, 3))]
    records = [
        {"pixels": image.astype("<u2").tobytes(), "label": 0, "h": image.shape[0], "w": image.shape[1]}
        for image in images
    ]
    items = RecordExamples([write(tmp_path / "a", records)], features)
    assert all(np.array_equal(items.load(n), image) for n, image in enumerate(images))


def test_floats_that_are_not_packed_are_read(tmp_path: Path) -> None:
    body = b"".join(b"\x0d" + np.float32(value).tobytes() for value in range(6))
    feature = bytes([0x12, len(body)]) + body
    image = b"\x0a\x05image" + bytes([0x12, len(feature)]) + feature
    label = encode_example({"label": 1})[2:]
    content = bytes([0x0A, len(image)]) + image + label
    (tmp_path / "a").write_bytes(frame(bytes([0x0A, len(content)]) + content))
    items = RecordExamples([tmp_path / "a"], FeatureMap("image", "label", "floats", shape=(2, 3)))
    assert np.array_equal(items.load(0), np.arange(6, dtype=np.float32).reshape(2, 3))


class TestFeatureMaps:
    """A map that does not fit says what would."""

    RECORD: ClassVar[dict[str, Any]] = {"picture": b"x" * 3072, "class": 7, "mean": [0.5] * 3}

    @pytest.mark.parametrize(
        ("features", "message"),
        [
            (FeatureMap("image", "class"), "no feature 'image' for the image"),
            (FeatureMap("picture", "label"), "no feature 'label' for the label"),
            (FeatureMap("class", "class"), "'class' is not one image as bytes"),
            (FeatureMap("picture", "mean"), "'mean' is not one label"),
            (FeatureMap("picture", "class", "floats"), "'picture' is not a list of floats"),
            (FeatureMap("picture", "picture"), "'picture' is not a label: it has 3,072 bytes"),
            (FeatureMap("picture", "class", "raw", height="h", width="w"), "no feature 'h' with one positive integer"),
        ],
    )
    def test_a_wrong_name_is_answered_with_the_features_there_are(
        self, tmp_path: Path, features: FeatureMap, message: str
    ) -> None:
        write(tmp_path / "a", [self.RECORD])
        with pytest.raises(DataError, match=message) as caught:
            RecordExamples([tmp_path / "a"], features)
        assert "/a, record 0 at byte 0: " in str(caught.value)
        assert "The record has: class: 1 integer; mean: 3 floats; picture: 3,072 bytes." in str(caught.value)

    @pytest.mark.parametrize(
        ("features", "message"),
        [
            (
                FeatureMap("picture", "class", "raw", shape=(28, 28, 1)),
                "has 3,072 bytes, but 28 × 28 × 1 of uint8 needs 784",
            ),
            (FeatureMap("mean", "class", "floats", shape=(4,)), "has 12 bytes, but 4 of float32 needs 16"),
        ],
    )
    def test_an_image_that_does_not_fit_its_shape_is_named_with_both_sizes(
        self, tmp_path: Path, features: FeatureMap, message: str
    ) -> None:
        sound = {"picture": b"x" * 784, "class": 7, "mean": [0.5] * 4}
        path = write(tmp_path / "a", [sound, self.RECORD])
        with pytest.raises(DataError, match=rf"a, record 1 at byte \d+: its image {message}"):
            RecordExamples([path], features)

    @pytest.mark.parametrize("label", [-1, 1 << 31, -(1 << 63)])
    def test_a_label_out_of_range_is_named(self, tmp_path: Path, label: int) -> None:
        path = write(tmp_path / "a", [{"image": b"", "label": 0}, {"image": b"", "label": label}])
        with pytest.raises(DataError, match=rf"a, record 1 at byte \d+: its label {label} is out of range"):
            RecordExamples([path], PLAIN)

    def test_label_0_where_they_count_from_1_is_out_of_range(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="its label 0 is out of range: labels start at 1"):
            RecordExamples([numbered(tmp_path / "a")], FeatureMap("image", "label", first_label=1))

    @pytest.mark.parametrize("labels", [(1, "cat"), ("cat", 1)])
    def test_numbers_and_text_are_not_mixed(self, tmp_path: Path, labels: tuple[Any, Any]) -> None:
        one, other = ({"image": b"", "label": label} for label in labels)
        with pytest.raises(DataError, match="some labels are numbers and some are text"):
            RecordExamples([write(tmp_path / "a", [one, other])], PLAIN)
        with pytest.raises(DataError, match=r"labels in .* are numbers, those in .* are text"):
            RecordExamples([write(tmp_path / "b", [one]), write(tmp_path / "c", [other])], PLAIN)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"coding": "jpeg"}, "coding of a feature map must be one of encoded, raw, floats, not 'jpeg'"),
            ({"dtype": "object"}, "dtype of a feature map"),
            ({"layout": "nhwc"}, "layout of a feature map"),
            ({"coding": "raw"}, "raw images need --record_shape"),
            ({"shape": (0, 2)}, "is not the shape of an image"),
            ({"height": "h"}, "both"),
            ({"layout": "chw", "shape": (3, 2)}, "layout chw needs"),
        ],
    )
    def test_a_map_that_makes_no_sense_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            FeatureMap(**options)

    def test_features_of_the_first_record_are_listed(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", [self.RECORD, {}])
        lines = ["class: 1 integer", "mean: 3 floats", "picture: 3,072 bytes"]
        assert describe_record(path) == lines
        (tmp_path / "a.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert describe_record(tmp_path / "a.gz", tmp_path / "cache") == lines
        assert describe_record(write(tmp_path / "b", [])) == []
        (tmp_path / "c").write_bytes(frame(b"no example"))
        with pytest.raises(DataError, match="c, record 0 at byte 0: "):
            describe_record(tmp_path / "c")


class TestDamage:
    """Nothing damaged is ever read as if it were sound."""

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_a_flipped_byte_is_named_by_file_and_offset(self, tmp_path: Path, data: st.DataObject) -> None:
        path = numbered(tmp_path / "a.tfrecord")
        sound = path.read_bytes()
        index_path(path).unlink(missing_ok=True)
        with_index = data.draw(st.booleans(), label="indexed before it was damaged")
        if with_index:
            RecordExamples([path], PLAIN)
        place = data.draw(st.integers(0, len(sound) - 1))
        damaged = bytearray(sound)
        damaged[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)

        def read_all() -> None:
            items = RecordExamples([path], PLAIN)
            for number in range(5):
                items.load(number)

        with pytest.raises(DataError, match=r"a\.tfrecord .*byte \d+"):
            read_all()

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_cut_off_file_says_how_many_records_are_whole(self, tmp_path: Path, indexed: bool) -> None:
        path = numbered(tmp_path / "a.tfrecord")
        if indexed:
            RecordExamples([path], PLAIN)
        sound = path.read_bytes()
        for cut in range(1, 60):
            path.write_bytes(sound[:-cut])
            with pytest.raises(
                DataError, match=r"a\.tfrecord is cut off: the record at byte \d+ is not whole\. [34] whole"
            ):
                RecordExamples([path], PLAIN)

    def test_a_file_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\x89PNG and so on, which is no record at all")
        with pytest.raises(DataError, match=r"a is not a TFRecord file, or is damaged: .* byte 0"):
            RecordExamples([tmp_path / "a"], PLAIN)

    def test_a_huge_length_with_a_right_checksum_allocates_nothing(self, tmp_path: Path) -> None:
        for length in (1 << 31, 1 << 62):
            head = length.to_bytes(8, "little")
            (tmp_path / "a").write_bytes(head + tfrecord.checksum(head).to_bytes(4, "little") + b"x" * 50)
            with pytest.raises(DataError, match=r"cut off|the maximum is"):
                RecordExamples([tmp_path / "a"], PLAIN)

    def test_a_record_that_is_no_example_is_named(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "a")
        size = path.stat().st_size
        path.write_bytes(path.read_bytes() + frame(b"\xff" * 30))
        with pytest.raises(DataError, match=rf"a, record 5 at byte {size}: a number of more than 10 bytes"):
            RecordExamples([path], PLAIN)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"none\.tfrecord: No such file"):
            RecordExamples([tmp_path / "none.tfrecord"], PLAIN)

    @pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
    def test_compressed_files_that_are_damaged_leave_no_copy(
        self, tmp_path: Path, pack: Callable[[bytes], bytes]
    ) -> None:
        packed = pack(numbered(tmp_path / "a", 50).read_bytes())
        for damaged in (packed[:-1], packed[: len(packed) // 2], packed[:40] + b"\0\xff\0\xff" + packed[44:]):
            (tmp_path / "a.gz").write_bytes(damaged)
            with pytest.raises(DataError, match=r"a\.gz is (cut off|damaged)"):
                RecordExamples([tmp_path / "a.gz"], PLAIN, tmp_path / "cache")
            assert list((tmp_path / "cache/plain").iterdir()) == []

    def test_a_compressed_file_is_unpacked_once_and_again_when_it_changes(self, tmp_path: Path) -> None:
        cache, packed = tmp_path / "cache", tmp_path / "a.tfrecord.gz"
        packed.write_bytes(gzip.compress(numbered(tmp_path / "a").read_bytes()))
        items = RecordExamples([packed], PLAIN, cache)
        assert items.load(2) == payload(2)
        assert items.name(2) == "a.tfrecord.gz, record 2"
        (copy,) = cache.glob("plain/*.tfrecord")
        before = copy.stat()
        assert RecordExamples([packed], PLAIN, cache).load(3) == payload(3)
        assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        packed.write_bytes(gzip.compress(numbered(tmp_path / "a", 5, 10).read_bytes()))
        os.utime(packed, ns=(1, 1))
        assert RecordExamples([packed], PLAIN, cache).load(2) == payload(12)

    def test_what_killed_processes_left_is_removed_when_it_is_old(self, tmp_path: Path) -> None:
        cache, path = tmp_path / "cache", tmp_path / "data" / "a"
        places = (path.parent, cache / "plain", cache / "index")
        for place in places:
            place.mkdir(parents=True)
            for name, age in ((".partial-left0000", 2 * DAY), (".partial-writing0", 60)):
                (place / name).write_bytes(b"1")
                os.utime(place / name, (time.time() - age,) * 2)
        RecordExamples([numbered(path)], PLAIN, cache)
        RecordExamples([path], PLAIN)
        assert [sorted(file.name for file in place.glob(".*")) for place in places] == [[".partial-writing0"]] * 3

    @pytest.mark.parametrize("length", [0x8B1F, 0x0178])
    def test_a_length_that_looks_like_compression_is_a_length(self, tmp_path: Path, length: int) -> None:
        around = length - len(encode_example({"image": bytes(length - 50), "label": 0}))
        path = write(tmp_path / "a", [{"image": bytes(length - 50 + around), "label": 0}])
        assert int.from_bytes(path.read_bytes()[:8], "little") == length
        assert len(RecordExamples([path], PLAIN)) == 1

    def test_a_file_that_changes_after_it_was_indexed_is_reported(self, tmp_path: Path) -> None:
        path = numbered(tmp_path / "a")
        items = RecordExamples([path], PLAIN)
        other = b"".join(frame(encode_example({"image": payload(n)[::-1], "label": n % 3})) for n in range(5))
        assert len(other) == path.stat().st_size
        path.write_bytes(other)
        with pytest.raises(DataError, match=r"a has changed since it was indexed: another record is at byte \d+"):
            items.load(3)

    def test_a_compressed_file_without_a_cache_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.gz").write_bytes(gzip.compress(numbered(tmp_path / "a").read_bytes()))
        with pytest.raises(DataError, match=r"compressed \(gzip\)"):
            RecordExamples([tmp_path / "a.gz"], PLAIN)


def test_many_threads_read_right_while_files_are_opened_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import functools

    # Far fewer open files than there are, so that they are closed under other threads' hands.
    monkeypatch.setattr(tfrecord, "_opened", functools.lru_cache(maxsize=2)(tfrecord._opened.__wrapped__))
    paths = [numbered(tmp_path / f"{n:02}", 10, 10 * n) for n in range(12)]
    items = RecordExamples(paths, PLAIN)

    def read(seed: int) -> bool:
        chosen = np.random.default_rng(seed).integers(0, 120, 400)
        return all(items.load(int(n)) == payload(int(n)) for n in chosen)

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208


def test_another_process_opens_the_files_itself(tmp_path: Path) -> None:
    items = RecordExamples([numbered(tmp_path / "a", 100)], PLAIN)
    items.labels = items.labels + np.int32(1)
    sent = pickle.dumps(items)
    assert len(sent) < 2000
    received = pickle.loads(sent)
    assert received.load(70) == payload(70)
    assert received.labels.tolist() == items.labels.tolist()
