"""Steps that are repeated instead of followed, against steps that are followed."""

from collections.abc import Sequence

import torch
from torch import nn

from volseg.forecast.following import following
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.repeating import repeat_last_issued, repeat_last_step
from volseg.forecast.trace import Allocate, Free, Issued, LetGo, Mark, StepTrace, Used
from volseg.parallel.pipeline.flow.transfer import send

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


def follow_two(steps: int) -> list[Issued]:
    """Follow so many steps of two stages, each on a device of its own, and a sum behind the last one."""
    first, second = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 2, 3, padding=1)
    with following(find_kind("v100-16"), 2) as followed:
        one, two = followed.devices
        left, right = followed.copy(first).to(one), followed.copy(second).to(two)
        optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters()])
        kept = None
        for _ in range(steps):
            followed.mark("step")
            optimizer.zero_grad()
            sent, passage = send(left(torch.zeros(2, 1, 16, 16, 16, device=one)), two)
            loss = right(passage.wait(sent)).square().mean()
            loss.backward()
            del sent, passage
            optimizer.step()
            kept = loss  # up to the end of the next step
            followed.mark("end")
        followed.mark("validate")
        assert kept is not None
        kept.detach().add(1)
    return followed.list_issued()


def list_issued_requests(issued: Sequence[Issued]) -> list[object]:
    """Return what each device is asked for, with blocks by the order in which they were taken."""
    order: dict[int, int] = {}
    asked: list[object] = []
    for one in issued:
        match one.event:
            case Allocate(block, size, stream):
                asked.append((one.device, order.setdefault(block, len(order)), size, stream))
            case Free(block) | Used(block):
                asked.append((one.device, type(one.event), order[block]))
            case Mark(name):
                asked.append((one.device, name))
    return asked


def test_steps_of_two_devices_are_repeated_with_what_comes_behind_them() -> None:
    repeated, followed = (
        list_issued_requests(issued) for issued in (repeat_last_issued(follow_two(2), 3), follow_two(5))
    )
    assert len(repeated) > 200
    assert any(Used in request for request in repeated if isinstance(request, tuple))
    assert repeated == followed


def test_a_block_that_is_let_go_is_given_back_in_the_step_after() -> None:
    events = (Mark("step"), Allocate(1, MIB), LetGo(1), Mark("end"), Mark("step"), Free(1), Allocate(2, MIB), LetGo(2))
    repeated = repeat_last_step(StepTrace((*events, Mark("end"))), 1)
    assert repeated.events[9:] == (Mark("step"), Free(2), Allocate(3, MIB), LetGo(3), Mark("end"))


def test_what_cannot_be_told_of_two_devices_is_not_repeated() -> None:
    left = [Issued(0, event, backward=False) for event in (Mark("step"), Allocate(1, MIB))]
    right = [Issued(1, event, backward=False) for event in (Mark("step"), Allocate(2, MIB), Free(1), Mark("end"))]
    assert repeat_last_issued([*left, *right], 3) == [*left, *right]
