"""Damages files of every kind that is read, by their structure, and reads them: an error in words or a result.

`tests/data/test_hostile_files.py` runs a small, seeded part of it. For longer:

    python tests/fuzz_files.py --count 2000 --seed 7 npz images
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import DataContext
from modelyard.data.images import decode, fill, size_of
from modelyard.data.records.example import FeatureMap, encode_example
from modelyard.data.records.index import build_index, read_index, write_index
from modelyard.data.records.reader import RecordExamples, describe_record, open_converted
from modelyard.data.records.tfrecord import RecordFile, checksum, frame
from modelyard.data.sources import builtin
from modelyard.data.sources.csv_file import read_csv
from modelyard.data.sources.npz import read_npy_folder, read_npz, read_npz_to_predict
from modelyard.data.sources.plain_pickle import load_plain_pickle
from modelyard.errors import UserError
from modelyard.registry import Options
from modelyard.run.weights.hdf5 import read_hdf5
from modelyard.run.weights.keras_files import read_keras
from modelyard.run.weights.tensorflow_checkpoint import read_tensorflow

SLOWEST = 60  # seconds for one file; most take a millisecond
MEMORY = 4 << 30  # of the address space, beyond what the process has at its start

Dice = random.Random
_NUMBERS = (0, 1, 2, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62)
_PICTURE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)


def damaged(whole: bytes, dice: Dice) -> bytes:
    """A few bytes, numbers or blocks are others; or the end is missing."""
    data = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(data) + 1)
        size = dice.choice((1, 2, 4, 8))
        action = dice.randrange(7)
        if action == 0:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif action == 1 and data:
            data[min(at, len(data) - 1)] ^= 1 << dice.randrange(8)
        elif action in (2, 3):
            number = dice.choice(_NUMBERS) & ((1 << 8 * size) - 1)
            data[at : at + size] = number.to_bytes(size, dice.choice(("little", "big")))
        elif action == 4:
            block = data[at : at + dice.choice((1, 4, 16, 64))]
            into = dice.randrange(len(data) + 1)
            data[into:into] = block * dice.choice((1, 1, 2, 50))
        elif action == 5:
            del data[at : at + dice.choice((1, 4, 16, 64))]
        elif dice.random() < 0.3:
            del data[at:]
    return bytes(data)


def damaged_text(text: str, dice: Dice) -> str:
    """Words are others, lines twice or gone."""
    pieces = [piece for line in text.splitlines(keepends=True) for piece in line.replace(",", "\0,\0").split("\0")]
    words = ("", ",", '"', "\n", "\r", "\0", "0", "-1", "1e999", "nan", "../x", "é", "ÿ" * 300, '"' * 3, ";", "9" * 400)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(len(pieces))
        pieces[at] = dice.choice((dice.choice(words), pieces[at] * 2, pieces[dice.randrange(len(pieces))]))
    return "".join(pieces)


def damaged_json(value: Any, dice: Dice, chance: float = 0.01) -> Any:
    """Some values are of another kind or size, some are missing."""
    others = (None, True, -1, 0, 1 << 70, 1e308, "", "../../x", [], {}, [[[]]], "é" * 99, "x.tfrecord", [1, 2, 3])
    if dice.random() < chance:
        return dice.choice(others)
    if isinstance(value, dict):
        return {k: damaged_json(v, dice, chance) for k, v in value.items() if dice.random() > chance / 4}
    if isinstance(value, list):
        return [damaged_json(inner, dice, chance) for inner in value for _ in range(dice.choice((1,) * 12 + (0, 2)))]
    return value


# -- kinds of files: each reads one damaged file per turn ------------------------------------------------------------


def context(folder: Path) -> DataContext:
    return DataContext(folder, 0, 0.0, folder / "cache", str(folder))


def batch(count: int = 3) -> dict[bytes, Any]:
    data = np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)
    return {b"data": data, b"labels": list(range(count)), b"filenames": [b"a.png"] * count}


def small_pickle() -> bytes:
    return pickle.dumps({b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2], b"x": (None, "é")}, 4)


def old_pickle() -> bytes:
    """As Python 2 wrote it; tests/data/test_official_cifar.py explains the operations."""
    return (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"q\x05(K\x01K\x03K\x04\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89U\x0c0123456789abtbU\x06labelsq\x08]q\x09(K\x01K\x02K\x03eu."
    )


def pickles(folder: Path, dice: Dice) -> Callable[[], object]:
    raw = damaged(dice.choice((small_pickle(), old_pickle())), dice)
    if dice.random() < 0.3:  # whole operations are elsewhere
        at, to = (dice.randrange(len(raw) + 1) for _ in range(2))
        raw = raw[:at] + raw[to : to + 9] * dice.choice((1, 3)) + raw[at:]
    return lambda: load_plain_pickle(raw, "it")


def cifar(folder: Path, dice: Dice) -> Callable[[], object]:
    members = {f"data_batch_{n}": pickle.dumps(batch(), 4) for n in range(1, 6)}
    members["test_batch"] = damaged(pickle.dumps(batch(), 4), dice)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=dice.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}{'x' * dice.choice((0, 0, 0, 200))}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    whole = packed.getvalue()
    if dice.random() < 0.7:
        at = 512 * dice.randrange(len(whole) // 512)  # most of it are pixels: damage a header
        whole = whole[:at] + damaged(whole[at : at + 512], dice) + whole[at + 512 :]
    whole = gzip.compress(whole, 1)
    (folder / "cifar-10-python.tar.gz").write_bytes(damaged(whole, dice) if dice.random() < 0.3 else whole)
    return lambda: builtin.cifar10(Options(), context(folder))


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def damaged_npy(array: np.ndarray[Any, Any], dice: Dice) -> bytes:
    whole = npy(array)
    if dice.random() < 0.5:
        return damaged(whole[:128], dice) + whole[128:]
    descr = dice.choice(("|u1", "|O", "|S0", "<U0", "V8", "<f8", "|V99999999", "<M8[D]", "(3,)u1", "<U99999999", "|b1"))
    shape = tuple(dice.choice((0, 1, 3, 20, -1, 1 << 33, 1 << 62)) for _ in range(dice.randrange(4)))
    text = str({"descr": descr, "fortran_order": dice.random() < 0.5, "shape": shape})
    if dice.random() < 0.2:
        text = dice.choice(("(" * 5000, "-" * 9000 + "1", "[" * 200 + "]" * 200, "{", "1" * 9000, text * 60))
    header = text.encode("latin-1") + b"\n"
    version = dice.choice((b"\1\0", b"\2\0", b"\3\0", b"\x09\0"))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + version + length + header + whole[128:]


def npz(folder: Path, dice: Dice) -> Callable[[], object]:
    labels = np.arange(20) % 2
    arrays = {"x_train": np.zeros((20, 4, 4), np.uint8), "y_train": labels, "classes": np.array(["a", "b"])}
    members = {name: npy(array) for name, array in arrays.items()}
    name = dice.choice(list(members))
    members[name] = damaged_npy(arrays[name], dice)
    packed = io.BytesIO()
    with zipfile.ZipFile(
        packed, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    ) as made:
        for name, raw in members.items():
            made.writestr(f"{name}.npy", raw)
    whole = packed.getvalue()
    path = folder / "it.npz"
    path.write_bytes(damaged(whole, dice) if dice.random() < 0.4 else whole)
    return dice.choice((lambda: read_npz(path, context(folder)), lambda: read_npz_to_predict(path)))


def npy_folder(folder: Path, dice: Dice) -> Callable[[], object]:
    arrays = {"x_train": np.zeros((20, 4, 4), np.uint8), "y_train": np.arange(20) % 2}
    bad = dice.choice(list(arrays))
    for name, array in arrays.items():
        (folder / f"{name}.npy").write_bytes(damaged_npy(array, dice) if name == bad else npy(array))
    return lambda: read_npy_folder(folder, context(folder))


def idx(folder: Path, dice: Dice) -> Callable[[], object]:
    images = b"\0\0\x08\x03" + struct.pack(">III", 10, 4, 4) + bytes(160)
    labels = b"\0\0\x08\x01" + struct.pack(">I", 10) + bytes(range(10))
    files = {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}
    files |= {"t10k-images-idx3-ubyte": images, "t10k-labels-idx1-ubyte": labels}
    bad, ending = dice.choice(list(files)), dice.choice(("", ".gz"))
    for path in folder.glob("*ubyte*"):
        path.unlink()
    for name, raw in files.items():
        raw = damaged(raw[:20], dice) + raw[20:] if name == bad else raw
        raw = gzip.compress(raw) if ending else raw
        (folder / f"{name}{ending}").write_bytes(damaged(raw, dice) if name == bad and dice.random() < 0.3 else raw)
    return lambda: builtin.mnist(Options(), context(folder))


FEATURES = FeatureMap(image="image", label="label")
RAW = FeatureMap(image="image", label="label", coding="raw", height="height", width="width")


def example(number: int, label: Any) -> bytes:
    return encode_example({"image": bytes(range(12)), "label": label, "height": 2, "width": 2, "x": [0.5, 1.5, number]})


def read_records(path: Path, cache: Path | None, features: FeatureMap) -> list[Any]:
    examples = RecordExamples([path], features, cache)
    describe_record(path, cache)
    return [examples.load(row) for row in range(len(examples))]


def records(folder: Path, dice: Dice) -> Callable[[], object]:
    path = folder / "it.tfrecord"
    contents = [example(n, dice.choice((n, n, n, "text"))) for n in range(4)]
    contents[dice.randrange(4)] = damaged(contents[0], dice)  # with the right checksum
    whole = b"".join(frame(content) for content in contents)
    if dice.random() < 0.3:
        whole = damaged(whole, dice)
    compress = dice.choice((None, None, gzip.compress, zlib.compress))
    if compress is not None:
        whole = damaged(compress(whole), dice) if dice.random() < 0.5 else compress(whole)
    path.write_bytes(whole)
    path.with_name("it.tfrecord.index").unlink(missing_ok=True)
    features = dice.choice((FEATURES, RAW))
    return lambda: read_records(path, folder / "cache", features)


def record_index(folder: Path, dice: Dice) -> Callable[[], object]:
    """Someone else's index, with the right checksum."""
    path = folder / "it.tfrecord"
    path.write_bytes(b"".join(frame(example(n, n)) for n in range(4)))
    index, file = build_index(path, RAW), RecordFile(path)
    rows = index.entries.copy()
    for _ in range(dice.randint(0, 3)):
        rows[dice.randrange(4)][dice.choice(rows.dtype.names)] = dice.choice(_NUMBERS) & 0x7FFFFFFF
    out = io.BytesIO()
    write_index(out, index, RAW, file.size)
    head, _, _ = out.getvalue().partition(index.entries.tobytes())
    head = head.replace(str(checksum(index.entries.tobytes())).encode(), str(checksum(rows.tobytes())).encode())
    whole = head + rows.tobytes()
    beside = path.with_name("it.tfrecord.index")
    beside.write_bytes(damaged(whole, dice) if dice.random() < 0.5 else whole)
    with contextlib.suppress(ValueError, OSError, UserError):
        read_index(beside, file, RAW)
    return lambda: read_records(path, None, RAW)


