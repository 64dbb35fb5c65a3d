"""Data files that someone made to do harm: each is refused in words, at once, without its memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from record_files import PLAIN, numbered, write

import modelyard
from modelyard.config import load_config
from modelyard.data.catalog import FilesOptions
from modelyard.data.image_metadata import check_jpeg, check_tags
from modelyard.data.images import decode, fill
from modelyard.data.inspection import verify_data
from modelyard.data.open_dataset import load_dataset
from modelyard.data.records.reader import RecordExamples, describe_record
from modelyard.data.records.tfrecord import frame, plain_file
from modelyard.data.sources.csv_file import read_csv
from modelyard.data.sources.files import read_to_predict
from modelyard.data.sources.npz import read_npz_to_predict
from modelyard.data.sources.plain_pickle import load_plain_pickle
from modelyard.errors import DataError, UserError
from modelyard.serving.exported_model import read_description
from modelyard.system import untrusted
from photos import photo_folder

FUZZER = Path(__file__).parents[1] / "fuzz_files.py"
SMALL = 1 << 16


@pytest.fixture(autouse=True)
def _never_forever() -> Iterator[None]:
    """What reads a pipe or a device without end fails."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("it is still reading")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may always expand is 64 KiB, so that bombs of a test can be small."""
    monkeypatch.setattr(untrusted, "ALWAYS_ALLOWED", SMALL)


def opened(path: Path, **options: Any) -> Any:
    return load_dataset(load_config(model="mlp", dataset=str(path), **options))


# -- all kinds --------------------------------------------------------------------------------------------------------


def test_damaged_files_of_every_kind_are_read_or_refused_in_words() -> None:
    """In a process with little memory: a crash, a hang or any other error is a failure of it."""
    done = subprocess.run(
        [sys.executable, str(FUZZER), "--count", "60", "--seed", "1"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {kind: counts for line in done.stdout.splitlines() for kind, counts in json.loads(line).items()}
    assert len(found) == 13
    for kind, counts in found.items():
        assert counts["read"] + counts["refused"] == (3 if kind in ("hdf5", "keras") else 60), kind


# -- pickles ----------------------------------------------------------------------------------------------------------

_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
_UINT8 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
_STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def built(shape: bytes, dtype: bytes, content: bytes) -> bytes:
    return b"\x80\x02" + _ARRAY + b"K\x00\x85U\x01b\x87R(K\x01" + shape + dtype + b"\x89" + content + b"tb."


def test_an_array_is_what_its_pickle_says() -> None:
    found = load_plain_pickle(built(b"K\x02K\x03\x86", _UINT8 + _STATE, b"U\x06abcdef"), "x")
    assert found.dtype == np.uint8
    assert found.tolist() == [[97, 98, 99], [100, 101, 102]]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        # NumPy takes the size of a value from this state, and then reads 3 GB that are not the array's.
        (
            b"\x80\x02" + _ARRAY + b"M\x00\x0c\x85cnumpy\ndtype\nU\x02V1K\x00K\x01\x87Rq\x01\x87R"
            b"h\x01(K\x03U\x01|NNNJ\x00\x00\x10\x00K\x01K\x00tb0.",
            "calls dtype for something that is not a numeric array",
        ),
        (built(b"K\x02\x85", b"cnumpy\ndtype\nU\x01OK\x00K\x01\x87R", b"U\x02ab"), "calls dtype for something"),
        (built(b"K\x02\x85", _UINT8 + b"(K\x03U\x01|NNNM\x00\x10K\x01K\x00tb", b"U\x02ab"), "something else than num"),
        (built(b"K\x03\x85", _UINT8 + _STATE, b"U\x02ab"), "an array of 3 numbers has 2 bytes"),
        (built(b"\x8a\x07\x00\x00\x00\x00\x00\x00\x10\x85", _UINT8, b"U\x02ab"), "has 2 bytes"),
        (b"\x80\x02" + _ARRAY + b"K\x00\x85U\x01b\x87R.", "an array has no values"),
        (b"\x80\x02]r\xff\xff\xff\x7f(cos\nsystem\n", "names os.system"),  # the memo does not get 2 billion places
        (b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.", "a tuple as a key"),  # its hash would overflow the stack
        (b"\x80\x04\x8e" + b"\xff" * 8 + b"x.", "it is damaged"),
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00x.", "it is damaged"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f1.", "it is damaged"),
        (b"\x80\x02]}U\x01aK\x01sb.", "sets a state"),
    ],
)
def test_a_pickle_that_would_damage_or_fill_the_memory_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"x was refused: .*{message}"):
        load_plain_pickle(raw, "x")


