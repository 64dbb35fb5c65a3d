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


def _height_and_width(value: Any) -> list[Any]:
    sizes = parse_list(value)
    return sizes * 2 if len(sizes) == 1 else sizes


_Edge = Annotated[int, Field(ge=1, le=1 << 15)]
ImageSize = Annotated[tuple[_Edge, _Edge], BeforeValidator(_height_and_width)]


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError("the first of the two must not be greater than the second")
    return pair


_Share = Annotated[float, Field(gt=0, le=1)]
_Ratio = Annotated[float, Field(ge=0.05, le=20)]


class SyntheticOptions(Options):
    """Options of the synthetic dataset."""

    synthetic_examples: int = Field(1000, ge=10, description="training examples; validation and test get a fifth each")
    synthetic_shape: Shape = Field((32, 32, 3), description="shape of an image, such as 32,32,3", min_length=1)
    synthetic_classes: int = Field(10, ge=2, le=1 << 20, description="number of classes")
    synthetic_noise: float = Field(0.5, ge=0, description="noise over the class patterns; more is harder")


_PATH: dict[str, Any] = {"path": True}
"""Marks options that name files: config.yaml stores them as absolute paths."""


class FilesOptions(Options):
    """Options of a user's own files."""

    train_files: str | None = Field(
        None, json_schema_extra=_PATH, description="training files: a folder, a file, or a pattern with *"
    )
    eval_files: str | None = Field(None, json_schema_extra=_PATH, description="the same for validation")
    test_files: str | None = Field(None, json_schema_extra=_PATH, description="the same for test")
    image_size: ImageSize | None = Field(None, description="size to resize images to: 224, or height and width 224,160")
    image_fit: Literal["crop", "stretch", "pad"] = Field(
        "crop", description="images of another shape: the middle part, distorted, or whole with black bars"
    )
    image_channels: Literal[1, 3] | None = Field(None, description="1 for grey, 3 for colour; default: as stored, or 3")
    labels_file: str | None = Field(
        None, json_schema_extra=_PATH, description="class names, one per line, in the order of their indices"
    )
    image_column: str = Field("path", description=".csv: column of image paths, relative to the file")
    label_column: str = Field("label", description=".csv: column of labels; several, with commas, of numbers or flags")
    label_kind: Literal["class", "numbers", "flags"] = Field(
        "class", description=".csv: labels are class names, numbers to predict, or 0 and 1 in a column per class"
    )
    split_column: str = Field("split", description=".csv: optional column with train, validation or test")
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
        # On the command line everything is text, and pydantic compares choices as they are.
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class PadAndCropOptions(Options):
    """Options of `pad_and_crop`."""

    padding: int = Field(4, ge=1, description="pixels of padding on each side before a random crop to the old size")
    fill: Literal["black", "reflect"] = Field("black", description="the padding: black, or the image reflected")


class FlipOptions(Options):
    """Options of `flip_up_down`."""

    probability: float = Field(0.5, ge=0, le=1, description="share of the images that are flipped")


class FlipLeftRightOptions(FlipOptions):
    """Options of `flip_left_right`."""

    alternate: bool = Field(False, description="each image in every other epoch, instead of at random")

    @model_validator(mode="after")
    def _one_of_two(self) -> FlipLeftRightOptions:
        if self.alternate and "probability" in self.model_fields_set:
            raise ValueError("probability and alternate exclude each other; give one of the two.")
        return self


class RotationOptions(Options):
    """Options of `rotation`."""

    degrees: float = Field(15.0, ge=0, le=180, description="greatest angle, either way")


class RandomResizedCropOptions(Options):
    """Options of `random_resized_crop`."""

    scale: Annotated[tuple[_Share, _Share], BeforeValidator(parse_list), AfterValidator(_ordered)] = Field(
        (0.08, 1.0), description="least and greatest area, as shares of the image"
    )
    ratio: Annotated[tuple[_Ratio, _Ratio], BeforeValidator(parse_list), AfterValidator(_ordered)] = Field(
        (0.75, 1.3333), description="least and greatest ratio of width to height"
    )


class AmountOptions(Options):
    """Options of `brightness`, `contrast` and `saturation`."""

    amount: float = Field(0.2, ge=0, le=1, description="greatest change, either way, as a share")


class HueOptions(Options):
    """Options of `hue`."""

    amount: float = Field(0.05, ge=0, le=0.5, description="greatest turn, either way; 0.5 is half the circle")


