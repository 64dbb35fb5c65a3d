"""Decodes image files and resizes images.

EXIF orientation is applied; CMYK, grey and 16-bit images are converted; transparency is dropped. libjpeg-turbo decodes
JPEGs, Pillow everything else. Both release Python's lock, so threads decode in parallel. Images much larger than needed
are halved first (JPEGs while decoding), then resized bilinearly.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from modelyard.data.image_metadata import check_jpeg, check_tags
from modelyard.data.image_spec import IMAGE_FORMATS, Box, Choose, Fit, UndecodableError
from modelyard.errors import DataError

Pixels = NDArray[Any]
cv2.setNumThreads(0)  # examples are already read in parallel
MOST_PIXELS = 170_000_000
"""Larger images are refused: the header of a small file may declare a huge image. Pillow's limit is 179 million."""

_FORMATS = tuple(IMAGE_FORMATS)
Image.MAX_IMAGE_PIXELS = MOST_PIXELS  # one limit, and no warnings below it
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # one for each damaged tag
_JPEG = b"\xff\xd8\xff"
_ORIENTATION = 0x0112
_LONGEST_PROFILE = 1 << 18  # characters of EXIF that a PNG holds as text
_PROGRESSIVE = b"\xff\xc2"
_UNSUPPORTED = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
"""The formats of files that start with such a box, whatever their names."""
_MAY_TURN = (b"Exif\0\0", b"tiff:Orientation")


def decode(data: bytes, channels: int | None, name: str) -> Pixels:
    """Returns the pixels of an image file: uint8, height × width × channels, upright.

    Args:
        data: the whole file.
        channels: 3 for colour, 1 for grey; None keeps grey images grey and makes all others colour.
        name: its name in errors.

    Raises:
        DataError: if it is not an image, is truncated, or is too large.
    """
    if data.startswith(_JPEG):
        opened = _JpegFile.open(data)
        if opened is not None:
            wanted = channels or (1 if opened.grey else 3)
            pixels = opened.pixels(wanted, 1)
            if pixels is not None:
                return pixels
    return _with_pillow(data, channels, name)


def resize(image: Pixels, height: int, width: int) -> Pixels:
    """Returns ``image`` at another size."""
    out = np.empty((height, width, image.shape[2]), image.dtype)
    _resize_into(image, out)
    return out


def size_of(data: bytes, name: str) -> tuple[int, int, int]:
    """Returns height, width and channels (1 or 3) of an image file, upright, without decoding it."""
    try:
        with _opened(data, name) as image:
            width, height = image.size
            turned = image.format != "TIFF" and _orientation(image) in (5, 6, 7, 8)  # Pillow turns TIFFs itself
            channels = 1 if image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16") else 3
    except DataError:
        raise
    except Exception as error:  # the errors of Pillow's readers have no base class
        raise _bad(name, error, data) from error
    return (width, height, channels) if turned else (height, width, channels)


def stored_size(data: bytes, name: str) -> tuple[int, int]:
    """Returns height and width of an image file as it is stored, from its header alone.

    The orientation of a PNG may come after its pixels: `size_of` decodes them.
    """
    if data.startswith(_JPEG):
        with contextlib.suppress(ValueError, KeyError):
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            return height, width
    try:
        with _opened(data, name) as image:
            return image.height, image.width
    except DataError:
        raise
    except Exception as error:  # the errors of Pillow's readers have no base class
        raise _bad(name, error, data) from error


def fill(out: Pixels, raw: bytes | Pixels, fit: Fit, choose: Choose | None, name: Callable[[], str]) -> None:
    """Writes an image into ``out``, with its size and channels.

    Args:
        out: height × width × channels.
        raw: an image file, or pixels.
        fit: how an image of another shape is resized.
        choose: chooses the part of the image to take, which is stretched to the size. By default, ``fit`` decides.
        name: returns its name, for errors.

    Raises:
        DataError: if the image can't be read.
    """
    opened = _JpegFile.open(raw) if isinstance(raw, bytes) and raw.startswith(_JPEG) else None
    if opened is not None:
        part = choose(opened.height, opened.width) if choose else _part(opened.height, opened.width, out, fit)
        shrink = 1
        while shrink < 8 and part[2] >= 2 * shrink * out.shape[0] and part[3] >= 2 * shrink * out.shape[1]:
            shrink *= 2
        pixels = opened.pixels(out.shape[2], shrink)
        if pixels is not None:
            part = (part[0] / shrink, part[1] / shrink, part[2] / shrink, part[3] / shrink)
            _fit_into(pixels, out, "stretch" if choose else fit, part)
            return
    pixels = _with_pillow(raw, out.shape[2], name()) if isinstance(raw, bytes) else _convert(raw, out, name)
    height, width = pixels.shape[:2]
    part = choose(height, width) if choose else _part(height, width, out, fit)
    _fit_into(pixels, out, "stretch" if choose else fit, part)


