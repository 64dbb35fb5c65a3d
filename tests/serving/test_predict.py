"""Predictions of a run: the same as its evaluation, for every kind of file, in order, whole or not there."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import modelyard
from conftest import engine_name, environment
from modelyard.cli import serving
from modelyard.cli.app import main
from modelyard.data.records.example import encode_example
from modelyard.data.records.tfrecord import frame
from modelyard.errors import CheckpointError, DataError, RunError, UserError
from modelyard.serving.prediction.predict import _TableWriter
from photos import photo, photo_folder, save_photo
from waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("two_devices")
SMALL = {"train_steps": 6, "train_batch_size": 8, "log_every": 6, "save_every": 6, "eval_batch_size": 16}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A folder with a run on photographs, whose data is gone."""
    folder = tmp_path_factory.mktemp("predict")
    data = photo_folder(folder / "data", 24)
    modelyard.train_and_evaluate(
        dataset=str(data),
        image_size=16,
        model="tiny_norm",
        engine=engine_name(),
        model_dir=str(folder / "run"),
        **SMALL,
    )
    shutil.rmtree(data)
    photo_folder(folder / "photos", 21)
    return folder


def table(path: Path | str) -> list[dict[str, Any]]:
    text = Path(path).read_text()
    if str(path).endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text)))
    return [json.loads(line) for line in text.splitlines()]


def chances(path: Path | str) -> np.ndarray:
    rows = table(path)
    return np.array([[float(row[f"p({name})"]) for name in ("cat", "dog", "emu")] for row in rows])


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(frame(encode_example(record)) for record in records))


def test_predictions_are_those_of_the_evaluation(tmp_path: Path) -> None:
    options = {"test_time_augmentation": "shift", "ema_decay": 0.5, "engine": engine_name(), "model_dir": "run"}
    modelyard.train_and_evaluate(dataset="digits", model="tiny_norm", **{**SMALL, "train_steps": 30}, **options)
    expected = modelyard.evaluate("run", split="test").metrics
    found = modelyard.predict("run", split="test", top=3, probabilities=True)
    assert found.metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)
    rows = table("predictions.csv")
    assert len(rows) == found.examples == sum(map(sum, found.scores["confusion"]))
    right = np.mean([row["truth"] == row["label"] for row in rows])
    assert right == pytest.approx(expected["accuracy"], abs=1e-9)
    for row in rows[:20]:
        listed = sorted((float(row[f"p({n})"]) for n in range(10)), reverse=True)
        assert sum(listed) == pytest.approx(1, abs=1e-5)
        assert [float(row[name]) for name in ("probability", "probability_2", "probability_3")] == listed[:3]
        assert float(row[f"p({row['label_2']})"]) == listed[1]
    assert json.loads(Path("predictions.metrics.json").read_text())["accuracy"] == found.metrics["accuracy"]
    whole = Path("predictions.csv").read_bytes()
    Path("run/manifest.json").unlink()  # what it says of the data is asked of the data
    modelyard.predict("run", split="test", top=3, probabilities=True, output="without.csv")
    assert Path("without.csv").read_bytes() == whole
    losses = -np.mean([np.log(float(row[f"p({row['truth']})"])) for row in rows])
    assert losses == pytest.approx(expected["loss"], abs=1e-4), "averages and views, as evaluation has them"


