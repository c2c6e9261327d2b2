# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""The norms' passes over the voxels in Triton: scale, shift and activation, and their gradient."""

import torch
from torch import Tensor

from volseg.device import triton_tiles
from volseg.device.norm.activation import Term
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import (
    choose_tile,
    count_voxels,
    describe_tile,
    elements,
    halve,
    is_narrow,
    make_even,
    read_strides,
    split_voxels,
)

KINDS = {"none": 0, "leaky": 1, "elu": 2, "prelu": 3, "sigmoid": 4, "silu": 5, "gelu": 6}


@triton.jit
def keep_negative(value):
    """Return values below 0, and NaN: a GPU's own minimum of NaN and 0 is 0, which would hide the NaN."""
    return tl.minimum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(value, alpha, KIND: tl.constexpr):
    """Return ``Activation.apply``."""
    if KIND == 1 or KIND == 3:
        value = tl.where(value > 0, value, value * alpha)
    if KIND == 2:
        value = tl.where(value > 0, value, alpha * (tl.exp(keep_negative(value)) - 1.0))
    if KIND == 4:
        value = tl.sigmoid(value)
    if KIND == 5:
        value = value * tl.sigmoid(value)
    if KIND == 6:
        value = value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def differentiate_activation(value, alpha, KIND: tl.constexpr):
    """Return ``Activation.derivative``."""
    if KIND == 1 or KIND == 3:
        result = tl.where(value > 0, 1.0, alpha)
    elif KIND == 2:
        result = tl.where(value > 0, 1.0, alpha * tl.exp(keep_negative(value)))
    elif KIND == 4:
        part = tl.sigmoid(value)
        result = part * (1.0 - part)
    elif KIND == 5:
        part = tl.sigmoid(value)
        result = part * (1.0 + value * (1.0 - part))
    else:
        density = tl.exp(-0.5 * value * value) * 0.3989422804014327
        result = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * density
    return result


@triton.jit
def load_alpha(alpha, slopes, step, c, inside, KIND: tl.constexpr):
    """Return the activation's parameter for each channel."""
    if KIND == 3:
        alpha = tl.load(slopes + c * step, mask=inside, other=0.0).to(tl.float32)[None, :]
    return alpha


