"""The sharded operators, one family per module; importing this package fills the table."""

from volseg.parallel.sharding.operators import (
    autograd,
    channels,
    convolution,
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
    "autograd",
    "channels",
    "convolution",
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