def facts(folder: Path, dice: Dice) -> Callable[[], object]:
    from modelyard.data.raw_examples import ArrayExamples
    from modelyard.data.records.convert import convert_examples

    whole = folder / "whole"
    if not whole.exists():
        examples = ArrayExamples(np.zeros((6, 4, 4, 3), np.uint8), np.arange(6) % 2)
        convert_examples({"train": examples}, ("a", "b"), whole)
        os.rename(whole / "dataset.json", folder / "dataset.json")  # noqa: PTH104
    text = json.dumps(damaged_json(json.loads((folder / "dataset.json").read_text()), dice))
    raw = text.encode() if dice.random() < 0.8 else damaged(text.encode(), dice)
    (whole / "dataset.json").write_bytes(dice.choice((raw,) * 9 + (b"[" * 50_000,)))
    return lambda: [examples.load(0) for examples in open_converted(whole)[0].values() if len(examples)]


def csv(folder: Path, dice: Dice) -> Callable[[], object]:
    path = folder / "it.csv"
    (folder / "a.png").touch()
    images = dice.random() < 0.5
    lines = "path,label,split\na.png,cat,train\na.png,dog,test\n" if images else "a,b,label\n1,2,cat\n3,4.5,dog\n"
    text = damaged_text(lines, dice).encode()
    path.write_bytes(damaged(text, dice) if dice.random() < 0.3 else text)
    options = FilesOptions() if images else FilesOptions(value_columns=("all",))
    return lambda: [rows.examples() for rows in read_csv(path, options).values()]


