"""The rules of ``test_state`` where each process holds one slab, and what only processes can do: differ."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside_plain import RunLayers, assert_small, compare
from in_group import assert_all_well, expect_refusal, in_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel
from volseg.parallel.processes.group import _message_groups


def convolution(inputs: int = 1, outputs: int = 1) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


def volume() -> Tensor:
    return torch.randn(2, 1, 12, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def spatial(net: nn.Module, **options: Any) -> ModelParallel:
    return ModelParallel(net, strategy="spatial", **options)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build().double()


def alike(tensor: Tensor) -> bool:
    """Say whether all processes hold the same."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return all(torch.equal(other, tensor) for other in everyone)


def dropped_in_evaluation() -> str | None:
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())

    def forward(net: RunLayers, x: Tensor) -> tuple[Tensor, ...]:
        coarse = F.dropout(F.adaptive_avg_pool3d(x, 1), 0.5)
        return F.dropout3d(x, 0.5), coarse, F.dropout(x, 0.5), x * random.random()

    model = spatial(RunLayers(forward)).eval()
    ones = torch.ones(1, 64, 8, 4, 4, dtype=torch.float64)
    channels, coarse, voxels, factor = model(ones)
    outside = F.dropout3d(voxels, 0.5, True).full_tensor() - voxels.full_tensor() * 2
    kept = channels.full_tensor().flatten(2)
    wrong = {
        "channels": not torch.equal(kept, kept[..., :1].expand_as(kept)),
        "some": not 10 < int((kept[..., 0] == 0).sum()) < 54,
        "coarse": not alike(coarse),
        "factor": not alike(factor.full_tensor().flatten()[:1]),
        "voxels": torch.equal(*voxels.full_tensor().chunk(2, 2)),
        "outside": not all(bool((part == 0).all()) or bool((part != 0).any()) for part in outside[0]),
    }
    halves = (F.dropout3d(voxels * 0 + 1, 0.5, True)).full_tensor().chunk(2, 2)
    wrong["outside of forward"] = not torch.equal(*halves)
    return str(wrong) if any(wrong.values()) else None


class Various(nn.Module):
    """Parameters and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(convolution(1, 3), nn.BatchNorm3d(3), nn.Conv3d(3, 1, 1))
        self.coarse = nn.Parameter(torch.randn(3).half())
        self.brain = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("table", torch.randint(9, (4,)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("roots", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.table.sum()


def weights_that_differ() -> str | None:
    torch.manual_seed(dist.get_rank())
    net = Various()
    before = [tensor.clone() for tensor in (*net.parameters(), *net.buffers())]
    model = spatial(net)
    after = [*net.parameters(), *net.buffers()]
    if not all(alike(tensor.detach().reshape(-1).view(torch.uint8)) for tensor in after):
        return "not all alike"
    first = dist.get_rank() > 0 or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model(volume().float()).mean().backward()
    return None if first else "the first process's values changed"


def refusal(change: Callable[[nn.Module], Any]) -> str:
    net = nn.Sequential(convolution(1, 2), nn.BatchNorm3d(2))
    model = spatial(net)
    if dist.get_rank() == 1:
        change(net)
    try:
        model(volume().float())
    except ParallelError as refused:
        return str(refused)
    return "not refused"


def changed_in_one_process() -> str | None:
    changes: list[tuple[str, Callable[[nn.Module], Any]]] = [
        ("0.weight", lambda net: net[0].weight.data[0, 0, 0].add_(1e-3)),
        ("0.weight", lambda net: net[0].weight.data.copy_(net[0].weight.data.flip(0))),
        ("1.num_batches_tracked", lambda net: net[1].num_batches_tracked.add_(1)),
        ("1", lambda net: net[1].eval()),
        ("0", lambda net: net[0].bias.requires_grad_(False)),
    ]
    told = [(name, refusal(change)) for name, change in changes]
    return str([text for name, text in told if f": {name}. Wrapping" not in text]).strip("[]") or None


def other_networks() -> str | None:
    for build in (lambda rank: [convolution() for _ in range(1 + rank)], lambda rank: [convolution(1, 1 + rank)]):
        try:
            spatial(nn.Sequential(*build(dist.get_rank())))
        except ParallelError as refused:
            if "built different networks" in str(refused):
                continue
        return "not refused"
    return None


def activate(net: RunLayers, x: Tensor) -> Tensor:
    return net.layer(F.leaky_relu(x, 0.5, inplace=True))


def zero_a_plane(net: RunLayers, x: Tensor) -> Tensor:
    """Change what one process owns: only it noticed, and the other one waited for it."""
    x[:, :, 0] = 0
    return net.layer(x)


def input_in_place() -> str | None:
    for forward in (activate, zero_a_plane):
        model = spatial(seeded(lambda run=forward: RunLayers(run, layer=convolution())))
        if wrong := expect_refusal("changes its input", lambda own=model: own(volume())):
            return wrong
    return None


def replicas() -> str | None:
    """Two replicas of one shard: a block's parameters are averaged, and recomputed; a head by itself is refused."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "spatial"))
    build: Callable[[], nn.Module] = lambda: nn.Sequential(convolution(1, 2), nn.PReLU(2), convolution(2, 1))  # noqa: E731
    torch.manual_seed(dist.get_rank())
    net = build().double()
    model = spatial(nn.Sequential(net), mesh=mesh, checkpoint="all")
    if not alike(net[0].weight):
        return "the replicas' weights differ"
    plain, volumes = copy.deepcopy(net), volume()
    for _ in range(2):
        model(volumes[dist.get_rank()][None]).square().mean().backward()
        (sum(plain(each[None]).square().mean() for each in volumes) / 2).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if not torch.allclose(ours.grad, theirs.grad):
            return "gradients"
    try:
        net[0](model(volumes).detach())
    except ParallelError as refused:
        return None if "outside the forward pass" in str(refused) else str(refused)
    return "not refused"


