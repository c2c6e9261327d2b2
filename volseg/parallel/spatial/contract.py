"""Rehearse a call before any slab is touched: torch's errors, and the shapes of its results.

The call runs on the meta device, where tensors have shapes and no values. A call that torch refuses (sizes that do
not fit, a dim that does not exist, an unknown reduction) raises torch's error, and a handler whose result has another
shape or dtype than torch's is detected before its result is used. Each form of a call is rehearsed once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import host_values
from volseg.device.torch_internals import tree_leaves, tree_map
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.volume import ShardedVolume

Outline = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor; no dtype under autocast, which the meta device does not follow."""


def rehearsed(func: Callable, args: tuple, kwargs: dict[str, Any], like: ShardedVolume) -> list[Outline] | None:
    """Return the outlines of the tensors that the call returns, or None if they depend on values.

    Raises
    ------
    Exception
        torch's error for such a call.
    """
    autocast = torch.is_autocast_enabled(like.device.type)
    # The default dtype is the dtype of ``integers / 2`` and ``where(mask, 1.0, 0.0)``.
    key = (func, autocast, torch.get_default_dtype(), _described(args), _described(kwargs) if kwargs else None)
    try:
        found: list[Outline] | None = like.context.planned(key, lambda: _on_meta(func, args, kwargs, autocast))
    except TypeError as fault:
        if "unhashable" not in str(fault):
            raise
        return _on_meta(func, args, kwargs, autocast)
    return found


def check(func: Callable, result: Any, expected: list[Outline]) -> None:
    """Refuse a result with another outline than torch's: an error in a handler must not become a result."""
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
    """Return a key of every property on which the shape of a result can depend."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_described, value)
    if kind is dict:
        return kind, *((name, _described(own)) for name, own in value.items())
    if kind is slice:
        return kind, value.start, value.stop, value.step
    return kind, value  # 1, 1.0 and True are equal, but give different dtypes


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
    except RuntimeError as fault:  # numbers read from a tensor: an index, or the places of a split
        if "on meta" in str(fault) or "meta tensor" in str(fault):
            return None
        raise
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(tuple(leaf.shape), None if autocast else leaf.dtype) for leaf in leaves]