class NoiseOptions(Options):
    """Options of `noise`."""

    spread: float = Field(0.05, ge=0, description="standard deviation, as a share of 255 for uint8, of 1 for floats")


class CutoutOptions(Options):
    """Options of `cutout`."""

    size: int = Field(8, ge=0, description="side of the square in pixels")
    fill: Literal["black", "grey"] = Field("black", description="colour of the square: black, or half of white")
    inside: bool = Field(False, description="the whole square is inside the image; else only its centre is")


class MixOptions(Options):
    """Options of `mixup` and `cutmix`."""

    alpha: float = Field(1.0, ge=0, le=100, description="shape of Beta(alpha, alpha): small mixes little; 0 not at all")
    probability: float = Field(1.0, ge=0, le=1, description="share of the examples that are mixed")


class RandAugmentOptions(Options):
    """Options of `rand_augment`."""

    operations: int = Field(2, ge=1, le=10, description="operations per example")
    magnitude: float = Field(9, ge=0, le=30, description="strength of all of them, 0 to 30")


_Table = tuple[tuple[str, str, type[Options], str], ...]
_DATASETS: _Table = (
    (
        "digits",
        "builtin:digits",
        Options,
        "1,797 handwritten digits, 8×8 grey, 10 classes; comes with scikit-learn, needs no download",
    ),
    ("synthetic", "builtin:synthetic", SyntheticOptions, "noisy class patterns of any size and shape"),
    ("mnist", "builtin:mnist", Options, "70,000 handwritten digits, 28×28 grey, 10 classes"),
    ("fashion_mnist", "builtin:fashion_mnist", Options, "70,000 pieces of clothing, 28×28 grey, 10 classes"),
    ("cifar10", "builtin:cifar10", Options, "60,000 photographs, 32×32 colour, 10 classes"),
    ("cifar100", "builtin:cifar100", Options, "60,000 photographs, 32×32 colour, 100 classes"),
    (
        "files",
        "files:files",
        FilesOptions,
        "your own files: --dataset PATH of a folder per class, a .csv, .npz or .npy file, or records; "
        "or --train_files, --eval_files, --test_files",
    ),
    ("arrays", "arrays:given", Options, "arrays that a Python program gives: train(dataset=(x, y))"),
)
_AUGMENTATIONS: _Table = (
    ("pad_and_crop", "geometry:PadAndCrop", PadAndCropOptions, "pad images, and crop them at random to their size"),
    (
        "random_resized_crop",
        "geometry:RandomResizedCrop",
        RandomResizedCropOptions,
        "crop images at random, and resize them back",
    ),
    (
        "flip_left_right",
        "geometry:FlipLeftRight",
        FlipLeftRightOptions,
        "mirror images at random or in every other epoch",
    ),
    ("flip_up_down", "geometry:FlipUpDown", FlipOptions, "turn images upside down at random"),
    ("rotation", "geometry:Rotation", RotationOptions, "rotate images about their center; corners become black"),
    ("brightness", "colour:Brightness", AmountOptions, "add the same number to all pixels"),
    ("contrast", "colour:Contrast", AmountOptions, "move values away from the mean of their channel, or towards it"),
    ("saturation", "colour:Saturation", AmountOptions, "move colours away from grey, or towards it"),
    ("hue", "colour:Hue", HueOptions, "rotate colours on the circle of hues"),
    ("noise", "colour:Noise", NoiseOptions, "add normal noise to every value"),
    ("cutout", "mix:Cutout", CutoutOptions, "paint a square at a random position"),
    ("mixup", "mix:Mixup", MixOptions, "blend the image with its neighbour in the batch, and the labels alike"),
    (
        "cutmix",
        "mix:Cutmix",
        MixOptions,
        "replace a box by that of the neighbour in the batch, and mix the labels by area",
    ),
    ("rand_augment", "rand_augment:RandAugment", RandAugmentOptions, "a few random operations per example"),
)
for _name, _target, _options, _summary in _DATASETS:
    DATASETS.declare(_name, f"modelyard.data.sources.{_target}", options=_options, summary=_summary)
for _name, _target, _options, _summary in _AUGMENTATIONS:
    AUGMENTATIONS.declare(_name, f"modelyard.data.augment.{_target}", options=_options, summary=_summary)
