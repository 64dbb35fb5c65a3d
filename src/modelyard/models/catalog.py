"""The built-in models, optimizers and schedules: names, options and help. Their code is imported when used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, field_validator

from modelyard.config.calls import parse_list
from modelyard.config.durations import StepDuration
from modelyard.registry import MODELS, OPTIMIZERS, SCHEDULES, Options

Positive = Annotated[int, Field(ge=1)]
Widths = Annotated[tuple[Positive, ...], BeforeValidator(parse_list)]
StepDurations = Annotated[tuple[StepDuration, ...], BeforeValidator(parse_list)]
BALANCED = "balanced"


# -- options of models ------------------------------------------------------------------------------------------------


def parse_weights(value: Any) -> str | dict[str, float] | tuple[float, ...] | None:
    """Parses the option: "balanced"; weights by name, as a mapping or as "cat=2,dog=0.5"; or one weight per class."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return None
    if isinstance(value, str) and value.strip().lower() == BALANCED:
        return BALANCED
    if isinstance(value, Mapping):
        found: Any = {str(name): _weight(weight) for name, weight in value.items()}
    else:
        parts = parse_list(value)
        named = [str(part).rpartition("=") for part in parts if isinstance(part, str) and "=" in part]
        if named and len(named) < len(parts):
            raise ValueError(f"mixes weights with and without a name, got {value!r}. Write 'cat=2,dog=0.5'.")
        names = [name.strip() for name, _, _ in named]
        if len(set(names)) < len(names):
            raise ValueError(f"names {max(names, key=names.count)!r} twice.")
        found = {name.strip(): _weight(w) for name, _, w in named} if named else tuple(map(_weight, parts))
    if not found:
        raise ValueError("is empty. Write balanced, 'cat=2,dog=0.5', or one weight per class.")
    return found  # type: ignore[no-any-return]


def _weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if isinstance(value, bool) or not 0 <= weight < math.inf:
        raise ValueError(f"{value!r} is not a weight. Write balanced, 'cat=2,dog=0.5', or one weight per class.")
    return weight


ClassWeights = Annotated[
    str | dict[str, float] | tuple[float, ...] | None,
    PlainValidator(parse_weights),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value),
]
"""The type of the option; `task_types.class_weights` turns it into numbers."""


class RegressorOptions(Options):
    """Options of every regression."""

    regression_loss: Literal["mse", "mae", "huber"] = Field(
        "mse", description="task regression: mean squared, mean absolute or Huber loss"
    )
    huber_delta: float = Field(
        1.0, gt=0, description="where the Huber loss becomes linear, in units of the labels' spread"
    )


