"""Cases that compare our convolution kernels with float64: the first of each in the interpreter, all on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from kernels import DEVICE
from torch import Tensor

from volseg.device.convolution import depthwise, few_channels, few_in, few_out, few_taps, many_taps, one_voxel
from volseg.device.convolution.settings import Settings

LAST = torch.channels_last_3d
ONES, ZEROS = (1, 1, 1), (0, 0, 0)


@dataclass(frozen=True)
class Case:
    """A convolution; ``voxels`` are those of a group of the kernel for many taps."""

    shape: tuple[int, ...]
    weight: tuple[int, ...]
    padding: tuple[int, ...] = ZEROS
    bias: bool = False
    last: bool = True
    voxels: int = 1
    stride: tuple[int, ...] = ONES
    dilation: tuple[int, ...] = ONES
    transposed: bool = False
    output_padding: tuple[int, ...] = ZEROS

    @property
    def settings(self) -> Settings:
        """Arguments of ``torch.ops.aten.convolution``."""
        groups = 1 if self.weight[1] == self.shape[1] else self.shape[1]
        return Settings(self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups)


class Given(NamedTuple):
    """Tensors of a case, the output's gradient too."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor
    case: Case


class Own(NamedTuple):
    """A module's functions, its kernels, and its cases; so many of them are small."""

    kernels: Sequence[str]
    small: int
    cases: Sequence[Case]
    forward: Callable[[Given], Tensor] | None = None
    of_input: Callable[[Given], Tensor | None] | None = None
    of_weight: Callable[[Given], Tensor | None] | None = None
    of_bias: Callable[[Given], Tensor | None] | None = None


def differentiate_head(given: Given, needs_input: bool) -> Sequence[Tensor | None]:
    """Return all gradients by the one kernel for them, which takes few classes."""
    if given.weight.shape[0] > one_voxel.MOST_CLASSES:
        return [None] * 3
    return one_voxel.backward(given.gradient, given.x, given.weight, needs_input=needs_input)


STRIDED = {"padding": ONES, "stride": (2, 2, 2)}