def upright_size(raw: bytes | Pixels, name: str) -> tuple[int, int]:
    """Returns height and width of an image, without decoding it."""
    if not isinstance(raw, bytes):
        if raw.ndim < 2:
            raise DataError(f"{name} has shape {raw.shape}; height × width × channels are needed.")
        return raw.shape[0], raw.shape[1]
    opened = _JpegFile.open(raw) if raw.startswith(_JPEG) else None
    return (opened.height, opened.width) if opened is not None else size_of(raw, name)[:2]


def small(raw: bytes | Pixels, edge: int, name: str) -> tuple[Pixels, int, int, int]:
    """Returns an image stretched to ``edge`` × ``edge`` × 3, and the height, width and channels that it has.

    Raises:
        DataError: if the image can't be read.
    """
    opened = _JpegFile.open(raw) if isinstance(raw, bytes) and raw.startswith(_JPEG) else None
    out = np.empty((edge, edge, 3), np.uint8 if isinstance(raw, bytes) else raw.dtype)
    if opened is not None:
        fill(out, raw, "stretch", None, lambda: name)
        return out, opened.height, opened.width, 1 if opened.grey else 3
    pixels = decode(raw, None, name) if isinstance(raw, bytes) else raw
    fill(out, pixels, "stretch", None, lambda: name)
    return out, *pixels.shape[:2], pixels.shape[2] if pixels.ndim == 3 else 1


def _part(height: int, width: int, out: Pixels, fit: Fit) -> Box:
    """Returns the part of an image that ``out`` shows."""
    if fit != "crop":
        return 0.0, 0.0, float(height), float(width)
    scale = min(height / out.shape[0], width / out.shape[1])
    tall, wide = out.shape[0] * scale, out.shape[1] * scale
    return (height - tall) / 2, (width - wide) / 2, tall, wide


def _fit_into(pixels: Pixels, out: Pixels, fit: Fit, part: Box) -> None:
    height, width = pixels.shape[:2]
    # Rounded to pixels in the same way for every source of the same image.
    top, left = min(int(part[0] + 0.5), height - 1), min(int(part[1] + 0.5), width - 1)
    tall = min(max(int(part[2] + 0.5), 1), height - top)
    wide = min(max(int(part[3] + 0.5), 1), width - left)
    pixels = pixels[top : top + tall, left : left + wide]
    if fit != "pad":
        _resize_into(pixels, out)
        return
    scale = min(out.shape[0] / part[2], out.shape[1] / part[3])  # rounded sizes would depend on `shrink`
    inner_tall, inner_wide = max(int(part[2] * scale + 0.5), 1), max(int(part[3] * scale + 0.5), 1)
    above, before = (out.shape[0] - inner_tall) // 2, (out.shape[1] - inner_wide) // 2
    out[...] = 0
    _resize_into(pixels, out[above : above + inner_tall, before : before + inner_wide])


def _resize_into(pixels: Pixels, out: Pixels) -> None:
    if pixels.shape[:2] == out.shape[:2]:
        out[...] = pixels
        return
    while True:
        down, across = pixels.shape[0] / out.shape[0], pixels.shape[1] / out.shape[1]
        if min(down, across) >= 2:
            pixels = _halved(pixels, True, True)
        elif max(down, across) >= 3:  # below, bilinear sampling uses most of the pixels
            pixels = _halved(pixels, down >= 3, across >= 3)
        else:
            break
    target = out[..., 0] if out.shape[2] == 1 else out
    result = cv2.resize(pixels, (out.shape[1], out.shape[0]), dst=target, interpolation=cv2.INTER_LINEAR)
    if result is not target:
        target[...] = result


def _halved(pixels: Pixels, down: bool, across: bool) -> Pixels:
    """Averages pairs of pixels. Bilinear sampling alone would use a few of them only."""
    tall = pixels.shape[0] // 2 if down else pixels.shape[0]
    wide = pixels.shape[1] // 2 if across else pixels.shape[1]
    if not across:  # much faster than the same with `resize`
        return np.asarray(cv2.addWeighted(pixels[: 2 * tall : 2], 0.5, pixels[1 : 2 * tall : 2], 0.5, 0.0)).reshape(
            tall, wide, -1
        )
    whole = pixels[: 2 * tall if down else tall, : 2 * wide]
    return np.asarray(cv2.resize(whole, (wide, tall), interpolation=cv2.INTER_LINEAR)).reshape(tall, wide, -1)


