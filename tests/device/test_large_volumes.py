# ruff: noqa: N803  (upper case: what Triton is compiled for)
"""Kernels on volumes of more than 2**31 elements, whose offsets overflow 32 bits.

Memory is promised by the system and not taken: the interpreter runs the first and the last programs of each launch, all
of whose accesses must lie within its tensors, and reach the last element of each large one.
"""

import mmap
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kernel_sanitizer import watching
from kernels import INTERPRETED
from torch import Tensor

from volseg.device import attention, broadcast_mul, gpus, layer_norm, layout, triton_tiles, upsample2x
from volseg.device.convolution import choice, depthwise, few_channels, few_taps, one_voxel
from volseg.device.convolution.settings import Settings
from volseg.device.norm import addition_passes, passes, statistics
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.errors import ParallelError
from volseg.losses.dice import passes as dice_passes

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="of Triton's interpreter: TRITON_INTERPRET=1"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory that is promised, and not taken"),
]

SIDES = 512, 512, 512
CHANNELS = 17
ONES, ZEROS = (1, 1, 1), (0, 0, 0)

NO_RESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``, which Python has from 3.13 on."""


def promise(shape: Sequence[int], dtype: torch.dtype = torch.float16, last: bool = False) -> Tensor:
    """Return zeros that take no memory until they are written."""
    lying = [shape[0], *shape[2:], shape[1]] if last else shape
    size = int(np.prod(lying)) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    flat = torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(lying)
    return flat.movedim(-1, 1) if last else flat


@pytest.fixture(autouse=True)
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve the allocations too, and let many programs share a volume, so that each does little."""
    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like

    def of(shape: Sequence[int], dtype: torch.dtype, last: bool) -> Tensor | None:
        return promise(tuple(shape), dtype, last) if int(np.prod(shape)) > 2**28 else None

    def is_last(tensor: Tensor) -> bool:
        return tensor.ndim == 5 and tensor.stride(1) == 1

    def make(*shape, dtype=torch.float32, device=None, memory_format=None):
        shape = shape[0] if len(shape) == 1 else shape
        found = of(shape, dtype, memory_format is torch.channels_last_3d)
        return empty(shape, dtype=dtype) if found is None else found

    def make_like(like, dtype=None, memory_format=torch.preserve_format):
        last = is_last(like) if memory_format is torch.preserve_format else memory_format is torch.channels_last_3d
        found = of(like.shape, dtype or like.dtype, last)
        return empty_like(like, dtype=dtype, memory_format=memory_format) if found is None else found

    def make_new(self, shape, *, dtype=None, device=None):
        found = of(shape, dtype or self.dtype, False)
        return new_empty(self, shape, dtype=dtype or self.dtype) if found is None else found

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch, "empty_like", make_like)
    monkeypatch.setattr(Tensor, "new_empty", make_new)
    monkeypatch.setattr(gpus, "count_processors", lambda device: 2**17)