OWN: dict[str, Own] = {
    "few_taps": Own(
        ("_forward_kernel", "_weight_kernel"),
        4,
        [
            Case((2, 1, 5, 4, 6), (16, 1, 3, 3, 3), ONES, last=False),
            Case((1, 2, 4, 5, 3), (20, 2, 3, 3, 3), (0, 1, 2), last=False),
            Case((2, 1, 5, 4, 6), (20, 1, 3, 3, 3), ONES, bias=True, stride=(2, 2, 2)),
            Case((2, 1, 6, 5, 4), (20, 1, 3, 3, 3), (0, 1, 1), bias=True, stride=(1, 2, 3), last=False),
            Case((9, 1, 20, 28, 20), (32, 1, 3, 3, 3), ONES),
            Case((1, 2, 6, 5, 7), (16, 2, 3, 3, 3), (0, 1, 1)),
            Case((1, 1, 16, 7, 15), (20, 1, 5, 5, 5), (2, 2, 2), last=False),
            Case((2, 4, 4, 5, 5), (64, 4, 1, 3, 3), (0, 1, 1)),
        ],
        lambda g: few_taps.forward(g.x, g.weight, g.bias, g.case.settings),
        None,
        lambda g: few_taps.weight_gradient(g.gradient, g.x, g.weight, g.case.settings),
    ),
    "few_in": Own(
        ("_forward_kernel", "_weight_kernel"),
        4,
        [
            Case((2, 1, 5, 6, 9), (16, 1, 5, 5, 5), (2, 2, 2), bias=True),  # all lines of taps in one tile
            Case((1, 2, 7, 3, 6), (20, 2, 5, 3, 5), (0, 1, 2)),  # a slab with its halo
            Case((1, 4, 4, 9, 5), (33, 4, 3, 5, 4), (3, 2, 0), bias=True),  # two lines in a tile, and one left
            Case((1, 6, 3, 4, 7), (16, 6, 2, 5, 5), ONES),
            Case((9, 1, 20, 28, 20), (16, 1, 5, 5, 5), (2, 2, 2), bias=True),
            Case((1, 2, 6, 15, 131), (32, 2, 5, 5, 5), (0, 2, 2)),
            Case((2, 4, 9, 5, 30), (20, 4, 5, 4, 5), (4, 1, 0)),
            Case((1, 6, 7, 8, 9), (64, 6, 4, 4, 4), (2, 2, 1)),
        ],
        lambda g: few_in.forward(g.x, g.weight, g.bias, g.case.settings),
        None,
        lambda g: few_in.weight_gradient(g.gradient, g.x, g.weight, g.case.settings),
    ),
    "few_out": Own(
        ("_forward_kernel",),
        4,
        [
            Case((2, 16, 5, 6, 9), (3, 16, 5, 5, 5), (2, 2, 2), bias=True),
            Case((1, 32, 7, 3, 6), (2, 32, 5, 3, 5), (0, 1, 2)),  # a slab with its halo
            Case((1, 16, 2, 3, 40), (5, 16, 1, 3, 3), (0, 2, 1), bias=True),
            Case((3, 16, 3, 4, 1), (1, 16, 3, 1, 1), (1, 0, 0)),
            Case((2, 32, 20, 24, 40), (3, 32, 5, 5, 5), (2, 2, 2), bias=True),  # a V-Net's
            Case((1, 32, 9, 7, 131), (2, 32, 5, 5, 5), (0, 2, 2)),
            Case((3, 16, 7, 20, 3), (4, 16, 5, 5, 5), (2, 2, 2)),  # lines shorter than the kernel
            Case((2, 64, 3, 40, 30), (6, 64, 1, 3, 5), (0, 1, 2), bias=True),
            Case((1, 16, 8, 9, 33), (10, 16, 3, 3, 3), (2, 0, 1)),
            Case((2, 16, 30, 31, 32), (1, 16, 5, 5, 5), (4, 3, 2)),
        ],
        lambda g: few_out.forward(g.x, g.weight, g.bias, g.case.settings),
        lambda g: few_out.input_gradient(g.gradient, g.x, g.weight, g.case.settings),
        lambda g: few_out.weight_gradient(g.gradient, g.x, g.weight, g.case.settings),
    ),
    "few_channels": Own(
        ("_convolve_few_kernel",),
        3,
        [
            Case((2, 3, 4, 5, 6), (3, 3, 3, 3, 3), ONES, bias=True),
            Case((1, 2, 6, 5, 7), (4, 2, 3, 1, 2), (0, 0, 1)),  # a slab with its halo
            Case((1, 1, 4, 3, 5), (1, 1, 3, 3, 3), (2, 1, 1), bias=True),
            *(
                Case((2, inputs, 9, 17, 30), (outputs, inputs, 3, 3, 3), padding, bias=True)
                for inputs, outputs in ((3, 3), (4, 2), (1, 4))
                for padding in (ONES, (0, 2, 1))
            ),
        ],
        lambda g: few_channels.forward(g.x, g.weight, g.bias, g.case.settings),
        lambda g: few_channels.input_gradient(g.gradient, g.x, g.weight, g.case.settings),
    ),
    "one_voxel": Own(
        ("_forward_kernel", "_backward_kernel"),
        3,
        [
            Case((2, 20, 3, 5, 7), (3, 20, 1, 1, 1), bias=True),
            Case((2, 20, 3, 5, 7), (3, 20, 1, 1, 1), last=False),
            Case((2, 20, 3, 5, 7), (130, 20, 1, 1, 1), bias=True),  # more than a tile of classes
            *(
                Case((2, features, 12, 9, 17), (classes, features, 1, 1, 1), bias=True)
                for classes, features in ((17, 32), (118, 256), (300, 32))
            ),
            *(
                Case(shape, (classes, shape[1], 1, 1, 1), bias=last, last=last)
                for shape, classes in (
                    ((9, 32, 20, 28, 20), 3),
                    ((1, 3, 16, 7, 15), 3),  # a V-Net's head has as many features as classes
                    ((2, 40, 3, 5, 7), 1),
                    ((1, 256, 9, 9, 9), 16),
                )
                for last in (False, True)
            ),
        ],
        lambda g: one_voxel.forward(g.x, g.weight, g.bias),
        lambda g: differentiate_head(g, True)[0],
        lambda g: differentiate_head(g, False)[1],
        lambda g: differentiate_head(g, True)[2],
    ),
    "many_taps": Own(
        ("_weight_kernel",),
        2,
        [
            Case((2, 130, 4, 5, 3), (20, 130, 2, 1, 3), (1, 0, 2)),  # more than a tile of channels
            Case((2, 32, 2, 3, 4), (5, 32, 2, 1, 3), (1, 0, 1), voxels=4),
            Case((1, 128, 8, 8, 8), (128, 128, 5, 5, 5), (2, 2, 2)),
            Case((1, 128, 8, 6, 7), (160, 128, 5, 5, 5), (0, 2, 2)),
            Case((2, 144, 5, 7, 3), (136, 144, 5, 5, 5), (2, 1, 3)),
            Case((3, 128, 1, 4, 5), (128, 128, 5, 5, 5), (2, 2, 2)),
        ],
        of_weight=lambda g: many_taps.weight_gradient(g.gradient, g.x, g.weight, g.case.settings, g.case.voxels),
    ),
    "depthwise": Own(
        ("_depthwise_kernel", "_depthwise_weight_kernel"),
        9,
        [
            Case((2, 5, 5, 3, 6), (5, 1, 3, 3, 3), ONES, bias=True),
            Case((1, 40, 5, 4, 3), (40, 1, 3, 3, 3), **STRIDED),
            Case((1, 6, 2, 3, 4), (6, 1, 3, 3, 3), **STRIDED, transposed=True),
            Case((1, 3, 4, 5, 9), (3, 1, 1, 3, 3), (0, 0, 2)),
            Case((1, 3, 6, 5, 2), (3, 1, 2, 5, 1), (1, 2, 0), stride=(3, 1, 2), bias=True),
            Case((1, 2, 7, 4, 6), (2, 1, 3, 2, 3), (2, 0, 1), dilation=(2, 3, 1), stride=(1, 1, 2)),
            Case((1, 2, 1, 2, 3), (2, 1, 3, 1, 2), stride=(2, 4, 1), transposed=True, output_padding=(1, 3, 0)),
            Case((1, 2, 6, 3, 2), (2, 1, 2, 2, 1), (4, 1, 0), transposed=True, dilation=(4, 2, 1)),
            Case((1, 2, 2, 1, 2), (2, 1, 3, 7, 7), (1, 3, 3)),
            Case((2, 96, 20, 17, 33), (96, 1, 3, 3, 3), ONES, bias=True),
            Case((2, 96, 20, 17, 33), (96, 1, 3, 3, 3), **STRIDED),
            Case((2, 96, 10, 9, 7), (96, 1, 3, 3, 3), **STRIDED, transposed=True),
            Case((1, 64, 12, 13, 20), (64, 1, 5, 5, 5), (2, 2, 2)),
            Case((1, 33, 12, 13, 20), (33, 1, 5, 5, 5), (2, 2, 2), stride=(2, 2, 2)),
            Case((1, 32, 12, 13, 20), (32, 1, 7, 7, 7), (3, 3, 3)),
            Case((1, 32, 12, 13, 20), (32, 1, 7, 7, 7), (3, 3, 3), stride=(2, 2, 2)),
            Case((1, 32, 6, 5, 20), (32, 1, 7, 7, 7), (3, 3, 3), stride=(2, 2, 2), transposed=True),
        ],
        lambda g: depthwise.forward(g.x, g.weight, g.bias, g.case.settings),
        lambda g: depthwise.input_gradient(g.gradient, g.x, g.weight, g.case.settings),
        lambda g: depthwise.weight_gradient(g.gradient, g.x, g.weight, g.case.settings),
    ),
}
"""By module."""


