# ruff: noqa: N803  (upper case: constants for which Triton compiles, and extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""Define the Triton kernels of a prediction: add a window to the blend; interpolate and decide.

**Add a window**: the weighted probabilities are computed from logits and added to the blend without a copy.
`blending.add_window` defines the result; a GPU may fuse a product and a sum, with one rounding. There are two kernels.

- By classes: a thread reads the classes of its voxel, four at a time, twice for a softmax. Neighbouring threads read
neighbouring voxels. - By tiles, if the many classes of a voxel are adjacent (channels last): neighbouring threads would
otherwise read from lines of memory that are hundreds of bytes apart, too many for a cache. A tile of voxels and classes
is read along the classes, transposed in shared memory, and added along the voxels, which are adjacent in the blend.

**Interpolate and decide**: classes are read one after the other, and the most probable one is kept. `Sampling.read` and
`original_grid.decide` define the result. The arithmetic is the same, axis by axis in the same order, but a GPU may fuse
a product and a sum, with one rounding. So labels may differ if two classes are equal within float32. A voxel's label
does not depend on the box of its decision.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.inference.sampling import Aligned, AxisTable, Box, Held, split_box

BLOCK = 128
"""Voxels per program, one per thread: 40 registers each (Triton 3.7, for an H200). Four per thread need 160, so that
three programs fit on a multiprocessor instead of twelve. The logits that twelve programs read stay in the L2 cache for
the second read."""

TILE_VOXELS, TILE_CLASSES = 64, 32
"""A tile: a warp reads 32 classes of a voxel at once, and adds to 32 voxels of a class."""

FEW_CLASSES = 8
"""Up to this many classes, the logits of a voxel share a line of memory with other voxels, in any layout."""


@triton.jit
def _step(first, stride):
    """Return the addresses of the three classes after the first; stepwise, since a product could exceed 32 bits."""
    second = first + stride
    third = second + stride
    return second, third, third + stride


@triton.jit
def _link(value, most, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr):
    if SOFTMAX:
        value = tl.exp(value - most)
    if SIGMOID:
        value = 1 / (1 + tl.exp(-value))
    return value


