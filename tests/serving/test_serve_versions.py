"""ModelVersions come and go, and no request fails for it; what is half there is not served."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import modelyard
from conftest import engine_name
from modelyard.data.image_spec import ImageSpec
from modelyard.errors import DataError, UserError
from modelyard.serving.exported_model import ExportedServable
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.http.model_versions import ExportSource, ModelVersions, RunSource, retry_pause
from serving_parts import Brightness, Given, facts, service, write_export
from waiting import PATIENCE, wait_until

STATUS, PREDICT = "/v1/models/mine", "/v1/models/mine:predict"
BLACK = {"instances": [np.zeros((4, 4, 3), int).tolist()]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    modelyard.train(
        model="mlp", dataset="digits", train_steps=4, save_every="2 steps", engine=engine_name(), model_dir=str(folder)
    )
    return folder


def states(client: TestClient) -> dict[str, str]:
    return {each["version"]: each["state"] for each in client.get(STATUS).json()["model_version_status"]}


def test_a_new_version_takes_over_and_no_request_fails_meanwhile() -> None:
    source = Given(v1=Brightness())
    with TestClient(service(source=source).app()) as client:
        answers: list[tuple[int, str]] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answer = client.post(PREDICT, json=BLACK)
                answers.append((answer.status_code, answer.headers.get("modelyard-version", "")))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in (2, 3):
            wait_until(lambda n=number: len(answers) > 20 * n)  # type: ignore[misc]
            source.servables[number] = Brightness()
            wait_until(lambda n=number: states(client).get(str(n)) == "AVAILABLE")  # type: ignore[misc]
        count = len(answers)
        wait_until(lambda: len(answers) > count + 20)
        stop.set()
        for thread in threads:
            thread.join()
        assert {status for status, _ in answers} == {200}
        assert {version for _, version in answers} == {"1", "2", "3"}
        wait_until(lambda: states(client) == {"3": "AVAILABLE", "2": "END", "1": "END"})


def test_a_version_that_is_away_for_a_moment_stays() -> None:
    source = Given(v1=Brightness(), v2=Brightness())
    versions = ModelVersions(source, BatchingOptions(2))

    async def work() -> list[int]:
        versions.load_newest()
        served = []
        for away in (False, False, True, False, False, True, True, True):
            kept = source.servables.pop(2, None) if away else source.servables.setdefault(2, Brightness())
            await versions.check()
            assert versions.current is not None
            served.append(versions.current.number)
            del kept
        await versions.close()
        return served

    assert asyncio.run(work()) == [2, 2, 2, 2, 2, 2, 1, 1]


def test_the_old_version_finishes_what_it_has() -> None:
    old, source = Brightness(), Given()
    source.servables[1] = old
    with TestClient(service(source=source).app()) as client:
        old.go.clear()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(client.post(PREDICT, json=BLACK)))
        old.asked.clear()
        thread.start()
        assert old.asked.wait(PATIENCE)
        source.servables[2] = Brightness(shift=1.0)
        wait_until(lambda: states(client) == {"2": "AVAILABLE", "1": "UNLOADING"})
        assert client.post(PREDICT, json=BLACK).json()["predictions"][0]["class"] == 2  # of the new one
        old.go.set()
        thread.join(PATIENCE)
        assert answers[0].json()["predictions"][0]["class"] == 0
        assert answers[0].headers["modelyard-version"] == "1"
        wait_until(lambda: states(client)["1"] == "END")


@dataclass(frozen=True)
class SlowToDecode(ImageSpec):
    """Takes its time for image files, before they come into the queue."""

    decoding: threading.Event = field(default_factory=threading.Event)
    decoded: threading.Event = field(default_factory=threading.Event)

    def decode(self, data: bytes, name: str) -> Any:
        self.decoding.set()
        self.decoded.wait(PATIENCE)
        return super().decode(data, name)


def test_a_request_that_was_not_in_the_queue_yet_is_answered_by_the_version_it_came_for() -> None:
    slow, source = SlowToDecode((4, 4, 3), "uint8"), Given()
    source.servables[1] = Brightness(facts(image=slow))
    file = io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(file, "PNG")
    with TestClient(service(source=source).app()) as client:
        answers: list[Any] = []
        upload = "/v1/models/mine:upload"
        thread = threading.Thread(target=lambda: answers.append(client.post(upload, content=file.getvalue())))
        thread.start()
        assert slow.decoding.wait(PATIENCE)
        source.servables[2] = Brightness()
        wait_until(lambda: states(client) == {"2": "AVAILABLE", "1": "UNLOADING"})
        time.sleep(0.1)  # it would be gone by now
        slow.decoded.set()
        thread.join(PATIENCE)
        assert (answers[0].status_code, answers[0].headers["modelyard-version"]) == (200, "1")


def test_a_version_that_fails_to_load_is_reported_and_the_old_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    source = Given(v1=Brightness())
    with TestClient(service(source=source).app()) as client:
        source.servables[2] = DataError("/secret/folder is damaged")  # type: ignore[assignment]
        wait_until(lambda: states(client).get("2") == "END")
        failed = client.get(f"{STATUS}/versions/2").json()["model_version_status"][0]["status"]
        assert failed["error_code"] == "INTERNAL"
        assert failed["error_message"] == "the version can't be loaded; see the server's log."
        assert client.post(PREDICT, json=BLACK).headers["modelyard-version"] == "1"
    assert "/secret/folder is damaged" in caplog.text


def test_a_version_that_failed_once_is_tried_again_with_the_same_files() -> None:
    """A network file system may have been away for a moment."""
    source = Given(v1=Brightness())
    with TestClient(service(source=source).app()) as client:
        source.servables[2] = OSError("the network is away")  # type: ignore[assignment]
        wait_until(lambda: states(client).get("2") == "END")
        source.servables[2] = Brightness()
        wait_until(lambda: states(client) == {"2": "AVAILABLE", "1": "END"})


def test_an_older_version_is_served_until_the_newest_can_be_loaded() -> None:
    source = Given(v1=Brightness())
    source.servables[2] = DataError("its weights are missing")  # type: ignore[assignment]
    with TestClient(service(source=source).app()) as client:
        assert client.post(PREDICT, json=BLACK).headers["modelyard-version"] == "1"
        source.servables[2] = Brightness()
        wait_until(lambda: states(client).get("2") == "AVAILABLE")


def test_pauses_between_tries_grow() -> None:
    assert [retry_pause(1.0, times) for times in (1, 2, 3, 8, 9, 1000)] == [2, 4, 8, 256, 300, 300]


def test_a_checkpoint_whose_weights_come_late_is_served(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    newest = max((folder / "checkpoints").iterdir())
    newest.rename(tmp_path / newest.name)
    source = RunSource(str(folder), "latest", {}, "test")
    older = source.find()
    shutil.copytree(tmp_path / newest.name, newest, ignore=shutil.ignore_patterns("*.safetensors"))
    early = source.find()
    assert set(early) != set(older)
    with pytest.raises(UserError):
        source.load(max(early))
    shutil.copytree(tmp_path / newest.name, newest, dirs_exist_ok=True)
    late = source.find()
    assert set(late) == set(early)
    assert late != early, "other files: it is tried at once"


def test_a_version_that_is_taken_back_gives_way_to_the_one_before() -> None:
    source = Given(v1=Brightness(), v2=Brightness())
    with TestClient(service(source=source).app()) as client:
        assert states(client) == {"2": "AVAILABLE"}
        del source.servables[2]
        wait_until(lambda: states(client) == {"2": "END", "1": "AVAILABLE"})
        source.servables.clear()  # a folder that is away for a moment
        time.sleep(0.1)
        assert states(client)["1"] == "AVAILABLE"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_export(folder / "1")
    write_export(folder / "2", bias=3.0)
    return folder


@pytest.mark.tensorflow_only("exports are SavedModels")
def test_an_exported_version_is_served(export: Path) -> None:
    servable = ExportedServable(export / "2")
    found = servable.predict({"image": np.zeros((3, 4, 4, 1), np.uint8)})
    assert found["label"].tolist() == ["yés"] * 3
    assert found["probabilities"].shape == (3, 2)
    assert servable.info.test == {"accuracy": 0.5}


@pytest.mark.tensorflow_only("exports are SavedModels")
def test_what_is_no_whole_version_is_not_served(export: Path, tmp_path: Path) -> None:
    source = ExportSource(tmp_path)
    shutil.copytree(export / "2", tmp_path / ".partial-9")
    shutil.copytree(export / "2", tmp_path / "latest")
    shutil.copytree(export / "2", tmp_path / "007")
    for number, missing in ((4, "saved_model.pb"), (5, "modelyard.json")):
        shutil.copytree(export / "2", tmp_path / str(number))
        (tmp_path / str(number) / missing).unlink()
    (tmp_path / "6").write_text("a file")
    assert source.find() == {}
    with pytest.raises(UserError, match=r"holds no version that can be served.*Incomplete copies"):
        ModelVersions(source, BatchingOptions()).load_newest()


def test_one_version_of_an_export_says_which_folder_to_give(tmp_path: Path) -> None:
    version = tmp_path / "models" / "3"
    version.mkdir(parents=True)
    for name in ("saved_model.pb", "modelyard.json"):
        (version / name).write_bytes(b"")
    assert ExportSource(version).find() == {}
    assert ExportSource(version).explain_missing().endswith(f"Give the folder of all versions: {version.parent}.")


@pytest.mark.tensorflow_only("exports are SavedModels")
def test_a_copy_in_progress_waits_until_it_is_whole_and_a_damaged_one_is_passed_over(
    export: Path, tmp_path: Path
) -> None:
    shutil.copytree(export / "1", tmp_path / "1")
    versions = ModelVersions(ExportSource(tmp_path), BatchingOptions(2))
    versions.load_newest()

    async def looks() -> None:
        data = next((export / "2" / "variables").glob("*.data*")).name
        shutil.copytree(export / "2", tmp_path / "2", ignore=shutil.ignore_patterns(data))
        await versions.check()  # seen for the first time
        assert versions.current is not None
        (tmp_path / "2" / "variables" / data).write_bytes(b"")  # it grows
        await versions.check()
        assert 2 not in versions.statuses  # it has not been tried
        await versions.check()  # unchanged, so tried, and found damaged
        assert versions.statuses[2].state == "END"
        assert versions.current.number == 1
        await versions.check()
        shutil.copy(export / "2" / "variables" / data, tmp_path / "2" / "variables" / data)
        await versions.check()
        await versions.check()
        assert versions.current.number == 2
        await versions.close()

    asyncio.run(looks())


@pytest.mark.tensorflow_only("exports are SavedModels")
def test_a_description_that_does_not_fit_its_model_is_refused(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "1"
    shutil.copytree(export / "1", folder)
    text = (folder / "modelyard.json").read_text()
    for old, new, words in (
        ("[4, 4, 1]", "[5, 4, 1]", "but its modelyard.json says"),
        ("uint8", "float32", "but its modelyard.json says"),
        ("saved_model", "onnx", "only a SavedModel can be loaded here"),
        ('"model": "bias", ', "", "missing or damaged"),
        ("{", "", "missing or damaged"),
    ):
        (folder / "modelyard.json").write_text(text.replace(old, new))
        with pytest.raises(DataError, match=words):
            ExportedServable(folder)