def images(folder: Path, dice: Dice) -> Callable[[], object]:
    image, out = Image.fromarray(_PICTURE), io.BytesIO()
    kind = dice.choice(("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"))
    exif = Image.Exif()
    exif[0x0112] = 6
    if kind != "TIFF":  # Pillow would look for it in a file
        exif[0x8825] = {1: "N", 2: (1.0, 2.0, 3.0)}
    options: dict[str, Any] = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
    if kind == "JPEG":
        options["progressive"] = dice.random() < 0.5
    if kind == "TIFF":
        options["compression"] = dice.choice(("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"))
    image.save(out, kind, **options)
    raw = damaged(out.getvalue(), dice)

    def read() -> None:
        for one in (
            lambda: decode(raw, 3, "it"),
            lambda: size_of(raw, "it"),
            lambda: fill(np.empty((8, 8, 3), np.uint8), raw, "crop", None, lambda: "it"),
        ):
            with contextlib.suppress(UserError):
                one()

    return read


def bundle_index(entries: dict[bytes, bytes], dice: Dice) -> bytes:
    """The index of a TensorFlow checkpoint: damaged inside of its blocks, whose checksums are right."""

    def block(entries: dict[bytes, bytes]) -> bytes:
        content = b"".join(bytes((0, len(k), len(v))) + k + v for k, v in entries.items()) + struct.pack("<II", 0, 1)
        content = (damaged(content, dice) if dice.random() < 0.4 else content) + b"\0"
        return content + struct.pack("<I", checksum(content))

    def handle(at: int, size: int) -> bytes:
        return encode_varint(at) + encode_varint(size - 5)

    data, nothing = block(entries), block({})
    index = block({b"\xff": handle(0, len(data))})
    footer = handle(len(data), len(nothing)) + handle(len(data) + len(nothing), len(index))
    return data + nothing + index + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def encode_varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def tensorflow(folder: Path, dice: Dice) -> Callable[[], object]:
    values = np.arange(6, dtype=np.float32).tobytes()
    place = b"\x08\x01\x12\x08\x12\x02\x08\x02\x12\x02\x08\x03"  # float32 of shape 2, 3
    end = b"\x28\x18\x35" + struct.pack("<I", checksum(values))
    entries = {b"": b"\x08\x01\x1a\x02\x08\x01", b"a/kernel": place + end, b"b/kernel": place + b"\x20\x18" + end}
    name = dice.choice(list(entries))
    if dice.random() < 0.4:
        entries[name] = damaged(entries[name], dice)[:127]
    index = bundle_index(entries, dice)
    (folder / "it.index").write_bytes(damaged(index, dice) if dice.random() < 0.2 else index)
    (folder / "it.data-00000-of-00001").write_bytes(values * 2)
    return lambda: read_tensorflow(folder / "it")


