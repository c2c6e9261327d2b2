"""State has one owner: networks whose state, arguments or random numbers leaked into others."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers, assert_small, compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import DataParallel, ModelParallel, Pipeline, Spatial, join_mesh
from volseg.parallel.state.module import remember
from volseg.parallel.state.watch import Watch
from volseg.parallel.verification.comparison import whole

COPIES = ["cpu", "cpu:1"]
DEVICES = [["cpu"], COPIES, ["cpu", "cpu:1", "cpu:1"]]


def convolution(inputs: int = 1, outputs: int = 1, size: int = 3) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, size, padding=size // 2)


def volume(channels: int = 1, depth: int = 12) -> Tensor:
    return torch.randn(2, channels, depth, 4, 4, dtype=torch.float64)


def spatial(net: nn.Module, devices: list[str] | None = None, **options: Any) -> ModelParallel:
    return ModelParallel(copy.deepcopy(net), strategy="spatial", devices=devices or COPIES, **options)


def assert_same_training(plain: nn.Module, model: nn.Module, *inputs: Tensor, steps: int = 2) -> None:
    """Train both: outputs, every gradient, buffers, counters and parameters are equal after each step."""
    assert_small(compare(plain, model, inputs, steps=steps))


def conditioned(net: RunLayers, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = net.a(x)
    return net.b(net.a(x) * first)


def test_a_parameter_cast_without_gradients_first() -> None:
    """The same under autocast, whose converted copies are kept, too."""
    plain = RunLayers(conditioned, a=convolution(), b=convolution())
    model, x = spatial(plain, ["cpu"]), volume().float()
    for net in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            net(x).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-3)  # bfloat16 has three digits


def gated(net: RunLayers, x: Tensor) -> Tensor:
    y = net.a(x)
    with torch.no_grad():
        gate = net.b(y)
        assert not gate.requires_grad
    return net.b(net.a(y * gate))


def frozen(net: RunLayers, x: Tensor) -> Tensor:
    y = net.a(x)
    net.a.requires_grad_(False)
    y = net.a(y)
    net.a.requires_grad_(True)
    return net.b(net.a(y))


def clipped(net: RunLayers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.a(x)
        net.a.weight.clamp_(-0.05, 0.05)
        net.a.bias.data = net.a.bias.data * 2
    return net.b(net.a(x) + y)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("forward", [conditioned, gated, frozen, clipped])
def test_a_parameter_that_one_pass_uses_in_several_modes(forward: Callable[..., Tensor], devices: list[str]) -> None:
    """The copies of the first use served the later ones.

    Without gradients first, later uses had none; frozen for a while, a use got a gradient too many; a weight that was
    clipped between two uses was read as before on every device but the first.
    """
    plain = RunLayers(forward, a=convolution(), b=convolution()).double()
    assert_same_training(plain, spatial(plain, devices), volume())


def test_modes_alternate() -> None:
    """Inference, evaluation and training in turn leave nothing behind for each other."""
    plain = nn.Sequential(convolution(1, 4), nn.BatchNorm3d(4), nn.ReLU(), convolution(4, 1)).double()
    model, x = spatial(plain), volume()
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(whole(model(x)).clone(), plain(x).clone())
        for net in (plain, model):
            net.eval()
        with torch.no_grad():
            torch.testing.assert_close(whole(model(x)), plain(x))
        assert_same_training(plain, model, x, steps=1)
        for net in (plain, model):
            net.train()
        assert_same_training(plain, model, x, steps=1)


@pytest.mark.parametrize("how", ["step", "load", "data", "none"])
def test_a_head_called_outside_of_forward(how: str) -> None:
    """It used the last forward's copies of its parameters, whatever had been done to them since."""
    plain = RunLayers(lambda net, x: net.a(x), a=convolution(1, 2), head=convolution(2, 1)).double()
    model, x = spatial(plain), volume()
    heads = [net.head for net in (plain, model.module)]
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
            results.append((whole(result).detach(), head.weight.grad))
        torch.testing.assert_close(*results)


