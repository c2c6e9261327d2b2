"""What a training loop does to a module means the same to a pipelined one."""

import copy
import random
import weakref
from typing import Any

import pytest
import torch
from beside_plain import RunLayers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, PartitionError
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.recorder import WARM_UP

ROUND_OFF = {"rtol": 1e-10, "atol": 1e-10}
THREE = ["cpu"] * 3


def conv(inputs: int = 2, outputs: int = 2) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


def volumes(batch: int = 5, side: int = 4, channels: int = 2) -> Tensor:
    return torch.randn(batch, channels, side, side, side, dtype=torch.float64)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_same_step(net: nn.Module, x: Tensor, cuts: list[str] | None = None, split_size: int = 2):
    """Same outputs and gradients as the plain network, batch after batch, run eagerly and from recordings."""
    net = net.double()
    for record, repeats in ((False, 2), (True, WARM_UP + 2)):
        ours, reference = copy.deepcopy(net), copy.deepcopy(net)
        model = ModelParallel(ours, strategy="pipeline", devices=THREE, split_size=split_size, cuts=cuts, record=record)
        for _ in range(repeats):
            x = x.flip(0)
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, actual = reference(theirs), model(mine)
            torch.testing.assert_close(actual, expected, **ROUND_OFF)
            expected.square().mean().backward()
            actual.square().mean().backward()
            torch.testing.assert_close(mine.grad, theirs.grad, **ROUND_OFF)
            torch.testing.assert_close(gradients(ours), gradients(reference), **ROUND_OFF)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(reference.named_buffers()), **ROUND_OFF)
    return model


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
    """Return a network with hooks of the user, which change outputs and gradients."""
    net = Reused()
    net.b.register_forward_hook(lambda module, args, output: output * 2)
    net.b.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    return net


NETWORKS = {
    "skips, changes in place": (Skips, [None, ["b", "d"], ["c", "e"]], True),
    "reused layers, tied weights": (Reused, [None, ["b", "tied"], ["twice", "b"]], True),
    "checkpoints": (lambda: Checkpointed(False), [None, ["second", "inside"], ["inside", "last"]], False),
    "reentrant checkpoints": (lambda: Checkpointed(True), [None, ["second", "inside"], ["inside", "last"]], False),
    "no_grad": (lambda: RunLayers(read_without_gradients_first, a=conv(), b=conv(), c=conv()), [["b", "c"]], True),
    "hooks": (build_hooked, [["b", "tied"]], False),
}
"""Networks, where they are cut, and whether their batches are recorded."""


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name, (_, each, _) in NETWORKS.items() for cuts in each])
def test_a_network_steps_as_the_plain_one(name, cuts):
    build, _, recorded = NETWORKS[name]
    model = assert_same_step(build(), volumes(), cuts)
    assert is_recorded(model) == recorded
    if isinstance(model.module, Reused):
        assert model.module.tied.weight is model.module.a.weight


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
    called twice on inputs that do not depend on the first, too."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.a(x)) + net.twice(x) + net.twice(net.b(x) * 3) + net.instance(net.b(x))

    norms = {name: nn.BatchNorm3d(2, momentum=momentum) for name in ("norm", "twice")}
    instance = nn.InstanceNorm3d(2, track_running_stats=True)
    net = RunLayers(run, a=conv(), b=conv(), **norms, instance=instance).double()
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


def test_measuring_leaves_no_trace():
    """The first call counts once: buffers, random state, gradients and hooks are as after one plain call."""
    net = nn.Sequential(conv(), nn.BatchNorm3d(2), nn.Dropout(0.5), conv()).double()
    reference, seen = copy.deepcopy(net), []
    net[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    x = volumes(4)
    model = ModelParallel(net, devices=THREE, split_size=4)
    torch.manual_seed(5)
    expected = reference(x)
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), expected, **ROUND_OFF)
    torch.testing.assert_close(dict(net.named_buffers()), dict(reference.named_buffers()), **ROUND_OFF)
    assert seen == [4]
    assert not gradients(net)


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


