# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Layer norm of short lines, many to a program: one pass forward, one backward.

torch runs a block for each line, and under autocast reads and writes it in float32: a line of 48 channels keeps few
threads busy, and half precision is copied before, and its gradient afterwards. Here a program takes the lines that fill
a tile, and reads each in its own type. Gradients of weight and bias are sums of parts in a fixed order.
"""

import torch
from torch import Tensor

from volseg.device.gpus import on_gpu
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import available, count_processors

LONGEST = 1024
"""Limit of channels in a line."""

TILE = 2048
"""Elements of a tile."""

TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of lines: wider types would lose digits, and torch refuses integers."""

MOST_LINES = 2**30
"""Limit of lines: they are counted in 32 bits, some beyond the last."""


@kernel()
def _layer_norm_kernel(
    x, weight, bias, out, means, rstds, R, C, step, eps, AFFINE: tl.constexpr, SHIFTED: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BC)
    mask = (r[:, None] < R) & (c[None, :] < C)
    value = tl.load(x + r[:, None].to(tl.int64) * step + c[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / C
    centered = tl.where(c[None, :] < C, value - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, 1) / C + eps)
    result = centered * rstd[:, None]
    if AFFINE:
        result *= tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        result += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(out + r[:, None].to(tl.int64) * C + c[None, :], result.to(out.dtype.element_ty), mask=mask)
    tl.store(means + r, mean, mask=r < R)
    tl.store(rstds + r, rstd, mask=r < R)


@kernel()
def _layer_norm_backward_kernel(
    grad, x, weight, means, rstds, out, sums, R, C, grad_step, step, per_program, AFFINE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BC)
    factor = tl.full((BC,), 1.0, tl.float32)
    if AFFINE:
        factor = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    begin = tl.program_id(0) * per_program
    for first in range(begin, begin + per_program, BR):
        r = first + tl.arange(0, BR)
        inside = (r < R) & (r < begin + per_program)
        mask = inside[:, None] & (c[None, :] < C)
        slope = tl.load(grad + r[:, None].to(tl.int64) * grad_step + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + r[:, None].to(tl.int64) * step + c[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(means + r, mask=inside, other=0.0)
        rstd = tl.load(rstds + r, mask=inside, other=0.0)
        normed = tl.where(mask, (value - mean[:, None]) * rstd[:, None], 0.0)
        of_weight += slope * normed
        of_bias += slope
        own = slope * factor[None, :]
        along, level = tl.sum(own * normed, 1) / C, tl.sum(own, 1) / C
        result = (own - normed * along[:, None] - level[:, None]) * rstd[:, None]
        place = out + r[:, None].to(tl.int64) * C + c[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)
    place = sums + tl.program_id(0).to(tl.int64) * 2 * C + c
    tl.store(place, tl.sum(of_weight, 0), mask=c < C)
    tl.store(place + C, tl.sum(of_bias, 0), mask=c < C)


def takes_lines(tensor: Tensor, channels: int) -> bool:
    """Return whether the kernels support such lines: on a GPU, of 32 or 16 bits, short, not too many."""
    fits = 0 < channels <= LONGEST and 0 < tensor.numel() <= MOST_LINES * channels
    return fits and on_gpu(tensor) and tensor.dtype in TYPES and available()


def normalize_lines(
    lines: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lines normalized, and their means and reciprocal deviations in float32.

    Parameters
    ----------
    lines
        ``(R, C)``, with a step of 1 from channel to channel.
    weight, bias
        ``(C,)``, or None, with a step of 1 as well.
    eps
        Added to the variance.
    dtype
        Dtype of the result.
    """
    rows, channels = lines.shape
    out = torch.empty((rows, channels), dtype=dtype, device=lines.device)
    means, rstds = (torch.empty((rows,), dtype=torch.float32, device=lines.device) for _ in range(2))
    tile = _choose(channels)
    _layer_norm_kernel[(triton.cdiv(rows, tile["BR"]),)](
        lines, lines if weight is None else weight, lines if bias is None else bias, out, means, rstds, rows,
        channels, lines.stride(0), eps, AFFINE=weight is not None, SHIFTED=bias is not None, **tile,
    )  # fmt: skip
    return out, means, rstds


def differentiate_lines(
    gradient: Tensor, lines: Tensor, weight: Tensor | None, means: Tensor, rstds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the lines, in their type, and of weight and bias in float32.

    Parameters
    ----------
    gradient
        Gradient of the result, ``(R, C)``, with a step of 1 from channel to channel.
    lines, weight
        See ``normalize_lines``.
    means, rstds
        Results of ``normalize_lines``.
    """
    rows, channels = lines.shape
    out = torch.empty((rows, channels), dtype=lines.dtype, device=lines.device)
    tile = _choose(channels)
    wanted = 4 * count_processors(lines.device)
    per_program = triton.cdiv(triton.cdiv(rows, tile["BR"]), wanted) * tile["BR"]
    parts = triton.cdiv(rows, per_program)
    sums = torch.empty((parts, 2, channels), dtype=torch.float32, device=lines.device)
    _layer_norm_backward_kernel[(parts,)](
        gradient, lines, lines if weight is None else weight, means, rstds, out, sums, rows, channels,
        gradient.stride(0), lines.stride(0), per_program, AFFINE=weight is not None, **tile,
    )  # fmt: skip
    of_weight, of_bias = sums.sum(0)
    return out, of_weight, of_bias


def _choose(channels: int) -> dict[str, int]:
    """Return lines and channels of a tile."""
    width = triton.next_power_of_2(channels)
    return {"BR": max(1, TILE // width), "BC": width, "num_warps": 4}
