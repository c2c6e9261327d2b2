"""Steps that are repeated instead of followed, against steps that are followed."""

import torch
from torch import nn

from volseg.forecast.following import following
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.repeating import repeat_last_step
from volseg.forecast.trace import Allocate, Free, Mark, StepTrace

MIB = 2**20


def follow(steps: int) -> StepTrace:
    """Follow so many steps of a network that keeps its gradients until the next step."""
    net = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 2, 3, padding=1))
    with following(find_kind("v100-16")) as followed:
        (device,) = followed.devices
        copied = followed.copy(net).to(device)
        optimizer = torch.optim.AdamW(copied.parameters())
        for _ in range(steps):
            followed.mark("step")
            optimizer.zero_grad()
            copied(torch.zeros(2, 1, 16, 16, 16, device=device)).square().mean().backward()
            optimizer.step()
            followed.mark("end")
    (trace,) = followed.traces()
    return trace


def list_requests(trace: StepTrace) -> list[object]:
    """Return what is asked for, with blocks by the order in which they were taken."""
    order: dict[int, int] = {}
    asked: list[object] = []
    for event in trace.events:
        if isinstance(event, Allocate):
            asked.append((order.setdefault(event.block, len(order)), event.size, event.stream, event.pool))
        elif isinstance(event, Free):
            asked.append(order[event.block])
        elif isinstance(event, Mark):
            asked.append(event.name)
    return asked


def test_a_repeated_step_asks_for_what_a_followed_one_does() -> None:
    # The second step gives back the gradients of the first, so it is the first that is like all others.
    repeated, followed = (list_requests(trace) for trace in (repeat_last_step(follow(2), 3), follow(5)))
    assert len(repeated) > 100
    assert repeated == followed[: len(repeated)], "behind the last step everything goes"
    assert "step" not in followed[len(repeated) :]


def test_what_cannot_be_told_is_not_repeated() -> None:
    # A step that gives back one block of the step before and leaves one of another size: which is which?
    grows = (Mark("step"), Allocate(1, MIB), Mark("step"), Allocate(2, 2 * MIB), Free(1), Mark("end"))
    assert repeat_last_step(StepTrace(grows), 3) == StepTrace(grows)
    unmarked = StepTrace((Allocate(1, MIB), Free(1)))
    assert repeat_last_step(unmarked, 3) == unmarked
