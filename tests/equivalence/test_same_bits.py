"""The same bits on any number of processes: float32, with dropout, norms and levels too coarse to cut."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import data_parallel_cases as cases
import pytest
import torch
from in_group import in_group
from kernels import INTERPRETED
from torch import Tensor, nn

from volseg.device.norm import choice
from volseg.parallel import ModelParallel, Spatial
from volseg.parallel.spatial.lazy import statistics
from volseg.parallel.spatial.transport import one_process, process_group

NAMES = sorted(cases.BITS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run with one thread, so that sums keep the order of the processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(name: str, data: int, spatial: int, replicas: int, shards: int, steps: int) -> dict[str, Tensor]:
    return cases.train_bits(name, data, spatial, replicas, shards, steps)


def train_interpreted(name: str, spatial: int) -> dict[str, Tensor]:
    """Train with norm kernels in Triton's interpreter on a CPU, between slabs or processes."""
    with ExitStack() as stack:
        for module in (choice, one_process, process_group, statistics):
            stack.enter_context(patch.object(module, "takes", lambda tensor: tensor.dtype == torch.float32))
        return cases.train_bits(name, 1, spatial, 1, 2, 1)


@cache
def train_alone(name: str, replicas: int, shards: int, steps: int) -> dict[str, Tensor]:
    """Return the shared result of one process, with which several meshes are compared."""
    return train(name, 1, 1, replicas, shards, steps)


def check(name: str, replicas: int, shards: int, data: int, spatial: int, steps: int = 3) -> None:
    alone = train_alone(name, replicas, shards, steps)
    for found in in_group(data * spatial, train, name, data, spatial, replicas, shards, steps):
        assert not cases.list_differences(found, alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("replicas", "shards", "data", "spatial"), [(2, 1, 2, 1), (1, 2, 1, 2), (2, 2, 2, 1), (2, 2, 1, 2), (4, 1, 2, 1)]
)
def test_two_processes_give_the_bits_of_one(name: str, replicas: int, shards: int, data: int, spatial: int) -> None:
    check(name, replicas, shards, data, spatial)


@pytest.mark.parametrize("name", sorted(cases.PASSAGE))
def test_slabs_of_one_process_give_the_bits_of_one_each(name: str) -> None:
    check(name, 1, 2, 1, 2, steps=1 if name == "vnet" else 2)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="processes without GPUs, whose kernels are interpreted")
def test_kernels_exchange_alike_in_one_process_and_by_messages() -> None:
    alone = train_interpreted("norms", 1)
    plain = cases.train_bits("norms", 1, 1, 1, 2, 1)
    assert cases.list_differences(alone, plain)  # Triton's norms add in another order than torch's
    for found in in_group(2, train_interpreted, "norms", 2):
        assert not cases.list_differences(found, alone)


@pytest.mark.parametrize(
    ("name", "replicas", "shards", "data", "spatial"),
    # Two networks on each mesh, and each network on two.
    [
        (NAMES[(row + by) % 3], *mesh)
        for row, mesh in enumerate([(4, 1, 4, 1), (1, 4, 1, 4), (2, 2, 2, 2)])
        for by in (0, 1)
    ],
)
def test_four_processes_give_the_bits_of_one(name: str, replicas: int, shards: int, data: int, spatial: int) -> None:
    check(name, replicas, shards, data, spatial)


@pytest.mark.parametrize("name", ["batch norm", "convolutions", "deep supervision", "recomputed"])
def test_four_slabs_of_one_process_give_the_bits_of_one_each(name: str) -> None:
    check(name, 1, 4, 1, 4, steps=2)


@pytest.mark.parametrize("checkpoint", [None, "all"])
def test_slabs_in_fixed_order_take_their_halos_in_place(checkpoint: str | None) -> None:
    """Both convolutions are one node each for both slabs, and neither the norm between them nor its input is kept."""
    net = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.ReLU(), nn.Conv3d(2, 2, 3, padding=1))
    for fixed in (True, False):
        model = ModelParallel(net, strategy=Spatial(fixed_order=fixed, checkpoint=checkpoint), devices=["cpu"] * 2)
        first, second = (slab.grad_fn for slab in model(torch.randn(1, 1, 8, 6, 6)).slabs)
        assert (first is second) == fixed
        assert (first.name() == "_ConvolveBackward") == fixed


def test_the_comparison_sees_another_order() -> None:
    """Sums in order of arrival differ from those of the tree, so the tests above can fail."""
    fixed, free = cases.train_bits("dynunet", 1, 1, 1, 4), cases.train_bits("dynunet", 1, 1, 1, 4, fixed=False)
    assert cases.list_differences(fixed, free)