@kernel()
def _affine_kernel(
    x, scale, shift, slopes, out, C, V, alpha, step, sb, sc, sv, ob, oc, ov, front, skipped,
    KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    mask = (v[:, None] < V) & (c[None, :] < C)
    if ENDS:  # the first voxels and the last ones, V in total
        v = tl.where(v < front, v, v + skipped)
    value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
    a = tl.load(scale + b * C + c, mask=c < C, other=0.0)
    s = tl.load(shift + b * C + c, mask=c < C, other=0.0)
    alpha = load_alpha(alpha, slopes, step, c, c < C, KIND)
    value = activate(value * a[None, :] + s[None, :], alpha, KIND)
    tl.store(out + elements(ob, oc, ov, b, c, v), value.to(out.dtype.element_ty), mask=mask)


@kernel()
def _sums_kernel(
    g, x, mean, scale, shift, slopes, out, C, V, per_program, alpha, step, gb, gc, gv, sb, sc, sv,
    KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    inside = c < C
    a = tl.load(scale + b * C + c, mask=inside, other=0.0)
    s = tl.load(shift + b * C + c, mask=inside, other=0.0)
    m = tl.load(mean + b * C + c, mask=inside, other=0.0)
    alpha = load_alpha(alpha, slopes, step, c, inside, KIND)
    start = part * per_program
    stop = tl.minimum(start + per_program, V)
    # For each place of the tile: see ``statistics``.
    first_sum = tl.zeros((BV, BC), tl.float32)
    second_sum = tl.zeros((BV, BC), tl.float32)
    third_sum = tl.zeros((BV, BC), tl.float32)
    for first in tl.range(start, stop, BV, num_stages=STAGES):
        v = first + tl.arange(0, BV)
        mask = (v[:, None] < stop) & inside[None, :]
        value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(g + elements(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        if KIND != 0:
            before = value * a[None, :] + s[None, :]
            if KIND == 3:
                third_sum += grad * keep_negative(before)
            grad *= differentiate_activation(before, alpha, KIND)
        first_sum += grad
        second_sum += grad * (value - m[None, :])
    pairs = tl.num_programs(2) * C
    rows: tl.constexpr = 3 if KIND == 3 else 2
    place = part * rows * pairs + b * C + c
    tl.store(out + place, tl.sum(first_sum, 0), mask=inside)
    tl.store(out + place + pairs, tl.sum(second_sum, 0), mask=inside)
    if KIND == 3:
        tl.store(out + place + 2 * pairs, tl.sum(third_sum, 0), mask=inside)


@kernel()
def _input_kernel(
    g, x, scale, shift, factor, offset, slopes, out, C, V, alpha, step, gb, gc, gv, sb, sc, sv, ob, oc, ov,
    KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    inside = c < C
    mask = (v[:, None] < V) & inside[None, :]
    a = tl.load(scale + b * C + c, mask=inside, other=0.0)
    k = tl.load(factor + b * C + c, mask=inside, other=0.0)
    o = tl.load(offset + b * C + c, mask=inside, other=0.0)
    value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(g + elements(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
    if KIND != 0:
        s = tl.load(shift + b * C + c, mask=inside, other=0.0)
        alpha = load_alpha(alpha, slopes, step, c, inside, KIND)
        grad *= differentiate_activation(value * a[None, :] + s[None, :], alpha, KIND)
    result = grad * a[None, :] + value * k[None, :] + o[None, :]
    tl.store(out + elements(ob, oc, ov, b, c, v), result.to(out.dtype.element_ty), mask=mask)


def affine(term: Term, out: Tensor | None = None, ends: tuple[int, int] | None = None) -> Tensor:
    """Compute ``reference.affine``.

    Parameters
    ----------
    term, out, ends
        See ``reference.affine``.
    """
    slab = make_even(term.slab, term.slab)
    out = torch.empty_like(slab) if out is None else out
    tile = choose_tile(slab, out)
    voxels, front, skipped = count_voxels(slab), 0, 0
    if ends is not None:
        plane = slab.shape[3:].numel()
        front, skipped = ends[0] * plane, voxels - sum(ends) * plane
        voxels -= skipped
    grid = (triton.cdiv(voxels, tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    _affine_kernel[grid](
        slab, *(pairs.contiguous() for pairs in term.affine), term.slope, out, slab.shape[1], voxels,
        term.activation.parameter, compute_channel_stride(term.slope), *read_strides(slab), *read_strides(out),
        front, skipped, **describe_tile(tile, KIND=KINDS[term.activation.kind], ENDS=ends is not None),
    )  # fmt: skip
    return out


def compute_channel_stride(slope: Tensor | None) -> int:
    """Return the step in memory from one channel's slope to the next."""
    return 0 if slope is None or slope.numel() == 1 else slope.stride(0)


def gradient_sums(gradient: Tensor, term: Term) -> Tensor:
    """Compute ``reference.gradient_sums`` of each part of the slab, ``(parts, 2 or 3, B, C)``.

    Parameters
    ----------
    gradient, term
        See ``reference.gradient_sums``.
    """
    assert term.mean is not None
    slab, kind = make_even(term.slab, term.slab), term.activation.kind
    gradient = make_even(gradient, slab)
    batch, channels = slab.shape[:2]
    tile = choose_tile(slab, gradient)
    keeps_much = kind in ("elu", "prelu", "gelu") or slab.element_size() > 2
    tile = halve(tile) if keeps_much or is_narrow(slab, tile) else tile
    parts, per_program = split_voxels(slab, tile)
    rows = 3 if kind == "prelu" else 2
    out = slab.new_empty((parts, rows, batch, channels), dtype=torch.float32)
    _sums_kernel[(parts, triton.cdiv(channels, tile[1]), batch)](
        gradient, slab, *(pairs.contiguous() for pairs in (term.mean, *term.affine)), term.slope, out, channels,
        count_voxels(slab), per_program, term.activation.parameter, compute_channel_stride(term.slope),
        *read_strides(gradient), *read_strides(slab),
        **describe_tile(tile, KIND=KINDS[kind], STAGES=triton_tiles.STAGES),
    )  # fmt: skip
    return out


def gradient_input(gradient: Tensor, term: Term, factor: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``reference.gradient_input``.

    Parameters
    ----------
    gradient, term, factor, offset, out
        See ``reference.gradient_input``.
    """
    slab = make_even(term.slab, term.slab)
    gradient = make_even(gradient, slab)
    out = torch.empty_like(slab) if out is None else out
    tile = choose_tile(slab, gradient, out)
    grid = (triton.cdiv(count_voxels(slab), tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    _input_kernel[grid](
        gradient, slab, *(t.contiguous() for t in (*term.affine, factor, offset)), term.slope, out, slab.shape[1],
        count_voxels(slab), term.activation.parameter, compute_channel_stride(term.slope),
        *read_strides(gradient), *read_strides(slab), *read_strides(out),
        **describe_tile(tile, KIND=KINDS[term.activation.kind]),
    )  # fmt: skip
    return out
