"""From image files of every kind to upright pixels of one size."""

from __future__ import annotations

import io
import random
import struct
import threading
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from modelyard.data.images import Fit, decode, fill, resize, size_of, upright_size
from modelyard.errors import DataError
from waiting import PATIENCE

Pixels = NDArray[Any]
DICE = np.random.default_rng(0)


def smooth(height: int, width: int, turn: float = 0.0) -> Pixels:
    """A picture that a JPEG keeps well, with four different corners."""
    rows, columns = np.mgrid[0:height, 0:width].astype(float)
    rows, columns = rows / max(height - 1, 1), columns / max(width - 1, 1)
    red, green, blue = 230 * rows, 230 * columns, 115 * (1 + np.sin(3 * rows - 2 * columns + turn))
    return np.stack([red, green, blue], axis=2).astype(np.uint8)


def noise(height: int, width: int, *channels: int) -> Pixels:
    return DICE.integers(0, 256, (height, width, *channels), dtype=np.uint8)


def encoded(image: Image.Image | Pixels, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def jpeg(pixels: Image.Image | Pixels, **options: Any) -> bytes:
    return encoded(pixels, "JPEG", **{"quality": 97, "subsampling": 0, **options})


def filled(
    stored: bytes | Pixels, height: int, width: int, fit: Fit = "crop", channels: int = 3, **more: Any
) -> Pixels:
    out = np.full((height, width, channels), 99, more.pop("dtype", np.uint8))
    box = more.pop("box", None)
    fill(out, stored, fit, None if box is None else lambda height, width: box, lambda: "it.jpg")
    return out


def far(one: Pixels, other: Pixels) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(float) - other).max())


