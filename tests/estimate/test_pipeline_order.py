"""The order in which a process with several devices asks them, worked out by hand."""

from collections.abc import Sequence

import torch
from torch import nn

from volseg.estimate.allocator import find_memory_use
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.pipeline_order import Pace, order_by_threads, repeat_last_step
from volseg.estimate.trace import Allocate, Free, Issued, KernelRun, LetGo, Mark, Ordered, Sent, StepTrace, Used
from volseg.estimate.tracing import tracing
from volseg.parallel.pipeline.flow.transfer import send as send_tensor

MIB = 2**20
LARGE = 16 * MIB
"""A segment of its own."""


def kernel(flops: int = 0, stream: int = 0) -> KernelRun:
    """One that takes so many seconds, and the host none."""
    return KernelRun("aten.add", torch.float32, flops, 0, stream=stream)


PACE = Pace(kernel=lambda run: float(run.flops), message=lambda _: 1.0, host=lambda event, _: 1.0)
"""Each request takes the host a second."""


def list_blocks(trace: StepTrace) -> list[tuple[str, int]]:
    kinds = {Allocate: "take", Free: "give back", LetGo: "leave"}
    return [(kinds[type(event)], event.block) for event in trace.events if isinstance(event, Allocate | Free | LetGo)]


def send(source: int, target: int, block: int, copied: int, event: int, *, backward: bool) -> list[Issued]:
    """Return what ``copy_between`` asks for: of a block, on streams 1 and 2."""
    asked = [
        (source, Sent("copy", MIB, 2)),
        (source, Ordered(event, 0, waits=False)),
        (source, Ordered(event, 1, waits=True)),
        (target, Allocate(copied, MIB, 2)),
        (target, kernel(stream=2)),
        (target, Ordered(event + 1, 2, waits=False)),
        (source, Used(block, 1)),
    ]
    return [Issued(device, one, backward) for device, one in asked]


def receive(device: int, block: int, event: int, *, backward: bool) -> list[Issued]:
    return [Issued(device, Ordered(event, 0, waits=True), backward), Issued(device, Used(block, 0), backward)]


def test_a_block_that_another_stream_reads_comes_back_when_that_has_read_it() -> None:
    def ask(*events: object) -> list[Issued]:
        return [Issued(0, event, backward=False) for event in events]  # type: ignore[arg-type]

    issued = [
        *ask(Allocate(1, LARGE), kernel(flops=4)),  # from second 1 to 5
        *send(0, 1, 1, 2, 10, backward=False),
        *ask(Free(1)),
        *ask(Allocate(3, LARGE)),  # at second 3: the copy has not begun
        *ask(*[kernel() for _ in range(4)]),
        *ask(Allocate(4, LARGE)),  # at second 7: it ended at 6
    ]
    left, right = order_by_threads(issued, 2, PACE)
    assert list_blocks(left) == [("take", 1), ("leave", 1), ("take", 3), ("give back", 1), ("take", 4)]
    assert list_blocks(right) == [("take", 2)]
    use = find_memory_use(left)
    assert (use.used, use.reserved) == (2 * LARGE, 2 * LARGE)  # who leaves a block uses it no more, and it is reserved
    only_left = StepTrace(left.events[:5])
    assert (find_memory_use(only_left).used, find_memory_use(only_left).reserved) == (LARGE, 2 * LARGE)


def test_a_stream_of_its_own_keeps_no_block() -> None:
    issued = [
        Issued(0, one, backward=False)
        for one in (Allocate(1, MIB, stream=2), kernel(flops=9, stream=2), Used(1, 2), Free(1), Allocate(2, MIB))
    ]
    trace, _ = order_by_threads(issued, 2, PACE)
    assert list_blocks(trace) == [("take", 1), ("give back", 1), ("take", 2)]


def test_the_cache_is_emptied_of_all_that_was_left() -> None:
    issued = [
        Issued(0, one, backward=False)
        for one in (Allocate(1, MIB), kernel(flops=9, stream=1), Used(1, 1), Free(1), Mark("empty_cache"))
    ]
    trace, _ = order_by_threads(issued, 2, PACE)
    assert list_blocks(trace) == [("take", 1), ("leave", 1), ("give back", 1)]
    assert find_memory_use(trace).reserved == 2 * MIB


