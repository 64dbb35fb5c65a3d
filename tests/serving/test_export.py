"""An export predicts what its run predicts, or it is not there."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import modelyard
from conftest import engine_name, environment
from modelyard.errors import CheckpointError, RunError, UserError
from photos import photo, photo_folder
from waiting import PATIENCE

FORMATS = ("saved_model", "keras", "onnx", "tflite")
OPTIONS: dict[str, Any] = {"model": "tiny_norm", "train_steps": 6, "train_batch_size": 8, "learning_rate": 0.01}
tensorflow_only = pytest.mark.tensorflow_only("exports are made by TensorFlow; JAX runs have a test of their own")


def trained(folder: Path, **options: Any) -> Path:
    """A small run."""
    modelyard.train_and_evaluate(**{**OPTIONS, "engine": engine_name(), "model_dir": str(folder), **options})
    return folder


@pytest.fixture(scope="module")
def photos_run(two_devices: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on colour photographs of several sizes."""
    place = tmp_path_factory.mktemp("photos")
    return trained(place / "run", dataset=str(photo_folder(place / "photos", 24)), image_size=16)


@pytest.fixture(scope="module")
def saved(photos_run: Path, tmp_path_factory: pytest.TempPathFactory) -> modelyard.Exported:
    """Its SavedModel."""
    return modelyard.export(photos_run, output=tmp_path_factory.mktemp("saved") / "models")


@pytest.fixture
def run(photos_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(photos_run, tmp_path / "run"))


def of_the_run(run: Path, images: list[Any]) -> dict[str, NDArray[Any]]:
    """What the run itself predicts for stored images."""
    from modelyard.data.dataset import IMAGE
    from modelyard.serving.run_model import open_run

    opened = open_run(run)
    engine, _ = opened.engine()
    spec = opened.recorded_data().image
    batch = np.empty((len(images), *spec.shape), spec.dtype)
    for place, image in enumerate(images):
        spec.write(image, batch[place], lambda: "an image")
    return {name: np.asarray(value) for name, value in engine.predict_batch({IMAGE: batch}).items()}


