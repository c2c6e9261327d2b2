"""Convolutions as networks of this field have them: V-Nets, U-Nets, DynUNets, SegResNets, SwinUNETRs, level by level.

Per choice of channels and kernel a few numbers of voxels, for the speed changes most with these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from rate_passes import LAYOUTS, Layout, Prepared, RateCase, count_run, draw, name_layout
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.convolution.settings import Settings

Convolutions = Sequence[tuple[int, int, tuple[int, ...]]]
"""Channels in, channels out, and sides of the volumes: of the smaller one where the convolution is strided."""

SAME: dict[int, Convolutions] = {
    3: (
        (1, 16, (64, 128)), (1, 32, (64, 128)), (4, 32, (64, 128)), (8, 8, (64, 128)), (16, 16, (32, 64, 128)),
        (32, 32, (16, 32, 64, 128, 160)), (48, 48, (48, 96)), (64, 64, (8, 16, 32, 64, 128)), (96, 96, (24, 48)),
        (128, 128, (8, 16, 32, 64)), (192, 192, (12, 24)), (256, 256, (4, 8, 16, 32)), (320, 320, (4, 8, 16)),
        (384, 384, (6, 12)), (512, 512, (4, 8, 16)), (768, 768, (3, 6)), (64, 32, (64, 128)), (128, 64, (32, 64)),
        (256, 128, (16, 32)), (512, 256, (8, 16)), (96, 48, (48, 96)), (12, 12, (64, 128)), (24, 24, (32, 64, 128)),
        (40, 40, (32, 64)), (80, 80, (16, 32)), (160, 160, (8, 16, 32)), (16, 32, (64, 128)), (32, 64, (32, 64)),
        (64, 128, (16, 32)), (128, 256, (8, 16)), (256, 320, (4, 8)), (320, 512, (4, 8)), (640, 320, (4, 8)),
        (2, 2, (64, 128)), (32, 3, (64, 128)),
    ),
    5: (
        (1, 16, (64, 128)), (16, 16, (64, 128)), (32, 32, (32, 64, 128)), (64, 64, (16, 32, 64)),
        (128, 128, (8, 16, 32)), (256, 256, (4, 8, 16)), (32, 2, (64, 128)), (24, 24, (32, 64)), (48, 48, (16, 32, 64)),
        (96, 96, (8, 16, 32)), (64, 32, (32, 64)),
    ),
    1: (
        (2, 2, (64, 128)), (16, 3, (64, 128)), (32, 3, (64, 128)), (64, 32, (32, 64)), (128, 64, (16, 32)),
        (256, 128, (8, 16)), (320, 3, (8,)), (48, 14, (96,)), (16, 16, (64, 128)), (32, 32, (32, 64)),
        (32, 64, (32, 64)), (64, 64, (16, 32)), (64, 128, (16, 32)), (128, 128, (8, 16)), (256, 256, (8,)),
    ),
}  # fmt: skip
"""By the side of their kernels."""

STRIDED: dict[int, Convolutions] = {
    3: (
        (1, 16, (32, 64)), (16, 32, (32, 64)), (32, 64, (16, 32, 64)), (64, 128, (8, 16, 32)), (128, 256, (4, 8, 16)),
        (256, 320, (4, 8)),
    ),
    2: (
        (16, 32, (32, 64)), (32, 64, (16, 32)), (64, 128, (8, 16, 32)), (128, 256, (4, 8)), (1, 48, (48,)),
    ),
    1: (
        (32, 64, (16, 32)), (128, 256, (8,)),
    ),
}  # fmt: skip

TRANSPOSED: dict[int, Convolutions] = {
    2: (
        (64, 32, (16, 32, 64)), (64, 16, (64,)), (128, 32, (32,)), (128, 64, (8, 16, 32)), (256, 64, (16,)),
        (256, 128, (4, 8, 16)), (320, 256, (4, 8)),
    ),
    3: (
        (32, 2, (32, 64)), (64, 16, (32, 64)), (128, 32, (16, 32)), (256, 64, (8, 16)),
    ),
}  # fmt: skip

OURS: dict[int, Convolutions] = {
    3: (
        (1, 16, (64, 128)), (1, 32, (32, 64, 128)), (4, 16, (64, 128)), (32, 3, (64, 128)),
    ),
    5: (
        (1, 16, (64, 128)), (1, 32, (64, 128)), (32, 2, (64, 128)), (32, 3, (64, 128)), (32, 32, (32, 64, 128)),
        (64, 64, (32, 64)), (128, 128, (16, 32, 48)), (256, 256, (8, 16, 32)),
    ),
    1: (
        (2, 2, (64, 128)), (32, 3, (16, 64, 128)), (256, 3, (16, 32)),
    ),
}  # fmt: skip
"""Convolutions that kernels of our own compute, without strides."""


BATCHES: Convolutions = ((16, 16, (64,)), (32, 32, (32,)), (64, 64, (16, 32)), (128, 128, (8,)), (256, 256, (4, 8)))
"""As wide, of several samples, on which cuDNN's choices depend too."""

SAMPLES = (8, 32)

FORWARD = {
    "few channels": "convolution.few_channels._convolve_few_kernel",
    "few channels in": "convolution.few_in._forward_kernel",
    "few channels out": "convolution.few_out._forward_kernel",
    "few taps": "convolution.few_taps._forward_kernel",
    "one voxel": "convolution.one_voxel._forward_kernel",
    "many taps": "aten.convolution, turned round",
}
"""What a trace calls them: the kernel, or how torch is asked. In another form than its own torch is timed by itself."""

INPUT_GRADIENT = {
    "few channels": "convolution.few_channels._convolve_few_kernel",
    "few channels out": "convolution.few_in._forward_kernel",
}