def draw(shape: Sequence[int], dtype: torch.dtype, last: bool = True) -> Tensor:
    """Return random values; channels are last in a volume."""
    x = torch.randn(tuple(shape), device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if last and x.ndim == 5 else x


def check(name: str, case: Case, dtype: torch.dtype) -> None:
    """Compare each result of a module, also of planes of a larger volume, with that in float64."""
    own = OWN[name]
    x, weight = draw(case.shape, dtype, case.last), draw(case.weight, dtype) / 5
    bias = draw(case.weight[:1], dtype) if case.bias else None
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    arguments = case.settings.arguments
    output = torch.ops.aten.convolution(*exact, None if bias is None else bias.double(), *arguments)
    is_head = name == "one_voxel"
    gradient = draw(output.shape, dtype, case.last or not is_head)
    of_input, of_weight = torch.autograd.grad(output, exact, gradient.double())
    given = Given(x, weight, bias, gradient, case)
    placed = given._replace(x=place_in_room(x), gradient=place_in_room(gradient))
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    wanted = (
        (own.forward, output.detach(), 1),
        (own.of_input, of_input, 2 if is_head else 1),
        (own.of_weight, of_weight, 2),  # parts are added up
        (own.of_bias, gradient.double().sum((0, 2, 3, 4)), 2),
    )
    for compute, other, times in wanted:
        got = None if compute is None else compute(given)
        if compute is None or got is None:
            continue
        assert got.equal(compute(given)), "sums have an order"
        for one in (got, compute(placed)):
            assert (one.shape, one.dtype) == (other.shape, dtype)
            assert float((one.double() - other).abs().max()) <= times * rounding * float(other.abs().max()), case
            if one.ndim == 5 and compute is not own.of_weight and not is_head:
                assert one.is_contiguous(memory_format=LAST)


def place_in_room(slab: Tensor) -> Tensor:
    """Return a volume that lies in a larger one, with a plane before and behind."""
    batch, channels, planes, *within = slab.shape
    last = slab.stride(1) == 1
    whole = draw((batch, channels, planes + 2, *within), slab.dtype, last)
    return whole.narrow(2, 1, planes).copy_(slab)


def check_small(name: str, dtypes: Sequence[torch.dtype]) -> None:
    """Check what the interpreter computes in seconds; a program takes several tiles where a module lets it."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "few_out":
            patch.setattr(few_out, "PROGRAMS", 1)
        for dtype, case in product(dtypes, OWN[name].cases[: OWN[name].small]):
            check(name, case, dtype)


def list_large() -> list[Any]:
    """Return the cases for a GPU alone."""
    return [
        pytest.param(name, case, id=f"{name}-{number}")
        for name, own in OWN.items()
        for number, case in enumerate(own.cases[own.small :])
    ]