def turned_file(kind: str, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(smooth(24, 40), kind, exif=exif, **options)


# -- upright --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [("JPEG", {"quality": 97, "subsampling": 0}, 6), ("PNG", {}, 0), ("WEBP", {"lossless": True}, 0), ("TIFF", {}, 0)],
    ids=["jpeg", "png", "webp", "tiff"],
)
def test_every_orientation_is_upright_however_it_is_read(
    kind: str, options: dict[str, Any], most: int, orientation: int
) -> None:
    data = turned_file(kind, orientation, **options)
    with Image.open(io.BytesIO(data)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    height, width = upright.shape[:2]
    assert (height, width) == ((24, 40) if orientation < 5 else (40, 24))
    assert upright_size(data, "it") == (height, width)
    assert size_of(data, "it") == (height, width, 3)
    assert far(decode(data, 3, "it"), upright) <= most
    assert np.array_equal(filled(data, height, width), decode(data, 3, "it"))
    # Small enough that a JPEG is shrunk while it is decoded.
    assert far(filled(data, height // 4, width // 4), resize(upright, height // 4, width // 4)) <= 8
    box = (2.0, 3.0, 10.0, 12.0)
    assert np.array_equal(filled(data, 10, 12, box=box), decode(data, 3, "it")[2:12, 3:15])


def test_the_corners_are_where_exif_says() -> None:
    stored = smooth(24, 40)
    # 6: the first row of the file is the right side.
    upright = decode(turned_file("PNG", 6), 3, "it")
    assert np.array_equal(upright, np.rot90(stored, -1))
    assert np.array_equal(decode(turned_file("PNG", 3), 3, "it"), stored[::-1, ::-1])


def test_an_orientation_that_stands_after_a_long_profile_is_found() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = jpeg(smooth(24, 40), exif=exif)
    comment = b"\xff\xfe" + struct.pack(">H", 60002) + b"x" * 60000
    data = plain[:2] + comment * 3 + plain[2:]
    assert decode(data, 3, "it").shape == (40, 24, 3)
    assert upright_size(data, "it") == size_of(data, "it")[:2] == (40, 24)


def test_a_jpeg_of_a_rare_subsampling_is_read() -> None:
    file = io.BytesIO()
    Image.fromarray(smooth(20, 30)).save(file, "JPEG", subsampling="4:4:4")
    data = bytearray(file.getvalue())
    data[data.index(b"\xff\xc0") + 11] = 0x14  # brightness has four rows where colours have one: 4:4:1
    assert upright_size(bytes(data), "a photo") == (20, 30)
    assert decode(bytes(data), 3, "a photo").shape == (20, 30, 3)


def test_an_orientation_in_xmp_alone_is_the_same_everywhere() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = jpeg(smooth(24, 40), xmp=xmp)
    assert decode(data, 3, "it").shape[:2] == upright_size(data, "it") == size_of(data, "it")[:2] == (40, 24)


@pytest.mark.parametrize("orientation", [0, 9, 77])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_orientation_that_is_none_is_upright(kind: str, orientation: int) -> None:
    data = turned_file(kind, orientation)
    assert decode(data, 3, "it").shape == (24, 40, 3)
    assert size_of(data, "it") == (24, 40, 3)


# -- kinds of files -------------------------------------------------------------------------------------------------


def test_lossless_kinds_give_their_own_pixels() -> None:
    pixels = noise(9, 7, 3)
    for kind, options in [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("PPM", {})]:
        assert np.array_equal(decode(encoded(pixels, kind, **options), 3, kind), pixels), kind
        assert np.array_equal(decode(encoded(pixels, kind, **options), None, kind), pixels), kind


def test_grey_stays_grey_unless_colour_is_wanted() -> None:
    grey = smooth(20, 30)[:, :, 0]
    for data, most in [(encoded(grey, "PNG"), 0), (jpeg(grey), 3)]:
        assert size_of(data, "it") == (20, 30, 1)
        assert far(decode(data, None, "it"), grey[..., None]) <= most
        assert far(decode(data, 3, "it"), np.repeat(grey[..., None], 3, axis=2)) <= most
        assert far(filled(data, 20, 30, channels=3), np.repeat(grey[..., None], 3, axis=2)) <= most


def test_colour_becomes_grey_by_its_brightness() -> None:
    colour = smooth(20, 30)
    expected = (colour @ np.array([0.299, 0.587, 0.114]))[..., None]
    for stored in (encoded(colour, "PNG"), jpeg(colour), colour):
        assert far(filled(stored, 20, 30, channels=1), expected) <= 4
    assert far(decode(jpeg(colour), 1, "it"), expected) <= 4


def test_transparency_is_dropped_and_palettes_are_looked_up() -> None:
    pixels = noise(6, 5, 3)
    alpha = np.concatenate([pixels, noise(6, 5, 1)], axis=2)
    assert np.array_equal(decode(encoded(alpha, "PNG"), 3, "it"), pixels)
    for few in (Image.fromarray(pixels).quantize(8), Image.fromarray(pixels).quantize(200)):
        right = np.asarray(few.convert("RGB"))
        assert np.array_equal(decode(encoded(few, "PNG"), None, "it"), right)
        assert np.array_equal(decode(encoded(few, "GIF"), 3, "it"), right)
        assert np.array_equal(decode(encoded(few, "PNG", transparency=0), 3, "it"), right)
    both = encoded(Image.fromarray(noise(6, 5, 2)), "PNG")
    assert decode(both, None, "it").shape[2] == size_of(both, "it")[2] == 1


def test_one_bit_is_black_and_white() -> None:
    bits = noise(9, 11) > 127
    for kind in ("PNG", "TIFF", "BMP"):
        data = encoded(Image.fromarray(bits), kind)
        assert np.array_equal(decode(data, 1, kind)[..., 0], bits * np.uint8(255))


def test_sixteen_bits_are_cut_to_eight() -> None:
    deep = DICE.integers(0, 65536, (9, 7), dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        data = encoded(deep, kind)
        assert size_of(data, kind) == (9, 7, 1)
        assert np.array_equal(decode(data, None, kind)[..., 0], deep >> 8)
        assert np.array_equal(filled(data, 9, 7)[..., 2], deep >> 8)


def png(width: int, height: int, depth: int, colour: int, rows: bytes, size: tuple[int, int] | None = None) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", *(size or (width, height)), depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_png_of_48_bits_is_cut_to_24() -> None:
    deep = DICE.integers(0, 65536, (5, 4, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    assert np.array_equal(decode(png(4, 5, 16, 2, rows), 3, "it"), deep >> 8)


def test_cmyk_has_the_colours_that_pillow_sees() -> None:
    pixels = smooth(24, 40)
    cmyk = Image.fromarray(pixels).convert("CMYK")
    data = encoded(cmyk, "JPEG", quality=97)
    assert far(decode(data, 3, "it"), pixels) <= 12
    assert far(filled(data, 24, 40), pixels) <= 12
    assert np.array_equal(decode(encoded(cmyk, "TIFF"), 3, "it"), np.asarray(cmyk.convert("RGB")))


def test_of_a_moving_picture_the_first_frame_is_taken() -> None:
    first, second = (Image.fromarray(np.full((6, 6, 3), value, np.uint8)) for value in (40, 200))
    for kind, options in [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})]:
        data = encoded(first, kind, save_all=True, append_images=[second], **options)
        assert np.unique(decode(data, 3, kind)).tolist() == [40], kind


def test_a_progressive_jpeg_is_read() -> None:
    assert far(decode(jpeg(smooth(30, 40), progressive=True), 3, "it"), smooth(30, 40)) <= 6


def test_floating_point_pixels_are_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"it\.tif holds floating-point pixels"):
        decode(encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), 3, "it.tif")


# -- what can't be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello, this is no image",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0" + bytes(100),
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"II*\0",
        jpeg(smooth(60, 80))[:700],
        jpeg(smooth(60, 80))[:-400],
        encoded(noise(60, 80, 3), "PNG")[:5000],
        encoded(noise(60, 80, 3), "WEBP")[:500],
    ],
    ids=["empty", "text", "mark", "zeros", "png", "gif", "tiff", "jpeg head", "jpeg cut", "png cut", "webp cut"],
)
def test_what_is_no_whole_image_is_named(data: bytes) -> None:
    for read in (
        lambda: decode(data, 3, "a/b.jpg"),
        lambda: fill(np.empty((8, 8, 3), np.uint8), data, "crop", None, lambda: "a/b.jpg"),
    ):
        with pytest.raises(DataError, match=r"a/b\.jpg can't be decoded"):
            read()