def test_every_kind_of_file_gives_the_same_in_its_order(home: Path, tmp_path: Path) -> None:
    run, photos = home / "run", home / "photos"
    whole = modelyard.predict(run, photos, output="folder.csv", probabilities=True)
    rows = table("folder.csv")
    paths = [row["path"] for row in rows]
    assert paths == sorted(str(path) for path in photos.rglob("*.jpg"))
    assert [row["truth"] for row in rows] == [Path(path).parent.name for path in paths]
    assert whole.metrics["accuracy"] == np.mean([row["truth"] == row["label"] for row in rows])
    expected = chances("folder.csv")

    modelyard.predict(run, f"{photos}/*/*.jpg", output="glob.csv", probabilities=True)
    np.testing.assert_array_equal(chances("glob.csv"), expected)
    modelyard.predict(run, *reversed(paths), output="named.csv", probabilities=True)
    np.testing.assert_allclose(chances("named.csv")[::-1], expected, atol=1e-6)
    assert "truth" not in table("named.csv")[0], "files that are named one by one tell nothing"

    with open("list.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "class"), *((path, Path(path).parent.name) for path in paths)])
    listed = modelyard.predict(
        run, "list.csv", output="csv.csv", image_column="file", label_column="class", probabilities=True
    )
    np.testing.assert_array_equal(chances("csv.csv"), expected)
    assert listed.metrics == whole.metrics

    records = [{"image/encoded": Path(path).read_bytes(), "number": n} for n, path in enumerate(paths)]
    write(tmp_path / "plain.tfrecord", records)
    bare = modelyard.predict(run, tmp_path / "plain.tfrecord", output="records.csv", probabilities=True)
    np.testing.assert_array_equal(chances("records.csv"), expected)
    assert not bare.metrics
    numbers = {"cat": 0, "dog": 1, "emu": 2}
    for record, path in zip(records, paths, strict=True):
        record["image/class/label"] = numbers[Path(path).parent.name]
    write(tmp_path / "labelled.tfrecord", records)
    told = modelyard.predict(run, tmp_path / "labelled.tfrecord", output="told.csv")
    assert told.metrics == whole.metrics

    lines = modelyard.predict(run, photos, output="lines.jsonl", top=2, probabilities=True)
    assert lines.examples == 21
    first = table("lines.jsonl")[0]
    assert first["top"][0] == {"label": first["label"], "probability": first["probability"]}
    assert list(first["probabilities"].values()) == pytest.approx(expected[0], abs=1e-6)


def test_a_missing_run_is_told_before_a_table_that_exists(home: Path) -> None:
    Path("predictions.csv").write_text("mine")
    with pytest.raises(UserError, match="nope"):
        modelyard.predict("runs/nope", home / "photos")
    with pytest.raises(UserError, match=r"predictions\.csv exists"):
        modelyard.predict(home / "run", home / "photos")


def test_a_converted_folder_is_predicted_with_all_splits(home: Path, tmp_path: Path) -> None:
    expected = modelyard.predict(home / "run", home / "photos", output="folder.csv")
    modelyard.convert(str(home / "photos"), tmp_path / "converted", validation_fraction=0.2)
    found = modelyard.predict(home / "run", tmp_path / "converted", output="converted.csv")
    assert (found.examples, found.metrics["accuracy"]) == (21, expected.metrics["accuracy"])
    assert found.scores["confusion"] == expected.scores["confusion"]


@pytest.mark.parametrize("fit", ["pad", "crop"])
def test_images_are_made_to_fit_as_in_training(fit: str, tmp_path: Path) -> None:
    data = photo_folder(tmp_path / "data", 24)
    options = {"image_size": 16, "image_fit": fit, "validation_fraction": 0.5, "model": "tiny_norm"}
    modelyard.train_and_evaluate(dataset=str(data), engine=engine_name(), model_dir="run", **options, **SMALL)
    expected = modelyard.evaluate("run", checkpoint="latest").metrics
    modelyard.predict("run", split="validation", checkpoint="latest", probabilities=True)
    loss = -np.mean([np.log(float(row[f"p({row['truth']})"])) for row in table("predictions.csv")])
    assert loss == pytest.approx(expected["loss"], abs=1e-5)


def test_arrays_are_predicted_as_they_are(home: Path, tmp_path: Path) -> None:
    images = np.stack([photo(n, 16, 16) for n in range(20)])
    np.savez(tmp_path / "a.npz", x_test=images, y_test=np.arange(20) % 3)
    found = modelyard.predict(home / "run", "a.npz", output="npz.csv", probabilities=True)
    assert found.examples == 20
    assert "accuracy" in found.metrics
    for n in range(20):
        Image.fromarray(images[n]).save(f"{n:02d}.png")
    modelyard.predict(home / "run", ".", output="png.csv", probabilities=True)
    np.testing.assert_allclose(chances("png.csv"), chances("npz.csv"), atol=1e-6)


@pytest.mark.parametrize("labels", [[-1, 0, 1], [0, 1, 3], [0.5, 1, 2], [[1, 0, 0]] * 3, ["cat", "dog", "emu"]])
def test_labels_that_are_none_of_the_run_are_left_out_and_told(
    home: Path, labels: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    np.savez("a.npz", x=np.stack([photo(n, 16, 16) for n in range(3)]), y=np.array(labels))
    found = modelyard.predict(home / "run", "a.npz", output="a.csv")
    assert (found.examples, found.metrics) == (3, {})
    assert "truth" not in table("a.csv")[0]
    assert "labels are left out: " in caplog.text


def test_a_list_without_labels_is_nothing_to_warn_of(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_photo(Path("a.jpg"), 1)
    Path("list.csv").write_text("file\na.jpg\n")
    assert modelyard.predict(home / "run", "list.csv", image_column="file").examples == 1
    assert "labels are left out" not in caplog.text


@pytest.mark.parametrize("change", [lambda x: x / 255, lambda x: x.astype(int) + 300, lambda x: x * np.nan])
def test_values_that_would_become_others_are_refused(home: Path, change: Any) -> None:
    images = np.stack([photo(n, 16, 16) for n in range(3)])
    np.savez("a.npz", x=change(images))
    with pytest.raises(DataError, match="trained on uint8: whole numbers from 0 to 255"):
        modelyard.predict(home / "run", "a.npz")
    np.savez("same.npz", x=images.astype(np.float64))
    np.savez("bytes.npz", x=images)
    for name in ("same", "bytes"):
        modelyard.predict(home / "run", f"{name}.npz", output=f"{name}.csv", probabilities=True)
    np.testing.assert_array_equal(chances("same.csv"), chances("bytes.csv"))


def test_a_single_array_is_told(home: Path) -> None:
    with open("a.npz", "wb") as file:
        np.save(file, np.zeros((2, 16, 16, 3), np.uint8))
    with pytest.raises(DataError, match=r"a\.npz is a single array .* numpy\.savez"):
        modelyard.predict(home / "run", "a.npz")


def test_other_colour_modes_are_converted_as_in_training(home: Path, tmp_path: Path) -> None:
    grey = Image.fromarray(photo(3)).convert("L")
    grey.save("a-grey.png")
    grey.convert("RGB").save("b-colour.png")
    grey.convert("RGBA").save("c-alpha.png")
    modelyard.predict(home / "run", ".", output="modes.csv", probabilities=True)
    found = chances("modes.csv")
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_cannot_be_read_ends_it_or_gets_a_row(home: Path, tmp_path: Path) -> None:
    for number in range(5):
        save_photo(Path(f"{number}.jpg"), number)
    Path("2.jpg").write_bytes(Path("2.jpg").read_bytes()[:200])
    with pytest.raises(DataError, match=r"2\.jpg can't be decoded: .* With --on_bad skip"):
        modelyard.predict(home / "run", ".", output="all.csv")
    assert not Path("all.csv").exists()
    found = modelyard.predict(home / "run", ".", output="all.csv", on_bad="skip")
    rows = table("all.csv")
    assert (found.examples, found.skipped) == (5, 1)
    assert "can't be decoded" in rows[2]["error"]
    assert rows[2]["label"] == ""
    assert all(row["label"] and not row["error"] for n, row in enumerate(rows) if n != 2)


def test_mistakes_are_told_before_anything_is_written(home: Path, tmp_path: Path) -> None:
    run, photos = home / "run", home / "photos"
    with pytest.raises(DataError, match="there is no file or folder"):
        modelyard.predict(run, "nowhere")
    with pytest.raises(DataError, match="no file matches"):
        modelyard.predict(run, "*.jpg")
    with pytest.raises(UserError, match=r"must end in \.csv"):
        modelyard.predict(run, photos, output="out.txt")
    with pytest.raises(UserError, match="there is no folder"):
        modelyard.predict(run, photos, output="no/out.csv")
    with pytest.raises(UserError, match="nothing to predict"):
        modelyard.predict(run)
    with pytest.raises(CheckpointError, match="there is no checkpoint '9'"):
        modelyard.predict(run, photos, checkpoint=9)
    Path("list.csv").write_text("path\nnowhere.jpg\n")
    with pytest.raises(DataError, match=r"list\.csv:2: there is no file"):
        modelyard.predict(run, "list.csv", image_column="path")
    with pytest.raises(DataError, match="Name the right one with --image_column"):
        modelyard.predict(run, "list.csv", image_column="file")
    empty = shutil.copytree(run, tmp_path / "empty")
    for name in ("checkpoints", "best"):
        shutil.rmtree(empty / name)
    with pytest.raises(CheckpointError, match="checkpoint"):
        modelyard.predict(empty, photos)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("list.csv", "empty")]
    modelyard.predict(run, photos, output="out.csv")
    before = Path("out.csv").read_bytes()
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        modelyard.predict(run, photos, output="out.csv", top=2)
    assert Path("out.csv").read_bytes() == before
    modelyard.predict(run, photos, output="out.csv", top=2, overwrite=True)
    assert Path("out.csv").read_bytes() != before


def test_a_folder_that_can_not_be_written_to_is_told(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't write /proc/a\.csv"):
        modelyard.predict(home / "run", home / "photos", output="/proc/a.csv")  # where root may not, either


CHILD = """
import os, signal, sys
import modelyard
from conftest import engine_name
from modelyard.config.backend import select_engine
select_engine(engine_name())
import parts
from modelyard.serving.prediction import predict as predict_module
predict_module._SAVE_PROGRESS_SECONDS = 0.0
write = predict_module._TableWriter._write

def deadly(self, file, found, batch, first, unreadable):
    write(self, file, found, batch, first, unreadable)
    if first == 20:
        os.kill(os.getpid(), signal.SIGKILL)

predict_module._TableWriter._write = deadly
modelyard.predict(sys.argv[1], sys.argv[2], output="killed.csv", probabilities=True, eval_batch_size=1)
"""


def test_a_killed_one_goes_on_and_ends_the_same(home: Path, tmp_path: Path) -> None:
    photos = photo_folder(tmp_path / "many", 60)
    words = [sys.executable, "-c", CHILD, str(home / "run"), str(photos)]
    child = subprocess.run(
        words, env=environment(PYTHONPATH=os.pathsep.join(sys.path)), cwd=tmp_path, timeout=PATIENCE, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert json.loads(Path(".partial-killed.csv.json").read_text())["rows"] == 21
    assert not Path("killed.csv").exists(), "a table is whole or not there"
    with open(".partial-killed.csv", "ab") as file:
        file.write(b"half a li")
    options = {"probabilities": True, "eval_batch_size": 1}
    again = modelyard.predict(home / "run", photos, output="killed.csv", **options)
    plain = modelyard.predict(home / "run", photos, output="plain.csv", **options)
    assert Path("killed.csv").read_bytes() == Path("plain.csv").read_bytes()
    assert again.scores == plain.scores
    assert not list(tmp_path.glob(".partial-*"))


def test_a_table_that_was_begun_with_other_options_begins_anew(home: Path, tmp_path: Path) -> None:
    photos = home / "photos"
    Path(".partial-a.csv").write_text("path,label\nnonsense,1\n")
    Path(".partial-a.csv.json").write_text(json.dumps({"key": "other", "rows": 1, "bytes": 10, "scores": None}))
    modelyard.predict(home / "run", photos, output="a.csv")
    modelyard.predict(home / "run", photos, output="b.csv")
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


class Stopped(BaseException):
    """As Ctrl-C ends it."""


def stopped(patch: pytest.MonkeyPatch, *given: Any, **options: Any) -> int:
    """A prediction that ends when it has noted its first batch; how many rows that had."""
    from modelyard.serving.prediction import predict as predict_module

    def deadly(*values: Any) -> None:
        note(*values)
        raise Stopped

    note = predict_module._TableWriter._save_progress
    with patch.context() as inner:
        inner.setattr(predict_module._TableWriter, "_save_progress", deadly)
        with pytest.raises(Stopped):
            modelyard.predict(*given, output="a.csv", **options)
    return int(json.loads(Path(".partial-a.csv.json").read_text())["rows"])


def test_one_that_was_begun_with_other_views_begins_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"probabilities": True, "eval_batch_size": 4}
    assert stopped(monkeypatch, home / "run", home / "photos", **options) == 4
    options["test_time_augmentation"] = "shift"
    modelyard.predict(home / "run", home / "photos", output="a.csv", **options)
    modelyard.predict(home / "run", home / "photos", output="b.csv", **options)
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


def test_one_that_was_begun_with_other_kernels_begins_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"probabilities": True, "eval_batch_size": 4}
    assert stopped(monkeypatch, home / "run", home / "photos", **options) == 4
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    modelyard.predict(home / "run", home / "photos", output="a.csv", **options)
    assert "resuming" not in caplog.text


def test_one_that_was_killed_after_its_last_row_still_knows_its_metrics(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.serving.prediction.scores import TableScores

    assert stopped(monkeypatch, home / "run", home / "photos", eval_batch_size=32) == 21
    with monkeypatch.context() as inner:
        inner.setattr(TableScores, "add", lambda *_: pytest.fail("nothing is predicted again"))
        again = modelyard.predict(home / "run", home / "photos", output="a.csv")
    plain = modelyard.predict(home / "run", home / "photos", output="b.csv")
    assert (again.scores, again.metrics, again.examples) == (plain.scores, plain.metrics, 21)
    assert Path("a.metrics.json").read_bytes() == Path("b.metrics.json").read_bytes()


def test_metrics_of_a_table_that_is_replaced_do_not_stay(home: Path) -> None:
    modelyard.predict(home / "run", home / "photos", output="a.csv")
    assert Path("a.metrics.json").exists()
    np.savez("new.npz", x=photo(1, 16, 16)[None])
    modelyard.predict(home / "run", "new.npz", output="a.csv", overwrite=True)
    assert not Path("a.metrics.json").exists()


def test_numbers_and_several_classes_have_tables_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.random((60, 5)).astype(np.float32)
    for name, labels in (("value", images.sum(1)), ("flags", (images[:, :3] > 0.5).astype(np.uint8))):
        np.savez(f"{name}.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
        folder = f"run-{name}"
        modelyard.train_and_evaluate(
            dataset=f"{name}.npz", model="mlp", engine=engine_name(), model_dir=folder, **{**SMALL, "train_steps": 20}
        )
        modelyard.predict(folder, split="test", output=f"{name}.csv")
    assert set(table("value.csv")[0]) == {"path", "truth", "value"}
    assert set(table("flags.csv")[0]) == {"path", "truth", "labels"}


def test_arrays_of_another_size_are_resized_if_the_run_resized_its_images(home: Path) -> None:
    small = np.stack([photo(n, 12, 14) for n in range(3)])
    np.savez("a.npz", x=small)
    np.save("b.npy", small)
    Path("files").mkdir()
    for number, image in enumerate(small):
        Image.fromarray(image).save(f"files/{number}.png")
    run = modelyard.load(home / "run")
    chances = run.predict(small)["probabilities"]
    for source in ("a.npz", "b.npy", "files"):
        modelyard.predict(home / "run", source, output=f"{source}.csv")
        found = [float(row["probability"]) for row in table(f"{source}.csv")]
        np.testing.assert_allclose(found, chances.max(axis=1), atol=1e-5)


def test_arrays_of_another_size_are_refused_if_the_run_saw_arrays_as_they_are() -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)
    np.savez("train.npz", x_train=images, y_train=np.arange(40) % 2)
    short = {**SMALL, "train_steps": 2}
    modelyard.train(dataset="train.npz", model="mlp", engine=engine_name(), model_dir="run", **short)
    np.savez("a.npz", x=images[:3, :6, :6])
    np.save("b.npy", images[:3, :6, :6])
    for source in ("a.npz", "b.npy"):
        with pytest.raises(DataError, match=r"images in the array are 6×6, the model takes 8×8.*--image_size.*files"):
            modelyard.predict("run", source, output="a.csv")
    with pytest.raises(DataError, match=r"the array has shape 3×6×6; the model takes .* 8×8×1"):
        modelyard.load("run").predict(images[:3, :6, :6])
    np.save("c.npy", images[:3])
    assert modelyard.predict("run", "c.npy", output="c.csv").examples == 3
    np.save("value.npy", np.array(3))
    with pytest.raises(DataError, match=r"value\.npy: its array has shape \(\); examples are needed"):
        modelyard.predict("run", "value.npy", output="d.csv")


def test_a_run_on_an_object_store_is_opened_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.serving.prediction import predict as predict_module

    def opened(model_dir: str | Path, *_: Any) -> None:
        raise UserError(f"asked for {model_dir}")

    monkeypatch.setattr(predict_module, "open_run", opened)
    monkeypatch.setattr(predict_module, "is_export_at", lambda _: False)
    with pytest.raises(UserError, match="asked for s3://yard/run"):
        modelyard.predict("s3://yard/run", "photos")


def test_a_misspelt_option_is_no_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        modelyard.main(["predict", str(home / "run"), str(home / "photos"), "--otput", "a.csv"])
    assert left.value.code == 2
    assert "otput: there is no such option. Did you mean 'output'?" in capsys.readouterr().err


def test_metrics_of_a_table_that_was_replaced_go_with_it(home: Path) -> None:
    modelyard.predict(home / "run", home / "photos", output="a.csv")
    assert Path("a.metrics.json").exists()
    save_photo(Path("one.jpg"), 1)
    modelyard.predict(home / "run", "one.jpg", output="a.csv", overwrite=True)
    assert not Path("a.metrics.json").exists()


def test_the_command_shows_the_confusion_matrix(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        modelyard.main(["predict", str(home / "run"), str(home / "photos"), "--top", "2", "--engine", engine_name()])
    assert not left.value.code
    out = capsys.readouterr().out
    assert "labels (rows) and predictions (columns)" in out
    assert "21 predictions by the model of step 3 in predictions.csv" in out


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_confusion_matrix_that_is_too_wide_has_numbers_for_names(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "width", lambda: 20)
    with pytest.raises(SystemExit) as left:
        main(["predict", str(home / "run"), str(home / "photos")])
    assert not left.value.code
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["┃", "┃", "1", "┃", "2", "┃", "3", "┃"] in rows
    assert [row[1:3] for row in rows if row[:1] == ["│"]] == [["1", "cat"], ["2", "dog"], ["3", "emu"]]


def test_of_two_that_write_one_table_the_second_is_refused(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    images = home / "photos"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / ".partial-out.csv")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    assert first.stdout.readline() == b"locked\n"
    with pytest.raises(RunError, match="another process is writing"):
        modelyard.predict(home / "run", images, output=output)
    first.kill()  # a kill releases it
    first.communicate()
    assert modelyard.predict(home / "run", images, output=output).examples == 21
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_a_table_that_another_process_has_finished_meanwhile_is_not_replaced(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.csv"
    images = home / "photos"
    key = _TableWriter._key

    def finished_by_another(self: _TableWriter) -> str:  # after the first look, before the lock
        output.write_text("theirs")
        return key(self)

    monkeypatch.setattr(_TableWriter, "_key", finished_by_another)
    with pytest.raises(UserError, match="exists"):
        modelyard.predict(home / "run", images, output=output)
    assert output.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_data_of_other_classes_is_refused_with_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = photo_folder(tmp_path / "data", 24)
    options = {"image_size": 16, "model": "tiny_norm", "engine": engine_name(), "model_dir": "run", **SMALL}
    modelyard.train_and_evaluate(dataset=str(data), **options)
    photo_folder(tmp_path / "renamed", 24, ("zcat", "dog", "emu"))
    photo_folder(tmp_path / "fewer", 24, ("cat", "dog"))
    photo_folder(tmp_path / "more", 24, ("bag", "cat", "dog", "emu"))
    for folder, difference in (
        ("renamed", "the data has 3, the run 3; only in the data: zcat; only in the run: cat"),
        ("fewer", "the data has 2, the run 3; only in the run: emu"),
        ("more", "the data has 4, the run 3; only in the data: bag"),
    ):
        other: dict[str, Any] = {"dataset": str(tmp_path / folder)}
        with pytest.raises(DataError, match=difference):
            modelyard.predict("run", split="validation", **other)
        with pytest.raises(DataError, match=difference):
            modelyard.evaluate("run", **other)
        with pytest.raises(DataError, match=difference):
            modelyard.load("run", **other).evaluate("validation")
        with pytest.raises(DataError, match=difference):
            modelyard.resume("run", **{"train_steps": 12, **other})
    assert not Path("predictions.csv").exists()
    photo_folder(tmp_path / "others", 27)
    modelyard.predict("run", split="validation", dataset=str(tmp_path / "others"))
    assert "is not the data this run was trained on" in caplog.text
