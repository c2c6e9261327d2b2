"""Cut a call's arguments into micro-batches along the batch dimension, and join the outputs.

Every tensor whose first dimension is the batch is cut; anything else (a scalar, a table, a string) goes whole to each
micro-batch. The batch size is that of the first tensor argument. Outputs must have the batch as first dimension: a
network that returns a mean over its batch cannot be run by micro-batches without changing its meaning, and is
refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from volseg.errors import ParallelError

__all__ = ["Call", "batch_size", "join", "split", "split_sizes"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the length of dimension 0 of the first tensor argument that has dimensions.

    Raises
    ------
    ParallelError
        If no argument is such a tensor, or it is empty.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    size = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if not size:
        given = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
        came = "an empty batch" if size == 0 else given
        raise ParallelError(
            f"the pipeline cuts batches along dimension 0 and needs a tensor argument (B, ...) with B >= 1, got {came}"
        )
    return size


def split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the sizes of the micro-batches; the last one may be smaller.

    Examples
    --------
    >>> split_sizes(7, 3)
    [3, 3, 1]
    """
    return [min(split_size, batch - start) for start in range(0, batch, split_size)]


def split(args: Sequence[Any], kwargs: Mapping[str, Any], split_size: int) -> list[Call]:
    """Cut every tensor of ``(B, ...)`` into pieces of ``split_size`` samples."""
    batch = batch_size(args, kwargs)
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    pieces = [_pieces(leaf, batch, split_size) for leaf in leaves]
    return [pytree.tree_unflatten(list(row), structure) for row in zip(*pieces, strict=True)]


def _pieces(leaf: Any, batch: int, split_size: int) -> Sequence[Any]:
    count = len(split_sizes(batch, split_size))
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch:
        # Plain tensors: subclasses such as MONAI's MetaTensor bring torch functions of their own.
        return leaf.as_subclass(torch.Tensor).split(split_size)
    return [leaf] * count


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
    if not isinstance(first, Tensor):
        if first is None or (isinstance(first, bool | int | float | str) and all(leaf == first for leaf in column)):
            return first
        raise ParallelError(
            f"output {number} of the network is {type(first).__name__}; the pipeline joins tensors (B, ...) in "
            f"tuples, lists and "
            f"dictionaries, and passes on values that are equal for all micro-batches"
        )
    for leaf, size in zip(column, sizes, strict=True):
        if not leaf.dim() or len(leaf) != size:
            raise ParallelError(
                f"output {number} of the network has shape {tuple(leaf.shape)} for a micro-batch of {size}; the "
                f"pipeline needs the "
                f"batch as dimension 0: return per-sample values and reduce them outside ModelParallel"
            )
    return first if len(column) == 1 else torch.cat(list(column))