def huge_jpeg() -> bytes:
    data = bytearray(jpeg(smooth(16, 16)))
    place = data.find(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", 60000, 60000)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        huge_jpeg(),
        png(4, 4, 8, 2, bytes(52), (60000, 60000)),
        png(4, 4, 8, 2, bytes(52), (2**31 - 1, 2**31 - 1)),
        png(4, 4, 8, 2, bytes(52), (13100, 13100)),
        b"BM" + struct.pack("<IIIIiiHHIIIIII", 60, 0, 54, 40, 100000, 100000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0),
    ],
    ids=["jpeg", "png", "largest png", "just too large", "bmp", "gif"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_small_file_that_claims_to_be_huge_is_refused_at_once_and_without_its_memory(data: bytes) -> None:
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(DataError, match=r"bomb\.x"):
            decode(data, 3, "bomb.x")
        with pytest.raises(DataError, match=r"bomb\.x"):
            fill(np.empty((8, 8, 3), np.uint8), data, "crop", None, lambda: "bomb.x")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 2


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_more_pixels_than_are_allowed_is_told_its_size() -> None:
    with pytest.raises(DataError, match=r"it declares 13100×13100 pixels; the limit is 170,000,000"):
        decode(png(4, 4, 8, 2, bytes(52), (13100, 13100)), 3, "it")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells what it makes of damaged tags
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_damage_anywhere_gives_pixels_or_a_sentence_and_never_a_traceback(kind: str) -> None:
    dice = random.Random(1)
    whole = turned_file(kind, 6) if kind not in ("BMP", "GIF") else encoded(smooth(24, 40), kind)
    said = []
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(dice.choice([1, 2, 4])):
            data[dice.randrange(min(len(data), dice.choice([64, 300, len(data)])))] = dice.randrange(256)
        for read in (
            lambda: decode(bytes(data), 3, "x"),  # noqa: B023
            lambda: size_of(bytes(data), "x"),  # noqa: B023
            lambda: fill(np.empty((8, 8, 3), np.uint8), bytes(data), "crop", None, lambda: "x"),  # noqa: B023
        ):
            try:
                read()
            except DataError as error:
                said.append(str(error))
    assert all(message.startswith("x ") for message in said)


@pytest.mark.parametrize("tag", [b"\x01\x12\x00\x02\x00\x00\x00\x01", b"\x01\x12\x00\x07\xff\xff\xff\xff"])
def test_damaged_exif_does_not_cost_the_image(tag: bytes) -> None:
    whole = turned_file("JPEG", 6)
    place = whole.find(b"\x01\x12\x00\x03\x00\x00\x00\x01")
    assert place > 0
    assert decode(whole[:place] + tag + whole[place + 8 :], 3, "it").shape in ((24, 40, 3), (40, 24, 3))


# -- geometry -------------------------------------------------------------------------------------------------------


def test_the_same_size_is_an_exact_copy_in_every_fit() -> None:
    pixels = noise(12, 17, 3)
    for fit in ("crop", "stretch", "pad"):
        for stored in (pixels, encoded(pixels, "PNG")):
            assert np.array_equal(filled(stored, 12, 17, fit), pixels)  # type: ignore[arg-type]
    assert np.array_equal(filled(jpeg(pixels), 12, 17), decode(jpeg(pixels), 3, "it"))


@pytest.mark.parametrize(
    ("stored", "size", "part"),
    [
        ((20, 40), (20, 20), (0, 10, 20, 20)),
        ((40, 20), (20, 20), (10, 0, 20, 20)),
        ((21, 40), (21, 21), (0, 10, 21, 21)),  # 9.5 columns on each side: half a pixel is rounded up
        ((40, 40), (20, 40), (10, 0, 20, 40)),
        ((30, 50), (10, 10), (0, 10, 30, 30)),
        ((33, 100), (11, 22), (0, 17, 33, 66)),
    ],
)
def test_crop_takes_the_largest_middle_part_of_the_shape(
    stored: tuple[int, int], size: tuple[int, int], part: tuple[int, int, int, int]
) -> None:
    pixels = noise(*stored, 3)
    top, left, tall, wide = part
    expected = resize(pixels[top : top + tall, left : left + wide], *size)
    for source in (pixels, encoded(pixels, "PNG")):
        assert np.array_equal(filled(source, *size), expected)


@pytest.mark.parametrize(
    ("stored", "size", "inner"),
    [
        ((20, 40), (40, 40), (10, 0, 20, 40)),
        ((40, 20), (20, 20), (0, 5, 20, 10)),
        ((10, 30), (20, 21), (6, 0, 7, 21)),
        ((100, 33), (10, 10), (0, 3, 10, 3)),
        ((1, 500), (8, 8), (3, 0, 1, 8)),
    ],
)
def test_pad_shows_the_whole_image_between_black_bars(
    stored: tuple[int, int], size: tuple[int, int], inner: tuple[int, int, int, int]
) -> None:
    pixels = np.full((*stored, 3), 200, np.uint8)
    top, left, tall, wide = inner
    expected = np.zeros((*size, 3), np.uint8)
    expected[top : top + tall, left : left + wide] = 200
    for source in (pixels, encoded(pixels, "PNG")):
        assert np.array_equal(filled(source, *size, "pad"), expected)
    assert far(filled(jpeg(pixels), *size, "pad"), expected) <= 2


def test_bars_are_equally_wide_whether_or_not_a_jpeg_is_shrunk_while_decoding() -> None:
    for width in range(120, 160):
        pixels = np.full((400, width, 3), 200, np.uint8)
        one, other = filled(pixels, 25, 25, "pad"), filled(jpeg(pixels), 25, 25, "pad")
        assert far(one, other) <= 3, width


def test_stretch_uses_the_whole_image() -> None:
    halves = np.zeros((10, 40, 3), np.uint8)
    halves[:, 20:] = 240
    for source in (halves, encoded(halves, "PNG")):
        assert np.array_equal(filled(source, 20, 20, "stretch")[:, [0, 9, 10, 19], 0], [[0, 0, 240, 240]] * 20)
    assert np.array_equal(filled(halves, 10, 40, "stretch"), halves)


@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
def test_a_box_is_stretched_to_the_size_whatever_the_fit(fit: Fit) -> None:
    pixels = noise(40, 60, 3)
    for source in (pixels, encoded(pixels, "PNG")):
        assert np.array_equal(filled(source, 9, 9, fit, box=(5.0, 7.0, 9.0, 9.0)), pixels[5:14, 7:16])
        assert np.array_equal(filled(source, 12, 6, fit, box=(0.0, 50.0, 6.0, 10.0)), resize(pixels[:6, 50:], 12, 6))


def test_a_box_of_a_jpeg_is_stretched_too() -> None:
    data, box = jpeg(smooth(40, 60)), (0.0, 50.0, 6.0, 10.0)
    assert np.array_equal(filled(data, 12, 6, "pad", box=box), resize(decode(data, 3, "it")[:6, 50:], 12, 6))


@pytest.mark.parametrize("width", [59, 200, 255, 257, 1023])
def test_what_is_lost_at_the_edges_is_less_than_a_pixel_of_the_result(width: int) -> None:
    ramp = np.linspace(0, 1, width)
    small = filled(np.tile(ramp[None, :, None], (16, 1, 1)), 16, 16, "stretch", channels=1, dtype=np.float32)
    exact = np.interp((np.arange(16) + 0.5) / 16, (np.arange(width) + 0.5) / width, ramp)
    assert np.abs(small[0, :, 0] - exact).max() < 1 / 16


def test_a_box_of_a_large_jpeg_is_the_same_part_as_of_its_pixels() -> None:
    pixels = smooth(400, 600)
    for box in (
        (0.0, 0.0, 400.0, 600.0),
        (100.0, 200.0, 200.0, 300.0),
        (331.0, 17.0, 69.0, 67.0),
        (399.0, 599.0, 1.0, 1.0),
    ):
        assert far(filled(jpeg(pixels), 16, 16, box=box), filled(pixels, 16, 16, box=box)) <= 6, box


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "pixels"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("stored", "size"), [((256, 256), (16, 16)), ((300, 452), (20, 31)), ((97, 193), (11, 13))])
def test_a_fine_checkerboard_becomes_grey(
    kind: str, channels: int, stored: tuple[int, int], size: tuple[int, int]
) -> None:
    board = (np.indices(stored).sum(axis=0) % 2 * 255).astype(np.uint8)
    pixels = np.repeat(board[..., None], channels, axis=2)
    source = pixels if kind == "pixels" else encoded(pixels.squeeze(), kind)
    for fit in ("crop", "stretch"):
        small = filled(source, *size, fit, channels=channels)  # type: ignore[arg-type]
        assert np.abs(small.astype(float) - 127.5).max() < 26


