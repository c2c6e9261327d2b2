"""Convolutions over pairs and fours of voxels against torch's own, in float64 on the CPU, and in half precision."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from volseg.device.convolution import choice, depth_chunks, rules, space_to_channels
from volseg.device.convolution.forms import Groups
from volseg.device.convolution.settings import Settings
from volseg.device.gpus import get_tensor_device

LAST = torch.channels_last_3d
SETTINGS = Settings((1, 1, 1), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)

KERNELS = {
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


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).contiguous(memory_format=LAST)


def set_up(name: str, samples: int = 2, **more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Settings]:
    """Return a slab, a weight, a bias, the gradient of the output and settings."""
    kernel, padding, dilation = KERNELS[name]
    settings = replace(SETTINGS, padding=padding, dilation=dilation, **more)
    slab, weight = draw(samples, 3, 9, 10, 16), draw(5, 3, *kernel)
    bias = torch.randn(5, dtype=torch.float64)
    out = torch.ops.aten.convolution(slab, weight, bias, *settings.arguments)
    return slab, weight, bias, draw(*out.shape), settings


@pytest.mark.parametrize("voxels", [2, 4, 8])
@pytest.mark.parametrize("name", KERNELS)
def test_every_direction_equals_torchs(name: str, voxels: int) -> None:
    slab, weight, bias, gradient, settings = set_up(name)
    expected = torch.ops.aten.convolution(slab, weight, bias, *settings.arguments)
    mask = [True, True, False]
    of_input, of_weight, _ = torch.ops.aten.convolution_backward(
        gradient, slab, weight, None, *settings.arguments, mask
    )
    for laid in (weight.contiguous(memory_format=LAST), weight.contiguous()):
        assert space_to_channels.can_group(slab, laid, settings, voxels)
        assert space_to_channels.can_group(gradient, laid, settings, voxels)
        found = space_to_channels.forward(slab, laid, bias, settings, voxels)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            space_to_channels.forward(slab, laid, None, settings, voxels) + bias.view(-1, 1, 1, 1), found
        )
        other = space_to_channels.input_gradient(gradient, slab, laid, settings, voxels)
        torch.testing.assert_close(other, of_input)
        derived = space_to_channels.weight_gradient(gradient, slab, laid, settings, voxels)
        torch.testing.assert_close(derived, of_weight)
        for value in (found, other, derived):
            assert value.is_contiguous(memory_format=LAST)
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
        for volume in (found, other):
            # Autograd refuses changes in place of a function's output that is a view.
            assert not volume._is_view()


def test_slabs_are_taken_where_they_lie() -> None:
    whole, settings = draw(2, 3, 12, 14, 8), replace(SETTINGS, padding=(1, 1, 1))
    slab, weight = whole[:, :, 3:10, 2:9], draw(4, 3, 3, 3, 3)
    assert not slab.is_contiguous(memory_format=LAST)
    assert space_to_channels.can_group(slab, weight, settings, 2)
    groups = space_to_channels.view_groups(slab, 2)
    assert groups.data_ptr() == slab.data_ptr()
    for voxel in range(2):
        assert groups[:, 3 * voxel : 3 * voxel + 3].equal(slab[..., voxel::2])
    expected = torch.ops.aten.convolution(slab, weight, None, *settings.arguments)
    torch.testing.assert_close(space_to_channels.forward(slab, weight, None, settings, 2), expected)
    gradient = draw(*expected.shape)
    for place, form in enumerate((space_to_channels.input_gradient, space_to_channels.weight_gradient)):
        mask = [place == 0, place == 1, False]
        found = torch.ops.aten.convolution_backward(gradient, slab, weight, None, *settings.arguments, mask)
        torch.testing.assert_close(form(gradient, slab, weight, settings, 2), found[place])


def test_what_is_refused() -> None:
    weight, padded = draw(4, 3, 3, 3, 3), replace(SETTINGS, padding=(1, 1, 1))

    def fits(slab: Tensor, own: Tensor = weight, settings: Settings = padded, voxels: int = 2) -> bool:
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
    for changed in (
        {"stride": (1, 1, 2)},
        {"stride": (2, 1, 1)},
        {"groups": 3},
        {"transposed": True},
        {"padding": (1, 1, 0)},
        {"padding": (1, 1, 2)},
        {"dilation": (1, 1, 2)},
    ):
        assert not fits(slab, settings=replace(padded, **changed)), changed
    assert not fits(slab, draw(4, 3, 3, 3, 2))


def test_large_volumes_go_in_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    cut = depth_chunks._cut_stacks

    def note(slab: Tensor, weight: Tensor, arguments: Any, limit: int) -> Any:
        asked.append(len(found := cut(slab, weight, arguments, 2000)))
        return found

    monkeypatch.setattr(depth_chunks, "_cut_stacks", note)
    slab, weight, bias, gradient, settings = set_up("3", samples=1)
    found = space_to_channels.forward(slab, weight, bias, settings, 2)
    parts = [
        form(gradient, slab, weight, settings, 2)
        for form in (space_to_channels.input_gradient, space_to_channels.weight_gradient)
    ]
    assert min(asked) > 1
    torch.testing.assert_close(found, torch.ops.aten.convolution(slab, weight, bias, *settings.arguments))
    wanted = torch.ops.aten.convolution_backward(gradient, slab, weight, None, *settings.arguments, [True, True, False])
    for one, other in zip(parts, wanted, strict=False):
        torch.testing.assert_close(one, other)


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(slab, weight)
        ctx.settings = settings
        return space_to_channels.forward(slab, weight, None, settings, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        laid = gradient.contiguous(memory_format=LAST)
        of_input = space_to_channels.input_gradient(laid, *ctx.saved_tensors, ctx.settings, 2)
        return of_input, space_to_channels.weight_gradient(laid, *ctx.saved_tensors, ctx.settings, 2), None


def test_gradients_are_those_of_the_output() -> None:
    settings = replace(SETTINGS, padding=(1, 1, 2), dilation=(1, 1, 2))
    slab, weight = draw(1, 2, 3, 3, 4).requires_grad_(), draw(2, 2, 2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: _InGroups.apply(*given, settings), (slab, weight))


def test_a_result_may_be_changed_in_place() -> None:
    settings = replace(SETTINGS, padding=(1, 1, 1))
    slab, weight = draw(1, 2, 3, 3, 4), draw(2, 2, 3, 3, 3).requires_grad_()
    result = _InGroups.apply(slab, weight, settings).mul_(2)
    result.sum().backward()
    (wanted,) = torch.autograd.grad(
        2 * torch.ops.aten.convolution(slab, weight, None, *settings.arguments).sum(), weight
    )
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize("voxels", [2, 4])
@pytest.mark.parametrize("name", ["3", "5", "dilation 2"])
def test_half_precision_is_as_near_to_float64_as_torchs(name: str, voxels: int) -> None:
    torch.manual_seed(0)
    given = [tensor.bfloat16() for tensor in set_up(name)[:4]]
    settings = set_up(name)[4]
    slab, weight, bias, gradient = given
    exact = [tensor.double() for tensor in given]

    def apart(value: Tensor, other: Tensor) -> float:
        return float((value.double() - other).norm() / other.norm())

    mask = [True, True, False]

    def derive(gradient: Tensor, slab: Tensor, weight: Tensor) -> Any:
        return torch.ops.aten.convolution_backward(gradient, slab, weight, None, *settings.arguments, mask)

    wanted, plain = derive(exact[3], *exact[:2]), derive(gradient, slab, weight)
    ours = space_to_channels.weight_gradient(gradient, slab, weight, settings, voxels)
    # Parts are rounded before they are added, and the sum again: twice the variance where the parts are independent.
    assert apart(ours, wanted[1]) < 2 * apart(plain[1], wanted[1])
    of_input = space_to_channels.input_gradient(gradient, slab, weight, settings, voxels)
    assert apart(of_input, wanted[0]) < 1.1 * apart(plain[0], wanted[0])
    out = torch.ops.aten.convolution(*exact[:3], *settings.arguments)
    bare = torch.ops.aten.convolution(slab, weight, bias, *settings.arguments)
    assert apart(space_to_channels.forward(slab, weight, bias, settings, voxels), out) < 1.1 * apart(bare, out)


def test_folding_adds_up_in_float32() -> None:
    """One and three parts of half a unit in its last place: in bfloat16 each would be lost by itself."""
    settings, weight = replace(SETTINGS, padding=(0, 0, 1)), torch.zeros(1, 1, 1, 1, 3, dtype=torch.bfloat16)
    wide = torch.zeros(4, 4, 1, 1, 3, dtype=torch.bfloat16)
    for voxel, value in enumerate((1.0, 2**-8, 2**-8, 2**-8)):
        wide[voxel, voxel, 0, 0, 1] = value
    found = space_to_channels._fold(wide, weight, settings, 4)
    assert found[0, 0, 0, 0].tolist() == [0, 1 + 2 * 2**-7, 0]  # 1 + 3/256 lies between; the even one is taken


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_reaches_further_along_w_and_is_never_hidden(value: float) -> None:
    slab, weight = draw(1, 2, 5, 5, 16), draw(3, 2, 3, 3, 3)
    settings = replace(SETTINGS, padding=(1, 1, 1))
    slab[0, 1, 2, 2, 6] = value
    plain = torch.ops.aten.convolution(slab, weight, None, *settings.arguments)
    for voxels, reached in ((2, range(4, 10)), (4, range(12))):
        found = space_to_channels.forward(slab, weight, None, settings, voxels)
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
    slab, weight, _, gradient, settings = set_up("3", samples=1)
    slab[0, 0, 0, 0, 0] = math.inf  # which no tap behind the middle reaches the first plane, row or column from
    wanted = torch.ops.aten.convolution_backward(
        gradient, slab, weight, None, *settings.arguments, [False, True, False]
    )[1]
    for voxels in (2, 4):
        found = space_to_channels.weight_gradient(gradient, slab, weight, settings, voxels)
        assert found.isfinite().equal(wanted.isfinite())
        assert found.isinf().equal(wanted.isinf())
    assert wanted.isfinite().any()


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Let choice take groups of so many voxels wherever they can be taken; return which directions it took them in."""

    def force(voxels: int) -> list[str]:
        taken: list[str] = []

        def find(direction: str, call: rules.ConvolutionCall) -> list[Groups]:
            assert get_tensor_device(call.slab).type == "cpu"
            taken.append(direction)
            return [Groups(voxels)]

        monkeypatch.setattr(choice, "_list_forms", find)
        return taken

    return force


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, True), (False, True, True), (False, False, True)])
def test_choice_computes_with_them(in_groups: Callable[[int], list[str]], needed: tuple[bool, ...]) -> None:
    taken = in_groups(2)
    slab, weight, bias, gradient, settings = set_up("3")
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


@pytest.mark.gpu
@pytest.mark.parametrize("voxels", [2, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_equals_float64_on_a_gpu(name: str, voxels: int) -> None:
    slab, weight, bias, gradient, settings = set_up(name)
    given = [tensor.cuda().bfloat16() for tensor in (slab, weight, bias, gradient)]
    exact = [tensor.double() for tensor in given]
    wanted = [torch.ops.aten.convolution(*exact[:3], *settings.arguments)]
    mask = [True, True, False]
    wanted += torch.ops.aten.convolution_backward(exact[3], *exact[:2], None, *settings.arguments, mask)[:2]
    slab, weight, bias, gradient = given
    found = [
        space_to_channels.forward(slab, weight, bias, settings, voxels),
        space_to_channels.input_gradient(gradient, slab, weight, settings, voxels),
        space_to_channels.weight_gradient(gradient, slab, weight, settings, voxels),
    ]
    for value, other in zip(found, wanted, strict=True):
        assert value.is_contiguous(memory_format=LAST)
        assert float((value.double() - other).abs().max() / other.abs().max()) < 2 * 2**-8
