"""Tensors changed in place, hooked or repeated after an operator that deferred them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, RunLayers, assert_same_gradients, assert_same_values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import triton_tiles
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import whole

# What a plain network computes is computed to its digits. What it refuses is refused, and what cannot be told is,
# too.


CHANNELS = 4
Run = Callable[[RunLayers, Tensor], Tensor]

ALL = ("fast", "two", "two, recomputed", "two, tiled", "two, offloaded")
each_way = pytest.mark.parametrize("way", ALL)


def make_net(run: Run) -> RunLayers:
    """Return three convolutions, a norm, and a function of them."""
    layers = {name: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1) for name in ("first", "second", "last")}
    return RunLayers(run, **layers, norm=nn.BatchNorm3d(CHANNELS, eps=0.1))


def compare(run: Run, way: str) -> None:
    torch.manual_seed(0)
    assert_same_gradients(make_net(run).double(), WAYS[way], 2, CHANNELS, 8, 6, 4)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volseg.parallel.spatial.convolution.plan.TILE_ELEMENTS", 200)


def change_addend(*, activated: bool, behind: bool) -> Run:
    """Return a change of a norm's addend, before or after the convolution that reads the sum."""

    def run(net: RunLayers, x: Tensor) -> Tensor:
        added, normed = net.second(x), net.norm(net.first(x))
        total = F.relu(added + normed) if activated else normed + added
        total = net.last(total) if behind else total
        added.mul_(2)
        return total + added if behind else net.last(total + added)

    return run


def change_the_input_of_a_norm(net: RunLayers, x: Tensor) -> Tensor:
    y = net.first(x)
    total = net.norm(y) + x
    y.mul_(2)
    return net.last(total + y)


@each_way
def test_a_step_between_forward_and_backward_is_refused(way: str) -> None:
    """With ``offload`` the gradient was that of the new weights."""
    net = make_net(lambda net, x: net.last(F.relu(net.norm(net.first(x)))))
    model = WAYS[way](net)
    loss = model(torch.randn(1, CHANNELS, 8, 6, 4)).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


