"""Near-duplicates: images that show the same picture, though their files differ.

Each image has a small grey thumbnail. Its 64 lowest frequencies make a hash: each bit says whether a frequency is above
the median of all images. Images whose hashes differ in few bits are found by bands, without comparing all pairs; so
are images of which one is a part of the other, by the hashes of parts. The pixels of such a pair are compared then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

THUMB = 24
"""Height and width of a thumbnail."""
EDGE = 64
"""Height and width at which pixels are compared."""

_FREQUENCIES = 64
_MOST_BITS = 7  # differ in two hashes; with bands of 16 bits, more would be missed
_LEAST_SIMILAR = 0.9  # correlation of the frequencies of two images, to compare their pixels
_FLATTEST = 0.01  # contrast of an image without a hash: noise would decide it; a share of the range of values
_BANDS, _BAND_BITS = 4, 16
_MOST_PAIRS = 1 << 21  # compared at once
_MOST_SIMILAR = 5, 50  # candidates of an image, by the number of images; one with more is common
_PIECE = 1 << 16
# Of very many images that look alike, the pairs would need too much memory, and their pixels too much time. Then each
# image has so many of the first and of the last ones that are before it.
_MOST_HELD, _MOST_HELD_OF_ONE = 1 << 23, 64
_ALWAYS_COMPARED, _COMPARED_OF_ONE = 50_000, 8
_MOST_COMMON = 0.05  # share of common images among photographs; drawings have more
_LEAST_ALIKE = 0.97  # correlation of the thumbnails of two drawings, to compare their pixels
_WHOLE = 0.0, 1.0
_CUTS = (0.05, 0.1, 0.15)  # of height and width, for the hashes of parts
GREY = np.array([0.299, 0.587, 0.114], np.float32)
_BLOCKS = 8
# Measured: of photographs as JPEG of quality 20, or of half the size, 99 % differ less than two thirds as much. Of
# different photographs that are most alike, none differs less than 1.6 times as much.
_MOST_DIFFERENT, _MOST_DIFFERENT_BLOCK = 0.2, 0.5
_LEAST_ALIGNED, _MOST_DIFFERENT_ALIGNED, _SMALLEST_PART = 0.965, 0.7, 50
_WORTH_A_CLOSER_LOOK = 0.8
_LEAST_COLOUR = 4
_LOWEST = sorted(((i, j) for i in range(12) for j in range(12) if i or j), key=lambda at: (at[0] ** 2 + at[1] ** 2, at))
_DOWN, _ACROSS = (np.array(axis[:_FREQUENCIES]) for axis in zip(*_LOWEST, strict=True))

Floats = NDArray[np.float32]
Pairs = NDArray[np.int64]
"""Two columns of indices."""


# -- thumbnails and hashes --------------------------------------------------------------------------------------------


def thumbnails(grey: Floats) -> NDArray[np.uint8]:
    """Returns the thumbnails of images of one size, images × height × width, with values from 0 to 255."""
    down, across = _areas(grey.shape[1]), _areas(grey.shape[2])
    return np.asarray(np.rint(np.clip((down @ grey) @ across.T, 0, 255)), np.uint8)


@lru_cache(maxsize=256)
def _areas(count: int) -> Floats:
    """Returns the share that each of so many pixels has in each pixel of a thumbnail."""
    edges = np.arange(THUMB + 1) * count / THUMB
    overlap = np.minimum(edges[1:, None], np.arange(1, count + 1)) - np.maximum(edges[:-1, None], np.arange(count))
    return np.asarray(np.maximum(overlap, 0) * THUMB / count, np.float32)


@lru_cache(maxsize=64)
def _waves(start: float, stop: float) -> Floats:
    """Returns the lowest cosines over a part of the thumbnail, from 0 to 1, as weights of its pixels."""
    edges = np.clip(np.arange(THUMB + 1) / THUMB, start, stop)
    phase = (edges - start) / (stop - start) * np.pi
    numbers = np.arange(1, 12)[:, None]
    integrals = np.diff(np.sin(numbers * phase) / numbers, axis=1) * (np.sqrt(2) / np.pi)
    return np.concatenate([np.diff(phase)[None] / np.pi, integrals]).astype(np.float32)


def _frequencies(thumbs: NDArray[np.uint8], rows: tuple[float, float], columns: tuple[float, float]) -> Floats:
    """Returns the lowest frequencies of a part of each thumbnail, as vectors of length 1."""
    down, across = _waves(*rows), _waves(*columns)
    found = np.concatenate([
        ((down @ thumbs[start : start + 1024].astype(np.float32)) @ across.T)[:, _DOWN, _ACROSS]
        for start in range(0, len(thumbs), 1024)
    ])  # fmt: skip
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-6))


@dataclass(frozen=True)
class Candidates:
    """Pairs of images that may be near-duplicates.

    Args:
        pairs: indices of two images, the smaller first.
        moved: whether one may be a part of the other. Not of simple drawings, such as digits: strokes fit on each other
            when they are moved.
        complete: whether all pairs are here. If very many images look alike, each has a few others only.
    """

    pairs: Pairs
    moved: bool
    complete: bool = True


def find_candidates(thumbs: NDArray[np.uint8], threads: int = 1) -> Candidates:
    """Finds pairs of images that may be near-duplicates. Flat images have none."""
    rows = np.flatnonzero(thumbs.std(axis=(1, 2)) > _FLATTEST * 255)
    if len(rows) < 2:
        return Candidates(np.empty((0, 2), np.int64), moved=False)
    thumbs = thumbs[rows]
    whole = _frequencies(thumbs, _WHOLE, _WHOLE)
    # The median of all images: each bit is set for half of them, so that bands tell them apart.
    medians = np.median(whole, axis=0)
    index = _Index(_hashes(whole, medians))

    complete = True

    def limited(pairs: Pairs, most: int, each: int) -> Pairs:
        nonlocal complete
        complete = complete and len(pairs) <= most
        return _limited(pairs, most, each)

    def similar_to(cut: Floats, numbers: NDArray[np.int64]) -> Pairs:
        pairs, new, count = np.empty((0, 2), np.int64), list[Pairs](), 0
        for first, second in index.close(_hashes(cut, medians)):
            similar = _products(cut, first, whole, second) >= _LEAST_SIMILAR
            first, second = numbers[first[similar]], second[similar]
            different = first != second
            new.append(np.sort(np.stack([first[different], second[different]], axis=1), axis=1))
            count += len(new[-1])
            if count > max(_MOST_PAIRS, len(pairs)):
                pairs, new, count = limited(_distinct([pairs, *new]), _MOST_HELD, _MOST_HELD_OF_ONE), [], 0
        return limited(_distinct([pairs, *new]), _MOST_HELD, _MOST_HELD_OF_ONE)

    def to_compare(pairs: Pairs, moved: bool) -> Candidates:
        few = limited(pairs, _COMPARED_OF_ONE * len(rows) + _ALWAYS_COMPARED, _COMPARED_OF_ONE)
        return Candidates(rows[few], moved, complete)

    pairs = similar_to(whole, np.arange(len(rows)))
    is_common = np.bincount(pairs.ravel(), minlength=len(rows)) > np.clip(len(rows) / 100, *_MOST_SIMILAR)
    if is_common.mean() > _MOST_COMMON:
        return to_compare(pairs[_correlation(thumbs, pairs) >= _LEAST_ALIKE], moved=False)
    rare = np.flatnonzero(~is_common)
    with ThreadPoolExecutor(threads) as pool:
        of_parts = pool.map(lambda part: similar_to(_frequencies(thumbs[rare], *part), rare), _parts())
        pairs = _distinct([pairs, *of_parts])
    return to_compare(pairs, moved=True)


def _products(one: Floats, first: NDArray[np.int64], two: Floats, second: NDArray[np.int64]) -> Floats:
    """Returns the product of the vectors of each pair."""
    pieces = (slice(start, start + _PIECE) for start in range(0, len(first), _PIECE))
    found = [np.einsum("ij,ij->i", one[first[piece]], two[second[piece]]) for piece in pieces]
    return np.concatenate(found or [np.empty(0, np.float32)])


def _distinct(pairs: Sequence[Pairs]) -> Pairs:
    """Returns each pair once, sorted by the first image."""
    both = np.concatenate(pairs)
    size = int(both.max(initial=0)) + 1
    return np.stack(np.divmod(np.unique(both[:, 0] * size + both[:, 1]), size), axis=1)


def _limited(pairs: Pairs, most: int, each: int) -> Pairs:
    """Returns the pairs; of more than ``most``, for each image the first ``each`` that come before it, and the last."""
    if len(pairs) <= most:
        return pairs
    order = np.argsort(pairs[:, 1], kind="stable")
    counts = np.bincount(pairs[:, 1])
    counts = np.repeat(counts, counts)
    place = np.arange(len(pairs)) - np.searchsorted(pairs[order, 1], pairs[order, 1])
    return np.asarray(pairs[np.sort(order[(place < each) | (place >= counts - each)])])


def _correlation(thumbs: NDArray[np.uint8], pairs: Pairs) -> Floats:
    found = []
    for start in range(0, len(pairs), 4096):
        both = thumbs[pairs[start : start + 4096]].reshape(-1, 2, THUMB * THUMB).astype(np.float32)
        both -= both.mean(axis=2, keepdims=True)
        both /= np.maximum(np.linalg.norm(both, axis=2, keepdims=True), 1e-6)
        found.append(np.einsum("ij,ij->i", both[:, 0], both[:, 1]))
    return np.concatenate(found)


def _parts() -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yields parts of an image, as rows and columns: the middle and the corners."""
    for cut in _CUTS:
        yield (cut / 2, 1 - cut / 2), (cut / 2, 1 - cut / 2)
        ends = (0.0, 1 - cut), (cut, 1.0)
        yield from itertools.product(ends, ends)