def test_a_pickle_of_millions_of_operations_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.data.sources.plain_pickle._MOST_OPERATIONS", 1000)
    with pytest.raises(DataError, match="x was refused: it has more than 1,000 operations"):
        load_plain_pickle(b"\x80\x02" + b"}" * 1001 + b".", "x")


def test_lists_in_lists_are_not_followed(tmp_path: Path) -> None:
    """Each of 40 lists holds the one before it twice: NumPy would find a billion numbers."""
    lists = b"".join(b"]q" + bytes([n + 1]) + b"(h" + bytes([n]) * 1 + b"h" + bytes([n]) + b"e" for n in range(40))
    raw = b"\x80\x02}(U\x04data" + built(b"M\x00\x0c\x85", _UINT8, b"T\x00\x0c\x00\x00" + bytes(3072))[2:-1]
    raw += b"U\x06labels]q\x00K\x01a" + lists + b"e" * 0 + b"]q\x63(h\x28e"
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(raw + b"u.")
    with pytest.raises(DataError, match="data_batch_1"):
        load_dataset(load_config(model="mlp", dataset="cifar10", data_dir=str(tmp_path)))


# -- files that expand ------------------------------------------------------------------------------------------------


def npy_header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


def npz_of(path: Path, method: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return path


LABELS = npy_header((20,), "<i8") + bytes(160)


@pytest.mark.usefixtures("small_limit")
def test_an_npz_that_expands_too_far_is_refused_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = npy_header((20, 256, 256)) + bytes(20 * 256 * 256)
    path = npz_of(tmp_path / "it.npz", zipfile.ZIP_DEFLATED, x_train=zeros, y_train=LABELS)
    for read in (lambda: opened(path), lambda: read_npz_to_predict(path)):
        with pytest.raises(DataError, match=r"it.npz has [\d,]+ bytes and expands to [\d,]+ or more.*MAX_EXPANSION"):
            read()
    monkeypatch.setenv("MODELYARD_MAX_EXPANSION", "1100")
    assert opened(path).sizes() == {"train": 18, "validation": 2}
    monkeypatch.setenv("MODELYARD_MAX_EXPANSION", "lots")
    with pytest.raises(DataError, match="must be a number of at least 1, not 'lots'"):
        opened(path)


@pytest.mark.usefixtures("small_limit")
def test_what_does_not_fit_in_memory_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "available_memory", lambda: 1 << 17)
    noise = np.random.default_rng(0).integers(0, 256, (20, 128, 128), dtype=np.uint8)
    np.savez(tmp_path / "it.npz", x_train=noise, y_train=np.arange(20) % 2)
    with pytest.raises(DataError, match=r"it.npz needs 327,680 bytes of memory, but 131,072 are free\. Save .* \.npy"):
        opened(tmp_path / "it.npz")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy_header((100 << 30,)) + bytes(10), "declares 107,374,182,400 bytes of values, but it has 10"),
        (npy_header((1 << 62, 1 << 62)) + bytes(10), "declares"),
        (npy_header((1 << 33,), "|S0"), "it holds values of type"),
        (npy_header((20,), "|O") + bytes(160), "it holds values of type object"),
        (npy_header((-1, 20)) + bytes(20), "its header declares"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9001) + b"(" * 9000 + b"\n", "can't be read"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9002) + b"-" * 9000 + b"1\n", "can't be read"),
        (b"\x93NUMPY\x03\x00" + struct.pack("<I", 60) + b" " * 60, "version"),
        (b"", "can't be read"),
    ],
)
def test_an_array_whose_header_lies_is_refused(tmp_path: Path, member: bytes, message: str) -> None:
    images = npy_header((20, 4, 4)) + bytes(320)
    for names in ({"x_train": member}, {"x_train": images, "classes": member}):
        with pytest.raises(DataError, match=message):
            opened(npz_of(tmp_path / "it.npz", **{"y_train": LABELS, **names}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x_train.npy").write_bytes(member)
    (tmp_path / "folder" / "y_train.npy").write_bytes(LABELS)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "folder")


def test_methods_that_unpack_blocks_of_any_size_are_refused(tmp_path: Path) -> None:
    images = npy_header((20, 4, 4)) + bytes(320)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with pytest.raises(DataError, match=r"is compressed by method \d+; use deflate"):
            opened(npz_of(tmp_path / "it.npz", method, x_train=images, y_train=LABELS))


@pytest.mark.usefixtures("small_limit")
def test_an_idx_file_that_expands_too_far_is_refused(tmp_path: Path) -> None:
    raw = b"\0\0\x08\x03" + struct.pack(">III", 100, 256, 256) + bytes(100 * 256 * 256)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x64" + bytes(100))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz has [\d,]+ bytes and expands to"):
        load_dataset(load_config(model="mlp", dataset="mnist", data_dir=str(tmp_path)))


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_records_that_expand_too_far_are_refused_and_leave_nothing(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path, cache = tmp_path / "it.tfrecord", tmp_path / "cache"
    path.write_bytes(compress(bytes(1 << 24)))
    with pytest.raises(DataError, match=r"it.tfrecord has [\d,]+ bytes and expands to"):
        plain_file(path, cache)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_records_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "it.tfrecord", tmp_path / "cache"
    path.write_bytes(gzip.compress(os.urandom(1 << 20)))
    usage = type("Usage", (), {"free": 1 << 20, "total": 1 << 40})()
    monkeypatch.setattr(untrusted, "_STEP", 1 << 19)
    monkeypatch.setattr(untrusted.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"the disk of .* is nearly full: 1,048,576 bytes are free.*--cache_dir"):
        plain_file(path, cache)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_a_member_of_an_archive_that_is_mostly_a_hole_is_refused(tmp_path: Path) -> None:
    """60 GB that the archive does not have."""
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(60 << 30), "GNU.sparse.numblocks": "1"}
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.addfile(member)
    with pytest.raises(DataError, match=r"damaged or not the official archive: .*data_batch_1 is too large"):
        load_dataset(load_config(model="mlp", dataset="cifar10", data_dir=str(tmp_path)))


