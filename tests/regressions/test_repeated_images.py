"""Stories of images that a network repeats: who waits for them must not see what became of the image since."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import triton_tiles
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import whole

DEVICES = pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]], ids=["one", "two"])
Run = Callable[[RunLayers, Tensor], Tensor]


def make_net(run: Run) -> RunLayers:
    """Return a convolution with its norm, what is done with both and the image, and a convolution behind."""
    torch.manual_seed(0)
    first, norm = nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.InstanceNorm3d(4, affine=True)
    own, last = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)
    net = RunLayers(lambda net, x: net.last(run(net, x)), first=first, norm=norm, own=own, last=last)
    net.seen = None
    return net


def need_gradient_behind(net: RunLayers, x: Tensor) -> Tensor:
    repeated = x.repeat(1, 4, 1, 1, 1)
    net.seen = x.requires_grad_()
    return F.elu(net.norm(net.first(x)) + repeated)


def need_gradient_behind_a_convolution(net: RunLayers, x: Tensor) -> Tensor:
    repeated = x.repeat(1, 4, 1, 1, 1)
    net.seen = x.requires_grad_()
    return F.elu(net.norm(net.first(x))) + net.own(repeated)


def change_behind_the_sum(net: RunLayers, x: Tensor) -> Tensor:
    image = x * 1.0
    total = F.elu(net.norm(net.first(x)) + image.repeat(1, 4, 1, 1, 1))
    image.add_(1.0)
    return total * image


def change_behind_a_convolution(net: RunLayers, x: Tensor) -> Tensor:
    image = x * 1.0
    repeated = image.repeat(1, 4, 1, 1, 1)
    total = net.own(repeated)
    image.add_(1.0)
    return F.elu(total) + net.own(repeated) * image


def change_behind_a_checkpoint(net: RunLayers, x: Tensor) -> Tensor:
    image = x * 1.0
    repeated = image.repeat(1, 4, 1, 1, 1)
    total: Any = checkpoint(lambda y: F.elu(net.norm(net.own(y)) + y), repeated, use_reentrant=False)
    image.add_(1.0)
    return total + net.own(repeated) * image


def read_in_inference_mode_first(net: RunLayers, x: Tensor) -> Tensor:
    repeated = x.repeat(1, 4, 1, 1, 1)
    with torch.inference_mode():
        net.seen = repeated.mean()
    return F.elu(net.own(repeated))


def observe(net: RunLayers, call: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Return output and all gradients of a step, that of the image too where it has one."""
    output = whole(call(x.clone()))
    output.square().mean().backward()
    found = [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    of_image = getattr(net.seen, "grad", None)
    return found if of_image is None else [*found, whole(of_image)]


@DEVICES
@pytest.mark.parametrize(
    "run",
    [
        need_gradient_behind,
        need_gradient_behind_a_convolution,
        change_behind_the_sum,
        change_behind_a_convolution,
        change_behind_a_checkpoint,
        read_in_inference_mode_first,
    ],
    ids=lambda run: run.__name__,
)
def test_what_becomes_of_an_image_later_is_not_seen(run: Run, devices: list[str]) -> None:
    plain = make_net(run).double()
    net = copy.deepcopy(plain)
    x = torch.rand(1, 1, 34, 4, 6, dtype=torch.float64)
    wanted = observe(plain, plain, x)
    got = observe(net, ModelParallel(net, strategy="spatial", devices=devices), x)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@DEVICES
def test_an_input_that_is_filled_anew_before_the_backward_pass_changes_no_gradient(devices: list[str]) -> None:
    """Static buffers: under autocast nobody else keeps the image itself."""

    def add_image(net: RunLayers, x: Tensor) -> Tensor:
        return F.elu(net.norm(net.first(x)) + x.repeat(1, 4, 1, 1, 1))

    def train(refill: bool) -> list[Tensor | None]:
        net = make_net(add_image)
        x = torch.rand(1, 1, 34, 4, 6)
        with torch.autocast("cpu", torch.bfloat16):
            output = ModelParallel(net, strategy="spatial", devices=devices)(x)
        if refill:
            x.numpy()[...] = -5.0
        output.full_tensor().float().square().mean().backward()
        return [parameter.grad for parameter in net.parameters()]

    for one, other in zip(train(refill=False), train(refill=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_strides_are_told_of_voxels_that_are_evenly_spaced_and_of_no_others() -> None:
    """A dim of one voxel has any stride. What lies in front was compared with it: rows of 7 were read as of 9."""
    told = 0
    for sides in ((2, 1, 9), (4, 1, 3), (3, 4, 5), (1, 4, 1), (4, 5, 1), (1, 1, 6), (2, 3, 1)):
        whole = torch.arange(2 * 3 * sides[0] * sides[1] * sides[2]).reshape(2, 3, *sides)
        for base in (whole, whole.contiguous(memory_format=torch.channels_last_3d)):
            for dim in (2, 3, 4):
                for count in range(1, base.shape[dim] + 1):
                    for order in ((2, 3, 4), (4, 2, 3), (3, 2, 4)):
                        view = base.narrow(dim, 0, count).permute(0, 1, *order)
                        strides = triton_tiles.compute_strides(view)
                        if strides is None:
                            continue
                        told += 1
                        voxels = view[0, 0].numel()
                        read = base.as_strided((2, 3, voxels), strides, view.storage_offset())
                        assert torch.equal(read, view.flatten(2)), (sides, dim, count, order)
    assert told > 100
