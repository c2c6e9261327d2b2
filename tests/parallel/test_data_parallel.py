"""``DataParallel`` in training loops, its refusals, and its exact resumption."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_group import assert_all_well, expect_refusal, in_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.checkpointing.file import random_state, restore_random_state
from volseg.errors import ParallelError
from volseg.parallel import DataParallel, ModelParallel, Replicas, Spatial, get_replicas, join_mesh


def build(seed: int = 0, norm: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(seed)
    norm = nn.InstanceNorm3d(4) if norm is None else norm
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), norm, nn.LeakyReLU(), nn.Conv3d(4, 2, 1)).double()


def wrap(net: nn.Module, data: int = 2, spatial: int = 1, **settings: Any) -> DataParallel:
    mesh = join_mesh(data, spatial)
    model = net if spatial == 1 else ModelParallel(net, strategy=Spatial(), mesh=mesh.spatial_group)
    return DataParallel(model, mesh.replicas(**settings))


def draw(seed: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 1, 8, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own_loss(model: DataParallel, batch: Tensor) -> Tensor:
    (share,) = model.replicas.shares(len(batch))
    rows = model.replicas.deal(len(batch))[share.replica]
    result = model(batch[rows])
    result = result.full_tensor() if hasattr(result, "full_tensor") else result
    return result.square().mean() * share.weight


def say_gradients(model: nn.Module, plain: nn.Module) -> str | None:
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if (a.grad is None) != (b.grad is None):
            return f"{name}: {a.grad is not None} instead of {b.grad is not None}"
        if a.grad is not None and not torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12):
            return f"the gradient of {name} is off by {(a.grad - b.grad).abs().max()}"
    return None


# What training loops do.


def two_forwards() -> str | None:
    model, plain = wrap(build()), build()
    (own_loss(model, draw(1)) * own_loss(model, draw(1)).detach() + own_loss(model, draw(2, 3))).backward()
    rows = model.replicas.deal(2)
    parts = [plain(draw(1)[part]).square().mean() / 2 for part in rows]
    (sum(part * part.detach() for part in parts) + plain(draw(2, 3)).square().mean()).backward()
    return say_gradients(model, plain)


def two_losses() -> str | None:
    model, plain = wrap(build()), build()
    first, second = own_loss(model, draw(1)), own_loss(model, draw(2))
    second.backward()
    first.backward()
    (plain(draw(1)).square().mean() + plain(draw(2)).square().mean()).backward()
    return say_gradients(model, plain)


def ask_gradients() -> str | None:
    model, plain = wrap(build()), build()
    found = torch.autograd.grad(own_loss(model, draw(1)), list(model.parameters()))
    expected = torch.autograd.grad(plain(draw(1)).square().mean(), list(plain.parameters()))
    close = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, expected, strict=True))
    return None if close else "gradients differ"


def freeze_later() -> str | None:
    model, plain = wrap(build()), build()
    for frozen in (False, True, False):
        for net in (model, plain):
            net.zero_grad()
            for parameter in net.get_submodule("0").parameters():
                parameter.requires_grad_(not frozen)
        own_loss(model, draw(1)).backward()
        plain(draw(1)).square().mean().backward()
        if said := say_gradients(model, plain):
            return f"{frozen=}: {said}"
    return None


def change_output_in_place() -> str | None:
    model, plain = wrap(build()), build()
    (model(draw(1)[[dist.get_rank()]]).mul_(2).square().mean() / 2).backward()
    plain(draw(1)).mul(2).square().mean().backward()
    return say_gradients(model, plain)


def copy_in_one_process() -> str | None:
    model = wrap(build(dist.get_rank()))
    if dist.get_rank() == 0:
        other = copy.deepcopy(model)
        with torch.no_grad():
            if not torch.equal(other(draw(1)), model(draw(1))) or other.module is model.module:
                return "the copy is another network, or the same one"
    return None


def keep_names() -> str | None:
    model, plain = wrap(build(dist.get_rank())), build(0)
    if list(model.state_dict()) != list(plain.state_dict()) or get_replicas(model) is not model.replicas:
        return f"other names: {list(model.state_dict())}"
    # Built from other seeds, it has the first process's values.
    same = all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    return None if same else "the networks have other values than the first process's"


# What is refused.


class Choosing(nn.Module):
    """Chooses one of two branches by the process."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Conv3d(1, 1, 1) for _ in range(3))
        self.is_last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.last if self.is_last else self.other)(x)


def other_parameters() -> str | None:
    model = wrap(Choosing(last=dist.get_rank() == 1))
    # Whoever uses none of the last parameters makes the sums of the others, and none waits for it.
    return expect_refusal(
        "some replicas used other.weight, other.bias, last.weight, last.bias in a step",
        lambda: model(draw(1)[:1].float()).mean().backward(),
    )


def penalty() -> str | None:
    model = wrap(build())
    loss = own_loss(model, draw(1)) + sum(p.square().sum() for p in model.parameters())
    return expect_refusal("got a gradient that was not summed over the replicas", loss.backward)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))


def reentrant() -> str | None:
    model = wrap(Reentrant())
    return expect_refusal(
        "got a gradient that was not summed", lambda: model(draw(1)[:1].float()).square().mean().backward()
    )


