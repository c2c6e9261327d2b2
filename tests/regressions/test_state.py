# ruff: noqa: NPY002  (the generator that networks draw from)
"""State has one owner: each story here ended in a wrong number without a word until the rule beside it was made.

Everything is compared with the plain network in float64, on real copies: "cpu:1" is copied to as a second GPU is.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made_up_networks import WithLayers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import ModelParallel

COPIES = ["cpu", "cpu:1"]
DEVICES = [["cpu"], COPIES, ["cpu", "cpu:1", "cpu:1"]]


def convolution(inputs: int = 1, outputs: int = 1, size: int = 3) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, size, padding=size // 2)


def volume(channels: int = 1, depth: int = 12) -> Tensor:
    return torch.randn(2, channels, depth, 4, 4, dtype=torch.float64)


def spatial(net: nn.Module, devices: list[str] | None = None, **options: Any) -> ModelParallel:
    return ModelParallel(copy.deepcopy(net), strategy="spatial", devices=devices or COPIES, **options)


def full(output: Any) -> Tensor:
    return output.full_tensor() if hasattr(output, "full_tensor") else output


def assert_same_training(
    plain: nn.Module, model: nn.Module, *inputs: Tensor, steps: int = 2, seeded: bool = False
) -> None:
    """Train both: outputs, every gradient, buffers and parameters are equal after each step."""
    pairs = (plain, torch.optim.SGD(plain.parameters(), 0.01)), (model, torch.optim.SGD(model.parameters(), 0.01))
    for step in range(steps):
        outputs = []
        for net, optimizer in pairs:
            if seeded:
                torch.manual_seed(step)
            output = net(*inputs)
            optimizer.zero_grad()
            (output.square().mean() + output.sin().mean()).backward()
            outputs.append(full(output).detach())
        torch.testing.assert_close(outputs[1], outputs[0])
        gradients = [{name: p.grad for name, p in net.named_parameters()} for net, _ in pairs]
        torch.testing.assert_close(gradients[1], gradients[0])
        for _, optimizer in pairs:
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


# --- no_grad first -----------------------------------------------------------------------------------------------


def conditioned(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = layers["a"](x)
    return layers["b"](layers["a"](x) * first)


def test_a_parameter_cast_without_gradients_first() -> None:
    """The same under autocast, whose converted copies are kept, too."""
    plain = WithLayers(conditioned, a=convolution(), b=convolution())
    model, x = spatial(plain, ["cpu"]), volume().float()
    for net in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            net(x).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-3)  # bfloat16 has three digits


def test_a_frozen_parameter_that_is_freed_within_a_pass() -> None:
    """It took copies without history, and had no gradient."""
    frozen = WithLayers(
        lambda layers, x: layers["a"].requires_grad_()(x), a=convolution().requires_grad_(False)
    ).double()
    assert_same_training(frozen, spatial(frozen), volume(), steps=1)


# --- outside of forward ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["step", "load", "data", "none"])
def test_a_head_called_outside_of_forward(how: str) -> None:
    """It used the last forward's copies of its parameters, whatever had been done to them since."""
    plain = WithLayers(lambda layers, x: layers["a"](x), a=convolution(1, 2), head=convolution(2, 1)).double()
    model, x = spatial(plain), volume()
    heads = [net.layers["head"] for net in (plain, model.module)]
    for _ in range(2):
        results = []
        for net, head in zip((plain, model), heads, strict=True):
            features = net(x)
            head(features).square().mean().backward()
            torch.manual_seed(1)
            if how == "step":
                torch.optim.SGD(head.parameters(), 0.5).step()
            elif how == "load":
                head.load_state_dict({name: torch.randn_like(value) for name, value in head.state_dict().items()})
            elif how == "data":
                head.weight.data = torch.randn_like(head.weight)
            net.zero_grad()
            result = head(features.detach())
            result.square().mean().backward()
            results.append((full(result).detach(), head.weight.grad))
        torch.testing.assert_close(*results)


def test_parameters_that_are_replaced() -> None:
    """assign=True, half(), and layers put in after construction are what the next pass runs."""
    plain = WithLayers(lambda layers, x: layers["b"](layers["a"](x)), a=convolution(1, 2), b=convolution(2, 1)).double()
    model, x = spatial(plain), volume()
    full(model(x)).sum().backward()
    other = WithLayers(plain.function, a=convolution(1, 2), b=convolution(2, 1)).double()
    for net in (plain, model):
        net.zero_grad()
        net.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_same_training(plain, model, x)
    for net in (plain, model.module):
        torch.manual_seed(3)
        net.layers["b"] = nn.Sequential(convolution(2, 3, 5), nn.InstanceNorm3d(3, affine=True)).double()
    assert_same_training(plain, model, x)
    for net in (plain, model):
        net.float()
    torch.testing.assert_close(full(model(x.float())), plain(x.float()))
    for net in (plain, model):
        net.half()
    # Half precision has three digits, and the two sum in another order.
    torch.testing.assert_close(full(model(x.half())), plain(x.half()), rtol=1e-2, atol=1e-2)


