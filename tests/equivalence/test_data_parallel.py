"""Replicas equal one process with the whole batch: outputs, every gradient, two steps, buffers, in train and eval."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_group import in_group

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("data_parallel_cases.py"))))
NAMES = sorted(cases.CASES)


def check(processes: int, name: str, data: int, spatial: int = 1, **settings: object) -> None:
    for rank, wrong in enumerate(in_group(processes, run, name, data, spatial, settings)):
        assert not wrong, f"rank {rank}: largest relative errors {wrong}"


def run(name: str, data: int, spatial: int, settings: dict[str, object]) -> dict[str, float]:
    return cases.run(name, data, spatial, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_two_replicas(name: str) -> None:
    check(2, name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_cannot_be_dealt_evenly(name: str) -> None:
    check(2, name, 2, batch=5)


@pytest.mark.parametrize("name", NAMES)
def test_fast_kernels(name: str) -> None:
    check(2, name, 2, batch=5, kernels="fast")


@pytest.mark.parametrize("name", NAMES)
def test_slabs_in_each_process(name: str) -> None:
    check(2, name, 2, batch=3, kernels="slabs 2")


@pytest.mark.parametrize("name", NAMES)
def test_two_shards(name: str) -> None:
    check(2, name, 1, 2, batch=2)


@pytest.mark.parametrize("kernels", ["pipeline", "pipeline recorded"])
@pytest.mark.parametrize("name", ["dynunet", "group norm"])
def test_a_pipeline_in_each_process(name: str, kernels: str) -> None:
    check(2, name, 2, batch=5, kernels=kernels)


@pytest.mark.parametrize("name", ["dynunet", "group norm", "habits"])
def test_four_replicas_in_rounds(name: str) -> None:
    check(2, name, 2, batch=7, replicas=4)


@pytest.mark.parametrize("name", ["dynunet", "habits"])
def test_replicas_in_one_process(name: str) -> None:
    assert not cases.run(name, 1, batch=5, replicas=3)


@pytest.mark.parametrize("name", NAMES)
def test_four_replicas_of_five_samples(name: str) -> None:
    check(4, name, 4, batch=5)


@pytest.mark.parametrize("name", NAMES)
def test_two_replicas_of_two_shards(name: str) -> None:
    check(4, name, 2, 2, batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "fast"])
def test_vnet(kernels: str) -> None:
    check(2, "vnet", 2, batch=3, kernels=kernels)
