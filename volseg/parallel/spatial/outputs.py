"""Refuse a network's changes of its input that the caller would not see, and finish its outputs.

A first layer that works in place changes the caller's tensor. Slabs in the caller's memory are that tensor; a change of
slabs that are copies would be lost. Results are computed to the end, and tied to the sums of their gradients.
"""

from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import get_storage_key, tree_flatten, tree_map, tree_unflatten
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.gradient_sums import Marked
from volseg.parallel.spatial.context import check_history
from volseg.parallel.spatial.copied_view import Origin, plain
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.sources import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, wrap


class CutInput:
    """A caller's tensor, and the slabs that were cut from it."""

    def __init__(self, whole: Tensor, volume: ShardedVolume) -> None:
        self.whole, self.volume = whole, volume
        self._slabs = list(volume.slabs)
        self._unchanged = Unchanged(self._slabs)

    def check(self) -> None:
        """Refuse changes of slabs that are copies.

        Raises
        ------
        UnsupportedOperatorError
            If the forward pass has made such a change.
        """
        slabs = self.volume.slabs
        same = all(a is b for a, b in zip(slabs, self._slabs, strict=True))
        if same and self._unchanged.holds():
            return
        memory = get_storage_key(self.whole.untyped_storage()) if self.whole.layout == torch.strided else None
        if not same or any(get_storage_key(slab.untyped_storage()) != memory for slab in slabs):
            raise UnsupportedOperatorError(
                f"the network changes its input of shape {tuple(self.whole.shape)} in place, but its slabs are "
                "copies on other devices or processes, so the caller would not see the change. Pass input.clone(), use "
                "inplace=False in the first layer, or use strategy='pipeline'"
            )


def finish_result(result: Any, marked: Marked | None, *, contiguous: bool) -> Any:
    """Return the final result of a forward pass.

    Parameters
    ----------
    result
        The network's result.
    marked
        Parameters whose gradients the backward pass sums; None for no sums.
    contiguous
        Whether to convert outputs to channels first, the layout of the labels in losses: outputs have few channels.
    """
    result = tree_map(_widen, result)
    for volume in volumes(result):  # with the current weights: the optimizer may change them before the result is read
        volume.settle()
    result = tree_map(plain, result)
    if marked is not None:
        result = _tie(result, marked)
    return tree_map(_make_contiguous, result) if contiguous else result


def _tie(result: Any, marked: Marked) -> Any:
    """Return a pass's result, tied so that its backward pass sums every gradient."""
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
    """Return the tensors through which a gradient flows back."""
    if isinstance(leaf, ShardedVolume):
        check_history(leaf)
        return leaf.slabs if any(slab.requires_grad for slab in leaf.slabs) else []
    return [leaf] if isinstance(leaf, Tensor) and leaf.requires_grad else []


def _widen(leaf: Any) -> Any:
    """Return values in float32 if torch has float32; inside the network they may have lower precision."""
    return leaf if not isinstance(leaf, ShardedVolume) or leaf.widen is None else leaf.widen(leaf)


def _make_contiguous(leaf: Any) -> Any:
    if not isinstance(leaf, ShardedVolume) or leaf.origin is not None:
        return leaf
    check_history(leaf)
    return wrap(leaf, [slab.contiguous() for slab in leaf.slabs])