class ClassifierOptions(RegressorOptions):
    """Options of every classifier, and of networks that may be trained as another task."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the target spread over all classes")
    class_weights: ClassWeights = Field(
        None, description="weights in the training loss: balanced, 'cat=2,dog=0.5' (others 1), or one per class"
    )
    focal_gamma: float = Field(0.0, ge=0, le=20, description="focal loss: examples already right count less; 0: off")


MODELS.default_options = ClassifierOptions


class SimpleCnnOptions(ClassifierOptions):
    """Size of the simple CNN."""

    filters: Widths = Field((32, 64), min_length=1, description="filters of each convolution, such as 32,64")
    dense_units: int = Field(128, ge=1, description="units of the dense layer")
    dropout_rate: float = Field(0.3, ge=0, lt=1, description="dropout before the last layer")


class MnistCnnOptions(ClassifierOptions):
    """Regularisation of the MNIST CNN."""

    dropout_rate: float = Field(0.4, ge=0, lt=1, description="dropout before the last layer")


class MlpOptions(ClassifierOptions):
    """Size of the multi-layer perceptron."""

    hidden_units: Widths = Field((128, 128), description="units of each hidden layer, such as 128,128")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout after each hidden layer")


class ResNetOptions(ClassifierOptions):
    """Variants of the CIFAR ResNets."""

    width: int = Field(
        16, ge=1, description="filters of the first stage; the next two have twice and four times as many"
    )
    batch_norm_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the moving averages")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer")


class BasicResNetOptions(ResNetOptions):
    """Variants of ResNet-18 and ResNet-34."""

    width: int = Field(64, ge=1, description="filters of the first stage; each of the next three has twice as many")
    stem: Literal["auto", "small", "large"] = Field(
        "auto",
        description="small: a 3×3 convolution; large: 7×7 with stride 2 and a pool; auto: large from 96×96 on",
    )


class WideResNetOptions(ClassifierOptions):
    """Size of the wide ResNet."""

    depth: int = Field(16, ge=10, description="layers: 6 n + 4, such as 10, 16, 22, 28, 40")
    widen: int = Field(4, ge=1, description="how many times wider than a CIFAR ResNet")
    batch_norm_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the moving averages")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout within each block")


class VitOptions(ClassifierOptions):
    """Size of the vision transformer."""

    patch_size: int | None = Field(
        None, ge=1, description="height and width of a patch (default: an eighth of the image, at most 16)"
    )
    embedding: int = Field(192, ge=1, description="size of the tokens")
    blocks: int = Field(6, ge=1, description="transformer blocks")
    heads: int = Field(3, ge=1, description="heads of the attention; they divide the embedding")
    mlp_ratio: float = Field(2.0, gt=0, description="hidden units of a block, in embeddings")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout after attention and within the dense layers")


class BackboneOptions(ClassifierOptions):
    """Options of every backbone."""

    pretrained: str | None = Field(
        None,
        json_schema_extra={"path": True, "words": ["imagenet"]},
        description="initial weights: imagenet, or the path of a .weights.h5 file",
    )
    input_size: int | None = Field(None, ge=1, description="scale images to this height and width in the network")
    batch_norm_momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="momentum of the moving averages (default: 0.99 or 0.999, by the backbone)",
    )
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer")


class WidenedOptions(BackboneOptions):
    """A backbone that comes in several widths."""

    alpha: float = Field(1.0, gt=0, description="width multiplier")


class WhitenedCnnOptions(ClassifierOptions):
    """Variants of the network with whitened patches."""

    widths: Widths = Field((64, 256, 256), min_length=1, description="filters of each group, such as 64,256,256")
    depth: Literal[2, 3] = Field(
        2, description="convolutions of each group; with 3, the third's result is added to the first's"
    )
    activation: Literal["silu", "gelu", "quick_gelu"] = Field(
        "silu", description="silu, gelu, or quick_gelu: x · sigmoid(1.702 x), nearly gelu and faster"
    )
    whiten_bias: bool = Field(False, description="learn a bias for the whitened patches")
    logit_scale: float | None = Field(
        None,
        gt=0,
        description="scale of the last layer's outputs (default: 1 / filters of the last group)",
    )
    batch_norm_momentum: float = Field(0.6, ge=0, lt=1, description="momentum of the moving averages")

    @field_validator("depth", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Converts text from the command line, since pydantic compares choices without conversion."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class SavedModelOptions(ClassifierOptions):
    """The SavedModel, and the head on it."""

    saved_model_path: str = Field(
        json_schema_extra={"path": True}, description="folder of a SavedModel that turns images into feature vectors"
    )
    signature: str | None = Field(
        None, description="signature of it to call (default: serving_default, or the model itself without one)"
    )
    hidden_units: Widths = Field((), description="units of dense layers between the features and the last layer")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer")


# -- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """A network of keras.applications.

    Args:
        keras_name: its name in `keras.applications`.
        pixels: the range of its inputs: ``centred`` from -1 to 1, ``caffe`` BGR minus a mean, ``torch`` standardised
            with the mean and spread of ImageNet, ``torch_bytes`` that times 255, which the network divides by again,
            ``bytes`` from 0 to 255.
        size: height and width of the images it was made for.
        smallest: the minimum height and width.
        widens: whether it has the width multiplier ``alpha``.
    """

    keras_name: str
    pixels: str
    size: int = 224
    smallest: int = 32
    widens: bool = False


BACKBONES: dict[str, Backbone] = {
    "mobilenet": Backbone("MobileNet", "centred", widens=True),
    "mobilenet_v2": Backbone("MobileNetV2", "centred", widens=True),
    "mobilenet_v3_small": Backbone("MobileNetV3Small", "bytes", widens=True),
    "mobilenet_v3_large": Backbone("MobileNetV3Large", "bytes", widens=True),
    **{f"resnet{n}": Backbone(f"ResNet{n}", "caffe") for n in (50, 101, 152)},
    **{f"resnet{n}_v2": Backbone(f"ResNet{n}V2", "centred") for n in (50, 101, 152)},
    **{
        f"efficientnet_b{n}": Backbone(f"EfficientNetB{n}", "torch_bytes", size)
        for n, size in enumerate((224, 240, 260, 300, 380, 456, 528, 600))
    },
    **{
        f"efficientnet_v2_{n.lower()}": Backbone(f"EfficientNetV2{n}", "bytes", size)
        for n, size in (("B0", 224), ("B1", 240), ("B2", 260), ("B3", 300), ("S", 384), ("M", 480), ("L", 480))
    },
    **{
        f"convnext_{n.lower()}": Backbone(f"ConvNeXt{n}", "bytes") for n in ("Tiny", "Small", "Base", "Large", "XLarge")
    },
    "vgg16": Backbone("VGG16", "caffe"),
    "vgg19": Backbone("VGG19", "caffe"),
    "inception_v3": Backbone("InceptionV3", "centred", 299, smallest=75),
    "inception_resnet_v2": Backbone("InceptionResNetV2", "centred", 299, smallest=75),
    "xception": Backbone("Xception", "centred", 299, smallest=71),
    **{f"densenet{n}": Backbone(f"DenseNet{n}", "torch") for n in (121, 169, 201)},
    "nasnet_mobile": Backbone("NASNetMobile", "centred"),
    "nasnet_large": Backbone("NASNetLarge", "centred", 331),
}

MODELS.declare(
    "simple_cnn",
    "modelyard.models.simple:simple_cnn",
    options=SimpleCnnOptions,
    summary="a few 3×3 convolutions with pooling, one dense layer; for images of 4×4 and more",
)
MODELS.declare(
    "mnist_cnn",
    "modelyard.models.simple:mnist_cnn",
    options=MnistCnnOptions,
    summary="the CNN of TensorFlow's MNIST guide: two 5×5 convolutions, 1,024 dense units",
)
MODELS.declare(
    "mlp",
    "modelyard.models.simple:mlp",
    options=MlpOptions,
    summary="dense layers on the flattened example, of any shape",
)
for _layers in (20, 32, 44, 56, 110):
    MODELS.declare(
        f"resnet{_layers}",
        f"modelyard.models.resnet:resnet{_layers}",
        options=ResNetOptions,
        summary=f"CIFAR ResNet with {_layers} layers (He et al. 2015, section 4.2)",
    )
MODELS.declare(
    "resnet18",
    "modelyard.models.resnet:resnet18",
    options=BasicResNetOptions,
    summary="ResNet-18; small images skip the first pooling",
)
MODELS.declare(
    "resnet34",
    "modelyard.models.resnet:resnet34",
    options=BasicResNetOptions,
    summary="ResNet-34; small images skip the first pooling",
)
MODELS.declare(
    "wide_resnet",
    "modelyard.models.resnet:wide_resnet",
    options=WideResNetOptions,
    summary="wide ResNet (Zagoruyko and Komodakis 2016): few, wide blocks of three stages; WRN-16-4 by default",
)
MODELS.declare(
    "vit",
    "modelyard.models.vit:vit",
    options=VitOptions,
    summary="a small vision transformer (Dosovitskiy et al. 2020) with mean pooling",
)
for _name, _backbone in BACKBONES.items():
    MODELS.declare(
        _name,
        f"modelyard.models.backbones:{_name}",
        options=WidenedOptions if _backbone.widens else BackboneOptions,
        summary=f"{_backbone.keras_name} of keras.applications, made for {_backbone.size}×{_backbone.size}",
    )
MODELS.declare(
    "whitened_cnn",
    "modelyard.models.whitened:whitened_cnn",
    options=WhitenedCnnOptions,
    summary="whitened 2×2 patches and three groups of convolutions: learns CIFAR-10 in few epochs (K. Jordan, 2024)",
)
MODELS.declare(
    "saved_model",
    "modelyard.models.saved_model:saved_model",
    options=SavedModelOptions,
    summary="a SavedModel, as from TensorFlow Hub, as frozen features under a head that is trained (engine tensorflow)",
)


# -- optimizers -----------------------------------------------------------------------------------------------------


class SgdOptions(Options):
    """Gradient descent."""

    momentum: float = Field(0.9, ge=0, lt=1, description="momentum")
    nesterov: bool = Field(False, description="Nesterov's momentum")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, scaled by the learning rate")


class RmspropOptions(Options):
    """RMSprop."""

    momentum: float = Field(0.0, ge=0, lt=1, description="momentum")
    rmsprop_rho: float = Field(0.9, ge=0, lt=1, description="decay of the mean square")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, scaled by the learning rate")


class AdamOptions(Options):
    """Adam."""

    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean square")
    adam_epsilon: float = Field(1e-7, gt=0, description="keeps the division finite")


class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    weight_decay: float = Field(0.004, ge=0, description="decoupled weight decay, scaled by the learning rate")


class MuonOptions(AdamWOptions):
    """Muon for kernels of two and more dimensions, AdamW for the rest."""

    momentum: float = Field(0.95, ge=0, lt=1, description="momentum")
    nesterov: bool = Field(True, description="Nesterov's momentum")
    muon_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz steps of the orthogonalisation")
    muon_normalize: bool = Field(False, description="scale each kernel to the norm √outputs before it is updated")
    muon_scale: Literal["rms", "none"] = Field(
        "rms",
        description="rms multiplies updates by 0.2 √(larger side), as for Adam's learning rates; none leaves them",
    )


OPTIMIZERS.declare(
    "sgd", "modelyard.models.optimizers:sgd", options=SgdOptions, summary="gradient descent with (Nesterov) momentum"
)
OPTIMIZERS.declare("adam", "modelyard.models.optimizers:adam", options=AdamOptions, summary="Adam")
OPTIMIZERS.declare(
    "adamw", "modelyard.models.optimizers:adamw", options=AdamWOptions, summary="Adam with decoupled weight decay"
)
OPTIMIZERS.declare("rmsprop", "modelyard.models.optimizers:rmsprop", options=RmspropOptions, summary="RMSprop")
OPTIMIZERS.declare(
    "muon",
    "modelyard.models.optimizers:muon",
    options=MuonOptions,
    summary="orthogonalised momentum for kernels, convolutions included; AdamW for the rest",
)


# -- schedules ------------------------------------------------------------------------------------------------------


class PiecewiseOptions(Options):
    """Piecewise constant decay."""

    decay_boundaries: StepDurations = Field(
        ("50 %", "75 %"), description="where the learning rate is cut, such as '50 %,75 %'", validate_default=True
    )
    decay_factor: float = Field(0.1, gt=0, lt=1, description="factor at each cut")


class ExponentialOptions(Options):
    """Exponential decay."""

    decay_rate: float = Field(0.96, gt=0, lt=1, description="factor of the learning rate per period")
    decay_period: StepDuration = Field("1 epochs", description="the period", validate_default=True)
    staircase: bool = Field(False, description="decay at the end of each period only, not continuously")


class CosineOptions(Options):
    """Cosine decay."""

    end_learning_rate: float = Field(0.0, ge=0, description="learning rate at the end of the run")


class PolynomialOptions(CosineOptions):
    """Polynomial decay."""

    decay_power: float = Field(1.0, gt=0, description="1 is a straight line")


class TriangularOptions(CosineOptions):
    """Up and down in straight lines."""

    start_factor: float = Field(0.2, ge=0, le=1, description="first learning rate, as a fraction of the peak")
    peak_at: StepDuration = Field("20 %", description="where the peak is reached", validate_default=True)


class OneCycleOptions(TriangularOptions):
    """Up and down in half cosines."""

    start_factor: float = Field(0.04, ge=0, le=1, description="first learning rate, as a fraction of the peak")
    peak_at: StepDuration = Field("30 %", description="where the peak is reached", validate_default=True)


class RangeTestOptions(Options):
    """Exponential growth."""

    lowest_learning_rate: float = Field(1e-6, gt=0, description="learning rate at the first step")


SCHEDULES.declare("constant", "modelyard.models.schedules:constant", summary="the same learning rate at every step")
SCHEDULES.declare(
    "piecewise", "modelyard.models.schedules:piecewise", options=PiecewiseOptions, summary="cut at given points"
)
SCHEDULES.declare(
    "exponential", "modelyard.models.schedules:exponential", options=ExponentialOptions, summary="exponential decay"
)
SCHEDULES.declare(
    "polynomial",
    "modelyard.models.schedules:polynomial",
    options=PolynomialOptions,
    summary="polynomial decay to an end value",
)
SCHEDULES.declare(
    "cosine", "modelyard.models.schedules:cosine", options=CosineOptions, summary="half a cosine down to an end value"
)
SCHEDULES.declare(
    "triangular",
    "modelyard.models.schedules:triangular",
    options=TriangularOptions,
    summary="straight up to the peak, then straight down to an end value",
)
SCHEDULES.declare(
    "one_cycle",
    "modelyard.models.schedules:one_cycle",
    options=OneCycleOptions,
    summary="half a cosine up to the peak, then one down to an end value (L. Smith); the momentum stays as it is",
)
SCHEDULES.declare(
    "range_test",
    "modelyard.models.schedules:range_test",
    options=RangeTestOptions,
    summary="grows by the same factor each step, to the peak at the last: for `modelyard find-learning-rate`",
)