def take_ends(grid: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the programs at the corners of a grid."""
    corners = [sorted({0, size - 1}) for size in grid]
    return [(x, y, z) for x in corners[0] for y in corners[1] for z in corners[2]]


def pairs(count: int) -> list[Tensor]:
    return [torch.ones(1, CHANNELS) for _ in range(count)]


def a_norm(last: bool) -> None:
    x = promise((1, CHANNELS, *SIDES), last=last)
    passes.affine(Term(x, None, *pairs(2), Activation("elu", 1.0)))
    passes.gradient_sums(x, Term(x, *pairs(3)))
    passes.gradient_input(x, Term(x, None, *pairs(2)), *pairs(2))
    statistics.compute_moments_of_parts(x)


def a_sum(last: bool) -> None:
    x = promise((1, CHANNELS, *SIDES), last=last)
    first, second = Term(x, *pairs(3)), Term(x, *pairs(3))
    addition_passes.add(first, second, IDENTITY)
    addition_passes.add_sums(x, first, second, IDENTITY)
    addition_passes.add_gradients(x, first, second, [(pairs(1)[0],) * 2] * 2, IDENTITY)


def a_copy(last: bool) -> None:
    layout.copy_by_triton(promise((1, CHANNELS, *SIDES), last=last), promise((1, CHANNELS, *SIDES), last=not last))


def twice_the_size(last: bool) -> None:
    for linear in (True, False):
        part = upsample2x.DoubledPart(256, 0, (0, 512))
        large = upsample2x.double(promise((1, CHANNELS, 256, 256, 256), last=last), part, linear)
        upsample2x.gather_gradient(large, (1, CHANNELS, 256, 256, 256), part, linear)


def a_first_convolution(last: bool) -> None:
    del last
    x, weight = promise((1, 1, *SIDES), last=True), torch.zeros(24, 1, 3, 3, 3, dtype=torch.float16)
    settings = Settings((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    few_taps.weight_gradient(few_taps.forward(x, weight, None, settings), x, weight, settings)


def a_last_convolution(last: bool) -> None:
    x, weight = promise((1, 4, 1024, 1024, 513), last=last), torch.zeros(4, 4, 3, 3, 3, dtype=torch.float16)
    settings = Settings((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    few_channels.input_gradient(few_channels.forward(x, weight, None, settings), x, weight, settings)


def a_gate(last: bool) -> None:
    x, gate = promise((1, CHANNELS, *SIDES), last=last), promise((1, 1, *SIDES))
    broadcast_mul.differentiate(broadcast_mul.multiply(x, gate), x, gate)


def a_head(last: bool) -> None:
    x, weight = promise((1, CHANNELS, *SIDES), last=last), torch.zeros(16, CHANNELS, 1, 1, 1, dtype=torch.float16)
    one_voxel.backward(one_voxel.forward(x, weight, None), x, weight, needs_input=True)
    many = torch.zeros(40, CHANNELS, 1, 1, 1, dtype=torch.float16)
    one_voxel.forward(x, many, None)


def an_attention(last: bool) -> None:
    shape = (2**16, 64, 16, 64) if last else (2**16, 16, 64, 64)
    query, key, value = (promise(shape).transpose(1, 2) if last else promise(shape) for _ in range(3))
    term = attention.Addend(promise((2**20, 64, 64), torch.float32), 1, 2**20)
    out, logs = attention.attend(query, key, value, [term], 1.0)
    attention.differentiate(query, query, key, value, out, logs, [term], 1.0, [True])


def lines_normed(last: bool) -> None:
    dtype = torch.float16 if last else torch.float32
    lines, weight = promise((2**27, CHANNELS), dtype), torch.ones(CHANNELS)
    out, means, rstds = layer_norm.normalize_lines(lines, weight, weight, 1e-5, torch.float32)
    layer_norm.differentiate_lines(out, lines, weight, means, rstds)


def a_depthwise_convolution(last: bool) -> None:
    del last
    x, weight = promise((1, CHANNELS, *SIDES), last=True), torch.zeros(CHANNELS, 1, 2, 1, 2, dtype=torch.float16)
    settings = Settings((1, 1, 2), ZEROS, ONES, False, ZEROS, CHANNELS)
    out = depthwise.forward(x, weight, None, settings)
    depthwise.input_gradient(out, x, weight, settings)
    depthwise.weight_gradient(out, x, weight, settings)


def a_loss(last: bool) -> None:
    x, label = promise((1, CHANNELS, *SIDES), last=last), promise((1, 1, *SIDES), torch.uint8)
    dice_passes.sums(x, label, squared=True)
    dice_passes.gradient(x, label, torch.zeros(4, 1, CHANNELS), squared=True)


CASES: list[Callable[[bool], None]] = [
    *(a_norm, a_sum, a_copy, twice_the_size, a_gate, an_attention, lines_normed),
    *(a_first_convolution, a_depthwise_convolution, a_last_convolution, a_head, a_loss),
]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_the_last_element_of_a_large_volume_is_reached(case: Callable[[bool], None], last: bool) -> None:
    with watching(only=take_ends) as launches:
        case(last)
    assert launches
    assert [(launch.name, launch.missed) for launch in launches if launch.missed] == []


def test_more_voxels_than_are_counted_are_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of elements have 64 bits, the number of a voxel has 32."""
    monkeypatch.setattr(gpus, "on_gpu", lambda tensor: True)
    side = 1024
    for x in (promise((1, 1, side, side, side)), promise((2, 3, side, side, side), last=True)):
        assert triton_tiles.takes(x)
        assert not triton_tiles.takes(promise((*x.shape[:2], side, side, side + 1)))
    head, plain = torch.zeros(2, 1, 1, 1, 1, dtype=torch.float16), Settings(ONES, ZEROS, ONES, False, ZEROS, 1)
    for planes, taken in ((side, True), (side + 1, False)):
        assert choice.is_one_voxel(promise((1, 1, planes, side, side)), head, plain) is taken
    part = upsample2x.DoubledPart(side, 0, (0, 2 * side))
    with pytest.raises(
        ParallelError, match=r"supports at most 1073741824 voxels per channel, but the result of \(1, 1, "
    ):
        upsample2x.double(promise((1, 1, side, side, side)), part, linear=True)


def test_a_place_that_is_counted_in_32_bits_is_found() -> None:
    with watching(only=take_ends), pytest.raises(Exception, match="outside of all tensors"):
        thirty_two_bits()


def thirty_two_bits() -> None:
    from volseg.device.triton_kernels import kernel, tl

    @kernel()
    def narrow_kernel(x, C, V, BV: tl.constexpr):
        v = tl.program_id(0) * BV + tl.arange(0, BV)
        tl.store(x + tl.program_id(1) * V + v, 0.0 * v, mask=v < V)

    x = promise((CHANNELS, 2**27))
    narrow_kernel[(2**27 // 64, CHANNELS)](x, CHANNELS, 2**27, BV=64)
