"""The sharded operators, one family per module; importing this package fills the table."""

from volseg.parallel.sharding.operators import (
    activations,
    autograd,
    channels,
    convolution,
    dice_cross_entropy,
    dropout,
    losses,
    normalize,
    planes,
    pointwise,
    pooling,
    reductions,
    resize,
    shapes,
)

__all__ = [
    "activations",
    "autograd",
    "channels",
    "convolution",
    "dice_cross_entropy",
    "dropout",
    "losses",
    "normalize",
    "planes",
    "pointwise",
    "pooling",
    "reductions",
    "resize",
    "shapes",
]
