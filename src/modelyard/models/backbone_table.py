"""The networks of keras.applications: what each is called there, and what its images look like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backbone:
    """One network.

    Args:
        keras_name: its name in `keras.applications`.
        pixels: how it wants them: ``centred`` from -1 to 1, ``caffe`` BGR less a mean, ``torch`` standardised with the
            mean and spread of ImageNet, ``torch_bytes`` that times 255, which the network divides by again, ``bytes``
            as they are, from 0 to 255.
        size: height and width of the images it was made for.
        smallest: the least height and width it can take.
        widens: whether ``alpha`` makes it wider or narrower.
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
