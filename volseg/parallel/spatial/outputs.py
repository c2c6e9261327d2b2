"""Write a network's changes of its input back to the caller, and finish its outputs.

A first layer that works in place changes the caller's tensor. On one device it does so with any network. Slabs in the
caller's memory are that tensor. Elsewhere the change is written back after the forward pass, or refused if autograd
would have to know of it. Results are computed to the end, and tied to the sums of their gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import as_plain, get_storage_key, tree_flatten, tree_map, tree_unflatten
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.gradient_sums import Marked
from volseg.parallel.spatial.context import check_history
from volseg.parallel.spatial.copied_view import Origin, plain
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.sources import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, wrap


class CutInput:
    """A caller's tensor, and the slabs that were cut from it.

    Parameters
    ----------
    whole, volume
        The tensor, and the volume of its slabs.
    others
        The call's other tensors, and the values made of them. Tensors that share memory with ``whole`` see its changes.
    """

    def __init__(self, whole: Tensor, volume: ShardedVolume, others: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.whole, self.volume, self._others = whole, volume, others
        self._slabs = list(volume.slabs)
        self._unchanged = Unchanged(self._slabs)

    @classmethod
    def among(cls, given: Sequence[Any], cut: Sequence[Any]) -> "list[CutInput]":
        """Pair the leaves of a call's arguments with the volumes cut from them, once each."""
        pairs = {id(whole): (whole, made) for whole, made in zip(given, cut, strict=True) if _is_plain(whole)}
        return [
            cls(whole, volume, [pair for key, pair in pairs.items() if key != id(whole)])
            for whole, volume in pairs.values()
            if isinstance(volume, ShardedVolume)
        ]

    def write_back(self) -> None:
        """Copy the forward pass's changes of the slabs to the caller's tensor.

        Raises
        ------
        UnsupportedOperatorError
            If autograd, or another argument that shares memory, would not see the change.
        """
        slabs = self.volume.slabs
        same = all(a is b for a, b in zip(slabs, self._slabs, strict=True))
        if same and self._unchanged.holds():
            return
        is_there = same and _lies_in(self.whole, self.volume)
        for other, made in self._others:
            if _overlap(self.whole, other) and not (is_there and _lies_in(self.whole, made)):
                raise UnsupportedOperatorError(
                    f"the network changes its input of shape {tuple(self.whole.shape)} in place, but another one of "
                    f"shape {tuple(other.shape)} shares its memory: on several devices each has slabs of its own, and "
                    "the other would not have changed. Pass input.clone(), or let the first layer work out of place "
                    "(inplace=False)"
                )
        if is_there:
            return
        if self.whole.requires_grad:
            raise UnsupportedOperatorError(
                f"the network changes its input of shape {tuple(self.whole.shape)} in place, but that input needs a "
                "gradient: the slabs on other devices are copies, of whose change autograd would not know. Pass "
                "input.clone(), or let the first layer work out of place (inplace=False)"
            )
        with torch.no_grad():
            as_plain(self.whole).copy_(self.volume.full_tensor())


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, ShardedVolume) and value.layout == torch.strided


def _lies_in(whole: Tensor, made: Tensor) -> bool:
    """Say whether slabs, or a tensor, that were made of an argument are in the memory of ``whole``."""
    memory = get_storage_key(whole.untyped_storage())
    parts = made.slabs if isinstance(made, ShardedVolume) else [made]
    return all(get_storage_key(part.untyped_storage()) == memory for part in parts)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory between the first and the last elements of two tensors overlaps."""
    if get_storage_key(one.untyped_storage()) != get_storage_key(other.untyped_storage()):
        return False
    (begin, end), (first, last) = _find_extent(one), _find_extent(other)
    return begin < last and first < end


def _find_extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the last byte of a tensor in its storage."""
    begin = int(tensor.storage_offset())
    span = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) + 1
    return begin * tensor.itemsize, (begin + (span if tensor.numel() else 0)) * tensor.itemsize


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
