"""A group of processes runs test after test; a failure is reported and does not affect the next test."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_group import GroupError, end_groups, in_group


def summed(base: int) -> tuple[int, float]:
    total = torch.tensor(float(base + dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), float(total)


def raise_in_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second one is tired")
    dist.barrier()  # for ever, but for the other's failure


def end_the_first(folder: Path) -> None:
    (folder / str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        print("last words", flush=True)  # noqa: T201
        os._exit(3)
    dist.barrier()


def wait_for_ever() -> None:
    time.sleep(3600)


def test_functions_share_the_processes() -> None:
    first, second = in_group(2, summed, 1), in_group(2, summed, 10)
    assert [total for _, total in first] == [3.0, 3.0]
    assert [total for _, total in second] == [21.0, 21.0]
    assert [process for process, _ in first] == [process for process, _ in second]
    assert os.getpid() not in dict(first)


def test_a_failure_is_told_at_once_and_does_not_reach_the_next(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"(?s)rank 1 of 2: Traceback.*raise_in_the_second.*second one is tired"):
        in_group(2, raise_in_the_second)
    assert [total for _, total in in_group(2, summed, 1)] == [3.0, 3.0]
    with pytest.raises(GroupError, match=r"(?s)rank 0 of 2: the process ended\nlast words"):
        in_group(2, end_the_first, tmp_path)
    in_group(2, summed, 1)  # the processes import this file once: not in the seconds below
    with pytest.raises(GroupError, match=r"(?s)ranks \[0, 1\] of 2 did not return within 2 s.*in wait_for_ever"):
        in_group(2, wait_for_ever, seconds=2)
    assert [total for _, total in in_group(2, summed, 1)] == [3.0, 3.0]


def test_a_file_leaves_no_group_running(request: pytest.FixtureRequest) -> None:
    assert "groups_of_one_file" in request.fixturenames  # it calls this, behind the last test of a file
    processes = {process for process, _ in in_group(2, summed, 1)}
    end_groups()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert processes.isdisjoint(process for process, _ in in_group(2, summed, 1))


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="put it at the top level of its module"):
        in_group(2, lambda: None)
