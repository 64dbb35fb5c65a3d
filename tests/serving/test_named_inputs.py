"""A model of several named inputs is predicted, evaluated, exported and served by their names."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from named_inputs import INPUTS, LABELS, NEW, NEW_LABELS, PLUGIN, TABLE, rows
from PIL import Image

import modelyard
from conftest import engine_name
from modelyard import storage
from modelyard.errors import DataError

pytestmark = pytest.mark.usefixtures("two_devices")


def trained(folder: Path, model: str, dataset: Any = "image_vec_mask", **more: Any) -> Path:
    options: dict[str, Any] = {"train_steps": 8, "train_batch_size": 16, "learning_rate": 0.05, "eval_batch_size": 8}
    modelyard.train(
        model=model, dataset=dataset, engine=engine_name(), plugins=str(PLUGIN), model_dir=folder, **options
    )
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A run of a model that takes an image and a vector."""
    return trained(tmp_path_factory.mktemp("named") / "run", "image_and_vec")


@pytest.fixture(scope="module")
def run(home: Path) -> modelyard.Run:
    return modelyard.load(home)


@pytest.fixture(scope="module")
def table_home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A run of a model that takes a whole number and a vector, and no image."""
    return trained(tmp_path_factory.mktemp("table") / "run", "age_and_vec", (rows(TABLE, 0, 100), LABELS[:100]))


def expected(run: modelyard.Run) -> Any:
    """What the Keras model says, without Modelyard."""
    logits = np.asarray(run.model(INPUTS), np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# -- predict and evaluate ---------------------------------------------------------------------------------------------


def test_named_arrays_are_predicted(run: modelyard.Run) -> None:
    found = run.predict(INPUTS)["probabilities"]
    assert found == pytest.approx(expected(run), abs=1e-5)
    assert len(np.unique(found[:, 0].round(3))) > 5
    assert np.array_equal(run.predict(NEW)["probabilities"], found), "a feature that is no input is left out"
    wide = {"image": INPUTS["image"].astype(int), "vec": INPUTS["vec"].astype(np.float64).tolist()}
    assert np.array_equal(run.predict(wide)["probabilities"], found)
    one = run.predict({name: values[3] for name, values in INPUTS.items()})["probabilities"]
    assert one == pytest.approx(found[3:4], abs=1e-6)


def test_a_split_of_the_run_is_predicted_as_it_is_evaluated(home: Path, run: modelyard.Run, tmp_path: Path) -> None:
    table = modelyard.predict(home, split="test", output=tmp_path / "test.csv")
    assert table.examples == len(NEW_LABELS)
    assert table.metrics == pytest.approx(modelyard.evaluate(home, split="test").metrics)
    assert "loss" in table.metrics
    measured = table.metrics["accuracy"]
    found = run.predict((INPUTS, NEW_LABELS))
    assert found.scores["accuracy"] == pytest.approx(measured)
    shown = [row["label"] for row in csv.DictReader((tmp_path / "test.csv").read_text().splitlines())]
    assert shown == found["label"].tolist()
    assert run.evaluate((INPUTS, NEW_LABELS)).metrics["accuracy"] == pytest.approx(measured)


def write_npz(folder: Path) -> Path:
    np.savez(folder / "some.npz", **NEW, label=NEW_LABELS)
    return folder / "some.npz"


def write_csv(folder: Path) -> Path:
    lines = []
    for number, (image, vec) in enumerate(zip(INPUTS["image"], INPUTS["vec"].tolist(), strict=True)):
        Image.fromarray(image[..., 0]).save(folder / f"{number}.png")
        lines.append([f"{number}.png", json.dumps(vec), "x", ["low", "high"][NEW_LABELS[number]]])
    with (folder / "some.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "vec", "note", "label"], *lines])
    return folder / "some.csv"


def write_jsonl(folder: Path) -> Path:
    lines = [
        {"image": image.tolist(), "vec": vec.tolist(), "label": ["low", "high"][label]}
        for image, vec, label in zip(INPUTS["image"], INPUTS["vec"], NEW_LABELS, strict=True)
    ]
    (folder / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "some.jsonl"


def test_a_table_at_a_url_brings_the_images_beside_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    url = "memory://named/tables"
    Path(tmp_path / "photos").mkdir()
    lines = ["path,vec", *(f'photos/{number}.png,"[{number}, 1, 2]"' for number in range(3))]
    Path(tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    for number, pixels in enumerate(NEW["image"][:3, :, :, 0]):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
        storage.upload(tmp_path / "photos" / f"{number}.png", f"{url}/photos/{number}.png")
    storage.upload(tmp_path / "table.csv", f"{url}/table.csv")
    modelyard.predict(home, tmp_path / "table.csv", output=tmp_path / "here.csv")
    modelyard.predict(home, f"{url}/table.csv", output=tmp_path / "there.csv")
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    storage.write_bytes(f"{url}/outside.csv", b'path,vec\n../0.png,"[0, 1, 2]"\n')
    with pytest.raises(DataError, match=rf"{url}/\.\./0.png is not inside {url}"):
        modelyard.predict(home, f"{url}/outside.csv", output=tmp_path / "outside.csv")


@pytest.mark.parametrize("write", [write_npz, write_csv, write_jsonl])
def test_files_have_an_array_or_a_column_per_input(
    run: modelyard.Run, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    found = run.predict(str(write(tmp_path)))
    assert found["probabilities"] == pytest.approx(run.predict(INPUTS)["probabilities"], abs=1e-5)
    assert found.scores["accuracy"] == pytest.approx(run.predict((INPUTS, NEW_LABELS)).scores["accuracy"])


IMAGE, VEC = INPUTS["image"], INPUTS["vec"]
MISTAKES: dict[str, tuple[Any, str]] = {
    "missing": ({"image": IMAGE}, r"the input 'vec' is missing. The model takes image \(uint8, 6×6×1\) and vec"),
    "plain": (IMAGE, "the input 'vec' is missing"),
    "unknown": ({**INPUTS, "vex": VEC}, r"no input 'vex'. Did you mean 'vec'\? The model takes .* vec \(float32, 3\)"),
    "shape": ({**INPUTS, "vec": VEC[:, :2]}, "the input 'vec' is float32 of shape 20×2; .* float32, 3"),
    "length": ({**INPUTS, "vec": VEC[:4]}, "20 of 'image', 4 of 'vec'"),
    "type": ({**INPUTS, "vec": [["a", "b", "c"]] * 20}, "the input 'vec' is <U1 of shape 20×3"),
    "nan": ({**INPUTS, "vec": VEC * np.nan}, "'vec' of example 0 is not finite"),
    "files": (["a.png", "b.png"], "takes image .* and vec .* Give one file that has all inputs"),
    "folder": (["photos"], "photos does not have all inputs: the model takes image"),
}


@pytest.mark.parametrize(("data", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_the_input_its_type_and_shape(run: modelyard.Run, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run.predict(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.png,low\n", "some.csv:2: the input 'vec' is missing.* given: image"),
        ("path,vec\na.png,word\n", "some.csv:2: 'word' in 'vec' is not a number"),
        ('path,vec\na.png,"[1, 2]"\n', r"some.csv: the input 'vec' is float64 of shape 1×2"),
        ('path,vec\na.png,"[1, 2, 3]"\n', "there is no file .*a.png"),
        ('path,vec\na.png,"[1, 2, 3]"\nb.png,4\n', "values of 'vec' are not numbers of one shape"),
        ("path,vec\n", "holds no rows"),
    ],
)
def test_a_mistake_in_a_table_names_its_line_or_column(
    run: modelyard.Run, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "some.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        run.predict(str(tmp_path / "some.csv"))


def test_labels_in_a_file_are_as_many_as_examples(run: modelyard.Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", **INPUTS, y=NEW_LABELS[:3])
    with pytest.raises(DataError, match=r"some.npz: 20 examples but labels of shape \(3,\)"):
        run.predict(str(tmp_path / "some.npz"))


def test_a_model_without_an_image_takes_its_inputs_by_name(table_home: Path, tmp_path: Path) -> None:
    run, some = modelyard.load(table_home), rows(TABLE, 100, 120)
    found = run.predict((some, NEW_LABELS))
    logits = np.asarray(run.model(some))
    assert found["class"].tolist() == logits.argmax(axis=1).tolist()
    assert run.evaluate((some, NEW_LABELS)).metrics["accuracy"] == pytest.approx(found.scores["accuracy"])
    lines = [f'{age},"{json.dumps(vec)}"' for age, vec in zip(some["age"], some["vec"].tolist(), strict=True)]
    (tmp_path / "some.csv").write_text("\n".join(["age,vec", *lines]) + "\n")
    table = modelyard.predict(table_home, tmp_path / "some.csv", output=tmp_path / "some.jsonl", probabilities=True)
    shown = [json.loads(line)["label"] for line in Path(table.path).read_text().splitlines()]
    assert shown == found["label"].tolist()
    with pytest.raises(DataError, match=r"'age' has values from 0\.5 to 0\.5; the model takes int32: whole numbers"):
        run.predict({"age": 0.5, "vec": [1, 2, 3]})


def test_labels_of_a_regression_are_numbers_in_a_column(tmp_path: Path) -> None:
    values = TABLE["vec"].sum(axis=1)
    home = trained(tmp_path / "run", "age_and_vec", (rows(TABLE, 0, 100), values[:100]))
    run, some = modelyard.load(home), rows(TABLE, 100, 120)
    lines = [
        json.dumps({"age": int(age), "vec": vec.tolist(), "label": float(value)})
        for age, vec, value in zip(some["age"], some["vec"], values[100:], strict=True)
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    expected = run.predict((some, values[100:])).scores
    assert run.predict(str(tmp_path / "some.jsonl")).scores == pytest.approx(expected)


def test_a_data_frame_has_a_column_per_input(table_home: Path) -> None:
    pandas = pytest.importorskip("pandas")
    some = rows(TABLE, 100, 120)
    frame = pandas.DataFrame({"age": some["age"], "vec": list(some["vec"]), "note": "x"})
    run = modelyard.load(table_home)
    assert np.array_equal(run.predict(frame)["class"], run.predict(some)["class"])


def test_a_feature_that_predictions_read_is_an_input_too(tmp_path: Path) -> None:
    run = modelyard.load(trained(tmp_path / "run", "masked"))
    found = run.predict(NEW)
    assert (found["masked"] == 0).tolist() == (NEW["mask"] == 0).tolist()
    with pytest.raises(DataError, match=r"the input 'mask' is missing. The model takes .* and mask \(uint8, 2\)"):
        run.predict(INPUTS)


def test_a_mask_that_the_loss_reads_is_needed_for_evaluation_only(tmp_path: Path) -> None:
    home = trained(tmp_path / "run", "weighted")
    run, measured = modelyard.load(home), modelyard.evaluate(home, split="test").metrics
    assert run.predict(INPUTS)["class"].shape == (20,)
    assert run.evaluate((NEW, NEW_LABELS)).metrics == pytest.approx(measured)
    with pytest.raises(DataError, match=r"the loss or a metric reads mask \(uint8, 2\), which is not given"):
        run.evaluate((INPUTS, NEW_LABELS))


# -- export -----------------------------------------------------------------------------------------------------------

tensorflow_only = pytest.mark.tensorflow_only("exports are made by TensorFlow")
FORMATS = ("saved_model", "keras", "onnx", "tflite")


@pytest.fixture(scope="module")
def exported(home: Path, tmp_path_factory: pytest.TempPathFactory) -> modelyard.Exported:
    """The SavedModel of the run."""
    return modelyard.export(home, output=tmp_path_factory.mktemp("exported") / "models")


def test_an_export_takes_a_tensor_per_name(exported: modelyard.Exported, run: modelyard.Run) -> None:
    assert set(exported.differences) == {"serving_default", "bytes"}
    assert exported.checked_on == "20 examples of test"
    about = json.loads((Path(exported.path) / "modelyard.json").read_text())
    assert about["inputs"] == {
        "image": {"shape": [6, 6, 1], "dtype": "uint8"},
        "vec": {"shape": [3], "dtype": "float32"},
    }
    opened = modelyard.load(exported.path)
    found = opened.predict(INPUTS)
    assert found["probabilities"] == pytest.approx(run.predict(INPUTS)["probabilities"], abs=1e-4)
    with pytest.raises(DataError, match=r"the input 'vec' is missing. The model takes image"):
        opened.predict({"image": IMAGE})
    table = modelyard.predict(exported.path, INPUTS, output="some.csv")
    assert table.examples == 20


@tensorflow_only
def test_signatures_have_the_names_and_files_take_the_other_inputs_along(
    exported: modelyard.Exported, run: modelyard.Run
) -> None:
    import tensorflow as tf

    loaded = tf.saved_model.load(exported.path)
    names = {name: set(each.structured_input_signature[1]) for name, each in loaded.signatures.items()}
    assert names == {
        "serving_default": {"image", "vec"},
        "bytes": {"image_bytes", "vec"},
        "image_with_id": {"image", "vec", "id"},
        "bytes_with_id": {"image_bytes", "vec", "id"},
    }
    files = [tf.io.encode_png(image).numpy() for image in IMAGE]
    ids = [str(number) for number in range(20)]
    vec, texts = tf.constant(VEC), tf.constant(ids)
    found = loaded.signatures["bytes_with_id"](image_bytes=tf.constant(files), vec=vec, id=texts)
    assert found["probabilities"].numpy() == pytest.approx(run.predict(INPUTS)["probabilities"], abs=1e-4)
    assert [each.decode() for each in found["id"].numpy()] == ids


@tensorflow_only
@pytest.mark.parametrize("form", FORMATS[1:])
def test_every_format_takes_all_names(home: Path, run: modelyard.Run, tmp_path: Path, form: Any) -> None:
    if form == "onnx":
        pytest.importorskip("tf2onnx")
        pytest.importorskip("onnxruntime")
    from modelyard.serving.exporting import formats

    done = modelyard.export(home, format=form, output=tmp_path / "models")
    loaded = getattr(formats, f"load_{form}")(Path(done.path))[form]
    found = {name: np.asarray(values) for name, values in loaded(INPUTS).items()}
    assert found["probabilities"] == pytest.approx(run.predict(INPUTS)["probabilities"], abs=1e-4)


@tensorflow_only
def test_a_model_without_an_image_is_exported(
    table_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = modelyard.export(table_home, output=tmp_path / "models")
    assert set(done.differences) == {"serving_default"}
    assert done.checked_on == "random inputs", "a dataset of arrays is not there any more"
    assert "is arrays, which are not given (modelyard.export(RUN, dataset=(x, y))): the export is" in caplog.text
    some = rows(TABLE, 100, 120)
    expected = modelyard.load(table_home).predict(some)
    assert modelyard.load(done.path).predict(some)["class"].tolist() == expected["class"].tolist()


@tensorflow_only
def test_the_check_feeds_every_name(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that ignores the vector is refused."""
    from modelyard.errors import UserError
    from modelyard.serving.exporting.formats import Exportable

    honest = Exportable.predict
    monkeypatch.setattr(Exportable, "predict", lambda self, batch: honest(self, {**batch, "vec": batch["vec"] * 0}))
    with pytest.raises(UserError, match="serving_default differs from the run's own predictions"):
        modelyard.export(home, output=tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


# -- signatures of a task ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def joined_home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A run of a task with signatures of its own, whose exported weights are averages."""
    return trained(tmp_path_factory.mktemp("joined") / "run", "joined", ema_decay=0.8)


@tensorflow_only
def test_a_task_has_signatures_of_its_own(joined_home: Path, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    done = modelyard.export(joined_home, output=tmp_path / "models")
    assert {"joined", "row"} <= set(done.differences)
    assert done.difference < 1e-4
    signatures = tf.saved_model.load(done.path).signatures
    assert set(signatures["row"].structured_input_signature[1]) == {"vec"}
    network = modelyard.load(joined_home).model
    vec = next(tensor for tensor in network.inputs if tensor.name == "vec")
    expected = np.asarray(keras.Model(vec, network.get_layer("row").output)(VEC))
    assert signatures["row"](vec=tf.constant(VEC))["row"].numpy() == pytest.approx(expected, abs=1e-5)
    found = signatures["joined"](image=tf.constant(IMAGE), vec=tf.constant(VEC))["values"].numpy()
    assert found[:, -2:] == pytest.approx(expected, abs=1e-5)
    assert modelyard.load(done.path).predict(INPUTS)["class"].shape == (20,)


@tensorflow_only
def test_a_wrong_signature_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from modelyard.errors import UserError
    from modelyard.models.task import Task

    def untrained(model: keras.Model) -> keras.Model:
        return keras.Model(model.inputs, keras.layers.Dense(2)(model.get_layer("join").output))

    wrong = {
        "has weights that the network has not": lambda model: {"new": untrained(model)},
        "'bytes' of Classifier: the name is that of a standard one": lambda model: {"bytes": model},
        "must be a keras.Model with inputs; it is function": lambda model: {"new": print_nothing},
        "must return a dictionary": lambda model: [model],
    }
    for message, signatures in wrong.items():
        monkeypatch.setattr(Task, "signatures", lambda self, model, made=signatures: made(model))
        with pytest.raises(UserError, match=message):
            modelyard.export(home, output=tmp_path / "models")
        assert not list((tmp_path / "models").iterdir())


def print_nothing(batch: Any) -> Any:
    return batch