@pytest.mark.parametrize("shape", [(1600, 16), (16, 1600)])
def test_a_long_image_that_is_stretched_is_averaged_along_its_length(shape: tuple[int, int]) -> None:
    stripes = np.zeros((*shape, 3), np.uint8)
    if shape[0] > shape[1]:
        stripes[::2] = 255
    else:
        stripes[:, ::2] = 255
    small = filled(stripes, 16, 16, "stretch")
    assert np.abs(small.astype(float) - 127.5).max() < 4


def test_a_small_picture_is_the_mean_of_its_areas() -> None:
    pixels = noise(64, 96, 3)
    means = pixels.reshape(8, 8, 12, 8, 3).mean(axis=(1, 3))
    assert far(filled(pixels, 8, 12), means) <= 2  # halved three times, rounded each time
    assert far(filled(encoded(pixels, "PNG"), 8, 12), means) <= 2
    assert far(filled(jpeg(pixels, quality=100), 8, 12), means) <= 4


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "float64", "bool"])
def test_stored_values_of_any_type_are_resized(dtype: str) -> None:
    stored = np.full((20, 30, 3), 1, dtype)
    assert np.unique(filled(stored, 8, 8, dtype=np.float32)).tolist() == [1.0]
    assert np.unique(filled(stored, 8, 8, channels=1, dtype=np.float32)).round(5).tolist() == [1.0]


