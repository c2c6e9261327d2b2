# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Compute a convolution as the input's gradient of another one, whose weight is flipped.

Both are the same sums, but cuDNN has different kernels for them: on an H100 it computed the input's gradient of a
convolution of 64 channels to 64 with 5 x 5 x 5 taps at 560 TFLOP/s, and forward at 410. On an H200 V-Net's wide
convolutions take 1.2 ms instead of 11. Flipping a weight mirrors it along D, H and W and exchanges its input and output
channels::

    forward(w) = input gradient(flipped w)        flipped w[i, o, d, h, t] = w[o, i, D - 1 - d, H - 1 - h, W - 1 - t]

A kernel flips the weight in one pass. ``many_taps`` lists where this pays: with other kernels 11 of 14 networks gain
nothing (``workflows/benchmarks/results/networks_h200_convolutions.json``).

Not supported: strides, groups, transposed convolutions, and more padding than the kernel's reach.
"""

from dataclasses import replace

import torch
from torch import Tensor

from volseg.device.convolution import depth_chunks
from volseg.device.convolution.settings import Settings
from volseg.device.layout import in_layout
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import takes

SIDE = 64
"""Input and output channels of a tile."""


@kernel()
def _turn_kernel(weight, out, CO, CI, TAPS, SIDE: tl.constexpr):
    tap = tl.program_id(0)
    co = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    ci = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    place = (co[:, None].to(tl.int64) * TAPS + tap) * CI + ci[None, :]
    values = tl.load(weight + place, mask=(co < CO)[:, None] & (ci < CI)[None, :], other=0.0)
    place = (ci[:, None].to(tl.int64) * TAPS + (TAPS - 1 - tap)) * CO + co[None, :]
    tl.store(out + place, tl.trans(values), mask=(ci < CI)[:, None] & (co < CO)[None, :])


def turn_round(weight: Tensor) -> Tensor:
    """Flip a weight ``(O, I, kD, kH, kW)``; return ``(I, O, kD, kH, kW)`` with channels last."""
    if not takes(weight):
        return weight.flip(2, 3, 4).transpose(0, 1).contiguous(memory_format=torch.channels_last_3d)
    return turn_by_triton(weight)


def turn_by_triton(weight: Tensor) -> Tensor:
    """Flip a weight with the Triton kernel, in one pass."""
    weight = in_layout(weight, channels_last=True)
    outputs, inputs, *sides = weight.shape
    shape = (inputs, outputs, *sides)
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last_3d)
    taps = out.shape[2:].numel()
    _turn_kernel[(taps, triton.cdiv(outputs, SIDE), triton.cdiv(inputs, SIDE))](
        weight, out, outputs, inputs, taps, SIDE=SIDE, num_warps=4
    )  # fmt: skip
    return out


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution, ``(B, O, D, H, W)`` with channels last, as an input's gradient.

    Parameters
    ----------
    slab, weight, bias, settings
        See ``choice.convolve``.
    """
    turned = replace(settings.turn(weight), transposed=True, output_padding=(0, 0, 0))
    return in_layout(depth_chunks.convolve(slab, turn_round(weight), bias, turned.arguments), channels_last=True)
