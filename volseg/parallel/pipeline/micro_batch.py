"""Split a call's arguments into micro-batches along the batch dimension, and join the outputs.

Every tensor with one row per sample is split; other values (a scalar, a table, a string) go whole to each micro-batch.
``batching`` finds the tensors with one row per sample, since a length may be equal by accident. Outputs must have the
batch as first dimension: micro-batches would change the meaning of a network that returns a mean over its batch, so
such a network is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import as_plain, pytree
from volseg.errors import ParallelError

PLAIN = (bool, int, float, str, type(None))
"""Output types that are passed on if all micro-batches agree."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch, and its micro-batches."""

    call: Call
    """The whole call."""
    is_batch: Sequence[bool]
    """For each leaf, whether it is split."""
    calls: Sequence[Call]
    """The micro-batches."""
    sizes: Sequence[int]
    """Samples of each micro-batch."""
    target: torch.device
    """Device of the outputs."""


def get_batch_size(call: Call) -> int:
    """Return the length of dimension 0 of the first tensor argument that has dimensions.

    Raises
    ------
    ParallelError
        If no argument is such a tensor, or it is empty.
    """
    leaves = pytree.tree_leaves(call)
    size = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if not size:
        given = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
        came = "an empty batch" if size == 0 else given
        raise ParallelError(
            f"the pipeline cuts batches along dimension 0 and needs a tensor argument (B, ...) with B >= 1, got {came}"
        )
    return size


def compute_split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the sizes of the micro-batches; the last one may be smaller.

    Examples
    --------
    >>> compute_split_sizes(7, 3)
    [3, 3, 1]
    """
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


def mark_batch_candidates(call: Call) -> list[bool]:
    """Return which leaves of a call are as long as the batch, and so may have one row per sample."""
    batch = get_batch_size(call)
    return [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch for leaf in pytree.tree_leaves(call)]


def count_samples(call: Call, is_batch: Sequence[bool]) -> int:
    """Return the number of samples in the leaves that ``is_batch`` marks."""
    return len(next(compress(pytree.tree_leaves(call), is_batch)))


def split(call: Call, split_size: int, is_batch: Sequence[bool]) -> list[Call]:
    """Split the leaves with one row per sample, which ``is_batch`` marks, into pieces of ``split_size`` samples."""
    leaves, structure = pytree.tree_flatten(call)
    sizes = compute_split_sizes(count_samples(call, is_batch), split_size)
    starts = list(accumulate(sizes[:-1], initial=0))
    pieces: list[Sequence[Any]] = []
    for leaf, is_cut in zip(leaves, is_batch, strict=True):
        if is_cut:
            # Plain tensors: subclasses such as MONAI's MetaTensor override torch functions. Narrowed one by one: the
            # results of ``Tensor.split`` may not be changed in place.
            plain = as_plain(leaf)
            pieces.append([plain.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)])
        else:
            pieces.append([leaf] * len(sizes))
    return [pytree.tree_unflatten(list(row), structure) for row in zip(*pieces, strict=True)]


def resize_call(call: Call, is_batch: Sequence[bool], samples: int) -> Call:
    """Return a call of ``samples`` samples: the first ones of ``call``, repeated if it has fewer."""
    leaves, structure = pytree.tree_flatten(call)
    with torch.no_grad():
        chosen = [
            leaf[torch.arange(samples, device=leaf.device) % len(leaf)] if is_cut else leaf
            for leaf, is_cut in zip(leaves, is_batch, strict=True)
        ]
    return pytree.tree_unflatten(chosen, structure)


def copy_call(call: Call) -> Call:
    """Copy the tensors of a call: a network may change its input in place, and a trial must have no side effects.

    The copy of a non-leaf is a non-leaf, which may be changed in place although it needs a gradient.
    """

    def copy_tensor(tensor: Tensor) -> Tensor:
        own = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.is_leaf or not torch.is_grad_enabled():
            return own
        return own.clone()

    return pytree.tree_map_only(Tensor, copy_tensor, call)


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the outputs of the micro-batches leaf by leaf.

    Raises
    ------
    ParallelError
        If an output has no batch dimension, or the micro-batches' outputs differ in structure.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ParallelError(
            "the network returned different structures for micro-batches of one batch: "
            f"{structure} and {next(other for _, other in flat if other != structure)}"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [_join_leaf(column, sizes, number) for number, column in enumerate(columns)]
    return pytree.tree_unflatten(joined, structure)


def _join_leaf(column: Sequence[Any], sizes: Sequence[int], number: int) -> Any:
    first = column[0]
    if isinstance(first, PLAIN) and all(type(leaf) is type(first) and leaf == first for leaf in column):
        return first
    for leaf, size in zip(column, sizes, strict=True):
        if isinstance(leaf, Tensor):
            check_length(leaf, size, number)
    if len({_describe_rows(leaf) for leaf in column}) > 1 or not isinstance(first, Tensor):
        found = ", ".join(dict.fromkeys(map(_describe_rows, column)))
        raise ParallelError(
            f"output {number} of the network is {found} in the micro-batches; the pipeline joins tensors (B, ...) of "
            "one shape and type in tuples, lists and dictionaries, and passes on equal plain values"
        )
    return torch.cat(list(column)) if len(column) > 1 else first


def _describe_rows(leaf: Any) -> str:
    """Describe what must be equal for outputs to be joined."""
    return f"{tuple(leaf.shape[1:])} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def check_length(leaf: Tensor, size: int, number: int) -> None:
    """Refuse an output without one row per sample.

    Raises
    ------
    ParallelError
        If the number of rows differs.
    """
    if not leaf.dim() or len(leaf) != size:
        raise ParallelError(
            f"output {number} of the network has shape {tuple(leaf.shape)} for a micro-batch of {size}; the pipeline "
            "needs the batch as dimension 0: return per-sample values and reduce them outside ModelParallel"
        )
