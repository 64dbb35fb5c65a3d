"""Paths that are URLs: what reads a file reads it from a store, and what writes one writes it there, whole or not."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import modelyard
from conftest import engine_name
from google_store import BUCKET as GOOGLE_BUCKET
from google_store import google_store
from modelyard import storage
from modelyard.data.inspection import verify_data
from modelyard.data.sources.fetch import fetch
from modelyard.errors import ConfigError, DataError, RunError, StorageError, UntrustedPluginError, UserError
from modelyard.serving.exporting.export import exported_versions_at
from object_store import BUCKET, object_store
from photos import photo_folder

pytestmark = pytest.mark.usefixtures("two_devices")
SMALL = {"train_steps": 4, "train_batch_size": 8, "log_every": 4, "save_every": 4, "eval_batch_size": 16}


@pytest.fixture(scope="module", autouse=True)
def _stores() -> Iterator[None]:
    with object_store(), google_store():
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["s3", "gs", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    """A folder of the test's own, in each kind of store."""
    bucket = {"s3": BUCKET, "gs": GOOGLE_BUCKET, "memory": "yard"}[request.param]
    return f"{request.param}://{bucket}/{request.node.originalname}"


@pytest.fixture
def s3(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.originalname}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A folder with photographs and a run on them."""
    folder = tmp_path_factory.mktemp("urls")
    data = photo_folder(folder / "photos", 12)
    modelyard.train_and_evaluate(
        dataset=str(data), image_size=8, model="mlp", hidden_units=[4], engine=engine_name(),
        model_dir=str(folder / "run"), **SMALL,
    )  # fmt: skip
    return folder


def put(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".lock"):
            storage.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")


def rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode())))


def predictions(data: bytes) -> list[tuple[str, ...]]:
    return [(row["label"], row["probability"]) for row in rows(data)]


def test_predict_reads_and_writes_urls(home: Path, url: str) -> None:
    put(home / "photos", f"{url}/photos")
    modelyard.predict(home / "run", str(home / "photos"), output="here.csv")
    done = modelyard.predict(home / "run", f"{url}/photos", output=f"{url}/out/there.csv")
    assert done.path == f"{url}/out/there.csv"
    found = storage.read_bytes(done.path)
    assert predictions(found) == predictions(Path("here.csv").read_bytes())
    paths = [row["path"] for row in rows(found)]
    assert all(storage.exists(path) and path.startswith(f"{url}/photos/") for path in paths)
    assert json.loads(storage.read_bytes(f"{url}/out/there.metrics.json"))["accuracy"] == done.metrics["accuracy"]
    assert not Path(url.partition("/")[0]).exists(), "a folder named after the scheme"
    with pytest.raises(UserError, match=rf"{url}/out/there.csv exists\. .*--overwrite"):
        modelyard.predict(home / "run", f"{url}/photos", output=done.path)


def test_predict_names_images_by_their_urls(home: Path, s3: str) -> None:
    put(home / "photos", f"{s3}/photos")
    one = storage.list_files(f"{s3}/photos")[0]
    modelyard.predict(home / "run", one, f"{s3}/photos/*/*.jpg", str(home / "photos"), output="all.csv")
    paths = [row["path"] for row in rows(Path("all.csv").read_bytes())]
    assert paths[0] == one
    assert paths[1:13] == storage.list_files(f"{s3}/photos")
    assert paths[13:] == sorted(paths[13:])
    assert all(Path(path).is_file() for path in paths[13:])


def test_a_table_whose_upload_fails_is_not_computed_again(home: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise StorageError("no network")

    target = f"{s3}/table.csv"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "upload", fail)
        with pytest.raises(StorageError, match="no network"):
            modelyard.predict(home / "run", str(home / "photos"), output=target)
    assert not storage.exists(target)
    with monkeypatch.context() as patch:
        patch.setattr("modelyard.serving.prediction.predict._TableWriter._write", fail)
        modelyard.predict(home / "run", str(home / "photos"), output=target)
    modelyard.predict(home / "run", str(home / "photos"), output="here.csv")
    assert storage.read_bytes(target) == Path("here.csv").read_bytes()


def test_an_interrupted_upload_of_a_folder_is_not_taken_for_a_complete_one(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("one", "two"):
        folder = tmp_path / version
        folder.mkdir()
        for name in ("a", "b", "done"):
            (folder / name).write_text(version)
    (tmp_path / "one/only-here").write_text("one")
    storage.upload_folder(tmp_path / "one", s3, last=["done"])
    upload = storage.upload

    def fail_at_b(local: Path, url: str, new: bool = False) -> bool:
        if local.name == "b":
            raise StorageError("no network")
        return upload(local, url, new)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "upload", fail_at_b)
        with pytest.raises(StorageError, match="no network"):
            storage.upload_folder(tmp_path / "two", s3, last=["done"])
    assert not storage.exists(f"{s3}/done")
    storage.upload_folder(tmp_path / "two", s3, last=["done"])
    assert storage.names_below(s3) == ["a", "b", "done"]


def test_convert_writes_to_a_url(home: Path, url: str, cache: Path) -> None:
    target = f"{url}/records"
    report = modelyard.convert(str(home / "photos"), target, shards=2, processes=1)
    assert (report.folder, report.already_done) == (target, False)
    here = modelyard.convert(str(home / "photos"), "records", shards=2, processes=1, name="records")
    assert report.bytes == here.bytes
    assert set(storage.names_below(target)) == {path.name for path in Path("records").iterdir()}
    assert modelyard.data_info(target)["classes"] == ["cat", "dog", "emu"]
    assert not list((cache / "outputs").rglob("*.tfrecord"))
    again = modelyard.convert(str(home / "photos"), target, shards=2, processes=1)
    assert (again.already_done, again.examples) == (True, report.examples)
    with pytest.raises(DataError, match=f"{target} holds a dataset that was converted with other settings"):
        modelyard.convert(str(home / "photos"), target, shards=3, processes=1)


def test_convert_leaves_other_files_at_a_url_alone(home: Path, s3: str) -> None:
    storage.write_bytes(f"{s3}/records/notes.txt", b"mine")
    with pytest.raises(DataError, match=r"records holds other files: notes\.txt"):
        modelyard.convert(str(home / "photos"), f"{s3}/records", processes=1)
    assert storage.names_below(s3) == ["records/notes.txt"]


def test_a_conversion_whose_upload_failed_is_uploaded_by_the_next(
    home: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(local: Path, url: str, new: bool = False) -> bool:
        raise StorageError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "upload", fail)
        with pytest.raises(StorageError, match="no network"):
            modelyard.convert(str(home / "photos"), s3, processes=1)
    assert storage.names_below(s3) == []
    modelyard.convert(str(home / "photos"), s3, processes=1)
    assert verify_data(s3).ok


@pytest.mark.tensorflow_only("exports are made by TensorFlow")
def test_a_run_at_a_url_is_exported_beside_its_checkpoints_and_the_export_predicts(home: Path, s3: str) -> None:
    put(home / "run", f"{s3}/run")
    base = f"{s3}/run/export"
    done = modelyard.export(f"{s3}/run")
    assert (done.path, done.version) == (f"{base}/1", 1)
    modelyard.predict(home / "run", str(home / "photos"), output="run.csv")
    modelyard.predict(base, str(home / "photos"), output="export.csv")
    ours, theirs = (predictions(Path(name).read_bytes()) for name in ("run.csv", "export.csv"))
    assert [label for label, _ in ours] == [label for label, _ in theirs]
    loaded, pixels = modelyard.load(f"{base}/1"), np.zeros((2, 8, 8, 3), np.uint8)
    assert (loaded.path, loaded.step) == (f"{base}/1", modelyard.load(home / "run").step)
    expected = modelyard.load(f"{s3}/run").predict(pixels)["probabilities"]
    assert np.allclose(loaded.predict(pixels)["probabilities"], expected, atol=1e-4)
    with pytest.raises(RunError, match=f"{base}/1 exists and was not changed"):
        modelyard.export(f"{s3}/run", version=1)
    assert modelyard.load(base).path == f"{base}/1"
    storage.remove(f"{base}/1/saved_model.pb")
    with pytest.raises(RunError, match="is not a run folder"):  # an incomplete version is no export
        modelyard.load(base)


def test_versions_at_a_url_go_on_and_other_files_are_left_alone(s3: str) -> None:
    assert exported_versions_at(s3) == []
    for name in ("2/model.onnx", "10/modelyard.json"):
        storage.write_bytes(f"{s3}/{name}", b"")
    assert exported_versions_at(s3) == [2, 10]
    storage.write_bytes(f"{s3}/notes.txt", b"mine")
    with pytest.raises(RunError, match=rf"{s3} holds other things than exports \(notes.txt\)"):
        exported_versions_at(s3)


def test_sheet_finder_and_leaderboard_write_to_urls(home: Path, url: str) -> None:
    assert modelyard.show_data(str(home / "photos"), f"{url}/sheet.png", image_size=8) == f"{url}/sheet.png"
    assert storage.read_bytes(f"{url}/sheet.png").startswith(b"\x89PNG")
    options = {"dataset": "digits", "model": "mlp", "hidden_units": [4], "engine": engine_name(), "steps": 10}
    found = modelyard.find_learning_rate(**options, output=f"{url}/rates")
    assert storage.names_below(found.folder) == ["learning_rates.csv", "learning_rates.svg"]
    storage.write_bytes(f"{url}/taken/notes.txt", b"mine")
    with pytest.raises(UserError, match=f"{url}/taken holds notes.txt"):
        modelyard.find_learning_rate(**options, output=f"{url}/taken")
    put(home / "run", f"{url}/runs/first")
    board = modelyard.leaderboard(f"{url}/runs")
    here = modelyard.leaderboard(home, output="board")
    assert [entrant.scores for entrant in board.entrants] == [entrant.scores for entrant in here.entrants]
    assert storage.read_bytes(f"{url}/runs/leaderboard.csv") == Path("board/leaderboard.csv").read_bytes()


@pytest.mark.tensorflow_only("exports are made by TensorFlow")
def test_a_run_at_a_url_is_exported_at_its_end_once(s3: str) -> None:
    options = {"dataset": "digits", "model": "mlp", "hidden_units": [4], "engine": "tensorflow", **SMALL}
    run = f"{s3}/run"
    done = modelyard.train(**options, model_dir=run, export_at_end="keras")
    assert done.exports == (f"{run}/export-keras/1",)
    assert storage.exists(f"{run}/export-keras/1/model.keras")
    assert modelyard.resume(run).exports == done.exports


def test_config_files_and_recipes_may_be_at_urls(url: str) -> None:
    text = "default:\n  model: mlp\n  dataset: digits\nbig:\n  train_batch_size: 512\n"
    storage.write_bytes(f"{url}/project.yaml", text.encode())
    config = modelyard.load_config(config_file=f"{url}/project.yaml", config_set="big")
    assert (config.train_batch_size, config.origin("train_batch_size")) == (512, f"{url}/project.yaml:5")
    storage.write_bytes(f"{url}/recipe.yaml", b"model: mlp\ntrain_steps: 7\n")
    assert modelyard.load_config(recipe=f"{url}/recipe.yaml").train_steps == 7
    storage.write_bytes(f"{url}/wrong.yaml", b"default:\n  modell: mlp\n")
    with pytest.raises(ConfigError, match=f"{url}/wrong.yaml:2: modell: there is no such option"):
        modelyard.load_config(config_file=f"{url}/wrong.yaml")
    with pytest.raises(ConfigError, match=f"{url}/none.yaml: it does not exist"):
        modelyard.load_config(hyperparameter_file=f"{url}/none.yaml")


def test_the_config_of_a_run_at_a_url_starts_a_new_one_like_it(home: Path, s3: str) -> None:
    put(home / "run", s3)
    there, here = (modelyard.load_config(config_file=f"{top}/config.yaml").flat() for top in (s3, home / "run"))
    assert {**there, "config_file": None} == {**here, "config_file": None}


def test_a_config_at_a_url_is_not_the_users_own(s3: str) -> None:
    Path("here.py").write_text("raise AssertionError")
    storage.write_bytes(f"{s3}/module.yaml", f"default: {{plugins: ['{Path('here.py').absolute()}']}}".encode())
    with pytest.raises(UntrustedPluginError, match=r"here\.py"):
        modelyard.load_config(config_file=f"{s3}/module.yaml")
    storage.write_bytes(f"{s3}/file.yaml", b"default: {plugins: [mine.py]}")
    with pytest.raises(ConfigError, match=f"plugins at URLs are not imported. Copy {s3}/mine.py to this machine"):
        modelyard.load_config(config_file=f"{s3}/file.yaml", trust=True)


def test_folders_that_must_be_local_say_so() -> None:
    given = {"data_dir": "s3://b/d", "cache_dir": "gs://b/c", "model": "saved_model", "saved_model_path": "s3://b/m"}
    with pytest.raises(ConfigError) as caught:
        modelyard.train(**given, dataset="digits")
    for name, path in (("data_dir", "s3://b/d"), ("cache_dir", "gs://b/c"), ("saved_model_path", "s3://b/m")):
        assert f"{name}: must be a folder on this machine, not the URL {path}" in str(caught.value)
    for given in ({"data_dir": "s3://b/d"}, {"data_dir": ".", "archive": "s3://b/mnist"}):
        with pytest.raises(DataError, match=r"s3://b/.* is a URL: the official files"):
            fetch("mnist", **given)
    with pytest.raises(RunError, match="s3://b/e: an export must be in a folder on this machine to be served"):
        modelyard.serve(export="s3://b/e", name="m", port=0)
    with pytest.raises(RunError, match="s3://b/m: a matrix must be in a folder on this machine"):
        modelyard.matrix(models=["mlp"], datasets=["digits"], output="s3://b/m")
    assert list(Path().iterdir()) == []
