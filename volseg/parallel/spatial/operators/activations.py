"""Activations that a waiting norm takes along, in place or not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device import fusions
from volseg.device.norm.activation import Activation
from volseg.parallel.spatial.operators.operands import each_slab
from volseg.parallel.spatial.operators.pointwise import in_place, pointwise
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["activate", "prelu"]


@handles("Activations", "relu", "relu_", "F.leaky_relu", "F.leaky_relu_", rehearse=False, merged=True)
@handles("Activations", "F.elu", "F.elu_", "silu", "silu_", "gelu", "gelu_", rehearse=False, merged=True)
@handles("Pointwise arithmetic", "sigmoid", "sigmoid_", rehearse=False, merged=True)
def activate(
    func: Callable,
    input: Any,
    negative_slope: float = 0.01,
    alpha: float = 1.0,
    approximate: str = "none",
    inplace: bool = False,
) -> Any:
    """Leave it to the norm that waits in front, or apply it to each slab."""
    if not isinstance(input, ShardedVolume):
        refuse("its input is not sharded")
    settings: dict[str, Any] = {}
    match func.__name__.removesuffix("_"):
        case "relu":
            chosen = Activation("leaky", 0.0)
        case "leaky_relu":
            chosen, settings = Activation("leaky", float(negative_slope)), {"negative_slope": negative_slope}
        case "elu":
            chosen, settings = Activation("elu", float(alpha)), {"alpha": alpha}
        case "gelu":
            chosen, settings = Activation("gelu"), {"approximate": approximate}
        case "sigmoid":
            chosen = Activation("sigmoid")
        case _:
            chosen = Activation("silu")
    written = inplace or func.__name__.endswith("_")
    taken = approximate == "none" and (chosen.kind in ("leaky", "elu") or fusions.is_on("activations"))
    waiting = input.pending.activate(chosen) if taken else None
    if waiting is None:
        return (in_place if written else pointwise)(func, (input,), settings | ({"inplace": True} if inplace else {}))
    if written:
        input.pending = waiting
        increment_version(input)
        return input
    input.is_bypassed = True
    return defer(waiting, input.dims, input.shape, input.context)


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
    return each_slab(func, input, weight)
