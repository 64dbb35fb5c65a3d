"""Checks what a dataset contains: duplicates, images in two splits, labels that differ, odd images, rare classes.

`inspection.verify_data` finds what is damaged. This finds what can be read and makes training or its metrics worse.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import SPLITS, TRAIN, Dataset
from modelyard.data.decoded import raw_examples_of
from modelyard.data.images import decode, resize, small
from modelyard.data.near_duplicates import EDGE, GREY, THUMB, find_candidates, is_grey, similarity, thumbnails
from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.sheet import TILE, Row, sheet, to_png
from modelyard.errors import DataError, counted
from modelyard.system.console import bar
from modelyard.system.files import explain, whole_file

CHECKS = {
    "unreadable": "can't be read",
    "unsupported": "images of an unsupported format, which are left out",
    "leaks": "the same image in two splits",
    "near_leaks": "nearly the same image in two splits",
    "duplicates": "the same image twice in a split",
    "near_duplicates": "nearly the same image twice in a split",
    "label_conflicts": "(nearly) the same image with another label",
    "mislabelled": "probably another class",
    "constant": "all pixels are equal",
    "color": "grey among color images, or color among grey",
    "size": "much smaller or larger than the others",
    "aspect_ratio": "much wider or taller than the others",
    "classes": "class without examples, or with few",
    "folders": "folders that are probably not classes",
    "groups": "the same group in two splits (--split_group)",
}
"""What is checked, in words."""

_BATCH = 64
_SMALLEST_MOVED = 24  # pixels: in smaller images a part looks like many others
_FEW = 10  # a class with fewer than a tenth of the examples of the largest is rare
_MOST_OF = 0.8  # of all images: the others are odd
_ODD_SIZE, _ODD_SHAPE = 16, 2.5  # times the median area and aspect ratio
_SAME_PIXELS = 3  # a constant JPEG is not quite constant
_PICTURES = {"image", "images", "img", "imgs", "photos", "pictures", "input", "inputs"}
_MASKS = {"mask", "masks", "annotation", "annotations", "segmentation", "segmentations", "label", "labels", "gt",
          "ground_truth", "groundtruth", "target", "targets"}  # fmt: skip
_SHEET_ROWS = 60


@dataclass(frozen=True)
class Finding:
    """One thing that is probably wrong.

    Args:
        check: a name in `CHECKS`.
        split: the split of the example.
        example: its name; of a class, the name of the class.
        label: its label.
        other_split: the split of the other example of a pair.
        other: the name of the other example, or of the class that it probably is.
        other_label: the label of the other example.
        score: similarity of a pair, or confidence, up to 1.
        note: what was found, in words.
        rows: the rows of the examples in their splits.
    """

    check: str
    split: str
    example: str
    label: str = ""
    other_split: str = ""
    other: str = ""
    other_label: str = ""
    score: float | None = None
    note: str = ""
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = f"{self.split}: {self.example}" if self.split else self.example
        text = f"{name} ({self.label})" if self.label else name
        if self.other:
            other = f"{self.other_split}: {self.other}" if self.other_split != self.split else self.other
            text += f" = {other}" + (f" ({self.other_label})" if self.other_label else "")
        return f"{text}, {self.note}" if self.note else text


@dataclass
class CheckReport:
    """The result of `check_data`.

    Args:
        examples: the number of examples of each split.
        findings: everything that is probably wrong, by check; within a check, what is most certain first.
        notes: what was not checked, and why.
    """

    examples: dict[str, int]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many findings each check has, of those that have any."""
        counts = Counter(finding.check for finding in self.findings)
        return {check: counts[check] for check in CHECKS if check in counts}

    def of(self, check: str) -> list[Finding]:
        """Returns the findings of a check."""
        return [finding for finding in self.findings if finding.check == check]

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**asdict(self), "counts": self.counts}


