"""Untrusted files of weights: contents that are read, and contents that are refused."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import modelyard
from modelyard import storage
from modelyard.errors import CheckpointError, UserError
from modelyard.run.weights.match import match
from modelyard.run.weights.read import load_weights
from object_store import BUCKET, object_store
from weight_files import applications_h5, objects, safetensors, saver

pytestmark = pytest.mark.usefixtures("two_devices")
WEIGHTS = {
    "conv/kernel": np.arange(54, dtype=np.float32).reshape(3, 3, 3, 2),
    "norm/gamma": np.ones(2, np.float32),
    "norm/moving_mean": np.zeros(2, np.float32),
    "logits/kernel": np.full((2, 5), 0.5, np.float32),
}


@pytest.mark.parametrize("write", [safetensors, applications_h5, saver])
def test_names_are_those_of_the_layers(tmp_path: Path, write: Callable[..., Path]) -> None:
    found = modelyard.load_weights(write(tmp_path, WEIGHTS, None))
    np.testing.assert_equal(dict(sorted(found.items())), dict(sorted(WEIGHTS.items())))


# -- TensorFlow checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [saver, objects])
def test_a_tensorflow_checkpoint_is_named_by_prefix_index_or_folder(tmp_path: Path, write: Callable[..., Path]) -> None:
    prefix = write(tmp_path, WEIGHTS, None)
    for path in (prefix, Path(f"{prefix}.index"), tmp_path):
        assert len(load_weights(path)) == len(WEIGHTS)


def test_a_folder_gives_its_newest_checkpoint_even_after_a_move(tmp_path: Path) -> None:
    import tensorflow as tf

    checkpoint = tf.train.Checkpoint(value=tf.Variable(1.0))
    for number in (1.0, 2.0):
        checkpoint.value.assign(number)
        checkpoint.save(str(tmp_path / "old" / "ckpt"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert [float(value) for value in load_weights(tmp_path / "new").values()] == [2.0]
    (tmp_path / "new" / "checkpoint").unlink()
    with pytest.raises(CheckpointError, match=r"has several TensorFlow checkpoints \(ckpt-1, ckpt-2\). Name one"):
        load_weights(tmp_path / "new")


def test_the_file_checkpoint_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.mkdir()
    folder.mkdir()
    saver(secret, WEIGHTS, None)
    (folder / "checkpoint").write_text('model_checkpoint_path: "../secret/model.ckpt-1000"\n')
    with pytest.raises(CheckpointError, match="is not a run folder"):
        load_weights(folder)


def test_a_damaged_tensorflow_checkpoint_is_an_error(tmp_path: Path) -> None:
    prefix = saver(tmp_path, WEIGHTS, None)
    data = Path(f"{prefix}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model.ckpt-1000 claims [\d,]+ bytes of arrays but has 100"):
        load_weights(prefix)
    Path(f"{prefix}.index").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged or no TensorFlow checkpoint"):
        load_weights(prefix)


def test_no_weights_need_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path, WEIGHTS, None) for write in (saver, safetensors, applications_h5)]
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert [len(load_weights(path)) for path in paths] == [len(WEIGHTS)] * 3


def test_a_tensorflow_checkpoint_is_read_as_tensorflow_reads_it(tmp_path: Path) -> None:
    """Variables in slices, as parameter servers saved them, of all types, and an index of many blocks."""
    import tensorflow as tf

    v1, numbers = tf.compat.v1, (tf.float64, tf.int64, tf.uint8, tf.int16, tf.float16, tf.bfloat16, tf.uint32)
    with tf.Graph().as_default():
        v1.set_random_seed(1)  # another test may have asked for determinism
        for axis, (name, shape) in enumerate((("rows", (1000, 7)), ("columns", (5, 300)))):
            v1.get_variable(name, shape, partitioner=v1.fixed_size_partitioner(3, axis))
        for dtype in (*numbers, tf.bool):
            v1.get_variable(f"of_{dtype.name}", dtype=dtype, initializer=tf.cast(tf.constant([[0, 1], [2, 3]]), dtype))
        v1.get_variable("text", dtype=tf.string, initializer=tf.constant(["a", "bc"]))
        for number in range(300):
            v1.get_variable(f"a_long_name_so_that_the_index_is_long/{number}", initializer=tf.constant(float(number)))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            prefix = v1.train.Saver(sharded=True).save(session, str(tmp_path / "it"))
    found, theirs = load_weights(Path(prefix)), tf.train.load_checkpoint(prefix)
    assert set(found) == set(theirs.get_variable_to_shape_map()) - {"of_bool", "text"}
    for name, array in found.items():
        np.testing.assert_array_equal(array, theirs.get_tensor(name).astype(array.dtype))
        assert array.dtype == (np.float32 if name == "of_bfloat16" else theirs.get_tensor(name).dtype)


def test_a_flipped_byte_in_a_tensorflow_checkpoint_is_found_or_harmless(tmp_path: Path) -> None:
    prefix = saver(tmp_path, WEIGHTS, None)
    whole = load_weights(prefix)
    for path in (Path(f"{prefix}.index"), Path(f"{prefix}.data-00000-of-00001")):
        raw, refused = path.read_bytes(), 0
        for at in range(0, len(raw), 3):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            try:
                np.testing.assert_equal(dict(load_weights(prefix)), dict(whole))
            except CheckpointError:
                refused += 1
        assert refused > 20, path
        path.write_bytes(raw)


# -- files of Keras ---------------------------------------------------------------------------------------------------


def new_h5(path: Path, edit: Callable[[h5py.File], Any] | None = None) -> Path:
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.ones((3, 2), np.float32)
        file["layers/dense/vars/1"] = np.zeros(2, np.float32)
        file["layers/dense/vars"].attrs["name"] = "logits"
        file["optimizer/vars/0"] = np.zeros(9, np.float32)
        file["layers/dropout/seed_generator/vars/0"] = np.zeros(2, np.uint32)
        if edit is not None:
            edit(file)
    return path


def test_a_keras_3_file_gives_layers_by_name_without_optimizer_and_seeds(tmp_path: Path) -> None:
    found = load_weights(new_h5(tmp_path / "w.weights.h5"))
    assert {name: array.shape for name, array in found.items()} == {"logits/0": (3, 2), "logits/1": (2,)}
    assert found.paths["logits/1"] == "layers/dense/vars/1"


def test_of_a_keras_archive_only_the_arrays_are_read(tmp_path: Path) -> None:
    """Its config is not even looked at, so that no layer in it can run code."""
    inner = new_h5(tmp_path / "inner.h5")
    with zipfile.ZipFile(tmp_path / "w.keras", "w") as archive:
        archive.write(inner, "model.weights.h5")
        archive.writestr("config.json", "no json { at all")
        archive.writestr("../outside", "x")
    before = set(tmp_path.parent.iterdir())
    assert list(load_weights(tmp_path / "w.keras")) == ["logits/0", "logits/1"]
    assert set(tmp_path.parent.iterdir()) == before


def test_an_archive_that_would_blow_up_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(30 << 20))
    with pytest.raises(CheckpointError, match=r"model.weights.h5 claims 31,457,280 bytes"):
        load_weights(tmp_path / "w.keras")


def test_archives_that_are_none_or_have_no_weights_are_errors(tmp_path: Path) -> None:
    (tmp_path / "w.keras").write_bytes(b"PK nothing")
    with pytest.raises(CheckpointError, match=r"w.keras is damaged or no .keras file"):
        load_weights(tmp_path / "w.keras")
    with zipfile.ZipFile(tmp_path / "w.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(CheckpointError, match=r"has no model\.weights\.h5 in it"):
        load_weights(tmp_path / "w.keras")


def _external_link(file: h5py.File) -> None:
    file["layers/other"] = h5py.ExternalLink("/etc/secret.h5", "/x")


def _soft_link(file: h5py.File) -> None:
    file["layers/other"] = h5py.SoftLink("/layers/dense")


def _external_numbers(file: h5py.File) -> None:
    file.create_dataset("layers/x/vars/0", (4,), "f4", external=[("/etc/passwd", 0, 16)])


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/tmp/elsewhere.h5", "x", (4,))
    file.create_virtual_dataset("layers/x/vars/0", layout)


def _empty_giant(file: h5py.File) -> None:
    file.create_dataset("layers/x/vars/0", (1 << 40,), "f4", chunks=(1 << 20,))


def _squeezed(file: h5py.File) -> None:
    file.create_dataset("layers/x/vars/0", data=np.zeros(1 << 21, np.float32), compression="gzip")


def _texts(file: h5py.File) -> None:
    file["layers/x/vars/0"] = ["a", "b"]


def _ring(file: h5py.File) -> None:
    file["layers/dense/again"] = file["layers"]


def _many_names_for_one(file: h5py.File) -> None:
    file["layers/x/vars/0"] = np.zeros(1 << 17, np.float32)
    for number in range(1, 100):
        file[f"layers/x/vars/{number}"] = file["layers/x/vars/0"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_external_link, "layers/other is a ExternalLink, which may lead out of the file"),
        (_soft_link, "layers/other is a SoftLink"),
        (_external_numbers, "the numbers of layers/x/vars/0 are in another file"),
        (_virtual, "the numbers of layers/x/vars/0 are in another file"),
        (_empty_giant, r"layers/x/vars/0 has the shape \(1099511627776,\)"),
        (_squeezed, "8,388,608 bytes, of which"),
        (_texts, "layers/x/vars/0 has the type object, which is not numeric"),
        (_ring, "linked twice"),
        (_many_names_for_one, r"but claims 52,\d+,\d+ bytes"),
    ],
)
def test_what_leads_out_of_a_file_or_is_too_large_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_weights(new_h5(tmp_path / "w.weights.h5", edit))


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = new_h5(tmp_path / "w.weights.h5")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"w.weights.h5 is damaged or no HDF5 file"):
        load_weights(path)


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
        file.create_dataset("layers/x/vars/0", data=bits.view("V2")).attrs["dtype"] = "bfloat16"

    found = load_weights(new_h5(tmp_path / "w.weights.h5", add))
    np.testing.assert_equal(found["layers/x/vars/0"], np.array([1.5, -2.0], np.float32))


def test_weights_with_names_of_keras_1_are_found_by_their_layer_and_number(tmp_path: Path) -> None:
    """As in the VGG16 of keras.applications."""
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.attrs["layer_names"] = np.array(["conv1"], "S")
        group = file.create_group("conv1")
        group.attrs["weight_names"] = np.array(["conv1_W_1:0", "conv1_b_1:0"], "S")
        group["conv1_W_1:0"], group["conv1_b_1:0"] = np.ones((3, 3, 3, 8)), np.zeros(8)
    found = match(load_weights(tmp_path / "w.h5"), {"conv1/kernel": (3, 3, 3, 8), "conv1/bias": (8,)}, strict=True)
    assert found.sources == {"conv1/kernel": "conv1/conv1_W_1", "conv1/bias": "conv1/conv1_b_1"}


def test_long_lists_of_layers_are_in_pieces(tmp_path: Path) -> None:
    path = applications_h5(tmp_path, WEIGHTS, None)
    with h5py.File(path, "a") as file:
        names = file.attrs.pop("layer_names")
        file.attrs["layer_names0"], file.attrs["layer_names1"] = names[:2], names[2:]
    assert set(load_weights(path)) == set(WEIGHTS)


def test_something_else_is_an_error_that_lists_what_would_be_right(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"w.pth is not a run folder, .*\.weights\.h5 .*prefix"):
        load_weights(tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_weights(tmp_path / "nowhere.weights.h5")


def test_remote_files_and_tensorflow_checkpoints_are_brought_whole(tmp_path: Path) -> None:
    prefix, file = saver(tmp_path, WEIGHTS, None), applications_h5(tmp_path, WEIGHTS, None)
    with object_store():
        folder = f"s3://{BUCKET}/weights"
        for path in tmp_path.iterdir():
            storage.upload(path, f"{folder}/{path.name}")
        for name in (file.name, prefix.name, f"{prefix.name}.index"):
            assert set(load_weights(f"{folder}/{name}", str(tmp_path / "cache"))) == set(WEIGHTS), name
        assert set(load_weights(folder, str(tmp_path / "cache"))) == set(WEIGHTS)
        with pytest.raises(UserError, match="nowhere"):
            load_weights(f"{folder}/nowhere", str(tmp_path / "cache"))
