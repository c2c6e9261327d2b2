"""What would fit where nothing does, and the largest volume that does."""

from collections.abc import Iterable, Iterator
from typing import Literal

from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.beside import FollowingCopies
from volseg.parallel.candidates.choosing import GIB, Found
from volseg.parallel.candidates.forecasting import Planned, forecast_work
from volseg.parallel.candidates.largest import find_need, search_beside, search_volumes
from volseg.parallel.candidates.listing import Freedom, name_candidate, relieve

__all__ = ["count_held", "find_number", "list_remedies"]

MOST_GPUS = 64
"""To which more GPUs are looked for where nothing fits."""


def list_remedies(planned: Planned, found: Found, copies: FollowingCopies[Planned]) -> Iterator[str]:
    """Say what would fit, with numbers."""
    work, reserve = planned.work, planned.reserve
    measured = tuple(each for each in found.forecasts if each.memory is not None)
    least = min(measured, key=_total)
    d, h, w = work.sides
    own = ((d, h, w),)
    known = {own[0]: find_need(least, reserve)}
    held = count_held(planned, measured)
    copies.begin(find_number, held)
    largest = None
    if planned.resize is not None:
        search = search_volumes(planned, least.candidate, own, known)
        largest = search_beside(copies, {least.candidate: lambda _: search})
    yield f"GPUs of {(_total(least) + reserve) / GIB:.1f} GiB: {name_candidate(least.candidate)}"
    enough = copies.ask(find_number, held)
    if enough is not None:
        name, gib = name_candidate(enough.candidate), _total(enough) / GIB
        yield f"{enough.candidate.num_gpus} such GPUs: {name} ({gib:.1f} GiB of each)"
    if largest is not None:
        one = largest[least.candidate][own[0]]
        if one is not None:
            sides = " x ".join(map(str, one.sides))
            yield f"volumes of {sides}: {name_candidate(least.candidate)} ({one.needed / GIB:.1f} GiB)"
        elif work.batch_size > 1:
            yield "a smaller batch: with this one the smallest volume does not fit"


def _total(forecast: Forecast) -> int:
    assert forecast.memory is not None
    return forecast.memory.total


def count_held(planned: Planned, forecasts: Iterable[Forecast]) -> int:
    """Return the bytes of tensors that all GPUs together hold, of slabs that recompute most; 0 where it is not known.

    Of N GPUs each holds an N-th of what all of them hold, or more: so slabs that do not fit say which numbers of GPUs
    cannot suffice either.
    """
    most = _find_most(planned.free)
    alike = [each for each in forecasts if each.candidate.spatial > 1 and each.candidate.checkpoint == most]
    return max(map(_count_held, alike), default=0)


def find_number(planned: Planned, held: int) -> Forecast | None:
    """Return the forecast of twice, four times ... as many GPUs, for the first number of them that suffices.

    Parameters
    ----------
    planned : Planned
        The step and the machine.
    held : int
        Bytes of tensors that all GPUs together hold at least; numbers of GPUs that are too few for them are passed
        over.
    """
    if planned.free.whole:
        return None
    work, machine = planned.work, planned.machine
    most = _find_most(planned.free)
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
