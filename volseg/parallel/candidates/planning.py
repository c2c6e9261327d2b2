"""What fits on a machine, and what is fastest there: every candidate followed, and one chosen."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from volseg.errors import ParallelError
from volseg.forecast.allocator import AllocatorSettings
from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.beside import FollowingCopies
from volseg.parallel.candidates.choosing import Found, choose, guess_least, judge, search, sort_candidates
from volseg.parallel.candidates.forecasting import Machine, Planned, Sides
from volseg.parallel.candidates.largest import Search, search_beside, search_volumes
from volseg.parallel.candidates.listing import list_candidates, relieve
from volseg.parallel.candidates.remedies import count_held, find_number, list_remedies
from volseg.parallel.candidates.report import PlanReport, build_row, build_skipped_row, format_table
from volseg.parallel.candidates.volumes import Largest

__all__ = ["StepPlan", "list_largest", "plan_work"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What was forecast for a machine."""

    name: str
    """Of the network."""
    shape: tuple[int, ...]
    """Of a step's images, (B, C, D, H, W)."""
    precision: str
    machine: Machine
    reserve: int
    """Bytes of each GPU that the step may not take."""
    found: Found
    remedies: tuple[str, ...] = ()
    """Where nothing fits, what would."""
    notes: tuple[str, ...] = ()
    steps_per_epoch: int | None = None

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """Of all candidates that were followed."""
        return self.found.forecasts

    @property
    def chosen(self) -> Forecast | None:
        """The fastest that fits; None where nothing does."""
        return self.found.chosen

    @property
    def why(self) -> str:
        """One sentence about the choice."""
        return self.found.why

    @property
    def report(self) -> PlanReport:
        """All of it, with a schema: ``PlanReport.model_json_schema()``."""
        machine = self.machine
        rows = [
            build_row(
                each,
                chosen=each is self.chosen,
                steps_per_epoch=self.steps_per_epoch,
                price_per_hour=machine.price_per_hour,
            )
            for each in self.forecasts
        ]
        return PlanReport(
            network=self.name,
            shape=self.shape,
            precision=self.precision,
            gpu=machine.gpu.name,
            num_gpus=machine.num_gpus,
            gpu_bytes=machine.gpu_bytes,
            reserve_bytes=self.reserve,
            rates="measured" if machine.is_measured else "published",
            instance=machine.instance,
            price_per_hour=machine.price_per_hour,
            price_source=machine.price_source,
            steps_per_epoch=self.steps_per_epoch,
            candidates=(*rows, *map(build_skipped_row, self.found.skipped)),
            fits=self.chosen is not None,
            why=self.why,
            remedies=self.remedies,
            notes=self.notes,
        )

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.report.model_dump_json(indent=2)

    def table(self) -> str:
        """Return the report for people: plain text of 80 columns."""
        return format_table(self.report.candidates)


def plan_work(
    planned: Planned,
    *,
    notes: Sequence[str] = (),
    steps_per_epoch: int | None = None,
    only: Callable[[Candidate], bool] | None = None,
    thorough: bool = False,
    numbers: bool = True,
    beside: bool = False,
) -> StepPlan:
    """Follow what could win on a machine, and choose.

    Parameters
    ----------
    planned : Planned
        The step and the machine.
    notes : sequence of str
        What the reader must know besides.
    steps_per_epoch : int, optional
        Optimizer steps.
    only : callable, optional
        Which candidates may be taken.
    thorough : bool
        Whether to follow those too that cannot win.
    numbers : bool
        Whether what does not fit is followed to its end, so that it is known how much it needs. Otherwise that is known
        of one GPU, and where nothing fits of one way that needs little.
    beside : bool
        Whether to follow several at a time; see `FollowingCopies`.

    Raises
    ------
    ParallelError
        If nothing can be followed at all: the first reason.
    ConfigError
        If torch's allocator is told to divide memory in a way that is not modelled.
    """
    AllocatorSettings.find()  # here, before anything is followed
    work, machine, free = planned.work, planned.machine, planned.free
    listed = list_candidates(machine.num_gpus, work.batch_size, work.sides, free)
    candidates = [candidate for candidate in listed if only is None or only(candidate)]
    if not candidates:
        raise ParallelError(
            f"{machine.num_gpus} GPU(s) cannot be shared as asked (data: {free.data}, spatial: {free.spatial}, "
            f"pipeline: {free.pipeline}) on a batch of {work.batch_size}; leave one of these open, or name more GPUs"
        )
    with FollowingCopies(planned, beside=beside) as copies:
        follow = Planned.forecast if numbers or thorough else Planned.forecast_if_fits

        def begin(several: Sequence[Candidate]) -> None:
            for candidate in several:
                copies.begin(follow, candidate)

        def finish(candidate: Candidate) -> Forecast:
            return copies.ask(Planned.forecast, candidate)

        begin(sort_candidates(candidates))
        found = search(
            candidates,
            lambda candidate: copies.ask(follow, candidate),
            planned.capacity,
            work.batch_size,
            lambda each: relieve(each, free),
            thorough=thorough,
            begin=begin,
            finish=finish,
        )
        least = guess_least(found.forecasts) if found.chosen is None else None
        if least is not None:
            if least.spatial == 1:  # what it needs says nothing of more slabs
                copies.begin(find_number, count_held(planned, [each for each in found.forecasts if each.memory]))
            found = _put_in(found, judge(finish(least), planned.capacity), planned.capacity)
        if all(each.memory is None for each in found.forecasts):
            first = found.forecasts[0]
            raise ParallelError(f"{work.name} cannot be followed on {work.shape}: {first.refused}")
        remedies = tuple(list_remedies(planned, found, copies)) if found.chosen is None else ()
    return StepPlan(
        name=work.name,
        shape=work.shape,
        precision=str(work.precision).removeprefix("torch."),
        machine=machine,
        reserve=planned.reserve,
        found=found,
        remedies=remedies,
        notes=tuple(notes),
        steps_per_epoch=steps_per_epoch,
    )