def check_dataset(dataset: Dataset, *, threads: int = 1, skip: Collection[str] = ()) -> CheckReport:
    """Checks all examples of a dataset.

    Args:
        dataset: the dataset as it is stored.
        threads: the number of threads that decode and compare.
        skip: names in `CHECKS` to leave out.
    """
    stored = raw_examples_of(dataset)
    splits = {name: stored[name] for name in sorted(stored, key=lambda name: (*SPLITS, name).index(name))}
    report = CheckReport({name: len(examples) for name, examples in splits.items()})
    scan = _Scan(splits, dataset.classes, threads)
    found: list[Finding] = []
    if not set(CHECKS) - {"classes", "folders", "mislabelled"} <= set(skip):
        with bar("reading", scan.size) as progress:
            scan.read(progress)
        found += [scan.finding("unreadable", at, note=problem) for at, problem in sorted(scan.problems.items())]
        found += _duplicates(scan)
        if not {"near_leaks", "near_duplicates", "label_conflicts"} <= set(skip):
            found += _near_duplicates(scan, report)
        found += [*_odd_images(scan)]
        if not scan.has_images.any():
            report.notes.append("the examples are not images: only equal examples and classes were checked")
    found += [*_classes(splits, dataset.classes), *_folders(dataset.classes)]
    order = [*CHECKS]
    report.findings = sorted((f for f in found if f.check not in skip), key=lambda f: order.index(f.check))
    return report


# -- reading ----------------------------------------------------------------------------------------------------------


