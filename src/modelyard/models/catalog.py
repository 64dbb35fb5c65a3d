"""Declares the built-in models, optimizers and schedules: names, options, help. Their code is imported when used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from modelyard.config.calls import parse_list
from modelyard.config.durations import StepDuration
from modelyard.registry import MODELS, OPTIMIZERS, SCHEDULES, Options

Positive = Annotated[int, Field(ge=1)]
Widths = Annotated[tuple[Positive, ...], BeforeValidator(parse_list)]
Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(parse_list)]
StepDurations = Annotated[tuple[StepDuration, ...], BeforeValidator(parse_list)]
BALANCED = "balanced"


# -- options of models ------------------------------------------------------------------------------------------------


def parse_weights(value: Any) -> str | dict[str, float] | tuple[float, ...] | None:
    """Parses "balanced", weights by name (a mapping or "cat=2,dog=0.5"), or one weight per class."""
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
"""The type of the option; `task_types.class_weights` computes the weights."""


class RegressorOptions(Options):
    """Options of every regression."""

    regression_loss: Literal["mse", "mae", "huber"] = Field(
        "mse", description="loss of a regression: mean squared, mean absolute or Huber"
    )
    huber_delta: float = Field(
        1.0, gt=0, description="error above which the Huber loss is linear, in standard deviations of the labels"
    )


class ClassifierOptions(RegressorOptions):
    """Options of every classifier, and of networks that can be trained as another task."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the target spread over all classes")
    class_weights: ClassWeights = Field(
        None, description="class weights in the training loss: balanced, 'cat=2,dog=0.5' (others 1), or one per class"
    )
    focal_gamma: float = Field(
        0.0, ge=0, le=20, description="focal loss: exponent that weighs easy examples less; 0: off"
    )


MODELS.default_options = ClassifierOptions


class SimpleCnnOptions(ClassifierOptions):
    """Size of the simple CNN."""

    filters: Widths = Field((32, 64), min_length=1, description="filters of each convolution, such as 32,64")
    dense_units: int = Field(128, ge=1, description="units of the dense layer")
    dropout_rate: float = Field(0.3, ge=0, lt=1, description="dropout before the last layer")


class MnistCnnOptions(ClassifierOptions):
    """Regularization of the MNIST CNN."""

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
    widen: int = Field(4, ge=1, description="width, as a multiple of a CIFAR ResNet")
    batch_norm_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the moving averages")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout within each block")


class VitOptions(ClassifierOptions):
    """Size of the vision transformer."""

    patch_size: int | None = Field(
        None, ge=1, description="height and width of a patch (default: an eighth of the image, at most 16)"
    )
    embedding: int = Field(192, ge=1, description="size of the tokens")
    blocks: int = Field(6, ge=1, description="transformer blocks")
    heads: int = Field(3, ge=1, description="attention heads; must divide the embedding")
    mlp_ratio: float = Field(2.0, gt=0, description="hidden units of a block, as a multiple of the embedding")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout after attention and within the dense layers")


class BackboneOptions(ClassifierOptions):
    """Options of every backbone."""

    pretrained: str | None = Field(
        None,
        json_schema_extra={"path": True, "words": ["imagenet"]},
        description="initial weights: imagenet, or path of a .weights.h5 file",
    )
    input_size: int | None = Field(None, ge=1, description="scale images to this height and width in the network")
    batch_norm_momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of the moving averages (default: 0.99 or 0.999, by the backbone)"
    )
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer")


class WidenedOptions(BackboneOptions):
    """Options of backbones with a width multiplier."""

    alpha: float = Field(1.0, gt=0, description="width multiplier")


