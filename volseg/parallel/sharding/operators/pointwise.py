"""Functions that look at one voxel at a time: run on each slab, operands brought to the same cut."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from volseg.parallel.sharding.context import Context
from volseg.parallel.sharding.table import handles, nested, unsupported, volumes
from volseg.parallel.sharding.volume import ShardedVolume, from_whole, wrap

__all__ = ["aligned", "pointwise", "run_local"]

UNARY = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_not",
    "cbrt",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "conj",
    "conj_physical",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "frac",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "logit",
    "mvlgamma",
    "nan_to_num",
    "neg",
    "negative",
    "polygamma",
    "positive",
    "rad2deg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sgn",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "special.erfcx",
    "special.expit",
    "special.log_ndtr",
    "special.ndtr",
    "special.ndtri",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "resolve_conj",
    "resolve_neg",
]

BINARY = [
    "add",
    "addcdiv",
    "addcmul",
    "arctan2",
    "atan2",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "copysign",
    "div",
    "divide",
    "eq",
    "float_power",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "ge",
    "gt",
    "greater",
    "greater_equal",
    "heaviside",
    "hypot",
    "isclose",
    "ldexp",
    "le",
    "lerp",
    "less",
    "less_equal",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "multiply",
    "ne",
    "nextafter",
    "not_equal",
    "pow",
    "remainder",
    "rsub",
    "sub",
    "subtract",
    "true_divide",
    "where",
    "xlogy",
    "special.xlogy",
    "special.xlog1py",
    "masked_fill",
]

ACTIVATIONS = [
    "celu",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "logsigmoid",
    "mish",
    "relu6",
    "selu",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "tanhshrink",
    "threshold",
]

DUNDER = [
    "abs",
    "add",
    "and",
    "eq",
    "floordiv",
    "ge",
    "gt",
    "invert",
    "le",
    "lt",
    "mod",
    "mul",
    "ne",
    "neg",
    "or",
    "pos",
    "pow",
    "radd",
    "rand",
    "rdiv",
    "rfloordiv",
    "rmod",
    "rmul",
    "ror",
    "rpow",
    "rsub",
    "rtruediv",
    "rxor",
    "sub",
    "truediv",
]

IN_PLACE = ["iadd", "iand", "ifloordiv", "imod", "imul", "ior", "ipow", "isub", "itruediv", "ixor"]

CONVERSIONS = [
    "Tensor.bfloat16",
    "Tensor.bool",
    "Tensor.byte",
    "Tensor.char",
    "Tensor.clone",
    "clone",
    "Tensor.contiguous",
    "Tensor.double",
    "Tensor.float",
    "Tensor.half",
    "Tensor.int",
    "Tensor.long",
    "Tensor.short",
    "Tensor.type_as",
    "detach",
    "Tensor.detach_",
    "empty_like",
    "full_like",
    "ones_like",
    "zeros_like",
]


def aligned(operand: Any, like: ShardedVolume) -> list[Any]:
    """Return an operand of a broadcast as one value per slab of ``like``."""
    if operand is like:
        return list(like.slabs)
    if not isinstance(operand, Tensor):
        return [operand] * len(like.context.communicator.devices)
    # Cut dims counted from the end, as broadcasting does.
    wanted = [dim - like.ndim for dim in like.dims]
    if isinstance(operand, ShardedVolume):
        dims = [dim - operand.ndim for dim in operand.dims]
        if dims == wanted and operand.sizes == like.sizes:
            return list(operand.slabs)
        operand = operand.full_tensor()
    return _cut_or_spread(operand, wanted, like.sizes, like.context)


def _cut_or_spread(operand: Tensor, wanted: Sequence[int], sizes: Sequence[int], context: Context) -> list[Tensor]:
    """Cut a whole operand along the dims (from the end) that it has; spread it where it is constant along all."""
    present = [-dim <= operand.ndim and operand.shape[dim] == size for dim, size in zip(wanted, sizes, strict=True)]
    if not any(present) or (operand.ndim == 0):
        return context.spread(operand)
    if not all(present):
        # Cut along one of two axes, constant along the other: give it its full extent.
        shape = list(operand.shape)
        shape = [1] * max(0, -min(wanted) - operand.ndim) + shape
        for dim, size in zip(wanted, sizes, strict=True):
            shape[dim] = size
        operand = operand.expand(shape)
    return context.communicator.cut(operand, [dim + operand.ndim for dim in wanted])


def run_local(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[ShardedVolume, list[Any]]:
    """Run ``func`` on each slab with aligned operands; return the reference volume and the results."""
    leaves = [*args, *kwargs.values()]
    if not any(map(nested, leaves)):

        def call(row: Sequence[Any]) -> Any:
            return func(*row[: len(args)], **dict(zip(kwargs, row[len(args) :], strict=True)))
    else:
        leaves, structure = tree_flatten((args, kwargs))

        def call(row: Sequence[Any]) -> Any:
            local_args, local_kwargs = tree_unflatten(list(row), structure)
            return func(*local_args, **local_kwargs)

    given = [leaf for leaf in leaves if isinstance(leaf, ShardedVolume)]
    # A volume of extent one along a dim that another one cuts cannot exist: it would be whole.
    like = given[0] if len(given) == 1 else max(given, key=lambda volume: volume.ndim)
    columns = [aligned(leaf, like) for leaf in leaves]
    results = [call(row) for row in zip(*columns, strict=True)]
    return like, results


def rewrap(like: ShardedVolume, results: list[Any]) -> Any:
    """Return per-slab results (tensors, or tuples of them) as volumes."""
    if isinstance(results[0], Tensor):
        shift = results[0].ndim - like.ndim
        return wrap(like, results, [dim + shift for dim in like.dims])
    if isinstance(results[0], tuple | list):
        parts = [rewrap(like, list(column)) for column in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(parts)
    return results[0]


@handles("Pointwise arithmetic", *UNARY, *BINARY)
@handles("Pointwise arithmetic", *(f"Tensor.__{name}__" for name in DUNDER))
@handles("Activations", *ACTIVATIONS)
@handles("Copies and conversions", *CONVERSIONS)
def pointwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab."""
    like, results = run_local(func, args, kwargs)
    return rewrap(like, results)


