"""`modelyard data check`: the checks of a dataset, and labels that the predictions of a run contradict."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config import resolve
from modelyard.config.schema import TRUST, Config, split_group_of
from modelyard.data.check import CHECKS, CheckReport, Finding, check_dataset, write_findings, write_sheet
from modelyard.data.dataset import TEST, TRAIN, Dataset
from modelyard.data.decoded import raw_examples_of
from modelyard.data.open_dataset import open_dataset, open_stored
from modelyard.data.raw_examples import ExampleSubset, FileExamples
from modelyard.data.sources.files import kind_of
from modelyard.data.sources.folder import files_in, unsupported_format
from modelyard.data.splits import group_numbers, groups_in_two_splits
from modelyard.errors import DataError, unknown
from modelyard.loop.start import differing_classes
from modelyard.reporting.scores import contradicted
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.storage import is_remote
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")


def check_data(
    source: str,
    *,
    run: str | Path | None = None,
    trained_on: bool = False,
    skip: Collection[str] = (),
    output: str | Path | None = None,
    sheet: str | Path | None = None,
    origin: str = "Python",
    **options: Any,
) -> CheckReport:
    """Finds duplicates, images in two splits, labels that are probably wrong, odd images and rare classes.

    Args:
        source: a path or the name of a dataset.
        run: a run folder. Examples whose label its predictions contradict are listed, the most certain first.
        trained_on: also those that the run was trained on. It has learned their labels, so it contradicts few.
        skip: names of checks to leave out, such as ``classes``.
        output: a .csv file to write, with all findings.
        sheet: a PNG file to draw, with pairs side by side.
        origin: where the options come from, for error messages.
        **options: options of the dataset.

    Example:
        >>> modelyard.check_data("photos", sheet="sheet.png").counts
    """
    for name in skip:
        if name not in CHECKS:
            raise DataError(unknown("check", name, CHECKS))
    table, picture = (None if path is None else Path(path).expanduser() for path in (output, sheet))
    for path, ending in ((table, ".csv"), (picture, ".png")):
        if path is not None and path.suffix.lower() != ending:
            raise DataError(f"{path} must end in {ending}.")
        if path is not None and not path.parent.is_dir():
            raise DataError(f"there is no folder {path.parent} for {path.name}.")
    if trained_on and run is None:
        raise DataError("--trained_on needs a run: --run RUN.")
    of_run = {name: options.pop(name) for name in ("engine", TRUST) if options.get(name) is not None}
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    dataset = open_stored(config)
    opened = None if run is None else open_run(run, None, origin, **of_run)
    report = check_dataset(dataset, threads=config.input_threads or available_cores(), skip=skip)
    if "unsupported" not in skip:
        report.findings[:0] = _unsupported(source, dataset)
    if config.split_group is not None and "groups" not in skip:
        group_numbers(dataset, config.split_group)  # the column must exist
        column = split_group_of(config.split_group)[0]
        report.findings += [
            Finding("groups", split, value, other_split=other, other=value, note=column)
            for value, split, other in groups_in_two_splits(dataset, config.split_group)
        ]
    if opened is not None and "mislabelled" not in skip:
        before = [
            finding for finding in report.findings if [*CHECKS].index(finding.check) < [*CHECKS].index("mislabelled")
        ]
        with _without_warnings():  # the data is opened again
            same = _is_data_of(opened, dataset) or (
                opened.config.entry("dataset") == config.entry("dataset")
                and _is_data_of(opened, open_stored(_sized_like(opened, {**options, "dataset": source}, origin)))
            )
        found = _mislabelled(opened, dataset, same, trained_on, report)
        report.findings = [*before, *found, *report.findings[len(before) :]]
    if table is not None:
        write_findings(report, table)
    if picture is not None and any(finding.rows for finding in report.findings):
        write_sheet(report, dataset, picture, source)
    return report


def _unsupported(source: str, dataset: Dataset) -> Iterator[Finding]:
    """Yields image files in folders of classes that are no examples, since they can't be decoded."""
    if is_remote(source) or kind_of(Path(source).expanduser()) != "folder":
        return
    for split, examples in raw_examples_of(dataset).items():
        if not isinstance(examples, FileExamples):
            continue
        for path in files_in(examples.root):
            kind = unsupported_format(path)
            if kind is not None:
                name = path.relative_to(examples.root).as_posix()
                yield Finding("unsupported", split, name, note=f"{kind}: convert it to JPEG")