def copies_alone() -> str | None:
    """One process may copy its model, as for an average of its weights, without the others."""
    model = spatial(seeded(convolution))
    twin = copy.deepcopy(model) if dist.get_rank() == 0 else model
    return None if torch.equal(twin.module.weight, model.module.weight) else "not a copy"


def expect_refusal_in_step(model: nn.Module, wrong: int, change: Callable[[], Any], words: str) -> str | None:
    for step in range(wrong + 1):
        if step == wrong and dist.get_rank() == 1:
            change()
        try:
            model(volume().float()).square().mean().backward()
        except ParallelError as refused:
            return None if step == wrong and words in str(refused) else f"step {step}: {refused}"
    return "not refused"


def relaid_in_one_process() -> str | None:
    """The first pass compares the networks; then one process's weights were laid out anew, and sums went astray."""
    model = spatial(nn.Sequential(convolution(1, 2), convolution(2, 3)))
    relay = partial(model.module.to, memory_format=torch.channels_last_3d)
    return expect_refusal_in_step(model, 2, relay, "a parameter of shape (3, 2, 3, 3, 3)")


def used_in_one_process() -> str | None:
    """A parameter that one shard alone used was added to another one's gradient, or was waited for for ever."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        x = net.a(x)
        return net.b(x) if uses else x * 2

    uses = True
    model = spatial(RunLayers(forward, a=convolution(), b=nn.PReLU(1)))

    def leave_out() -> None:
        nonlocal uses
        uses = False

    return expect_refusal_in_step(model, 1, leave_out, "a parameter of shape (1,)")


# What random networks found where each process holds one slab: a process that waits for another one.


def assign_planes_of_one_process() -> None:
    """The planes fell to one process, whose backward pass waited for ever for the other's part of their gradient."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        y = net.layer(x) * 1.0
        y[:, :, 0:1] = net.layer(x)[:, :, -1:] * net.layer.bias.sum()
        return y

    plain = seeded(lambda: RunLayers(forward, layer=convolution()))
    assert_small(compare(plain, spatial(copy.deepcopy(plain)), [volume()]))


CASES = [dropped_in_evaluation, weights_that_differ, changed_in_one_process, relaid_in_one_process]
CASES += [used_in_one_process, other_networks, input_in_place, replicas, copies_alone]
CASES += [assign_planes_of_one_process]


@pytest.mark.parametrize("case", CASES)
def test_processes(case: Callable[[], str | None]) -> None:
    assert_all_well(in_group(2, case))


def message_groups_of_two_models() -> tuple[bool, bool]:
    models = [spatial(convolution()) for _ in range(2)]
    backend, dist.get_backend = dist.get_backend, lambda group=None: "not gloo"
    try:
        first, second = (model.strategy.message_group() for model in models)
    finally:
        dist.get_backend = backend
    found = first is second, first is not models[0].strategy.group
    del _message_groups[models[0].strategy.group]
    dist.barrier()  # the other process may be connecting to it still, and would find it closed
    dist.destroy_process_group(first)
    return found


def test_models_of_one_group_send_their_batches_messages_through_one_group_of_gloo() -> None:
    """Each model made one of its own at its first batch, which torch holds for as long as the process lives."""
    assert in_group(2, message_groups_of_two_models) == [(True, True)] * 2
