# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""The kernels of ``kernels`` in Triton: one pass over the voxels each, in contiguous and in channels-last layout.

A slab is addressed as (sample, channel, voxel) with three strides, so that the same kernel serves both layouts, slices
of channels, and slabs inside a buffer with room for a halo. A tile holds ``BV`` voxels of ``BC`` channels.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from volseg.parallel.sharding.kernels import Activation

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

__all__ = [
    "affine",
    "available",
    "backward_coefficients",
    "coefficients",
    "copy",
    "gradient_input",
    "gradient_sums",
    "moments",
]

TILE = 4096
"""Elements per tile: 32 bytes in flight per thread of 128 in half precision."""

KINDS = {"none": 0, "leaky": 1, "elu": 2}


def available() -> bool:
    """Say whether Triton is installed."""
    return triton is not None


def _strides(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of sample, channel and voxel, or None where the voxels are not evenly spaced."""
    stride, size = tensor.stride(), tensor.shape
    step = stride[-1]
    for dim in range(tensor.ndim - 2, 1, -1):
        if size[dim] > 1 and stride[dim] != stride[dim + 1] * size[dim + 1]:
            return None
    return stride[0], stride[1], step


def _spaced(tensor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a tensor that is evenly spaced by construction."""
    strides = _strides(tensor)
    assert strides is not None, (tensor.shape, tensor.stride())
    return strides


def _even(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor itself, or a copy laid out like ``like``."""
    return tensor if _strides(tensor) is not None else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _tile(tensor: Tensor) -> tuple[int, int]:
    """Return voxels and channels per tile: whole lines of memory in either layout."""
    channels = tensor.shape[1]
    strides = _strides(tensor)
    if strides is not None and strides[1] == 1 and channels > 1:
        width = min(128, triton.next_power_of_2(channels))
        return TILE // width, width
    return TILE, 1


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's device; Triton's interpreter runs on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


if triton is not None:

    @triton.jit
    def _tile_of(B_STRIDE, C_STRIDE, V_STRIDE, b, channels, voxels):
        return (
            b.to(tl.int64) * B_STRIDE
            + channels[None, :].to(tl.int64) * C_STRIDE
            + voxels[:, None].to(tl.int64) * V_STRIDE
        )

    @triton.jit
    def _derivative(value, alpha, KIND: tl.constexpr):
        if KIND == 1:
            return tl.where(value > 0, 1.0, alpha)
        return tl.where(value > 0, 1.0, alpha * tl.exp(tl.minimum(value, 0.0)))

    @triton.jit
    def _moments_kernel(
        x,
        means,
        squares,
        C,
        V,
        per_program,
        sb,
        sc,
        sv,
        BV: tl.constexpr,
        BC: tl.constexpr,
    ):
        part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        c = block * BC + tl.arange(0, BC)
        inside = c < C
        start = part * per_program
        stop = tl.minimum(start + per_program, V)
        count = tl.zeros((BC,), tl.float32)
        mean = tl.zeros((BC,), tl.float32)
        square = tl.zeros((BC,), tl.float32)
        for first in range(start, stop, BV):
            v = first + tl.arange(0, BV)
            mask = (v[:, None] < stop) & inside[None, :]
            value = tl.load(x + _tile_of(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
            number = tl.minimum(stop - first, BV).to(tl.float32)
            own = tl.sum(value, 0) / number
            deviation = tl.where(mask, value - own[None, :], 0.0)
            # Chan's update: statistics of this tile joined to those so far.
            delta = own - mean
            total = count + number
            square += tl.sum(deviation * deviation, 0) + delta * delta * count * number / total
            mean += delta * number / total
            count = total
        place = (part * tl.num_programs(2) + b) * C + c
        tl.store(means + place, mean, mask=inside)
        tl.store(squares + place, square, mask=inside)

    @triton.jit
    def _join_kernel(
        means, squares, out, pairs, parts, V, per_program, PARTS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i[None, :] < pairs
        mean = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            mean += tl.sum(tl.where(there, own * number[:, None], 0.0), 0)
        mean = mean / (V * 1.0)
        square = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            delta = own - mean[None, :]
            within = tl.load(squares + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            square += tl.sum(tl.where(there, within + delta * delta * number[:, None], 0.0), 0)
        tl.store(out + i, mean, mask=i < pairs)
        tl.store(out + pairs + i, square / (V * 1.0), mask=i < pairs)

    @triton.jit
    def _coefficients_kernel(
        stacked, shares, weight, bias, out, eps, C, pairs, shards,
        WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < pairs
        mean = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            mean += tl.load(shares + shard) * tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0)
        variance = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            share = tl.load(shares + shard)
            delta = tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0) - mean
            own = tl.load(stacked + (shard * 2 + 1) * pairs + i, mask=inside, other=0.0)
            variance += share * (own + delta * delta)
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
    def _backward_kernel(
        stacked, mean, rstd, weight, out, voxels, C, pairs, shards,
        WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < pairs
        total = tl.zeros((BLOCK,), tl.float32)
        moment = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            total += tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0)
            moment += tl.load(stacked + (shard * 2 + 1) * pairs + i, mask=inside, other=0.0)
        m = tl.load(mean + i, mask=inside, other=0.0)
        r = tl.load(rstd + i, mask=inside, other=0.0)
        moment *= r
        w = tl.full((BLOCK,), 1.0, tl.float32)
        if WEIGHT:
            w = tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
        slope = -r * r * moment * w / voxels
        offset = -r * total * w / voxels - slope * m
        tl.store(out + i, slope, mask=inside)
        tl.store(out + pairs + i, offset, mask=inside)
        tl.store(out + 2 * pairs + i, moment, mask=inside)
        tl.store(out + 3 * pairs + i, total, mask=inside)

    @triton.jit
    def _affine_kernel(
        x, scale, shift, out, C, V, alpha, sb, sc, sv, ob, oc, ov,
        KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        b = tl.program_id(2)
        mask = (v[:, None] < V) & (c[None, :] < C)
        value = tl.load(x + _tile_of(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        if KIND != 3:  # 3 copies
            a = tl.load(scale + b * C + c, mask=c < C, other=0.0)
            s = tl.load(shift + b * C + c, mask=c < C, other=0.0)
            value = value * a[None, :] + s[None, :]
        if KIND == 1:
            value = tl.where(value > 0, value, value * alpha)
        if KIND == 2:
            value = tl.where(value > 0, value, alpha * (tl.exp(tl.minimum(value, 0.0)) - 1.0))
        tl.store(out + _tile_of(ob, oc, ov, b, c, v), value.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _sums_kernel(
        g, x, mean, scale, shift, out, C, V, per_program, alpha, gb, gc, gv, sb, sc, sv,
        KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        c = block * BC + tl.arange(0, BC)
        inside = c < C
        a = tl.load(scale + b * C + c, mask=inside, other=0.0)
        s = tl.load(shift + b * C + c, mask=inside, other=0.0)
        m = tl.load(mean + b * C + c, mask=inside, other=0.0)
        start = part * per_program
        stop = tl.minimum(start + per_program, V)
        first_sum = tl.zeros((BC,), tl.float32)
        second_sum = tl.zeros((BC,), tl.float32)
        for first in range(start, stop, BV):
            v = first + tl.arange(0, BV)
            mask = (v[:, None] < stop) & inside[None, :]
            value = tl.load(x + _tile_of(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(g + _tile_of(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
            if KIND != 0:
                grad *= _derivative(value * a[None, :] + s[None, :], alpha, KIND)
            first_sum += tl.sum(grad, 0)
            second_sum += tl.sum(grad * (value - m[None, :]), 0)
        pairs = tl.num_programs(2) * C
        place = part * 2 * pairs + b * C + c
        tl.store(out + place, first_sum, mask=inside)
        tl.store(out + place + pairs, second_sum, mask=inside)

    @triton.jit
    def _input_kernel(
        g, x, scale, shift, slope, offset, out, C, V, alpha, gb, gc, gv, sb, sc, sv, ob, oc, ov,
        KIND: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ):  # fmt: skip
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        b = tl.program_id(2)
        inside = c < C
        mask = (v[:, None] < V) & inside[None, :]
        a = tl.load(scale + b * C + c, mask=inside, other=0.0)
        k = tl.load(slope + b * C + c, mask=inside, other=0.0)
        o = tl.load(offset + b * C + c, mask=inside, other=0.0)
        value = tl.load(x + _tile_of(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(g + _tile_of(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        if KIND != 0:
            s = tl.load(shift + b * C + c, mask=inside, other=0.0)
            grad *= _derivative(value * a[None, :] + s[None, :], alpha, KIND)
        result = grad * a[None, :] + value * k[None, :] + o[None, :]
        tl.store(out + _tile_of(ob, oc, ov, b, c, v), result.to(out.dtype.element_ty), mask=mask)


def _voxels(tensor: Tensor) -> int:
    return tensor.shape[2:].numel()


def _parts(tensor: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    """Return how many programs share the voxels of a channel block, and the voxels of each."""
    voxels, (height, width) = _voxels(tensor), tile
    blocks = triton.cdiv(tensor.shape[1], width) * tensor.shape[0]
    wanted = max(1, 4 * _processors(tensor.device) // blocks)
    per_program = triton.cdiv(triton.cdiv(voxels, height), wanted) * height
    return triton.cdiv(voxels, per_program), per_program


def _settings(tile: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"BV": tile[0], "BC": tile[1], "num_warps": 4, **more}


def moments(slab: Tensor) -> Tensor:
    """See ``kernels.moments``."""
    slab = _even(slab, slab)
    batch, channels = slab.shape[:2]
    tile = _tile(slab)
    parts, per_program = _parts(slab, tile)
    means, squares = slab.new_empty((2, parts, batch, channels), dtype=torch.float32)
    out = slab.new_empty((2, batch, channels), dtype=torch.float32)
    with _on(slab):
        grid = (parts, triton.cdiv(channels, tile[1]), batch)
        _moments_kernel[grid](
            slab, means, squares, channels, _voxels(slab), per_program, *_spaced(slab), **_settings(tile)
        )
        pairs = batch * channels
        grid = (triton.cdiv(pairs, 8), 1, 1)
        _join_kernel[grid](
            means, squares, out, pairs, parts, _voxels(slab), per_program, PARTS=128, BLOCK=8, num_warps=4
        )
    return out


def affine(slab: Tensor, scale: Tensor, shift: Tensor, activation: "Activation", out: Tensor | None) -> Tensor:
    """See ``kernels.affine``."""
    slab = _even(slab, slab)
    out = torch.empty_like(slab) if out is None else out
    tile = _tile(slab)
    grid = (triton.cdiv(_voxels(slab), tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    with _on(slab):
        _affine_kernel[grid](
            slab, scale.contiguous(), shift.contiguous(), out, slab.shape[1], _voxels(slab), activation.parameter,
            *_spaced(slab), *_spaced(out), **_settings(tile, KIND=KINDS[activation.kind]),
        )  # fmt: skip
    return out


def coefficients(stacked: Tensor, shares: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See ``kernels.coefficients``."""
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((5, batch, channels))
    with _on(stacked):
        _coefficients_kernel[(triton.cdiv(pairs, 128),)](
            stacked, shares, weight, bias, out, eps, channels, pairs, shards,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def backward_coefficients(stacked: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, voxels: int) -> Tensor:
    """See ``kernels.backward_coefficients``."""
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((4, batch, channels))
    with _on(stacked):
        _backward_kernel[(triton.cdiv(pairs, 128),)](
            stacked, mean, rstd, weight, out, float(voxels), channels, pairs, shards,
            WEIGHT=weight is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def copy(slab: Tensor, out: Tensor) -> None:
    """See ``kernels.copy``."""
    slab = _even(slab, slab)
    # Between layouts the tile follows the one with channels last: its lines are then whole on both sides.
    tile = max(_tile(slab), _tile(out), key=lambda size: size[1])
    grid = (triton.cdiv(_voxels(slab), tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    with _on(slab):
        _affine_kernel[grid](
            slab, slab, slab, out, slab.shape[1], _voxels(slab), 0.0,
            *_spaced(slab), *_spaced(out), **_settings(tile, KIND=3),
        )  # fmt: skip


def gradient_sums(
    gradient: Tensor, slab: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: "Activation"
) -> Tensor:
    """See ``kernels.gradient_sums``."""
    slab = _even(slab, slab)
    gradient = _even(gradient, slab)
    batch, channels = slab.shape[:2]
    tile = _tile(slab)
    parts, per_program = _parts(slab, tile)
    out = slab.new_empty((parts, 2, batch, channels), dtype=torch.float32)
    grid = (parts, triton.cdiv(channels, tile[1]), batch)
    with _on(slab):
        _sums_kernel[grid](
            gradient, slab, mean.contiguous(), scale.contiguous(), shift.contiguous(), out, channels, _voxels(slab),
            per_program, activation.parameter, *_spaced(gradient), *_spaced(slab),
            **_settings(tile, KIND=KINDS[activation.kind]),
        )  # fmt: skip
    return out.sum(0)


def gradient_input(
    gradient: Tensor,
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    slope: Tensor,
    offset: Tensor,
    activation: "Activation",
) -> Tensor:
    """See ``kernels.gradient_input``."""
    slab = _even(slab, slab)
    gradient = _even(gradient, slab)
    out = torch.empty_like(slab)
    tile = _tile(slab)
    grid = (triton.cdiv(_voxels(slab), tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    with _on(slab):
        _input_kernel[grid](
            gradient, slab, *(t.contiguous() for t in (scale, shift, slope, offset)), out, slab.shape[1],
            _voxels(slab), activation.parameter, *_spaced(gradient), *_spaced(slab), *_spaced(out),
            **_settings(tile, KIND=KINDS[activation.kind]),
        )  # fmt: skip
    return out
