# ruff: noqa: N803  (upper case: what Triton is compiled for, and the extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""A window's logits to probabilities, weighted and added to the blend, in one Triton kernel: no copy of the window.

`blending.add_window` defines the result; a GPU may round a product and a sum at once. A thread takes a few voxels and
reads their classes one after the other, twice for a softmax: neighbouring threads read neighbouring voxels, and where
classes lie side by side (channels last), the next one lies in the cache. A tile of voxels and classes would leave it to
the compiler which of the two neighbouring threads share.
"""

from collections.abc import Sequence

from torch import Tensor

from volseg.device.triton_tiles import select_device, tl, triton

__all__ = ["add_window"]

BLOCK = 512
"""Voxels per program, four per thread."""


if triton is not None:
    # Where a window lies differs from window to window: a kernel for each kind of number would be compiled anew.
    @triton.jit(do_not_specialize=["start", "first_d", "first_h", "first_w", "side_d", "side_h", "side_w"])
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
    classes, _, height, width = window.shape
    places = [
        at % side if dim == axis else at for dim, (at, side) in enumerate(zip(first, blend.shape[1:], strict=True))
    ]
    strides, start = list(window.stride()), 0
    for dim in flips:  # read from the other end
        start += (window.shape[dim] - 1) * strides[dim]
        strides[dim] *= -1
    with select_device(blend):
        _add_kernel[triton.cdiv(importance.numel(), BLOCK),](
            window, importance, blend, start, *places, *blend.shape[1:], classes, importance.numel(), height, width,
            *strides, *blend.stride(), AXIS=axis, SOFTMAX=link == "softmax", SIGMOID=link == "sigmoid", BV=BLOCK,
            num_warps=4,
        )  # fmt: skip