def file_of(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@tensorflow_only
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_predicts_what_the_run_predicts(
    photos_run: Path, saved: modelyard.Exported, tmp_path: Path, form: Any
) -> None:
    if form == "onnx":
        pytest.importorskip("tf2onnx")
        pytest.importorskip("onnxruntime")
    done = saved if form == "saved_model" else modelyard.export(photos_run, format=form, output=tmp_path / "models")
    assert done.version == 1
    assert Path(done.path).parts[-2:] == ("models", "1")
    ways = {"saved_model": {"serving_default", "bytes", "examples"}}.get(form, {form})
    assert set(done.differences) == ways
    assert done.difference == max(done.differences.values()) <= 1e-4
    about = json.loads((Path(done.path) / "modelyard.json").read_text())
    assert about["format"] == form
    assert about["classes"] == ["cat", "dog", "emu"]
    assert about["image"] == {"shape": [16, 16, 3], "dtype": "uint8"}
    assert about["kind"] == "classification"
    assert about["outputs"] == ["class", "probabilities"]
    card = (Path(done.path) / "MODEL_CARD.md").read_text()
    assert card.startswith("---\nlibrary_name: keras\n")
    assert f"The format is {form.replace('_', chr(92) + '_')}." in card
    assert 0 <= about["metrics"]["accuracy"] <= 1


PLAIN = """
import json, sys
sys.modules["modelyard"] = None  # whoever asks for it fails
import numpy as np
import tensorflow as tf

folder, files = sys.argv[1], [open(path, "rb").read() for path in sys.argv[3:]]
served = tf.saved_model.load(folder).signatures
feature = lambda *v: tf.train.Feature(bytes_list=tf.train.BytesList(value=v))
examples = [
    tf.train.Example(features=tf.train.Features(feature={"image/encoded": feature(f), "id": feature(b"no %d" % i)}))
    for i, f in enumerate(files)
]
answers = {
    "bytes": served["bytes"](image_bytes=tf.constant(files)),
    "bytes_with_id": served["bytes_with_id"](image_bytes=tf.constant(files), id=tf.constant(["a"] * len(files))),
    "examples": served["examples"](examples=tf.constant([e.SerializeToString() for e in examples])),
}
import keras
loaded = keras.models.load_model(sys.argv[2])
answers["keras"] = loaded(np.zeros((2, 16, 16, 3), np.uint8))
plain = lambda v: [x.decode() if isinstance(x, bytes) else x for x in v.numpy().tolist()]
print(json.dumps({name: {key: plain(value) for key, value in found.items()} for name, found in answers.items()}))
"""


@tensorflow_only
@pytest.mark.slow
def test_plain_tensorflow_serves_it_in_a_fresh_process_without_modelyard(
    photos_run: Path, saved: modelyard.Exported, tmp_path: Path
) -> None:
    picture = Image.fromarray(photo(5, 61, 83))
    # Other colour modes and sizes than those of the training images are converted as in training.
    files = [
        file_of(picture, "JPEG"),
        file_of(picture.convert("L"), "PNG"),
        file_of(picture.convert("RGBA"), "PNG"),
        file_of(picture.convert("L"), "JPEG"),
    ]
    for number, data in enumerate(files):
        Path(f"{number}.image").write_bytes(data)
    whole = modelyard.export(photos_run, format="keras", output=tmp_path / "keras")
    words = [saved.path, f"{whole.path}/model.keras", *(f"{number}.image" for number in range(len(files)))]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *words],
        env=environment(PYTHONPATH="", KERAS_BACKEND="tensorflow"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    expected = of_the_run(photos_run, files)
    for name in ("bytes", "bytes_with_id", "examples"):
        assert np.abs(np.array(answers[name]["probabilities"]) - expected["probabilities"]).max() <= 1e-4
        assert answers[name]["class"] == expected["class"].tolist()
        assert answers[name]["label"] == [("cat", "dog", "emu")[number] for number in expected["class"]]
    assert answers["examples"]["id"] == ["no 0", "no 1", "no 2", "no 3"]
    assert answers["bytes_with_id"]["id"] == ["a"] * 4
    assert np.sum(answers["keras"]["probabilities"], axis=1) == pytest.approx([1, 1])
    assert (Path(saved.path) / "assets" / "labels.txt").read_text() == "cat\ndog\nemu\n"


@tensorflow_only
def test_predict_takes_an_export_and_writes_the_table_of_the_run(
    photos_run: Path, saved: modelyard.Exported, tmp_path: Path
) -> None:
    photos = photo_folder(tmp_path / "new", 9)
    of_run = modelyard.predict(photos_run, photos, output="run.csv", top=2, probabilities=True)
    of_export = modelyard.predict(Path(saved.path).parent, photos, output="export.csv", top=2, probabilities=True)
    assert Path("run.csv").read_bytes() == Path("export.csv").read_bytes()
    assert of_run.scores == {**of_export.scores, "loss": of_run.metrics["loss"]}, "an export has no loss"
    with pytest.raises(UserError, match="is an export: it has no --split"):
        modelyard.predict(saved.path, split="test")
    with pytest.raises(UserError, match="has no effect here"):
        modelyard.predict(saved.path, photos, output="other.csv", train_steps=3)


@tensorflow_only
def test_versions_are_numbered_and_what_exists_is_left_alone(run: Path) -> None:
    first, second = (modelyard.export(run, format="keras") for _ in range(2))
    assert [first.path, second.path] == [str(run / "export-keras" / number) for number in "12"]
    with pytest.raises(RunError, match="exists and was not changed"):
        modelyard.export(run, format="keras", version=1)
    mark = run / "export-keras" / "2" / "mine"
    mark.touch()
    assert modelyard.export(run, format="keras", overwrite=True).version == 2
    assert not mark.exists()
    assert modelyard.export(run, format="keras", version=7).version == 7
    assert sorted(path.name for path in (run / "export-keras").iterdir()) == ["1", "2", "7"]


@tensorflow_only
@pytest.mark.slow
def test_what_predicts_something_else_is_refused_and_nothing_is_left(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.serving.exporting import formats

    real = formats.image_decoder

    def mirrored(*words: Any) -> Callable[[Any], Any]:
        decode = real(*words)
        return lambda data: decode(data)[:, ::-1]

    monkeypatch.setattr(formats, "image_decoder", mirrored)
    with pytest.raises(UserError, match=r"refused: .* of bytes differs from the run's own predictions by"):
        modelyard.export(run)
    assert list((run / "export").iterdir()) == []


@tensorflow_only
def test_a_place_that_can_not_be_written_to_is_told(run: Path) -> None:
    Path("file").touch()
    with pytest.raises(RunError, match="is a file"):
        modelyard.export(run, output="file")
    with pytest.raises(RunError, match="can't make the folder"):
        modelyard.export(run, output="file/folder")
    Path("other").mkdir()
    Path("other/notes.txt").touch()
    with pytest.raises(RunError, match=r"holds other things than exports \(notes.txt\)"):
        modelyard.export(run, output="other")
    with pytest.raises(UserError, match="there is no format 'savedmodel'"):
        modelyard.export(run, format="savedmodel")  # type: ignore[arg-type]


@tensorflow_only
def test_a_run_without_a_checkpoint_is_told(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "best")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*: nothing was saved yet"):
        modelyard.export(run)
    assert not (run / "export").exists()


@tensorflow_only
@pytest.mark.slow
def test_averages_of_the_weights_are_what_is_exported(two_devices: None, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", dataset="digits", ema_decay=0.9)
    for form in ("keras", "tflite"):
        assert modelyard.export(run, format=form).difference <= 1e-4


@tensorflow_only
@pytest.mark.slow
def test_grey_floats_and_views_of_each_image_are_inside(two_devices: None, tmp_path: Path) -> None:
    """As Fashion-MNIST, with pixels from 0 to 1; and with test-time augmentation."""
    random = np.random.default_rng(0)
    images = random.random((60, 12, 12, 1)).astype(np.float32)
    np.savez("grey.npz", x_train=images, y_train=random.integers(0, 3, 60))
    run = trained(tmp_path / "run", dataset="grey.npz", test_time_augmentation="flip,shift")
    for form in ("saved_model", "keras"):
        assert modelyard.export(run, format=form).difference <= 1e-4  # type: ignore[arg-type]


@tensorflow_only
@pytest.mark.parametrize("kind", ["regression", pytest.param("multi_label", marks=pytest.mark.slow)])
def test_other_tasks_give_what_they_predict(two_devices: None, tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 8, 8, 1), np.uint8)
    labels = images.mean((1, 2, 3)) * 1000 if kind == "regression" else random.integers(0, 2, (40, 4))
    np.savez("data.npz", x_train=images, y_train=labels.astype(np.float32) if kind == "regression" else labels)
    run = trained(tmp_path / "run", dataset="data.npz")
    outputs = ["values"] if kind == "regression" else ["labels", "probabilities"]
    done = modelyard.export(run, format="keras" if kind == "regression" else "saved_model")
    about = json.loads((Path(done.path) / "modelyard.json").read_text())
    assert (about["kind"], about["outputs"]) == (kind, outputs)


@tensorflow_only
@pytest.mark.slow
def test_own_preprocessing_of_batches_is_inside_and_of_examples_comes_before(
    two_devices: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("own.py").write_text(
        "import modelyard\n"
        "from keras import ops\n"
        "@modelyard.register_preprocessing('darker')\n"
        "class Darker:\n"
        "    def __init__(self, options): pass\n"
        "    def batch(self, batch, training): return {**batch, 'image': ops.cast(batch['image'], 'float32') / 3}\n"
        "@modelyard.register_preprocessing('smaller')\n"
        "class Smaller:\n"
        "    def __init__(self, options): pass\n"
        "    def example(self, example, training): return {**example, 'image': example['image'][::2, ::2]}\n"
    )
    options = {"dataset": "digits", "plugins": "own.py", "model": "mlp"}
    run = trained(tmp_path / "batch", **options, preprocess="darker")
    assert modelyard.export(run, format="tflite").difference <= 1e-4
    with pytest.raises(UserError, match="preprocesses batches with its own code"):
        modelyard.export(run, format="keras")
    run = trained(tmp_path / "example", **options, preprocess="smaller")
    done = modelyard.export(run)
    assert list(done.differences) == ["serving_default"]
    assert "preprocesses examples with its own NumPy code" in caplog.text
    assert json.loads((Path(done.path) / "modelyard.json").read_text())["image"]["shape"] == [4, 4, 1]


@tensorflow_only
@pytest.mark.slow
def test_without_its_data_a_run_is_checked_on_random_images(
    two_devices: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos = photo_folder(tmp_path / "photos", 12)
    run = trained(tmp_path / "run", dataset=str(photos), image_size=16, validation_fraction=0.25)
    shutil.rmtree(photos)
    assert modelyard.export(run, format="tflite").checked_on == "random images"
    assert "the export is checked on random images" in caplog.text


@tensorflow_only
def test_a_tf_example_may_hold_pixels_as_convert_writes_them(photos_run: Path, saved: modelyard.Exported) -> None:
    import tensorflow as tf

    from modelyard.data.records.example import encode_example

    pixels = np.stack([photo(number, 16, 16) for number in range(3)])
    records = [
        encode_example({"image/encoded": p.tobytes(), "image/format": b"raw", "image/height": 16}) for p in pixels
    ]
    loaded = tf.saved_model.load(saved.path)
    found = loaded.signatures["examples"](examples=tf.constant(records))
    expected = of_the_run(photos_run, list(pixels))
    assert np.abs(found["probabilities"].numpy() - expected["probabilities"]).max() <= 1e-4
    assert found["id"].numpy().tolist() == [b"", b"", b""]


@tensorflow_only
@pytest.mark.slow
def test_a_run_on_jax_is_compared_with_what_jax_predicts(
    two_devices: None, tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.serving.exporting import check
    from modelyard.serving.exporting import export as module

    pytest.importorskip("jax")
    words = ["--model", "mlp", "--dataset", "digits", "--train_steps", "4", "--model_dir", "run", "--engine", "jax"]
    command("train", *words)
    asked: list[str] = []
    real = check.predict_in_subprocess

    def watched(run: Any, engine: str, *rest: Any) -> Any:
        asked.append(engine)
        return real(run, engine, *rest)

    monkeypatch.setattr(check, "predict_in_subprocess", watched)
    assert module.export("run", format="keras").difference <= 1e-4
    assert asked == ["jax"]


@pytest.mark.jax_only("the process has Keras on JAX")
def test_where_keras_runs_on_jax_another_process_exports(two_devices: None, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", dataset="digits", model="mlp")
    (run / "export" / "1").mkdir(parents=True)
    with pytest.raises(RunError, match="exists and was not changed"):
        modelyard.export(run, version=1)
    done = modelyard.export(run)
    assert done.version == 2
    assert set(done.differences) == {"serving_default", "bytes", "examples"}
    assert done.difference <= 1e-4


@pytest.mark.slow
def test_the_command_prints_where_the_export_is(photos_run: Path, command: Callable[..., Any]) -> None:
    plugins = str(Path(__file__).parents[1] / "parts.py")
    words = ["--format", "tflite", "--checkpoint", "latest", "--plugins", plugins, "--output", "lite"]
    shown = command("export", str(photos_run), *words, TF_CPP_MIN_LOG_LEVEL="2")
    assert "Created TensorFlow Lite" not in shown.stderr
    assert "tflite of step 6: lite/1" in shown.stdout
    assert "largest difference on 3 examples of validation: tflite" in shown.stdout
    assert Path("lite/1/model.tflite").is_file()
    refused = command("export", str(photos_run), "--checkpoint", "5", "--plugins", plugins, code=None)
    assert refused.returncode != 0
    assert "there is no checkpoint '5'" in refused.stderr


@tensorflow_only
def test_a_program_that_loads_an_export_sees_no_lines_of_tensorflow_about_itself(saved: modelyard.Exported) -> None:
    inherited = {name: value for name, value in environment().items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    program = "import numpy, modelyard; modelyard.load({!r}).predict(numpy.zeros((1, 16, 16, 3), numpy.uint8))"
    done = subprocess.run(
        [sys.executable, "-c", program.format(str(saved.path))],
        env=inherited, capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert done.stderr == ""


def test_lines_of_tensorflow_about_itself_are_dropped_and_others_kept(capfd: pytest.CaptureFixture[str]) -> None:
    from modelyard.config.backend import quiet_engine

    with quiet_engine():
        os.write(2, b"E0000 00:00:1.2 24207 util.cc:131] oneDNN supports DT_INT32 only on platforms with AVX-512.\n")
        os.write(2, b"INFO: Created TensorFlow Lite XNNPACK delegate for CPU.\n")
        os.write(2, b"E0000 00:00:1.2 24207 cuda.cc:1] out of memory\n")
    assert capfd.readouterr().err == "E0000 00:00:1.2 24207 cuda.cc:1] out of memory\n"


@tensorflow_only
def test_layers_that_a_keras_file_can_not_hold_are_told_by_name(two_devices: None, tmp_path: Path) -> None:
    Path("twice.py").write_text(
        "import keras, modelyard\n"
        "class Twice(keras.layers.Layer):\n"
        "    def call(self, x): return 2 * x\n"
        "@modelyard.register_model('twice')\n"
        "def twice(data, options):\n"
        "    inputs, x = modelyard.image_input(data)\n"
        "    x = Twice(name='double')(keras.layers.Flatten(name='flat')(x))\n"
        "    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name='logits')(x))\n"
    )
    run = trained(tmp_path / "own", dataset="digits", plugins="twice.py", model="twice")
    with pytest.raises(UserError, match=r"Twice, of the layer 'double', is not registered"):
        modelyard.export(run, format="keras")


@tensorflow_only
def test_a_saved_model_inside_is_no_part_of_a_keras_file(two_devices: None, tmp_path: Path) -> None:
    import tensorflow as tf

    features = tf.Module()
    spec = tf.TensorSpec([None, 8, 8, 3], tf.float32)
    features.call = tf.function(lambda x: tf.reduce_mean(x, [1, 2]), input_signature=[spec])
    tf.saved_model.save(features, str(tmp_path / "features"), {"serving_default": features.call})
    options = {"model": "saved_model", "saved_model_path": str(tmp_path / "features"), "dataset": "digits"}
    run = trained(tmp_path / "hub", **options)
    with pytest.raises(UserError, match=r"its layer 'features' is not made of Keras operations"):
        modelyard.export(run, format="keras")
    assert not list((run / "export-keras").iterdir())
