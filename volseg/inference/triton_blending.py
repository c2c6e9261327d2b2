# ruff: noqa: N803  (upper case: what Triton is compiled for, and the extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""A window's logits to probabilities, weighted and added to the blend, by one Triton kernel: no copy of the window.

`blending.add_window` defines the result; a GPU may round a product and a sum at once. There are two kernels.

- By classes: a thread takes a few voxels and reads their classes one after the other, twice for a softmax.
  Neighbouring threads read neighbouring voxels.
- By tiles, where the many classes of a voxel lie side by side (channels last): there, neighbouring threads would read
  from lines of memory that are hundreds of bytes apart, of which no cache holds as many as are under way. A tile of
  voxels and classes is read along the classes, turned in shared memory, and added along the voxels, which lie side by
  side in the blend.
"""

from collections.abc import Sequence

from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import select_device

__all__ = ["add_window"]

BLOCK = 512
"""Voxels per program, four per thread."""

TILE_VOXELS, TILE_CLASSES = 64, 32
"""A tile: a warp reads 32 classes of a voxel at once, and adds to 32 voxels of a class."""

FEW_CLASSES = 8
"""Up to so many classes the logits of a voxel share a line of memory with those of others, in any layout."""


# Where a window lies differs from window to window: a kernel for each kind of number would be compiled anew.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w"])
def _add_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, K, V, H, W,
    xk, xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    d, h, w = v // W // H, v // W % H, v % W
    # Where the blend holds a part of the volume along an axis, some of the window lies beside it.
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
    if SOFTMAX:
        of_class = source
        for _ in range(K):
            value = tl.load(of_class, mask=there, other=0.0).to(tl.float32)
            more = tl.maximum(most, value)
            total = total * tl.exp(most - more) + tl.exp(value - more)
            most = more
            of_class += xk
    share = tl.load(importance + v, mask=there, other=0.0)
    for _ in range(K):
        value = tl.load(source, mask=there, other=0.0).to(tl.float32)
        if SOFTMAX:
            value = tl.exp(value - most) / total
        if SIGMOID:
            value = 1 / (1 + tl.exp(-value))
        tl.store(to, tl.load(to, mask=there, other=0.0) + value * share, mask=there)
        source += xk
        to += ok


@triton.jit
def _read_tile(of_voxels, k, K, there, other):
    return tl.load(of_voxels[:, None] + k, mask=there[:, None] & (k < K), other=other).to(tl.float32)


# Per program a part of one line along W, of which the compiler sees that its voxels lie side by side.
@kernel(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w", "before"])
def _add_tiles_kernel(
    x, importance, out, start, first_d, first_h, first_w, side_d, side_h, side_w, before, K, H, W,
    xd, xh, xw, ok, od, oh, ow,
    AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # A part lies before the end of the ring or beyond it, never around it.
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
        # Of each column of the tile first: to compare or add neighbouring threads' numbers takes five exchanges.
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
        if SOFTMAX:
            value = tl.exp(value - most[:, None])
        if SIGMOID:
            value = 1 / (1 + tl.exp(-value))
        value *= share[:, None]
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
    with select_device(blend):
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
