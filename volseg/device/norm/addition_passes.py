# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""The passes over the voxels of a norm plus a second term in Triton: see ``choice``.

These kernels are separate from those of a single norm (``passes``), and share the arithmetic of a voxel with them. In
one kernel, a single norm would have the second term's arguments too, and its sums would load scale and shift in a loop.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device import triton_tiles
from volseg.device.norm.activation import Activation, Term
from volseg.device.norm.passes import (
    KINDS,
    activate,
    compute_channel_stride,
    differentiate_activation,
    keep_negative,
    load_alpha,
)
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import (
    choose_tile,
    count_voxels,
    describe_tile,
    elements,
    halve,
    make_even,
    read_strides,
    split_voxels,
)


@triton.jit
def _read(x, scale, shift, slopes, alpha, step, b, c, inside, place, mask, C, NORM: tl.constexpr, KIND: tl.constexpr):
    """Return a term's slab, its value before its activation, its scale, and the activation's parameter."""
    raw = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    before = raw
    factor = tl.full(c.shape, 1.0, tl.float32)
    if NORM:
        factor = tl.load(scale + b * C + c, mask=inside, other=0.0)
        before = raw * factor[None, :] + tl.load(shift + b * C + c, mask=inside, other=0.0)[None, :]
    return raw, before, factor, load_alpha(alpha, slopes, step, c, inside, KIND)


