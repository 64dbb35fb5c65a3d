"""CIFAR-10 and CIFAR-100 from pickles that nobody has to trust."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data.dataset import Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.data.sources.builtin import CIFAR10_CLASSES
from modelyard.data.sources.plain_pickle import load_plain_pickle
from modelyard.errors import DataError

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def old_text(text: bytes) -> bytes:
    """A string as Python 2 pickled it."""
    return b"T" + struct.pack("<i", len(text)) + text


def old_pickle(batch: dict[bytes, Any]) -> bytes:
    """A dictionary of byte arrays, numbers and names as Python 2 and its NumPy pickled it: the official format."""
    out = b"\x80\x02}("
    for key, value in batch.items():
        out += old_text(key)
        if isinstance(value, np.ndarray):
            out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + old_text(b"b") + b"\x87R("
            out += b"K\x01" + b"".join(b"J" + struct.pack("<i", size) for size in value.shape) + b"\x86"
            out += b"cnumpy\ndtype\n" + old_text(b"u1") + b"K\x00K\x01\x87R"
            out += b"(K\x03" + old_text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            out += old_text(value.tobytes()) + b"tb"
        elif isinstance(value, list):
            items = (old_text(v) if isinstance(v, bytes) else b"K" + bytes([v]) for v in value)
            out += b"](" + b"".join(items) + b"e"
        else:
            out += old_text(value)
    return out + b"u."


def new_pickle(batch: dict[bytes, Any]) -> bytes:
    return pickle.dumps(batch, protocol=4)


def batch_of(number: int, name: str = "cifar10", count: int = 20) -> dict[bytes, Any]:
    data = np.random.default_rng(number).integers(0, 256, (count, 3072), dtype=np.uint8)
    labels = [(i + number) % 10 for i in range(count)]
    if name == "cifar100":
        return {b"data": data, b"fine_labels": labels, b"coarse_labels": [0] * count}
    return {b"batch_label": b"batch", b"labels": labels, b"data": data, b"filenames": [b"a.png"] * count}


def files_of(name: str, pickled: Any = old_pickle) -> dict[str, bytes]:
    if name == "cifar10":
        named = {f"data_batch_{i}": batch_of(i) for i in range(1, 6)} | {"test_batch": batch_of(6)}
    else:
        named = {"train": batch_of(1, name), "test": batch_of(2, name)}
        named["meta"] = {b"fine_label_names": [b"class-%d" % i for i in range(100)]}
    return {file: pickled(batch) for file, batch in named.items()}


def write_folder(data_dir: Path, name: str, files: dict[str, bytes]) -> Path:
    folder = data_dir / FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file, raw in files.items():
        (folder / file).write_bytes(raw)
    return folder


def write_archive(data_dir: Path, name: str, files: dict[str, bytes]) -> Path:
    path = data_dir / ARCHIVES[name]
    with tarfile.open(path, "w:gz") as tar:
        for file, raw in files.items():
            member = tarfile.TarInfo(f"{FOLDERS[name]}/{file}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def load(data_dir: Path, name: str) -> Dataset:
    return load_dataset(load_config(model="mlp", dataset=name, data_dir=str(data_dir)))


@pytest.mark.parametrize("pickled", [old_pickle, new_pickle])
@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_cifar10_is_read_from_folder_and_archive(tmp_path: Path, write: Any, pickled: Any) -> None:
    write(tmp_path, "cifar10", files_of("cifar10", pickled))
    made = load(tmp_path, "cifar10")
    assert made.sizes() == {"train": 90, "validation": 10, "test": 20}
    assert made.classes == CIFAR10_CLASSES
    test = made.arrays("test")
    assert test is not None
    assert test["label"].tolist() == batch_of(6)[b"labels"]
    expected = batch_of(6)[b"data"].reshape(20, 3, 32, 32).transpose(0, 2, 3, 1)
    assert np.array_equal(test["image"], expected)


def test_images_keep_their_labels_over_all_batches(tmp_path: Path) -> None:
    write_folder(tmp_path, "cifar10", files_of("cifar10"))
    made = load(tmp_path, "cifar10")
    whole = np.concatenate([batch_of(i)[b"data"] for i in range(1, 6)]).reshape(100, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.concatenate([batch_of(i)[b"labels"] for i in range(1, 6)])
    for split in ("train", "validation"):
        arrays = made.arrays(split)
        assert arrays is not None
        assert np.array_equal(arrays["image"], whole[arrays["id"]])
        assert np.array_equal(arrays["label"], labels[arrays["id"]])


@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_cifar100_is_read_with_its_fine_labels(tmp_path: Path, write: Any) -> None:
    write(tmp_path, "cifar100", files_of("cifar100"))
    made = load(tmp_path, "cifar100")
    assert made.sizes()["test"] == 20
    assert len(made.classes) == 100
    assert made.classes[7] == "class-7"


def test_the_archive_is_read_in_place(tmp_path: Path) -> None:
    write_archive(tmp_path, "cifar10", files_of("cifar10"))
    load(tmp_path, "cifar10")
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVES["cifar10"]]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hostile_archive(data_dir: Path, files: dict[str, bytes], members: list[tarfile.TarInfo]) -> None:
    with tarfile.open(data_dir / ARCHIVES["cifar10"], "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isfile() else None)
        for file, raw in files.items():
            member = tarfile.TarInfo(f"{FOLDERS['cifar10']}/{file}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def member_of(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    member.size = 4 if kind == tarfile.REGTYPE else 0
    return member


def test_members_that_point_out_of_the_archive_write_nothing(tmp_path: Path) -> None:
    data_dir = tmp_path / "deep" / "data"
    data_dir.mkdir(parents=True)
    (tmp_path / "secret").write_text("mine")
    folder = FOLDERS["cifar10"]
    evil = [
        member_of("../evil"),
        member_of(f"{folder}/../../evil"),
        member_of(str(tmp_path / "evil")),
        member_of(f"{folder}/way", tarfile.SYMTYPE, str(tmp_path)),
        member_of(f"{folder}/way/evil"),
        member_of(f"{folder}/same", tarfile.LNKTYPE, "../../secret"),
    ]
    hostile_archive(data_dir, files_of("cifar10"), evil)
    before = snapshot(tmp_path)
    assert load(data_dir, "cifar10").sizes()["test"] == 20
    assert snapshot(tmp_path) == before
    assert len(list(tmp_path.rglob("*"))) == 4  # two folders, the archive, the secret


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_batch_that_is_a_link_or_a_device_is_refused(tmp_path: Path, kind: bytes) -> None:
    """A link would have the reader open a file of its user's."""
    files = files_of("cifar10")
    (tmp_path / "secret").write_bytes(files.pop("data_batch_3"))
    link = member_of(f"{FOLDERS['cifar10']}/data_batch_3", kind, str(tmp_path / "secret"))
    hostile_archive(tmp_path, files, [link])
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="it has no cifar-10-batches-py/data_batch_3"):
        load(tmp_path, "cifar10")
    assert snapshot(tmp_path) == before


