# ruff: noqa: N803  (upper case: constants for which Triton compiles, and the extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""Add a window's weighted probabilities to the blend from its logits, in one Triton kernel, without a copy.

`blending.add_window` defines the result; a GPU may fuse a product and a sum, with one rounding. There are two kernels.

- By classes: a thread takes a few voxels and reads their classes, four at a time, twice for a softmax. Neighbouring
  threads read neighbouring voxels.
- By tiles, if the many classes of a voxel are adjacent (channels last): there, neighbouring threads would read from
  lines of memory that are hundreds of bytes apart, more lines than a cache holds. A tile of voxels and classes is read
  along the classes, transposed in shared memory, and added along the voxels, which are adjacent in the blend.
"""

from collections.abc import Sequence

from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton

BLOCK = 128
"""Voxels per program, one per thread: 40 registers each (Triton 3.7, for an H200). Four per thread take 160, and leave
room for three programs per multiprocessor instead of twelve. The logits that twelve programs read stay in the L2 cache
for the second read."""

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


# Positions differ from window to window: specialization would recompile the kernel for each kind of number.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w"])
def _add_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, K, V, H, W,
    xk, xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    d, h, w = v // W // H, v // W % H, v % W
    # If the blend holds a part of the volume along an axis, part of the window is outside it.
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


# Each program takes a part of one line along W, so that the compiler sees adjacent voxels.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w", "before"])
def _add_tiles_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, before, K, H, W,
    xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # A part is before the end of the ring or beyond it, never around it.
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
        # Reduce per column of the tile first: a reduction across neighbouring threads takes five exchanges.
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
    blend: Tensor,
    window: Tensor,
    importance: Tensor,
    first: Sequence[int],
    axis: int,
    link: str,
    flips: Sequence[int],
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