def _hashes(frequencies: Floats, medians: Floats) -> NDArray[np.uint64]:
    return np.ascontiguousarray(np.packbits(frequencies > medians, axis=1)).view(np.uint64)[:, 0]


class _Index:
    """Hashes, sorted by each of their four bands.

    Hashes that differ in at most 7 bits have a band that differs in at most one. So each hash is compared with those
    that have the same band, or one that differs in one bit.
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self.hashes = hashes
        keys = [_band(hashes, band) for band in range(_BANDS)]
        self._orders = [np.argsort(key, kind="stable") for key in keys]
        self._counts = [np.bincount(key, minlength=1 << _BAND_BITS) for key in keys]

    def close(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the positions of close hashes, in ``hashes`` and in the index; some of them several times."""
        for band, (order, counts) in enumerate(zip(self._orders, self._counts, strict=True)):
            keys, ends = _band(hashes, band), np.cumsum(counts)
            for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
                others = keys ^ flip
                many = counts[others]
                total = np.cumsum(many)
                start = 0
                while start < len(keys):
                    done = total[start - 1] if start else 0
                    stop = max(int(np.searchsorted(total, done + _MOST_PAIRS, "right")), start + 1)
                    part = many[start:stop]
                    first = np.repeat(np.arange(start, stop), part)
                    inside = np.arange(len(first)) - np.repeat(np.cumsum(part) - part, part)
                    second = order[np.repeat(ends[others[start:stop]] - part, part) + inside]
                    near = _set_bits(hashes[first] ^ self.hashes[second]) <= _MOST_BITS
                    yield first[near], second[near]
                    start = stop


