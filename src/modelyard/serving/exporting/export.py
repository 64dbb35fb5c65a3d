"""`modelyard export`: writes a run's model for other programs, in numbered folders, and checks its predictions."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelyard import storage
from modelyard.config.backend import INSTALL, is_installed, keras_backend, select_engine
from modelyard.data.dataset import IMAGE
from modelyard.errors import RunError, UserError, unknown
from modelyard.reporting.card import CARD, model_card
from modelyard.reporting.folder import read_run_facts
from modelyard.run.directory import RunDirectory
from modelyard.serving.exporting import check
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.system.files import PARTIAL, explain, remove_partial, whole_folder, write_text

if TYPE_CHECKING:
    from modelyard.serving.exporting.formats import Exportable

log = logging.getLogger("modelyard")
Format = Literal["saved_model", "keras", "onnx", "tflite"]
FORMATS = ("saved_model", "keras", "onnx", "tflite")
_LAST = ("modelyard.json", "saved_model.pb", "model.keras", "model.onnx", "model.tflite")
"""The files of an export without which it is incomplete."""
_ONNX_PACKAGES = ("tf2onnx", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Exported:
    """An export.

    Args:
        path: its folder.
        version: the number of the folder.
        format: saved_model, keras, onnx or tflite.
        step: the step of the model.
        difference: the largest difference of its predictions from the run's own, over all signatures.
        differences: the same for each signature.
        checked_on: the examples that they were compared on.
    """

    path: str
    version: int
    format: str
    step: int
    difference: float
    differences: dict[str, float]
    checked_on: str


def export(
    model_dir: str | os.PathLike[str],
    *,
    checkpoint: str | int | None = None,
    format: Format = "saved_model",  # noqa: A002 - the name of the option
    output: str | Path | None = None,
    version: int | None = None,
    overwrite: bool = False,
    source: str = "Python",
    **options: Any,
) -> Exported:
    """Writes the model of a run for other programs, and compares its predictions with the run's own.

    MODEL_CARD.md beside the model says what it is and how good.

    Args:
        model_dir: the run folder, or the result of the run.
        checkpoint: best, latest or a step; by default best if there is one.
        format: saved_model, keras, onnx or tflite.
        output: the folder for numbered versions, or its URL; by default one in the run folder.
        version: the number of the new version; by default the next one.
        overwrite: replace that version if it exists; without a number, the newest.
        source: where the options come from, for error messages.
        **options: paths that differ from training: data_dir, cache_dir, plugins; and trust.

    Raises:
        UserError: if there is no such model, the format can't hold it, or the export predicts something else.

    Example:
        >>> modelyard.export("runs/first").path
        'runs/first/export/1'
    """
    if format not in FORMATS:
        raise UserError(unknown("format", str(format), FORMATS))
    check_installed(format)
    if keras_backend() in (None, "tensorflow"):
        options["engine"] = "tensorflow"  # before the run's plugins are imported, which import Keras
    run = open_run(os.fspath(model_dir), checkpoint, source, **options)
    where = export_address(run.directory, format, None if output is None else str(output))
    if storage.is_remote(where):
        return _export_to_url(run, format, where, version, overwrite, options)
    base = export_folder(where)
    with cleaned_up(base):
        number = choose_version(base, version, overwrite)
        if keras_backend() not in (None, "tensorflow"):
            changed = {"output": str(base), "version": version, "overwrite": overwrite, **options}
            changed["trust"] = True  # the run's plugins were trusted here; that process has not imported them yet
            return export_in_subprocess(run.address, checkpoint=run.step, format=format, **changed)
        return _export(run, format, base / str(number), overwrite, options)


def export_in_subprocess(model_dir: str | Path, **arguments: Any) -> Exported:
    """Exports like `export`, in a new process, which can use TensorFlow whatever this one did with it."""
    exported: Exported = check.call_in_subprocess("tensorflow", export, model_dir=str(model_dir), **arguments)
    return exported


def _export_to_url(
    run: OpenRun, form: Format, url: str, version: int | None, overwrite: bool, options: dict[str, Any]
) -> Exported:
    """Exports to a folder of the cache, and uploads it. The files that make an export complete come last."""
    number = _choose(exported_versions_at(url), url, version, overwrite)
    target = storage.join(url, str(number))
    base = storage.output_folder(url, storage.cache_folder(run.config.cache_dir))
    with explain(base, "write to the cache"):
        base.mkdir(parents=True, exist_ok=True)
    with cleaned_up(base):
        here = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=base))
        try:
            if keras_backend() in (None, "tensorflow"):
                done = _export(run, form, here / str(number), overwrite, options)
            else:
                changed = {"output": str(here), "version": number, **options, "trust": True}
                done = export_in_subprocess(run.address, checkpoint=run.step, format=form, **changed)
            if not overwrite and number in exported_versions_at(url):
                raise RunError(f"{target} was written by another process meanwhile. Export again.")
            storage.upload_folder(Path(done.path), target, last=_LAST)
        finally:
            shutil.rmtree(here, ignore_errors=True)
    return replace(done, path=target)


def _export(run: OpenRun, form: Format, target: Path, overwrite: bool, options: dict[str, Any]) -> Exported:
    select_engine("tensorflow")
    from modelyard.serving.exported_model import write_description
    from modelyard.serving.exporting.formats import Exportable

    run = replace(run, config=run.config.model_copy(update={**check.EXACT, "engine": "tensorflow"}))
    model = Exportable(run)
    examples = check.check_examples(model)
    expected = check.expected_predictions(model, examples, options)
    model.engine.use_averages_as_weights()
    if not model.takes_files and form == "saved_model":
        log.warning("the export takes tensors only, not image files: %s", _why_no_files(model))
    own = {}
    if form == "saved_model":
        own = {name: signature.expected(examples.inputs) for name, signature in model.own_signatures.items()}
    write, load = _format_functions(form)
    with whole_folder(target) as folder:
        write(model, folder)
        write_description(folder, model, form, int(target.name))
        facts = read_run_facts(run.directory, run.config)
        write_text(folder / CARD, model_card(facts, run.step, model.task_type, IMAGE in model.inputs, form))
        differences = check.compare_all(load(folder), examples, expected, own)
        if target.exists() and not overwrite:
            raise RunError(f"{target} was written by another process meanwhile. Export again.")
    model.engine.close()
    largest = max(differences.values())
    return Exported(str(target), int(target.name), form, run.step, largest, differences, examples.origin)


def _format_functions(form: Format) -> tuple[Callable[[Exportable, Path], None], Callable[[Path], dict[str, Any]]]:
    """Returns the functions that write a format, and load it again as predictors by signature."""
    from modelyard.serving.exporting import formats

    return {
        "saved_model": (formats.write_saved_model, formats.load_saved_model),
        "keras": (formats.write_keras, formats.load_keras),
        "onnx": (formats.write_onnx, formats.load_onnx),
        "tflite": (formats.write_tflite, formats.load_tflite),
    }[form]


def check_installed(form: str) -> None:
    """Checks that the packages of a format are installed.

    Raises:
        UserError: with how to install them.
    """
    if not is_installed("tensorflow"):
        raise UserError(f"exports need TensorFlow, also those of JAX runs. Install it: {INSTALL['tensorflow']}")
    missing = [name for name in _ONNX_PACKAGES if form == "onnx" and not is_installed(name)]
    if missing:
        raise UserError(f"--format onnx needs {', '.join(missing)}. Install it: pip install 'modelyard[onnx]'")


def _why_no_files(model: Exportable) -> str:
    if model.dataset.stored is not model.dataset:
        return "this run preprocesses examples with its own NumPy code, which can't be exported"
    if IMAGE not in model.inputs:
        return "the model takes no image"
    return f"examples of shape {'×'.join(map(str, model.image.shape))} are not grey or colour images"


# -- numbered folders, as TensorFlow Serving expects them -------------------------------------------------------------


def export_address(directory: RunDirectory, form: str, output: str | None = None) -> str:
    """Returns the folder of the versions, or its URL: ``output``, or one in the run folder."""
    return directory.address_of(directory.export(form)) if output is None else output


def export_folder(path: str) -> Path:
    """Returns the folder of the versions, which is made if needed.

    Raises:
        RunError: if it can't be written to.
    """
    base = Path(path).expanduser()
    if base.exists() and not base.is_dir():
        raise RunError(f"{base} is a file; exports need a folder. Name another one: --output FOLDER.")
    _refuse_unexpected(str(base), _unexpected_files(base))
    with explain(base, "make the folder"):
        base.mkdir(parents=True, exist_ok=True)
        if not os.access(base, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    return base


def _refuse_unexpected(base: str, unexpected: Sequence[str]) -> None:
    if unexpected:
        raise RunError(
            f"{base} holds other things than exports ({', '.join(unexpected[:3])}); nothing was changed. "
            "Name another folder: --output FOLDER."
        )


@contextlib.contextmanager
def cleaned_up(base: Path) -> Iterator[None]:
    """Cleans up after a killed export before the block runs; a version that it had moved away is restored.

    Several exports may write into one folder at once: each holds a shared lock, and only one that is alone cleans up.
    """
    with explain(base, "read"):
        handle = os.open(base, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # others hold it; or the file system has no locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_partial(base)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def choose_version(base: Path, version: int | None, overwrite: bool) -> int:
    """Returns the number of the new version: ``version``, else the next one, or the newest with ``overwrite``.

    Raises:
        RunError: if that version exists and ``overwrite`` is false.
    """
    return _choose(exported_versions(base), str(base), version, overwrite)


def _choose(existing: Sequence[int], base: str, version: int | None, overwrite: bool) -> int:
    if version is None:
        return max(existing, default=1) if overwrite else max(existing, default=0) + 1
    if version < 1:
        raise RunError(f"--version must be 1 or more; it is {version}.")
    if version in existing and not overwrite:
        path = storage.inside(base, str(version))
        raise RunError(f"{path} exists and was not changed. Add --overwrite, or leave --version out.")
    return version


def exported_versions_at(url: str) -> list[int]:
    """Returns the version numbers below a URL, oldest first, with incomplete ones.

    Raises:
        RunError: if there is anything else.
    """
    names = {name.partition("/")[0] for name in storage.names_below(url)}
    _refuse_unexpected(url, sorted(name for name in names if not _is_number(name)))
    return sorted(map(int, names))


def exported_versions(base: Path) -> list[int]:
    """Returns the version numbers in a folder, oldest first."""
    if not base.is_dir():
        return []
    return sorted(int(path.name) for path in base.iterdir() if _is_number(path.name))


def _unexpected_files(base: Path) -> list[str]:
    if not base.is_dir():
        return []
    with explain(base, "read"):
        names = sorted(path.name for path in base.iterdir())
    return [name for name in names if not _is_number(name) and not name.startswith(PARTIAL)]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()
