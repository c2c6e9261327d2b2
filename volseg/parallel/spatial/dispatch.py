"""Dispatch a torch function on a sharded volume to its handler, and turn the handler's result into torch's.

The steps are described in ``table``; each refuses what it does not know. A call is rehearsed before any slab is
touched, on the meta device, where tensors have shapes and no values. A call that torch refuses (sizes that do not fit,
a dim that does not exist, an unknown reduction) raises torch's error, and a handler whose result has another shape or
dtype than torch's is detected before its result is used. Each form of a call is rehearsed once.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.compiler_internals import ScriptMethod
from volseg.device.gpus import host_values
from volseg.device.torch_internals import (
    hand_backward_over,
    left_out_of_compilation,
    tree_leaves,
    tree_map,
    tree_map_only,
    without_subclass_overrides,
)
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import HISTORY, refuse_custom
from volseg.parallel.spatial.copied_view import Origin, mark_copies
from volseg.parallel.spatial.gathered import name_of, nested, unsupported, volumes
from volseg.parallel.spatial.signatures import NOTHING, bind, binding_of, writes
from volseg.parallel.spatial.table import TABLE, Entry, Refusal, refuse
from volseg.parallel.spatial.volume import ShardedVolume, relaid

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


def _check_outlines(func: Callable, result: Any, expected: list[Outline]) -> None:
    """Refuse a result with another outline than torch's: an error in a handler must not become a result."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(found) == len(expected) and all(
        leaf.shape == shape and dtype in (None, leaf.dtype)
        for leaf, (shape, dtype) in zip(found, expected, strict=True)
    ):
        return
    got = [(tuple(leaf.shape), leaf.dtype) for leaf in found]
    raise UnsupportedOperatorError(
        f"the sharded form of {getattr(func, '__name__', func)} returned {got}, where torch returns {expected}: this "
        f"is a bug in volseg; please report it, and use on_unsupported='gather' or strategy='pipeline' for now"
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


PLAIN = frozenset({int, float, bool, str, type(None), Tensor, nn.Parameter, torch.dtype, torch.device})
"""Types of most arguments of most functions, recognised by one look-up."""

METADATA = "Metadata and autograd"
"""Family of functions that compute nothing."""

SEVERAL_RANGES = (
    "its cut dim was merged with the dims in front of it, so no shard owns one range of it: call this before the merge"
)

SCRIPTED = "TorchScript does not see the slabs; use the module without torch.jit"


def dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a torch function on a sharded volume."""
    # torch counts no changes in place in inference mode, which volumes compare; an ordinary tensor is written to there.
    if torch.is_inference_mode_enabled() and (not args or isinstance(args[0], ShardedVolume) or not writes(func)):
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(func, *tree_map(make_ordinary, (args, kwargs)))
    entry = TABLE.get(func)
    with without_subclass_overrides():
        given = _given(args, kwargs)
        merged = by_sample = False
        for volume in given:
            merged = merged or volume.merged is not None
            by_sample = by_sample or volume.dims[0] == 0
            if HISTORY.__get__(volume) is not None:
                refuse_custom(volume)
            if volume.origin is not None:
                volume.origin.check()
        if entry is None:
            scripted = isinstance(func, ScriptMethod)
            return unsupported(func, args, kwargs, SCRIPTED if scripted else "it has no sharded form")
        if any(volume.widen is not None for volume in given):
            # A function that computes reads lower precision only under autocast.
            computes = entry.family != METADATA and not torch.is_autocast_enabled(given[0].device.type)
            if computes or not entry.rounded:
                args, kwargs = _widen_what_is_read(func, args, kwargs)
                given = _given(args, kwargs)
        try:
            handler = entry.handler
            if kwargs and kwargs.get("out") is not None:
                refuse("out= is not supported on slabs: use the result")
            only = len(given) == 1 and bool(args) and args[0] is given[0]  # the function's input is the only volume
            if by_sample and entry.samples is not None and only and len(given[0].dims) == 1:
                handler = entry.samples
            elif merged and not entry.merged:
                args, kwargs = tree_map_only(ShardedVolume, in_planes, (args, kwargs))
                given = _given(args, kwargs)
            unknown = entry.rehearsed and given and not (entry.broadcasts and _of_one_shape(args, kwargs))
            expected = rehearsed(func, args, kwargs, given[0]) if unknown else None
            if entry.treated is None:
                result = handler(func, args, kwargs)
            else:
                named, defaults = _treated(entry.treated, func, args, kwargs)
                if handler is entry.handler:
                    named = defaults | named
                elif named.get("input") is not given[0]:
                    refuse("its input is not sharded")
                result = handler(func, **named)
        except Refusal as refusal:
            reason = str(refusal)
        else:
            return _checked(entry, func, result, expected, given)
        return unsupported(func, args, kwargs, reason)


def make_ordinary(value: Any) -> Any:
    """Return an ordinary copy of a tensor made in inference mode; give a volume such slabs; leave other values."""
    if isinstance(value, ShardedVolume):
        value._slabs[:] = map(make_ordinary, value._slabs)
        return value
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _given(args: tuple, kwargs: dict[str, Any]) -> list[ShardedVolume]:
    found: list[ShardedVolume] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in PLAIN:
            continue
        if isinstance(value, ShardedVolume):
            found.append(value)
        elif nested(value):
            found += volumes(value)
    return found


def _widen_what_is_read(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return a call's arguments in torch's precision, except a tensor that the call changes in place.

    That tensor keeps its type for its other users. If it is passed by keyword, a copy is changed, which is refused.
    """
    told = isinstance(func, types.FunctionType) and "inplace" in func.__code__.co_varnames
    changed = int(bool(bind(func, args, kwargs).get("inplace")) if told else writes(func))
    rest, kwargs = tree_map(_widened, (args[changed:], kwargs))
    return (*args[:changed], *rest), kwargs


def _widened(leaf: Any) -> Any:
    """Return a volume in torch's precision, as a copy, if its slabs have a lower one."""
    if not isinstance(leaf, ShardedVolume) or leaf.widen is None:
        return leaf
    wide = leaf.widen(leaf)
    if torch.is_grad_enabled():
        leaf.is_bypassed = True  # the gradient of the wide volume goes to the input of the upsampling
    wide.origin = Origin(leaf._slabs, wide._slabs, [leaf.origin] if leaf.origin is not None else [])
    return wide


def _treated(
    treated: frozenset[str], func: Callable, args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the passed arguments that a handler treats, by name, and torch's defaults of those that it treats.

    An argument that the handler does not know is refused unless it has torch's default.
    """
    binding = binding_of(func, args, kwargs)
    named, defaults = binding(args, kwargs), binding.defaults
    for name in named.keys() - treated:
        default = defaults.get(name, NOTHING)
        value = named.pop(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            refuse(f"its argument {name}= is not supported on slabs")
    return named, {name: value for name, value in defaults.items() if name in treated}


def _of_one_shape(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors have one shape: then a function that broadcasts needs no rehearsal."""
    shape = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if shape is None:
                shape = value.shape
            elif value.shape != shape:
                return False
        elif nested(value):
            return False
    return True


def in_planes(volume: ShardedVolume) -> ShardedVolume:
    """Return the volume with its entries balanced over the shards, for operators that work on planes."""
    if volume.merged is None:
        return volume
    if volume.merged.outer > 1:
        refuse(SEVERAL_RANGES)
    moved = relaid(volume, None)
    # A copy: an in-place change of it is refused.
    moved.origin = Origin(volume.slabs, moved.slabs, [volume.origin] if volume.origin is not None else [])
    return moved


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a function that returns views where torch also copies."""

    value: Any


def _checked(
    entry: Entry, func: Callable, result: Any, expected: list[Outline] | None, given: list[ShardedVolume]
) -> Any:
    """Return the result if it matches torch's, and mark it if it is a copy where torch has a view.

    Parameters
    ----------
    entry, func
        The function that ran, and its entry.
    result
        Result of its handler.
    expected
        Torch's result for such shapes; None if the call was not rehearsed.
    given
        The volumes among its arguments.
    """
    if expected is not None:
        _check_outlines(func, result.value if type(result) is Copied else result, expected)
    if type(result) is Copied:
        result = result.value
    elif entry.views:
        result = mark_copies(result, given, entry.perhaps)
    for volume in given:
        if volume.origin is not None:
            volume.origin.check_unchanged(volume)
        if volume.merged is not None:
            _check_layouts(func, result)
    return result


def _check_layouts(func: Callable, result: Any) -> None:
    """Refuse slabs that do not match the volume's layout: an error in a handler must not become a result."""
    for volume in volumes(result):
        grid = zip(volume._slabs, volume.context.communicator.coordinates, strict=True)
        for slab, coordinates in grid:
            for dim, extents, position in zip(volume.dims, volume.extents(), coordinates, strict=True):
                if slab.shape[dim] != extents[position]:
                    raise UnsupportedOperatorError(
                        f"the sharded form of {name_of(func)} lost the merge of the cut dim {dim} with its "
                        f"neighbours: this is a bug in volseg; please report it, and use strategy='pipeline' for now"
                    )


ShardedVolume.run_function = staticmethod(left_out_of_compilation(dispatch))
hand_backward_over(ShardedVolume)