def hook_before(net: RunLayers, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    y.register_hook(lambda gradient: gradient * 2)
    return net.last(F.relu(y + x))


def check_a_sum(net: RunLayers, x: Tensor) -> Tensor:
    total = net.norm(net.first(x)) + x
    return checkpoint(lambda given: net.last(F.relu(given)), total, use_reentrant=False)


def check_without_parameters(of_sum: bool) -> Run:
    def run(net: RunLayers, x: Tensor) -> Tensor:
        y = net.norm(net.first(x)) + x if of_sum else net.first(x)
        return net.last(checkpoint(lambda given: torch.tanh(given).square() * given, y, use_reentrant=False)) + y

    return run


def change_what_was_joined(net: RunLayers, x: Tensor) -> Tensor:
    part = net.second(x)
    joined = torch.cat([part[:, :1], x[:, 1:]], 1)
    shown = joined * 1
    result = checkpoint(lambda given: net.norm(net.first(given)), joined, use_reentrant=False)
    part.mul_(2)
    return net.last(result) + part + shown


@each_way
def test_a_bias_gradient_that_would_vanish_is_no_number_where_the_gradient_is_none(way: str) -> None:
    """The gradient was zeros: the norm assumed a zero sum without reading the values."""
    net = make_net(lambda net, x: net.norm(net.first(x)))
    x = torch.randn(2, CHANNELS, 8, 6, 4)
    x[0, 1, 2, 3, 1] = float("nan")
    whole(WAYS[way](net)(x)).square().sum().backward()
    assert net.first.bias.grad.isnan().all()


def change_in_a_checkpoint(net: RunLayers, x: Tensor) -> Tensor:
    return net.last(checkpoint(lambda given: torch.sigmoid(given.mul_(2)), net.first(x), use_reentrant=False))


def change_behind_a_checkpoint(change: Callable[[Tensor, Tensor], object]) -> Run:
    def run(net: RunLayers, x: Tensor) -> Tensor:
        y = net.norm(net.first(x))
        result = checkpoint(torch.sigmoid, y, use_reentrant=False)
        change(y, x)
        return net.last(result) + y

    return run


# What refuses each run: the plain network does, or what a gradient is computed from has changed.
STORIES: dict[str, tuple[Run, tuple[str, ...]]] = {
    # In a recomputed block, and among small tensors that are offloaded, what a gradient reads was taken as it
    # had become. A recomputation may end before the change, and is exact then.
    "the input of a norm": (change_the_input_of_a_norm, ALL),
    "an activated addend behind": (change_addend(activated=True, behind=True), ("fast", "two", "two, offloaded")),
    # A sum kept what is added for the gradient, which torch's does not; a recomputed block compares no versions.
    "an addend": (change_addend(activated=False, behind=False), ()),
    "an activated addend": (change_addend(activated=True, behind=False), ()),
    "an addend behind": (change_addend(activated=False, behind=True), ()),
    # Within a recomputed block, saving a sum that waited wrote it, at another time than in the first run. What the
    # inner checkpoint read had no history there, so that nothing of what it computed was saved again.
    "a checkpoint of a sum": (check_a_sum, ()),
    "a checkpoint without parameters": (check_without_parameters(of_sum=True), ()),
    "a checkpoint of a slab": (check_without_parameters(of_sum=False), ()),
    # Computed again, the join had no recipe any more, and the convolution saved one tensor less: torch's own error.
    "a part of a join": (change_what_was_joined, ("fast",)),
    # torch counts changes of the volume's shell, which those of its slabs did not move: the changed one was taken.
    "within a checkpoint": (change_in_a_checkpoint, ALL),
    "activated behind a checkpoint": (change_behind_a_checkpoint(lambda y, x: F.leaky_relu_(y, 0.3)), ALL),
    "added behind a checkpoint": (change_behind_a_checkpoint(lambda y, x: y.add_(x)), ALL),
}


@each_way
@pytest.mark.parametrize("story", STORIES)
def test_what_is_changed_in_place_is_exact_or_refused(story: str, way: str) -> None:
    run, refusing = STORIES[story]
    if way in refusing:
        with pytest.raises(RuntimeError, match=r"in ?place"):
            compare(run, way)
    else:
        compare(run, way)


def test_a_hooked_norm_is_in_a_sum() -> None:
    compare(hook_before, "fast")


# Stories of images that a network repeats: who waits for them must not see what became of the image since.


one_or_two = pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]], ids=["one", "two"])


def make_repeating(run: Run) -> RunLayers:
    """Return a convolution with its norm, operations on both and the image, and a convolution after."""
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


def change_behind_a_block(net: RunLayers, x: Tensor) -> Tensor:
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


@one_or_two
@pytest.mark.parametrize(
    "run",
    [
        need_gradient_behind,
        need_gradient_behind_a_convolution,
        change_behind_the_sum,
        change_behind_a_convolution,
        change_behind_a_block,
        read_in_inference_mode_first,
    ],
    ids=lambda run: run.__name__,
)
def test_what_becomes_of_an_image_later_is_not_seen(run: Run, devices: list[str]) -> None:
    plain = make_repeating(run).double()
    found = []
    for wrap in (lambda net: net, lambda net: ModelParallel(net, strategy="spatial", devices=devices)):
        net = copy.deepcopy(plain)
        x = torch.rand(1, 1, 34, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        output = whole(wrap(net)(x))
        output.square().mean().backward()
        of_image = {"image": whole(net.seen.grad)} if getattr(net.seen, "grad", None) is not None else {}
        found.append({"output": output.detach()} | {name: p.grad for name, p in net.named_parameters()} | of_image)
    assert_same_values(*found, rtol=1e-9, atol=1e-12)


@one_or_two
def test_an_input_that_is_filled_anew_before_the_backward_pass_changes_no_gradient(devices: list[str]) -> None:
    """Static buffers: under autocast nobody else keeps the image itself."""

    def add_image(net: RunLayers, x: Tensor) -> Tensor:
        return F.elu(net.norm(net.first(x)) + x.repeat(1, 4, 1, 1, 1))

    def train(refill: bool) -> list[Tensor | None]:
        net = make_repeating(add_image)
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
    """A dim of one voxel has any stride, but it was compared: rows of 7 were read as rows of 9."""
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
