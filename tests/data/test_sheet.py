"""A sheet of examples: every image is on it, as it is, and no text runs over."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import engine_name
from modelyard.data.sheet import MARGIN, _font, sheet, shortened, show_data, to_png
from modelyard.errors import DataError

COLORS = [(200, 30, 40), (20, 160, 60), (40, 60, 210), (210, 170, 20), (120, 20, 140), (10, 140, 150)]


def plain(color: tuple[int, ...], *size: int) -> np.ndarray:
    return np.full((*(size or (32, 32)), len(color)), color, np.uint8)


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture).astype(int)


def where(picture: Image.Image, color: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Left, top, width and height of the area of exactly this color, which must be a full rectangle."""
    found = (pixels(picture) == color).all(axis=-1)
    rows, columns = np.flatnonzero(found.any(axis=1)), np.flatnonzero(found.any(axis=0))
    assert rows.size, f"there is no {color}"
    assert found[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    return int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1


def ink(picture: Image.Image) -> np.ndarray:
    return (pixels(picture) != 255).any(axis=-1)


def test_every_image_is_there_in_its_row_and_column() -> None:
    rows = [("cat\n17", [plain(c) for c in COLORS[:3]]), ("dog\n18", [plain(c) for c in COLORS[3:]])]
    picture = sheet(rows, ["original", "augmented", "augmented"], "pets", ["train · 2 examples"])
    assert picture.mode == "RGB"
    places = [where(picture, color) for color in COLORS]
    assert {place[2:] for place in places} == {(160, 160)}
    for strip in (places[:3], places[3:]):
        assert len({top for _, top, _, _ in strip}) == 1
        first, second, third = (left for left, _, _, _ in strip)
        assert second - first > third - second > 160  # the original stands apart
    left = min(place[0] for place in places)
    assert left == MARGIN
    assert picture.width - max(place[0] + 160 for place in places) >= MARGIN
    assert picture.height - max(place[1] + 160 for place in places) == MARGIN


def test_many_examples_of_one_image_fill_a_sheet_of_a_good_shape() -> None:
    picture = sheet([(str(i), [np.full((8, 8), 40 + i, np.uint8)]) for i in range(30)])
    assert 0.8 < picture.width / picture.height < 2.5
    for i in range(30):
        assert where(picture, (40 + i,) * 3)[2:] == (160, 160)
    wide = sheet([("x", [np.zeros((32, 32), np.uint8)] * 20)] * 2)
    assert wide.width > 20 * 160  # a strip is never cut


def test_the_margins_are_clean() -> None:
    picture = sheet([("a long name " * 40, [plain(COLORS[0])] * 3)] * 5, ["original"] * 3, "t" * 500, ["note " * 300])
    marks = ink(picture)
    edge = MARGIN - 1
    assert not marks[:edge].any()
    assert not marks[-edge:].any()
    assert not marks[:, :edge].any()
    assert not marks[:, -edge:].any()


def test_a_long_label_is_shortened_and_stays_off_its_neighbour() -> None:
    short = sheet([("a", [plain(COLORS[0])]), ("b", [plain(COLORS[1])])], ["o"])
    long = sheet([("W" * 300 + "\n" + "9" * 300, [plain(COLORS[0])]), ("b\n1", [plain(COLORS[1])])], ["o" * 99])
    assert long.width == short.width
    left, top, width, _ = where(long, COLORS[0])
    right = where(long, COLORS[1])[0]
    assert right > left + width
    marks = ink(long)
    assert marks[:top, left : left + width].any()
    assert not marks[: top + 160, left + width + 1 : right - 1].any()


def test_text_is_cut_with_an_ellipsis_at_the_last_letter_that_fits() -> None:
    font = _font(15)
    assert shortened("cat", font, 100) == "cat"
    cut = shortened("a very long class name", font, 100)
    assert cut.endswith("…")
    assert "a very long class name".startswith(cut[:-1])
    assert font.getlength(cut) <= 100 < font.getlength(cut[:-1] + "nam…")
    assert shortened("anything", font, 0) == "…"
    assert shortened("two\nlines\tand\x0btabs", font, 1000) == "two lines and tabs"


def test_letters_that_the_font_lacks_are_written_plainly() -> None:
    assert shortened("Größe 3×4 – café", _font(15), 1000) == "Grosse 3x4 - cafe"
    assert shortened("漢", _font(15), 1000) == "?"


def test_title_notes_captions_and_headings_are_drawn() -> None:
    image = [plain(COLORS[0])]
    bare = sheet([("", image)])
    heights = [bare.height]
    for more in (sheet([("", image)], title="t"), sheet([("", image)], title="t", notes=["n"])):
        heights.append(more.height)
        assert ink(more)[: where(more, COLORS[0])[1] - 2].any()
    assert heights == sorted(set(heights))
    assert sheet([("", image)], ["original"]).height > bare.height
    assert sheet([("a\nb", image)]).height > sheet([("a", image)]).height > bare.height
    wrapped = sheet([("", image)], notes=["augment: " + "flip_left_right(probability=0.5), " * 4])
    assert wrapped.height > sheet([("", image)], notes=["augment: flip"]).height


@pytest.mark.parametrize(("side", "shown"), [(1, 160), (8, 160), (28, 140), (32, 160), (96, 96), (160, 160)])
def test_small_images_grow_by_a_whole_factor(side: int, shown: int) -> None:
    assert where(sheet([("x", [plain(COLORS[2], side, side)])]), COLORS[2])[2:] == (shown, shown)


def test_small_images_stay_sharp() -> None:
    image = np.array([[0, 90], [180, 250]], np.uint8)
    picture = sheet([("", [image])])
    for value in image.flat:
        assert where(picture, (int(value),) * 3)[2:] == (80, 80)


def test_large_images_keep_their_shape_in_the_middle_of_their_tile() -> None:
    picture = sheet([("x", [plain(COLORS[0], 600, 300), plain(COLORS[1], 300, 600)])])
    tall, wide = where(picture, COLORS[0]), where(picture, COLORS[1])
    assert tall[2:] == (80, 160)
    assert wide[2:] == (160, 80)
    assert tall[0] == MARGIN + 40
    assert wide[1] == tall[1] + 40
    thin = sheet([("x", [plain(COLORS[0], 2, 2000)])])
    assert where(thin, COLORS[0])[2:] == (160, 1)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 2)])
