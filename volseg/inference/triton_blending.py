# ruff: noqa: N803  (upper case: what Triton is compiled for, and the extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""A window's logits to probabilities, weighted and added to the blend, in one Triton kernel: no copy of the window.

`blending.add_window` defines the result; a GPU may round a product and a sum at once. A tile holds ``BV`` voxels with
all their classes. Logits are addressed by strides, contiguous or channels last alike.
"""

from collections.abc import Sequence

from torch import Tensor

from volseg.device.triton_tiles import select_device, tl, triton

__all__ = ["add_window"]

TILE = 4096
"""Elements per tile; a thread takes 32 of them."""


if triton is not None:

    @triton.jit
    def _add_kernel(
        x, importance, out, K, V, H, W, first_d, first_h, first_w, side_d, side_h, side_w,
        xk, xd, xh, xw, ok, od, oh, ow,
        AXIS: tl.constexpr, SOFTMAX: tl.constexpr, SIGMOID: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        v, k = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BK)
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
        mask = there[:, None] & (k[None, :] < K)
        place = d.to(tl.int64) * xd + h.to(tl.int64) * xh + w.to(tl.int64) * xw
        value = tl.load(x + place[:, None] + k[None, :].to(tl.int64) * xk, mask=mask, other=0.0).to(tl.float32)
        if SOFTMAX:
            value = tl.where(k[None, :] < K, value, float("-inf"))
            value = tl.exp(value - tl.max(value, 1)[:, None])
            value = value / tl.sum(value, 1)[:, None]
        if SIGMOID:
            value = 1 / (1 + tl.exp(-value))
        value = value * tl.load(importance + v, mask=there, other=0.0)[:, None]
        place = to_d.to(tl.int64) * od + to_h.to(tl.int64) * oh + to_w.to(tl.int64) * ow
        to = out + place[:, None] + k[None, :].to(tl.int64) * ok
        tl.store(to, tl.load(to, mask=mask, other=0.0) + value, mask=mask)


def add_window(blend: Tensor, window: Tensor, importance: Tensor, first: Sequence[int], axis: int, link: str) -> None:
    """Add a window ``(K, d, h, w)`` to the blend; see `blending.add_window`."""
    classes, _, height, width = window.shape
    block = triton.next_power_of_2(classes)
    voxels = max(1, TILE // block)
    places = [
        at % side if dim == axis else at for dim, (at, side) in enumerate(zip(first, blend.shape[1:], strict=True))
    ]
    with select_device(blend):
        _add_kernel[triton.cdiv(importance.numel(), voxels),](
            window, importance, blend, classes, importance.numel(), height, width, *places, *blend.shape[1:],
            *window.stride(), *blend.stride(),
            AXIS=axis, SOFTMAX=link == "softmax", SIGMOID=link == "sigmoid", BV=voxels, BK=block, num_warps=4,
        )  # fmt: skip
