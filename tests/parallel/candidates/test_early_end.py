"""What cannot fit is given up on the way; all that fits, and the choice, is as if all had been followed to its end."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from monai.networks.nets import UNet
from torch import nn

from volseg.forecast.candidate import Candidate
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.instances import find_links
from volseg.parallel.candidates import Freedom, Machine, Planned, describe_network, largest
from volseg.parallel.candidates.forecasting import forecast_work
from volseg.parallel.candidates.listing import name_candidate
from volseg.parallel.candidates.planning import list_largest, plan_work
from volseg.parallel.recorded_step import RecordedStep

MIB = 2**20


def make_planned(mib: int, batch: int = 4, side: int = 160, num_gpus: int = 2, net: nn.Module | None = None) -> Planned:
    net = net or UNet(3, 1, 2, channels=(8, 16), strides=(2,), num_res_units=1)
    kind = find_kind("v100-16")
    machine = Machine(gpu=kind, num_gpus=num_gpus, links=find_links(kind), gpu_bytes=mib * MIB)

    def resize(sides):
        return describe_network(net, (batch, 1, *sides), dtype=torch.float16), 0

    work, _ = resize((side, side, side))
    return Planned(work=work, machine=machine, free=Freedom(), resize=resize, divisors=(8, 8, 8))


@pytest.mark.parametrize("mib", [1650, 2450, 2600, 3400])
def test_the_choice_and_what_fits_are_as_if_all_were_followed_to_the_end(mib):
    planned = make_planned(mib)
    early, whole = (plan_work(planned, numbers=numbers) for numbers in (False, True))
    given_up = [each for each in early.forecasts if each.more_than is not None]
    assert (early.chosen, early.found.skipped) == (whole.chosen, whole.found.skipped)
    assert [each.candidate for each in early.forecasts] == [each.candidate for each in whole.forecasts]
    for one, other in zip(early.forecasts, whole.forecasts, strict=True):
        if one.more_than is None:
            assert one == other
        else:
            assert one.memory is None
            assert other.memory.total > one.more_than
            assert not other.runs
    rows = [row for row in early.report.candidates if row.more_than_bytes is not None]
    assert [row.more_than_bytes for row in rows] == [planned.capacity] * len(given_up)
    assert bool(given_up) == (f"> {mib / 1024:.2f}" in early.table())
    if early.chosen is None:
        assert early.remedies
        assert any(each.memory is not None and each.candidate.num_gpus > 1 for each in early.forecasts)


def test_where_nothing_fits_the_numbers_of_one_way_that_needs_little_are_told():
    plan = plan_work(make_planned(1300), numbers=False)
    assert plan.chosen is None
    assert any(each.more_than is not None for each in plan.forecasts)
    known = [each for each in plan.forecasts if each.memory is not None]
    assert Candidate(data=2, checkpoint="tiled", kernels="torch") in [
        replace(each.candidate, kernels="torch", recorded=False) for each in known
    ]
    least = min(known, key=lambda each: each.memory.total)
    assert plan.why.startswith(f"nothing fits: {name_candidate(least.candidate)} needs ")
    assert plan.remedies[0].startswith(f"GPUs of {least.memory.total / 2**30:.1f} GiB: ")


@pytest.mark.parametrize(
    "way",
    [
        Candidate(recorded=False),
        Candidate(recorded=True),
        Candidate(checkpoint="tiled", kernels="fast"),
        Candidate(data=2),
        Candidate(spatial=2, kernels="fast", recorded=True),
        Candidate(spatial=4, checkpoint=1, kernels="fast"),
        Candidate(pipeline=2, split_size=1, recorded=True, kernels="torch"),
        Candidate(pipeline=2, split_size=2, kernels="torch"),
    ],
    ids=str,
)
def test_what_is_given_up_needs_more_and_leaves_nothing_behind(way):
    planned = make_planned(16 * 1024)
    whole = forecast_work(planned.work, way, planned.machine)
    assert whole.memory is not None, whole.refused
    # Tensors alone do not fit into less than half of what they need.
    least = whole.memory.outside + whole.memory.used // 4
    small = replace(planned.machine, gpu_bytes=least)
    early = forecast_work(planned.work, way, small, to_end=False)
    assert early.more_than == least
    assert not early.runs
    assert forecast_work(planned.work, way, planned.machine) == whole
    # Where it fits, nothing is given up.
    enough = replace(planned.machine, gpu_bytes=whole.memory.total)
    assert forecast_work(planned.work, way, enough, to_end=False) == forecast_work(planned.work, way, enough)


def test_the_largest_volumes_are_those_of_whole_follows(monkeypatch):
    planned = make_planned(1400, batch=2, side=32)
    early = list_largest(planned)
    followed = []

    def follow_whole(*args, to_end, **kwargs):
        followed.append(to_end)
        return forecast_work(*args, **kwargs)

    monkeypatch.setattr(largest, "forecast_work", follow_whole)
    assert early == list_largest(planned)
    assert set(followed) == {True, False}


@pytest.mark.parametrize("mib", [1300, 1650])
def test_answers_are_the_same_whether_a_refusal_to_record_is_foreseen_or_met(mib, monkeypatch):
    dropping = UNet(3, 1, 2, channels=(8, 16), strides=(2,), num_res_units=1, dropout=0.2)
    answers = []
    for foresees in (True, False):
        if not foresees:
            monkeypatch.setattr(RecordedStep, "foresee_refusal", lambda _: None)
        plan = plan_work(make_planned(mib, net=dropping), numbers=True)
        answers.append((plan.found, plan.remedies))
    assert answers[0] == answers[1]
    recomputed = [each.candidate for each in answers[0][0].forecasts if each.candidate.checkpoint is not None]
    assert recomputed
    assert not any(candidate.recorded for candidate in recomputed)


class CatchesAll(nn.Module):
    """Goes on after whatever happens in its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 8, 3, padding=1)

    def forward(self, image):
        try:
            return self.layer(image)
        except RuntimeError:
            return image * next(self.parameters()).sum()


def test_a_network_that_catches_the_end_is_given_up_all_the_same():
    planned = make_planned(760, net=CatchesAll())
    found = forecast_work(planned.work, Candidate(), planned.machine, to_end=False)
    assert found.more_than == planned.capacity
    assert partial(forecast_work, planned.work, Candidate(), planned.machine)().memory.total > planned.capacity


def test_a_gpu_that_something_else_fills_has_nothing_to_give():
    planned = replace(make_planned(1300, side=32), reserve=2000 * MIB)
    plan = plan_work(planned, numbers=False)
    assert plan.chosen is None
    assert {row.more_than_bytes for row in plan.report.candidates} == {None, 0}
    assert "> 0.00" in plan.table()
