"""Pointwise functions: they run on each slab, with operands brought to the same cut.

A pending norm includes some of the activations behind it, in place or not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device import broadcast_mul, fusions
from volseg.device.first_order import first_order
from volseg.device.norm.activation import Activation
from volseg.parallel.spatial.convolution.plan import count_slab_tiles
from volseg.parallel.spatial.gathered import run_gathered
from volseg.parallel.spatial.lazy import scores
from volseg.parallel.spatial.lazy.addition import add_in_place, add_waiting, add_with_room
from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.operators.operands import aligned, each_slab, rewrap, run_local
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, defer, wrap

ROUNDED = ["ceil", "fix", "floor", "frac", "round", "trunc"]
SIGNS = ["abs", "absolute", "neg", "negative", "positive", "sgn", "sign", "signbit"]
POWERS = ["exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "logit", "reciprocal", "rsqrt", "sqrt", "square"]
CIRCULAR = ["acos", "asin", "atan", "cos", "sin", "sinc", "tan", "angle", "deg2rad", "rad2deg"]
HYPERBOLIC = ["acosh", "asinh", "atanh", "cosh", "sinh", "tanh"]
SPECIAL = ["digamma", "lgamma", "mvlgamma", "polygamma", "erf", "erfc", "erfinv"]
SPECIAL_ONLY = ["special.erfcx", "special.expit", "special.log_ndtr", "special.ndtr", "special.ndtri"]
QUESTIONS = ["isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "logical_not", "bitwise_not"]
CONJUGATES = ["conj", "conj_physical", "resolve_conj", "resolve_neg"]
OTHERS = ["nan_to_num"]

UNARY = [*ROUNDED, *SIGNS, *POWERS, *CIRCULAR, *HYPERBOLIC, *SPECIAL, *SPECIAL_ONLY, *QUESTIONS, *CONJUGATES, *OTHERS]

EQUALITIES = ["eq", "ne", "not_equal", "isclose"]
ORDERS = ["ge", "gt", "le", "lt", "greater", "greater_equal", "less", "less_equal"]
EXTREMES = ["clamp", "clamp_max", "clamp_min", "clip", "fmax", "fmin", "maximum", "minimum"]
DIFFERENCES = ["sub", "subtract", "rsub"]
FACTORS = ["mul", "multiply", "div", "divide", "true_divide", "floor_divide", "fmod", "remainder"]
FUSED = ["addcdiv", "addcmul", "lerp", "masked_fill"]
LOGICAL = ["logical_and", "logical_or", "logical_xor"]
BITWISE = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]
EXPONENTS = ["pow", "float_power", "ldexp", "logaddexp", "logaddexp2", "xlogy", "special.xlogy", "special.xlog1py"]
OF_FLOATS = ["arctan2", "atan2", "copysign", "heaviside", "hypot", "nextafter"]

BINARY = [*EQUALITIES, *ORDERS, *EXTREMES, *DIFFERENCES, *FACTORS, *FUSED, *LOGICAL, *BITWISE, *EXPONENTS, *OF_FLOATS]

HARD = ["hardshrink", "hardsigmoid", "hardswish", "hardtanh", "relu6", "softshrink", "threshold"]
SMOOTH = ["celu", "logsigmoid", "mish", "selu", "softplus", "softsign", "tanhshrink"]

ACTIVATIONS = [*HARD, *SMOOTH]

COMPARING = ["__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"]
OPERATORS = ["__and__", "__floordiv__", "__mod__", "__mul__", "__or__", "__pow__", "__sub__", "__truediv__"]
REFLECTED = ["__rand__", "__rmod__", "__rmul__", "__ror__", "__rpow__", "__rsub__", "__rxor__"]
REFLECTED_QUOTIENTS = ["__rdiv__", "__rfloordiv__", "__rtruediv__"]
AUGMENTED = ["__iand__", "__imod__", "__imul__", "__ior__", "__ipow__", "__isub__", "__ixor__"]
AUGMENTED_QUOTIENTS = ["__ifloordiv__", "__itruediv__"]

METHODS = [f"Tensor.{name}" for name in (*COMPARING, *OPERATORS, *REFLECTED, *REFLECTED_QUOTIENTS)]
METHODS_IN_PLACE = [f"Tensor.{name}" for name in (*AUGMENTED, *AUGMENTED_QUOTIENTS)]


PRODUCTS = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__})
QUOTIENTS = frozenset({torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide})
QUOTIENTS |= {Tensor.__truediv__}
SUMS: frozenset[Any] = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
SUMS_IN_PLACE: frozenset[Any] = frozenset({Tensor.add_, Tensor.__iadd__})

CONVERSIONS = ["clone", "Tensor.type_as", "detach", "real", "imag"]


@handles("Pointwise arithmetic", *UNARY, "Tensor.__invert__", rehearse=False, merged=True)
@handles("Copies and conversions", *CONVERSIONS, rehearse=False, merged=True)
@handles("Pointwise arithmetic", *BINARY, broadcasts=True, merged=True)
@handles("Pointwise arithmetic", "add", "Tensor.__add__", "Tensor.__radd__", broadcasts=True, merged=True, rounded=True)
@handles("Pointwise arithmetic", *METHODS, broadcasts=True, merged=True)
def pointwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab; a sum waits with the norms in front of it, and a kernel multiplies by a one-channel volume."""
    if len(args) == 2 and not kwargs and any(map(waits, args)):
        later = _go_on_waiting(func, *args)
        if later is not None:
            return later
    if func in SUMS and len(args) == 2 and not kwargs:
        added = add_waiting(*args, _count_tiles(*args))
        added = add_with_room(*args) if added is None else added
        if added is not None:
            return added
    if func in PRODUCTS and len(args) == 2 and not kwargs:
        volume, gate = sorted(args, key=lambda given: isinstance(given, ShardedVolume) and given.shape[1:2] == (1,))
        if _is_gated(volume, gate):
            return wrap(volume, [_Gate.apply(*row) for row in zip(volume.slabs, gate.slabs, strict=True)])
    return rewrap(*run_local(func, args, kwargs))


