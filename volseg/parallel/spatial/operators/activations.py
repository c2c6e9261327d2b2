"""Activations that a waiting norm takes along: the leaky ReLUs and ELU, in place or not."""

from collections.abc import Callable
from typing import Any

from volseg.device.norm.activation import Activation
from volseg.parallel.spatial.operators.pointwise import in_place, pointwise
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["elu", "leaky_relu", "relu"]


@handles("Activations", "relu", "relu_", rehearse=False)
def relu(func: Callable, input: Any, inplace: bool = False) -> Any:
    """Rectify."""
    return _activated(func, input, Activation("leaky", 0.0), inplace, {})


@handles("Activations", "F.leaky_relu", "F.leaky_relu_", rehearse=False)
def leaky_relu(func: Callable, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Rectify with a slope below zero."""
    chosen = Activation("leaky", float(negative_slope))
    return _activated(func, input, chosen, inplace, {"negative_slope": negative_slope})


@handles("Activations", "F.elu", "F.elu_", rehearse=False)
def elu(func: Callable, input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Rectify with an exponential below zero."""
    return _activated(func, input, Activation("elu", float(alpha)), inplace, {"alpha": alpha})


def _activated(func: Callable, volume: Any, chosen: Activation, inplace: bool, settings: dict[str, float]) -> Any:
    """Leave it to the norm that waits in front, or apply it to each slab."""
    if not isinstance(volume, ShardedVolume):
        refuse("its input is not sharded")
    inplace = inplace or func.__name__.endswith("_")
    waiting = volume.pending.activate(chosen)
    if waiting is None:
        if not inplace:
            return pointwise(func, (volume,), settings)
        if not func.__name__.endswith("_"):
            settings = {**settings, "inplace": True}  # type: ignore[dict-item]
        return in_place(func, (volume,), settings)
    if inplace:
        volume.pending = waiting
        return volume
    return defer(waiting, volume.dims, volume.shape, volume.context)
