"""A small vision transformer: patches as tokens, learned positions, blocks that normalise first, mean pooling."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from modelyard.errors import UserError
from modelyard.models.catalog import VitOptions
from modelyard.models.task import DataInfo, image_input

_LARGEST_PATCH = 16
_PATCHES = 8


@keras.saving.register_keras_serializable(package="modelyard")
class Positions(layers.Layer):
    """Adds a learned position embedding to each token."""

    def build(self, input_shape: Any) -> None:
        """Makes one vector per token."""
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer=keras.initializers.TruncatedNormal(stddev=0.02)
        )

    def call(self, inputs: Any) -> Any:
        """Returns tokens of the same shape."""
        return inputs + ops.cast(self.table, inputs.dtype)


def vit(data: DataInfo, options: VitOptions) -> keras.Model:
    """Returns the network, for images whose sides are multiples of the patch."""
    inputs, x = image_input(data, smallest=1)
    height, width = data.image_shape[:2]
    patch = options.patch_size or _fitting_patch(min(height, width), height, width)
    if height % patch or width % patch:
        raise UserError(
            f"--patch_size {patch} does not divide both sides of images of {height}×{width}. Choose a divisor."
        )
    if options.embedding % options.heads:
        raise UserError(f"embedding {options.embedding} is not a multiple of {options.heads} heads.")
    x = layers.Conv2D(options.embedding, patch, strides=patch, name="patches")(x)
    x = layers.Reshape((-1, options.embedding), name="tokens")(x)
    x = Positions(name="positions")(x)
    for number in range(1, options.blocks + 1):
        x = _block(x, options, f"block{number}")
    x = layers.LayerNormalization(epsilon=1e-6, name="last_norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="vit")


def _fitting_patch(side: int, height: int, width: int) -> int:
    """Returns the largest patch that divides both sides, with at least eight patches along the shorter if possible."""
    most = min(max(side // _PATCHES, 1), _LARGEST_PATCH)
    return max(p for p in range(1, most + 1) if height % p == 0 and width % p == 0)


def _block(x: Any, options: VitOptions, name: str) -> Any:
    seen = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    seen = layers.MultiHeadAttention(
        options.heads, options.embedding // options.heads, dropout=options.dropout_rate, name=f"{name}_attention"
    )(seen, seen)
    x = layers.Add(name=f"{name}_add1")([x, seen])
    hidden = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    hidden = layers.Dense(round(options.embedding * options.mlp_ratio), activation="gelu", name=f"{name}_dense1")(
        hidden
    )
    hidden = layers.Dense(options.embedding, name=f"{name}_dense2")(hidden)
    if options.dropout_rate:
        hidden = layers.Dropout(options.dropout_rate, name=f"{name}_dropout")(hidden)
    return layers.Add(name=f"{name}_add2")([x, hidden])
