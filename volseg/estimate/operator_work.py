"""Count the operations and the bytes of an operator: torch's operators, and volseg's kernels."""

import sys
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from volseg.device.fake_gpu import NotedKernel
from volseg.device.fake_internals import FakeTensor
from volseg.device.layout import layout_of
from volseg.device.torch_internals import get_schema
from volseg.estimate.roofline import LAID_OUT_ANEW, TURNED_ROUND
from volseg.estimate.trace import KernelRun

SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "record_stream",
    "_unsafe_view",
    "unsafe_split",
    "unsafe_split_with_sizes",
}
"""Operators that launch no kernel, in addition to views, which their schema or their tags mark."""

FILLING = {"new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like"}
"""Operators that do not read their tensor: it only sets the shape and the type of the result."""


def describe_kernel(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor], out: Any,
    stream: int,
) -> KernelRun | None:  # fmt: skip
    """Return the kernel of an operator, or None if it launches none.

    Parameters
    ----------
    function, args, kwargs
        The operator of aten, and its arguments.
    inputs, out
        The tensors among its arguments, and its result.
    stream
        Stream of the kernel.
    """
    if not _starts_kernel(function):
        return None
    results = list_tensors(out)
    if function.overloadpacket.__name__ in FILLING:
        inputs = ()
    tensors = [*inputs, *(result for result in results if not any(result is tensor for tensor in inputs))]
    first = (inputs or results)[0]
    count = flop_registry.get(function.overloadpacket)
    return KernelRun(
        str(function.overloadpacket) + _name_variant(function, args, tensors),
        first.dtype,
        int(count(*args, **kwargs, out_val=out)) if count else max((each.numel() for each in results), default=0),
        sum(_count_bytes(tensor) for tensor in tensors),
        tuple(tuple(tensor.shape) for tensor in tensors),
        layout_of(first) is torch.channels_last_3d,
        stream,
    )


COPIES = {"clone", "copy_", "_to_copy"}


def _name_variant(function: Any, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> str:
    """Return a suffix for the name of an operator whose time differs from that of its plain form."""
    name = function.overloadpacket.__name__
    if name in COPIES and len(tensors) == 2 and len({layout_of(tensor) for tensor in tensors}) > 1:
        return LAID_OUT_ANEW
    if name == "convolution" and args[6] and set(args[3]) == {1}:
        return TURNED_ROUND
    return ""


def describe_noted(kernel: NotedKernel, stream: int) -> KernelRun:
    """Return the run of one of volseg's kernels: most only read and write each tensor once."""
    first = kernel.tensors[0]
    most = sys.maxsize
    if kernel.options.get("ENDS"):  # it accesses the ends of a slab only
        most = prod(kernel.grid) * int(kernel.options["BV"]) * int(kernel.options["BC"])
    return KernelRun(
        kernel.name,
        first.dtype,
        min(most, max(tensor.numel() for tensor in kernel.tensors)),
        sum(min(_count_bytes(tensor), most * tensor.element_size()) for tensor in kernel.tensors),
        tuple(tuple(tensor.shape) for tensor in kernel.tensors),
        layout_of(first) is torch.channels_last_3d,
        stream,
    )


def list_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, in order."""
    if _is_tensor(values):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[Tensor] = []
    for value in values:
        if _is_tensor(value):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += list_tensors(value)
    return found


_kinds: dict[type, bool] = {FakeTensor: True}


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, by its type: ``isinstance`` would run torch's Python code."""
    kind = type(value)
    known = _kinds.get(kind)
    return _kinds.setdefault(kind, issubclass(kind, Tensor)) if known is None else known


@cache
def _starts_kernel(function: Any) -> bool:
    if function.namespace not in ("aten", "volseg") or function.overloadpacket.__name__ in SILENT:
        return False
    if torch.Tag.inplace_view in function.tags:
        return False
    returns = get_schema(function).returns
    return not any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _count_bytes(tensor: Tensor) -> int:
    # A broadcast dim is read once.
    sides = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return prod(sides) * tensor.element_size()
