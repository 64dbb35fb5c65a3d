"""Parameters and FLOPs of the built-in models with default options, so that listing them builds no network.

The numbers come from building each model; a test builds them again.
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
        """The shape of the images."""
        return self.side, self.side, self.channels

    @property
    def costs(self) -> tuple[int, int]:
        """Parameters and FLOPs."""
        return self.parameters, self.flops


_BACKBONES = {
    "mobilenet": (224, 4_253_864, 1_137_480_704),
    "mobilenet_v2": (224, 3_538_984, 601_548_544),
    "mobilenet_v3_small": (224, 1_516_120, 110_945_152),
    "mobilenet_v3_large": (224, 3_957_352, 430_081_920),
    "resnet50": (224, 25_636_712, 7_715_946_496),
    "resnet101": (224, 44_707_176, 15_140_388_864),
    "resnet152": (224, 60_419_944, 22_564_831_232),
    "resnet50_v2": (224, 25_613_800, 6_964_510_720),
    "resnet101_v2": (224, 44_675_560, 14_388_953_088),
    "resnet152_v2": (224, 60_380_648, 21_813_395_456),
    "efficientnet_b0": (224, 5_330_571, 771_629_504),
    "efficientnet_b1": (240, 7_856_239, 1_373_605_664),
    "efficientnet_b2": (260, 9_177_569, 1_987_123_744),
    "efficientnet_b3": (300, 12_320_535, 3_654_282_784),
    "efficientnet_b4": (380, 19_466_823, 8_787_542_048),
    "efficientnet_b5": (456, 30_562_527, 20_532_769_504),
    "efficientnet_b6": (528, 43_265_143, 38_135_187_072),
    "efficientnet_b7": (600, 66_658_687, 75_491_768_384),
    "efficientnet_v2_b0": (224, 7_200_312, 1_436_172_352),
    "efficientnet_v2_b1": (240, 8_212_124, 2_393_638_720),
    "efficientnet_v2_b2": (260, 10_178_374, 3_395_085_664),
    "efficientnet_v2_b3": (300, 14_467_622, 6_022_917_632),
    "efficientnet_v2_s": (384, 21_612_360, 16_731_234_304),
    "efficientnet_v2_m": (480, 54_431_388, 49_164_920_768),
    "efficientnet_v2_l": (480, 119_027_848, 112_159_398_016),
    "convnext_tiny": (224, 28_589_128, 8_911_062_528),
    "convnext_small": (224, 50_223_688, 17_367_424_512),
    "convnext_base": (224, 88_591_464, 30_709_458_944),
    "convnext_large": (224, 197_767_336, 68_722_867_200),
    "convnext_xlarge": (224, 350_196_968, 121_842_061_312),
    "vgg16": (224, 15_227_688, 30_694_285_312),
    "vgg19": (224, 20_537_384, 39_017_881_600),
    "inception_v3": (299, 23_851_784, 11_426_432_192),
    "inception_resnet_v2": (299, 55_873_736, 26_311_588_032),
    "xception": (299, 22_910_480, 16_714_806_992),
    "densenet121": (224, 8_062_504, 5_668_323_328),
    "densenet169": (224, 14_307_880, 6_719_686_656),
    "densenet201": (224, 20_242_984, 8_582_731_776),
    "nasnet_mobile": (224, 5_326_716, 1_127_277_632),
    "nasnet_large": (331, 88_949_818, 47_566_829_316),
}

SIZES: dict[str, Size] = {
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
    **{name: Size(*given, classes=1000) for name, given in _BACKBONES.items()},
}