def test_parameters_that_are_replaced() -> None:
    """assign=True, half(), and layers put in after construction are what the next pass runs."""
    plain = RunLayers(lambda net, x: net.b(net.a(x)), a=convolution(1, 2), b=convolution(2, 1)).double()
    model, x = spatial(plain), volume()
    whole(model(x)).sum().backward()
    other = RunLayers(plain.run, a=convolution(1, 2), b=convolution(2, 1)).double()
    for net in (plain, model):
        net.zero_grad()
        net.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_same_training(plain, model, x)
    for net in (plain, model.module):
        torch.manual_seed(3)
        net.b = nn.Sequential(convolution(2, 3, 5), nn.InstanceNorm3d(3, affine=True)).double()
    assert_same_training(plain, model, x)
    for net in (plain, model):
        net.float()
    torch.testing.assert_close(whole(model(x.float())), plain(x.float()))
    for net in (plain, model):
        net.half()
    # Half precision has three digits, and the two sum in another order.
    torch.testing.assert_close(whole(model(x.half())), plain(x.half()), rtol=1e-2, atol=1e-2)


def test_an_output_is_computed_with_the_weights_of_its_pass() -> None:
    """A norm at the end waited for its first reader, and its backward pass read the weight of then."""
    model = spatial(nn.InstanceNorm3d(2, affine=True).double())
    features = model(volume(2))
    with torch.no_grad():
        model.module.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.square().mean().backward()


