"""Where image and label are in the records of a file, ours or others'."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import RawType
from modelyard.errors import DataError

Coding = Literal["encoded", "raw", "floats"]
Layout = Literal["hwc", "chw"]


@dataclass(frozen=True)
class FeatureMap:
    """Which features hold what.

    Args:
        image: the feature with the image.
        label: the feature with its class: a whole number, or text; None where there is none, and all are 0.
        coding: ``encoded`` is the bytes of an image file (JPEG, PNG, …), ``raw`` bytes of pixels, ``floats`` a list.
        layout: order of raw pixels and floats; ``chw`` has all of one channel first.
        shape: height, width, channels, whatever the layout; or any shape for values that are no image.
        height: the feature with the height, where sizes differ.
        width: the feature with the width.
        dtype: of raw pixels, little endian.
        first_label: the number of the first class, 1 where they are counted from 1.
    """

    image: str = "image/encoded"
    label: str | None = "image/class/label"
    coding: Coding = "encoded"
    layout: Layout = "hwc"
    shape: tuple[int, ...] | None = None
    height: str | None = None
    width: str | None = None
    dtype: RawType = "uint8"
    first_label: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("coding", self.coding, get_args(Coding)),
            ("layout", self.layout, get_args(Layout)),
            ("dtype", self.dtype, get_args(RawType)),
        ):
            if value not in known:
                raise DataError(f"{name} of a feature map is one of {', '.join(known)}, not {value!r}.")
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
            if not self.shape or min(self.shape) < 1 or math.prod(self.shape) > 1 << 40:
                raise DataError(f"{self.shape} is no shape of an image: give height, width, channels from 1 on.")
        if (self.height is None) != (self.width is None):
            raise DataError("a feature map names both the feature with the height and that with the width, or neither.")
        if self.coding == "raw" and self.shape is None and self.height is None:
            raise DataError(
                "raw images need --record_shape height,width,channels, or --record_height and --record_width."
            )
        if self.layout == "chw" and self.shape is not None and len(self.shape) != 3:
            raise DataError(f"layout chw needs a shape of height, width, channels, not {self.shape}.")

    def wanted(self) -> tuple[str, ...]:
        """The features that are looked for."""
        return tuple(name for name in (self.image, self.label, self.height, self.width) if name is not None)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "shape": None if self.shape is None else list(self.shape)}

    def stored_dtype(self) -> np.dtype[np.generic]:
        """Of raw pixels and floats, as the record holds them."""
        return np.dtype("float32" if self.coding == "floats" else self.dtype).newbyteorder("<")

    def stored_shape(self, length: int, height: int, width: int) -> tuple[int, ...]:
        """The shape of a raw or float image of ``length`` bytes; height and width are the record's, 0 if unknown.

        Raises:
            ValueError: if the bytes do not fit, with both sizes.
        """
        dtype = self.stored_dtype()
        shape = self.shape
        if shape is None and self.height is not None:
            pixels = height * width * dtype.itemsize
            if not pixels or not length or length % pixels:
                raise ValueError(f"its image has {length:,} bytes, but {height} × {width} pixels of {dtype.name}")
            return height, width, length // pixels
        if shape is None:
            shape = (length // dtype.itemsize,)
        if (needed := math.prod(shape) * dtype.itemsize) != length:
            size = " × ".join(map(str, shape))
            raise ValueError(f"its image has {length:,} bytes, but {size} of {dtype.name} needs {needed:,}")
        return shape

    def array(self, payload: bytes, height: int, width: int) -> NDArray[np.generic]:
        """The pixels or values of a raw or float image, as height × width × channels.

        Raises:
            ValueError: if the bytes do not fit, with both sizes.
        """
        shape = self.stored_shape(len(payload), height, width)
        dtype = self.stored_dtype()
        values = np.frombuffer(payload, dtype).astype(dtype.newbyteorder("="), copy=False)
        if self.layout == "chw" and len(shape) == 3:
            return np.ascontiguousarray(values.reshape(shape[2], *shape[:2]).transpose(1, 2, 0))
        return values.reshape(shape)