class _Scan:
    """What is known of all examples, one after the other over all splits."""

    def __init__(self, splits: Mapping[str, RawExamples], classes: Sequence[str], threads: int) -> None:
        self.splits, self.classes, self.threads = splits, classes, threads
        self.names = [*splits]
        self.starts = np.cumsum([0, *(len(examples) for examples in splits.values())])
        self.size = int(self.starts[-1])
        self.digests = np.zeros(self.size, np.uint64)
        self.sizes = np.zeros((self.size, 2), np.int64)
        self.has_images, self.grey, self.constant = (np.zeros(self.size, bool) for _ in range(3))
        self.thumbs = np.zeros((self.size, THUMB, THUMB), np.uint8)
        self.problems: dict[int, str] = {}
        self._range = self._value_range()

    def place(self, at: int) -> tuple[str, int]:
        """Returns split and row of an example."""
        split = int(np.searchsorted(self.starts, at, "right")) - 1
        return self.names[split], at - int(self.starts[split])

    def label(self, at: int) -> str:
        """Returns the label of an example as text."""
        split, row = self.place(at)
        examples = self.splits[split]
        value = examples.labels[row]
        if examples.label_kind == "class":
            return self.classes[int(value)] if 0 <= int(value) < len(self.classes) else str(value)
        if examples.label_kind == "flags":
            return " ".join(name for name, on in zip(self.classes, value, strict=False) if on) or "none"
        if np.ndim(value) > 1:
            return f"a map of {'×'.join(map(str, np.shape(value)))}"
        return " ".join(f"{number:.6g}" for number in np.ravel(value))

    def differ(self, one: int, other: int) -> bool:
        """Returns whether two examples have different labels."""
        if self.label(one) != self.label(other):
            return True
        (split, row), (there, number) = self.place(one), self.place(other)
        values = self.splits[split].labels[row], self.splits[there].labels[number]
        return np.ndim(values[0]) > 1 and not np.array_equal(*values)

    def finding(self, check: str, at: int, other: int | None = None, **more: Any) -> Finding:
        """Returns a finding about an example, or a pair of them."""
        split, row = self.place(at)
        if other is None:
            return Finding(check, split, self.splits[split].name(row), self.label(at), rows=(row,), **more)
        there, number = self.place(other)
        return Finding(
            check, split, self.splits[split].name(row), self.label(at), there, self.splits[there].name(number),
            self.label(other), rows=(row, number), **more,
        )  # fmt: skip

    def read(self, progress: Callable[[int], None]) -> None:
        """Reads all examples."""
        pool = ThreadPoolExecutor(self.threads)
        try:
            starts = range(0, self.size, _BATCH)
            for done in pool.map(self._read_batch, starts):
                progress(done)
        finally:
            pool.shutdown(cancel_futures=True)

    def load(self, at: int) -> RawExample:
        """Returns an example as it is stored."""
        split, row = self.place(at)
        return self.splits[split].load(row)

    def pixels(self, at: int) -> NDArray[np.uint8]:
        """Returns an image at the size at which images are compared."""
        split, row = self.place(at)
        return self._small(self.load(at), self.splits[split].name(row))[0]

    def _read_batch(self, start: int) -> int:
        stop = min(start + _BATCH, self.size)
        greys: dict[tuple[int, ...], list[tuple[int, NDArray[np.float32]]]] = {}
        for at in range(start, stop):
            try:
                grey = self._read_one(at)
            except DataError as error:
                self.problems[at] = str(error)
                continue
            if grey is not None:
                greys.setdefault(grey.shape, []).append((at, grey))
        for same in greys.values():
            self.thumbs[[at for at, _ in same]] = thumbnails(np.stack([grey for _, grey in same]))
        return stop

    def _read_one(self, at: int) -> NDArray[np.float32] | None:
        """Reads an example; returns its grey values, or None if it is no image."""
        raw = self.load(at)
        split, row = self.place(at)
        name = self.splits[split].name(row)
        if not isinstance(raw, bytes) and (raw.ndim not in (2, 3) or (raw.ndim == 3 and raw.shape[2] not in (1, 3))):
            self.digests[at] = _digest(raw)
            return None
        image, height, width, channels = self._small(raw, name)
        self.digests[at] = _digest(raw)
        self.has_images[at], self.sizes[at] = True, (height, width)
        self.grey[at] = channels == 1 or is_grey(image)
        if np.ptp(image, axis=(0, 1)).max() <= _SAME_PIXELS:
            whole = decode(raw, None, name) if isinstance(raw, bytes) else raw
            spread = np.ptp(whole, axis=(0, 1)).max()
            self.constant[at] = float(spread) <= (_SAME_PIXELS if isinstance(raw, bytes) else 0)
        return np.asarray(image.astype(np.float32) @ GREY)

    def _small(self, raw: RawExample, name: str) -> tuple[NDArray[np.uint8], int, int, int]:
        if isinstance(raw, bytes) or raw.dtype == np.uint8:
            return small(raw, EDGE, name)
        low, high = self._range
        scaled = np.nan_to_num((np.asarray(raw, np.float32) - low) * (255 / max(high - low, 1e-12)))
        return small(np.clip(np.rint(scaled), 0, 255).astype(np.uint8), EDGE, name)

    def _value_range(self) -> tuple[float, float]:
        """Returns the range of the values of arrays that are not uint8, by the first examples."""
        values = []
        for at in range(min(self.size, _BATCH)):
            try:
                raw = self.load(at)
            except DataError:
                continue
            if isinstance(raw, bytes) or raw.dtype == np.uint8 or not raw.size:
                return 0.0, 255.0
            values.append((float(np.nanmin(raw)), float(np.nanmax(raw))))
        return (min(0.0, *(low for low, _ in values)), max(high for _, high in values)) if values else (0.0, 255.0)


def _digest(example: RawExample) -> int:
    if isinstance(example, bytes):
        digest = hashlib.blake2b(example, digest_size=8)
    else:
        digest = hashlib.blake2b(f"{example.dtype.str}{example.shape}".encode(), digest_size=8)
        digest.update(np.ascontiguousarray(example).data)
    return int.from_bytes(digest.digest(), "little") or 1


# -- pairs ------------------------------------------------------------------------------------------------------------


def _duplicates(scan: _Scan) -> Iterator[Finding]:
    """Yields images that are equal to an earlier one."""
    order = np.argsort(scan.digests, kind="stable")
    order = order[scan.digests[order] != 0]
    bounds = np.flatnonzero(np.diff(scan.digests[order])) + 1
    groups = [group for group in np.split(order, bounds) if len(group) > 1]
    for at, earlier in sorted((int(at), group[:i]) for group in groups for i, at in enumerate(group) if i):
        yield from _pairs(scan, at, [(int(other), 1.0) for other in earlier[:_BATCH]], "leaks", "duplicates")


