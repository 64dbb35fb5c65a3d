"""The built-in datasets and augmentations: names, options and help. Their code is imported when used."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from modelyard.config.calls import parse_list
from modelyard.registry import AUGMENTATIONS, DATASETS, Options

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(parse_list)]


class SyntheticOptions(Options):
    """Size and shape of the synthetic dataset."""

    synthetic_examples: int = Field(1000, ge=10, description="training examples; validation and test get a fifth each")
    synthetic_shape: Shape = Field((32, 32, 3), description="shape of an image, such as 32,32,3", min_length=1)
    synthetic_classes: int = Field(10, ge=2, le=1 << 20, description="number of classes")
    synthetic_noise: float = Field(0.5, ge=0, description="noise over the class patterns; more is harder")


class PadAndCropOptions(Options):
    """How far images are moved."""

    padding: int = Field(4, ge=1, description="pixels of padding on each side before a random crop to the old size")


class FlipOptions(Options):
    """How often images are flipped."""

    probability: float = Field(0.5, ge=0, le=1, description="share of the images that are flipped")


DATASETS.declare(
    "digits",
    "modelyard.data.digits:digits",
    summary="1,797 handwritten digits, 8×8 grey, 10 classes; comes with scikit-learn, needs no download",
)
DATASETS.declare(
    "synthetic",
    "modelyard.data.synthetic:synthetic",
    options=SyntheticOptions,
    summary="noisy class patterns of any size and shape, made on the spot",
)
DATASETS.declare("mnist", "modelyard.data.official:mnist", summary="70,000 handwritten digits, 28×28 grey, 10 classes")
DATASETS.declare(
    "fashion_mnist",
    "modelyard.data.official:fashion_mnist",
    summary="70,000 pieces of clothing, 28×28 grey, 10 classes",
)
DATASETS.declare("cifar10", "modelyard.data.official:cifar10", summary="60,000 photographs, 32×32 colour, 10 classes")
DATASETS.declare(
    "cifar100", "modelyard.data.official:cifar100", summary="60,000 photographs, 32×32 colour, 100 classes"
)
DATASETS.declare(
    "npz",
    "modelyard.data.npz:named_file",
    summary="your own arrays: --dataset FILE.npz with x_train, y_train and, if you have them, x_test, y_test, "
    "x_validation, y_validation, classes",
)

AUGMENTATIONS.declare(
    "pad_and_crop",
    "modelyard.data.augment:PadAndCrop",
    options=PadAndCropOptions,
    summary="pad with black and crop at random to the old size",
)
AUGMENTATIONS.declare(
    "flip_left_right", "modelyard.data.augment:FlipLeftRight", options=FlipOptions, summary="mirror images at random"
)
