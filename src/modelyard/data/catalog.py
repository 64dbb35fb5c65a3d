"""The built-in datasets and augmentations: names, options and help. Their code is imported when used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from modelyard.config.calls import parse_list
from modelyard.registry import AUGMENTATIONS, DATASETS, Options

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(parse_list)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_list)]
RawType = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
"""Types of raw values in records."""


def _two(value: Any) -> list[Any]:
    """One number is height and width."""
    sizes = parse_list(value)
    return sizes * 2 if len(sizes) == 1 else sizes


_Edge = Annotated[int, Field(ge=1, le=1 << 15)]
ImageSize = Annotated[tuple[_Edge, _Edge], BeforeValidator(_two)]


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


_PATH: dict[str, Any] = {"path": True}
"""Marks options that name files: a run keeps them as absolute paths."""


class FilesOptions(Options):
    """Where the examples of a user's own files are, and what is made of them."""

    train_files: str | None = Field(
        None, json_schema_extra=_PATH, description="training files: a folder, a file, or a pattern with *"
    )
    eval_files: str | None = Field(None, json_schema_extra=_PATH, description="the same for validation")
    test_files: str | None = Field(None, json_schema_extra=_PATH, description="the same for test")
    image_size: ImageSize | None = Field(None, description="size images are given: 224, or height and width 224,160")
    image_fit: Literal["crop", "stretch", "pad"] = Field(
        "crop", description="images of another shape: the middle part, distorted, or whole with black bars"
    )
    image_channels: Literal[1, 3] | None = Field(None, description="1 for grey, 3 for colour; default: as stored, or 3")
    labels_file: str | None = Field(
        None, json_schema_extra=_PATH, description="names of the classes, one a line, in the order of their numbers"
    )
    image_column: str = Field("path", description=".csv: column of image paths, relative to the file")
    label_column: str = Field("label", description=".csv: column of labels; several, with commas, of numbers or flags")
    label_kind: Literal["class", "numbers", "flags"] = Field(
        "class", description=".csv: labels are names of classes, numbers to predict, or 0 and 1 in a column a class"
    )
    split_column: str = Field("split", description=".csv: column that says train, validation or test, if it is there")
    value_columns: Names = Field((), description=".csv: columns of numbers instead of images; 'all' for all others")
    record_image: str = Field("image/encoded", description="records: feature that holds the image")
    record_label: str = Field("image/class/label", description="records: feature that holds the label")
    record_coding: Literal["encoded", "raw", "floats"] = Field(
        "encoded", description="records: the image is a file (JPEG, PNG, …), raw bytes or a list of floats"
    )
    record_shape: Shape | None = Field(None, description="records: height,width,channels of raw and float images")
    record_layout: Literal["hwc", "chw"] = Field("hwc", description="records: order of axes of raw and float images")
    record_dtype: RawType = Field("uint8", description="records: type of raw values")
    record_height: str | None = Field(None, description="records: feature that holds the height of raw images")
    record_width: str | None = Field(None, description="records: feature that holds the width of raw images")
    record_first_label: int = Field(0, ge=0, description="records: 1 if labels are counted from 1")

    @field_validator("image_channels", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """On the command line everything is text, and pydantic compares choices as they are."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class PadAndCropOptions(Options):
    """How far images are moved."""

    padding: int = Field(4, ge=1, description="pixels of padding on each side before a random crop to the old size")
    fill: Literal["black", "reflect"] = Field("black", description="what is padded: black, or the image reflected")


class FlipOptions(Options):
    """How often images are flipped."""

    probability: float = Field(0.5, ge=0, le=1, description="share of the images that are flipped")


class FlipLeftRightOptions(FlipOptions):
    """How often images are mirrored."""

    alternate: bool = Field(False, description="each image in every other epoch, instead of at random")

    @model_validator(mode="after")
    def _one_of_two(self) -> FlipLeftRightOptions:
        if self.alternate and "probability" in self.model_fields_set:
            raise ValueError("probability stands beside alternate, which flips by epoch; give one of the two.")
        return self


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

    size: int = Field(8, ge=0, description="side of the square in pixels")
    fill: Literal["black", "grey"] = Field("black", description="what the square is painted: black, or half of white")
    inside: bool = Field(False, description="the whole square lies inside; else its centre does")


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
    "modelyard.data.sources.digits:digits",
    summary="1,797 handwritten digits, 8×8 grey, 10 classes; comes with scikit-learn, needs no download",
)
DATASETS.declare(
    "synthetic",
    "modelyard.data.sources.synthetic:synthetic",
    options=SyntheticOptions,
    summary="noisy class patterns of any size and shape, made on the spot",
)
DATASETS.declare(
    "mnist", "modelyard.data.sources.official:mnist", summary="70,000 handwritten digits, 28×28 grey, 10 classes"
)
DATASETS.declare(
    "fashion_mnist",
    "modelyard.data.sources.official:fashion_mnist",
    summary="70,000 pieces of clothing, 28×28 grey, 10 classes",
)
DATASETS.declare(
    "cifar10", "modelyard.data.sources.official:cifar10", summary="60,000 photographs, 32×32 colour, 10 classes"
)
DATASETS.declare(
    "cifar100", "modelyard.data.sources.official:cifar100", summary="60,000 photographs, 32×32 colour, 100 classes"
)
DATASETS.declare(
    "files",
    "modelyard.data.sources.files:files",
    options=FilesOptions,
    summary="your own files: --dataset PATH of a folder per class, a .csv, .npz or .npy file, or records; "
    "or --train_files, --eval_files, --test_files",
)

AUGMENTATIONS.declare(
    "pad_and_crop",
    "modelyard.data.augment.geometry:PadAndCrop",
    options=PadAndCropOptions,
    summary="pad with black, or by reflection, and crop at random to the old size",
)
AUGMENTATIONS.declare(
    "random_resized_crop",
    "modelyard.data.augment.geometry:RandomResizedCrop",
    options=RandomResizedCropOptions,
    summary="a random part of the image, resized to the old size",
)
AUGMENTATIONS.declare(
    "flip_left_right",
    "modelyard.data.augment.geometry:FlipLeftRight",
    options=FlipLeftRightOptions,
    summary="mirror images at random, or each in every other epoch",
)
AUGMENTATIONS.declare(
    "flip_up_down",
    "modelyard.data.augment.geometry:FlipUpDown",
    options=FlipOptions,
    summary="turn images upside down at random",
)
AUGMENTATIONS.declare(
    "rotation",
    "modelyard.data.augment.geometry:Rotation",
    options=RotationOptions,
    summary="turn images about their centre; black comes in at the corners",
)
AUGMENTATIONS.declare(
    "brightness",
    "modelyard.data.augment.colour:Brightness",
    options=AmountOptions,
    summary="add the same to all pixels",
)
AUGMENTATIONS.declare(
    "contrast",
    "modelyard.data.augment.colour:Contrast",
    options=AmountOptions,
    summary="move values away from the mean of their channel, or towards it",
)
AUGMENTATIONS.declare(
    "saturation",
    "modelyard.data.augment.colour:Saturation",
    options=AmountOptions,
    summary="move colours away from grey, or towards it",
)
AUGMENTATIONS.declare(
    "hue",
    "modelyard.data.augment.colour:Hue",
    options=HueOptions,
    summary="turn colours around the circle of hues",
)
AUGMENTATIONS.declare(
    "noise",
    "modelyard.data.augment.colour:Noise",
    options=NoiseOptions,
    summary="add normal noise to every value",
)
AUGMENTATIONS.declare(
    "cutout",
    "modelyard.data.augment.mix:Cutout",
    options=CutoutOptions,
    summary="paint a square black, at a random place",
)
AUGMENTATIONS.declare(
    "mixup",
    "modelyard.data.augment.mix:Mixup",
    options=MixOptions,
    summary="lay the neighbour in the batch over the image; labels are mixed alike",
)
AUGMENTATIONS.declare(
    "cutmix",
    "modelyard.data.augment.mix:Cutmix",
    options=MixOptions,
    summary="put a box of the neighbour in the batch into the image; labels count by area",
)
AUGMENTATIONS.declare(
    "rand_augment",
    "modelyard.data.augment.rand_augment:RandAugment",
    options=RandAugmentOptions,
    summary="a few operations out of a list, chosen anew for each example",
)
