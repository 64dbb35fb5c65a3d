"""The built-in datasets and augmentations: names, options and help. Their code is imported when used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from modelyard.config.calls import parse_list
from modelyard.registry import AUGMENTATIONS, DATASETS, Options

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(parse_list)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


def _two(value: Any) -> list[Any]:
    """One number is height and width."""
    sizes = parse_list(value)
    return sizes * 2 if len(sizes) == 1 else sizes


_Edge = Annotated[int, Field(ge=1, le=1 << 15)]
ImageSize = Annotated[tuple[_Edge, _Edge], BeforeValidator(_two)]


class SyntheticOptions(Options):
    """Size and shape of the synthetic dataset."""

    synthetic_examples: int = Field(1000, ge=10, description="training examples; validation and test get a fifth each")
    synthetic_shape: Shape = Field((32, 32, 3), description="shape of an image, such as 32,32,3", min_length=1)
    synthetic_classes: int = Field(10, ge=2, le=1 << 20, description="number of classes")
    synthetic_noise: float = Field(0.5, ge=0, description="noise over the class patterns; more is harder")


class FilesOptions(Options):
    """Where the examples of a user's own files are, and what is made of them."""

    train_files: str | None = Field(None, description="training files: a folder, a file, or a pattern with *")
    eval_files: str | None = Field(None, description="the same for validation")
    test_files: str | None = Field(None, description="the same for test")
    image_size: ImageSize | None = Field(None, description="size images are given: 224, or height and width 224,160")
    image_fit: Literal["crop", "stretch", "pad"] = Field(
        "crop", description="images of another shape: the middle part, distorted, or whole with black bars"
    )
    image_channels: Literal[1, 3] | None = Field(None, description="1 for grey, 3 for colour; default: as stored, or 3")
    labels_file: str | None = Field(None, description="names of the classes, one a line, in the order of their numbers")
    image_column: str = Field("path", description=".csv: column of image paths, relative to the file")
    label_column: str = Field("label", description=".csv: column of labels")
    split_column: str = Field("split", description=".csv: column that says train, validation or test, if it is there")
    value_columns: Names = Field((), description=".csv: columns of numbers instead of images; 'all' for all others")
    record_image: str = Field("image/encoded", description="records: feature that holds the image")
    record_label: str = Field("image/class/label", description="records: feature that holds the label")
    record_coding: Literal["encoded", "raw", "floats"] = Field(
        "encoded", description="records: the image is a file (JPEG, PNG, …), raw bytes or a list of floats"
    )
    record_shape: Shape | None = Field(None, description="records: height,width,channels of raw and float images")
    record_layout: Literal["hwc", "chw"] = Field("hwc", description="records: order of axes of raw and float images")
    record_dtype: str = Field("uint8", description="records: type of raw values", pattern=r"^(u?int(8|16|32)|float32)$")
    record_height: str | None = Field(None, description="records: feature that holds the height of raw images")
    record_width: str | None = Field(None, description="records: feature that holds the width of raw images")
    record_first_label: int = Field(0, ge=0, description="records: 1 if labels are counted from 1")


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
    "files",
    "modelyard.data.files:files",
    options=FilesOptions,
    summary="your own files: --dataset PATH of a folder per class, a .csv, .npz or .npy file, or records; "
    "or --train_files, --eval_files, --test_files",
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
