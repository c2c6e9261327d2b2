"""The timeline of a pipeline's step: what was done when, on devices that are CPUs, in real time."""

from itertools import pairwise

import pytest
import torch

from volseg.parallel import ModelParallel, Pipeline
from volseg.parallel.timeline import Timeline, compute_idle_shares, get_timeline


def make_model(channels=4):
    net = torch.nn.Sequential(*(torch.nn.Conv3d(channels, channels, 3, padding=1) for _ in range(6)))
    return ModelParallel(net, strategy=Pipeline(split_size=1, cuts=["2", "4"]), devices=["cpu"] * 3)


def watch_step(model, image):
    timeline = Timeline(model.strategy.devices)
    with timeline.watching():
        model(image).square().sum().backward()
    assert get_timeline() is None
    return timeline.read()


def test_each_stage_works_once_forward_and_once_backward_on_each_micro_batch_and_on_one_cpu_never_beside_another():
    model, image = make_model(), torch.randn(2, 4, 8, 8, 8)
    model(image)
    intervals = watch_step(model, image)
    done = {(one.stage, one.what, one.micro_batch) for one in intervals}
    assert done == {
        (stage, what, number) for stage in range(3) for what in ("forward", "backward") for number in (0, 1)
    }
    assert len(done) == len(intervals)
    ordered = sorted(intervals, key=lambda one: one.begin)
    assert all(one.begin < one.end for one in ordered)
    # One thread computes one after the other: what overlapped would be counted twice.
    assert all(before.end <= after.begin for before, after in pairwise(ordered))
    assert [one.stage for one in ordered if one.micro_batch == 0] == [0, 1, 2, 2, 1, 0]
    # What is left of each stage is its idle share.
    whole = ordered[-1].end - ordered[0].begin
    busy = {stage: sum(one.end - one.begin for one in intervals if one.stage == stage) for stage in range(3)}
    assert compute_idle_shares(intervals) == pytest.approx({stage: 1 - busy[stage] / whole for stage in range(3)})


def test_a_step_that_is_not_watched_notes_nothing_and_gives_the_same_gradients():
    model, image = make_model(), torch.randn(2, 4, 8, 8, 8)
    found = []
    for watched in (False, True):
        model.zero_grad()
        if watched:
            watch_step(model, image)
        else:
            model(image).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, noted) for plain, noted in zip(*found, strict=True))