# Positions differ between windows: specialization would recompile the kernel for each kind of number.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w"])
def _add_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, K, V, H, W,
    xk, xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    d, h, w = v // W // H, v // W % H, v % W
    # If the blend contains only part of the volume along an axis, part of the window may be outside it.
    to_d, to_h, to_w = first_d + d, first_h + h, first_w + w
    there = (v < V) & (to_d >= 0) & (to_h >= 0) & (to_w >= 0)
    if AXIS == 0:  # around the end of the ring
        to_d = tl.where(to_d >= side_d, to_d - side_d, to_d)
    if AXIS == 1:
        to_h = tl.where(to_h >= side_h, to_h - side_h, to_h)
    if AXIS == 2:
        to_w = tl.where(to_w >= side_w, to_w - side_w, to_w)
    there = there & (to_d < side_d) & (to_h < side_h) & (to_w < side_w)
    source = x + (start + d.to(tl.int64) * xd + h.to(tl.int64) * xh + w.to(tl.int64) * xw)
    to = out + (to_d.to(tl.int64) * od + to_h.to(tl.int64) * oh + to_w.to(tl.int64) * ow)

    most = tl.full((BV,), -3e38, tl.float32)  # finite: a class may be minus infinity
    total = tl.zeros((BV,), tl.float32)
    # Four classes at a time: the next loads are in flight while others complete. No store comes between them, since a
    # load may not pass a store. A missing class has no probability.
    if SOFTMAX:
        first = source
        for k in range(0, K, 4):
            second, third, fourth = _step(first, xk)
            a = tl.load(first, mask=there, other=0.0).to(tl.float32)
            b = tl.load(second, mask=there & (k + 1 < K), other=float("-inf")).to(tl.float32)
            c = tl.load(third, mask=there & (k + 2 < K), other=float("-inf")).to(tl.float32)
            e = tl.load(fourth, mask=there & (k + 3 < K), other=float("-inf")).to(tl.float32)
            more = tl.maximum(most, tl.maximum(tl.maximum(a, b), tl.maximum(c, e)))
            total = total * tl.exp(most - more) + tl.exp(a - more) + tl.exp(b - more)
            total += tl.exp(c - more) + tl.exp(e - more)
            most = more
            first = fourth + xk
    share = tl.load(importance + v, mask=there, other=0.0)
    if SOFTMAX:
        share = share / tl.where(there, total, 1.0)
    for k in range(0, K, 4):
        has_second, has_third, has_fourth = there & (k + 1 < K), there & (k + 2 < K), there & (k + 3 < K)
        second, third, fourth = _step(source, xk)
        to_second, to_third, to_fourth = _step(to, ok)
        a = tl.load(source, mask=there, other=0.0).to(tl.float32)
        b = tl.load(second, mask=has_second, other=0.0).to(tl.float32)
        c = tl.load(third, mask=has_third, other=0.0).to(tl.float32)
        e = tl.load(fourth, mask=has_fourth, other=0.0).to(tl.float32)
        old_a = tl.load(to, mask=there, other=0.0)
        old_b = tl.load(to_second, mask=has_second, other=0.0)
        old_c = tl.load(to_third, mask=has_third, other=0.0)
        old_e = tl.load(to_fourth, mask=has_fourth, other=0.0)
        tl.store(to, old_a + _link(a, most, SOFTMAX, SIGMOID) * share, mask=there)
        tl.store(to_second, old_b + _link(b, most, SOFTMAX, SIGMOID) * share, mask=has_second)
        tl.store(to_third, old_c + _link(c, most, SOFTMAX, SIGMOID) * share, mask=has_third)
        tl.store(to_fourth, old_e + _link(e, most, SOFTMAX, SIGMOID) * share, mask=has_fourth)
        source = fourth + xk
        to = to_fourth + ok


@triton.jit
def _read_tile(of_voxels, k, K, there, other):
    return tl.load(of_voxels[:, None] + k, mask=there[:, None] & (k < K), other=other).to(tl.float32)


# Each program processes a part of one line along W, so that the compiler sees adjacent voxels.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w", "before"])
def _add_tiles_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, before, K, H, W,
    xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # A part is before the end of the ring or beyond it, but never across it.
    parts_before = tl.cdiv(before, BV)
    parts = parts_before + tl.cdiv(W - before, BV)
    line, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    d, h = line // H, line % H
    is_beyond = part >= parts_before
    w = tl.where(is_beyond, before + (part - parts_before) * BV, part * BV) + tl.arange(0, BV)
    to_d, to_h, to_w = first_d + d, first_h + h, first_w + w
    if AXIS == 0:
        to_d = to_d % side_d
    if AXIS == 1:
        to_h = to_h % side_h
    if AXIS == 2:
        to_w -= tl.where(is_beyond, side_w, 0)
    stop = tl.where(is_beyond, W, before)
    stop = tl.where(to_d >= 0, tl.where(to_d < side_d, stop, 0), 0)
    stop = tl.where(to_h >= 0, tl.where(to_h < side_h, stop, 0), 0)
    there = (w < stop) & (to_w >= 0) & (to_w < side_w)
    of_voxels = x + (start + d.to(tl.int64) * xd + h.to(tl.int64) * xh) + w.to(tl.int64) * xw
    to_voxels = out + (to_d.to(tl.int64) * od + to_h.to(tl.int64) * oh) + to_w.to(tl.int64) * ow
    share = tl.load(importance + (line.to(tl.int64) * W + w), mask=there, other=0.0)

    first = tl.arange(0, BK)[None, :]
    most = tl.full((BV,), 0.0, tl.float32)
    if SOFTMAX:
        # Reduce each column of the tile first: a reduction across neighbouring threads needs five exchanges.
        mosts = tl.full((BV, BK), -3e38, tl.float32)  # finite: a class may be minus infinity
        for k in range(0, K, BK):
            mosts = tl.maximum(mosts, _read_tile(of_voxels, k + first, K, there, float("-inf")))
        most = tl.where(there, tl.max(mosts, 1), 0.0)
        totals = tl.zeros((BV, BK), tl.float32)
        for k in range(0, K, BK):
            totals += tl.exp(_read_tile(of_voxels, k + first, K, there, float("-inf")) - most[:, None])
        share = share / tl.where(there, tl.sum(totals, 1), 1.0)
    for k in range(0, K, BK):
        classes = k + first
        value = _read_tile(of_voxels, classes, K, there, 0.0)
        value = _link(value, most[:, None], SOFTMAX, SIGMOID) * share[:, None]
        mask = there[:, None] & (classes < K)
        to = to_voxels[:, None] + classes.to(tl.int64) * ok
        tl.store(to, tl.load(to, mask=mask, other=0.0) + value, mask=mask)