def _band(hashes: NDArray[np.uint64], band: int) -> NDArray[np.int64]:
    mask = np.uint64((1 << _BAND_BITS) - 1)
    return ((hashes >> np.uint64(band * _BAND_BITS)) & mask).astype(np.int64)


def _set_bits(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Returns how many bits of each value are set."""
    one, two, four = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
    values = values - ((values >> np.uint64(1)) & one)
    values = (values & two) + ((values >> np.uint64(2)) & two)
    values = (values + (values >> np.uint64(4))) & four
    return ((values * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint8)


# -- pixels -----------------------------------------------------------------------------------------------------------


def similarity(first: NDArray[np.uint8], second: NDArray[np.uint8], moved: bool = True) -> float | None:
    """Returns how similar two images are, up to 1; None if they do not show the same picture.

    Brightness and contrast may differ. If one is grey, colours do not count.

    Args:
        first: `EDGE` × `EDGE` × 3.
        second: the same.
        moved: whether one may be a part of the other; if not, they must be closer.
    """
    one, two = first.astype(np.float32), second.astype(np.float32)
    if is_grey(first) or is_grey(second):
        one, two = one @ GREY, two @ GREY
    whole, worst = _differences(one, two)
    share = 1.0 if moved else 0.5
    if whole <= share * _MOST_DIFFERENT and worst <= share * _MOST_DIFFERENT_BLOCK:
        return 1 - whole**2 / 2
    if not moved:
        return None
    correlation, whole, worst = max(_aligned(one, two), _aligned(two, one))
    return correlation if correlation >= _LEAST_ALIGNED and worst <= _MOST_DIFFERENT_ALIGNED else None


def is_grey(image: NDArray[np.uint8]) -> bool:
    """Returns whether an image of three channels has no colour."""
    return int(np.ptp(image.astype(np.int16), axis=-1).max()) <= _LEAST_COLOUR


def _differences(one: Floats, two: Floats) -> tuple[float, float]:
    """Returns the differences of two images and of their worst blocks, as shares of the contrast of the first.

    Brightness and contrast are adjusted before.
    """
    one, two = one - one.mean(), two - two.mean()
    gain = float(np.clip(np.vdot(one, two) / max(float(np.vdot(two, two)), 1e-6), 0.5, 2))
    squares = (one - gain * two) ** 2
    squares = squares.mean(axis=2) if squares.ndim == 3 else squares
    blocks = cv2.resize(squares, (_BLOCKS, _BLOCKS), interpolation=cv2.INTER_AREA)
    contrast = max(float(one.std()), 1e-3)
    return float(np.sqrt(squares.mean())) / contrast, float(np.sqrt(blocks.max())) / contrast


def _aligned(whole: Floats, part: Floats) -> tuple[float, float, float]:
    """Returns the correlation of an image with the best part of another, and their differences."""
    found = (-1.0, EDGE - 1, (0, 0))

    def search(edges: Iterable[int]) -> None:
        nonlocal found
        for edge in edges:
            small = cv2.resize(part, (edge, edge), interpolation=cv2.INTER_AREA)
            _, best, _, at = cv2.minMaxLoc(cv2.matchTemplate(whole, small, cv2.TM_CCOEFF_NORMED))
            found = max(found, (float(best), edge, (at[1], at[0])))

    search(range(EDGE - 1, _SMALLEST_PART - 1, -2))
    if found[0] >= _WORTH_A_CLOSER_LOOK:
        search((found[1] - 1, found[1] + 1))
    correlation, edge, (top, left) = found
    small = cv2.resize(part, (edge, edge), interpolation=cv2.INTER_AREA)
    return correlation, *_differences(whole[top : top + edge, left : left + edge], small)