# -- what is not a regular file ---------------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "device", "socket"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Callable[[Path], Path], str]]:
    """Makes something at a path that is not a regular file; and its name in messages."""
    sockets = []

    def make(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            sockets.append(socket.socket(socket.AF_UNIX))
            with contextlib.chdir(path.parent):  # the names of sockets are short
                sockets[-1].bind(path.name)
        return path

    yield make, f"is .*a {request.param}.*; only regular files are read"
    for each in sockets:
        each.close()


def test_an_image_that_is_not_a_regular_file_is_named(special: Any, tmp_path: Path) -> None:
    make, message = special
    photos = photo_folder(tmp_path / "photos", 6)
    bad = make(photos / "cat" / "a.png")
    with pytest.raises(DataError, match=f"a.png {message}"):
        opened(photos, image_size=8, validation_fraction=0).read("train", np.arange(7))
    assert any("a.png is" in problem for problem in verify_data(str(photos)).problems)
    with pytest.raises(DataError, match=f"a.png {message}"):
        modelyard.convert(str(photos), tmp_path / "records", processes=1)
    with pytest.raises(DataError, match=f"a.png {message}"):
        read_to_predict([str(bad)], FilesOptions(), tmp_path).examples.load(0)


@pytest.mark.parametrize("name", ["it.csv", "it.npz", "it.tfrecord", "folder/x_train.npy", "records/dataset.json"])
def test_a_dataset_that_is_not_a_regular_file_is_named(special: Any, tmp_path: Path, name: str) -> None:
    make, message = special
    path = make(tmp_path / name)
    if name == "folder/x_train.npy":
        (path.parent / "y_train.npy").write_bytes(LABELS)
    with pytest.raises(DataError, match=f"{message}|has no folder per class"):
        opened(path if path.parent == tmp_path else path.parent)


def test_labels_and_pickles_that_are_not_regular_files_are_named(special: Any, tmp_path: Path) -> None:
    make, message = special
    names = make(tmp_path / "names.txt")
    with pytest.raises(DataError, match=f"names.txt {message}"):
        opened(photo_folder(tmp_path / "photos", 6), image_size=8, labels_file=str(names))
    make(tmp_path / "cifar-10-batches-py" / "data_batch_1")
    with pytest.raises(DataError, match=f"data_batch_1 {message}"):
        load_dataset(load_config(model="mlp", dataset="cifar10", data_dir=str(tmp_path)))


def test_an_index_that_is_not_a_regular_file_is_made_again(special: Any, tmp_path: Path) -> None:
    make, _ = special
    path = numbered(tmp_path / "it.tfrecord")
    make(tmp_path / "it.tfrecord.index")
    assert len(RecordExamples([path], PLAIN)) == 5
    assert (tmp_path / "it.tfrecord.index").is_file()


def test_an_image_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    photos = photo_folder(tmp_path / "photos", 6)
    with open(photos / "cat" / "000.jpg", "wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(DataError, match=r"000.jpg has 1,073,741,825 bytes; such a file may have at most 1,073,741,824"):
        opened(photos, image_size=8, validation_fraction=0).read("train", np.arange(6))


# -- tables, records and facts ----------------------------------------------------------------------------------------


def test_a_line_of_a_table_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    for first, line in ((b"path,label\n", 2), (b"", 1)):
        with open(path, "wb") as file:
            file.write(first)
            for _ in range(17):
                file.write(b"," * (1 << 20))
        with pytest.raises(DataError, match=rf"it.csv:{line}: the line has more than 16,777,216 characters"):
            read_csv(path, FilesOptions())


def test_text_labels_in_one_split_and_numbers_in_another_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", [{"image": b"x", "label": label} for label in ("cat", "dog")])
    numbered(tmp_path / "b.tfrecord")
    options = {"record_image": "image", "record_label": "label"}
    for train, other in (("a", "b"), ("b", "a")):
        with pytest.raises(DataError, match=r"labels of the \w+ split are text, those of the \w+ split are numbers"):
            load_dataset(
                load_config(
                    model="mlp",
                    dataset="files",
                    train_files=str(tmp_path / f"{train}.tfrecord"),
                    eval_files=str(tmp_path / f"{other}.tfrecord"),
                    **options,
                )
            )


def field(number: int, content: bytes) -> bytes:
    length, size = b"", len(content)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def feature(name: bytes, kind: int, content: bytes) -> bytes:
    return field(1, field(1, name) + field(2, field(kind, content)))


def test_a_label_of_millions_of_numbers_is_counted_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.data.records.example._integers", lambda packed: pytest.fail("they were made"))
    record = field(1, feature(b"label", 3, field(1, bytes(3_000_000))) + feature(b"image", 1, field(1, b"x")))
    (tmp_path / "it.tfrecord").write_bytes(frame(record))
    with pytest.raises(DataError, match=r"is not one label.*label: 3,000,000 integers"):
        RecordExamples([tmp_path / "it.tfrecord"], PLAIN)


def test_a_feature_in_millions_of_pieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.data.records.example._MOST_SPANS", 1000)
    record = field(1, feature(b"label", 3, field(1, b"\1")) + feature(b"image", 1, field(1, b"") * 1001))
    (tmp_path / "it.tfrecord").write_bytes(frame(record))
    with pytest.raises(DataError, match="a feature has more than 1,000 separate values"):
        RecordExamples([tmp_path / "it.tfrecord"], PLAIN)


def test_of_a_thousand_features_some_are_listed(tmp_path: Path) -> None:
    record = field(1, b"".join(feature(b"%d" % n * 99, 1, field(1, b"x")) for n in range(1000)))
    (tmp_path / "it.tfrecord").write_bytes(frame(record))
    lines = describe_record(tmp_path / "it.tfrecord")
    assert len(lines) == 201
    assert lines[-1] == "… and 800 more"
    assert max(map(len, lines)) < 300


def test_facts_that_are_deep_or_long_are_refused(tmp_path: Path) -> None:
    for raw in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000, b"1" * 100_000):
        (tmp_path / "dataset.json").write_bytes(raw)
        with pytest.raises(DataError, match=r"dataset.json is damaged or has another version"):
            opened(tmp_path)
        (tmp_path / "half").mkdir(exist_ok=True)
        (tmp_path / "half" / ".convert.json").write_bytes(raw)
        with pytest.raises(DataError, match=r"\.convert\.json can't be read|unfinished conversion with other settings"):
            modelyard.convert("digits", tmp_path / "half", processes=1)
    with open(tmp_path / "dataset.json", "wb") as file:
        file.truncate(1 << 27)
    with pytest.raises(DataError, match=r"dataset.json has 134,217,728 bytes; such a file may have at most"):
        opened(tmp_path)


def test_the_description_of_an_export_is_not_trusted(tmp_path: Path) -> None:
    facts = {"model": "m", "dataset": "d", "step": 1, "kind": "other", "image": {"shape": [8, 8, 3], "dtype": "uint8"}}
    path = tmp_path / "modelyard.json"
    path.write_text(json.dumps(facts))
    assert read_description(tmp_path).image.shape == (8, 8, 3)
    for key, value in (("step", 1e999), ("image", []), ("image", {"shape": [1e999], "dtype": "uint8"}), ("classes", 5)):
        path.write_text(json.dumps({**facts, key: value}))
        with pytest.raises(DataError, match=r"modelyard\.json is missing or damaged"):
            read_description(tmp_path)
    for raw in (b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"\xff"):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"modelyard\.json is missing or damaged"):
            read_description(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"modelyard\.json is a link to /dev/zero, which is a device"):
        read_description(tmp_path)