def test_stored_values_may_lack_the_axis_of_channels() -> None:
    grey = noise(10, 12)
    assert np.array_equal(filled(grey, 10, 12, channels=1)[..., 0], grey)
    assert np.array_equal(filled(grey, 10, 12, channels=3), np.repeat(grey[..., None], 3, axis=2))


@pytest.mark.parametrize("shape", [(5,), (5, 5, 2), (0, 5, 3), (2, 5, 5, 3)])
def test_stored_values_of_no_use_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"it\.jpg has (shape|2 channels; 3 are needed)"):
        filled(np.zeros(shape, np.uint8), 4, 4)


# -- memory of its own ----------------------------------------------------------------------------------------------


def test_decoded_pixels_are_not_overwritten_by_the_next_image() -> None:
    one, other = jpeg(smooth(30, 40)), jpeg(255 - smooth(30, 40))
    first = decode(one, 3, "it")
    kept = first.copy()
    decode(other, 3, "it")
    filled(other, 30, 40)
    assert np.array_equal(first, kept)
    assert first.flags.writeable


def test_a_small_image_after_a_large_one_shows_nothing_of_it() -> None:
    large, small = jpeg(np.full((200, 300, 3), 255, np.uint8)), jpeg(smooth(10, 14))
    alone = decode(small, 3, "it")
    for before in (large, jpeg(np.full((200, 300), 255, np.uint8))):
        decode(before, None, "it")
        assert np.array_equal(decode(small, 3, "it"), alone)
        assert np.array_equal(filled(small, 10, 14), alone)
        assert far(decode(small, 3, "it"), smooth(10, 14)) <= 6