def add_window(
    blend: Tensor, window: Tensor, importance: Tensor, first: Sequence[int], axis: int, link: str, flips: Sequence[int]
) -> None:
    """Add a window ``(K, d, h, w)`` to the blend; see `blending.add_window`."""
    classes, depth, height, width = window.shape
    places = [
        at % side if dim == axis else at for dim, (at, side) in enumerate(zip(first, blend.shape[1:], strict=True))
    ]
    strides, start = list(window.stride()), 0
    for dim in flips:  # read from the other end
        start += (window.shape[dim] - 1) * strides[dim]
        strides[dim] *= -1
    where = [start, *places, *blend.shape[1:]]
    links = {"AXIS": axis, "SOFTMAX": link == "softmax", "SIGMOID": link == "sigmoid"}
    if strides[0] == 1 and classes > FEW_CLASSES:
        before = min(width, blend.shape[-1] - places[-1]) if axis == 2 else width
        parts = triton.cdiv(before, TILE_VOXELS) + triton.cdiv(width - before, TILE_VOXELS)
        _add_tiles_kernel[depth * height * parts,](
            window, importance, blend, *where, before, classes, height, width, *strides[1:], *blend.stride(),
            BV=TILE_VOXELS, BK=TILE_CLASSES, num_warps=8, **links,
        )  # fmt: skip
        return
    _add_kernel[triton.cdiv(importance.numel(), BLOCK),](
        window, importance, blend, *where, classes, importance.numel(), height, width,
        *strides, *blend.stride(), BV=BLOCK, num_warps=4, **links,
    )  # fmt: skip


DECIDED_BLOCK = 256
"""Voxels per program, two per thread."""

MOST_VOXELS = 2**26
"""Voxels per kernel, to be staged on the way to main memory: 64 MiB of labels in uint8."""


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
    # A table contains the offsets of each voxel's lower neighbours, then those of the upper ones.
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
            # As in torch's argmax, NaN is the largest, and the first of equal values is chosen.
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
        # By default, the minimum of NaN and a number is the number, which here would mean certainty.
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
    """Yield boxes of the target with cells in a box, their labels, and their entropy if requested.

    Parameters
    ----------
    sampling, held, cells
        As for `Aligned.read`.
    table : Tensor, optional
        Label value of each of the K outputs, as ``dtype``; needed for regions.
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
        _decide_kernel[triton.cdiv(labels.numel(), DECIDED_BLOCK),](
            held.values, *places, *weights, labels if table is None else table, labels,
            labels if entropies is None else entropies, classes, held.values.stride(0), *shape, scale,
            *betweens, VALUES=table is not None and not regions, REGIONS=regions, ENTROPY=entropy,
            BV=DECIDED_BLOCK, num_warps=4,
        )  # fmt: skip
        d, h, w = (slice(part.start, part.stop) for part in box)
        yield (d, h, w), labels, entropies


def _locate(axis: AxisTable, part: range, held: Held) -> tuple[Tensor, Tensor]:
    """Return the memory offsets of the lower and upper neighbours, (2, side), and the weights of the upper ones."""
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