@pytest.mark.parametrize("record", [False, True])
def test_training_a_few_steps_ends_at_the_same_weights(record):
    net = Skips().double()
    reference = copy.deepcopy(net)
    # The optimizer is made before the network has been placed.
    model = ModelParallel(net, devices=THREE, split_size=2, record=record)
    for module in (reference, model):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(WARM_UP + 3):
            optimizer.zero_grad()
            module(volumes()).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(dict(net.named_parameters()), dict(reference.named_parameters()), **ROUND_OFF)


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
    assert two(volumes().float()).shape == (5, 2, 4, 4, 4)
    assert len(two.partition.stages) == 2


class Returns(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.layer, self.how = conv(), how

    def forward(self, x: Tensor):
        return self.how(self.layer(x))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda y: {"loss": y.mean()},
            r"output 0 of the network has shape \(\) for a micro-batch of 2; .* return per-sample",
        ),
        (lambda y: (y, y.mean((0, 2))), r"output 1 of the network has shape \(2, 4, 4\)"),
        (lambda y: (y, object()), r"output 1 of the network is object"),
    ],
)
def test_output_without_a_batch_is_refused(how, message):
    model = ModelParallel(Returns(how), devices=THREE, split_size=2)
    with pytest.raises(ParallelError, match=message):
        model(volumes(3).float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_size": 0}, "split_size is a number of samples .* got 0"),
        ({"split_size": 1, "devices": []}, "devices is a sequence of one device or more"),
        ({"split_size": 1, "cuts": ["b", "c", "d"]}, "3 cuts make 4 stages, and there are 3 devices"),
        ({"split_size": 1, "mesh": "any"}, "takes no mesh; for replicas wrap it: DistributedDataParallel"),
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


class Changing(nn.Module):
    """Does what ``how`` says, with a layer of its own before and after."""

    def __init__(self, how) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how, self.factor, self.calls = conv(), conv(), conv(), how, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.how is counting
        return self.c(self.how(self, self.a(x)))


def dropping(net: Changing, x: Tensor) -> Tensor:
    return net.b(x) if random.random() < 0.5 else x


def scaling(net: Changing, x: Tensor) -> Tensor:
    return net.b(x) * random.random()


def choosing(net: Changing, x: Tensor) -> Tensor:
    return net.b(x) + random.choice([x, x * 2])


def counting(net: Changing, x: Tensor) -> Tensor:
    return net.b(x) * net.calls


@pytest.mark.parametrize("how", [dropping, scaling, choosing, counting])
def test_forward_that_changes_is_never_recorded(how):
    random.seed(0)
    model = ModelParallel(Changing(how).double(), devices=THREE, split_size=1, cuts=["c"], record=True)
    for _ in range(WARM_UP + 3):
        model(volumes(6)).sum().backward()
    assert not is_recorded(model)


def test_recording_follows_attributes_modes_and_sizes():
    net = Changing(lambda net, x: F.dropout(net.b(x) * net.factor, 0.0, net.training)).double()
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


def test_several_inputs_and_outputs_from_a_recording():
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused_output = conv(), conv(), conv()

        def forward(self, x: Tensor, *, gain: Tensor, mode: str) -> dict[str, object]:
            first = self.a(x * gain)
            second = self.b(first)
            return {
                "two": (first, second),
                "half": second[:, 0],
                "no": self.unused_output(x),
                "mode": mode,
                "ids": first.argmax(1),
            }

    net = Many().double()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=THREE, split_size=2, cuts=["b", "unused_output"], record=True)
    for _ in range(WARM_UP + 2):
        x = volumes(4)
        # One factor per channel: as long as a micro-batch, yet no batch.
        ours, theirs = (torch.full((2, 1, 1, 1), 1.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
        actual, expected = model(x, gain=ours, mode="m"), reference(x, gain=theirs, mode="m")
        torch.testing.assert_close({**actual, "mode": 0}, {**expected, "mode": 0}, **ROUND_OFF)
        assert actual["mode"] == "m"
        for output in (actual, expected):
            (output["two"][0].sum() + output["half"].square().sum()).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, **ROUND_OFF)
        torch.testing.assert_close(gradients(net), gradients(reference), **ROUND_OFF)
    assert is_recorded(model)


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
