"""Random networks that keep, change and reuse state train on slabs as they do whole, with and without recomputation."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from in_group import in_group
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import whole

CHANNELS = 4
SIZE = (2, 1, 10, 5, 4)
RANKS_SEEDS = range(12)


def convolution(outputs: int = CHANNELS) -> nn.Conv3d:
    return nn.Conv3d(CHANNELS, outputs, 3, padding=1)


def norm(draw: random.Random) -> nn.Module:
    return draw.choice(
        [
            nn.BatchNorm3d(CHANNELS),
            nn.BatchNorm3d(CHANNELS, momentum=None),
            nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True, track_running_stats=True),
            nn.GroupNorm(2, CHANNELS, eps=0.1),
        ]
    )


def activation(draw: random.Random) -> nn.Module:
    return draw.choice([nn.PReLU(CHANNELS), nn.PReLU(), nn.LeakyReLU(0.3, inplace=True), nn.ELU(), nn.SiLU()])


class Drawing(nn.Module):
    """Random numbers that no module of torch's draws."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == 0:
            return F.dropout(x, 0.3, self.training)
        if self.kind == 1:
            return F.dropout3d(x, 0.3)  # also where it is evaluated
        if self.kind == 2:
            return x + 0.1 * torch.randn_like(x)
        if self.kind == 3:
            return x * F.dropout(F.adaptive_avg_pool3d(x, 1), 0.5)
        drawn = torch.rand(()).item() + random.random() + np.random.random()  # noqa: NPY002
        return x * (1 + drawn + torch.rand((), generator=self.generator).item())


class Counting(nn.Module):
    """A scale that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return x * (1 + 0.01 * self.calls + 0.1 * self.count.item())


class Averaging(nn.Module):
    """Subtracts the mean of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, CHANNELS, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean = self.mean.lerp(x.mean((0, 2, 3, 4), keepdim=True), 0.3)
        return result


def block(draw: random.Random, noisy: bool) -> nn.Module:
    """Two convolutions that are recomputed."""
    spectral = draw.choice([lambda layer: layer, old_spectral_norm, parametrizations.spectral_norm])
    between: list[nn.Module] = [norm(draw), activation(draw)]
    if draw.random() < 0.5:
        between.append(draw.choice([Counting(), Averaging()]))
    if noisy and draw.random() < 0.7:
        between.append(Drawing(draw.randrange(5)))
    return nn.Sequential(spectral(convolution()), *between, convolution())


Use = Callable[[nn.Module, Tensor], Tensor]


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = layer(x).sigmoid()
    return x * gate


def detached(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x.detach())


def frozen(layer: nn.Module, x: Tensor) -> Tensor:
    layer.requires_grad_(False)
    y = layer(x)
    layer.requires_grad_(True)
    return x + y


def in_place(layer: nn.Module, x: Tensor) -> Tensor:
    x = (x * 1).add_(layer(x))
    return F.leaky_relu(x, 0.2, inplace=True)


def clipped(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    weight = next((module.weight for module in layer.modules() if type(module) is nn.Conv3d), None)
    if weight is not None and weight.is_leaf:
        weight.data = weight.data.clamp(-0.2, 0.2)
    return x + y


def residual(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x).tanh()


def coarse(layer: nn.Module, x: Tensor) -> Tensor:
    return x + F.interpolate(layer(F.avg_pool3d(x, (2, 1, 1))), size=x.shape[2:])


USES: list[Use] = [plainly, without_gradient, detached, frozen, in_place, residual, coarse]


class Network(nn.Module):
    """A few layers, each used once or more, in one of the ways above."""

    def __init__(self, seed: int, noisy: bool, recomputed: bool) -> None:
        super().__init__()
        draw = random.Random(seed)
        uses = USES if recomputed else [*USES, clipped]  # weights that change before a recomputation are refused
        self.first, self.last = nn.Conv3d(1, CHANNELS, 3, padding=1), convolution(2)
        self.layers = nn.ModuleList([block(draw, noisy), block(draw, noisy), convolution(), norm(draw)])
        self.program = [(draw.choice(uses), draw.randrange(4)) for _ in range(draw.randint(2, 5))]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for use, index in self.program:
            x = use(self.layers[index], x)
        return self.last(x), x


def trajectory(model: nn.Module) -> list[Any]:
    """Return the results of two steps, an evaluation, a separate head and a third step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    net = model.module if isinstance(model, ModelParallel) else model
    volume = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    for number in range(3):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        logits, features = model(volume)
        optimizer.zero_grad()
        (logits.square().mean() + logits.sin().mean()).backward()
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        found.append((whole(logits).detach(), {name: gradient.clone() for name, gradient in gradients.items()}))
        optimizer.step()
        if number == 1:
            head = net.last(features.detach())
            head.square().mean().backward()
            model.eval()
            with torch.no_grad():
                found.append((whole(head), net.last.weight.grad.clone(), whole(model(volume)[0])))
            model.train()
        found.append({name: value.clone() for name, value in net.state_dict().items()})
        found.append([module.calls for module in net.modules() if isinstance(module, Counting)])
    return found


def check(seed: int, noisy: bool, **options: Any) -> None:
    """Compare with the plain network, or, where slabs draw their own numbers, with the one that keeps everything."""
    recomputed = options.get("checkpoint") is not None
    torch.manual_seed(seed)
    net = Network(seed, noisy, recomputed).double()
    where = {name: value for name, value in options.items() if name != "checkpoint"}
    reference = copy.deepcopy(net)
    if noisy:
        torch.manual_seed(5)
        reference = ModelParallel(reference, strategy="spatial", **where)
    expected = trajectory(reference)
    torch.manual_seed(5)
    found = trajectory(ModelParallel(net, strategy="spatial", **options))
    # Round-off of some thirty layers and three steps.
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


DEVICES = [["cpu"], ["cpu", "cpu:1"], ["cpu", "cpu:1", "cpu:2"]]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), devices=st.sampled_from(DEVICES), checkpoint=st.sampled_from([None, "all", 1]))
def test_state_on_slabs_is_that_of_one_device(seed: int, devices: list[str], checkpoint: Any) -> None:
    check(seed, False, devices=devices, checkpoint=checkpoint)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), devices=st.sampled_from(DEVICES))
def test_random_numbers_are_repeated_where_blocks_are_recomputed(seed: int, devices: list[str]) -> None:
    check(seed, True, devices=devices, checkpoint="all")


def check_on_processes(seed: int) -> None:
    check(seed, noisy=seed % 3 == 2, checkpoint="all" if seed % 3 else None)


@pytest.mark.parametrize("seed", RANKS_SEEDS)
def test_state_on_slabs_of_processes_is_that_of_one_device(seed: int) -> None:
    in_group(2, check_on_processes, seed)
