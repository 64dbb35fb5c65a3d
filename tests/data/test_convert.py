"""Conversion into records: exact, the same in any number of processes, and careful with what is there."""

import errno
import hashlib
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from record_files import parse_example

from modelyard.data.images import decode
from modelyard.data.raw_examples import ArrayExamples, ExampleSubset, FileExamples, RawExample, RawExamples
from modelyard.data.records import convert
from modelyard.data.records import shard as shard_module
from modelyard.data.records.convert import ConvertReport, convert_examples
from modelyard.data.records.reader import open_converted, read_dataset_json
from modelyard.data.records.tfrecord import scan
from modelyard.errors import DataError
from waiting import PATIENCE

CLASSES = ("cat", "dog", "emu")
EXIF_TURNED = 6


def smooth(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray[Any, Any]:
    """A picture that JPEG keeps nearly as it is."""
    small = np.random.default_rng(seed).integers(0, 256, (2, 2, channels), np.uint8)
    image = Image.fromarray(small if channels == 3 else small[..., 0]).resize(
        (width, height), Image.Resampling.BILINEAR
    )
    return np.asarray(image).reshape(height, width, channels)


def encoded(pixels: np.ndarray[Any, Any], kind: str, orientation: int | None = None) -> bytes:
    out = io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    options: dict[str, Any] = {"exif": exif} if orientation else {}
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, kind, **options)
    return out.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def marks(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.tfrecord")}


class MadeExamples(RawExamples):
    """Examples out of memory, which may be bad."""

    def __init__(self, stored: list[RawExample], bad: tuple[int, ...] = ()) -> None:
        self.stored, self.bad = stored, bad
        self.labels = (np.arange(len(stored)) % 3).astype(np.int32)

    def load(self, index: int) -> RawExample:
        if index in self.bad:
            raise DataError(f"{self.name(index)} is damaged.")
        return self.stored[index]

    def name(self, index: int) -> str:
        return f"photos/{index}.jpg"

    def fingerprint(self) -> str:
        return hashlib.sha256(pickle.dumps(self.stored)).hexdigest()


@pytest.fixture(scope="module")
def photos() -> list[RawExample]:
    kinds = ("JPEG", "PNG", "BMP", "WEBP")
    return [encoded(smooth(n, 20 + n, 44 - n, 1 if n % 5 == 0 else 3), kinds[n % 4]) for n in range(24)]


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "out" / "photos"


def test_files_are_kept_byte_for_byte_and_in_order(photos: list[RawExample], to: Path) -> None:
    splits = {"train": MadeExamples(photos), "test": MadeExamples(photos[:5])}
    report = convert_examples(splits, CLASSES, to, shards=3, name="photos", source={"path": "photos"})
    assert report.examples == {"train": 24, "test": 5}
    assert report.shards == {"train": 3, "test": 3}
    assert (report.already_done, report.kept_shards, report.reencoded, report.bad) == (False, 0, 0, [])
    shards = [f"{split}-{n:05}-of-00003.tfrecord" for split in ("test", "train") for n in range(3)]
    assert sorted(contents(to)) == sorted(
        ["dataset.json", "labels.txt", *shards, *(f"{name}.index" for name in shards)]
    )
    opened, classes = open_converted(to)
    assert classes == CLASSES
    assert [opened["train"].load(n) for n in range(24)] == photos
    assert [opened["test"].load(n) for n in range(5)] == photos[:5]
    assert opened["train"].labels.tolist() == [n % 3 for n in range(24)]


def test_shards_have_the_name_that_is_given(photos: list[RawExample], to: Path) -> None:
    splits = {"train": MadeExamples(photos), "test": MadeExamples(photos[:5])}
    report = convert_examples(splits, CLASSES, to, shards=2, shard_name="my-photos")
    shards = [f"my-photos-{split}-{n:05}-of-00002.tfrecord" for split in ("test", "train") for n in range(2)]
    assert [name for name in sorted(contents(to)) if name.endswith(".tfrecord")] == shards
    assert [open_converted(to)[0]["train"].load(n) for n in range(24)] == photos
    assert convert_examples(splits, CLASSES, to, shards=2, shard_name="my-photos").already_done
    assert not report.already_done
    with pytest.raises(DataError, match="other settings: shard_name was 'my-photos', is None"):
        convert_examples(splits, CLASSES, to, shards=2)
    for wrong in ("../up", ".hidden", "a/b", ""):
        with pytest.raises(DataError, match="must have letters, digits"):
            convert_examples(splits, CLASSES, to / "new", shard_name=wrong)


def test_records_say_everything_about_their_image(photos: list[RawExample], to: Path) -> None:
    convert_examples({"train": MadeExamples(photos)}, CLASSES, to)
    records = [parse_example(data) for _, data, _ in scan(to / "train-00000-of-00001.tfrecord")]
    formats = ["jpeg", "png", "bmp", "webp"]
    for n, record in enumerate(records):
        plain = {k: v[0] if isinstance(v[0], bytes) else int(v[0]) for k, v in record.items() if k != "image/encoded"}
        channels = 1 if n % 5 == 0 and n % 4 != 3 else 3  # WebP has no grey
        assert plain == {
            "image/format": formats[n % 4].encode(),
            "image/height": 20 + n,
            "image/width": 44 - n,
            "image/channels": channels,
            "image/class/label": n % 3,
            "image/class/text": CLASSES[n % 3].encode(),
            "image/filename": f"photos/{n}.jpg".encode(),
        }


def test_tensorflow_reads_the_records(two_devices: None, photos: list[RawExample], to: Path) -> None:
    import tensorflow as tf

    convert_examples({"train": MadeExamples(photos)}, CLASSES, to, encoding="jpeg")
    spec = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    parsed = [tf.io.parse_single_example(r, spec) for r in tf.data.TFRecordDataset(str(next(to.glob("*.tfrecord"))))]
    assert [int(p["image/class/label"]) for p in parsed] == [n % 3 for n in range(24)]
    assert all(tf.io.decode_jpeg(p["image/encoded"]).shape[:2] == (20 + n, 44 - n) for n, p in enumerate(parsed))


def test_dataset_json_describes_the_folder(photos: list[RawExample], to: Path) -> None:
    convert_examples(
        {"train": MadeExamples(photos)}, CLASSES, to, shards=2, name="photos", source={"path": "a", "size": 3}
    )
    info = read_dataset_json(to)
    assert (info.format, info.name, info.encoding, info.shape, info.channels) == (1, "photos", "keep", None, None)
    assert info.source == {"path": "a", "size": 3}
    train = info.splits["train"]
    assert train.class_counts == [8, 8, 8]
    for shard in train.shards:
        data = (to / shard.file).read_bytes()
        assert (shard.bytes, shard.sha256, shard.records) == (len(data), hashlib.sha256(data).hexdigest(), 12)
    assert (to / "labels.txt").read_text() == "cat\ndog\nemu\n"


class TestEncodings:
    """What becomes of the images."""

    def test_raw_pixels_are_the_decoded_ones_whatever_their_sizes(self, photos: list[RawExample], to: Path) -> None:
        convert_examples({"train": MadeExamples(photos)}, CLASSES, to, encoding="raw")
        train = open_converted(to)[0]["train"]
        for n, photo in enumerate(photos):
            assert isinstance(photo, bytes)
            assert np.array_equal(train.load(n), decode(photo, 3, ""))  # grey ones too: all have one look

    def test_everything_becomes_jpeg_of_the_quality(self, photos: list[RawExample], to: Path) -> None:
        convert_examples({"train": MadeExamples(photos)}, CLASSES, to, encoding="jpeg", quality=90)
        convert_examples({"train": MadeExamples(photos)}, CLASSES, to.with_name("low"), encoding="jpeg", quality=20)
        train = open_converted(to)[0]["train"]
        for n, photo in enumerate(photos):
            loaded = train.load(n)
            assert isinstance(loaded, bytes)
            assert isinstance(photo, bytes)
            assert loaded.startswith(b"\xff\xd8\xff")
            difference = decode(loaded, None, "").astype(int) - decode(photo, None, "")
            assert np.abs(difference).mean() < 4
        assert sum(path.stat().st_size for path in to.iterdir()) > sum(
            path.stat().st_size for path in to.with_name("low").iterdir()
        )

    @pytest.mark.parametrize("encoding", ["keep", "jpeg", "raw"])
    def test_the_longer_edge_is_limited_and_nothing_is_enlarged(self, to: Path, encoding: Any) -> None:
        sizes = [(100, 50), (50, 100), (30, 40), (64, 10), (65, 1)]
        stored: list[RawExample] = [
            encoded(smooth(n, *size), "PNG" if n % 2 else "JPEG") for n, size in enumerate(sizes)
        ]
        report = convert_examples({"train": MadeExamples(stored)}, CLASSES, to, encoding=encoding, max_edge=64)
        train = open_converted(to)[0]["train"]
        expected = [(64, 32), (32, 64), (30, 40), (64, 10), (64, 1)]
        loaded = [train.load(n) for n in range(5)]
        pixels = [decode(item, None, "") if isinstance(item, bytes) else item for item in loaded]
        assert [image.shape[:2] for image in pixels] == expected
        assert report.reencoded == (3 if encoding == "keep" else 0)
        if encoding == "keep":
            assert [loaded[2], loaded[3]] == [stored[2], stored[3]]
            assert isinstance(loaded[1], bytes)
            assert loaded[1].startswith(b"\x89PNG")
            assert isinstance(loaded[0], bytes)
            assert loaded[0].startswith(b"\xff\xd8")

    def test_a_turned_image_is_turned_when_it_is_encoded_again_and_only_then(self, to: Path) -> None:
        turned = encoded(smooth(1, 30, 60), "JPEG", EXIF_TURNED)
        for encoding in ("keep", "jpeg", "raw"):
            folder = to.with_name(encoding)
            convert_examples({"train": MadeExamples([turned])}, CLASSES, folder, encoding=encoding)  # type: ignore[arg-type]
            loaded = open_converted(folder)[0]["train"].load(0)
            pixels = decode(loaded, None, "") if isinstance(loaded, bytes) else loaded
            assert pixels.shape == (60, 30, 3)
            assert np.abs(pixels.astype(int) - decode(turned, None, "")).mean() < 4
            assert (isinstance(loaded, bytes) and loaded == turned) is (encoding == "keep")
            assert read_dataset_json(folder).shape == [60, 30, 3]
            record = parse_example(next(scan(next(folder.glob("*.tfrecord"))))[1])
            assert (int(record["image/height"][0]), int(record["image/width"][0])) == (60, 30)

    @pytest.mark.parametrize(
        "values",
        [
            np.arange(5 * 48, dtype=np.uint8).reshape(5, 4, 4, 3),
            np.linspace(0, 1, 5 * 12, dtype=np.float32).reshape(5, 4, 3, 1),
            np.arange(5 * 7, dtype=np.float32).reshape(5, 7),
            np.arange(5 * 6, dtype=">u2").reshape(5, 2, 3, 1),
        ],
    )
    @pytest.mark.parametrize("encoding", ["keep", "raw"])
    def test_arrays_are_kept_as_values(self, to: Path, values: np.ndarray[Any, Any], encoding: Any) -> None:
        items = ArrayExamples(values, np.array([0, 1, 2, 0, 1], np.int32))
        convert_examples({"train": items}, CLASSES, to, encoding=encoding, processes=3, shards=2)
        train = open_converted(to)[0]["train"]
        for n, value in enumerate(values):
            loaded = train.load(n)
            assert isinstance(loaded, np.ndarray)
            assert loaded.dtype == values.dtype.newbyteorder("=")
            assert np.array_equal(loaded, value)
        assert read_dataset_json(to).shape == list(values.shape[1:])

    def test_grey_arrays_without_a_channel_get_one(self, to: Path) -> None:
        values = np.arange(2 * 6, dtype=np.uint8).reshape(2, 2, 3)
        convert_examples({"train": ArrayExamples(values, np.zeros(2, np.int32))}, CLASSES, to)
        assert np.array_equal(open_converted(to)[0]["train"].load(1), values[1][..., None])

    def test_arrays_become_jpeg_if_they_are_images(self, to: Path) -> None:
        values = np.stack([smooth(n, 16, 16) for n in range(3)])
        convert_examples({"train": ArrayExamples(values, np.arange(3, dtype=np.int32))}, CLASSES, to, encoding="jpeg")
        loaded = open_converted(to)[0]["train"].load(2)
        assert isinstance(loaded, bytes)
        assert np.abs(decode(loaded, None, "").astype(int) - values[2]).mean() < 4
        floats = ArrayExamples(values.astype(np.float32), np.arange(3, dtype=np.int32))
        with pytest.raises(DataError, match=r"0 has shape 16×16×3 of float32; an image has"):
            convert_examples({"train": floats}, CLASSES, to.with_name("floats"), encoding="jpeg")


class TestShards:
    """Their number, and that it depends on the examples only."""

    def test_a_shard_is_as_large_as_wanted_by_default(
        self, photos: list[RawExample], to: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(convert, "_SHARD_BYTES", 5_000)
        report = convert_examples({"train": MadeExamples(photos)}, CLASSES, to)
        sizes = [path.stat().st_size for path in to.glob("*.tfrecord")]
        assert report.shards["train"] == len(sizes) > 3
        assert 2_500 < np.mean(sizes) < 10_000

    def test_there_are_no_more_shards_than_examples(self, photos: list[RawExample], to: Path) -> None:
        report = convert_examples({"train": MadeExamples(photos[:2])}, CLASSES, to, shards=9)
        assert report.shards == {"train": 2}

    def test_any_number_of_processes_makes_the_same_bytes(self, tmp_path: Path, photos: list[RawExample]) -> None:
        folder = tmp_path / "photos"
        folder.mkdir()
        for number, photo in enumerate(photos):
            assert isinstance(photo, bytes)
            (folder / f"{number:02}.jpg").write_bytes(photo)
        (folder / "05.jpg").write_bytes(b"no image")
        items = FileExamples(folder, [f"{n:02}.jpg" for n in range(24)], [n % 3 for n in range(24)])
        splits = {
            "train": ExampleSubset(items, np.arange(0, 20)),
            "validation": ExampleSubset(items, np.arange(20, 24)),
        }
        made, seen = [], []
        for processes in (1, 2, 3):
            counts: list[int] = []
            to = tmp_path / f"out-{processes}"
            report = convert_examples(
                splits,
                CLASSES,
                to,
                encoding="jpeg",
                shards=4,
                processes=processes,
                on_bad="skip",
                progress=counts.append,
            )
            assert report.bad == [("05.jpg", "05.jpg can't be decoded: it is not an image file that can be read.")]
            made.append(contents(to))
            assert counts == sorted(counts)
            seen.append(counts[-1])
        assert made[0] == made[1] == made[2]
        assert seen == [24, 24, 24]


class TestBadExamples:
    """They are named, and left out only if that is wanted."""

    def test_the_first_one_stops_it_and_says_how_to_skip_it(self, photos: list[RawExample], to: Path) -> None:
        items = MadeExamples([*photos[:7], b"\xff\xd8\xff rubbish", *photos[8:]], bad=(9,))
        with pytest.raises(DataError, match=r"photos/7\.jpg can't be decoded: .* --on_bad skip"):
            convert_examples({"train": items}, CLASSES, to, shards=4)
        assert not (to / "dataset.json").exists()
        assert list(to.glob(".partial-*")) == []
        before = marks(to)
        assert sorted(before) == ["train-00000-of-00004.tfrecord"]
        report = convert_examples({"train": items}, CLASSES, to, shards=4, on_bad="skip")
        assert report.kept_shards == 1
        assert before.items() <= marks(to).items()
        assert [name for name, _ in report.bad] == ["photos/7.jpg", "photos/9.jpg"]
        assert (to / "bad.txt").read_text().splitlines() == ["\t".join(pair) for pair in report.bad]
        train = open_converted(to)[0]["train"]
        rest = [photo for n, photo in enumerate(photos) if n not in (7, 9)]
        assert [train.load(n) for n in range(22)] == rest
        assert read_dataset_json(to).skipped == 2

    def test_the_first_in_order_is_named_in_any_number_of_processes(self, tmp_path: Path) -> None:
        paths = [f"{n}.png" for n in range(12)]
        for n, name in enumerate(paths):
            (tmp_path / name).write_bytes(b"bad" if n in (4, 11) else encoded(smooth(n, 5, 5), "PNG"))
        items = FileExamples(tmp_path, paths, [0] * 12)
        with pytest.raises(DataError, match=r"^4\.png can't be decoded"):
            convert_examples({"train": items}, CLASSES, tmp_path / "out", shards=6, processes=2)
        assert multiprocessing.active_children() == []
        assert list((tmp_path / "out").glob(".partial-*")) == []

    def test_a_cut_off_image_is_bad_though_its_bytes_would_be_kept(self, photos: list[RawExample], to: Path) -> None:
        whole = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "PNG")
        report = convert_examples(
            {"train": MadeExamples([*photos[:3], whole[: len(whole) // 2]])}, CLASSES, to, on_bad="skip"
        )
        assert [name for name, _ in report.bad] == ["photos/3.jpg"]

    def test_a_split_with_nothing_sound_is_an_error(self, photos: list[RawExample], to: Path) -> None:
        splits = {"train": MadeExamples(photos), "test": MadeExamples([b"bad"])}
        with pytest.raises(DataError, match=r"no example of the test split can be read\. The first error: photos/0"):
            convert_examples(splits, CLASSES, to, on_bad="skip")

    def test_shards_with_gaps_are_not_taken_over_when_gaps_are_not_wanted(
        self, photos: list[RawExample], to: Path
    ) -> None:
        items = MadeExamples(photos, bad=(1, 20))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_finish", _raise(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                convert_examples({"train": items}, CLASSES, to, shards=4, on_bad="skip")
        with pytest.raises(DataError, match=r"photos/1\.jpg is damaged\. .*--on_bad skip"):
            convert_examples({"train": items}, CLASSES, to, shards=4)

    @pytest.mark.parametrize(
        ("label", "classes", "message"),
        [
            (3, CLASSES, r"photos/4\.jpg of the train split: label 3 is out of range, there are 3 classes"),
            (-1, CLASSES, r"photos/4\.jpg of the train split: label -1 is out of range"),
            (0, ("a\nb", "c", "d"), "class 0 contains a line break"),
            (0, ("a", "\udcff", "d"), "class 1 is not valid text"),
        ],
    )
    def test_labels_and_classes_are_checked_first(
        self, photos: list[RawExample], to: Path, label: int, classes: tuple[str, ...], message: str
    ) -> None:
        items = MadeExamples(photos)
        items.labels[4] = label
        with pytest.raises(DataError, match=message):
            convert_examples({"train": items}, classes, to)
        assert not to.exists()


class TestFolders:
    """Nothing that is there is ever damaged."""

    def convert(self, photos: list[RawExample], to: Path, **options: Any) -> ConvertReport:
        return convert_examples({"train": MadeExamples(photos)}, CLASSES, to, **{"shards": 2, **options})

    def test_a_second_time_there_is_nothing_to_do(self, photos: list[RawExample], to: Path) -> None:
        first = self.convert(photos, to, max_edge=30)
        before = (contents(to), marks(to))
        second = self.convert(photos, to, max_edge=30)
        assert second.already_done
        assert (second.examples, second.bytes, second.reencoded) == (first.examples, first.bytes, first.reencoded)
        assert (contents(to), marks(to)) == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"encoding": "jpeg"}, "encoding was 'keep', is 'jpeg'"),
            ({"quality": 3}, "quality was 95, is 3"),
            ({"max_edge": 9}, "max_edge was None, is 9"),
            ({"shards": 3}, "other shards"),
        ],
    )
    @pytest.mark.parametrize("finished", [True, False])
    def test_other_settings_are_refused_and_named(
        self, photos: list[RawExample], to: Path, options: dict[str, Any], message: str, finished: bool
    ) -> None:
        self.convert(photos, to) if finished else self.interrupt(photos, to)
        before = contents(to)
        with pytest.raises(DataError, match=f"{message}.*another folder"):
            self.convert(photos, to, **options)
        assert contents(to) == before

    def test_other_examples_are_refused(self, photos: list[RawExample], to: Path) -> None:
        self.convert(photos, to)
        with pytest.raises(DataError, match="converted with other settings: other examples"):
            self.convert(photos[::-1], to)

    def test_a_folder_with_something_else_in_it_is_refused(self, photos: list[RawExample], to: Path) -> None:
        to.mkdir(parents=True)
        (to / "thesis.tex").write_text("precious")
        with pytest.raises(DataError, match=r"holds other files: thesis\.tex"):
            self.convert(photos, to)
        assert contents(to) == {"thesis.tex": b"precious"}

    def test_an_unexpected_file_among_unfinished_shards_is_refused(self, photos: list[RawExample], to: Path) -> None:
        self.interrupt(photos, to)
        (to / "thesis.tex").write_text("precious")
        with pytest.raises(DataError, match=r"holds other files: thesis\.tex"):
            self.convert(photos, to)

    def test_a_file_is_no_folder(self, photos: list[RawExample], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "file", tmp_path / "file" / "inside"):
            with pytest.raises(DataError, match=r"is a file|Not a directory"):
                self.convert(photos, place)

    def test_two_at_once_are_refused(self, photos: list[RawExample], to: Path) -> None:
        with convert._locked(to, str(to)), pytest.raises(DataError, match="another conversion is writing"):
            self.convert(photos, to)

    def interrupt(self, photos: list[RawExample], to: Path) -> None:
        """A conversion that ends after its first shard."""
        items = MadeExamples(photos)
        items.load = lambda n, load=items.load: load(n) if n < 12 else _raise(KeyboardInterrupt)()  # type: ignore
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_SAMPLED", 1)
            with pytest.raises(KeyboardInterrupt):
                convert_examples({"train": items}, CLASSES, to, shards=2)

    def test_it_resumes_and_ends_with_the_same_bytes(self, photos: list[RawExample], to: Path, tmp_path: Path) -> None:
        self.interrupt(photos, to)
        before = marks(to)
        assert len(before) == 1
        (to / ".partial-abc").write_bytes(b"left by a killed process")
        reported: list[int] = []
        report = self.convert(photos, to, progress=reported.append)
        assert report.kept_shards == 1
        assert (reported[0], reported[-1]) == (12, 24)
        assert before.items() <= marks(to).items()
        self.convert(photos, tmp_path / "undisturbed")
        assert contents(to) == contents(tmp_path / "undisturbed")

    @pytest.mark.parametrize("ending", ["", ".index"])
    def test_a_finished_shard_that_is_not_whole_is_made_again(
        self, photos: list[RawExample], to: Path, tmp_path: Path, ending: str
    ) -> None:
        self.interrupt(photos, to)
        shard = to / f"train-00000-of-00002.tfrecord{ending}"
        shard.unlink() if ending else shard.write_bytes(shard.read_bytes()[:-1])
        assert self.convert(photos, to).kept_shards == 0
        self.convert(photos, tmp_path / "undisturbed")
        assert contents(to) == contents(tmp_path / "undisturbed")

    def test_a_full_disk_is_reported_and_leaves_nothing_half_written(
        self, photos: list[RawExample], to: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = 15

        def frame(data: bytes) -> bytes:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(data)

        whole = shard_module.frame
        monkeypatch.setattr(shard_module, "frame", frame)
        with pytest.raises(DataError, match=r"the disk is full: can't write .*train-00001-of-00002"):
            self.convert(photos, to)
        assert list(to.glob(".partial-*")) == []
        assert [path.name for path in to.glob("*.tfrecord")] == ["train-00000-of-00002.tfrecord"]
        monkeypatch.undo()
        assert self.convert(photos, to).kept_shards == 1


def _raise(error: type[BaseException]) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def test_a_script_without_a_guard_can_convert_in_several_processes(tmp_path: Path) -> None:
    for number in range(8):
        place = tmp_path / "photos" / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(place / f"{number}.png")
    code = "import modelyard; print(modelyard.convert('photos', 'records', shards=2, processes=2).examples)"
    (tmp_path / "unguarded.py").write_text(code)
    for words, piped in ((["unguarded.py"], None), (["-"], code.replace("'records'", "'again'"))):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            input=piped,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stdout == "{'train': 8}\n", done.stderr
