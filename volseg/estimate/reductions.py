"""How much memory torch takes for the partial sums of a reduction on a GPU, before one block adds them up.

A sum whose outputs are too few to fill the GPU is divided among blocks. Each keeps its part in a buffer, which is large
where what is summed over is not what lies next to each other in memory: as many values then as there are threads. The
arithmetic is torch's own [1]_, and gives the sizes that an H200's account of SwinUNETR's steps has, to the byte.

References
----------
.. [1] ``setReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh`` of torch 2.8 to 2.13
"""

from collections.abc import Collection
from math import prod

import torch

__all__ = ["count_partial_sums"]

MOST_THREADS, WARP, THREADS_OF_PROCESSOR = 512, 32, 2048
FEWEST_VALUES, MOST_VALUES = 16, 256
"""Of a thread, between which torch divides a sum."""
ACCUMULATED = 4
"""Bytes of a partial sum: of half precision and of float32, float32."""

Dim = tuple[int, int]
"""Size and stride."""


def count_partial_sums(values: torch.Tensor, dims: Collection[int], processors: int) -> int:
    """Return the bytes of the buffer; 0 where no sum is divided.

    Parameters
    ----------
    values : Tensor
        What is summed, of half precision or float32.
    dims : collection of int
        Over which; not negative.
    processors : int
        Of the GPU.
    """
    sizes = list(zip(values.shape, values.stride(), strict=True))
    summed = _join([dim for number, dim in enumerate(sizes) if number in dims])
    kept = _join([dim for number, dim in enumerate(sizes) if number not in dims])
    inputs, outputs = (prod(size for size, _ in group) for group in (summed, kept))
    if not summed or not inputs or not outputs:
        return 0
    by_reduced = not kept or summed[0][1] < kept[0][1]
    vector = 1
    if by_reduced:
        first, second = summed[0][0], outputs
        if summed[0][1] == 1 and not kept and len(summed) == 1 and first > 128:
            first //= 4
    else:
        first, second = kept[0][0], inputs
        if kept[0][1] == 1:
            vector = _find_vector([kept[0][0], *(stride for _, stride in [*summed, *kept[1:]])])
            first //= vector
    width, height = _find_block(first, second, MOST_THREADS // vector)
    step = width if by_reduced else 1
    per_thread = -(-inputs // step)
    divides_by_height = per_thread >= min(height * 16, MOST_VALUES)
    if divides_by_height:
        per_thread = -(-inputs // (step * height))
    rows = (1 if by_reduced else width) * (1 if divides_by_height else height)
    grid = -(-(outputs // vector) // rows)
    target = processors * (THREADS_OF_PROCESSOR // (width * height))
    if not divides_by_height or per_thread < MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-per_thread // FEWEST_VALUES)), -(-per_thread // MOST_VALUES))
    if blocks < 2:
        return 0
    return ACCUMULATED * outputs * blocks * (1 if by_reduced else width * vector)


def _join(dims: list[Dim]) -> list[Dim]:
    """Return dims, the nearest values first, those that follow each other in memory as one."""
    joined: list[Dim] = []
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, stride))
    return joined or [(1, 1)] * bool(dims)


def _find_vector(counts: list[int]) -> int:
    """Return how many outputs a thread has, up to four, all counts being multiples of it."""
    return next(vector for vector in (4, 2, 1) if all(count % vector == 0 for count in counts))


def _find_block(first: int, second: int, most: int) -> tuple[int, int]:
    """Return the threads of a block along what lies nearest and along the rest."""
    first, second = (min(most, 1 << (max(1, size).bit_length() - 1)) for size in (first, second))
    width = min(first, WARP)
    height = min(second, most // width)
    return min(first, most // height), height