@kernel()
def _add_kernel(
    x, xscale, xshift, xslopes, y, yscale, yshift, yslopes, out, C, V, xalpha, xstep, yalpha, ystep, alpha,
    xb, xc, xv, yb, yc, yv, ob, oc, ov,
    XKIND: tl.constexpr, YNORM: tl.constexpr, YKIND: tl.constexpr, KIND: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    inside = c < C
    mask = (v[:, None] < V) & inside[None, :]
    place = elements(xb, xc, xv, b, c, v)
    _, first, _, xalpha = _read(x, xscale, xshift, xslopes, xalpha, xstep, b, c, inside, place, mask, C, True, XKIND)
    place = elements(yb, yc, yv, b, c, v)
    _, second, _, yalpha = _read(y, yscale, yshift, yslopes, yalpha, ystep, b, c, inside, place, mask, C, YNORM, YKIND)
    value = activate(activate(first, xalpha, XKIND) + activate(second, yalpha, YKIND), alpha, KIND)
    tl.store(out + elements(ob, oc, ov, b, c, v), value.to(out.dtype.element_ty), mask=mask)


@kernel()
def _sums_kernel(
    g, x, xmean, xscale, xshift, xslopes, y, ymean, yscale, yshift, yslopes, xout, yout, C, V, per_program,
    xalpha, xstep, yalpha, ystep, alpha, gb, gc, gv, xb, xc, xv, yb, yc, yv,
    XKIND: tl.constexpr, YNORM: tl.constexpr, YKIND: tl.constexpr, KIND: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    inside = c < C
    xm = tl.load(xmean + b * C + c, mask=inside, other=0.0)
    ym = xm
    if YNORM:
        ym = tl.load(ymean + b * C + c, mask=inside, other=0.0)
    start = part * per_program
    stop = tl.minimum(start + per_program, V)
    # For each place of the tile: see ``statistics``.
    xtotal = tl.zeros((BV, BC), tl.float32)
    xmoment = tl.zeros((BV, BC), tl.float32)
    xthird = tl.zeros((BV, BC), tl.float32)
    ytotal = tl.zeros((BV, BC), tl.float32)
    ymoment = tl.zeros((BV, BC), tl.float32)
    ythird = tl.zeros((BV, BC), tl.float32)
    for begin in tl.range(start, stop, BV, num_stages=STAGES):
        v = begin + tl.arange(0, BV)
        mask = (v[:, None] < stop) & inside[None, :]
        place = elements(xb, xc, xv, b, c, v)
        xraw, first, _, xa = _read(x, xscale, xshift, xslopes, xalpha, xstep, b, c, inside, place, mask, C, True, XKIND)
        place = elements(yb, yc, yv, b, c, v)
        yraw, second, _, ya = _read(
            y, yscale, yshift, yslopes, yalpha, ystep, b, c, inside, place, mask, C, YNORM, YKIND
        )
        grad = tl.load(g + elements(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        if KIND != 0:
            grad *= differentiate_activation(activate(first, xa, XKIND) + activate(second, ya, YKIND), alpha, KIND)
        own = grad
        if XKIND == 3:
            xthird += grad * keep_negative(first)
        if XKIND != 0:
            own = grad * differentiate_activation(first, xa, XKIND)
        xtotal += own
        xmoment += own * (xraw - xm[None, :])
        if YNORM:
            own = grad
            if YKIND == 3:
                ythird += grad * keep_negative(second)
            if YKIND != 0:
                own = grad * differentiate_activation(second, ya, YKIND)
            ytotal += own
            ymoment += own * (yraw - ym[None, :])
    pairs = tl.num_programs(2) * C
    xrows: tl.constexpr = 3 if XKIND == 3 else 2
    place = part * xrows * pairs + b * C + c
    tl.store(xout + place, tl.sum(xtotal, 0), mask=inside)
    tl.store(xout + place + pairs, tl.sum(xmoment, 0), mask=inside)
    if XKIND == 3:
        tl.store(xout + place + 2 * pairs, tl.sum(xthird, 0), mask=inside)
    if YNORM:
        yrows: tl.constexpr = 3 if YKIND == 3 else 2
        place = part * yrows * pairs + b * C + c
        tl.store(yout + place, tl.sum(ytotal, 0), mask=inside)
        tl.store(yout + place + pairs, tl.sum(ymoment, 0), mask=inside)
        if YKIND == 3:
            tl.store(yout + place + 2 * pairs, tl.sum(ythird, 0), mask=inside)


@kernel()
def _input_kernel(
    g, x, xscale, xshift, xfactor, xoffset, xslopes, y, yscale, yshift, yfactor, yoffset, yslopes, xout, yout, C, V,
    xalpha, xstep, yalpha, ystep, alpha, gb, gc, gv, xb, xc, xv, yb, yc, yv, ub, uc, uv, wb, wc, wv,
    XKIND: tl.constexpr, YNORM: tl.constexpr, YKIND: tl.constexpr, KIND: tl.constexpr, BOTH: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    inside = c < C
    mask = (v[:, None] < V) & inside[None, :]
    place = elements(xb, xc, xv, b, c, v)
    xraw, first, xs, xa = _read(x, xscale, xshift, xslopes, xalpha, xstep, b, c, inside, place, mask, C, True, XKIND)
    place = elements(yb, yc, yv, b, c, v)
    yraw, second, ys, ya = _read(y, yscale, yshift, yslopes, yalpha, ystep, b, c, inside, place, mask, C, YNORM, YKIND)
    grad = tl.load(g + elements(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
    if KIND != 0:
        grad *= differentiate_activation(activate(first, xa, XKIND) + activate(second, ya, YKIND), alpha, KIND)
    own = grad
    if XKIND != 0:
        own = grad * differentiate_activation(first, xa, XKIND)
    k = tl.load(xfactor + b * C + c, mask=inside, other=0.0)
    o = tl.load(xoffset + b * C + c, mask=inside, other=0.0)
    own = own * xs[None, :] + xraw * k[None, :] + o[None, :]
    tl.store(xout + elements(ub, uc, uv, b, c, v), own.to(xout.dtype.element_ty), mask=mask)
    if BOTH:
        own = grad
        if YKIND != 0:
            own = grad * differentiate_activation(second, ya, YKIND)
        if YNORM:
            k = tl.load(yfactor + b * C + c, mask=inside, other=0.0)
            o = tl.load(yoffset + b * C + c, mask=inside, other=0.0)
            own = own * ys[None, :] + yraw * k[None, :] + o[None, :]
        tl.store(yout + elements(wb, wc, wv, b, c, v), own.to(yout.dtype.element_ty), mask=mask)


def _describe_kinds(first: Term, second: Term, activation: Activation) -> dict[str, int | bool]:
    """Return the constants for which a kernel is compiled."""
    kinds = [KINDS[each.kind] for each in (first.activation, second.activation, activation)]
    return {"XKIND": kinds[0], "YNORM": second.is_norm, "YKIND": kinds[1], "KIND": kinds[2]}


def _list_parameters(first: Term, second: Term, activation: Activation) -> tuple[float, ...]:
    """Return the activations' parameters, with the step from one slope to the next."""
    own = [
        value for term in (first, second) for value in (term.activation.parameter, compute_channel_stride(term.slope))
    ]
    return *own, activation.parameter


def _make_dense(*values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.contiguous() for value in values]


def _make_even(term: Term, like: Tensor) -> Term:
    return term._replace(slab=make_even(term.slab, like))


def add(first: Term, second: Term, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Compute ``choice.add``.

    Parameters
    ----------
    first, second, activation, out
        See ``choice.add``.
    """
    first = _make_even(first, first.slab)
    second = _make_even(second, first.slab)
    x, y = first.slab, second.slab
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype)) if out is None else out
    tile = choose_tile(x, y)
    grid = (triton.cdiv(count_voxels(x), tile[0]), triton.cdiv(x.shape[1], tile[1]), x.shape[0])
    _add_kernel[grid](
        x, *_make_dense(first.scale, first.shift), first.slope,
        y, *_make_dense(second.scale, second.shift), second.slope, out, x.shape[1], count_voxels(x),
        *_list_parameters(first, second, activation), *read_strides(x), *read_strides(y), *read_strides(out),
        **describe_tile(tile, **_describe_kinds(first, second, activation)),
    )  # fmt: skip
    return out


def add_sums(gradient: Tensor, first: Term, second: Term, activation: Activation) -> list[Tensor]:
    """Compute ``choice.add_sums``.

    Parameters
    ----------
    gradient, first, second, activation
        See ``choice.add_sums``.
    """
    norms = [term for term in (first, second) if term.is_norm]
    first = _make_even(first, first.slab)
    x = first.slab
    second, gradient = _make_even(second, x), make_even(gradient, x)
    batch, channels = x.shape[:2]
    tile = halve(choose_tile(x, second.slab, gradient))  # up to 6 sums of each place
    parts, per_program = split_voxels(x, tile)
    rows = [3 if term.activation.kind == "prelu" else 2 for term in norms]
    outs = [x.new_empty((parts, count, batch, channels), dtype=torch.float32) for count in rows]
    _sums_kernel[(parts, triton.cdiv(channels, tile[1]), batch)](
        gradient, x, *_make_dense(*first[1:4]), first.slope, second.slab, *_make_dense(*second[1:4]), second.slope,
        outs[0], outs[1] if second.is_norm else None, channels, count_voxels(x), per_program,
        *_list_parameters(first, second, activation),
        *read_strides(gradient), *read_strides(x), *read_strides(second.slab),
        **describe_tile(tile, STAGES=triton_tiles.STAGES, **_describe_kinds(first, second, activation)),
    )  # fmt: skip
    return outs


def add_gradients(
    gradient: Tensor,
    first: Term,
    second: Term,
    found: list[tuple[Tensor, Tensor]],
    activation: Activation,
    outs: Sequence[Tensor | None] = (None, None),
    *,
    both: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``choice.add_gradients``.

    Parameters
    ----------
    gradient, first, second, found, activation, outs, both
        See ``choice.add_gradients``.
    """
    first = _make_even(first, first.slab)
    x = first.slab
    second, gradient = _make_even(second, x), make_even(gradient, x)
    y = second.slab
    of_first = torch.empty_like(x) if outs[0] is None else outs[0]
    of_second = torch.empty_like(x, dtype=y.dtype) if outs[1] is None and both else outs[1]
    tile = choose_tile(x, y, gradient)
    pairs = [*found, (None, None)][:2]
    grid = (triton.cdiv(count_voxels(x), tile[0]), triton.cdiv(x.shape[1], tile[1]), x.shape[0])
    _input_kernel[grid](
        gradient, x, *_make_dense(first.scale, first.shift, *pairs[0]), first.slope,
        y, *_make_dense(second.scale, second.shift, *pairs[1]), second.slope, of_first, of_second,
        x.shape[1], count_voxels(x),
        *_list_parameters(first, second, activation), *read_strides(gradient), *read_strides(x), *read_strides(y),
        *read_strides(of_first), *((0, 0, 0) if of_second is None else read_strides(of_second)),
        **describe_tile(tile, BOTH=both, **_describe_kinds(first, second, activation)),
    )  # fmt: skip
    return of_first, of_second if both else None
