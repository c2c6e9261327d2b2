"""Shared parameters under autocast: the sum includes the gradient of every use, wherever it was stored."""

import copy
import gc
import time
import weakref

import pytest
import torch
from in_group import in_group
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import DataParallel, ModelParallel, buckets, join_mesh
from volseg.parallel.spatial import ShardedVolume


class UsedTwice(nn.Module):
    """One weight in two convolutions, in a product of its own dtype, and in a linear layer; one weight in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.again = nn.Conv3d(4, 4, 3, padding=1)
        self.unused = nn.Conv3d(4, 4, 3, padding=1)
        self.mixed = nn.Linear(4, 4)
        self.penalised = nn.Conv3d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.again(self.first(x))))
        x = x + self.mixed(self.mixed(x.movedim(1, -1))).movedim(-1, 1)
        with torch.autocast(x.device.type, enabled=False):  # the same weight in float32
            x = x.float() + 0.1 * nn.functional.conv3d(x.float(), self.again.weight, padding=1)
        return self.penalised(x) * (1 + self.penalised.weight.square().mean())


def named(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by the network's own names."""
    return list((net.module if isinstance(net, ModelParallel) else net).named_parameters())


def steps(net: nn.Module, image: Tensor, ways: str) -> dict[str, Tensor]:
    """Train two steps in the given ``ways``."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for number in range(2):
        if "frozen" in ways:
            (net.module if isinstance(net, ModelParallel) else net).first.requires_grad_(number == 1)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in ways):
            output = net(image)
        loss = output.float().square().mean()
        if "retained" in ways:
            loss.backward(retain_graph=True)
        if "accumulated" in ways:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in ways):
                loss = loss + net(0.5 * image).float().square().mean()
        loss.backward()
        whole = output.full_tensor() if isinstance(output, ShardedVolume) else output
        found[f"output {number}"] = whole.detach().float()
        found |= {f"{name} {number}": p.grad.clone() for name, p in named(net) if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found


WAYS = ("", "autocast", "autocast frozen", "autocast retained", "autocast accumulated", "accumulated retained")


def differences(large: int) -> dict[str, dict[str, float]]:
    """Compare this process's slab with one device, each way: the largest relative errors."""
    buckets.LARGE = large
    found: dict[str, dict[str, float]] = {}
    for ways in WAYS:
        torch.manual_seed(0)
        net, image = UsedTwice(), torch.randn(1, 2, 9, 6, 6)
        model = ModelParallel(copy.deepcopy(net), strategy="spatial")
        expected, ours = steps(net, image, ways), steps(model, image, ways)
        assert expected.keys() == ours.keys()
        found[ways] = {
            name: float((ours[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
            for name, wanted in expected.items()
        }
    return found


def test_every_use_of_a_weight_is_in_its_gradient() -> None:
    for large in (1, 2**16):
        for errors in in_group(2, differences, large):
            for ways, found in errors.items():
                assert len(found) > 10
                most = 0.05 if "autocast" in ways else 1e-4
                assert {name: error for name, error in found.items() if not error <= most} == {}


def is_freed_at_once() -> bool:
    """Return whether only the model keeps its shards and its memory in other processes."""
    gc.collect()
    gc.disable()
    try:
        model = ModelParallel(UsedTwice(), strategy="spatial")
        model(torch.randn(1, 2, 9, 6, 6)).square().mean().backward()
        shards = weakref.ref(model.strategy.communicator)
        del model
        end = time.monotonic() + 10  # gloo's thread may still hold the last message, which it drops by itself
        while shards() is not None and time.monotonic() < end:
            time.sleep(0.001)
        return shards() is None
    finally:
        gc.enable()


def test_the_shards_go_with_their_model() -> None:
    """Memory that processes share is freed by all: not when Python happens to look for cycles."""
    assert all(in_group(2, is_freed_at_once))


class Kept(nn.Module):
    """Keeps a volume on the way, for a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        return self.last(self.kept.movedim(1, -1))


def nested(net: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Run a backward pass in a hook of another one: of the same forward pass."""
    with torch.autocast("cpu", torch.bfloat16):
        output = net(image)
    kept = (net.module if isinstance(net, ModelParallel) else net).kept
    assert isinstance(kept, Tensor)
    first, second = output.float().square().mean(), kept.float().square().mean()
    begun: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        if not begun:
            begun.append(gradient)
            second.backward(retain_graph=True)

    kept.register_hook(hook)
    first.backward(retain_graph=True)
    return {name: parameter.grad for name, parameter in named(net) if parameter.grad is not None}


def nested_differences() -> dict[str, float]:
    """Compare gradients of the linear layer, delayed while the inner pass summed the convolution's."""
    buckets.LARGE = 1
    torch.manual_seed(0)
    net, image = Kept(), torch.randn(1, 2, 9, 6, 6)
    expected, ours = nested(copy.deepcopy(net), image), nested(ModelParallel(net, strategy="spatial"), image)
    assert expected.keys() == ours.keys()
    return {name: float((ours[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in expected.items()}


def test_a_backward_pass_in_a_hook_of_another_one() -> None:
    for found in in_group(2, nested_differences):
        assert len(found) == 4
        assert {name: error for name, error in found.items() if not error <= 0.05} == {}


def accumulated(way: str, clears: bool) -> str:
    """Accumulate two backward passes, the second past a parameter with a hook; return the message."""
    net = nn.ModuleList([nn.Conv3d(1, 1, 3, padding=1), nn.Conv3d(1, 1, 3, padding=1)])
    net[1].weight.register_post_accumulate_grad_hook(_double)
    heads: nn.Module = _Heads(net)
    if way == "replicas":
        heads = DataParallel(heads, join_mesh(2, 1).replicas())
    elif way == "slabs of processes":
        heads = ModelParallel(heads, strategy="spatial")
    else:
        fixed_order = way == "slabs in a fixed order"
        heads = ModelParallel(heads, strategy="spatial", devices=["cpu", "cpu:1"], fixed_order=fixed_order)
    image = torch.randn(1, 1, 16, 8, 8)
    heads(image, (0, 1)).square().mean().backward()
    if clears:
        net[1].weight.grad = None
    try:
        heads(image, (0,)).square().mean().backward()
    except UnsupportedOperatorError as error:
        return str(error)
    return ""


def _double(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


class _Heads(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for number in used:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize("clears", [False, True])
def test_a_hook_does_not_get_the_gradient_of_another_pass(clears: bool) -> None:
    """Torch calls hooks of all parameters of a bucket; one that doubles gradients doubled an old one again."""
    assert not accumulated("slabs", clears)  # each parameter by itself
    said = [accumulated("slabs in a fixed order", clears)]
    said += in_group(2, accumulated, "slabs of processes", clears) + in_group(2, accumulated, "replicas", clears)
    for one in said:
        assert ("register_post_accumulate_grad_hook" in one) == (not clears)
