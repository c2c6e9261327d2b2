"""Run users' functions on volumes: custom pointwise autograd functions, and functions that read whole tensors.

``Function.apply`` does not call ``__torch_function__``, so a volume would pass through with a backward of the empty
shell (``table`` refuses this). For a declared function, ``apply`` is replaced by one that looks for volumes first and
runs the function on each slab. A function that is not declared does not run: its backward may read neighbours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, TypeVar

import torch
from torch import Tensor

from volseg.device.torch_internals import get_version, tree_leaves, tree_map_only, without_subclass_overrides
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.operators.operands import rewrap, run_local
from volseg.parallel.spatial.volume import ShardedVolume

Function = TypeVar("Function", bound=type[torch.autograd.Function])


def pointwise_function(function: Function) -> Function:
    """Declare that a custom autograd function is pointwise, so that it runs on volumes; usable as a decorator.

    Each voxel of its outputs, and of its gradients, must depend on the same voxel of its tensor arguments (broadcast
    as torch does) and on nothing else: no neighbours, no sums, no position.

    Examples
    --------
    >>> @pointwise_function
    ... class Doubled(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    ...
    ...     @staticmethod
    ...     def backward(ctx, gradient):
    ...         return gradient * 2
    """
    if isinstance(vars(function).get("apply"), _Declared):
        return function
    plain: Any = getattr_static(function, "apply")  # torch's is Python's own kind of class method, or C's

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        run = plain.__get__(None, cls)
        if cls is not function or not volumes((args, kwargs)):  # a subclass is not declared
            return run(*args, **kwargs)
        with without_subclass_overrides():
            return _on_slabs(function, run, args, kwargs)

    function.apply = _Declared(apply)  # type: ignore[method-assign, assignment]
    return function


class _Declared(classmethod):
    """The ``apply`` of a declared function."""


def _on_slabs(function: type, apply: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    given = volumes((args, kwargs))
    for volume in given:
        if volume.origin is not None:
            volume.origin.check()
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    like = max(given, key=lambda volume: volume.ndim)
    versions = [get_version(slab) for volume in given for slab in volume.slabs]
    like, results = run_local(apply, args, kwargs, like)
    if [get_version(slab) for volume in given for slab in volume.slabs] != versions:
        does = "changes a volume in place"
    elif not all(isinstance(leaf, Tensor) and leaf.ndim == like.ndim for leaf in tree_leaves(results)):
        does = f"returns something other than tensors of {like.ndim} dims"
    elif any(leaf.shape != shape for leaf in tree_leaves(rewrap(like, results))):
        does = f"returns something other than tensors of shape {tuple(shape)}"
    else:
        return rewrap(like, results)
    raise UnsupportedOperatorError(
        f"{function.__name__} is declared pointwise, but {does}; write it with torch functions"
    )


@contextmanager
def no_script() -> Iterator[None]:
    """Raise a refusal inside a scripted function as such; the interpreter turns it into a RuntimeError."""
    try:
        yield
    except RuntimeError as fault:
        if "TorchScript interpreter" not in str(fault):
            raise
        raise UnsupportedOperatorError(
            "a function compiled by torch.jit was called with a volume, whose slabs TorchScript does not see; use the "
            "Python function instead"
        ) from fault


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gathers the volumes among its arguments, and then calls the given one.

    Values and gradients equal those of one device. The whole volume must fit there (on every process of a group; all
    compute the same): gather inputs of a loss, not of a layer.

    Parameters
    ----------
    function
        A function or module, such as ``monai.losses.HausdorffDTLoss()``.

    Examples
    --------
    >>> from monai.losses import HausdorffDTLoss
    >>> loss = whole(HausdorffDTLoss(softmax=True, to_onehot_y=True))
    """

    def on_whole_tensors(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(ShardedVolume, lambda volume: volume.full_tensor(), (args, kwargs))
        return function(*args, **kwargs)

    return on_whole_tensors