# -- labels -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Leaves warnings about data out, since they were shown when it was opened first."""

    def is_no_warning(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING

    log.addFilter(is_no_warning)
    try:
        yield
    finally:
        log.removeFilter(is_no_warning)


def _is_data_of(run: OpenRun, dataset: Dataset) -> bool:
    """Returns whether a run was trained on a dataset."""
    return open_stored(run.config).fingerprint() == dataset.fingerprint()


def _sized_like(run: OpenRun, options: Mapping[str, Any], origin: str) -> Config:
    """Returns a config with the image options of a run, which are part of the fingerprint."""
    own = run.config.component_options
    images = {name: own[name] for name in ("image_size", "image_fit", "image_channels") if own.get(name) is not None}
    return resolve({**options, **images}, source=origin, pick_up_files=False)


def _mislabelled(run: OpenRun, dataset: Dataset, same: bool, trained_on: bool, report: CheckReport) -> list[Finding]:
    """Returns examples whose label the run contradicts with confidence, the most certain first."""
    difference = differing_classes([*map(str, dataset.classes)], [*map(str, run.classes)])
    if difference is not None:
        raise DataError(f"the data has other classes than {run.address}: {difference}. Give a run of this dataset.")
    unreadable = {(finding.split, *finding.rows) for finding in report.of("unreadable")}
    places: list[tuple[str, int]] = []
    unseen: list[bool] = []
    for split, rows, is_unseen in _parts(run, dataset, same, report):
        if is_unseen or trained_on:
            readable = [(split, row) for row in rows.tolist() if (split, row) not in unreadable]
            places += readable
            unseen += [is_unseen] * len(readable)
    if not places:
        report.notes.append("labels were not compared: the run was trained on all examples (--trained_on takes them)")
        return []
    splits = raw_examples_of(dataset)
    labels, probabilities = _predicted(run, dataset, places)
    chosen = probabilities.argmax(axis=1)
    own = probabilities[np.arange(len(labels)), labels]
    best = probabilities[np.arange(len(labels)), chosen]
    found = []
    for number in contradicted(labels, probabilities):
        split, row = places[number]
        note = f"predicted {dataset.classes[chosen[number]]} ({best[number]:.0%})"
        note += "" if unseen[number] else ", and trained on"
        found.append(
            Finding(
                "mislabelled", split, splits[split].name(row), dataset.classes[labels[number]],
                other_label=dataset.classes[chosen[number]], score=round(float(best[number] - own[number]), 4),
                note=note, rows=(row,),
            )
        )  # fmt: skip
    return found


def _parts(
    run: OpenRun, dataset: Dataset, same: bool, report: CheckReport
) -> Iterator[tuple[str, NDArray[np.int64], bool]]:
    """Yields rows of the splits as they are stored, and whether the run was not trained on them."""
    with _without_warnings():
        own = open_dataset(run.config)
    derived = own.derived.rows if own.derived is not None else {}
    if not same:
        report.notes.append(
            f"{run.address} was trained on other data, {run.config.dataset}. What is also in there was trained on"
        )
    for split, size in dataset.sizes().items():
        if same and split == TRAIN and derived:
            for part in derived:
                yield split, own.stored_rows(part), part != TRAIN
        else:
            yield split, np.arange(size), not same or split != TRAIN
    if same:
        seen = len(derived[TRAIN]) if derived else own.size(TRAIN)
        report.notes.append(f"the run was trained on {seen:,} of the examples; a model repeats the labels it has seen")


def _predicted(
    run: OpenRun, dataset: Dataset, places: list[tuple[str, int]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns labels and probabilities of examples."""
    labels, probabilities = [], []
    splits = raw_examples_of(dataset)
    for split in dict.fromkeys(split for split, _ in places):
        rows = np.array([row for named, row in places if named == split])
        examples = ExampleSubset(splits[split], rows)
        if examples.label_kind != "class":
            raise DataError("labels are compared with predictions of classes only; those of this dataset are none.")
        engine, _ = run.engine(examples, labelled=True, skip_bad=True)
        try:
            for outputs in engine.predict(TEST):
                probabilities.append(np.asarray(outputs["probabilities"], np.float64))
        finally:
            engine.close()
        labels.append(np.asarray(examples.labels, np.int64))
    return np.concatenate(labels), np.concatenate(probabilities)
