"""Find what fits on a machine and what is fastest there: estimate the candidates, and choose one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from volseg.errors import ParallelError
from volseg.estimate.allocator import has_expandable_segments
from volseg.estimate.candidate import Candidate, Estimate, list_candidates, name_candidate, relieve
from volseg.estimate.estimator import Planned
from volseg.estimate.largest_volume import Largest, Sides, find_largest
from volseg.estimate.report import PlanReport, build_row, build_skipped_row, format_table
from volseg.estimate.search import GIB, Found, choose, guess_least, judge, search
from volseg.parallel.forking import ForkedWorkers

MOST_GPUS = 64
"""Most GPUs that a remedy suggests where nothing fits."""

TYPICAL_BYTES = 2000
"""Bytes of a step per voxel and sample by which the search of the largest volume begins; networks took 800 to 3,900."""


@dataclass(frozen=True, kw_only=True)
class StepPlan(Found):
    """The estimates of all candidates on a machine, and the choice."""

    report: PlanReport
    """The whole plan as data; ``PlanReport.model_json_schema()`` is its schema."""

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.report.model_dump_json(indent=2)

    def table(self) -> str:
        """Return the report as a plain-text table of 80 columns."""
        return format_table(self.report.candidates)


def plan_work(
    planned: Planned,
    *,
    notes: Sequence[str] = (),
    steps_per_epoch: int | None = None,
    only: Callable[[Candidate], bool] | None = None,
    thorough: bool = False,
    numbers: bool = True,
    forks: bool = False,
) -> StepPlan:
    """Estimate the candidates that could be the fastest on a machine, and choose one.

    Parameters
    ----------
    planned : Planned
        The step and the machine.
    notes : sequence of str
        Further remarks for the reader.
    steps_per_epoch : int, optional
        Number of optimizer steps.
    only : callable, optional
        Returns whether a candidate may be used.
    thorough : bool
        Whether to estimate also the candidates that cannot be the fastest.
    numbers : bool
        Whether to trace a candidate that does not fit to its end, for its memory. Otherwise only the plain step on one
        GPU is traced to its end and, if nothing fits, one candidate that needs little.
    forks : bool
        Whether to estimate several candidates at a time; see `ForkedWorkers`.

    Raises
    ------
    ParallelError
        If no candidate can be traced; the message has the first reason.
    ConfigError
        If torch's allocator is configured in a way that is not modelled.
    """
    has_expandable_segments()  # here, before anything is traced
    work, machine, free = planned.work, planned.machine, planned.free
    listed = list_candidates(machine.num_gpus, work.batch_size, work.sides, free)
    candidates = [candidate for candidate in listed if only is None or only(candidate)]
    if not candidates:
        raise ParallelError(
            f"{machine.num_gpus} GPU(s) cannot be shared as asked (data: {free.data}, spatial: {free.spatial}, "
            f"pipeline: {free.pipeline}) on a batch of {work.batch_size}; leave one of these open, or name more GPUs"
        )
    with ForkedWorkers(planned, forks=forks) as workers:
        to_end = numbers or thorough

        def begin(several: Sequence[Candidate]) -> None:
            for candidate in several:
                workers.begin(Planned.estimate, candidate, to_end)

        found = search(
            candidates,
            lambda candidate: workers.ask(Planned.estimate, candidate, to_end),
            planned.capacity,
            work.batch_size,
            lambda each: relieve(each, free),
            thorough=thorough,
            begin=begin,
        )
        least = guess_least(found.forecasts) if found.chosen is None else None
        if least is not None:
            whole = judge(planned.estimate(least.candidate), planned.capacity)
            forecasts = tuple(whole if each is least else each for each in found.forecasts)
            chosen, why = choose(forecasts, planned.capacity)
            found = replace(found, forecasts=forecasts, chosen=chosen, why=why)
        if all(each.memory is None for each in found.forecasts):
            first = found.forecasts[0]
            raise ParallelError(f"{work.name} cannot be followed on {work.shape}: {first.refused}")
        remedies = tuple(_list_remedies(planned, found, workers)) if found.chosen is None else ()
    price = machine.price_per_hour
    rows = [
        build_row(each, chosen=each is found.chosen, steps_per_epoch=steps_per_epoch, price_per_hour=price)
        for each in found.forecasts
    ]
    report = PlanReport(
        network=work.name,
        shape=work.shape,
        precision=str(work.precision).removeprefix("torch."),
        gpu=machine.gpu.name,
        num_gpus=machine.num_gpus,
        gpu_bytes=machine.gpu_bytes,
        reserve_bytes=planned.reserve,
        rates="measured" if machine.gpu.is_measured else "published",
        instance=machine.instance,
        price_per_hour=price,
        price_source=machine.price_source,
        steps_per_epoch=steps_per_epoch,
        candidates=(*rows, *(build_skipped_row(*each) for each in found.skipped)),
        fits=found.chosen is not None,
        why=found.why,
        remedies=remedies,
        notes=tuple(notes),
    )
    return StepPlan(**vars(found), report=report)


def _list_remedies(planned: Planned, found: Found, workers: ForkedWorkers[Planned]) -> Iterator[str]:
    """Yield changes that would make the step fit, with numbers."""
    work = planned.work
    least = min((each for each in found.forecasts if each.memory is not None), key=lambda each: each.needed)
    d, h, w = work.sides
    workers.begin(_find_number)
    if planned.resize is not None:
        workers.begin(_find_volumes, least.candidate, ((d, h, w),))
    yield f"GPUs of {(least.needed + planned.reserve) / GIB:.1f} GiB: {name_candidate(least.candidate)}"
    enough = workers.ask(_find_number)
    if enough is not None:
        name, gib = name_candidate(enough.candidate), enough.needed / GIB
        yield f"{enough.candidate.num_gpus} such GPUs: {name} ({gib:.1f} GiB of each)"
    if planned.resize is not None:
        (one,) = workers.ask(_find_volumes, least.candidate, ((d, h, w),))
        if one is not None:
            sides = " x ".join(map(str, one.sides))
            yield f"volumes of {sides}: {name_candidate(least.candidate)} ({one.needed / GIB:.1f} GiB)"
        elif work.batch_size > 1:
            yield "a smaller batch: with this one the smallest volume does not fit"


def _find_number(planned: Planned) -> Estimate | None:
    """Try twice, four times ... as many GPUs; return the estimate of the first number of slabs that fits."""
    free, count = planned.free, planned.machine.num_gpus * 2
    slabs = Candidate(spatial=2, checkpoint=free.checkpoint)
    most = (relieve(slabs, free) or [slabs])[-1].checkpoint
    while not free.whole and count <= min(MOST_GPUS, max(planned.work.sides)):
        forecast = planned.follow(Candidate(spatial=count, checkpoint=most), to_end=False)
        if forecast.memory is None and forecast.more_than is None:
            return None  # slabs do not support its operators
        if forecast.runs:
            return forecast
        count *= 2
    return None


def list_largest(planned: Planned, *, forks: bool = False) -> list[tuple[Candidate, Sides, Largest | None]]:
    """Return the largest volume that each candidate can train on, as a cube and with the step's own aspect.

    Parameters
    ----------
    planned : Planned
        The step, the machine, and ``resize``, which makes the step on other volumes.
    forks : bool
        Whether to examine several candidates at a time; see `ForkedWorkers`.

    Returns
    -------
    list of tuple
        Candidate, aspect, and the largest volume of this aspect; None if no volume fits or runs.
    """
    work, free = planned.work, planned.free
    listed = list_candidates(planned.machine.num_gpus, work.batch_size, work.sides, free)
    # A replica of a pipeline holds as much as one pipeline of as many stages; with more stages, each GPU holds less.
    alike = [each for each in listed if each.pipeline == 1 or each.data == 1 or free.pipeline is not None]
    chosen = [each for each in alike if each.split_size in (None, 1, free.split_size)]
    candidates = [way for each in chosen for way in (each, *relieve(each, free)[-1:])]
    d, h, w = work.sides
    aspects: tuple[Sides, ...] = ((1, 1, 1), (d, h, w)) if len({d, h, w}) > 1 else ((d, h, w),)
    with ForkedWorkers(planned, forks=forks) as workers:
        for each in sorted(candidates, key=lambda each: (-each.pipeline, -each.spatial)):  # longest first
            workers.begin(_find_volumes, each, aspects)
        found = {each: workers.ask(_find_volumes, each, aspects) for each in candidates}
    return [
        (each, aspect, largest) for each in candidates for aspect, largest in zip(aspects, found[each], strict=True)
    ]


def _find_volumes(planned: Planned, candidate: Candidate, aspects: Sequence[Sides]) -> list[Largest | None]:
    """Return the largest volume of each aspect that a candidate can train on."""
    need, capacity, known = partial(planned.need, candidate), planned.machine.gpu_bytes, dict[int, float]()
    typical = TYPICAL_BYTES if candidate.checkpoint is None else TYPICAL_BYTES // 2
    voxels = capacity * candidate.num_gpus // (typical * planned.work.batch_size)
    return [find_largest(need, capacity, aspect, planned.divisors, voxels=voxels, known=known) for aspect in aspects]
