# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Upsample D, H and W by 2, linearly or by repetition: ``F.interpolate(scale_factor=2)`` on one slab.

torch's kernels need contiguous volumes, and autocast runs them in float32. These read and write either layout and the
volume's own type: like a norm they compute in float32 and round once. There are no atomics: each voxel of a gradient
gathers its contributions.

Means of 2 x 2 x 2 voxels are the same two kernels with forward and backward exchanged.

A slab may be a part of the volume along D: an output plane reads its neighbouring planes, and the edge is that of the
whole volume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from volseg.device.layout import layout_of
from volseg.device.triton_kernels import TritonKernel, kernel, tl, triton
from volseg.device.triton_tiles import MOST_VOXELS, choose_tile, describe_tile, takes
from volseg.errors import ParallelError

__all__ = ["DoubledPart", "double", "gather_gradient", "halve", "spread_gradient", "takes"]


@dataclass(frozen=True, slots=True)
class DoubledPart:
    """Planes of a volume in a slab, and planes of the result that are computed from these."""

    planes: int
    """Planes of the whole volume."""
    first: int
    """Index in the volume of the slab's first plane."""
    outputs: tuple[int, int]
    """First output plane, and the one after the last."""


@triton.jit
def _read_source(o, size, LINEAR: tl.constexpr):
    """Return the two planes around the output planes ``o``, and the weight of the second."""
    if LINEAR:
        low = (o + 1) // 2 - 1
        high = tl.minimum(low + 1, size - 1)
        low = tl.maximum(low, 0)
        weight = tl.where(o % 2 == 0, 0.75, 0.25)
    else:
        low = o // 2
        high = low
        weight = 0.0 * o
    return low, high, weight


@triton.jit
def _weigh_output(i, k, size, LINEAR: tl.constexpr):
    """Return the ``k``-th output plane that reads the planes ``i``, and its weight."""
    if LINEAR:
        o = 2 * i - 1 + k
        weight = tl.where((k == 1) | (k == 2), 0.75, 0.25)
        # At the volume's edges both planes are the same.
        weight += tl.where((o == 0) | (o == 2 * size - 1), 0.25, 0.0)
    else:
        o = 2 * i + k
        weight = 1.0 + 0.0 * i
    return o, weight