def test_grey_images_are_grey(shape: tuple[int, ...]) -> None:
    assert where(sheet([("x", [np.full(shape, 77, np.uint8)])]), (77, 77, 77))[2:] == (160, 160)


def halves(low: float, high: float, dtype: Any = np.float32) -> np.ndarray:
    image = np.full((8, 8, 1), low, dtype)
    image[:, 4:] = high
    return image


@pytest.mark.parametrize(
    ("images", "shown"),
    [
        ([halves(0.2, 0.6)], (51, 153)),  # 0 to 1
        ([halves(0, 8), halves(0, 16)], (0, 128)),  # the range of the sheet
        ([halves(-2, 0), halves(0, 2)], (0, 128)),  # standardised
        ([halves(20, 70), halves(0, 9, np.uint8)], (20, 70)),  # augmented bytes
        ([halves(False, True, np.bool_)], (0, 255)),
        ([halves(5, 5)], (0, 0)),
        ([halves(np.nan, np.inf), halves(-1, 3)], (0, 255)),
    ],
)
def test_floats_are_shown_in_their_range(images: list[np.ndarray], shown: tuple[int, int]) -> None:
    picture = pixels(sheet([("", images)]))
    middle = picture.shape[0] - MARGIN - 80
    assert picture[middle, MARGIN + 40].tolist() == [shown[0]] * 3
    assert picture[middle, MARGIN + 120].tolist() == [shown[1]] * 3


def test_what_shines_through_shows_the_mount() -> None:
    image = plain((9, 9, 9, 255))
    image[:, 16:, 3] = 0
    assert where(sheet([("x", [image])]), (9, 9, 9))[2:] == (80, 160)


@pytest.mark.parametrize("bad", [np.zeros((0, 3), np.uint8), np.zeros((1, 2, 3, 4)), np.array([["a"]]), np.array(3)])
def test_what_is_no_image_is_named_by_its_caption(bad: np.ndarray) -> None:
    with pytest.raises(DataError, match="cat: an array of"):
        sheet([("cat\nid 3", [bad])])


def test_an_empty_sheet_is_an_error() -> None:
    for rows in ([], [("x", [])]):
        with pytest.raises(DataError, match="no images to show"):
            sheet(rows)


def test_a_row_may_have_fewer_images_than_another() -> None:
    picture = sheet([("x", [plain(COLORS[0])]), ("y", [plain(COLORS[1]), plain(COLORS[2])])])
    assert all(where(picture, color)[2:] == (160, 160) for color in COLORS[:3])


def test_a_png_holds_the_picture() -> None:
    picture = sheet([("x", [plain(COLORS[0])])])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(to_png(picture)))), np.asarray(picture))
    assert to_png(picture) == to_png(sheet([("x", [plain(COLORS[0])])]))


def test_classes_that_are_not_shown_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "modelyard")
    show_data("digits", "some.png", engine=engine_name())
    assert "8 of 10 classes are shown; --examples 10 shows one example of each" in caplog.text
    caplog.clear()
    show_data("digits", "all.png", examples=10, engine=engine_name())
    assert "classes are shown" not in caplog.text