def test_an_output_is_computed_with_the_weights_of_its_pass() -> None:
    """A norm at the end waited for whoever looked, and its backward pass read the weight of then."""
    model = spatial(nn.InstanceNorm3d(2, affine=True).double())
    features = model(volume(2))
    with torch.no_grad():
        model.module.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.square().mean().backward()


# --- recomputed --------------------------------------------------------------------------------------------------


def block(norm: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(convolution(1, 4), norm, activation or nn.PReLU(4), convolution(4, 1))


class Random(nn.Module):
    """Two convolutions with random numbers between them, which no module of torch's draws."""

    def __init__(self, draw: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.draw = convolution(1, 4), convolution(4, 1), draw
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.draw(self, self.a(x)))


DRAWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "F.dropout": lambda net, x: F.dropout(x, 0.5, net.training),
    "F.dropout3d": lambda net, x: F.dropout3d(x, 0.5, net.training),
    "a factor": lambda net, x: x * torch.rand(()).item(),
    "randn_like": lambda net, x: x + torch.randn_like(x),
    "its own generator": lambda net, x: x * torch.rand((), generator=net.generator).item(),
    "Python": lambda net, x: x * random.random(),
    "NumPy": lambda net, x: x * np.random.random(),
    "a whole level": lambda net, x: x * F.dropout(F.adaptive_avg_pool3d(x, 1), 0.5),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_in_a_recomputed_block(draw: str) -> None:
    """They were drawn anew in the recomputation, but for nn.Dropout: the gradient of another function."""
    net = nn.Sequential(Random(DRAWS[draw]), Random(DRAWS[draw])).double()
    x, found = volume(), []
    for option in (None, "all"):
        model = spatial(net, checkpoint=option)
        for _ in range(2):
            seed()
            output = model(x)
            output.square().mean().backward()
            after = torch.rand(1), random.random(), np.random.random()
        found.append((full(output).detach(), [p.grad for p in model.parameters()], after))
    torch.testing.assert_close(*found)


def test_the_numbers_after_a_recomputation_are_those_of_the_plain_loop() -> None:
    """What is drawn behind backward() goes on from the forward pass, not from the recomputation."""
    model = spatial(nn.Sequential(Random(DRAWS["F.dropout"])).double(), checkpoint="all")
    output = model(volume())
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_two_passes_before_one_backward_and_a_second_backward() -> None:
    """Each recomputation gets the state of its own pass, and as often as it is asked for."""
    plain = nn.Sequential(block(nn.BatchNorm3d(4))).double()
    model, one, other = spatial(plain, checkpoint="all"), volume(), volume()
    for net in (plain, model):
        loss = net(one).square().mean() + net(other).sin().mean()
        loss.backward(retain_graph=True)
        net.eval()  # before the recomputation: it runs in the mode of then
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_recomputed_block_that_changes_its_input_is_refused() -> None:
    """It was computed again from the changed input."""
    plain = WithLayers(
        lambda layers, x: layers["a"](layers["first"](x)),
        first=convolution(),
        a=nn.Sequential(nn.LeakyReLU(0.5, inplace=True), convolution(1, 2), convolution(2, 1)),
    ).double()
    with pytest.raises(
        UnsupportedOperatorError, match=r"recomputed block layers.a .* was changed in place by the block"
    ):
        spatial(plain, checkpoint="all")(volume())


def test_an_input_changed_behind_a_recomputed_block_is_refused() -> None:
    """It was computed again from the changed input."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["first"](x)
        z = layers["a"](y)
        y.mul_(2)
        return z

    plain = WithLayers(forward, first=convolution(), a=block(nn.Identity())).double()
    with pytest.raises(RuntimeError, match="was changed in place after the block ran"):
        spatial(plain, checkpoint="all")(volume()).sum().backward()


def test_a_forward_patched_on_a_block_stays() -> None:
    """It was deleted with the wrapper around a recomputed block's forward."""
    net = nn.Sequential(block(nn.Identity())).double()
    plain = copy.deepcopy(net)
    for each in (net, plain):
        each[0].forward = lambda x, run=each[0].forward: 2 * run(x)
    model = ModelParallel(net, strategy="spatial", devices=COPIES, checkpoint="all")
    assert_same_training(plain, model, volume())


def test_torchs_own_checkpoint_has_torchs_semantics() -> None:
    """A network that calls torch.utils.checkpoint itself: outputs, gradients and buffers as on one device."""
    inner = block(nn.BatchNorm3d(4))
    plain = WithLayers(
        lambda layers, x: checkpoint(layers["a"], layers["first"](x), use_reentrant=False), first=convolution(), a=inner
    )
    plain = plain.double()
    assert_same_training(plain, spatial(plain), volume())


# --- random numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
        (lambda x: torch.randn_like(x), 0, 1),
        (lambda x: torch.randint_like(x, 2), 0.5, 0.5),
        (lambda x: torch.randint_like(x, 4, 6), 4.5, 0.5),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.5)), 0.5, 0.5),
        (lambda x: x.bernoulli(0.5), 0.5, 0.5),
        (lambda x: (x * 1).bernoulli_(0.5), 0.5, 0.5),
        (lambda x: (x * 1).bernoulli_(torch.full_like(x, 0.5)), 0.5, 0.5),
        (lambda x: (x * 1).normal_(2, 3), 2, 3),
        (lambda x: (x * 1).uniform_(-1, to=1), 0, 3**-0.5),
        (lambda x: F.rrelu(x - 2, training=True) / (x - 2), 11 / 48, 5 / 24 * 12**-0.5),
        (lambda x: F.rrelu(x - 2, 0.2, 0.4, True, inplace=True) / -2 * 10, 3, 12**-0.5 * 2),
    ],
)
def test_random_volumes(draw: Callable[[Tensor], Tensor], mean: float, deviation: float, shards: int) -> None:
    """rrelu drew alike on all shards; the others had no sharded form."""
    model = spatial(WithLayers(lambda layers, x: draw(x)), ["cpu", "cpu:1", "cpu"][:shards])
    ones = torch.zeros(1, 8, 12, 16, 16, dtype=torch.float64)
    torch.manual_seed(1)
    first = full(model(ones))
    torch.manual_seed(1)
    assert torch.equal(full(model(ones)), first)
    again = full(model(ones))
    assert not torch.equal(again, first)
    voxels = first.numel()
    assert abs(float(first.mean()) - mean) < 5 * deviation / voxels**0.5
    assert abs(float(first.std()) - deviation) < 0.05 * deviation
    parts = first.chunk(shards, 2)
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


