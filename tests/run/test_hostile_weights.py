"""Files of weights that someone made to do harm: each is refused in words, and no process stays behind."""

from __future__ import annotations

import base64
import os
import sys
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from modelyard.errors import CheckpointError
from modelyard.run.weights import hdf5
from modelyard.run.weights.hdf5 import read_hdf5
from modelyard.run.weights.read import load_weights
from waiting import PATIENCE

# Four bytes of it are others than h5py wrote; HDF5 1.14 and 2 read it forever.
ENDLESS = (
    "c-rk*K}!Nb6rR~l+stgOAd8@dqLMn;twT_emWL=Q4<0%sBq5ZFN>~JSv|Gmx9XfXG*r9{Ren5x*O}Wk+-5FiA6e@fl$YXZi&d$F1"
    "zUR!o+i-Ae$TjIACNz!o5uI4^2{>L7+r0k>ECpKx`=s#ew9@B;>s}aN_KWU^LZ<hp1pXYYpILEsh+aWBv=K3F4B7_RH%0V2jb9|P"
    "IYQEzeDW-LnaE1~T>0j6DRHoSDQ_<@tFQ|y`0;7fw|$jcy~cD|TWsdz8X3Qaeh1Mi{ffc{)IcdJ4KVkraySaVyb?ESjed4I&%j&U"
    "Ios2@J_ve8%A?LL`Tp4{`W+`yxr9a6;SQgBu)7zeWz}-th5N+3A@i8eD>^IsT|xU{t~b}uE)NtSu=lR^@_=s`^8n_7`aJOB68+BO"
    "=D&Tn^8l^#E~1J0mU)b@%LA&A2Xt7$(ujC&Xq5+!blmr29;oF3&Zm+`^b3GpmiGJWUCIM7w>a(%v>!dVM&H?28ESKXuJb1^#;*A}"
    "lqrEyDx5bvKX<;2G~Rg?|72YF{!-SX8<cOxZLIt*srZ?BTp$zWc<I11YI#qtYjb;VjMlWiy}7qTEyT3?RlYZ*Pm=juZ9X4JRRjWo"
    "Kp+qZ1OkCTApRX%eRmlEKW;my_e14yR+>TaAI7Y44N$I)w)*z}?q?QjfV~O38sMu`Tkm!a(2l>W^Q?X7Z;!uIi^yN(Z#{pn{Gwl="
    "%De9HSFT-+&5Ps9JVvw^M`H$K@)LXkhi=Av"
)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    path = tmp_path / "it.weights.h5"
    path.write_bytes(zlib.decompress(base64.b85decode(ENDLESS)))
    return path


def test_a_file_that_hangs_hdf5_is_given_up(endless: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it\.weights\.h5 is damaged: HDF5 has not read it within 3 s"):
        read_hdf5(endless, seconds=3)
    assert not [child for child in psutil.Process().children(recursive=True) if str(endless) in child.cmdline()]


def test_a_process_that_reads_hdf5_ends_by_itself(
    endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its first process was killed: nobody waits for it."""
    run = hdf5.subprocess.run
    monkeypatch.setattr(
        hdf5.subprocess, "run", lambda words, timeout, **options: run(words, timeout=PATIENCE, **options)
    )
    with pytest.raises(CheckpointError, match=r"is damaged: HDF5 failed while reading it \(-\d+\)"):
        read_hdf5(endless, seconds=1)


def test_what_crashes_hdf5_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.ones(3)
    monkeypatch.setattr(hdf5, "_CODE", "import os; os.abort()")
    with pytest.raises(CheckpointError, match=r"it.h5 is damaged: HDF5 failed while reading it \(-6\)"):
        load_weights(path)


def test_a_module_in_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones(3)
    (tmp_path / "json.py").write_text("open('it-ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert list(load_weights(Path("it.h5"))) == ["layers/dense/vars/0"]
    assert not (tmp_path / "it-ran").exists()


def test_a_keras_file_of_another_compression_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "it.keras", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("model.weights.h5", os.urandom(1000))
    with pytest.raises(CheckpointError, match=r"'model.weights.h5' is compressed by method 14; use deflate"):
        load_weights(tmp_path / "it.keras")


@pytest.mark.parametrize("name", ["it.h5", "it.keras", "it.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_weights_that_are_not_a_regular_file_are_named(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} is .*a {kind}; only regular files are read"):
        load_weights(tmp_path / name)


@pytest.mark.usefixtures("two_devices")  # TensorFlow writes it
def test_a_tensorflow_checkpoint_whose_data_is_a_pipe_is_refused(tmp_path: Path) -> None:
    from weight_files import saver

    prefix = saver(tmp_path, {"dense/kernel": np.ones(3, np.float32)}, None)
    data = Path(f"{prefix}.data-00000-of-00001")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(CheckpointError, match=r"data-00000-of-00001 is a pipe; only regular files are read"):
        load_weights(prefix)