def test_threads_never_see_each_others_pixels() -> None:
    sizes = [(40, 30), (64, 64), (33, 90), (120, 80)]
    files = [
        encoded(smooth(*sizes[i % 4], turn=i), "PNG") if i % 5 == 4 else jpeg(smooth(*sizes[i % 4], turn=i), quality=90)
        for i in range(16)
    ]
    right = [(decode(data, 3, "it"), filled(data, 16, 16), filled(data, 8, 8, "pad")) for data in files]
    wrong: list[int] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            i = dice.randrange(len(files))
            found = (decode(files[i], 3, "it"), filled(files[i], 16, 16), filled(files[i], 8, 8, "pad"))
            if not all(np.array_equal(a, b) for a, b in zip(found, right[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_files_that_would_start_a_program_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    for look in (lambda: decode(script, 3, "cat.png"), lambda: size_of(script, "cat.png")):
        with pytest.raises(DataError, match=r"cat\.png can't be decoded"):
            look()
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("stored", "wanted"), [(4, 3), (3, 4), (1, 4), (2, 1)])
def test_numbers_of_channels_that_do_not_fit_are_named(stored: int, wanted: int) -> None:
    with pytest.raises(DataError, match=f"has {stored} channels; {wanted} are needed"):
        filled(np.zeros((5, 5, stored), np.uint8), 5, 5, channels=wanted)
