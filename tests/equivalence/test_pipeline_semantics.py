"""Operations of a training loop on a module have the same effect on a pipelined one."""

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from beside_plain import RunLayers
from in_group import in_group
from micro_batches import ROUND_OFF, assert_same_steps, conv, gradients, volumes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, PartitionError
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.recorder import WARM_UP

THREE = ["cpu"] * 3


def is_recorded(model: ModelParallel) -> bool:
    """Whether batches are being replayed."""
    return model.strategy.is_replaying


class Skips(nn.Module):
    """Skips over every distance, in-place activations and additions, functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (conv() for _ in range(5))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.relu(self.a(x))
        second = F.elu(self.b(first) * 2, inplace=True)
        third = self.c(second)
        third += second
        fourth = self.d(torch.cat([third[:, :1], first[:, 1:]], 1))
        fourth[:, 0] = x[:, 1] * 0.5
        return self.e(fourth) + first


class Reused(nn.Module):
    """One layer called on several stages, one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice, self.b, self.tied = conv(), conv(), conv(), conv()
        self.tied.weight = self.a.weight
        self.act = nn.PReLU(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.act(self.twice(self.b(self.act(self.twice(self.a(x)))))))


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = conv(), nn.InstanceNorm3d(2, affine=True), nn.Dropout3d(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.norm(self.conv(x)))) + x


class Checkpointed(nn.Module):
    """Checkpoints whole children, and half of one inside itself."""

    class Inside(Block):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return checkpoint(self.half, x, skip, use_reentrant=False)

        def half(self, x: Tensor, skip: Tensor) -> Tensor:
            return torch.cat([F.relu(self.norm(self.conv(x)))[:, :1], skip[:, :1]], 1) * skip

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.inside, self.last = Block(), Block(), self.Inside(), conv()

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.first, x, use_reentrant=self.reentrant)
        second = checkpoint(self.second, first, use_reentrant=self.reentrant)
        return self.last(self.inside(second, first))


def read_without_gradients_first(net: Any, x: Tensor) -> Tensor:
    """Read two layers without gradients, then with."""
    first = net.a(x)
    second = net.b(first)
    with torch.no_grad():
        gate = (second + first).sigmoid()
    return net.c(second * gate + first)


def build_hooked() -> nn.Module:
    """Return a network with user hooks that change outputs and gradients."""
    net = Reused()
    net.b.register_forward_hook(lambda module, args, output: output * 2)
    net.b.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    return net


def chain(how: Callable[..., object], **more: object) -> RunLayers:
    return RunLayers(how, **{"a": conv(), "b": conv(), **more})


def with_spectral_norm() -> RunLayers:
    net = chain(lambda net, x: net.b(net.a(x)))
    spectral_norm(net.a)
    return net


def with_shapes_of_a_hook() -> RunLayers:
    net = chain(lambda net, x: net.b(net.a(x)), a=conv(4, 2))
    net.a.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0] * 2], 1),))
    return net


def moving_codebook(net: RunLayers, x: Tensor) -> Tensor:
    features = net.a(x)
    with torch.no_grad():
        net.t.data.lerp_(features.mean((0, 2, 3, 4)), 0.5)
    return net.b(features) * net.t.clone().view(1, 2, 1, 1, 1)


def embedded(net: RunLayers, x: Tensor) -> Tensor:
    return net.b(net.a(x)) + net.table(torch.tensor([0, 1])).view(1, 2, 1, 1, 1)


def array_drawn(net: RunLayers, x: Tensor) -> Tensor:
    return net.b(net.a(x)) * torch.from_numpy(np.random.rand(1))  # noqa: NPY002


def called_as_counted(net: RunLayers, x: Tensor) -> Tensor:
    net.calls += 1
    return net.b(net.a(x)) * net.calls


def steepest(net: RunLayers, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = net.a(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.b(point).square().sum(), point)
    return net.b(point - slope) + net.c(x)


def differentiated(net: RunLayers, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)) + torch.func.grad(lambda v: v.square().sum())(x))


