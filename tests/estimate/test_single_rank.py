import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.in_group import in_group
from volseg.device.torch_internals import TorchDispatchMode, tree_leaves
from volseg.estimate.fake_step.single_rank import be_process
from volseg.parallel import DataParallel, ModelParallel, Spatial, join_mesh
from volseg.parallel.devices import get_process_rank

KINDS = {
    "send": "send",
    "recv_": "receive",
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
"""Operators of torch's process groups, of either version's name, and what a lone process calls them."""


class Watched(TorchDispatchMode):
    """Notes what a real group is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            kind = KINDS[function._schema.name.removeprefix("c10d::")]
            # Gathering names what comes first and what is given second.
            given = args[1] if kind in ("all_gather", "all_to_all") else args[0]
            tensor = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            self.found.append((kind, tuple(tensor.shape), tensor.dtype))
        return function(*args, **(kwargs or {}))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    nets: dict[str, nn.Module] = {
        "norms": nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.InstanceNorm3d(4),
            nn.LeakyReLU(inplace=True),
            nn.Conv3d(4, 8, 3, stride=2, padding=1),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.ConvTranspose3d(8, 4, 2, stride=2),
            nn.Dropout3d(0.2),
            nn.Conv3d(4, 2, 1),
        ),
        "pooling": nn.Sequential(
            nn.Conv3d(1, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.MaxPool3d(2), nn.Upsample(scale_factor=2)
        ),
        "whole": nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3)),
    }
    return nets[name]


def step(name: str, options: Spatial, data: int) -> None:
    """Two steps of a network cut over all processes, or of replicas of it; the second finds what the first made."""
    model: nn.Module = build(name)
    if data > 1:
        spatial = dist.get_world_size() // data
        mesh = join_mesh(data=data, spatial=spatial)
        if spatial > 1:
            model = ModelParallel(model, strategy=options, mesh=mesh.spatial_group)
        model = DataParallel(model, mesh.replicas(data))
    else:
        model = ModelParallel(model, strategy=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        output = model(torch.ones(2, 1, 17, 16, 16))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watch(name: str, options: Spatial, data: int) -> list[tuple[Any, ...]]:
    with Watched() as watched:
        step(name, options, data)
    return watched.found


def follow(rank: int, size: int, name: str, options: Spatial, data: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with be_process(rank, size, lambda kind, tensor, _: found.append((kind, tuple(tensor.shape), tensor.dtype))):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        step(name, options, data)
    return found


CASES = [
    ("norms", Spatial(axes="D", checkpoint="all"), 1),
    ("pooling", Spatial(axes=("D", "H"), grid=(2, 2)), 1),
    ("norms", Spatial(axes="D"), 2),
    ("whole", Spatial(axes="D"), 1),
]


@pytest.mark.parametrize(("name", "options", "data"), CASES)
def test_a_lone_process_is_asked_for_what_each_of_a_real_group_is(name: str, options: Spatial, data: int) -> None:
    real = in_group(4, watch, name, options, data)
    assert len(real[0]) > 5
    for rank, expected in enumerate(real):
        assert follow(rank, 4, name, options, data) == expected


def test_a_lone_process_leaves_the_groups_and_the_report_of_errors_as_they_were() -> None:
    assert not dist.is_initialized()
    before = sys.excepthook
    for rank in range(2):
        with be_process(rank, 2, lambda *_: None):
            group = dist.new_group([0, 1])
            assert dist.get_rank(group) == get_process_rank() == rank
        assert not dist.is_initialized()
    with pytest.raises(ValueError, match="on purpose"), be_process(0, 2, lambda *_: None):
        raise ValueError("on purpose")
    assert not dist.is_initialized()
    assert sys.excepthook is before


def be_somebody_else() -> tuple[int, float]:
    """Be another process for a while, and then again one of the real group, with its further groups."""
    own = dist.new_group()
    before = dist.get_rank()
    with be_process(3, 5, lambda *_: None):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 5)
        assert float(add_up(torch.ones(1))) == 5
    assert dist.get_rank() == before
    total = add_up(torch.ones(1), own)
    dist.destroy_process_group(own)
    return before, float(total)


def add_up(value: Tensor, group: Any = None) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


def test_a_process_of_a_real_group_may_follow_another_job() -> None:
    assert in_group(4, be_somebody_else) == [(rank, 4.0) for rank in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_others_do_as_this_one(dtype: torch.dtype) -> None:
    with be_process(1, 3, lambda *_: None):
        own = torch.tensor([1, 2], dtype=dtype)
        gathered = [torch.zeros(2, dtype=dtype) for _ in range(3)]
        dist.all_gather(gathered, own)
        assert all(torch.equal(each, own) for each in gathered)
        smallest = own.clone()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        assert torch.equal(smallest, own)
        pieces, arrived = torch.arange(6).to(dtype), torch.zeros(6, dtype=dtype)
        dist.all_to_all_single(arrived, pieces)
        assert arrived.tolist() == [2, 3, 2, 3, 2, 3]
