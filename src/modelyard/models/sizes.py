"""What the built-in models cost with their default options, so that a list of them needs no network to be built.

Made by building each; a test builds them again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Parameters and FLOPs of a model.

    Args:
        side: height and width of the images.
        parameters: all weights, moving statistics included.
        flops: multiplications and additions for one image.
    """

    side: int
    parameters: int
    flops: int
    channels: int = 3
    classes: int = 10

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the images."""
        return self.side, self.side, self.channels

    @property
    def costs(self) -> tuple[int, int]:
        """Parameters and FLOPs."""
        return self.parameters, self.flops


SIZES: dict[str, Size] = {}
