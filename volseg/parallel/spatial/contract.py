"""Torch's own verdict on a call, before any slab is touched: what it refuses, and the shapes of what it returns.

The call is rehearsed on the meta device, where tensors have shapes and no values. What torch refuses (sizes that do
not fit, a dim that does not exist, an unknown reduction) is refused with torch's words, and a handler whose result
has another shape or dtype than torch's is caught before anybody computes with it. Each form of a call is rehearsed
once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import host_values
from volseg.device.torch_internals import tree_leaves, tree_map
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["Outline", "check", "rehearsed"]

Outline = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor; no dtype under autocast, which the meta device does not follow."""


def rehearsed(func: Callable, args: tuple, kwargs: dict[str, Any], like: ShardedVolume) -> list[Outline] | None:
    """Return the outlines of the tensors that the call returns, or None where they depend on values.

    Raises
    ------
    Exception
        What torch raises for such a call.
    """
    autocast = torch.is_autocast_enabled(like.device.type)
    # The default dtype is that of ``integers / 2`` and ``where(mask, 1.0, 0.0)``.
    key = (func, autocast, torch.get_default_dtype(), _described(args), _described(kwargs) if kwargs else None)
    try:
        found: list[Outline] | None = like.context.planned(key, lambda: _on_meta(func, args, kwargs, autocast))
    except TypeError as fault:
        if "unhashable" not in str(fault):
            raise
        return _on_meta(func, args, kwargs, autocast)
    return found


def check(func: Callable, result: Any, expected: list[Outline]) -> None:
    """Refuse a result that is not what torch returns: a mistake of ours must not pass for a number."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(found) == len(expected) and all(
        leaf.shape == shape and dtype in (None, leaf.dtype)
        for leaf, (shape, dtype) in zip(found, expected, strict=True)
    ):
        return
    got = [(tuple(leaf.shape), leaf.dtype) for leaf in found]
    raise UnsupportedOperatorError(
        f"the sharded form of {getattr(func, '__name__', func)} returned {got}, where torch returns {expected}: a "
        f"mistake in volseg; please report it, and use on_unsupported='gather' or strategy='pipeline' for now"
    )


def _described(value: Any) -> Any:
    """Return what the shape of a result can depend on, as something to look up by."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_described, value)
    if kind is dict:
        return kind, *((name, _described(own)) for name, own in value.items())
    if kind is slice:
        return kind, value.start, value.stop, value.step
    return kind, value  # 1, 1.0 and True are equal, and not alike


def _on_meta(func: Callable, args: tuple, kwargs: dict[str, Any], autocast: bool) -> list[Outline] | None:
    def outline(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dtype = torch.float32 if autocast and leaf.dtype.is_floating_point else leaf.dtype
            return torch.empty(leaf.shape, dtype=dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    named = {name: "meta" if name == "device" and value is not None else value for name, value in kwargs.items()}
    try:
        with host_values(), torch.no_grad():
            result = func(*tree_map(outline, args), **tree_map(outline, named))
    except NotImplementedError:  # no kernel for the meta device, or a result that depends on values
        return None
    except RuntimeError as fault:  # numbers that are read off a tensor: an index, or where to split
        if "on meta" in str(fault) or "meta tensor" in str(fault):
            return None
        raise
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(tuple(leaf.shape), None if autocast else leaf.dtype) for leaf in leaves]
