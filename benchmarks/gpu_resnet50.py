"""A plugin for `gpu.py`: ResNet-50 as it is measured everywhere (the stride in the 3×3 convolution), for 224×224."""

from __future__ import annotations

from typing import Any

import modelyard

NAME = "benchmark_resnet50"


@modelyard.register_model(NAME)
def resnet50(data: Any, options: Any) -> Any:
    """The network of He et al. (2015), table 1, with strides where torchvision has them."""
    import keras
    from keras import layers

    def conv(x: Any, filters: int, size: int, strides: int, relu: bool = True) -> Any:
        if strides > 1 and size > 1:  # "same" would pad on one side only
            x = layers.ZeroPadding2D(size // 2)(x)
        padding = "valid" if strides > 1 else "same"
        x = layers.Conv2D(filters, size, strides, padding, use_bias=False, kernel_initializer="he_normal")(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
        return layers.ReLU()(x) if relu else x

    inputs, x = modelyard.image_input(data)
    x = conv(x, 64, 7, 2)
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # after ReLU, padding zeros never win
    for stage, depth in enumerate((3, 4, 6, 3)):
        filters = 64 << stage
        for block in range(depth):
            strides = 2 if stage and not block else 1
            y = conv(conv(x, filters, 1, 1), filters, 3, strides)
            y = conv(y, 4 * filters, 1, 1, relu=False)
            shortcut = conv(x, 4 * filters, 1, strides, relu=False) if not block else x
            x = layers.ReLU()(layers.Add()([y, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(data.num_classes)(x), name=NAME)