def _near_duplicates(scan: _Scan, report: CheckReport) -> Iterator[Finding]:
    """Yields images that are nearly equal to an earlier one. Of equal images, only the first is compared."""
    _, firsts = np.unique(scan.digests, return_index=True)
    rows = np.sort(firsts[scan.has_images[firsts] & (scan.digests[firsts] != 0)])
    found = find_candidates(scan.thumbs[rows], scan.threads)
    if not found.complete:
        report.notes.append("very many images look alike: each was compared with a few of them only")
    pairs = rows[found.pairs]
    moved = found.moved and float(np.median(scan.sizes[rows].min(axis=1))) >= _SMALLEST_MOVED
    near: dict[int, list[tuple[int, float]]] = {}
    with bar("comparing", len(pairs)) as progress:
        for done, (first, second, similar) in enumerate(_similarities(scan, pairs, moved), 1):
            if similar is not None:
                near.setdefault(second, []).append((first, similar))
            if done % _BATCH == 0:
                progress(done)
    for at, earlier in sorted(near.items()):
        yield from _pairs(scan, at, sorted(earlier, key=lambda e: -e[1]), "near_leaks", "near_duplicates")


def _similarities(scan: _Scan, pairs: NDArray[np.int64], moved: bool) -> Iterator[tuple[int, int, float | None]]:
    """Yields both images of each pair and their similarity. Each is read about once, and few are in memory."""

    def compare(part: NDArray[np.int64]) -> list[tuple[int, int, float | None]]:
        pixels: dict[int, NDArray[np.uint8]] = {}
        results: list[tuple[int, int, float | None]] = []
        for first, second in part.tolist():
            for at in (first, second):
                if at not in pixels:
                    pixels[at] = scan.pixels(at)
            results.append((first, second, similarity(pixels[first], pixels[second], moved)))
        return results

    pool = ThreadPoolExecutor(scan.threads)
    try:
        parts = [pairs[start : start + _BATCH] for start in range(0, len(pairs), _BATCH)]
        yield from itertools.chain.from_iterable(pool.map(compare, parts))
    finally:
        pool.shutdown(cancel_futures=True)


def _pairs(scan: _Scan, at: int, earlier: Sequence[tuple[int, float]], between: str, within: str) -> Iterator[Finding]:
    """Yields what an image and earlier ones, which are like it, mean: in each check, the first of them is named."""
    split = scan.place(at)[0]
    here = [scan.place(other)[0] == split for other, _ in earlier]
    other_label = [scan.differ(at, other) for other, _ in earlier]
    for check, fits in ((between, [not same for same in here]), (within, here), ("label_conflicts", other_label)):
        twin = next((twin for twin, fit in zip(earlier, fits, strict=True) if fit), None)
        if twin is not None:
            yield scan.finding(check, at, twin[0], score=round(twin[1], 4))


# -- single images ----------------------------------------------------------------------------------------------------


def _odd_images(scan: _Scan) -> Iterator[Finding]:
    images = np.flatnonzero(scan.has_images)
    if not len(images):
        return
    for at in images[scan.constant[images]].tolist():
        yield scan.finding("constant", at)
    grey = scan.grey[images]
    share = float(grey.mean())
    if 0 < share <= 1 - _MOST_OF:
        for at in images[grey & ~scan.constant[images]].tolist():
            yield scan.finding("color", at, note="grey")
    elif _MOST_OF <= share < 1:
        for at in images[~grey].tolist():
            yield scan.finding("color", at, note="color")
    height, width = scan.sizes[images].T
    area, shape = height * width, width / np.maximum(height, 1)
    usual, usual_shape = float(np.median(area)), float(np.median(shape))
    for at, this, (tall, wide) in zip(images.tolist(), area.tolist(), scan.sizes[images].tolist(), strict=True):
        if this * _ODD_SIZE < usual or this > usual * _ODD_SIZE:
            yield scan.finding("size", at, note=f"{tall}×{wide}")
    for at, this, (tall, wide) in zip(images.tolist(), shape.tolist(), scan.sizes[images].tolist(), strict=True):
        if max(this / usual_shape, usual_shape / max(this, 1e-6)) > _ODD_SHAPE:
            yield scan.finding("aspect_ratio", at, note=f"{tall}×{wide}")