def _go_on_waiting(func: Callable, first: Any, second: Any) -> ShardedVolume | None:
    """Return attention scores times a number or plus a bias, still pending; None if they must be written."""
    swaps = func in SUMS or func in PRODUCTS
    volume, operand = (second, first) if swaps and not waits(first) else (first, second)
    if not waits(volume):  # a number divided by scores, or a tensor minus scores
        return None
    if func in SUMS:
        return scores.add_term(func, volume, operand, aligned)
    divides = func in QUOTIENTS
    return scores.scale(func, volume, operand, divides=divides) if divides or func in PRODUCTS else None


def _is_gated(volume: Any, gate: Any) -> bool:
    """Return whether our kernel multiplies a volume by a one-channel volume."""
    if not isinstance(volume, ShardedVolume) or not isinstance(gate, ShardedVolume) or volume.ndim != 5:
        return False
    cut_alike = volume.dims == gate.dims and volume.context is gate.context and volume.merged is gate.merged is None
    alike = cut_alike and gate.shape == (volume.shape[0], 1, *volume.shape[2:]) and volume.dtype == gate.dtype
    # Outside of the network second derivatives may be requested.
    fits = alike and volume.shape[1] > 1 and volume.numel() > 0 and volume.dtype.is_floating_point
    return fits and volume.context.in_network and _has_kernel(volume)


def _has_kernel(volume: ShardedVolume) -> bool:
    return fusions.is_on("gates") and broadcast_mul.takes(volume)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slab: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(slab, gate)
        return broadcast_mul.multiply(slab, gate)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return broadcast_mul.differentiate(gradient, *ctx.saved_tensors)


def _count_tiles(first: Any, second: Any) -> int:
    """Return the number of pieces in which a large sum is written; 1 if it should be computed at once."""
    if not isinstance(first, ShardedVolume) or not isinstance(second, ShardedVolume) or first.ndim < 2:
        return 1
    itemsize = torch.promote_types(first.dtype, second.dtype).itemsize
    return count_slab_tiles(first, first.shape[1], itemsize)


