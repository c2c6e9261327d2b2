# ruff: noqa: N803  (upper case: constants for which Triton compiles)
# mypy: disable-error-code="no-untyped-def"
"""Compute Dice plus cross entropy of one slab in Triton: one pass over logits and label, softmax in registers.

A tile contains ``BV`` voxels with all their classes. Logits are addressed as (sample, class, voxel) with three strides,
for contiguous and channels-last tensors. The label has its own strides, so that a coarser head reads the full label at
a stride. Each program writes its own sums. ``combine`` adds them in a fixed order: no atomics, the same bits each time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_processors
from volseg.losses.dice.reference import Terms, empty_gradient

TILE, TILE_LAST = 4096, 1024
"""Elements per tile, contiguous and with channels last. A thread processes eight adjacent voxels: a smaller tile of
contiguous logits would spread a voxel's classes over warps (224^3 voxels, H200: 1.55 ms instead of 0.06)."""

NOT_SPECIALIZED = ["H"]
"""No specialization on divisibility by 16: it changes no instruction, but each patch size would be recompiled."""


@triton.jit
def _softmax(x, b, c, v, K, V, xb, xc, xv):
    """Return probabilities and their logarithms, ``[BV, BK]``; absent classes have 0 and -inf."""
    place = b.to(tl.int64) * xb + c[None, :].to(tl.int64) * xc + v[:, None].to(tl.int64) * xv
    inside = c[None, :] < K
    value = tl.load(x + place, mask=(v[:, None] < V) & inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value, float("-inf"))
    value -= tl.max(value, 1)[:, None]
    power = tl.exp(value)
    total = tl.sum(power, 1)
    return power / total[:, None], value - tl.log(total)[:, None]