def block(norm: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(convolution(1, 4), norm, activation or nn.PReLU(4), convolution(4, 1))


class Random(nn.Module):
    """Two convolutions with dropout between them that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = convolution(1, 4), convolution(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, self.training))


def test_the_numbers_after_a_recomputation_are_those_of_the_plain_loop() -> None:
    """Draws after backward() continue from the forward pass, not from the recomputation."""
    model = spatial(nn.Sequential(Random()).double(), checkpoint="all")
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


def change_behind(net: RunLayers, x: Tensor) -> Tensor:
    y = net.first(x)
    z = net.a(y)
    y.mul_(2)
    return z


@pytest.mark.parametrize(
    ("forward", "first", "message"),
    [
        (
            lambda net, x: net.a(net.first(x)),
            nn.LeakyReLU(0.5, inplace=True),
            r"recomputed block a .* was changed in place by the block",
        ),
        (change_behind, nn.Identity(), "was changed in place after the block ran"),
    ],
    ids=["by the block", "behind it"],
)
def test_a_recomputed_block_whose_input_changes_is_refused(forward: Any, first: nn.Module, message: str) -> None:
    """It was computed again from the changed input."""
    block = nn.Sequential(first, convolution(1, 2), convolution(2, 1))
    plain = RunLayers(forward, first=convolution(), a=block).double()
    with pytest.raises(RuntimeError, match=message):
        spatial(plain, checkpoint="all")(volume()).sum().backward()


def test_a_forward_patched_on_a_block_stays() -> None:
    """It was deleted with the wrapper around a recomputed block's forward."""
    net = nn.Sequential(block(nn.Identity())).double()
    plain = copy.deepcopy(net)
    for each in (net, plain):
        each[0].forward = lambda x, run=each[0].forward: 2 * run(x)
    model = ModelParallel(net, strategy="spatial", devices=COPIES, checkpoint="all")
    assert_same_training(plain, model, volume())


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
        (lambda x: torch.randn_like(x), 0, 1),
        (lambda x: torch.randint_like(x, 2), 0.5, 0.5),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.5)), 0.5, 0.5),
        (lambda x: (x * 1).bernoulli_(0.5), 0.5, 0.5),
        (lambda x: (x * 1).normal_(2, 3), 2, 3),
        (lambda x: (x * 1).uniform_(-1, to=1), 0, 3**-0.5),
        (lambda x: F.rrelu(x - 2, training=True) / (x - 2), 11 / 48, 5 / 24 * 12**-0.5),
    ],
)
def test_random_volumes(draw: Callable[[Tensor], Tensor], mean: float, deviation: float, shards: int) -> None:
    """rrelu drew alike on all shards; the others had no sharded form."""
    model = spatial(RunLayers(lambda net, x: draw(x)), ["cpu", "cpu:1", "cpu"][:shards])
    ones = torch.zeros(1, 8, 12, 16, 16, dtype=torch.float64)
    torch.manual_seed(1)
    first = whole(model(ones))
    torch.manual_seed(1)
    assert torch.equal(whole(model(ones)), first)
    again = whole(model(ones))
    assert not torch.equal(again, first)
    voxels = first.numel()
    assert abs(float(first.mean()) - mean) < 5 * deviation / voxels**0.5
    assert abs(float(first.std()) - deviation) < 0.05 * deviation
    parts = first.chunk(shards, 2)
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 2], ids=len)
def test_a_first_layer_in_place_changes_the_callers_tensor(devices: list[str]) -> None:
    """It changed only the part on the first device."""
    net = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), convolution()).double()
    ours = volume()
    theirs = ours.clone()
    torch.testing.assert_close(whole(spatial(net, devices)(ours)), net(theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_first_layer_in_place_on_copies_is_refused(needs_gradient: bool) -> None:
    """The caller's tensor would keep other devices' parts, and autograd would miss the change."""
    model = spatial(nn.Sequential(nn.LeakyReLU(0.5, inplace=True), convolution()).double())
    given = volume().requires_grad_() * 1 if needs_gradient else volume()
    with pytest.raises(UnsupportedOperatorError, match=r"changes its input .* in place"):
        model(given)


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    """They failed where their elements were counted, without a hint."""
    net = nn.Sequential(nn.LazyConv3d(2, 3), nn.LazyBatchNorm3d()).double()
    for strategy in ("spatial", "pipeline", "auto"):
        with pytest.raises(ParallelError, match=r"0.weight, 0.bias.*run one batch through the plain network under"):
            ModelParallel(net, strategy=strategy, devices=COPIES)
    net(volume())
    assert_same_training(net, spatial(net), volume())


def test_a_block_that_draws_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay drew other numbers in the recomputation than in the block, and so the gradient of another function."""
    net = nn.Sequential(Random(), block(nn.BatchNorm3d(4))).double()
    model = spatial(net, checkpoint="all")
    drawing, still = model.module
    recomputation = model.strategy.recomputation
    draws, context = recomputation._random, copy.copy(recomputation.context)
    model.eval()(volume()).sum().backward()
    model.train()(volume()).sum().backward()
    context.communicator = SimpleNamespace(home=torch.device("cuda"), devices=[])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def begin(net: nn.Module) -> None:
        draws.before(net, (net, remember(net).modes), context)

    begin(still)
    begin(drawing.eval())
    with pytest.raises(ParallelError, match=r"recomputed block 0 \(Random\) draws random numbers"):
        begin(drawing.train())
    with pytest.raises(ParallelError, match="or has not run yet"):
        begin(nn.Conv3d(1, 1, 1))


def test_a_hook_that_a_recomputed_block_registers_is_called_once() -> None:
    """The recomputation registered it again: the gradient was doubled twice."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        net.handles = [*getattr(net, "handles", []), net.first.weight.register_hook(lambda gradient: 2 * gradient)]
        return net.second(net.first(x).sigmoid())

    block = RunLayers(forward, first=convolution(1, 2), second=convolution(2, 1))
    plain = nn.Sequential(convolution(), block, convolution()).double()
    assert_same_training(plain, spatial(plain, checkpoint="all"), volume(), steps=1)


# What an attack on strategies found: arguments that are one tensor, state over replicas, norms in micro-batches.


def change_first(net: RunLayers, one: Tensor, other: Tensor) -> Tensor:
    one.add_(1)
    return net.conv(one) * net.conv(other)


def make_changing() -> nn.Module:
    torch.manual_seed(0)
    return RunLayers(change_first, conv=nn.Conv3d(1, 2, 3, padding=1)).double()


def make_batch(samples: int = 2) -> Tensor:
    return torch.randn(samples, 1, 5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


def train(net: nn.Module, call: nn.Module, *given: Tensor) -> list[Tensor]:
    """Return the output, the gradients, and the arguments after the call."""
    output = whole(call(*given))
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *given]


@pytest.mark.parametrize("checkpoint", [None, "all"])
def test_a_tensor_that_is_given_twice_is_changed_for_both(checkpoint: str | None) -> None:
    # Each place had slabs of its own on several devices: the second one kept the old values.
    plain = make_changing()
    ours = copy.deepcopy(plain)
    one, other = make_batch(), make_batch()
    wanted = train(plain, plain, one, one)
    torch.testing.assert_close(
        train(ours, ModelParallel(ours, Spatial(axes="D", checkpoint=checkpoint), ["cpu"] * 2), other, other), wanted
    )


def test_arguments_that_share_memory_are_refused_where_one_is_changed() -> None:
    model = ModelParallel(make_changing(), Spatial(axes="D"), COPIES)
    x = make_batch()
    with pytest.raises(UnsupportedOperatorError, match=r"changes its input .* in place.*clone"):
        model(x, x[:])


def test_arguments_side_by_side_in_memory_are_not_refused() -> None:
    plain, x = make_changing(), make_batch()
    ours, y = copy.deepcopy(plain), x.clone()
    wanted = train(plain, plain, x[:1], x[1:])
    found = train(ours, ModelParallel(ours, Spatial(axes="D"), ["cpu"] * 2), y[:1], y[1:])
    torch.testing.assert_close(found, wanted)


def test_a_pipeline_says_why_a_batch_norm_cannot_run() -> None:
    def forward(net: RunLayers, x: Tensor) -> Tensor:
        return net.conv(x) * net.norm(x.mean((2, 3, 4)))[..., None, None, None]

    net = RunLayers(forward, conv=nn.Conv3d(1, 1, 1), norm=nn.BatchNorm1d(1)).double()
    with pytest.raises(ParallelError, match=r"one value per channel.*larger split_size"):
        ModelParallel(net, Pipeline(split_size=1, record=False), COPIES)(make_batch())


def test_replicas_of_one_process_refuse_a_buffer_that_each_would_change() -> None:
    # Power iterations were made once for each replica, and once for the batch on one device.
    net = nn.utils.parametrizations.spectral_norm(nn.Conv3d(1, 2, 3)).double()
    model = DataParallel(net, join_mesh().replicas(2))
    with pytest.raises(ParallelError, match=r"changes its buffer .*_u, but this process computes 2 replicas"):
        model(make_batch())
    model.eval()
    model(make_batch())


def make_checkpointed(checkpoints: bool, momentum: float | None) -> nn.Module:
    """Return a convolution and a batch norm between convolutions, computed again in the backward pass or not."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        x = net.first(x)
        block = lambda y: torch.relu(net.norm(net.conv(y)))  # noqa: E731
        return net.last(x + (checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)))

    torch.manual_seed(0)
    norm = nn.BatchNorm3d(4, momentum=momentum)
    layers = {"first": convolution(1, 4), "conv": convolution(4, 4), "norm": norm, "last": convolution(4, 2)}
    return RunLayers(forward, **layers).double()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("split_size", [2, 4])
def test_a_pipeline_recomputes_a_batch_norm_of_the_networks_own_checkpoint(split_size, momentum):
    """Its recomputation saved two tensors less, as it had no running buffers: torch's checkpoint refused it."""
    plain, net = make_checkpointed(False, momentum), make_checkpointed(True, momentum)
    expected = plain if split_size == 4 else ModelParallel(plain, Pipeline(split_size=split_size), COPIES)
    model = ModelParallel(net, Pipeline(split_size=split_size), COPIES)
    for _ in range(2):
        x = make_batch(4)
        torch.testing.assert_close(train(net, model, x), train(plain, expected, x))
    torch.testing.assert_close([*net.buffers()], [*plain.buffers()])


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize(
    "change",
    [lambda parameter: setattr(parameter, "data", torch.zeros(2)), lambda parameter: parameter.requires_grad_(False)],
    ids=["memory", "frozen"],
)
def test_a_parameter_of_another_class_is_watched_where_it_lies(change: Callable[[nn.Parameter], object]) -> None:
    """A replay would read the memory that it had."""
    net = nn.Module()
    net.scale = OwnParameter(torch.ones(2))
    watch = Watch(net)
    assert not watch.changes()
    change(net.scale)
    assert [found.name for found in watch.changes()] == ["scale"]
    assert not watch.changes()
