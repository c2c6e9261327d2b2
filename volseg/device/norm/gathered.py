# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Coefficients of the norms in Triton: scale and shift of existing statistics, and what ``exchanged`` stores."""

import torch
from torch import Tensor

from volseg.device.norm.grouping import compute_pairs, compute_samples, join_lanes
from volseg.device.triton_kernels import kernel, tl, triton


@triton.jit
def store_coefficients(
    mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Store mean, variance, reciprocal deviation, scale and shift of the pairs ``i``, of one sample or of several."""
    rstd = 1.0 / tl.sqrt_rn(variance + eps)
    scale = rstd
    if WEIGHT:
        scale *= tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
    shift = -mean * scale
    if BIAS:
        shift += tl.load(bias + i % C, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, mean, mask=inside)
    tl.store(out + pairs + i, variance, mask=inside)
    tl.store(out + 2 * pairs + i, rstd, mask=inside)
    tl.store(out + 3 * pairs + i, scale, mask=inside)
    tl.store(out + 4 * pairs + i, shift, mask=inside)


@triton.jit
def keep_gradients(total, moment, rstd, kept, i, inside, count):
    """Store the gradients of bias and weight at the places ``i`` of ``count``."""
    tl.store(kept + i, moment * tl.load(rstd + i, mask=inside, other=0.0), mask=inside)
    tl.store(kept + count + i, total, mask=inside)


@triton.jit
def weigh_sums(total, moment, rstd, weight, i, inside, C, WEIGHT: tl.constexpr):
    """Return the contributions of the pairs ``i`` to the sums of their groups."""
    moment *= tl.load(rstd + i, mask=inside, other=0.0)
    if WEIGHT:
        w = tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
        total *= w
        moment *= w
    return total, moment


@triton.jit
def _store_slopes(first, second, mean, rstd, out, i, inside, pairs, GIVEN: tl.constexpr):
    m = tl.load(mean + i, mask=inside, other=0.0)
    r = tl.load(rstd + i, mask=inside, other=0.0)
    slope = -r * r * second
    offset = -r * first - slope * m
    if GIVEN:  # statistics that do not come from the input have no gradient to it
        slope = tl.zeros_like(slope)
        offset = slope
    tl.store(out + i, slope, mask=inside)
    tl.store(out + pairs + i, offset, mask=inside)


@triton.jit
def store_backward(
    first, second, mean, rstd, out, number, groups, members, steps, pairs,
    ACROSS: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store factor and offset of the input's gradient for a program's pairs; a group has a ``number`` of voxels."""
    first = join_lanes(first, ACROSS) / number
    second = join_lanes(second, ACROSS) / number
    if ACROSS:
        for step in range(steps):
            i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
            _store_slopes(first, second, mean, rstd, out, i, inside, pairs, GIVEN)
    else:
        for sample in range(0, members, ROWS):
            i, inside = compute_samples(sample, groups, members, ROWS, BLOCK)
            _store_slopes(first[None, :], second[None, :], mean, rstd, out, i, inside, pairs, GIVEN)


@kernel()
def _given_kernel(
    mean, variance, weight, bias, out, eps, C, pairs, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pairs
    m = tl.load(mean + i % C, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(variance + i % C, mask=inside, other=0.0).to(tl.float32)
    store_coefficients(m, v, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)


def given_coefficients(
    slab: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute ``reference.given_coefficients``.

    Parameters
    ----------
    slab, mean, variance, weight, bias, eps
        See ``reference.given_coefficients``.
    """
    batch, channels = slab.shape[:2]
    pairs = batch * channels
    out = mean.new_empty((5, batch, channels), dtype=torch.float32)
    _given_kernel[(triton.cdiv(pairs, 128),)](
        mean.contiguous(), variance.contiguous(), make_dense(weight), make_dense(bias), out, eps, channels, pairs,
        WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return out


def make_dense(values: Tensor | None) -> Tensor | None:
    """Return weights or biases as dense tensors for the kernels; those of a style may not be dense."""
    return None if values is None else values.contiguous()