@triton.jit
def _is_class(y, b, c, v, K, V, H, W, yb, yd, yh, yw):
    """Return the one-hot label, ``[BV, BK]``."""
    row = v // W
    place = b.to(tl.int64) * yb + (row // H).to(tl.int64) * yd + (row % H).to(tl.int64) * yh
    label = tl.load(y + place + (v % W).to(tl.int64) * yw, mask=v < V, other=0)
    return (label[:, None] == c[None, :]) & (c[None, :] < K)


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _sums_kernel(
    x, y, out, K, V, H, W, per_program, xb, xc, xv, yb, yd, yh, yw,
    SQUARED: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, b = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BK)
    stop = tl.minimum((part + 1) * per_program, V)
    overlap = tl.zeros((BV, BK), tl.float32)
    mass = tl.zeros((BV, BK), tl.float32)
    truth = tl.zeros((BV, BK), tl.float32)
    surprise = tl.zeros((BV, BK), tl.float32)
    for first in range(part * per_program, stop, BV):
        v = first + tl.arange(0, BV)
        there = v[:, None] < stop
        p, log = _softmax(x, b, c, v, K, V, xb, xc, xv)
        hit = _is_class(y, b, c, v, K, V, H, W, yb, yd, yh, yw)
        known = tl.max(hit.to(tl.int32), 1) > 0
        overlap += tl.where(there & hit, p, 0.0)
        mass += tl.where(there, p * p if SQUARED else p, 0.0)
        truth += tl.where(there, tl.where(known[:, None], hit.to(tl.float32), float("nan")), 0.0)
        surprise -= tl.where(there & hit, log, 0.0)
    pairs = tl.num_programs(1) * K
    place = out + part * 4 * pairs + b * K + c
    tl.store(place, tl.sum(overlap, 0), mask=c < K)
    tl.store(place + pairs, tl.sum(mass, 0), mask=c < K)
    tl.store(place + 2 * pairs, tl.sum(truth, 0), mask=c < K)
    tl.store(place + 3 * pairs, tl.sum(surprise, 0), mask=c < K)


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _gradient_kernel(
    x, y, slopes, out, K, V, H, W, xb, xc, xv, yb, yd, yh, yw, ob, oc, ov,
    SQUARED: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.arange(0, BK)
    pairs = tl.num_programs(1) * K
    place = slopes + b * K + c
    overlap = tl.load(place, mask=c < K, other=0.0)
    mass = tl.load(place + pairs, mask=c < K, other=0.0)
    surprise = tl.load(place + 3 * pairs, mask=c < K, other=0.0)
    p, _ = _softmax(x, b, c, v, K, V, xb, xc, xv)
    hit = _is_class(y, b, c, v, K, V, H, W, yb, yd, yh, yw)
    by_probability = tl.where(hit, overlap[None, :], 0.0) + mass[None, :] * (2.0 * p if SQUARED else 1.0)
    mean = tl.sum(by_probability * p, 1)
    by_surprise = tl.sum(tl.where(hit, surprise[None, :], 0.0), 1)
    result = p * (by_probability - mean[:, None]) + by_surprise[:, None] * (p - hit.to(tl.float32))
    place = b.to(tl.int64) * ob + c[None, :].to(tl.int64) * oc + v[:, None].to(tl.int64) * ov
    inside = (v[:, None] < V) & (c[None, :] < K)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@kernel()
def _combine_kernel(
    sums, loss, slopes, rows, pool, stride, pairs, K, first_class, sizes, overlaps, smooth_nr, smooth_dr,
    pair, voxel, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A row is a part, or a part and a sample if all samples are pooled: see combine.
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < pairs
        overlap = tl.zeros((ROWS, BLOCK), tl.float32)
        mass = tl.zeros((ROWS, BLOCK), tl.float32)
        truth = tl.zeros((ROWS, BLOCK), tl.float32)
        surprise = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            place = sums + ((row // pool) * 4 * stride + (row % pool) * K)[:, None] + i[None, :]
            there = (row[:, None] < rows) & inside[None, :]
            overlap += tl.load(place, mask=there, other=0.0)
            mass += tl.load(place + stride, mask=there, other=0.0)
            truth += tl.load(place + 2 * stride, mask=there, other=0.0)
            surprise += tl.load(place + 3 * stride, mask=there, other=0.0)
        overlap, mass = tl.sum(overlap, 0), tl.sum(mass, 0)
        truth, surprise = tl.sum(truth, 0), tl.sum(surprise, 0)
        denominator = tl.where(inside, sizes * (mass + truth) - overlaps * overlap + smooth_dr, 1.0)
        ratio = (2.0 * overlap + smooth_nr) / denominator
        factor = tl.where(i % K >= first_class, pair, 0.0)
        total += tl.where(inside, (1.0 - ratio) * factor + surprise * voxel, 0.0)
        tl.store(slopes + i, -(2.0 + overlaps * ratio) / denominator * factor, mask=inside)
        tl.store(slopes + pairs + i, sizes * ratio / denominator * factor, mask=inside)
        tl.store(slopes + 2 * pairs + i, 0.0 * ratio, mask=inside)
        tl.store(slopes + 3 * pairs + i, voxel + 0.0 * ratio, mask=inside)
    tl.store(loss, tl.sum(total, 0))


def _choose_tile(flat: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(flat.shape[1])
    size = TILE_LAST if flat.stride(1) == 1 else TILE
    return {"BV": max(16, size // width), "BK": width, "num_warps": 4}


def _describe_label(label: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return a label map that Triton can read, and the strides of its samples, planes, rows and voxels."""
    label = label.to(torch.uint8) if label.dtype == torch.bool else label
    return label, (label.stride(0), label.stride(2), label.stride(3), label.stride(4))


def sums(logits: Tensor, label: Tensor, squared: bool) -> Tensor:
    """Compute ``reference.sums``, ``(parts, 4, B, K)``."""
    flat = logits.flatten(2)  # a view, unless the planes have gaps between them
    batch, classes, voxels = flat.shape
    tile = _choose_tile(flat)
    wanted = max(1, 4 * count_processors(logits.device) // batch)
    per_program = triton.cdiv(triton.cdiv(voxels, tile["BV"]), wanted) * tile["BV"]
    parts = triton.cdiv(voxels, per_program)
    out = torch.empty((parts, 4, batch, classes), dtype=torch.float32, device=logits.device)
    label, strides = _describe_label(label)
    _sums_kernel[(parts, batch)](
        flat, label, out, classes, voxels, *label.shape[3:], per_program, *flat.stride(), *strides,
        SQUARED=squared, **tile,
    )  # fmt: skip
    return out


def combine(sums: Tensor, terms: Terms, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute ``reference.combine``."""
    sums = sums.contiguous()
    parts, _, batch, classes = sums.shape
    pool = batch if terms.batch else 1
    pairs = batch // pool * classes
    loss = sums.new_empty(())
    slopes = sums.new_empty((4, batch // pool, classes))
    block = min(32, triton.next_power_of_2(pairs))
    _combine_kernel[(1,)](
        sums, loss, slopes, parts * pool, pool, batch * classes, pairs, classes, int(not terms.include_background),
        *terms.denominator, terms.smooth_nr, terms.smooth_dr, *terms.factors(shape),
        ROWS=2048 // block, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return loss, slopes


def gradient(logits: Tensor, label: Tensor, slopes: Tensor, squared: bool) -> Tensor:
    """Compute ``reference.gradient``."""
    flat = logits.flatten(2)
    out, flat_out = empty_gradient(logits)
    batch, classes, voxels = flat.shape
    tile = _choose_tile(flat)
    label, strides = _describe_label(label)
    _gradient_kernel[(triton.cdiv(voxels, tile["BV"]), batch)](
        flat, label, slopes.contiguous(), flat_out, classes, voxels, *label.shape[3:], *flat.stride(), *strides,
        *flat_out.stride(), SQUARED=squared, **tile,
    )  # fmt: skip
    return out
