"""Replicas equal one process with the whole batch: outputs, every gradient, two steps, buffers, in train and eval."""

import data_parallel_cases as cases
import pytest
from in_group import in_group

NAMES = sorted(cases.CASES)


def run(name: str, settings: dict[str, object]) -> dict[str, float]:
    return cases.run(name, **settings)


def check(processes: int, name: str, settings: dict[str, object]) -> None:
    found = [run(name, settings)] if processes == 1 else in_group(processes, run, name, settings)
    for rank, wrong in enumerate(found):
        assert not wrong, f"rank {rank}: largest relative errors {wrong}"


MESHES: dict[str, tuple[int, dict[str, object], list[str]]] = {
    "a batch that cannot be dealt evenly": (2, {"data": 2, "batch": 5}, NAMES),
    "fast kernels": (2, {"data": 2, "batch": 5, "kernels": "fast"}, NAMES),
    "slabs in each process": (2, {"data": 2, "batch": 3, "kernels": "slabs 2"}, NAMES),
    "two shards": (2, {"data": 1, "spatial": 2, "batch": 2}, NAMES),
    "a pipeline in each": (2, {"data": 2, "batch": 5, "kernels": "pipeline"}, ["dynunet", "group norm"]),
    "a recorded pipeline": (2, {"data": 2, "batch": 5, "kernels": "pipeline recorded"}, ["dynunet", "group norm"]),
    "four replicas in rounds": (2, {"data": 2, "batch": 7, "replicas": 4}, ["dynunet", "group norm", "habits"]),
    "replicas in one process": (1, {"data": 1, "batch": 5, "replicas": 3}, ["dynunet", "habits"]),
    "four replicas of five samples": (4, {"data": 4, "batch": 5}, ["batch norm", "habits"]),
    "two replicas of two shards": (4, {"data": 2, "spatial": 2, "batch": 3}, ["batch norm", "dynunet", "habits"]),
}


@pytest.mark.parametrize(
    ("mesh", "name"), [(mesh, name) for mesh, (_, _, names) in MESHES.items() for name in names], ids=str
)
def test_replicas_equal_one_process(mesh: str, name: str) -> None:
    processes, settings, _ = MESHES[mesh]
    check(processes, name, settings)


@pytest.mark.parametrize("kernels", ["torch", "fast"])
def test_vnet(kernels: str) -> None:
    check(2, "vnet", {"data": 2, "batch": 3, "kernels": kernels})
