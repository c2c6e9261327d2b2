"""What a network on slabs returns: computed to the end, and tied to the sums of its gradients."""

from typing import Any

from torch import Tensor

from volseg.device.torch_internals import tree_flatten, tree_map, tree_unflatten
from volseg.parallel.gradient_sums import Marked
from volseg.parallel.spatial.copied_view import Origin, plain
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.history import check_history
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["finish_result"]


def finish_result(result: Any, marked: Marked | None, *, contiguous: bool) -> Any:
    """Return what a forward pass's caller gets.

    Parameters
    ----------
    result
        What the network returned.
    marked
        Whose gradients the backward pass sums; None where nothing is to be summed.
    contiguous
        Whether channels come first again, as in the labels with which losses mix them: outputs have few.
    """
    result = tree_map(_widen, result)
    for volume in volumes(result):  # with the weights of now: the optimizer may change them before anybody looks
        volume.settle()
    result = tree_map(plain, result)
    if marked is not None:
        result = _tie(result, marked)
    return tree_map(_make_contiguous, result) if contiguous else result


def _tie(result: Any, marked: Marked) -> Any:
    """Return a pass's result, whose backward pass sums every gradient."""
    leaves, structure = tree_flatten(result)
    marked.check_outputs(leaves)
    pieces = [_list_pieces(leaf) for leaf in leaves]
    tied = iter(marked.tie([piece for own in pieces for piece in own]))
    results = []
    for leaf, own in zip(leaves, pieces, strict=True):
        fresh = [next(tied) for _ in own]
        if isinstance(leaf, ShardedVolume) and fresh:
            origin, leaf = leaf.origin, wrap(leaf, fresh)
            leaf.origin = None if origin is None else Origin([], fresh, [origin])
        elif fresh:
            (leaf,) = fresh
        results.append(leaf)
    return tree_unflatten(results, structure)


def _list_pieces(leaf: Any) -> list[Tensor]:
    """Return the tensors that a gradient comes back through."""
    if isinstance(leaf, ShardedVolume):
        check_history(leaf)
        return leaf.slabs if any(slab.requires_grad for slab in leaf.slabs) else []
    return [leaf] if isinstance(leaf, Tensor) and leaf.requires_grad else []


def _widen(leaf: Any) -> Any:
    """Return what torch has in float32 as such; inside the network it may have had fewer digits."""
    return leaf if not isinstance(leaf, ShardedVolume) or leaf.widen is None else leaf.widen(leaf)


def _make_contiguous(leaf: Any) -> Any:
    if not isinstance(leaf, ShardedVolume) or leaf.origin is not None:
        return leaf
    check_history(leaf)
    return wrap(leaf, [slab.contiguous() for slab in leaf.slabs])