@kernel()
def _double_kernel(
    x, out, C, V, D, H, W, first, start, factor, xb, xc, xd, xh, xw, ob, oc, od, oh, ow,
    LINEAR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    mask = (v[:, None] < V) & (c[None, :] < C)
    w = v % (2 * W)
    h = v // (2 * W) % (2 * H)
    d = v // (2 * W) // (2 * H)
    dlow, dhigh, dpart = _read_source(d + start, D, LINEAR)
    hlow, hhigh, hpart = _read_source(h, H, LINEAR)
    wlow, whigh, wpart = _read_source(w, W, LINEAR)
    total = tl.zeros((BV, BC), tl.float32)
    corners: tl.constexpr = 2 if LINEAR else 1
    channels = c[None, :].to(tl.int64) * xc + b * xb
    for i in tl.static_range(corners):
        dn = (dlow if i == 0 else dhigh) - first
        dw = (1.0 - dpart) if i == 0 else dpart
        for j in tl.static_range(corners):
            hn = hlow if j == 0 else hhigh
            hw = dw * ((1.0 - hpart) if j == 0 else hpart)
            for k in tl.static_range(corners):
                wn = wlow if k == 0 else whigh
                weight = hw * ((1.0 - wpart) if k == 0 else wpart)
                place = dn.to(tl.int64) * xd + hn.to(tl.int64) * xh + wn.to(tl.int64) * xw
                value = tl.load(x + place[:, None] + channels, mask=mask, other=0.0).to(tl.float32)
                total += weight[:, None] * value
    place = d.to(tl.int64) * od + h.to(tl.int64) * oh + w.to(tl.int64) * ow
    place = place[:, None] + c[None, :].to(tl.int64) * oc + b * ob
    tl.store(out + place, (total * factor).to(out.dtype.element_ty), mask=mask)


@kernel()
def _gather_kernel(
    g, out, C, V, D, H, W, first, start, stop, factor, gb, gc, gd, gh, gw, ob, oc, od, oh, ow,
    LINEAR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    mask = (v[:, None] < V) & (c[None, :] < C)
    w = v % W
    h = v // W % H
    d = v // W // H
    total = tl.zeros((BV, BC), tl.float32)
    reach: tl.constexpr = 4 if LINEAR else 2
    channels = c[None, :].to(tl.int64) * gc + b * gb
    for i in range(reach):
        do, dw = _weigh_output(d + first, i, D, LINEAR)
        from_d = (do >= start) & (do < stop)
        for j in range(reach):
            ho, hw = _weigh_output(h, j, H, LINEAR)
            from_h = from_d & (ho >= 0) & (ho < 2 * H)
            for k in tl.static_range(reach):
                wo, ww = _weigh_output(w, k, W, LINEAR)
                there = mask & (from_h & (wo >= 0) & (wo < 2 * W))[:, None]
                place = (do - start).to(tl.int64) * gd + ho.to(tl.int64) * gh + wo.to(tl.int64) * gw
                value = tl.load(g + place[:, None] + channels, mask=there, other=0.0).to(tl.float32)
                total += (dw * hw * ww)[:, None] * value
    place = d.to(tl.int64) * od + h.to(tl.int64) * oh + w.to(tl.int64) * ow
    place = place[:, None] + c[None, :].to(tl.int64) * oc + b * ob
    tl.store(out + place, (total * factor).to(out.dtype.element_ty), mask=mask)


def double(slab: Tensor, part: DoubledPart, linear: bool, factor: float = 1.0) -> Tensor:
    """Return the planes ``part.outputs`` of the volume that has twice the size.

    Parameters
    ----------
    slab
        ``(B, C, D, H, W)``, on a GPU; a part of the volume along D with the planes that its outputs read.
    part
        Planes of the slab and of the result.
    linear
        Whether to interpolate linearly, without aligned corners; otherwise voxels are repeated.
    factor
        Factor of the result.

    Raises
    ------
    ParallelError
        If a channel of the result has more voxels than kernels can count.
    """
    start, stop = part.outputs
    sides = stop - start, *(2 * size for size in slab.shape[3:])
    if prod(sides) > MOST_VOXELS:
        raise ParallelError(
            f"the upsampling kernel supports at most {MOST_VOXELS} voxels per channel, but the result of "
            f"{tuple(slab.shape)} has {prod(sides)}; cut it over more devices, or use torch's kernels "
            "(training.kernels: torch)"
        )
    return _run(_double_kernel, slab, sides, (part.planes, *slab.shape[3:], part.first, start, factor), linear)


def gather_gradient(
    gradient: Tensor, shape: Sequence[int], part: DoubledPart, linear: bool, factor: float = 1.0
) -> Tensor:
    """Return the gradient of ``double`` to its slab.

    Parameters
    ----------
    gradient
        Gradient of the result.
    shape
        Shape of the slab.
    part, linear, factor
        See ``double``.
    """
    numbers = part.planes, *shape[3:], part.first, *part.outputs, factor
    return _run(_gather_kernel, gradient, shape[2:], numbers, linear)


def _run(kernel: TritonKernel, given: Tensor, sides: Sequence[int], numbers: Sequence[float], linear: bool) -> Tensor:
    """Return what a kernel computes from a volume, on a grid of these sides."""
    batch, channels = given.shape[:2]
    layout = layout_of(given)
    out = torch.empty((batch, channels, *sides), dtype=given.dtype, device=given.device, memory_format=layout)
    height, width = choose_tile(out)
    tile = max(1, height // 4), width  # smaller than elsewhere, since each voxel is read from many places
    kernel[(triton.cdiv(prod(sides), tile[0]), triton.cdiv(channels, tile[1]), batch)](
        given, out, channels, prod(sides), *numbers, *given.stride(), *out.stride(),
        **describe_tile(tile, LINEAR=linear),
    )  # fmt: skip
    return out


def halve(slab: Tensor) -> Tensor:
    """Return the means of 2 x 2 x 2 voxels: ``F.avg_pool3d(slab, 2)`` of even sizes."""
    shape, part = _describe_halves(slab.shape)
    return gather_gradient(slab, shape, part, False, 1 / 8)


def spread_gradient(gradient: Tensor) -> Tensor:
    """Return the gradient of ``halve`` to its slab."""
    planes = gradient.shape[2]
    return double(gradient, DoubledPart(planes, 0, (0, 2 * planes)), False, 1 / 8)


def _describe_halves(shape: Sequence[int]) -> tuple[list[int], DoubledPart]:
    planes = shape[2] // 2
    return [*shape[:2], *(size // 2 for size in shape[2:])], DoubledPart(planes, 0, (0, 2 * planes))
