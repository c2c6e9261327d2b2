# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Convolution of few channels to few channels in half precision, such as a network's last one, after its classes.

cuDNN's kernels for matrix units need multiples of eight channels: cuDNN pads, or computes voxel by voxel with other
kernels. Three channels to three are too few for a matrix. Here each lane holds a voxel's results, and iterates over the
taps: their inputs are in the caches, the weights are the same for all lanes. The input's gradient is the same
computation with a flipped kernel.
"""

from math import prod

from torch import Tensor

from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.triton_kernels import kernel, tl, triton

MOST_CHANNELS = 4
"""Limit of channels in and out: the sums of a voxel are in registers, each in its own variable."""

MOST_PRODUCTS = 512
"""Limit of products per voxel; 3 x 3 x 3 taps of 4 to 4 channels are 432."""

VOXELS = 512
"""Voxels per program: four for each lane, which share each weight."""


@kernel()
def _convolve_few_kernel(
    x, weight, bias, out, V, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW,
    C: tl.constexpr, N: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    line = v // OW
    plane = line // OH
    w, h, d = v % OW - PW, line % OH - PH, plane % OD - PD
    origin = x + (plane // OD).to(tl.int64) * sb
    there = v < V
    step = tl.cast(sc, tl.int64)
    first = tl.zeros((BV,), tl.float32)
    second = tl.zeros((BV,), tl.float32)
    third = tl.zeros((BV,), tl.float32)
    fourth = tl.zeros((BV,), tl.float32)
    taps: tl.constexpr = KD * KH * KW
    for i in range(KD):
        zd = d + i
        in_plane = there & (zd >= 0) & (zd < D)
        for j in range(KH):
            zh = h + j
            in_line = in_plane & (zh >= 0) & (zh < H)
            place = origin + zd.to(tl.int64) * sd + zh.to(tl.int64) * sh
            for k in tl.static_range(KW):
                zw = w + k
                inside = in_line & (zw >= 0) & (zw < W)
                for c in tl.static_range(C):
                    value = tl.load(place + zw.to(tl.int64) * sw + c * step, mask=inside, other=0.0).to(tl.float32)
                    own = weight + c * taps + (i * KH + j) * KW + k
                    first += value * tl.load(own).to(tl.float32)
                    if N > 1:
                        second += value * tl.load(own + C * taps).to(tl.float32)
                    if N > 2:
                        third += value * tl.load(own + 2 * C * taps).to(tl.float32)
                    if N > 3:
                        fourth += value * tl.load(own + 3 * C * taps).to(tl.float32)
    for n in tl.static_range(N):
        total = first if n == 0 else (second if n == 1 else (third if n == 2 else fourth))
        if BIAS:
            total += tl.load(bias + n).to(tl.float32)
        tl.store(out + v.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=there)


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution, ``(B, N, D, H, W)`` with channels last."""
    channels, sides = weight.shape[0], settings.compute_sides(slab, weight)
    out = new_volume(slab, channels, sides)
    voxels = slab.shape[0] * prod(sides)
    _convolve_few_kernel[(triton.cdiv(voxels, VOXELS),)](
        slab, weight.contiguous(), bias, out, voxels, *slab.shape[2:], *sides, *slab.stride(), *settings.padding,
        **dict(zip(("C", "N", "KD", "KH", "KW"), (slab.shape[1], channels, *weight.shape[2:]), strict=True)),
        BIAS=bias is not None, BV=VOXELS, num_warps=4,
    )  # fmt: skip
    return out


def input_gradient(gradient: Tensor, _slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the input, with channels last; the convolution pads less than its kernel reaches."""
    return forward(gradient, weight.flip(2, 3, 4).transpose(0, 1), None, settings.turn(weight))
