"""More steps of a trace than were followed: the last one again and again.

A step asks for the same blocks each time, but finds other free pieces: what does not fit any more after it has given
back whole segments may be out of memory in its third step or its fifth. To repeat what was asked for takes hundredths
of a second where to follow it takes one.
"""

from collections.abc import Iterator, Mapping

from volseg.forecast.trace import Allocate, Event, Free, Mark, StepTrace

__all__ = ["repeat_last_step"]


def repeat_last_step(trace: StepTrace, times: int) -> StepTrace:
    """Return a trace with its last step so many times more.

    What the step gives back of the one before (gradients, mostly) each further one gives back of that before it. Where
    these cannot be told from their sizes and order the trace is returned as it is.
    """
    begin, end = (_find_last(trace, name) for name in ("step", "end"))
    if begin is None or end is None or end < begin:
        return trace
    step = trace.events[begin : end + 1]  # behind it everything goes with whoever followed it
    taken = {event.block: event for event in trace.events if isinstance(event, Allocate)}
    own = [event.block for event in step if isinstance(event, Allocate)]
    given_back = {event.block for event in step if isinstance(event, Free)}
    left = [block for block in own if block not in given_back]
    earlier = sorted(given_back - set(own))  # numbers rise as blocks are taken
    if [_describe(taken[block]) for block in earlier] != [_describe(taken[block]) for block in left]:
        return trace
    events = list(trace.events[: end + 1])
    next_block = max(taken, default=0) + 1
    last = {block: block for block in own}
    for _ in range(times):
        numbers = {block: next_block + place for place, block in enumerate(own)}
        next_block += len(own)
        before = {old: last[new] for old, new in zip(earlier, left, strict=True)}
        events += _rename(step, {**before, **numbers})
        last = numbers
    return StepTrace(tuple(events), trace.device)


def _find_last(trace: StepTrace, name: str) -> int | None:
    return max((number for number, event in enumerate(trace.events) if event == Mark(name)), default=None)


def _describe(taken: Allocate) -> tuple[int, int, str]:
    return taken.size, taken.stream, taken.pool


def _rename(step: tuple[Event, ...], numbers: Mapping[int, int]) -> Iterator[Event]:
    for event in step:
        if isinstance(event, Allocate):
            yield Allocate(numbers[event.block], event.size, event.stream, event.pool)
        elif isinstance(event, Free):
            yield Free(numbers[event.block])
        else:
            yield event