WEIGHT_GRADIENT = {
    "few channels in": "convolution.few_in._weight_kernel",
    "few channels out": "convolution.few_in._weight_kernel",
    "few taps": "convolution.few_taps._weight_kernel",
    "many taps": "convolution.many_taps._weight_kernel",
}


@dataclass(frozen=True)
class TimedConvolution:
    """A convolution to be timed, forward and both ways backward."""

    channels: tuple[int, int]
    kernel: int
    side: int
    stride: int
    transposed: bool
    layout: Layout
    ours: bool
    samples: int = 1

    @property
    def name(self) -> str:
        """Short, for a report."""
        (came, go) = self.channels
        kind = "ours" if self.ours else "transposed" if self.transposed else f"stride {self.stride}"
        sides = f"{self.kernel}^3, {self.side}^3"
        many = f"{self.samples} x " if self.samples > 1 else ""
        return f"convolution {came} to {go}, {many}{sides}, {kind}, {name_layout(self.layout)}"

    @property
    def size(self) -> int:
        """Bytes of input, output and their gradients."""
        fine = (self.side * self.stride) ** 3
        coarse = self.side**3
        (came, go) = self.channels
        voxels = coarse * came + fine * go if self.transposed else fine * came + coarse * go
        return 2 * self.layout[0].itemsize * voxels * self.samples

    def prepare(self, device: torch.device) -> list[Prepared]:
        """Make its tensors, and the calls."""
        (came, go), (dtype, last) = self.channels, self.layout
        side = self.side if self.transposed else self.side * self.stride
        slab = draw(device, (self.samples, came, *[side] * 3), dtype, last)
        ends = (came, go) if self.transposed else (go, came)
        weight = draw(device, (*ends, *[self.kernel] * 3), dtype, last)
        padding = (self.kernel - 1) // 2 if self.kernel % 2 else 0
        output_padding = 1 if self.transposed and self.kernel % 2 else 0
        settings = Settings((self.stride,) * 3, (padding,) * 3, (1,) * 3, self.transposed, (output_padding,) * 3, 1)
        out = torch.ops.aten.convolution(slab, weight, None, *settings.arguments)
        gradient = draw(device, out.shape, dtype, last)
        flops = 2 * out.numel() * came * self.kernel**3
        if self.transposed:
            flops = 2 * slab.numel() * go * self.kernel**3
        if self.ours:
            return list(_list_ours(slab, weight, settings, gradient, flops))
        backward = torch.ops.aten.convolution_backward
        given = (gradient, slab, weight, None, *settings.arguments)

        def of_input() -> Any:
            return backward(*given, [True, False, False])

        def of_weight() -> Any:
            return backward(*given, [False, True, False])

        name = "aten.convolution_backward"
        return [
            (
                count_run("aten.convolution", dtype, (slab, weight, out), last, flops),
                lambda: torch.ops.aten.convolution(slab, weight, None, *settings.arguments),
            ),
            (count_run(name, dtype, (gradient, slab, weight, slab), last, flops), of_input),
            (count_run(name, dtype, (gradient, slab, weight, weight), last, flops), of_weight),
        ]


def _list_ours(slab: Tensor, weight: Tensor, settings: Settings, gradient: Tensor, flops: int) -> Iterator[Prepared]:
    """List what ``device.convolution.choice`` computes by kernels of our own."""
    dtype = slab.dtype
    call = choice.ConvolutionCall(slab, weight, None, settings)
    if (forward := choice.choose("forward", call)) is not None and forward.name in FORWARD:
        yield count_run(FORWARD[forward.name], dtype, (slab, weight, gradient), True, flops), forward.compute
    if choice.is_one_voxel(gradient, weight, settings):
        gradient = gradient.contiguous()  # as a loss gives it
        yield (
            count_run(
                "convolution.one_voxel._backward_kernel", dtype, (gradient, slab, weight, slab, weight), True, 2 * flops
            ),
            lambda: choice.differentiate(gradient, slab, weight, None, settings, True, [True, True, False]),
        )
        return
    behind = call._replace(gradient=gradient)
    if (inward := choice.choose("input gradient", behind)) is not None and inward.name in INPUT_GRADIENT:
        run = count_run(INPUT_GRADIENT[inward.name], dtype, (gradient, weight.transpose(0, 1), slab), True, flops)
        yield run, inward.compute
    if (backward := choice.choose("weight gradient", behind)) is not None:
        run = count_run(WEIGHT_GRADIENT[backward.name], dtype, (gradient, slab, weight, weight), True, flops)
        yield run, backward.compute


def list_convolutions() -> Iterator[RateCase]:
    """List all of them."""
    kinds = ((SAME, 1, False, False), (STRIDED, 2, False, False), (TRANSPOSED, 2, True, False), (OURS, 1, False, True))
    for table, stride, transposed, ours in kinds:
        for kernel, rows in table.items():
            for came, go, sides in rows:
                # In float16 the matrix units do what they do in bfloat16: the middle size tells how far that holds.
                for layout in LAYOUTS[:1] if ours else LAYOUTS:
                    chosen = sides if layout[0] is not torch.float16 else sides[len(sides) // 2 :][:1]
                    for side in chosen:
                        case = TimedConvolution((came, go), kernel, side, stride, transposed, layout, ours)
                        yield RateCase(case.name, case.size, case.prepare)
    for came, go, sides in BATCHES:
        for kernel, side, samples, layout in product((3, 5), sides, SAMPLES, LAYOUTS[:3]):
            case = TimedConvolution((came, go), kernel, side, 1, False, layout, False, samples)
            yield RateCase(case.name, case.size, case.prepare)
