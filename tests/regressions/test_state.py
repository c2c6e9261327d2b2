# ruff: noqa: NPY002  (the generator that networks draw from)
"""State has one owner: stories of networks whose state, arguments or random numbers were another one's."""

import copy
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside_plain import assert_small, compare
from in_group import in_group
from made_up_networks import WithLayers
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import DataParallel, ModelParallel, Pipeline, Spatial, join_mesh
from volseg.parallel.state.module import remember
from volseg.parallel.state.watch import Watch
from volseg.parallel.verification.comparison import whole

# State has one owner: each story here ended in a wrong number without a word until the rule beside it was made.


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


def assert_same_training(plain: nn.Module, model: nn.Module, *inputs: Tensor, steps: int = 2) -> None:
    """Train both: outputs, every gradient, buffers, counters and parameters are equal after each step."""
    assert_small(compare(plain, model, inputs, steps=steps))


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


# --- no_grad first -----------------------------------------------------------------------------------------------


def conditioned(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = layers["a"](x)
    return layers["b"](layers["a"](x) * first)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_parameter_that_is_used_without_gradients_first(devices: list[str]) -> None:
    """Self-conditioning: the copies made under no_grad served the later uses, and their gradients were missing."""
    plain = WithLayers(conditioned, a=convolution(), b=convolution()).double()
    assert_same_training(plain, spatial(plain, devices), volume())


def test_a_parameter_that_is_used_without_gradients_last() -> None:
    """Copies with history serve under no_grad, and what comes out has none."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        with torch.no_grad():
            gate = layers["a"](y)
            assert not gate.requires_grad
        return layers["a"](y * gate)

    plain = WithLayers(forward, a=convolution()).double()
    assert_same_training(plain, spatial(plain), volume())


def test_a_parameter_cast_without_gradients_first() -> None:
    """The same under autocast, whose converted copies are kept, too."""
    plain = WithLayers(conditioned, a=convolution(), b=convolution())
    model, x = spatial(plain, ["cpu"]), volume().float()
    for net in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            net(x).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-3)  # bfloat16 has three digits


def test_a_parameter_that_is_frozen_and_freed_within_a_pass() -> None:
    """A frozen use took copies with history (a gradient too many); a freed one those without (none)."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        layers["a"].requires_grad_(False)
        y = layers["a"](y)
        layers["a"].requires_grad_(True)
        return layers["a"](y)

    plain = WithLayers(forward, a=convolution()).double()
    assert_same_training(plain, spatial(plain), volume())
    frozen = WithLayers(
        lambda layers, x: layers["a"].requires_grad_()(x), a=convolution().requires_grad_(False)
    ).double()
    assert_same_training(frozen, spatial(frozen), volume(), steps=1)


def test_a_parameter_that_forward_changes() -> None:
    """A weight clipped between two uses was read as it was at the first, on every device but the first."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = layers["a"](x)
            layers["a"].weight.clamp_(-0.05, 0.05)
            layers["a"].bias.data = layers["a"].bias.data * 2
        return layers["b"](layers["a"](x) + y)

    plain = WithLayers(forward, a=convolution(), b=convolution()).double()
    assert_same_training(plain, spatial(plain), volume())


def test_modes_alternate() -> None:
    """Inference, evaluation and training in turn leave nothing behind for each other."""
    plain = nn.Sequential(convolution(1, 4), nn.BatchNorm3d(4), nn.ReLU(), convolution(4, 1)).double()
    model, x = spatial(plain), volume()
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(full(model(x)).clone(), plain(x).clone())
        for net in (plain, model):
            net.eval()
        with torch.no_grad():
            torch.testing.assert_close(full(model(x)), plain(x))
        assert_same_training(plain, model, x, steps=1)
        for net in (plain, model):
            net.train()
        assert_same_training(plain, model, x, steps=1)


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


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm3d(4),
    "tracked instance": lambda: nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
    "cumulative batch": lambda: nn.BatchNorm3d(4, momentum=None),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_a_recomputed_block_are_updated_once(norm: str, devices: list[str]) -> None:
    """They were updated once more in the recomputation: num_batches_tracked 2 after one batch."""
    plain = nn.Sequential(block(NORMS[norm]()), block(NORMS[norm](), nn.PReLU())).double()
    assert_same_training(plain, spatial(plain, devices, checkpoint="all"), volume())


@pytest.mark.parametrize("kind", ["parametrization", "old"])
def test_spectral_norm_in_a_recomputed_block(kind: str) -> None:
    """Its power iteration went on in the recomputation: gradients ten percent off."""
    wrap = parametrizations.spectral_norm if kind == "parametrization" else old_spectral_norm
    plain = nn.Sequential(*(nn.Sequential(wrap(convolution(1, 4)), nn.ReLU(), wrap(convolution(4, 1))) for _ in "ab"))
    model = spatial(plain.double(), checkpoint="all")
    assert_same_training(plain, model, volume())


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


class Counting(nn.Module):
    """Counts its calls in Python, in a buffer, and in a list; the counts scale its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = convolution(1, 4), convolution(4, 1)
        self.calls, self.seen = 0, [0.0]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(self.seen[-1] + 1)
        return self.b(self.a(x) * (self.calls + self.count.item() + self.seen[-1]))


def test_what_a_recomputed_block_counts() -> None:
    """Counted once, and recomputed with the count of then, also where one block is called twice in a pass."""
    plain = WithLayers(lambda layers, x: layers["a"](layers["a"](x)) + x, a=Counting()).double()
    model = spatial(plain, checkpoint="all")
    assert_same_training(plain, model, volume())
    assert model.module.layers["a"].calls == plain.layers["a"].calls == 4
    assert model.module.layers["a"].seen == plain.layers["a"].seen


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


def test_weights_changed_before_a_recomputation_are_refused() -> None:
    """Torch refuses them without a recomputation; with one they were taken for those of the forward pass."""
    model = spatial(block(nn.Identity()).double(), checkpoint="all")
    loss = model(volume()).square().mean()
    with torch.no_grad():
        model.module[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()


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
    ours = volume()
    theirs = ours.clone()
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


def unshardable(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    layers.calls = getattr(layers, "calls", 0) + 1
    x.mul_(2)
    factor = random.random() * np.random.random()
    return torch.fft.fft(layers["norm"](layers["a"](x)), dim=2).real * layers.calls * factor


def test_an_attempt_that_is_given_up_leaves_no_trace() -> None:
    """The first forward ran twice on the caller's tensor, and Python counted twice."""
    net = WithLayers(unshardable, a=convolution(), norm=nn.BatchNorm3d(1)).double()
    x, found = volume()[:1], []  # one micro-batch
    for strategy in ("pipeline", "auto"):
        model, given = ModelParallel(copy.deepcopy(net), strategy=strategy, devices=["cpu"] * 2), x.clone()
        seed()
        output = model(given).detach()
        found.append(
            (output, random.random(), np.random.random(), given, model.state_dict(), model.module.layers.calls)
        )
        assert model.chosen == "pipeline"
    torch.testing.assert_close(*found)


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


# --- while a CUDA graph is recorded ------------------------------------------------------------------------------


def test_a_block_that_draws_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay drew other numbers in the recomputation than in the block, and so the gradient of another function."""
    net = nn.Sequential(Random(DRAWS["F.dropout"]), block(nn.BatchNorm3d(4))).double()
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
    with pytest.raises(ParallelError, match="or has not run before"):
        begin(nn.Conv3d(1, 1, 1))


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

    plain = nn.Sequential(convolution(), Block(), convolution()).double()
    assert_same_training(plain, spatial(plain, devices, checkpoint="all"), volume(), steps=1)


# What an attack on strategies found: arguments that are one tensor, state over replicas, norms in micro-batches.


COPIES = ["cpu", "cpu:1"]


def change_first(layers: nn.ModuleDict, one: Tensor, other: Tensor) -> Tensor:
    one.add_(1)
    return layers["conv"](one) * layers["conv"](other)


def make_changing() -> nn.Module:
    torch.manual_seed(0)
    return WithLayers(change_first, conv=nn.Conv3d(1, 2, 3, padding=1)).double()


def make_batch(samples: int = 2) -> Tensor:
    return torch.randn(samples, 1, 5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


def train(net: nn.Module, call: nn.Module, *given: Tensor) -> list[Tensor]:
    """Return the output, the gradients, and the arguments after the call."""
    output = whole(call(*given))
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *given]


@pytest.mark.parametrize(
    "strategy", [Spatial(axes="D"), Spatial(axes="D", checkpoint="all"), Pipeline(split_size=1, record=False)]
)
def test_a_tensor_that_is_given_twice_is_changed_for_both(strategy: Spatial | Pipeline) -> None:
    # Each place had slabs of its own on several devices: the second one kept the old values. In a pipeline autograd
    # found that a later micro-batch had changed what it saved of an earlier one, and the backward pass broke.
    plain = make_changing()
    ours = copy.deepcopy(plain)
    one, other = make_batch(), make_batch()
    wanted = train(plain, plain, one, one)
    torch.testing.assert_close(train(ours, ModelParallel(ours, strategy, COPIES), other, other), wanted)


@pytest.mark.parametrize("strategy", [Spatial(axes="D"), Pipeline(split_size=1, record=False)])
def test_arguments_that_share_memory_are_refused_where_one_is_changed(strategy: Spatial | Pipeline) -> None:
    model = ModelParallel(make_changing(), strategy, COPIES)
    x = make_batch()
    with pytest.raises((UnsupportedOperatorError, ParallelError), match=r"shares? (its )?memory.*clone"):
        model(x, x[:])


def test_arguments_side_by_side_in_memory_are_not_refused() -> None:
    plain, x = make_changing(), make_batch()
    ours, y = copy.deepcopy(plain), x.clone()
    wanted = train(plain, plain, x[:1], x[1:])
    found = train(ours, ModelParallel(ours, Spatial(axes="D"), COPIES), y[:1], y[1:])
    torch.testing.assert_close(found, wanted)


def test_a_pipeline_gives_each_micro_batch_its_own_input_to_change() -> None:
    # The backward pass broke: "modified by an inplace operation", of another micro-batch.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Conv3d(1, 2, 3), nn.Conv3d(2, 1, 1)).double()
    ours = copy.deepcopy(plain)
    x, y = make_batch(3), make_batch(3)
    model = ModelParallel(ours, Pipeline(split_size=1, record=False), COPIES)
    torch.testing.assert_close(train(ours, model, y), train(plain, plain, x))


def test_a_pipeline_trains_a_batch_norm_of_no_momentum() -> None:
    # ZeroDivisionError at the first batch: its counter was kept at 0 where nothing should remain.
    torch.manual_seed(0)
    layers = nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2, momentum=None), nn.ReLU(), nn.Conv3d(2, 1, 1)
    plain = nn.Sequential(*layers).double()
    ours = copy.deepcopy(plain)
    model = ModelParallel(ours, Pipeline(split_size=1, record=False), COPIES)
    for _ in range(3):
        x = make_batch()
        plain(x)
        model(x)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))


def test_a_pipeline_says_why_a_batch_norm_cannot_run() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["conv"](x) * layers["norm"](x.mean((2, 3, 4)))[..., None, None, None]

    net = WithLayers(forward, conv=nn.Conv3d(1, 1, 1), norm=nn.BatchNorm1d(1)).double()
    with pytest.raises(ParallelError, match=r"one value per channel.*larger split_size"):
        ModelParallel(net, Pipeline(split_size=1, record=False), COPIES)(make_batch())


def test_replicas_of_one_process_refuse_a_buffer_that_each_would_change() -> None:
    # Power iterations were made once for each replica, and once for the batch on one device.
    net = nn.utils.parametrizations.spectral_norm(nn.Conv3d(1, 2, 3)).double()
    model = DataParallel(net, join_mesh().replicas(2))
    with pytest.raises(ParallelError, match=r"changes its buffer .*_u, and this process computes 2 replicas"):
        model(make_batch())
    model.eval()
    model(make_batch())


def call_a_norm(rank_count: int) -> str:
    del rank_count

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        x = F.batch_norm(layers["first"](x), None, None, training=layers.training)
        return layers["last"](x)

    net = WithLayers(forward, first=nn.Conv3d(1, 2, 1), last=nn.Conv3d(2, 1, 1)).double()
    model = ModelParallel(net, Pipeline(split_size=1, record=False), COPIES)
    replicas = DataParallel(model, join_mesh(2).replicas())
    try:
        replicas(make_batch())
    except ParallelError as fault:
        return str(fault)
    return "was run"


def test_replicas_of_a_pipeline_refuse_a_norm_that_is_called_as_a_function() -> None:
    # A module was refused; the function took the statistics of micro-batches without a word.
    for said in in_group(2, call_a_norm, 2):
        assert "calls batch_norm for training, which uses the statistics of a whole batch" in said


class Checkpointed(nn.Module):
    """A convolution and a batch norm, which are computed again in the backward pass if that is asked for."""

    def __init__(self, checkpoints: bool, momentum: float | None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.conv = nn.Conv3d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4, momentum=momentum)

    def compute(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x))


def make_checkpointed(checkpoints: bool, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    parts = (Checkpointed(checkpoints, momentum) for _ in range(2))
    return nn.Sequential(nn.Conv3d(1, 4, 1), *parts, nn.Conv3d(4, 2, 1)).double()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("split_size", [2, 4])
def test_a_pipeline_recomputes_a_batch_norm_of_the_networks_own_checkpoint(split_size, momentum):
    """Its recomputation saved two tensors less, as it had no running buffers: torch's checkpoint refused it."""
    plain, net = make_checkpointed(False, momentum), make_checkpointed(True, momentum)
    expected = plain if split_size == 4 else ModelParallel(plain, Pipeline(split_size=split_size), COPIES)
    model = ModelParallel(net, Pipeline(split_size=split_size), COPIES)
    for _ in range(2):
        x = make_batch(4)
        for one, other in zip(train(net, model, x), train(plain, expected, x), strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: setattr(parameter, "data", torch.zeros(2)),
        lambda parameter: parameter.requires_grad_(False),
    ],
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