class WhitenedCnnOptions(ClassifierOptions):
    """Variants of the network with whitened patches."""

    widths: Widths = Field((64, 256, 256), min_length=1, description="filters of each group, such as 64,256,256")
    depth: Literal[2, 3] = Field(
        2, description="convolutions of each group; with 3, the third's result is added to the first's"
    )
    activation: Literal["silu", "gelu", "quick_gelu"] = Field(
        "silu", description="activation; quick_gelu is x · sigmoid(1.702 x), nearly gelu and faster"
    )
    whiten_bias: bool = Field(False, description="learn a bias for the whitened patches")
    logit_scale: float | None = Field(
        None, gt=0, description="scale of the last layer's outputs (default: 1 / filters of the last group)"
    )
    batch_norm_momentum: float = Field(0.6, ge=0, lt=1, description="momentum of the moving averages")

    @field_validator("depth", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Converts text from the command line, since pydantic compares choices without conversion."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


class SavedModelOptions(ClassifierOptions):
    """The SavedModel and the head."""

    saved_model_path: str = Field(
        json_schema_extra={"path": True}, description="folder of a SavedModel that maps images to feature vectors"
    )
    signature: str | None = Field(
        None, description="signature to call (default: serving_default; the model itself if it has no signature)"
    )
    hidden_units: Widths = Field((), description="units of dense layers between the features and the last layer")
    dropout_rate: float = Field(0.0, ge=0, lt=1, description="dropout before the last layer")


# -- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Parameters and FLOPs of a model with default options.

    Args:
        side: height and width of the images.
        parameters: the number of weights, with moving statistics.
        flops: multiplications and additions for one image.
        channels: channels of the images.
        classes: the number of outputs.
    """

    side: int
    parameters: int
    flops: int
    channels: int = 3
    classes: int = 10

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the images."""
        return self.side, self.side, self.channels


@dataclass(frozen=True)
class Backbone:
    """A network of keras.applications.

    Args:
        keras_name: its name in `keras.applications`.
        pixels: the range of its inputs: ``centred`` from -1 to 1, ``caffe`` BGR minus a mean, ``torch`` standardized
            with mean and standard deviation of ImageNet, ``torch_bytes`` that times 255, which the network divides by
            again, ``bytes`` from 0 to 255.
        size: height and width of the images that it was made for.
        parameters: the number of weights for 1,000 classes.
        flops: multiplications and additions for one image.
        smallest: the minimum height and width.
        widens: whether it has the width multiplier ``alpha``.
    """

    keras_name: str
    pixels: str
    size: int
    parameters: int
    flops: int
    smallest: int = 32
    widens: bool = False


BACKBONES = {
    "mobilenet": Backbone("MobileNet", "centred", 224, 4_253_864, 1_137_480_704, widens=True),
    "mobilenet_v2": Backbone("MobileNetV2", "centred", 224, 3_538_984, 601_548_544, widens=True),
    "mobilenet_v3_small": Backbone("MobileNetV3Small", "bytes", 224, 1_516_120, 110_945_152, widens=True),
    "mobilenet_v3_large": Backbone("MobileNetV3Large", "bytes", 224, 3_957_352, 430_081_920, widens=True),
    "resnet50": Backbone("ResNet50", "caffe", 224, 25_636_712, 7_715_946_496),
    "resnet101": Backbone("ResNet101", "caffe", 224, 44_707_176, 15_140_388_864),
    "resnet152": Backbone("ResNet152", "caffe", 224, 60_419_944, 22_564_831_232),
    "resnet50_v2": Backbone("ResNet50V2", "centred", 224, 25_613_800, 6_964_510_720),
    "resnet101_v2": Backbone("ResNet101V2", "centred", 224, 44_675_560, 14_388_953_088),
    "resnet152_v2": Backbone("ResNet152V2", "centred", 224, 60_380_648, 21_813_395_456),
    "efficientnet_b0": Backbone("EfficientNetB0", "torch_bytes", 224, 5_330_571, 771_629_504),
    "efficientnet_b1": Backbone("EfficientNetB1", "torch_bytes", 240, 7_856_239, 1_373_605_664),
    "efficientnet_b2": Backbone("EfficientNetB2", "torch_bytes", 260, 9_177_569, 1_987_123_744),
    "efficientnet_b3": Backbone("EfficientNetB3", "torch_bytes", 300, 12_320_535, 3_654_282_784),
    "efficientnet_b4": Backbone("EfficientNetB4", "torch_bytes", 380, 19_466_823, 8_787_542_048),
    "efficientnet_b5": Backbone("EfficientNetB5", "torch_bytes", 456, 30_562_527, 20_532_769_504),
    "efficientnet_b6": Backbone("EfficientNetB6", "torch_bytes", 528, 43_265_143, 38_135_187_072),
    "efficientnet_b7": Backbone("EfficientNetB7", "torch_bytes", 600, 66_658_687, 75_491_768_384),
    "efficientnet_v2_b0": Backbone("EfficientNetV2B0", "bytes", 224, 7_200_312, 1_436_172_352),
    "efficientnet_v2_b1": Backbone("EfficientNetV2B1", "bytes", 240, 8_212_124, 2_393_638_720),
    "efficientnet_v2_b2": Backbone("EfficientNetV2B2", "bytes", 260, 10_178_374, 3_395_085_664),
    "efficientnet_v2_b3": Backbone("EfficientNetV2B3", "bytes", 300, 14_467_622, 6_022_917_632),
    "efficientnet_v2_s": Backbone("EfficientNetV2S", "bytes", 384, 21_612_360, 16_731_234_304),
    "efficientnet_v2_m": Backbone("EfficientNetV2M", "bytes", 480, 54_431_388, 49_164_920_768),
    "efficientnet_v2_l": Backbone("EfficientNetV2L", "bytes", 480, 119_027_848, 112_159_398_016),
    "convnext_tiny": Backbone("ConvNeXtTiny", "bytes", 224, 28_589_128, 8_911_062_528),
    "convnext_small": Backbone("ConvNeXtSmall", "bytes", 224, 50_223_688, 17_367_424_512),
    "convnext_base": Backbone("ConvNeXtBase", "bytes", 224, 88_591_464, 30_709_458_944),
    "convnext_large": Backbone("ConvNeXtLarge", "bytes", 224, 197_767_336, 68_722_867_200),
    "convnext_xlarge": Backbone("ConvNeXtXLarge", "bytes", 224, 350_196_968, 121_842_061_312),
    "vgg16": Backbone("VGG16", "caffe", 224, 15_227_688, 30_694_285_312),
    "vgg19": Backbone("VGG19", "caffe", 224, 20_537_384, 39_017_881_600),
    "inception_v3": Backbone("InceptionV3", "centred", 299, 23_851_784, 11_426_432_192, smallest=75),
    "inception_resnet_v2": Backbone("InceptionResNetV2", "centred", 299, 55_873_736, 26_311_588_032, smallest=75),
    "xception": Backbone("Xception", "centred", 299, 22_910_480, 16_714_806_992, smallest=71),
    "densenet121": Backbone("DenseNet121", "torch", 224, 8_062_504, 5_668_323_328),
    "densenet169": Backbone("DenseNet169", "torch", 224, 14_307_880, 6_719_686_656),
    "densenet201": Backbone("DenseNet201", "torch", 224, 20_242_984, 8_582_731_776),
    "nasnet_mobile": Backbone("NASNetMobile", "centred", 224, 5_326_716, 1_127_277_632),
    "nasnet_large": Backbone("NASNetLarge", "centred", 331, 88_949_818, 47_566_829_316),
}

SIZES = {
    "simple_cnn": Size(28, 421_644, 8_482_304, channels=1),
    "mnist_cnn": Size(28, 3_274_636, 27_767_808, channels=1),
    "mlp": Size(28, 118_284, 236_032, channels=1),
    "resnet20": Size(32, 271_104, 81_102_080),
    "resnet32": Size(32, 466_432, 137_725_184),
    "resnet44": Size(32, 661_760, 194_348_288),
    "resnet56": Size(32, 857_088, 250_971_392),
    "resnet110": Size(32, 1_736_064, 505_775_360),
    "resnet18": Size(32, 11_183_568, 1_110_845_440),
    "resnet34": Size(32, 21_299_152, 2_318_804_992),
    "wide_resnet": Size(32, 2_752_512, 785_224_704),
    "vit": Size(32, 1_806_160, 246_550_272),
    "whitened_cnn": Size(32, 1_973_782, 210_443_552),
    **{name: Size(b.size, b.parameters, b.flops, classes=1000) for name, b in BACKBONES.items()},
}
"""So that `modelyard models` builds no network. A test builds them."""

_NETWORKS: tuple[tuple[str, type[Options], str], ...] = (
    ("simple_cnn", SimpleCnnOptions, "3×3 convolutions with pooling, one dense layer; for images of 4×4 and more"),
    ("mnist_cnn", MnistCnnOptions, "the CNN of TensorFlow's MNIST guide: two 5×5 convolutions, 1,024 dense units"),
    ("mlp", MlpOptions, "dense layers on the flattened example, of any shape"),
    *(
        (f"resnet{_depth}", ResNetOptions, f"CIFAR ResNet with {_depth} layers (He et al. 2015, section 4.2)")
        for _depth in (20, 32, 44, 56, 110)
    ),
    ("resnet18", BasicResNetOptions, "ResNet-18; small images skip the first pooling"),
    ("resnet34", BasicResNetOptions, "ResNet-34; small images skip the first pooling"),
    ("wide_resnet", WideResNetOptions, "wide ResNet with three stages (Zagoruyko and Komodakis 2016); WRN-16-4"),
    ("vit", VitOptions, "a small vision transformer (Dosovitskiy et al. 2020) with mean pooling"),
)
for _name, _options, _summary in _NETWORKS:
    MODELS.declare(_name, f"modelyard.models.networks:{_name}", options=_options, summary=_summary)
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
    "modelyard.models.backbones:saved_model",
    options=SavedModelOptions,
    summary="a SavedModel, such as one of TensorFlow Hub, as frozen features under a trained head (engine tensorflow)",
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
    adam_epsilon: float = Field(1e-7, gt=0, description="small constant for numerical stability")


class AdamWOptions(AdamOptions):
    """Adam with decoupled weight decay."""

    weight_decay: float = Field(0.004, ge=0, description="decoupled weight decay, scaled by the learning rate")


class MuonOptions(AdamWOptions):
    """Muon for kernels of two and more dimensions, AdamW for the rest."""

    momentum: float = Field(0.95, ge=0, lt=1, description="momentum")
    nesterov: bool = Field(True, description="Nesterov's momentum")
    muon_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz steps of the orthogonalization")
    muon_normalize: bool = Field(False, description="scale each kernel to the norm √outputs before each update")
    muon_scale: Literal["rms", "none"] = Field(
        "rms",
        description="rms: multiply updates by 0.2 √(larger side), for learning rates of Adam; none: do not scale",
    )


class MomentumOptions(SgdOptions):
    """Gradient descent with momentum."""


class AdagradOptions(Options):
    """Adagrad."""

    adagrad_initial_accumulator_value: float = Field(0.1, ge=0, description="first sum of squares")
    adagrad_epsilon: float = Field(1e-7, gt=0, description="small constant for numerical stability")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, scaled by the learning rate")


class AdadeltaOptions(Options):
    """Adadelta."""

    adadelta_rho: float = Field(0.95, ge=0, lt=1, description="decay of both mean squares")
    adadelta_epsilon: float = Field(1e-7, gt=0, description="small constant for numerical stability")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, scaled by the learning rate")


class FtrlOptions(Options):
    """FTRL."""

    ftrl_learning_rate_power: float = Field(-0.5, le=0, description="power of the sum of squares")
    ftrl_initial_accumulator_value: float = Field(0.1, ge=0, description="first sum of squares")
    ftrl_l1: float = Field(0.0, ge=0, description="strength of L1 regularization")
    ftrl_l2: float = Field(0.0, ge=0, description="strength of L2 regularization")
    ftrl_l2_shrinkage: float = Field(0.0, ge=0, description="strength of L2 regularization of the gradient")
    ftrl_beta: float = Field(0.0, ge=0, description="beta of the paper")


for _name, _options, _summary in (
    ("sgd", SgdOptions, "gradient descent with (Nesterov) momentum"),
    ("adam", AdamOptions, "Adam"),
    ("adamw", AdamWOptions, "Adam with decoupled weight decay"),
    ("rmsprop", RmspropOptions, "RMSprop"),
    ("momentum", MomentumOptions, "gradient descent with momentum: sgd by another name"),
    ("adagrad", AdagradOptions, "Adagrad"),
    ("adadelta", AdadeltaOptions, "Adadelta; its usual learning rate is 1"),
    ("ftrl", FtrlOptions, "FTRL (McMahan et al. 2013), with L1 for sparse weights"),
    ("muon", MuonOptions, "orthogonalized momentum for kernels, convolutions included; AdamW for the rest"),
):
    OPTIMIZERS.declare(_name, f"modelyard.models.optimizers:{_name}", options=_options, summary=_summary)


# -- schedules ------------------------------------------------------------------------------------------------------


class PiecewiseOptions(Options):
    """Piecewise constant decay."""

    decay_boundaries: StepDurations = Field(
        ("50 %", "75 %"),
        description="where the learning rate drops, such as '50 %,75 %'",
        validate_default=True,
    )
    decay_factor: float = Field(0.1, gt=0, lt=1, description="factor at each point")
    decay_factors: Factors = Field((), description="a factor for each point, such as 0.1,0.5, instead of decay_factor")
    decay_values: Factors = Field(
        (),
        description="the learning rates before, between and after the points, such as 0.1,0.01,0.001, instead of "
        "learning_rate and decay_factor",
    )

    @model_validator(mode="after")
    def _one_per_point(self) -> PiecewiseOptions:
        # A stored config has all options, also those with their defaults.
        fields = ("decay_factor", "decay_factors", "decay_values")
        given = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one of them.")
        points = len(self.decay_boundaries)
        for name, count in (("decay_factors", points), ("decay_values", points + 1)):
            found = len(getattr(self, name))
            if found and found != count:
                raise ValueError(
                    f"{name} has {found} value(s), but decay_boundaries has {points} point(s): give {count}."
                )
        return self


class ExponentialOptions(Options):
    """Exponential decay."""

    decay_rate: float = Field(0.96, gt=0, lt=1, description="factor of the learning rate per period")
    decay_period: StepDuration = Field("1 epochs", description="length of a period", validate_default=True)
    staircase: bool = Field(False, description="decay only at the end of each period")


class CosineOptions(Options):
    """Cosine decay."""

    end_learning_rate: float = Field(0.0, ge=0, description="learning rate at the end of the run")


class PolynomialOptions(CosineOptions):
    """Polynomial decay."""

    decay_power: float = Field(1.0, gt=0, description="exponent; 1: linear")


class TriangularOptions(CosineOptions):
    """Linear up and down."""

    start_factor: float = Field(0.2, ge=0, le=1, description="first learning rate, as a fraction of the peak")
    peak_at: StepDuration = Field("20 %", description="point where the peak is reached", validate_default=True)


class OneCycleOptions(TriangularOptions):
    """Half cosines up and down."""

    start_factor: float = Field(0.04, ge=0, le=1, description="first learning rate, as a fraction of the peak")
    peak_at: StepDuration = Field("30 %", description="point where the peak is reached", validate_default=True)


class RangeTestOptions(Options):
    """Exponential growth."""

    lowest_learning_rate: float = Field(1e-6, gt=0, description="learning rate at the first step")


for _name, _options, _summary in (
    ("constant", Options, "the same learning rate at every step"),
    ("piecewise", PiecewiseOptions, "multiplied by a factor at given points"),
    ("exponential", ExponentialOptions, "exponential decay"),
    ("polynomial", PolynomialOptions, "polynomial decay to an end value"),
    ("cosine", CosineOptions, "half a cosine down to an end value"),
    ("triangular", TriangularOptions, "linear to the peak, then linear to an end value"),
    ("one_cycle", OneCycleOptions, "half a cosine to the peak, then one to an end value (L. Smith); constant momentum"),
    ("range_test", RangeTestOptions, "exponential growth to the peak at the end, for `modelyard find-learning-rate`"),
):
    SCHEDULES.declare(_name, f"modelyard.models.schedules:{_name}", options=_options, summary=_summary)