# -- images -----------------------------------------------------------------------------------------------------------


def tiff_of_tags(tags: int, size: int) -> bytes:
    """Each of its tags has the same ``size`` bytes of data."""
    entries = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 8), (279, 4, 1, 64)]
    entries += [(700 + n, 7, size, 8) for n in range(tags)]
    table = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + size) + bytes(size) + table


def jpeg_with(segments: bytes = b"", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 10, 10)).save(out, "JPEG", **options)
    return out.getvalue()[:2] + segments + out.getvalue()[2:]


def test_tags_that_share_their_data_are_counted() -> None:
    bomb = tiff_of_tags(1000, 50_000)
    pieces = (bomb[at : at + 60_000] for at in range(0, len(bomb), 60_000))
    exif = b"".join(b"\xff\xe1" + struct.pack(">H", len(p) + 8) + b"Exif\0\0" + p for p in pieces)
    for data in (bomb, jpeg_with(exif)):
        with pytest.raises(DataError, match=r"x can't be decoded: its tags declare 50,000,000 bytes, but it has"):
            decode(data, 3, "x")
        with pytest.raises(DataError, match="its tags declare"):
            fill(np.empty((8, 8, 3), np.uint8), data, "crop", None, lambda: "x")


def test_metadata_of_honest_files_is_no_bomb() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description " * 1000
    check_jpeg(jpeg_with(exif=exif))
    for compression in ("raw", "tiff_lzw"):
        out = io.BytesIO()
        Image.new("RGB", (300, 200)).save(out, "TIFF", exif=exif, compression=compression)
        check_tags(out.getvalue())
        assert decode(out.getvalue(), 3, "x").shape == (300, 200, 3)


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    whole = jpeg_with(progressive=True)
    last = whole.rfind(b"\xff\xda")
    assert decode(whole[:-2] + whole[last:-2] * 5 + whole[-2:], 3, "x").shape == (16, 16, 3)
    for read in (
        lambda data: decode(data, 3, "x"),
        lambda data: fill(np.empty((8, 8, 3), np.uint8), data, "crop", None, lambda: "x"),
    ):
        with pytest.raises(UserError, match=r"x can't be decoded: it has 1,0\d\d scans; the maximum is 500"):
            read(whole[:-2] + whole[last:-2] * 1000 + whole[-2:])