def weights_h5() -> bytes:
    out = io.BytesIO()
    with h5py.File(out, "w") as file:
        file.attrs["layer_names"] = np.array(["conv1"], "S")
        group = file.create_group("conv1")
        group.attrs["weight_names"] = np.array(["conv1/kernel:0", "conv1/bias:0"], "S")
        group["conv1/kernel:0"] = np.ones((3, 3), np.float32)
        group.create_dataset("conv1/bias:0", data=np.zeros(800), compression="gzip", chunks=(100,))
    return out.getvalue()


def hdf5(folder: Path, dice: Dice) -> Callable[[], object]:
    path = folder / "it.h5"
    path.write_bytes(damaged(weights_h5(), dice))
    return lambda: read_hdf5(path, seconds=10)


def keras(folder: Path, dice: Dice) -> Callable[[], object]:
    path, packed = folder / "it.keras", io.BytesIO()
    with zipfile.ZipFile(packed, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", weights_h5())
    path.write_bytes(damaged(packed.getvalue(), dice))
    return lambda: read_keras(path)


KINDS: dict[str, Callable[[Path, Dice], Callable[[], object]]] = {
    kind.__name__: kind
    for kind in (
        pickles, cifar, npz, npy_folder, idx, records, record_index, facts, csv, images, tensorflow, hdf5, keras,
    )
}  # fmt: skip
SLOW = ("hdf5", "keras")
"""They start a process for each file: one of twenty files of the count."""


def fuzz(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Reads ``count`` damaged files of a kind and returns how many were read and how many refused.

    Raises:
        AssertionError: if anything else happens, with the number of the file.
    """
    found: dict[str, Any] = {"read": 0, "refused": 0, "slowest": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            read = KINDS[kind](Path(folder), random.Random(f"{kind} {seed} {number}"))
            began = time.monotonic()
            signal.alarm(SLOWEST)
            try:
                read()
                found["read"] += 1
            except UserError:
                found["refused"] += 1
            except Exception as error:
                raise AssertionError(f"file {number} of {kind}, seed {seed}: {error!r}") from error
            finally:
                signal.alarm(0)
            found["slowest"] = max(found["slowest"], round(time.monotonic() - began, 2))
    return found


def _limited() -> Iterator[None]:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with contextlib.contextmanager(_limited)():
        for kind in arguments.kinds:
            count = arguments.count // 20 if kind in SLOW else arguments.count
            print(json.dumps({kind: fuzz(kind, count, arguments.seed)}), flush=True)


if __name__ == "__main__":
    main()
