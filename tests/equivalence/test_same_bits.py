"""The same bits on any number of processes: float32, with dropout, norms and levels that are too coarse to cut."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_group import in_group
from torch import Tensor

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("data_parallel_cases.py"))))
NAMES = sorted(cases.BITS)


def train(name: str, data: int, spatial: int, replicas: int, shards: int) -> dict[str, Tensor]:
    return cases.train_bits(name, data, spatial, replicas, shards)


def check(name: str, replicas: int, shards: int, data: int, spatial: int) -> None:
    alone = train(name, 1, 1, replicas, shards)
    for found in in_group(data * spatial, train, name, data, spatial, replicas, shards):
        assert not cases.list_differences(found, alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("replicas", "shards", "data", "spatial"), [(2, 1, 2, 1), (1, 2, 1, 2), (2, 2, 2, 1), (2, 2, 1, 2), (4, 1, 2, 1)]
)
def test_two_processes_give_the_bits_of_one(name: str, replicas: int, shards: int, data: int, spatial: int) -> None:
    check(name, replicas, shards, data, spatial)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("replicas", "shards", "data", "spatial"), [(4, 1, 4, 1), (1, 4, 1, 4), (2, 2, 2, 2)])
def test_four_processes_give_the_bits_of_one(name: str, replicas: int, shards: int, data: int, spatial: int) -> None:
    check(name, replicas, shards, data, spatial)


@pytest.mark.parametrize("name", sorted(cases.PASSAGE))
@pytest.mark.parametrize("shards", [2, 4])
def test_slabs_of_one_process_give_the_bits_of_one_each(name: str, shards: int) -> None:
    check(name, 1, shards, 1, shards)


def test_the_comparison_sees_another_order() -> None:
    """Sums in the order in which they come are not those of the tree: what passes above is no accident."""
    fixed, free = cases.train_bits("dynunet", 1, 1, 1, 4), cases.train_bits("dynunet", 1, 1, 1, 4, fixed=False)
    assert cases.list_differences(fixed, free)