def _put_in(found: Found, whole: Forecast, capacity: int) -> Found:
    """Return what was found with the forecast of a candidate that was followed to its end."""
    same = replace(whole.candidate, recorded=False, kernels="torch")
    forecasts = tuple(
        whole
        if each.more_than is not None and replace(each.candidate, recorded=False, kernels="torch") == same
        else each
        for each in found.forecasts
    )
    chosen, why = choose(forecasts, capacity)
    return replace(found, forecasts=forecasts, chosen=chosen, why=why)


def list_largest(planned: Planned, *, beside: bool = False) -> list[tuple[Candidate, Sides, Largest | None]]:
    """Return the largest volume that each way of sharing the machine can train on, as a cube and with its own aspect.

    Parameters
    ----------
    planned : Planned
        The step, the machine, and how the step is made on other volumes.
    beside : bool
        Whether to look at several ways at a time; see `FollowingCopies`.

    Returns
    -------
    list of tuple
        Candidate, the aspect that was kept, and the largest volume; None where none fits or runs.
    """
    work, free = planned.work, planned.free
    listed = list_candidates(planned.machine.num_gpus, work.batch_size, work.sides, free)
    # Replicas of a pipeline hold what a pipeline of as many stages does, and one of more stages holds less.
    alike = [each for each in listed if each.pipeline == 1 or each.data == 1 or free.pipeline is not None]
    chosen = [each for each in alike if each.split_size in (None, 1, free.split_size)]
    candidates = [way for each in chosen for way in (each, *relieve(each, free)[-1:])]
    d, h, w = work.sides
    aspects = tuple(dict.fromkeys([(d, h, w), (1, 1, 1)] if len({d, h, w}) > 1 else [(d, h, w)]))
    stages = _list_stages(candidates)

    def begin(candidate: Candidate) -> Callable[[Mapping[Candidate, Mapping[Sides, Largest | None]]], Search]:
        return lambda found: search_volumes(planned, candidate, aspects, None, _find_start(candidate, found))

    with FollowingCopies(planned, beside=beside) as copies:
        searches = {each: begin(each) for stage in stages for each in stage}
        found = search_beside(copies, searches, _list_before(stages))
    return [(each, aspect, found[each][aspect]) for each in candidates for aspect in reversed(aspects)]


def _list_stages(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return candidates by whose volumes say where to look for whose; what takes longest comes first.

    One GPU is followed fastest, and says about how much several hold; replicas say about how much slabs do.
    """
    ordered = sorted(candidates, key=lambda each: (-each.pipeline, each.checkpoint is None))
    alone = [each for each in ordered if each.num_gpus == 1]
    replicas = [each for each in ordered if each.num_gpus > 1 and each.spatial == each.pipeline == 1]
    return [alone, replicas, [each for each in ordered if each not in (*alone, *replicas)]]


def _list_before(stages: Sequence[Sequence[Candidate]]) -> dict[Candidate, list[Candidate]]:
    """Return whose volumes a search waits for: of the stages before those that recompute as much, or all."""
    before: dict[Candidate, list[Candidate]] = {}
    earlier: list[Candidate] = []
    for stage in stages:
        for each in stage:
            before[each] = [one for one in earlier if one.checkpoint == each.checkpoint] or list(earlier)
        earlier += stage
    return before


def _find_start(candidate: Candidate, found: Mapping[Candidate, Mapping[Sides, Largest | None]]) -> int | None:
    """Return the voxels that as many GPUs hold as those that are known, with as much recomputed where that is."""
    known = {each: [math.prod(one.sides) for one in sizes.values() if one] for each, sizes in found.items()}
    alike = [each for each in known if known[each] and each.checkpoint == candidate.checkpoint]
    nearest = max(alike or [each for each in known if known[each]], key=lambda each: each.num_gpus, default=None)
    return None if nearest is None else max(known[nearest]) * candidate.num_gpus // nearest.num_gpus