def _convert(pixels: Pixels, out: Pixels, name: Callable[[], str]) -> Pixels:
    """Returns pixels with the type and channels of ``out``."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise DataError(f"{name()} has shape {'×'.join(map(str, pixels.shape))}; height × width × channels are needed.")
    if pixels.dtype != out.dtype:  # OpenCV does not resize all types
        pixels = pixels.astype(out.dtype)
    if pixels.shape[2] == out.shape[2]:
        return pixels
    if {pixels.shape[2], out.shape[2]} != {1, 3}:
        raise DataError(f"{name()} has {pixels.shape[2]} channels; {out.shape[2]} are needed.")
    if out.shape[2] == 3:
        return np.repeat(pixels, 3, axis=2)
    grey = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    return (np.rint(grey) if pixels.dtype == np.uint8 else grey).astype(pixels.dtype)[..., None]


class _JpegFile:
    """The header of a JPEG that libjpeg-turbo supports."""

    def __init__(self, data: bytes, height: int, width: int, grey: bool, orientation: int) -> None:
        self.data, self.grey, self.orientation = data, grey, orientation
        self.raw_height, self.raw_width = height, width
        turned = orientation in (5, 6, 7, 8)
        self.height, self.width = (width, height) if turned else (height, width)

    @classmethod
    def open(cls, data: bytes) -> _JpegFile | None:
        """Returns None if Pillow should read it: another colour space, or damage that Pillow describes better."""
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError):  # KeyError: an unknown subsampling
            return None
        if space not in ("YCbCr", "RGB", "Gray") or height * width > MOST_PIXELS:
            return None
        orientation = 1
        end = _header_length(data)
        if data.find(_PROGRESSIVE, 0, end) >= 0:
            try:
                check_jpeg(data)
            except ValueError:
                return None
        if any(data.find(mark, 0, end) >= 0 for mark in _MAY_TURN):
            try:
                with _opened(data, "") as image:
                    orientation = _orientation(image)
            except Exception:
                return None
        return cls(data, height, width, space == "Gray", orientation)

    def pixels(self, channels: int, shrink: int) -> Pixels | None:
        """Returns upright pixels at 1/``shrink`` of the size."""
        least = (-(-self.raw_height // shrink), -(-self.raw_width // shrink)) if shrink > 1 else (0, 0)
        try:
            pixels = simplejpeg.decode_jpeg(
                self.data, "RGB" if channels == 3 else "GRAY", min_height=least[0], min_width=least[1]
            )
        except ValueError:
            return None
        return _turned(pixels, self.orientation)


def _header_length(data: bytes) -> int:
    """Returns the length of a JPEG before its pixels: searching the whole file is slow."""
    start = 2
    while start + 4 <= len(data) and data[start] == 0xFF and data[start + 1] != 0xDA:
        start += 1 if data[start + 1] == 0xFF else 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    return start


def _orientation(image: Image.Image) -> int:
    """Returns the orientation in EXIF; 1, upright, if that is damaged."""
    try:
        check_tags(image.info.get("exif", b"").removeprefix(b"Exif\0\0"))
        if len(image.info.get("Raw profile type exif", "")) > _LONGEST_PROFILE:
            return 1
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Turns pixels upright."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels if orientation == 1 else np.ascontiguousarray(pixels)


def _opened(data: bytes, name: str) -> Image.Image:
    """Opens an image with Pillow, which reads the metadata."""
    (check_jpeg if data.startswith(_JPEG) else check_tags)(data)
    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise DataError(f"{name} declares {image.width}×{image.height} pixels; the limit is {MOST_PIXELS:,}.")
    return image


def _with_pillow(data: bytes, channels: int | None, name: str) -> Pixels:
    try:
        with _opened(data, name) as opened:
            opened.load()
            image: Image.Image = opened
            orientation = _orientation(opened)
            if image.mode == "I" or image.mode.startswith("I;16"):
                wide = np.asarray(image)
                wide = wide if wide.dtype == np.uint16 else wide.clip(0, 65535).astype(np.uint16)
                image = Image.fromarray((wide >> 8).astype(np.uint8))
            elif image.mode == "F":
                raise DataError(f"{name} holds floating-point pixels; give images of 8 or 16 bits.")
            if channels is None:
                channels = 1 if image.mode in ("1", "L", "LA") else 3
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (DataError, MemoryError):  # the image may be whole
        raise
    except Exception as error:
        raise _bad(name, error, data) from error
    return _turned(pixels[..., None] if pixels.ndim == 2 else pixels, orientation)


def _bad(name: str, error: BaseException, data: bytes) -> UndecodableError:
    reason = str(error).split(" <")[0].rstrip(".") or type(error).__name__
    if "cannot identify" in reason:
        kind = _UNSUPPORTED.get(data[8:12]) if data[4:8] == b"ftyp" else None
        reason = f"{kind} is not supported; convert it to JPEG" if kind else "it is not an image file that can be read"
    return UndecodableError(f"{name} can't be decoded: {reason}.")
