"""The largest volumes, looked for several at a time; and steps of strategies, with what speeds them up and without."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.candidates.test_running import make_work
from volseg.forecast import known_results
from volseg.forecast.candidate import Candidate
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.instances import find_links
from volseg.forecast.known_results import KnownResults
from volseg.forecast.trace import Event, Free, LetGo, StepTrace
from volseg.parallel.candidates.beside import FollowingCopies
from volseg.parallel.candidates.first_batch import describe_network
from volseg.parallel.candidates.forecasting import Machine, Planned, Sides
from volseg.parallel.candidates.largest import search_beside, search_volumes
from volseg.parallel.candidates.listing import Freedom
from volseg.parallel.candidates.planning import _list_before, _list_stages, list_largest
from volseg.parallel.candidates.running import follow_candidate
from volseg.parallel.candidates.work import Work

KIND = find_kind("v100-16")


def build_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ELU(inplace=True), nn.Dropout3d(0.2),
        nn.Conv3d(6, 6, 2, stride=2), nn.PReLU(6), nn.ConvTranspose3d(6, 4, 2, stride=2), nn.InstanceNorm3d(4),
        nn.LeakyReLU(0.1), nn.Conv3d(4, 2, 1),
    )  # fmt: skip


def make_planned(num_gpus: int) -> Planned:
    net = build_network()

    def make(sides: Sides) -> Work:
        return describe_network(net, (2, 1, *sides), dtype=torch.float16)

    return Planned(
        work=make((32, 64, 32)),
        machine=Machine(gpu=KIND, num_gpus=num_gpus, links=find_links(KIND), gpu_bytes=KIND.memory // 6),
        free=Freedom(records=False, pipeline=1),
        resize=lambda sides: (make(sides), 0),
        divisors=(32, 32, 32),
    )


@pytest.fixture
def uses_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests before have asked CUDA: copies of a process that has are told so, where torch is built for it."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


@pytest.mark.usefixtures("uses_no_cuda")
def test_the_largest_volumes_do_not_depend_on_who_follows_them() -> None:
    planned = make_planned(2)
    alone, beside = list_largest(planned), list_largest(planned, beside=True)
    assert alone == beside
    assert len(alone) == 2 * 4
    assert all(largest is not None for _, _, largest in alone)
    candidate, aspect, largest = alone[0]
    assert candidate.spatial == 1
    copies = FollowingCopies(planned, beside=False)
    found = search_beside(copies, {candidate: lambda _: search_volumes(planned, candidate, [aspect])})
    assert found[candidate] == {aspect: largest}, "wherever it begins"


def test_a_search_waits_for_those_that_say_where_to_look() -> None:
    alone, tiled = Candidate(), Candidate(checkpoint="tiled")
    replicas, slabs, stages = Candidate(data=4), Candidate(spatial=4, checkpoint="tiled"), Candidate(pipeline=4)
    found = _list_stages([alone, tiled, replicas, slabs, stages])
    assert found == [[tiled, alone], [replicas], [stages, slabs]]
    assert _list_before(found) == {
        tiled: [], alone: [], replicas: [alone], stages: [alone, replicas], slabs: [tiled],
    }  # fmt: skip
    assert _list_before([[], [replicas], [slabs]]) == {replicas: [], slabs: [replicas]}


def tell(shared: int, number: int) -> int:
    return shared + number


@pytest.mark.usefixtures("uses_no_cuda")
def test_copies_say_which_is_done_and_how_many_are_idle() -> None:
    with FollowingCopies(1, beside=True) as copies:
        cores = copies.count_idle()
        assert cores == (0 if os.cpu_count() == 1 else os.cpu_count())
        for number in (2, 3):
            copies.begin(tell, number)
        first = copies.wait(tell, [(2,), (3,)])
        assert copies.ask(tell, (2, 3)[first]) == first + 3
        assert [copies.ask(tell, number) for number in (2, 3)] == [3, 4]
        assert copies.count_idle() == cores
    with FollowingCopies(1, beside=False) as copies:
        assert (copies.count_idle(), copies.wait(tell, [(2,), (3,)])) == (0, 0)


CANDIDATES = [
    Candidate(recorded=True),
    Candidate(kernels="fast", recorded=True),
    Candidate(data=2),
    Candidate(spatial=2, kernels="fast"),
    Candidate(spatial=3, kernels="fast", checkpoint="all"),
    Candidate(spatial=2, kernels="fast", checkpoint="tiled"),
    Candidate(checkpoint="tiled", kernels="fast"),
    Candidate(pipeline=2, split_size=1),
]


@pytest.mark.parametrize("sides", [(32, 16, 16), (96, 48, 80)])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_a_strategy_asks_for_the_same_as_with_torchs_own_results(
    monkeypatch: pytest.MonkeyPatch, candidate: Candidate, sides: Sides
) -> None:
    work = make_work(_build_without_batch if candidate.pipeline > 1 else build_network, (4, 1, *sides))
    monkeypatch.setattr(known_results, "_known", {})
    ours = follow_candidate(work, candidate, KIND)
    monkeypatch.setattr(KnownResults, "find", lambda self, function, args, kwargs: (function(*args, **kwargs), None))
    torchs = follow_candidate(work, candidate, KIND)
    assert [list_requests(trace) for trace in ours] == [list_requests(trace) for trace in torchs]
    assert all(any(not isinstance(event, Free) for event in trace.events) for trace in ours)


def _build_without_batch() -> nn.Module:
    """Return a network whose stages see micro-batches: without statistics of a whole batch."""
    net = build_network()
    net[1] = nn.GroupNorm(2, 6)
    return net


def list_requests(trace: StepTrace) -> list[Any]:
    """Return all events but when memory is given back, which goes in any order where it goes at a time."""
    kept: list[Event] = [event for event in trace.events if not isinstance(event, Free | LetGo)]
    return [replace(event, pool=bool(event.pool)) if hasattr(event, "pool") else event for event in kept]