class Trap:
    def __init__(self, trace: Path) -> None:
        self.command = f"touch {trace}"

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path, write: Any) -> None:
    trace = tmp_path / "it-ran"
    batch = {b"data": batch_of(3)[b"data"], b"labels": Trap(trace)}
    write(tmp_path, "cifar10", files_of("cifar10") | {"data_batch_3": new_pickle(batch)})
    with pytest.raises(DataError, match=r"data_batch_3 was refused: it names \w+.system"):
        load(tmp_path, "cifar10")
    assert not trace.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'touch it-ran'\ntR.",
        b'cbuiltins\neval\n(S\'open("it-ran", "w")\'\ntR.',
        b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'tofile'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch it-ran\x85R.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",
        b"c_codecs\nencode\n(S'a'\nS'latin1'\ntR.",
        b"Pan-id\n.",
    ],
)
def test_only_arrays_and_plain_values_are_unpickled(raw: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="some-file was refused"):
        load_plain_pickle(raw, "some-file")
    assert not list(tmp_path.iterdir())


def test_a_pickle_cut_off_anywhere_is_refused() -> None:
    whole = old_pickle(batch_of(1, count=1))
    assert load_plain_pickle(whole, "x")[b"labels"] == [1]
    for length in range(0, len(whole), 37):
        with pytest.raises(DataError, match="x was refused"):
            load_plain_pickle(whole[:length], "x")


@pytest.mark.parametrize(
    "batch",
    [
        {b"labels": [0] * 20},
        {b"data": batch_of(1)[b"data"]},
        {b"data": batch_of(1)[b"data"][:, :-1], b"labels": [0] * 20},
        {b"data": batch_of(1)[b"data"], b"labels": [0] * 19},
        {b"data": batch_of(1)[b"data"], b"labels": [0] * 21},
        {b"data": batch_of(1)[b"data"], b"labels": [[0]] * 20},
        {b"data": batch_of(1)[b"data"], b"labels": [b"cat"] * 20},
        {b"data": [[300] * 3072], b"labels": [0]},
        [1, 2],
        None,
    ],
)
def test_a_batch_that_is_none_is_named(tmp_path: Path, batch: Any) -> None:
    write_folder(tmp_path, "cifar10", files_of("cifar10") | {"data_batch_2": new_pickle(batch)})
    with pytest.raises(DataError, match="data_batch_2 is not a CIFAR batch"):
        load(tmp_path, "cifar10")


@pytest.mark.parametrize("meta", [{}, {b"fine_label_names": 5}, {b"fine_label_names": ["text"]}, [1]])
def test_class_names_that_are_missing_are_named(tmp_path: Path, meta: Any) -> None:
    write_folder(tmp_path, "cifar100", files_of("cifar100") | {"meta": new_pickle(meta)})
    with pytest.raises(DataError, match="holds no fine_label_names"):
        load(tmp_path, "cifar100")


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "cifar10", files_of("cifar10"))
    (folder / "data_batch_4").unlink()
    with pytest.raises(DataError, match="data_batch_4 can't be read"):
        load(tmp_path, "cifar10")
    files = files_of("cifar10")
    del files["data_batch_4"]
    (tmp_path / "archive").mkdir()
    write_archive(tmp_path / "archive", "cifar10", files)
    with pytest.raises(DataError, match="data_batch_4"):
        load(tmp_path / "archive", "cifar10")


def test_a_damaged_archive_is_named_and_never_a_traceback(tmp_path: Path) -> None:
    path = write_archive(tmp_path, "cifar100", files_of("cifar100"))
    whole = path.read_bytes()
    damaged = [whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :] for place in range(100, 20_000, 1999)]
    for raw in [b"", b"no archive", whole[:100], whole[: len(whole) // 2], gzip.compress(b"no tar"), *damaged]:
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"cifar-100-python.tar.gz is damaged or not the official archive"):
            load(tmp_path, "cifar100")


def test_a_label_beyond_the_classes_is_out_of_range(tmp_path: Path) -> None:
    batch = {b"data": batch_of(1)[b"data"], b"labels": [10] * 20}
    write_folder(tmp_path, "cifar10", files_of("cifar10") | {"test_batch": new_pickle(batch)})
    with pytest.raises(DataError, match="label 10 of example 0 of the test split is out of range"):
        load(tmp_path, "cifar10")
