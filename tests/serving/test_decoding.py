"""Images that are decoded inside a graph have the pixels of training."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from modelyard.data.image_spec import ImageSpec
from modelyard.data.images import fill

pytestmark = [pytest.mark.tensorflow_only("SavedModels are TensorFlow's"), pytest.mark.usefixtures("two_devices")]
_DECODERS: dict[Any, Any] = {}


def decoder(shape: tuple[int, int, int], fit: Any, dtype: str = "uint8", unit_scale: bool = False) -> Any:
    """Compiled, once for all tests."""
    import tensorflow as tf

    from modelyard.serving.exporting.decoding import image_decoder

    key = (shape, fit, dtype, unit_scale)
    if key not in _DECODERS:
        function = image_decoder(ImageSpec(shape, dtype, fit, unit_scale))
        _DECODERS[key] = tf.function(function, input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    return _DECODERS[key]


def as_in_training(data: bytes, shape: tuple[int, int, int], fit: Any) -> NDArray[np.uint8]:
    out = np.empty(shape, np.uint8)
    fill(out, data, fit, None, lambda: "an image")
    return out


def noisy(random: np.random.Generator) -> Image.Image:
    """A picture of some size, smooth and noisy, so that every pixel that is looked at counts."""
    height, width = (int(side) for side in random.integers(9, 250, 2))
    small = Image.fromarray(random.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), np.uint8))
    pixels = np.asarray(small.resize((width, height))) + random.integers(-12, 13, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def files(random: np.random.Generator) -> list[bytes]:
    """A file of each kind that may come."""

    def exif() -> bytes:
        turned = Image.Exif()
        turned[0x0112] = int(random.integers(1, 9))
        return turned.tobytes()

    transparent = noisy(random)
    transparent.putalpha(transparent.convert("L"))
    deep = (np.asarray(noisy(random).convert("L")).astype(np.uint16) << 8) + 77
    return [
        saved(noisy(random), "JPEG", quality=int(random.integers(40, 99)), subsampling=2, exif=exif()),
        saved(noisy(random), "JPEG", subsampling=0, progressive=True, exif=exif()),
        saved(noisy(random).convert("L"), "JPEG", exif=exif()),
        saved(noisy(random), "PNG", exif=exif()),
        saved(noisy(random).convert("L"), "PNG"),
        saved(noisy(random).convert("1"), "PNG"),
        saved(noisy(random).quantize(50), "PNG", transparency=3),
        saved(transparent, "PNG"),
        saved(transparent.convert("LA"), "PNG"),
        saved(Image.fromarray(deep), "PNG"),
        saved(noisy(random), "GIF"),
        saved(noisy(random), "BMP"),
    ]


@pytest.mark.parametrize(
    ("shape", "fit"),
    [
        pytest.param((28, 28, 1), "pad", marks=pytest.mark.slow),
        pytest.param((17, 9, 3), "stretch", marks=pytest.mark.slow),
        ((32, 32, 3), "crop"),
    ],
)
def test_files_of_all_kinds_and_sizes_have_the_pixels_of_training(shape: tuple[int, int, int], fit: str) -> None:
    random = np.random.default_rng(sum(shape))
    decode = decoder(shape, fit)
    for number in range(2):
        for kind, data in enumerate(files(random)):
            expected = as_in_training(data, shape, fit)
            assert np.array_equal(decode(data).numpy(), expected), f"round {number}, file {kind}"


def test_inks_differ_by_one_at_most() -> None:
    random = np.random.default_rng(5)
    for _ in range(6):
        data = saved(noisy(random).convert("CMYK"), "JPEG")
        found = decoder((32, 32, 3), "crop")(data).numpy().astype(int)
        assert np.abs(found - as_in_training(data, (32, 32, 3), "crop")).max() <= 1


def test_the_same_part_is_taken_of_images_of_every_size() -> None:
    """A product with a reciprocal, which a graph makes of a division, would round halves the other way."""
    import tensorflow as tf

    from modelyard.serving.exporting.decoding import part_of

    tall, wide = (side.ravel() for side in np.meshgrid(np.arange(1, 300), np.arange(1, 300)))
    for height, width in ((28, 28), (224, 224), (49, 13)):
        function = tf.function(lambda a, b, h=height, w=width: part_of(a, b, h, w, "crop"), autograph=False)
        found = [side.numpy() for side in function(tf.constant(tall), tf.constant(wide))]
        scale = np.minimum(tall / height, wide / width)
        part = [(tall - height * scale) / 2, (wide - width * scale) / 2, height * scale, width * scale]
        assert all(np.array_equal(one, other) for one, other in zip(found, part, strict=True))


@pytest.mark.parametrize("order", ["<", ">"])
def test_images_are_turned_as_exif_says_in_either_order_of_bytes(order: str) -> None:
    plain = saved(noisy(np.random.default_rng(2)), "JPEG")
    for orientation in range(10):
        mark = b"II*\0" if order == "<" else b"MM\0*"
        tiff = mark + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
        segment = b"\xff\xe1" + struct.pack(">H", len(tiff) + 8) + b"Exif\0\0" + tiff
        data = plain[:2] + segment + plain[2:]
        expected = as_in_training(data, (32, 32, 3), "crop")
        assert np.array_equal(decoder((32, 32, 3), "crop")(data).numpy(), expected), orientation


def test_damaged_exif_is_taken_for_none() -> None:
    plain = saved(noisy(np.random.default_rng(3)), "JPEG")
    for tiff in (b"", b"MM", b"II*\0\xff\xff\xff\x7f", b"II*\0\x08\0\0\0\xff\xff", b"XX*\0\x08\0\0\0"):
        segment = b"\xff\xe1" + struct.pack(">H", len(tiff) + 8) + b"Exif\0\0" + tiff
        data = plain[:2] + segment + plain[2:]
        found = decoder((32, 32, 3), "crop")(data).numpy()
        assert np.array_equal(found, as_in_training(plain, (32, 32, 3), "crop")), tiff


def test_floats_are_shares_of_white() -> None:
    data = saved(noisy(np.random.default_rng(4)), "PNG")
    found = decoder((32, 32, 3), "crop", "float32", unit_scale=True)(data).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, as_in_training(data, (32, 32, 3), "crop").astype(np.float32) / 255)


@pytest.mark.parametrize("data", [b"", b"text", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n1234"])
def test_what_is_no_image_is_an_error(data: bytes) -> None:
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError):
        decoder((32, 32, 3), "crop")(data)
