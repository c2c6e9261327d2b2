"""Other forms of convolutions against torch's, in float64 on the CPU: groups, zero channels, flipped weights."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from volseg.device.convolution import choice, depth_chunks, flipped_weights, padded, space_to_channels
from volseg.device.convolution.choice import ConvolutionCall
from volseg.device.convolution.depth_chunks import convolve, differentiate
from volseg.device.convolution.forms import Direction, Form, Groups, ZeroChannels
from volseg.device.convolution.settings import Settings
from volseg.device.gpus import get_tensor_device

LAST = torch.channels_last_3d
SETTINGS = Settings((1, 1, 1), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)
PADDED = replace(SETTINGS, padding=(1, 1, 1))

GROUPED = {
    "3": ((3, 3, 3), (1, 1, 1), (1, 1, 1)),
    "5": ((5, 5, 5), (2, 2, 2), (1, 1, 1)),
    "7": ((1, 1, 7), (0, 0, 3), (1, 1, 1)),
    "flat": ((1, 3, 3), (0, 1, 1), (1, 1, 1)),
    "one tap along W": ((3, 3, 1), (1, 1, 0), (1, 1, 1)),
    "uneven": ((5, 3, 3), (2, 1, 1), (1, 1, 1)),
    "dilation 2": ((3, 3, 3), (2, 2, 2), (2, 2, 2)),
    "dilation 3 along W": ((3, 3, 5), (1, 1, 6), (1, 1, 3)),
    "dilation 4": ((3, 3, 3), (4, 4, 4), (4, 4, 4)),
    "planes of a halo": ((3, 3, 3), (0, 1, 1), (1, 1, 1)),
    "planes around a gradient": ((3, 3, 3), (2, 1, 1), (1, 1, 1)),
    "even along D and H": ((2, 4, 3), (1, 0, 1), (1, 1, 1)),
}
KERNELS = GROUPED | {
    "no padding": ((3, 3, 3), (0, 0, 0), (1, 1, 1)),
    "as much padding as the kernel reaches": ((3, 2, 4), (2, 1, 3), (1, 1, 1)),
    "uneven along W": ((1, 2, 5), (0, 1, 2), (1, 1, 1)),
}
FORMS: list[Form] = [Groups(2), Groups(4), Groups(8)]
FORMS += [ZeroChannels(inputs, outputs) for inputs in (False, True) for outputs in (False, True)]


def draw(*shape: int) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    return x.contiguous(memory_format=LAST) if x.ndim == 5 else x


def make_call(settings: Settings, taps: tuple[int, ...], channels: tuple[int, int] = (3, 5)) -> ConvolutionCall:
    """Return a convolution with a bias, and the gradient of its output."""
    call = ConvolutionCall(draw(2, channels[0], 9, 10, 16), draw(*channels[::-1], *taps), draw(channels[1]), settings)
    return call._replace(gradient=draw(*compute_plainly(call)["forward"].shape))


def compute_plainly(call: ConvolutionCall) -> dict[Direction, Tensor]:
    arguments = call.settings.arguments
    found: dict[Direction, Tensor] = {
        "forward": torch.ops.aten.convolution(call.slab, call.weight, call.bias, *arguments)
    }
    if call.gradient is not None:
        given = call.gradient, call.slab, call.weight, None, *arguments, [True, True, False]
        found["input gradient"], found["weight gradient"], _ = torch.ops.aten.convolution_backward(*given)
    return found


def list_cases() -> Iterator[Any]:
    for form in FORMS:
        for name, (taps, padding, dilation) in KERNELS.items():
            settings = replace(SETTINGS, padding=padding, dilation=dilation)
            if name in GROUPED or isinstance(form, ZeroChannels):
                yield pytest.param(form, settings, taps, (3, 5), id=f"{form}, {name}")
    for form in FORMS[-3:]:
        for channels in ((32, 5), (3, 32)):
            yield pytest.param(form, PADDED, (3, 3, 3), channels, id=f"{form}, {channels}")
        yield pytest.param(form, replace(PADDED, stride=(2, 2, 2)), (3, 3, 3), (3, 5), id=f"{form}, strides")


@pytest.mark.parametrize(("form", "settings", "taps", "channels"), [*list_cases()])
def test_every_direction_equals_torchs(form, settings, taps, channels):
    call = make_call(settings, taps, channels)
    for layout in (LAST, torch.contiguous_format):
        laid = call._replace(weight=call.weight.contiguous(memory_format=layout))
        for direction, wanted in compute_plainly(laid).items():
            assert isinstance(form, ZeroChannels) or choice._can_take(form, direction, laid)
            found = choice.compute_in_form(form, direction, laid)
            torch.testing.assert_close(found, wanted)
            assert not found._is_view() or direction == "weight gradient", "autograd refuses changes of views in place"
            if not isinstance(form, ZeroChannels):
                assert found.is_contiguous(memory_format=LAST)
                assert found.untyped_storage().nbytes() == found.nbytes


def test_channels_are_filled_up_to_multiples() -> None:
    assert [padded.fill_up(channels) for channels in (1, 24, 32, 48, 64, 65)] == [32, 32, 32, 64, 64, 96]


@pytest.mark.parametrize("name", KERNELS)
def test_a_convolution_with_flipped_weights_equals_torchs(name: str) -> None:
    taps, padding, dilation = KERNELS[name]
    call = make_call(replace(SETTINGS, padding=padding, dilation=dilation), taps)
    found = flipped_weights.forward(call.slab, call.weight, call.bias, call.settings)
    torch.testing.assert_close(found, compute_plainly(call)["forward"])
    assert found.is_contiguous(memory_format=LAST)
    assert not found._is_view(), "autograd refuses changes of views in place"


def test_slabs_are_grouped_where_they_lie() -> None:
    slab, weight = draw(2, 3, 12, 14, 8)[:, :, 3:10, 2:9], draw(4, 3, 3, 3, 3)
    assert not slab.is_contiguous(memory_format=LAST)
    assert space_to_channels.can_group(slab, weight, PADDED, 2)
    groups = space_to_channels.view_groups(slab, 2)
    assert groups.data_ptr() == slab.data_ptr()
    for voxel in range(2):
        assert groups[:, 3 * voxel : 3 * voxel + 3].equal(slab[..., voxel::2])
    call = ConvolutionCall(slab, weight, None, PADDED, draw(2, 4, 7, 7, 8))
    for direction, wanted in compute_plainly(call).items():
        torch.testing.assert_close(choice.compute_in_form(Groups(2), direction, call), wanted)


def test_what_is_not_grouped() -> None:
    weight = draw(4, 3, 3, 3, 3)

    def fits(slab: Tensor, own: Tensor = weight, settings: Settings = PADDED, voxels: int = 2) -> bool:
        return space_to_channels.can_group(slab, own, settings, voxels)

    slab = draw(1, 3, 4, 4, 8)
    assert fits(slab)
    assert fits(slab, voxels=4)
    assert not fits(slab[..., :7].contiguous(memory_format=LAST))
    assert not fits(slab[..., :6].contiguous(memory_format=LAST), voxels=4)
    assert fits(slab[..., :6]), "rows need not follow each other"
    assert not fits(slab[..., ::2])
    assert not fits(slab.contiguous())
    assert not fits(slab[:, :2], draw(4, 2, 3, 3, 3))
    assert not fits(slab[:, :, :0])
    assert not fits(slab[0])
    refused = {"stride": [(1, 1, 2), (2, 1, 1)], "padding": [(1, 1, 0), (1, 1, 2)], "dilation": [(1, 1, 2)]}
    for name, values in (refused | {"groups": [3], "transposed": [True]}).items():
        for value in values:
            assert not fits(slab, settings=replace(PADDED, **{name: value})), (name, value)
    assert not fits(slab, draw(4, 3, 3, 3, 2))


def test_large_volumes_go_in_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    cut = depth_chunks._cut_stacks

    def note(slab: Tensor, weight: Tensor, arguments: Any, limit: int) -> Any:
        asked.append(len(found := cut(slab, weight, arguments, 2000)))
        return found

    call = make_call(PADDED, (3, 3, 3))
    monkeypatch.setattr(depth_chunks, "_cut_stacks", note)
    for form in (Groups(2), ZeroChannels(True, True)):
        for direction, wanted in compute_plainly(call).items():
            torch.testing.assert_close(choice.compute_in_form(form, direction, call), wanted)
    assert min(asked) > 1


@pytest.mark.parametrize("voxels", [2, 4])
@pytest.mark.parametrize("name", ["3", "5", "dilation 2"])
def test_half_precision_is_as_near_to_float64_as_torchs(name: str, voxels: int) -> None:
    torch.manual_seed(0)
    taps, padding, dilation = GROUPED[name]
    exact = make_call(replace(SETTINGS, padding=padding, dilation=dilation), taps)
    half = ConvolutionCall(*(v.bfloat16() if isinstance(v, Tensor) else v for v in exact))
    exact = ConvolutionCall(*(v.double() if isinstance(v, Tensor) else v for v in half))
    wanted, plain = compute_plainly(exact), compute_plainly(half)
    for direction, other in wanted.items():
        ours = choice.compute_in_form(Groups(voxels), direction, half)
        errors = [float((value.double() - other).norm() / other.norm()) for value in (ours, plain[direction])]
        # Parts of a weight's gradient are rounded before they are added, and the sum again: twice the variance.
        assert errors[0] < (2 if direction == "weight gradient" else 1.1) * errors[1], direction


def test_folding_adds_up_in_float32() -> None:
    """One and three parts of half a unit in the last place, which bfloat16 would lose."""
    settings, weight = replace(SETTINGS, padding=(0, 0, 1)), torch.zeros(1, 1, 1, 1, 3, dtype=torch.bfloat16)
    wide = torch.zeros(4, 4, 1, 1, 3, dtype=torch.bfloat16)
    for voxel, value in enumerate((1.0, 2**-8, 2**-8, 2**-8)):
        wide[voxel, voxel, 0, 0, 1] = value
    found = space_to_channels._fold(wide, weight, settings, 4)
    assert found[0, 0, 0, 0].tolist() == [0, 1 + 2 * 2**-7, 0]  # 1 + 3/256 lies between; the even one is taken


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_reaches_further_along_w_and_is_never_hidden(value: float) -> None:
    call = ConvolutionCall(draw(1, 2, 5, 5, 16), draw(3, 2, 3, 3, 3), None, PADDED)
    call.slab[0, 1, 2, 2, 6] = value
    plain = compute_plainly(call)["forward"]
    zeros = choice.compute_in_form(ZeroChannels(True, True), "forward", call)
    torch.testing.assert_close(zeros, plain, equal_nan=True)
    for voxels, reached in ((2, range(4, 10)), (4, range(12))):
        found = choice.compute_in_form(Groups(voxels), "forward", call)
        wrong = ~found.isfinite()
        assert wrong[~plain.isfinite()].all(), "all that torch shows"
        assert wrong[0, :, 1:4, 1:4].all((0, 1, 2)).nonzero().flatten().tolist() == list(reached)
        assert not wrong[:, :, [0, 4]].any(), "along W alone"
        assert not wrong[:, :, :, [0, 4]].any()
        # Where torch's is infinite, so is ours; beyond the kernel's reach it is zero times infinity.
        assert found[..., 5:8].isinf().equal(plain[..., 5:8].isinf())
        assert found[wrong & plain.isfinite()].isnan().all()
        torch.testing.assert_close(found[~wrong], plain[~wrong])


def test_weight_gradients_are_finite_where_torchs_are() -> None:
    call = make_call(PADDED, (3, 3, 3))
    call.slab[0, 0, 0, 0, 0] = math.inf  # which no tap behind the middle reaches the first plane, row or column from
    wanted = compute_plainly(call)["weight gradient"]
    for voxels in (2, 4):
        found = choice.compute_in_form(Groups(voxels), "weight gradient", call)
        assert found.isfinite().equal(wanted.isfinite())
        assert found.isinf().equal(wanted.isinf())
    assert wanted.isfinite().any()


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, True), (False, True, True), (False, False, True)])
def test_choice_computes_with_them(monkeypatch: pytest.MonkeyPatch, needed: tuple[bool, ...]) -> None:
    taken: list[str] = []

    def find(direction: str, call: choice.ConvolutionCall) -> list[Groups]:
        assert get_tensor_device(call.slab).type == "cpu"
        taken.append(direction)
        return [Groups(2)]

    monkeypatch.setattr(choice, "_list_forms", find)
    slab, weight, bias, settings, gradient = make_call(PADDED, (3, 3, 3))
    found = choice.convolve(slab, weight, bias, settings, channels_last=True)
    torch.testing.assert_close(found, torch.ops.aten.convolution(slab, weight, bias, *settings.arguments))
    assert not choice.adds_bias(slab, weight, settings, channels_last=True), "cuDNN's kernel does not"
    each = choice.differentiate(gradient, slab, weight, [5], settings, True, needed)
    wanted = torch.ops.aten.convolution_backward(gradient, slab, weight, [5], *settings.arguments, [True] * 3)
    for value, other, asked in zip(each, wanted, needed, strict=True):
        assert (value is not None) == asked
        if value is not None:
            torch.testing.assert_close(value, other)
    assert ("input gradient" in taken, "weight gradient" in taken) == needed[:2]


# A convolution of a stack of planes at a time equals the whole one.


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 2, 1), (1, 1, 0, 1), (3, 1, 2, 2), (1, 1, 2, 1), (3, 2, 6, 1)],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_stacks_equal_the_whole(batch, kernel, stride, padding, dilation, layout):
    arguments = [[stride] * 3, [padding] * 3, [dilation] * 3, False, [0] * 3, 1]
    slab = torch.randn(batch, 4, 23, 6, 7, dtype=torch.float64).to(memory_format=layout)
    weight = torch.randn(6, 4, *[kernel] * 3, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    expected = torch.ops.aten.convolution(slab, weight, bias, *arguments)
    for limit in (slab.numel() // 5, slab.numel() // 2, 1):
        torch.testing.assert_close(convolve(slab, weight, bias, arguments, limit), expected)
    gradient = torch.randn_like(expected)
    mask = [True, True, True]
    derived = torch.ops.aten.convolution_backward(gradient, slab, weight, [6], *arguments, mask)
    for limit in (slab.numel() // 5, 1):
        found = differentiate(gradient, slab, weight, [6], arguments, mask, limit)
        torch.testing.assert_close(list(found), list(derived))