class Counting(nn.Module):
    """Has a buffer computed from its own rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 1).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean()
        return self.conv(x)


def other_buffers() -> str | None:
    model = wrap(Counting())
    own_loss(model, draw(1)).backward()
    return expect_refusal("hold different values of their network: seen", lambda: own_loss(model, draw(2)))


def running_instance_norm() -> str | None:
    model = wrap(build(norm=nn.InstanceNorm3d(4, track_running_stats=True)))
    return expect_refusal("instance norm with running statistics", lambda: model(draw(1)[:1]))


@dataclass
class Output:
    logits: Tensor


class Hiding(nn.Conv3d):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


def hidden_outputs() -> str | None:
    model = wrap(Hiding(1, 1, 1).double())
    return expect_refusal("the network returns a Output", lambda: model(draw(1)))


def averaged_already() -> str | None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "spatial"))
    model = ModelParallel(build(), strategy="spatial", mesh=mesh)
    return expect_refusal("already averaged over the 'data' dimension of its mesh", lambda: wrap(model))


def another_mesh() -> str | None:
    return expect_refusal("a mesh of data 3 x spatial 1 needs 3 processes, but there are 2", lambda: join_mesh(3, 1))


def restore_other_states() -> str | None:
    model = wrap(build())
    state = random_state(model)
    state["passes"] = torch.Generator().manual_seed(dist.get_rank()).get_state()
    return expect_refusal("were given different random states", lambda: restore_random_state(state, model))


HABITS = [two_forwards, two_losses, ask_gradients, freeze_later, change_output_in_place]
HABITS += [copy_in_one_process, keep_names]
REFUSED = [other_parameters, penalty, reentrant, other_buffers, running_instance_norm, hidden_outputs]
REFUSED += [averaged_already, another_mesh, restore_other_states]


@pytest.mark.parametrize("habit", [*HABITS, *REFUSED])
def test_habits_serve_and_what_is_not_exact_is_refused(habit: Callable[[], str | None]) -> None:
    assert_all_well(in_group(2, habit))


def test_batch_norm_is_refused_in_rounds() -> None:
    model = DataParallel(build(norm=nn.BatchNorm3d(4)), Replicas(2))
    with pytest.raises(ParallelError, match="this process computes 2 parts of it one after the other"):
        model(draw(1))
    model.eval()
    model(draw(1))


def test_replicas_say_what_does_not_fit() -> None:
    with pytest.raises(ParallelError, match="a batch of 3 cannot be dealt to 4 replicas"):
        Replicas(4).deal(3)
    with (
        pytest.raises(ParallelError, match="this process computes the replicas"),
        DataParallel(build(), Replicas(2)).as_replica(2),
    ):
        pass
    with pytest.raises(ParallelError, match="1 is a SyncBatchNorm, which may sum over other processes"):
        DataParallel(build(norm=nn.SyncBatchNorm(4)), Replicas(2))
    model = DataParallel(build(), Replicas(2))
    with model.as_replica(1), pytest.raises(ParallelError, match="made 1 passes, but the first replica"):
        model(draw(1))


# Random numbers.


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout3d(self.first(x), 0.3, self.training)
        return self.last(F.dropout(x, 0.3, self.training))


def go_on(data: int, spatial: int) -> str | None:
    """Four steps whole are two steps, a state that is restored elsewhere, and two steps; validation changes nothing."""

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + dist.get_rank())
        net = Dropping().double()
        mesh = join_mesh(data, spatial)
        model = net if spatial == 1 else ModelParallel(net, strategy=Spatial(), mesh=mesh.spatial_group)
        model = model if data == 1 else DataParallel(model, mesh.replicas())
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        replicas = get_replicas(model)
        for step in steps:
            batch = draw(step, 4)
            rows = slice(None) if replicas is None else replicas.deal(4)[replicas.own[0]]
            result = model(batch[rows])
            result = result.full_tensor() if spatial > 1 else result
            (result.square().mean() / data).backward()
            optimizer.step()
            optimizer.zero_grad()

    def validate(model: nn.Module, times: int) -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(times):
                model(draw(1)[:1])
        model.train()

    whole, optimizer = begin(1)
    train(whole, optimizer, range(2))
    state = [whole.state_dict(), optimizer.state_dict(), random_state(whole)] if dist.get_rank() == 0 else None
    sent = [copy.deepcopy(state)]
    dist.broadcast_object_list(sent)  # the one checkpoint, of the first process
    validate(whole, 1 + int(os.environ["RANK"]) // spatial)
    train(whole, optimizer, range(2, 4))
    other, optimizer = begin(50)
    weights, moments, drawn = sent[0]
    other.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    restore_random_state(drawn, other)
    train(other, optimizer, range(2, 4))
    same = all(torch.equal(value, whole.state_dict()[name]) for name, value in other.state_dict().items())
    return None if same else "a training that goes on comes to other weights"


@pytest.mark.parametrize(("data", "spatial"), [(1, 2), (2, 1), (2, 2)])
def test_dropout_goes_on_exactly(data: int, spatial: int) -> None:
    assert_all_well(in_group(data * spatial, go_on, data, spatial))


def drop_on_replicas() -> list[Tensor]:
    """Return masks of two passes of this replica, and a number drawn afterwards."""
    torch.manual_seed(5)
    model = wrap(nn.Dropout(0.5))
    before = torch.get_rng_state()
    masks = [model(torch.ones(1, 64)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    return masks


def test_replicas_and_passes_drop_differently_and_leave_the_generators_alone() -> None:
    masks = [mask for found in in_group(2, drop_on_replicas) for mask in found]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4
