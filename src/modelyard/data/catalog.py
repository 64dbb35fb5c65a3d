"""The built-in datasets and augmentations: names, options and help. Their code is imported when used."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from modelyard.config.calls import parse_list
from modelyard.registry import AUGMENTATIONS, DATASETS, Options

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(parse_list)]


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError("the first of the two must not be greater than the second")
    return pair


_Share = Annotated[float, Field(gt=0, le=1)]
_Ratio = Annotated[float, Field(ge=0.05, le=20)]


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


class RotationOptions(Options):
    """How far images are turned."""

    degrees: float = Field(15.0, ge=0, le=180, description="greatest angle, either way")


class RandomResizedCropOptions(Options):
    """Which part of an image is taken."""

    scale: Annotated[tuple[_Share, _Share], BeforeValidator(parse_list), AfterValidator(_ordered)] = Field(
        (0.08, 1.0), description="least and greatest area, as shares of the image"
    )
    ratio: Annotated[tuple[_Ratio, _Ratio], BeforeValidator(parse_list), AfterValidator(_ordered)] = Field(
        (0.75, 1.3333), description="least and greatest ratio of width to height"
    )


class AmountOptions(Options):
    """How far colours change."""

    amount: float = Field(0.2, ge=0, le=1, description="greatest change, either way, as a share")


class HueOptions(Options):
    """How far hues turn."""

    amount: float = Field(0.05, ge=0, le=0.5, description="greatest turn, either way; 0.5 is half the circle")


class NoiseOptions(Options):
    """How much noise."""

    spread: float = Field(0.05, ge=0, description="standard deviation, as a share of 255 for uint8, of 1 for floats")


class CutoutOptions(Options):
    """How much is hidden."""

    size: int = Field(8, ge=0, description="side of the black square in pixels")


class MixOptions(Options):
    """How much of its neighbour an example gets."""

    alpha: float = Field(1.0, ge=0, le=100, description="shape of Beta(alpha, alpha): small mixes little; 0 not at all")
    probability: float = Field(1.0, ge=0, le=1, description="share of the examples that are mixed")


class RandAugmentOptions(Options):
    """How many operations, how strong."""

    operations: int = Field(2, ge=1, le=10, description="operations an example")
    magnitude: float = Field(9, ge=0, le=30, description="strength of all of them, 0 to 30")


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
    "modelyard.data.augment_geometry:PadAndCrop",
    options=PadAndCropOptions,
    summary="pad with black and crop at random to the old size",
)
AUGMENTATIONS.declare(
    "random_resized_crop",
    "modelyard.data.augment_geometry:RandomResizedCrop",
    options=RandomResizedCropOptions,
    summary="a random part of the image, resized to the old size",
)
AUGMENTATIONS.declare(
    "flip_left_right",
    "modelyard.data.augment_geometry:FlipLeftRight",
    options=FlipOptions,
    summary="mirror images at random",
)
AUGMENTATIONS.declare(
    "flip_up_down",
    "modelyard.data.augment_geometry:FlipUpDown",
    options=FlipOptions,
    summary="turn images upside down at random",
)
AUGMENTATIONS.declare(
    "rotation",
    "modelyard.data.augment_geometry:Rotation",
    options=RotationOptions,
    summary="turn images about their centre; black comes in at the corners",
)
AUGMENTATIONS.declare(
    "brightness",
    "modelyard.data.augment_colour:Brightness",
    options=AmountOptions,
    summary="add the same to all pixels",
)
AUGMENTATIONS.declare(
    "contrast",
    "modelyard.data.augment_colour:Contrast",
    options=AmountOptions,
    summary="move values away from the mean of their channel, or towards it",
)
AUGMENTATIONS.declare(
    "saturation",
    "modelyard.data.augment_colour:Saturation",
    options=AmountOptions,
    summary="move colours away from grey, or towards it",
)
AUGMENTATIONS.declare(
    "hue",
    "modelyard.data.augment_colour:Hue",
    options=HueOptions,
    summary="turn colours around the circle of hues",
)
AUGMENTATIONS.declare(
    "noise",
    "modelyard.data.augment_colour:Noise",
    options=NoiseOptions,
    summary="add normal noise to every value",
)
AUGMENTATIONS.declare(
    "cutout",
    "modelyard.data.augment_mix:Cutout",
    options=CutoutOptions,
    summary="paint a square black, at a random place",
)
AUGMENTATIONS.declare(
    "mixup",
    "modelyard.data.augment_mix:Mixup",
    options=MixOptions,
    summary="lay the neighbour in the batch over the image; labels are mixed alike",
)
AUGMENTATIONS.declare(
    "cutmix",
    "modelyard.data.augment_mix:Cutmix",
    options=MixOptions,
    summary="put a box of the neighbour in the batch into the image; labels count by area",
)
AUGMENTATIONS.declare(
    "rand_augment",
    "modelyard.data.rand_augment:RandAugment",
    options=RandAugmentOptions,
    summary="a few operations out of a list, chosen anew for each example",
)