def test_the_last_stage_sends_all_gradients_before_the_first_one_has_used_one() -> None:
    """Followed by one thread, each is used before the next one comes; on GPUs the last stage's thread is ahead."""
    issued: list[Issued] = []
    for number in range(3):
        made, came, event = 10 + number, 20 + number, 100 + 10 * number
        issued += [Issued(1, Allocate(made, MIB), backward=True), Issued(1, kernel(), backward=True)]
        issued += send(1, 0, made, came, event, backward=True)
        issued += [Issued(1, Free(made), backward=True)]
        issued += receive(0, came, event + 1, backward=True)
        issued += [Issued(0, kernel(), backward=True) for _ in range(20)]
        issued += [Issued(0, Free(came), backward=True)]
    first, _ = order_by_threads(issued, 2, PACE)
    assert [name for name, _ in list_blocks(first)][:3] == ["take", "take", "take"]
    assert find_memory_use(first).used == 3 * MIB


def test_a_thread_that_has_more_to_do_gets_gradients_one_by_one() -> None:
    """The last stage's thread needs longer for each: the first one waits for it."""
    issued: list[Issued] = []
    for number in range(3):
        made, came, event = 10 + number, 20 + number, 100 + 10 * number
        issued += [Issued(1, Allocate(made, MIB), backward=True)]
        issued += [Issued(1, kernel(), backward=True) for _ in range(20)]
        issued += send(1, 0, made, came, event, backward=True)
        issued += receive(0, came, event + 1, backward=True)
        issued += [Issued(0, kernel(), backward=True), Issued(0, Free(came), backward=True)]
    first, _ = order_by_threads(issued, 2, PACE)
    assert find_memory_use(first).used == MIB


def test_gradients_of_all_micro_batches_set_out_before_the_first_one_is_back() -> None:
    """The loss lies on the first device: its thread sends on while the last stage works on what came first."""
    issued = [Issued(0, Allocate(1, MIB), backward=True), Issued(0, kernel(), backward=True)]
    for number in range(3):
        out, event = 10 + number, 100 + 20 * number
        issued += send(0, 1, 1, out, event, backward=True)
        issued += receive(1, out, event + 1, backward=True)
        issued += [Issued(1, Allocate(30 + number, MIB), backward=True)]
        issued += [Issued(1, kernel(), backward=True) for _ in range(20)]
        issued += [Issued(1, Free(out), backward=True)]
        issued += send(1, 0, 30 + number, 20 + number, event + 10, backward=True)
        issued += receive(0, 20 + number, event + 11, backward=True)
        issued += [Issued(0, Free(20 + number), backward=True)]
    _, last = order_by_threads(issued, 2, PACE)
    assert [block for name, block in list_blocks(last) if name == "take"][:4] == [10, 30, 11, 12]


def follow_two(steps: int) -> list[Issued]:
    """Follow so many steps of two stages, each on a device of its own, and a sum behind the last one."""
    first, second = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 2, 3, padding=1)
    with tracing(find_kind("v100-16"), 2) as followed:
        one, two = followed.devices
        left, right = followed.copy(first).to(one), followed.copy(second).to(two)
        optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters()])
        kept = None
        for _ in range(steps):
            followed.mark("step")
            optimizer.zero_grad()
            sent, passage = send_tensor(left(torch.zeros(2, 1, 16, 16, 16, device=one)), two)
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
    repeated, followed = (list_issued_requests(issued) for issued in (repeat_last_step(follow_two(2)), follow_two(3)))
    assert len(repeated) > 100
    assert any(Used in request for request in repeated if isinstance(request, tuple))
    assert repeated == followed


def test_what_cannot_be_told_of_two_devices_is_not_repeated() -> None:
    left = [Issued(0, event, backward=False) for event in (Mark("step"), Allocate(1, MIB))]
    right = [Issued(1, event, backward=False) for event in (Mark("step"), Allocate(2, MIB), Free(1), Mark("end"))]
    assert repeat_last_step([*left, *right]) == [*left, *right]
