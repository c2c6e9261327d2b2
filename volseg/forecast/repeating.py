"""More steps of a trace than were followed: the last one again and again.

A step asks for the same blocks each time, but finds other free pieces: what does not fit any more after it has given
back whole segments may be out of memory in its third step or its fifth. And where nobody waits for the steps of several
devices, Python comes further ahead of them with each. To repeat what was asked for takes hundredths of a second where
to follow it takes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from volseg.forecast.trace import Allocate, Event, Free, Issued, LetGo, Mark, Ordered, StepTrace, Used

__all__ = ["repeat_last_issued", "repeat_last_step"]


def repeat_last_step(trace: StepTrace, times: int) -> StepTrace:
    """Return a trace with its last step so many times more.

    What the step gives back of the one before (gradients, mostly) each further one gives back of that before it. Where
    these cannot be told from their sizes and order the trace is returned as it is.
    """
    issued = [Issued(trace.device, event, backward=False) for event in trace.events]
    end = _find_last(issued, "end")
    # Behind the last step everything goes with whoever followed it.
    repeated = None if end is None else _repeat(issued[: end + 1], times)
    if repeated is None:
        return trace
    return StepTrace(tuple(one.event for one in repeated if not isinstance(one.event, Used | Ordered)), trace.device)


def repeat_last_issued(issued: Sequence[Issued], times: int) -> Sequence[Issued]:
    """Return what several devices were asked for with the last step so many times more, and then what came behind it.

    Where it cannot be told what each step gives back of the one before, nothing is repeated; see `repeat_last_step`.
    """
    return _repeat(issued, times) or issued


def _repeat(issued: Sequence[Issued], times: int) -> list[Issued] | None:
    begin, end = (_find_last(issued, name) for name in ("step", "end"))
    if begin is None or end is None or end < begin:
        return None
    while begin and issued[begin - 1].event == Mark("step"):  # each device has its own
        begin -= 1
    step, behind = issued[begin : end + 1], issued[end + 1 :]
    taken = {one.event.block: _describe(one.device, one.event) for one in issued if isinstance(one.event, Allocate)}
    own = [one.event.block for one in step if isinstance(one.event, Allocate)]
    given_back = {one.event.block for one in step if isinstance(one.event, Free)}
    left = [block for block in own if block not in given_back]
    earlier = sorted(given_back - set(own))  # numbers rise as blocks are taken
    if [taken[block] for block in earlier] != [taken[block] for block in left]:
        return None
    repeated = list(issued[: end + 1])
    next_block = max(taken, default=0) + 1
    last = {block: block for block in own}
    for _ in range(times):
        numbers = {block: next_block + place for place, block in enumerate(own)}
        next_block += len(own)
        before = {old: last[new] for old, new in zip(earlier, left, strict=True)}
        repeated += _rename(step, {**before, **numbers})
        last = numbers
    return repeated + _rename(behind, last)


def _find_last(issued: Sequence[Issued], name: str) -> int | None:
    return max((number for number, one in enumerate(issued) if one.event == Mark(name)), default=None)


def _describe(device: int, taken: Allocate) -> tuple[int, int, int, str]:
    return device, taken.size, taken.stream, taken.pool


def _rename(issued: Sequence[Issued], numbers: Mapping[int, int]) -> list[Issued]:
    """Give blocks their numbers; events of streams keep theirs, which are those of the latest."""
    return [replace(one, event=_rename_block(one.event, numbers)) for one in issued]


def _rename_block(event: Event | Used | Ordered, numbers: Mapping[int, int]) -> Event | Used | Ordered:
    if isinstance(event, Allocate | Free | LetGo | Used) and event.block in numbers:
        return replace(event, block=numbers[event.block])
    return event