class Clips(torch.autograd.Function):
    """Its backward pass branches on a value."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 0 if gradient.mean().item() > 0 else gradient


PROMPT = torch.ones(2, dtype=torch.float64, requires_grad=True)

AT_B, ANYWHERE = [["b"]], [None, ["b"], ["c"]]

NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[list[str] | None], bool | None]] = {
    "skips, changes in place": (Skips, [None, ["b", "d"], ["c", "e"]], True),
    "reused layers, tied weights": (Reused, [None, ["b", "tied"], ["twice", "b"]], True),
    "checkpoints": (lambda: Checkpointed(False), [None, ["second", "inside"], ["inside", "last"]], False),
    "reentrant checkpoints": (lambda: Checkpointed(True), [None, ["second", "inside"], ["inside", "last"]], False),
    "no_grad": (lambda: chain(read_without_gradients_first, c=conv()), [["b", "c"]], True),
    "hooks": (build_hooked, [["b", "tied"]], False),
    # The network was measured without the hooks that it cannot run without.
    "hook that changes shapes": (with_shapes_of_a_hook, [None, ["b"]], None),
    # No function shows what NumPy drew, so every batch did the same to look at, and a replay kept the first factor.
    "drawn array": (lambda: chain(array_drawn), AT_B, False),
    "drawn number": (lambda: chain(lambda net, x: net.b(net.a(x)) * random.random()), AT_B, False),
    "counted calls": (lambda: chain(called_as_counted, calls=0), AT_B, False),
    # A branch on a value was recorded as it went once (on hosts, and for tensors of the host beside a GPU).
    "branch on a value": (lambda: chain(lambda net, x: net.b(net.a(x)) * (2 if x.mean() > 0 else 3)), AT_B, False),
    # MONAI's quantiser writes its codes through ``.data`` of a parameter, which has no versions and is no buffer.
    "codebook": (lambda: chain(moving_codebook, t=nn.Parameter(torch.ones(2), requires_grad=False)), AT_B, False),
    # ``max_norm`` changes the parameter in forward; runs that do not count must not.
    "embedding": (lambda: chain(embedded, table=nn.Embedding(2, 1, max_norm=0.5)), AT_B, False),
    # Its power iteration was taken twice more by the attempt to record.
    "spectral norm": (with_spectral_norm, AT_B, None),
    # A replay kept the branch of the recorded batch, and a trained tensor that is no parameter got no gradient.
    "branch of backward": (lambda: chain(lambda net, x: net.b(Clips.apply(net.a(x)))), AT_B, False),
    "no parameter": (
        lambda: chain(lambda net, x: net.b(net.a(x).detach() + PROMPT.view(1, 2, 1, 1, 1)).mul(1.0)),
        AT_B,
        False,
    ),
    # Measuring dropped what derivatives and maps inside need, or asked a wrapped tensor for its memory.
    "autograd.grad": (lambda: chain(steepest, c=conv()), ANYWHERE, None),
    "func.grad": (lambda: chain(differentiated, c=conv()), [None, ["c"]], None),
    "vmap": (
        lambda: chain(lambda net, x: net.c(torch.vmap(lambda v: v * v.mean())(net.b(net.a(x)))), c=conv()),
        ANYWHERE,
        None,
    ),
    "vmap of a layer": (
        lambda: chain(lambda net, x: net.c(net.b(torch.vmap(net.a)(x[:, None])[:, 0])), c=conv()),
        ANYWHERE,
        None,
    ),
}
"""Networks, where they are cut, and whether their batches are replayed; None where they may be."""


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name, (_, each, _) in NETWORKS.items() for cuts in each])
def test_a_network_steps_as_the_plain_one(name, cuts, record):
    build, _, recorded = NETWORKS[name]
    batches = [(volumes(5),) for _ in range(WARM_UP + 3 if record else 3)]
    model = assert_same_steps(build().double(), batches, cuts=cuts, record=record)
    assert is_recorded(model) <= record
    assert recorded is None or is_recorded(model) == (record and recorded)
    if isinstance(model.module, Reused):
        assert model.module.tied.weight is model.module.a.weight


def test_what_lies_inside_a_derivative_stays_together():
    with pytest.raises(PartitionError, match="no stage can start at 'b'"):
        assert_same_steps(chain(differentiated, c=conv()).double(), [(volumes(),)], cuts=["b"])


def test_dropout_draws_the_same_again_when_checkpointed():
    def run(net: Any, x: Tensor) -> Tensor:
        return net.b(checkpoint(net.block, net.a(x), use_reentrant=False))

    torch.manual_seed(0)
    net = RunLayers(run, a=conv(), block=Block(p=0.5), b=conv()).double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=5)
    x = volumes()
    model.strategy.plan(x)
    torch.manual_seed(3)
    expected = reference(x)
    torch.manual_seed(3)
    actual = model(x)
    torch.testing.assert_close(actual, expected, **ROUND_OFF)
    expected.sum().backward()
    actual.sum().backward()
    torch.testing.assert_close(gradients(net), gradients(reference), **ROUND_OFF)


@pytest.mark.parametrize(("momentum", "record"), [(0.1, False), (None, False), (0.1, True), (None, True)])
def test_running_statistics_are_those_of_the_whole_batch(momentum, record):
    """The first norm sees what the plain network's sees, so its running statistics must be equal; the second,
    called twice on inputs that do not depend on the first, too.

    ``torch.batch_norm``, called directly, updated its running statistics once per micro-batch."""

    def run(net: Any, x: Tensor) -> Tensor:
        native = torch.batch_norm(x, None, None, net.mean, net.var, True, 0.1, 1e-5, False)
        own = F.batch_norm(x, net.mean2, net.var2, training=True)
        by_modules = net.norm(net.a(x)) + net.twice(x) + net.twice(net.b(x) * 3) + net.instance(net.b(x))
        return by_modules + native * own

    norms = {name: nn.BatchNorm3d(2, momentum=momentum) for name in ("norm", "twice")}
    instance = nn.InstanceNorm3d(2, track_running_stats=True)
    net = RunLayers(run, a=conv(), b=conv(), **norms, instance=instance).double()
    for name in ("mean", "var", "mean2", "var2"):
        net.register_buffer(name, torch.ones(2).double())
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2, cuts=["norm", "b"], record=record)
    for _ in range(WARM_UP + 2):
        x = volumes(5) * 2 + 1
        model(x), reference(x)
    torch.testing.assert_close(dict(net.named_buffers()), dict(reference.named_buffers()), **ROUND_OFF)
    assert net.norm.num_batches_tracked == WARM_UP + 2
    assert net.twice.num_batches_tracked == 2 * WARM_UP + 4
    # A momentum that counts batches is read by Python each time.
    assert is_recorded(model) == (record and momentum is not None)


def test_autocast_reaches_every_stage():
    net = Skips()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2)
    x = volumes().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = torch.cat([reference(piece) for piece in x.split(2)]), model(x)
    assert actual.dtype == torch.bfloat16
    # The same bf16 operations on the same micro-batches.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    actual.float().square().mean().backward()
    expected.float().square().mean().backward()
    # bf16 gradients of a parameter are summed over micro-batches in another order: eight bits of mantissa.
    torch.testing.assert_close(gradients(net), gradients(reference), rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7])
def test_any_batch_size_and_changing_volume_size(batch):
    net = Reused().double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=3)
    for side in (4, 6, 4):
        x = volumes(batch, side)
        torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)


@pytest.mark.parametrize("record", [False, True])
def test_gradients_accumulate_and_graphs_interleave(record):
    net = Skips().double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2, record=record)
    for _ in range(WARM_UP + 1):
        model(volumes(2))  # a recording exists, and its one set of activations must not be overwritten
    x, y = volumes(4), volumes(4)
    for module in (reference, model):
        first, second = module(x[:2]), module(y[:2])
        (second.square().sum() + first.sum()).backward()
        module(x[2:]).sum().backward()
    torch.testing.assert_close(gradients(net), gradients(reference), **ROUND_OFF)


def test_state_and_modes_before_and_after_the_first_call(tmp_path):
    net, plain = Reused().double(), Reused().double()
    keys = list(plain.state_dict())
    model = ModelParallel(net, devices=THREE, split_size=2)
    assert list(model.state_dict()) == keys
    model.load_state_dict(plain.state_dict())
    x = volumes()
    torch.testing.assert_close(model(x), plain(x), **ROUND_OFF)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = ModelParallel(Reused().double(), devices=THREE, split_size=1)
    other(x)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(other(x), plain(x), **ROUND_OFF)
    model.eval()
    assert not any(module.training for module in net.modules())
    model(x).sum().backward()
    model.zero_grad()
    assert not gradients(net)


def test_the_partition_is_printable_after_the_first_call_and_its_layers_can_be_called_alone():
    net, x = Skips().double(), volumes(6)
    model = ModelParallel(net, devices=THREE, split_size="auto")
    with pytest.raises(ParallelError, match="is not cut yet: call the model once"):
        _ = model.partition
    first = model(x)
    torch.testing.assert_close(model(x), first)
    assert model.partition.samples in (1, 2, 4, 6)
    assert str(model.partition).startswith("stage  device")
    assert [name for stage in model.partition.stages for name in stage.modules] == ["a", "relu", "b", "c", "d", "e"]
    torch.testing.assert_close(net.c(x), F.conv3d(x, net.c.weight, net.c.bias, padding=1), **ROUND_OFF)
    two = ModelParallel(nn.Sequential(conv(), conv()), devices=["cpu"] * 5, split_size=1)  # more devices than layers
    assert two(volumes().float()).shape == (4, 2, 4, 4, 4)
    assert len(two.partition.stages) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_size": 0}, "split_size is a number of samples .* got 0"),
        ({"split_size": 1, "devices": []}, "devices must be a sequence of at least one device"),
        ({"split_size": 1, "cuts": ["b", "c", "d"]}, "3 cuts make 4 stages, but there are 3 devices"),
        ({"split_size": 1, "mesh": "any"}, "takes no mesh; for replicas wrap it: DataParallel"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ParallelError, match=message):
        ModelParallel(Skips(), **{"devices": THREE, **arguments})


def test_impossible_cuts_and_calls_are_refused():
    model = ModelParallel(Skips(), devices=THREE, split_size=1, cuts=["relu"])
    with pytest.raises(PartitionError, match=r"no stage can start at 'relu': .* Stages can start at b, c, d, e"):
        model(volumes().float())
    with pytest.raises(ParallelError, match=r"needs a tensor argument \(B, \.\.\.\) with B >= 1, got nothing"):
        model()


def test_unforeseen_change_in_place_on_another_stage_is_refused():
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.moody = conv(), conv(), False

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            second = self.b(first)
            if self.moody:
                first.mul_(2)
            return second + first

    net = Moody()
    model = ModelParallel(net, devices=THREE, split_size=2, cuts=["b"])
    x = volumes().float()
    model(x)
    net.moody = True
    with torch.no_grad(), pytest.raises(PartitionError, match="mul_ changes in place a tensor of stage 0"):
        model(x)


def test_recording_follows_attributes_modes_and_sizes():
    def run(net: Any, x: Tensor) -> Tensor:
        return net.c(F.dropout(net.b(net.a(x)) * net.factor, 0.0, net.training))

    net = chain(run, c=conv(), factor=1.0).double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2, cuts=["b", "c"], record=True)
    for factor, batch, mode in [(1.0, 4, True), (3.0, 4, True), (3.0, 5, True), (3.0, 5, False), (1.0, 4, True)]:
        net.factor = reference.factor = factor
        net.train(mode), reference.train(mode)
        for _ in range(WARM_UP + 2):
            x = volumes(batch)
            torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)
            with torch.no_grad():
                torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)
    assert is_recorded(model)


def test_recorded_dropout_draws_anew():
    net = nn.Sequential(conv(), nn.Dropout(0.5), conv()).double()
    model = ModelParallel(net, devices=THREE, split_size=2, record=True)
    x = volumes(4)
    outputs = [model(x) for _ in range(WARM_UP + 3)]
    assert is_recorded(model)
    assert not torch.equal(outputs[-1], outputs[-2])


def test_second_backward_through_a_recording_is_refused():
    model = ModelParallel(Skips().double(), devices=THREE, split_size=2, record=True)
    for _ in range(WARM_UP + 1):
        loss = model(volumes(4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ParallelError, match=r"ran a second time.* record=False"):
        loss.backward()


@pytest.mark.parametrize("record", [False, True])
def test_inference_mode_between_training_steps(record):
    net = nn.Sequential(conv(), nn.BatchNorm3d(2), conv(), nn.ReLU(inplace=True), conv()).double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2, record=record)
    for _ in range(WARM_UP + 2):
        x = volumes(3)
        net.eval(), reference.eval()
        with torch.inference_mode():
            torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)
        net.train(), reference.train()
        model(x), reference(x)
        torch.testing.assert_close(dict(net[1].named_buffers()), dict(reference[1].named_buffers()), **ROUND_OFF)


def test_copies_for_other_stages_end_with_forward():
    """Backward keeps the sigmoid's output on its stage; the copy of it, which an addition reads, is not kept."""
    made = []

    def watch(net: Any, x: Tensor) -> Tensor:
        gate = net.a(x).sigmoid()
        made.append(weakref.ref(gate))
        return net.b(x) + gate

    net = RunLayers(watch, a=conv(), b=conv()).double()
    model = ModelParallel(net, devices=THREE, split_size=4, cuts=["b"], record=False)
    output = model(volumes(4))
    assert made[-1]() is None or not hasattr(made[-1](), "_volseg_copies")
    output.sum().backward()


# Replicas of a pipeline: ``DistributedDataParallel`` around ``ModelParallel``, two processes over gloo.


WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(torch.relu(self.norm(self.b(first)))) + first


def train(record: bool) -> None:
    """Compare this rank's weights after some steps with those of one plain network on the whole batch."""
    torch.manual_seed(0)
    net = Net().double()
    plain = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * 3, split_size=1, record=record)
    x = torch.randn(4, 2, 4, 4, 4, dtype=torch.float64)
    own = x.tensor_split(WORLD)[dist.get_rank()]
    model.strategy.plan(own)
    replica = nn.parallel.DistributedDataParallel(model)
    ours = torch.optim.SGD(replica.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(6):
        for module, optimizer, batch in ((replica, ours, own), (plain, theirs, x)):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    # Means of halves are averaged in another order than the mean of the whole.
    torch.testing.assert_close(dict(net.named_parameters()), dict(plain.named_parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("record", [False, True])
def test_replicas_of_a_pipeline_train_as_one_network(record: bool) -> None:
    in_group(WORLD, train, record)
