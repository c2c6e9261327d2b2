"""What would fit where nothing does, and the largest volume that does."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.beside import FollowingCopies
from volseg.parallel.candidates.choosing import GIB, Found
from volseg.parallel.candidates.forecasting import Planned, Sides, forecast_work
from volseg.parallel.candidates.listing import Freedom, name_candidate, relieve
from volseg.parallel.candidates.volumes import Largest, Need, find_largest, scale_sides

__all__ = ["find_largest_volumes", "find_number", "list_remedies"]

MOST_GPUS = 64
"""To which more GPUs are looked for where nothing fits."""

TOO_MUCH = 64
"""Times what there is, that a volume which was given up is said to take: some such number, to look for smaller ones."""

COPIES_OF_WEIGHTS = 4
"""Of each weight: itself, its gradient, and two averages of the optimizer. Only where to look first depends on it."""


def list_remedies(planned: Planned, found: Found, copies: FollowingCopies[Planned]) -> Iterator[str]:
    """Say what would fit, with numbers."""
    work, reserve = planned.work, planned.reserve
    measured = tuple(each for each in found.forecasts if each.memory is not None)
    least = min(measured, key=_total)
    d, h, w = work.sides
    own = ((d, h, w),)
    known = {own[0]: _find_need(least, reserve)}
    copies.begin(find_number, measured)
    if planned.resize is not None:
        copies.begin(find_largest_volumes, least.candidate, own, known)
    yield f"GPUs of {(_total(least) + reserve) / GIB:.1f} GiB: {name_candidate(least.candidate)}"
    enough = copies.ask(find_number, measured)
    if enough is not None:
        name, gib = name_candidate(enough.candidate), _total(enough) / GIB
        yield f"{enough.candidate.num_gpus} such GPUs: {name} ({gib:.1f} GiB of each)"
    if planned.resize is not None:
        largest = copies.ask(find_largest_volumes, least.candidate, own, known)[own[0]]
        if largest is not None:
            sides = " x ".join(map(str, largest.sides))
            yield f"volumes of {sides}: {name_candidate(least.candidate)} ({largest.needed / GIB:.1f} GiB)"
        elif work.batch_size > 1:
            yield "a smaller batch: with this one the smallest volume does not fit"


def _total(forecast: Forecast) -> int:
    assert forecast.memory is not None
    return forecast.memory.total


def find_number(planned: Planned, forecasts: Sequence[Forecast]) -> Forecast | None:
    """Return the forecast of twice, four times ... as many GPUs, for the first number of them that suffices.

    Of N GPUs each holds an N-th of what all of them hold, or more: so slabs that do not fit say which numbers of GPUs
    cannot suffice either, and these are not followed.
    """
    if planned.free.whole:
        return None
    work, machine = planned.work, planned.machine
    most = _find_most(planned.free)
    alike = [each for each in forecasts if each.candidate.spatial > 1 and each.candidate.checkpoint == most]
    held = max((_count_held(each) for each in alike), default=0)
    count = machine.num_gpus * 2
    while count <= min(MOST_GPUS, max(work.sides)):
        if held / count <= planned.capacity:
            candidate = Candidate(spatial=count, checkpoint=most)
            forecast = forecast_work(work, candidate, machine, reserve=planned.reserve, to_end=False)
            if forecast.memory is None and forecast.more_than is None:
                return None  # its operators have no form on slabs
            if forecast.runs:
                return forecast
            held = max(held, _count_held(forecast))
        count *= 2
    return None


def _find_most(free: Freedom) -> Literal["all", "tiled"] | int | None:
    """Return the recomputation of slabs that takes least memory, or what was asked for."""
    slabs = Candidate(spatial=2, checkpoint=free.checkpoint)
    return (relieve(slabs, free) or [slabs])[-1].checkpoint


def _count_held(forecast: Forecast) -> int:
    """Return the bytes of tensors that all GPUs together hold, 0 where it is not known."""
    return 0 if forecast.memory is None else forecast.memory.used * forecast.candidate.spatial


def find_largest_volumes(
    planned: Planned,
    candidate: Candidate,
    aspects: Sequence[Sides],
    known: dict[Sides, Need] | None = None,
    begin_at: int | None = None,
) -> dict[Sides, Largest | None]:
    """Return the largest volume of each aspect that fits.

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
    resize, machine, divisors = planned.resize, planned.machine, planned.divisors
    assert resize is not None
    needs = dict(known or {})
    outside: list[int] = []

    def need(sides: Sides) -> Need | None:
        if sides not in needs:
            resized, reserve = resize(sides)
            forecast = forecast_work(
                resized,
                candidate,
                machine,
                reserve=reserve,
                one_process=planned.free.one_process,
                to_end=not needs,  # with one that is known, others have a line to be looked for by
                reserved=True,
            )
            if forecast.more_than is not None:
                return Need(total=machine.gpu_bytes + 1, held=None)
            if forecast.too_large:
                return Need(total=TOO_MUCH * machine.gpu_bytes, held=TOO_MUCH * machine.gpu_bytes)
            if forecast.memory is None:
                return None
            needs[sides] = _find_need(forecast, reserve)
            outside.append(forecast.memory.outside)
        return needs[sides]

    d, h, w = planned.work.sides
    longest = _find_longest(aspects[0], divisors)
    if begin_at is None:
        need((d, h, w))
    else:
        need(scale_sides(_find_step(begin_at, aspects[0], divisors), aspects[0], divisors))
    weights = sum(parameter.nbytes for parameter in planned.work.build().parameters()) // candidate.pipeline
    fixed = planned.reserve + sum(outside) + COPIES_OF_WEIGHTS * weights
    by_voxels = {math.prod(sides): needed for sides, needed in needs.items()}
    first = max(1, max(planned.work.sides) // divisors[longest])
    return {
        aspect: find_largest(need, machine.gpu_bytes, aspect, divisors, first=first, fixed=fixed, known=by_voxels)
        for aspect in aspects
    }


def _find_need(forecast: Forecast, reserve: int) -> Need:
    memory = forecast.memory
    assert memory is not None
    return Need(total=memory.total + reserve, held=memory.used + memory.outside + reserve)


def _find_longest(aspect: Sides, divisors: Sides) -> int:
    return max(range(3), key=lambda axis: (aspect[axis], divisors[axis]))


def _find_step(voxels: int, aspect: Sides, divisors: Sides) -> int:
    """Return the largest size of an aspect with no more voxels, in multiples of its longest side's divisor."""
    step = 1
    while math.prod(scale_sides(step + 1, aspect, divisors)) <= voxels:
        step += 1
    return step