@handles("Pointwise arithmetic", *(f"{name}_" for name in (*UNARY, *BINARY) if "." not in name))
@handles("Pointwise arithmetic", *(f"Tensor.__{name}__" for name in IN_PLACE))
@handles("Activations", *(f"{name}_" for name in ACTIVATIONS))
def in_place(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change the slabs in place and return the same volume."""
    target = args[0] if args else kwargs["input"]
    if not isinstance(target, ShardedVolume):
        return unsupported(
            func, args, kwargs, "it writes into a tensor that is not sharded; write a = a + b for a += b"
        )
    target.context.settle()
    run_local(func, args, kwargs)
    return target


@handles("Copies and conversions", "Tensor.to", "Tensor.type")
def convert(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change the dtype; the device is the slab's own and stays."""
    volume, *rest = args
    if not isinstance(volume, ShardedVolume):  # plain.to(sharded): its dtype and home device
        return volume.to(device=rest[0].context.communicator.home, dtype=rest[0].dtype)
    if func is Tensor.type and not rest and not kwargs:
        return volume.slabs[0].type()
    kept = [_without_device(value) for value in rest]
    named = {key: value for key, value in kwargs.items() if key != "device"}
    kept = [value for value in kept if value is not None]
    return wrap(volume, [func(slab, *kept, **named) if kept or named else slab for slab in volume.slabs])


def _without_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, torch.device) or (isinstance(value, str) and not value.startswith("torch.")):
        return None
    return None if isinstance(value, int) and not isinstance(value, bool) else value


@handles("Copies and conversions", "Tensor.scatter_", "Tensor.scatter", "scatter")
def scatter(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Scatter along a dim that is not cut, as one-hot encoding does."""
    names = ("self", "dim", "index", "src")
    named = dict(zip(names, args, strict=False)) | kwargs
    dim, index = named["dim"], named["index"]
    if not isinstance(index, ShardedVolume) or dim % index.ndim in index.dims:
        return unsupported(func, args, kwargs, "the index must be sharded, and dim another one than the cut dim")
    like, results = run_local(func, args, kwargs)
    if func is not Tensor.scatter_:
        return rewrap(like, results)
    if isinstance(args[0], ShardedVolume):
        return args[0]
    # MONAI's one_hot scatters into a whole tensor and goes on with the result. Whoever goes on with the tensor itself
    # must not find it unchanged: it is emptied.
    args[0].resize_(0)
    return rewrap(like, results)


@handles("Copies and conversions", "Tensor.copy_", "Tensor.zero_", "Tensor.fill_")
def copy_into(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Write a volume or a broadcast value into a volume."""
    return in_place(func, args, kwargs)


def elementwise(function: Callable, *operands: Any, **settings: Any) -> Any:
    """Call a pointwise function on volumes from within a handler."""
    if not volumes(operands):
        return function(*operands, **settings)
    like, results = run_local(function, operands, settings)
    return tree_map(lambda result: result, rewrap(like, results))


def cut_like(whole: Tensor, like: ShardedVolume) -> ShardedVolume:
    """Cut an ordinary tensor of the same grid."""
    return from_whole(whole, [dim - like.ndim + whole.ndim for dim in like.dims], like.context)


@handles("Activations", "prelu", "F.prelu")
def prelu(func: Callable, args: tuple, _kwargs: dict[str, Any]) -> Any:
    """Apply a slope per channel (not a broadcast from the end)."""
    volume, weight = args
    slopes = volume.context.spread(weight)
    return wrap(volume, [func(slab, slope) for slab, slope in zip(volume.slabs, slopes, strict=True)])