def test_rrelu_has_one_slope_where_it_is_evaluated() -> None:
    plain = WithLayers(lambda layers, x: F.rrelu(x) + torch.rrelu(x, 0.1, 0.3) + F.rrelu(x * 1, inplace=True))
    x = volume()
    torch.testing.assert_close(full(spatial(plain)(x)), plain(x))


def test_a_generator_is_refused() -> None:
    net = WithLayers(lambda layers, x: (x * 1).normal_(generator=torch.Generator()))
    with pytest.raises(UnsupportedOperatorError, match="seed torch with"):
        spatial(net)(volume())


# --- the caller's input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_first_layer_in_place_changes_the_callers_tensor(devices: list[str]) -> None:
    """It changed what lay on the first device, and left the rest."""
    net = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), convolution()).double()
    ours, theirs = (volume() for _ in range(2))
    theirs.copy_(ours)
    torch.testing.assert_close(full(spatial(net, devices)(ours)), net(theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_first_layer_in_place_on_an_input_that_needs_a_gradient_is_refused(leaf: bool) -> None:
    """Torch refuses a leaf; of another input, autograd would not know what changed on the other devices."""
    model = spatial(nn.Sequential(nn.LeakyReLU(0.5, inplace=True), convolution()).double())
    given = volume().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf" if leaf else "changes its input .* in place"):
        model(given if leaf else given * 1)


# --- strategy="auto" ---------------------------------------------------------------------------------------------


def test_an_attempt_that_cannot_be_undone_is_refused() -> None:
    net = WithLayers(lambda layers, x: torch.fft.fft(x.mul_(2), dim=2).real)
    with pytest.raises(ParallelError, match="choose strategy='pipeline'"):
        ModelParallel(net, devices=["cpu"] * 2)(volume().requires_grad_() * 1)


# --- copies, pickles, lazy modules -------------------------------------------------------------------------------


def test_a_model_is_pickled_and_copied_after_a_step() -> None:
    """Its context held weak references, which nothing can pickle."""
    plain = nn.Sequential(convolution(1, 2), nn.InstanceNorm3d(2), convolution(2, 1)).double()
    model, x = spatial(plain, checkpoint="all"), volume()
    assert_same_training(plain, model, x)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(twin, ModelParallel)
        assert next(twin.parameters()) is not next(model.parameters())
        assert_same_training(copy.deepcopy(plain), twin, x)


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    """They failed where their elements were counted, without a hint."""
    net = nn.Sequential(nn.LazyConv3d(2, 3), nn.LazyBatchNorm3d()).double()
    for strategy in ("spatial", "pipeline", "auto"):
        with pytest.raises(ParallelError, match=r"0.weight, 0.bias.*run one batch through the plain network first"):
            ModelParallel(net, strategy=strategy, devices=COPIES)
    net(volume())
    assert_same_training(net, spatial(net), volume())


@pytest.mark.parametrize("devices", DEVICES)
def test_a_hook_that_a_recomputed_block_registers_is_called_once(devices: list[str]) -> None:
    # The recomputation registered it again: the gradient was doubled twice.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = convolution(1, 2), convolution(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            handle = self.first.weight.register_hook(lambda gradient: 2 * gradient)
            self.handles = [*getattr(self, "handles", []), handle]
            return self.second(self.first(x).sigmoid())

    torch.manual_seed(0)
    plain = nn.Sequential(convolution(), Block(), convolution()).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices, checkpoint="all")
    volume = torch.randn(1, 1, 8, 4, 4, dtype=torch.float64)
    for net in (plain, model):
        net(volume).square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.module.named_parameters())[name].grad, parameter.grad)