@handles("Activations", *ACTIVATIONS, rehearse=False, merged=True)
def activation(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab, in place with ``inplace``."""
    named = bind(func, args, kwargs)
    return (in_place if named.get("inplace") else pointwise)(func, args, kwargs)


@handles("Pointwise arithmetic", *(f"{name}_" for name in UNARY if "." not in name), rehearse=False, merged=True)
@handles("Activations", *(f"{name}_" for name in ACTIVATIONS), rehearse=False, merged=True)
@handles("Pointwise arithmetic", *(f"{name}_" for name in BINARY if "." not in name), broadcasts=True, merged=True)
@handles("Pointwise arithmetic", *METHODS_IN_PLACE, broadcasts=True, merged=True)
@handles("Pointwise arithmetic", "add_", "Tensor.__iadd__", broadcasts=True, merged=True, rounded=True)
@handles("Copies and conversions", "Tensor.copy_", "Tensor.zero_", "Tensor.fill_", merged=True)
def in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change the slabs in place and return the same volume; an ordinary tensor receives the gathered volume."""
    target = args[0] if args else kwargs["input"]
    if not isinstance(target, ShardedVolume):
        return run_gathered(func, args, kwargs)
    if func in SUMS_IN_PLACE and len(args) == 2 and not kwargs and add_in_place(*args):
        return target
    target.context.change(target)
    run_local(func, args, kwargs, like=target)
    return target


@handles("Pointwise arithmetic", "where", merged=True)
def where(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Choose voxel by voxel; with only a condition, gather it and return the indices of its voxels."""
    if len(args) + len(kwargs) < 3:
        return run_gathered(func, args, kwargs)
    return pointwise(func, args, kwargs)


TAKEN_ALONG = {
    "relu": "leaky",
    "leaky_relu": "leaky",
    "elu": "elu",
    "silu": "silu",
    "gelu": "gelu",
    "sigmoid": "sigmoid",
}
"""Kinds of activation (see ``Activation``) that a pending norm includes."""


@handles("Activations", "relu", "relu_", "F.leaky_relu", "F.leaky_relu_", rehearse=False, merged=True)
@handles("Activations", "F.elu", "F.elu_", "silu", "silu_", "gelu", "gelu_", rehearse=False, merged=True)
@handles("Pointwise arithmetic", "sigmoid", "sigmoid_", rehearse=False, merged=True)
def activate(
    func: Callable, input: Any, negative_slope: Any = None, alpha: Any = None, approximate: Any = None,
    inplace: bool = False,
) -> Any:  # fmt: skip
    """Add the activation to a pending norm in front, or apply it to each slab."""
    volume = input
    refuse_if(not isinstance(volume, ShardedVolume), "its input is not sharded")
    given = {"negative_slope": negative_slope, "alpha": alpha, "approximate": approximate}
    settings = {name: value for name, value in given.items() if value is not None}
    name = func.__name__.removesuffix("_")
    kind: Any = TAKEN_ALONG[name]
    exact = settings.get("approximate", "none") == "none"
    taken = exact and (kind in ("leaky", "elu") or fusions.is_on("activations"))
    parameter = float({"leaky_relu": negative_slope, "elu": alpha}.get(name, 0.0))
    waiting = volume.pending.activate(Activation(kind, parameter)) if taken else None
    written = inplace or func.__name__.endswith("_")
    if waiting is None:
        return (in_place if written else pointwise)(func, (volume,), settings | ({"inplace": True} if inplace else {}))
    if written:
        volume.pending = waiting
        increment_version(volume)
        return volume
    volume.is_bypassed = True
    return defer(waiting, volume.dims, volume.shape, volume.context)


@handles("Activations", "prelu", "F.prelu", rehearse=False, merged=True, samples=each_slab)
def prelu(func: Callable, input: Any, weight: Tensor) -> Any:
    """Apply a slope per channel (not a broadcast from the end)."""
    if not isinstance(input, ShardedVolume) or isinstance(weight, ShardedVolume) or {0, 1} & set(input.dims):
        refuse("batch and channels must not be cut, and the weight must be an ordinary tensor")
    if weight.ndim > 1 or weight.numel() not in (1, input.shape[1]):
        raise RuntimeError(f"prelu needs one slope, or {input.shape[1]} (one per channel), got {tuple(weight.shape)}")
    waiting = input.pending.activate(Activation("prelu"), weight) if fusions.is_on("activations") else None
    if waiting is not None:
        input.is_bypassed = True
        return defer(waiting, input.dims, input.shape, input.context)
    return each_slab(func, input, weight)