# -- classes ----------------------------------------------------------------------------------------------------------


def _classes(splits: Mapping[str, RawExamples], classes: Sequence[str]) -> Iterator[Finding]:
    for split, examples in splits.items():
        if examples.label_kind != "class" or not len(classes):
            continue
        valid = examples.labels[(examples.labels >= 0) & (examples.labels < len(classes))]
        counts = np.bincount(valid, minlength=len(classes)).tolist()
        most = max(counts)
        largest = classes[counts.index(most)]
        for name, count in zip(classes, counts, strict=True):
            if not count:
                yield Finding("classes", split, name, note="no examples")
            elif split == TRAIN and count * _FEW < most:
                yield Finding("classes", split, name, note=f"{counted(count, 'example')}; {largest} has {most:,}")


def _folders(classes: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding if the classes are called images and masks."""
    names = {name.lower() for name in classes}
    if len(names) > 1 and names <= _PICTURES | _MASKS and names & _PICTURES and names & _MASKS:
        note = "are these images and their masks, for segmentation? They are read as classes"
        yield Finding("folders", "", " and ".join(classes), note=note)


# -- files ------------------------------------------------------------------------------------------------------------


def write_findings(report: CheckReport, path: Path) -> None:
    """Writes all findings as a table."""
    text = io.StringIO()
    columns = [name for name in Finding.__dataclass_fields__ if name != "rows"]
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(["" if (value := getattr(f, name)) is None else value for name in columns] for f in report.findings)
    with explain(path, "write", DataError), whole_file(path) as file:
        file.write(text.getvalue().encode(errors="surrogateescape"))


def write_sheet(report: CheckReport, dataset: Dataset, path: Path, title: str) -> int:
    """Draws the findings as a PNG file, pairs side by side: of each check the first ones. Returns how many.

    Raises:
        DataError: if there is nothing to draw.
    """
    stored = raw_examples_of(dataset)
    shown = {check: [f for f in report.of(check) if f.rows and check != "unreadable"] for check in report.counts}
    shown = {check: found for check, found in shown.items() if found}
    each = max(_SHEET_ROWS // max(len(shown), 1), 4)
    rows: list[Row] = []
    for found in shown.values():
        rows += [_strip(finding, stored) for finding in found[:each]]
    if not rows:
        raise DataError("there are no images to draw: nothing was found that has any.")
    notes = [", ".join(f"{count:,} {check.replace('_', ' ')}" for check, count in report.counts.items())]
    with explain(path, "write", DataError), whole_file(path) as file:
        file.write(to_png(sheet(rows, title=title, notes=notes)))
    return len(rows)


def _strip(finding: Finding, stored: Mapping[str, RawExamples]) -> Row:
    places = zip((finding.split, finding.other_split), finding.rows, strict=False)
    images = []
    for split, row in places:
        raw, name = stored[split].load(row), stored[split].name(row)
        images.append(_at_most(decode(raw, None, name), 2 * TILE) if isinstance(raw, bytes) else raw)
    labels = " / ".join(filter(None, (finding.label, finding.other_label)))
    names = " / ".join(filter(None, (finding.example, finding.other)))
    return f"{finding.check.replace('_', ' ')}: {labels}\n{names} {finding.note}", images


def _at_most(image: NDArray[np.uint8], edge: int) -> NDArray[np.uint8]:
    """Returns an image whose longer edge is at most ``edge``: all images of the sheet are in memory at once."""
    height, width = image.shape[:2]
    longer = max(height, width)
    if longer <= edge:
        return image
    return resize(image, max(height * edge // longer, 1), max(width * edge // longer, 1))
