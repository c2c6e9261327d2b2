"""Activations that a deferred norm takes along: the leaky ReLUs and ELU, in place or not."""

from collections.abc import Callable
from typing import Any

from volseg.parallel.sharding.kernels import Activation
from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.pointwise import in_place, pointwise
from volseg.parallel.sharding.table import handles
from volseg.parallel.sharding.volume import ShardedVolume

__all__ = ["activation"]


def _described(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Activation, bool]:
    """Return the activation and whether it works in place."""
    name = func.__name__.removesuffix("_")
    if name == "relu":
        given = bound("input inplace", args, kwargs, inplace=False)
        return Activation("leaky", 0.0), given["inplace"] or func.__name__.endswith("_")
    if name == "leaky_relu":
        given = bound("input negative_slope inplace", args, kwargs, negative_slope=0.01, inplace=False)
        return Activation("leaky", float(given["negative_slope"])), given["inplace"] or func.__name__.endswith("_")
    given = bound("input alpha inplace", args, kwargs, alpha=1.0, inplace=False)
    return Activation("elu", float(given["alpha"])), given["inplace"] or func.__name__.endswith("_")


@handles("Activations", "relu", "relu_", "F.leaky_relu", "F.leaky_relu_", "F.elu", "F.elu_")
def activation(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Leave it to the norm that waits in front, or apply it to each slab."""
    volume = args[0] if args else kwargs["input"]
    chosen, changes_input = _described(func, args, kwargs)
    deferred = volume.deferred.activated(chosen) if volume.deferred is not None else None
    if deferred is None:
        return in_place(func, args, kwargs) if changes_input else pointwise(func, args, kwargs)
    if changes_input:
        volume.deferred = deferred
        return volume
    result = ShardedVolume(deferred.slabs, volume.dims, volume.shape, volume.context, deferred)
    volume.context.defer(result)
    return result
