# ruff: noqa: N803  (upper case: constants for which Triton compiles, and the extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""Interpolate and decide in one Triton kernel: classes are read one after the other, and the most probable is kept.

`Sampling.read` and `original_grid.decide` define the result. The arithmetic is the same, axis by axis in the same
order, but a GPU may fuse a product and a sum, with one rounding. So labels may differ if two classes are equal within
float32. A voxel's label does not depend on the box of its decision.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.inference.sampling import Aligned, AxisTable, Box, Held, split_box

BLOCK = 256
"""Voxels per program, two per thread."""

MOST_VOXELS = 2**26
"""Voxels per kernel, which are staged on the way to main memory: 64 MiB of labels in uint8."""


SMALLEST = tl.constexpr(1e-37)
"""About the smallest normal number of float32: the logarithm of 0 is not finite."""


@triton.jit
def _along_d(x, below_d, above_d, weight_d, h, w, there, D_BETWEEN: tl.constexpr):
    value = tl.load(x + (below_d + h + w), mask=there, other=0.0).to(tl.float32)
    if D_BETWEEN:
        after = tl.load(x + (above_d + h + w), mask=there, other=0.0).to(tl.float32)
        value = value * (1 - weight_d) + after * weight_d
    return value


@triton.jit
def _along_h(
    x, below_d, above_d, weight_d, below_h, above_h, weight_h, w, there,
    D_BETWEEN: tl.constexpr, H_BETWEEN: tl.constexpr,
):  # fmt: skip
    value = _along_d(x, below_d, above_d, weight_d, below_h, w, there, D_BETWEEN)
    if H_BETWEEN:
        after = _along_d(x, below_d, above_d, weight_d, above_h, w, there, D_BETWEEN)
        value = value * (1 - weight_h) + after * weight_h
    return value


@kernel(do_not_specialize=["D", "H", "W"])  # sides of a box, which differ from slab to slab
def _decide_kernel(
    x, table_d, table_h, table_w, weights_d, weights_h, weights_w, values, labels, entropies,
    K, KS, D, H, W, scale,
    D_BETWEEN: tl.constexpr, H_BETWEEN: tl.constexpr, W_BETWEEN: tl.constexpr,
    VALUES: tl.constexpr, REGIONS: tl.constexpr, ENTROPY: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    # A table holds the offsets of each voxel's neighbours below, then those above.
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    there = v < D * H * W
    d, h, w = v // W // H, v // W % H, v % W
    below_d, above_d = tl.load(table_d + d, mask=there, other=0), tl.load(table_d + D + d, mask=there, other=0)
    below_h, above_h = tl.load(table_h + h, mask=there, other=0), tl.load(table_h + H + h, mask=there, other=0)
    below_w, above_w = tl.load(table_w + w, mask=there, other=0), tl.load(table_w + W + w, mask=there, other=0)
    weight_d = tl.load(weights_d + d, mask=there, other=0.0)
    weight_h = tl.load(weights_h + h, mask=there, other=0.0)
    weight_w = tl.load(weights_w + w, mask=there, other=0.0)

    best = tl.full((BV,), float("-inf"), tl.float32)
    chosen = tl.zeros((BV,), tl.int32)
    entropy = tl.zeros((BV,), tl.float32)
    for k in range(K):
        value = _along_h(
            x, below_d, above_d, weight_d, below_h, above_h, weight_h, below_w, there, D_BETWEEN, H_BETWEEN
        )
        if W_BETWEEN:
            after = _along_h(
                x, below_d, above_d, weight_d, below_h, above_h, weight_h, above_w, there, D_BETWEEN, H_BETWEEN
            )
            value = value * (1 - weight_w) + after * weight_w
        x += KS  # the offset of a class may exceed 32 bits
        if REGIONS:
            chosen = tl.where(value > 0.5, tl.load(values + k).to(tl.int32), chosen)
        else:
            # As torch's argmax: NaN is the largest, and the first of several wins.
            is_best = (value > best) | ((value != value) & (best == best))
            chosen = tl.where(is_best, k, chosen)
            best = tl.where(is_best, value, best)
        if ENTROPY:
            entropy -= value * tl.log(tl.maximum(value, SMALLEST))
            if REGIONS:
                entropy -= (1 - value) * tl.log(tl.maximum(1 - value, SMALLEST))
    if VALUES:
        chosen = tl.load(values + chosen, mask=there, other=0).to(tl.int32)
    tl.store(labels + v, chosen.to(labels.dtype.element_ty), mask=there)
    if ENTROPY:
        # A GPU's minimum of NaN and a number is the number, which here would mean certainty.
        entropy = tl.maximum(entropy * scale, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(entropies + v, tl.minimum(entropy, 1.0, propagate_nan=tl.PropagateNan.ALL), mask=there)


def decide(
    sampling: Aligned,
    held: Held,
    cells: Box,
    table: Tensor | None,
    dtype: torch.dtype,
    *,
    regions: bool = False,
    entropy: bool = False,
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor | None]]:
    """Yield boxes of the target whose cells are in a box, their labels, and their entropy if requested.

    Parameters
    ----------
    sampling, held, cells
        As for `Aligned.read`.
    table : Tensor, optional
        Label value of each of the K, as ``dtype``; needed for regions.
    dtype : torch.dtype
        Type of the label maps.
    regions, entropy : bool
        As for `original_grid.decide` and `original_grid.measure_entropy`.
    """
    device, classes = held.values.device, len(held.values)
    betweens = [axis.weight is not None for axis in sampling.tables]
    scale = 1 / (classes * math.log(2)) if regions else 1 / math.log(max(2, classes))
    for box in split_box(sampling.find(cells), MOST_VOXELS):
        shape = [len(part) for part in box]
        labels = torch.empty(shape, dtype=dtype, device=device)
        entropies = torch.empty(shape, device=device) if entropy else None
        places, weights = zip(*map(_locate, sampling.tables, box, [held] * 3), strict=True)
        _decide_kernel[triton.cdiv(labels.numel(), BLOCK),](
            held.values, *places, *weights, labels if table is None else table, labels,
            labels if entropies is None else entropies, classes, held.values.stride(0), *shape, scale,
            *betweens, VALUES=table is not None and not regions, REGIONS=regions, ENTROPY=entropy,
            BV=BLOCK, num_warps=4,
        )  # fmt: skip
        d, h, w = (slice(part.start, part.stop) for part in box)
        yield (d, h, w), labels, entropies


def _locate(axis: AxisTable, part: range, held: Held) -> tuple[Tensor, Tensor]:
    """Return the memory offsets of the neighbours below and above, (2, side), and the weights of those above."""
    device, stride = held.values.device, held.values.stride(axis.source + 1)
    here = slice(part.start, part.stop)
    neighbours = torch.stack([axis.below[here], axis.above[here]])
    places = held.locate(axis.source, neighbours) * stride
    farthest = sum(
        (side - 1) * step for side, step in zip(held.values.shape[1:], held.values.stride()[1:], strict=True)
    )
    places = places.int() if farthest < 2**31 else places
    weights = torch.zeros(len(part)) if axis.weight is None else axis.weight[here]
    # Staged by the driver: the host does not wait for the GPU.
    return places.to(device, non_blocking=True), weights.to(device, non_blocking=True)
