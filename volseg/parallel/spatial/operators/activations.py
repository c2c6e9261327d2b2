"""Activations that a waiting norm takes along, in place or not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device import fusions
from volseg.device.norm.activation import Activation
from volseg.parallel.spatial.operators.pointwise import in_place, pointwise
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, defer, wrap

__all__ = ["elu", "gelu", "leaky_relu", "prelu", "relu", "sigmoid", "silu"]


@handles("Activations", "relu", "relu_", rehearse=False, merged=True)
def relu(func: Callable, input: Any, inplace: bool = False) -> Any:
    """Rectify."""
    return _activated(func, input, Activation("leaky", 0.0), inplace, {})


@handles("Activations", "F.leaky_relu", "F.leaky_relu_", rehearse=False, merged=True)
def leaky_relu(func: Callable, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Rectify with a slope below zero."""
    chosen = Activation("leaky", float(negative_slope))
    return _activated(func, input, chosen, inplace, {"negative_slope": negative_slope})


@handles("Activations", "F.elu", "F.elu_", rehearse=False, merged=True)
def elu(func: Callable, input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Rectify with an exponential below zero."""
    return _activated(func, input, Activation("elu", float(alpha)), inplace, {"alpha": alpha})


@handles("Pointwise arithmetic", "sigmoid", "sigmoid_", rehearse=False, merged=True)
def sigmoid(func: Callable, input: Any) -> Any:
    """Map to between 0 and 1."""
    return _activated(func, input, Activation("sigmoid"), False, {})


@handles("Activations", "silu", "silu_", rehearse=False, merged=True)
def silu(func: Callable, input: Any, inplace: bool = False) -> Any:
    """Multiply by the sigmoid."""
    return _activated(func, input, Activation("silu"), inplace, {})


@handles("Activations", "gelu", "gelu_", rehearse=False, merged=True)
def gelu(func: Callable, input: Any, approximate: str = "none") -> Any:
    """Multiply by the normal distribution's share below."""
    if approximate != "none":
        return pointwise(func, (input,), {"approximate": approximate})
    return _activated(func, input, Activation("gelu"), False, {})


@handles("Activations", "prelu", "F.prelu", rehearse=False, merged=True)
def prelu(func: Callable, input: Any, weight: Tensor) -> Any:
    """Apply a slope per channel (not a broadcast from the end)."""
    if not isinstance(input, ShardedVolume) or isinstance(weight, ShardedVolume) or {0, 1} & set(input.dims):
        refuse("batch and channels must not be cut, nor the weight")
    if weight.ndim > 1 or weight.numel() not in (1, input.shape[1]):
        raise RuntimeError(f"prelu needs one slope, or {input.shape[1]} (one per channel), got {tuple(weight.shape)}")
    waiting = input.pending.activate(Activation("prelu"), weight) if fusions.is_on("activations") else None
    if waiting is not None:
        input.is_bypassed = True
        return defer(waiting, input.dims, input.shape, input.context)
    slopes = input.context.spread(weight)
    return wrap(input, [func(slab, slope) for slab, slope in zip(input.slabs, slopes, strict=True)])


def _activated(func: Callable, volume: Any, chosen: Activation, inplace: bool, settings: dict[str, float]) -> Any:
    """Leave it to the norm that waits in front, or apply it to each slab."""
    if not isinstance(volume, ShardedVolume):
        refuse("its input is not sharded")
    inplace = inplace or func.__name__.endswith("_")
    taken = chosen.kind in ("leaky", "elu") or fusions.is_on("activations")
    waiting = volume.pending.activate(chosen) if taken else None
    if waiting is None:
        if not inplace:
            return pointwise(func, (volume,), settings)
        if not func.__name__.endswith("_"):
            settings = {**settings, "inplace": True}  # type: ignore[dict-item]
        return in_place(func, (volume,), settings)
    if inplace:
        volume.pending = waiting
        increment_version(volume)
        return volume
    volume.is_bypassed = True
    return defer(waiting, volume.dims, volume.shape, volume.context)
