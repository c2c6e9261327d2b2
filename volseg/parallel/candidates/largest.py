"""The largest volumes of ways to share a machine, looked for several at a time.

Where to look is decided here, in one process, in an order that does not depend on how fast anybody is; copies follow
the sizes. A core that would wait follows what will probably be asked for next.
"""

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.beside import FollowingCopies
from volseg.parallel.candidates.forecasting import Planned, Sides, forecast_work
from volseg.parallel.candidates.volumes import Largest, Need, NextSize, scale_sides, search_largest

__all__ = ["Search", "find_need", "search_beside", "search_volumes"]

TOO_MUCH = 64
"""Times what there is, that a volume which was given up is said to take: some such number, to look for smaller ones."""

COPIES_OF_WEIGHTS = 4
"""Of each weight: itself, its gradient, and two averages of the optimizer. Only where to look first depends on it."""


@dataclass(frozen=True, kw_only=True)
class AskedSize:
    """A size that is to be followed."""

    sides: Sides
    to_end: bool
    """Whether it is followed to its end even where it does not fit."""
    next_ones: tuple[Sides, ...] = ()
    """See `NextSize`."""


@dataclass(frozen=True, kw_only=True)
class FollowedSize:
    """What became of one."""

    need: Need | None
    """None where it cannot be run."""
    outside: int | None = None
    """Of it, bytes beside torch's allocator; None where it was given up."""


Search = Generator[AskedSize, FollowedSize, dict[Sides, Largest | None]]
"""Asks for sizes, and returns the largest of each aspect that fits."""


def search_volumes(
    planned: Planned,
    candidate: Candidate,
    aspects: Sequence[Sides],
    known: Mapping[Sides, Need] | None = None,
    begin_at: int | None = None,
) -> Search:
    """Look for the largest volume of each aspect that fits.

    Parameters
    ----------
    planned : Planned
        The step, the machine, and how the step is made on other volumes.
    candidate : Candidate
        Who computes what.
    aspects : sequence
        Sides whose ratios are kept.
    known : dict, optional
        What sizes take whose need is known already.
    begin_at : int, optional
        Voxels of a volume that may be about the largest; by default the step's own volume comes first.
    """
    machine, divisors = planned.machine, planned.divisors
    needs = dict(known or {})
    outside: list[int] = []

    def ask(look: NextSize) -> Generator[AskedSize, FollowedSize, Need | None]:
        if look.sides not in needs:
            # With one that is known, others have a line to be looked for by.
            size = yield AskedSize(sides=look.sides, to_end=not needs, next_ones=look.next_ones)
            if size.need is None or size.outside is None:
                return size.need
            needs[look.sides] = size.need
            outside.append(size.outside)
        return needs[look.sides]

    d, h, w = planned.work.sides
    longest = max(range(3), key=lambda axis: (aspects[0][axis], divisors[axis]))
    begin = (d, h, w)
    if begin_at is not None:
        begin = scale_sides(_find_step(begin_at, aspects[0], divisors), aspects[0], divisors)
    yield from ask(NextSize(sides=begin))
    weights = sum(parameter.nbytes for parameter in planned.work.build().parameters()) // candidate.pipeline
    fixed = planned.reserve + sum(outside) + COPIES_OF_WEIGHTS * weights
    by_voxels = {math.prod(sides): needed for sides, needed in needs.items()}
    first = max(1, max(planned.work.sides) // divisors[longest])
    found: dict[Sides, Largest | None] = {}
    for aspect in aspects:
        search = search_largest(machine.gpu_bytes, aspect, divisors, first=first, fixed=fixed, known=by_voxels)
        found[aspect] = yield from _look(search, ask)
    return found


def _look(
    search: Generator[NextSize, Need | None, Largest | None],
    ask: Callable[[NextSize], Generator[AskedSize, FollowedSize, Need | None]],
) -> Generator[AskedSize, FollowedSize, Largest | None]:
    look = next(search, None)
    while look is not None:
        needed = yield from ask(look)
        try:
            look = search.send(needed)
        except StopIteration as end:
            largest: Largest | None = end.value
            return largest
    return None


def _follow_size(planned: Planned, candidate: Candidate, sides: Sides, to_end: bool) -> FollowedSize:
    """Return what a size takes."""
    resize, machine = planned.resize, planned.machine
    assert resize is not None
    resized, reserve = resize(sides)
    forecast = forecast_work(
        resized,
        candidate,
        machine,
        reserve=reserve,
        one_process=planned.free.one_process,
        to_end=to_end,
        reserved=True,
    )
    if forecast.more_than is not None:
        return FollowedSize(need=Need(total=machine.gpu_bytes + 1, held=None))
    if forecast.too_large:
        return FollowedSize(need=Need(total=TOO_MUCH * machine.gpu_bytes, held=TOO_MUCH * machine.gpu_bytes))
    if forecast.memory is None:
        return FollowedSize(need=None)
    return FollowedSize(need=find_need(forecast, reserve), outside=forecast.memory.outside)


def find_need(forecast: Forecast, reserve: int) -> Need:
    """Return what a forecast says of its size, beside so many bytes that something else takes."""
    memory = forecast.memory
    assert memory is not None
    return Need(total=memory.total + reserve, held=memory.used + memory.outside + reserve)


Volumes = dict[Sides, Largest | None]


def search_beside(
    copies: FollowingCopies[Planned],
    searches: Mapping[Candidate, Callable[[Mapping[Candidate, Volumes]], Search]],
    after: Mapping[Candidate, Collection[Candidate]] | None = None,
) -> dict[Candidate, Volumes]:
    """Return what several searches find.

    Parameters
    ----------
    copies : FollowingCopies
        They follow the sizes.
    searches : mapping
        Of each candidate, what begins its search, given what those have found that it comes after. Of several that wait
        for a copy the first comes first.
    after : mapping, optional
        Whom a search waits for.
    """
    found: dict[Candidate, Volumes] = {}
    running: dict[Candidate, tuple[Search, AskedSize]] = {}

    def go_on(candidate: Candidate, search: Search, size: FollowedSize | None) -> None:
        try:
            running[candidate] = search, next(search) if size is None else search.send(size)
        except StopIteration as end:
            running.pop(candidate, None)
            found[candidate] = end.value

    waiting = list(searches)
    while waiting or running:
        for candidate in tuple(waiting):
            before = (after or {}).get(candidate, ())
            if all(each in found for each in before):
                waiting.remove(candidate)
                go_on(candidate, searches[candidate]({each: found[each] for each in before}), None)
        for candidate, (_, asked) in running.items():
            copies.begin(_follow_size, candidate, asked.sides, asked.to_end)
        for candidate, (_, asked) in running.items():
            for sides in asked.next_ones:
                if copies.count_idle():
                    copies.begin(_follow_size, candidate, sides, False)
        if running:
            candidates = list(running)
            several = [(each, running[each][1].sides, running[each][1].to_end) for each in candidates]
            candidate = candidates[copies.wait(_follow_size, several)]
            search, asked = running[candidate]
            go_on(candidate, search, copies.ask(_follow_size, candidate, asked.sides, asked.to_end))
    return found


def _find_step(voxels: int, aspect: Sides, divisors: Sides) -> int:
    """Return the largest size of an aspect with no more voxels, in multiples of its longest side's divisor."""
    step = 1
    while math.prod(scale_sides(step + 1, aspect, divisors)) <= voxels:
        step += 1
    return step
