"""What fits on a machine, and what is fastest there: every candidate followed, and one chosen."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from volseg.errors import OutOfMemoryError, ParallelError, VolsegError
from volseg.forecast.allocator import AllocatorSettings, find_memory_use
from volseg.forecast.candidate import Candidate, Forecast
from volseg.forecast.gpu_kinds import GpuKind
from volseg.forecast.links import Links
from volseg.forecast.memory_use import MemoryUse
from volseg.forecast.outside import find_outside
from volseg.forecast.timing import find_times
from volseg.forecast.trace import StepTrace
from volseg.parallel.candidates.beside import following_beside
from volseg.parallel.candidates.choosing import GIB, Found, judge, search, sort_candidates
from volseg.parallel.candidates.listing import Freedom, list_candidates, name_candidate, relieve
from volseg.parallel.candidates.report import PlanReport, build_row, build_skipped_row, format_table
from volseg.parallel.candidates.running import follow_candidate
from volseg.parallel.candidates.volumes import Largest, find_largest
from volseg.parallel.candidates.work import Work

__all__ = ["Machine", "Resize", "StepPlan", "forecast_work", "list_largest", "plan_work"]

Sides = tuple[int, int, int]

Resize = Callable[[Sides], tuple[Work, int]]
"""Makes the work on volumes of other sides, and says how many bytes of a GPU something else takes then."""

MOST_GPUS = 64
"""To which more GPUs are looked for where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind."""

    gpu: GpuKind
    num_gpus: int
    links: Links
    """What connects them."""
    gpu_bytes: int
    """Memory of one of them."""
    instance: str | None = None
    """What it is called by who lets it."""
    price_per_hour: float | None = None
    """In US dollars."""
    price_source: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether times rest on measurements of this kind of GPU."""
        return self.gpu.measured or self.gpu.rates is not None


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


def forecast_work(
    work: Work, candidate: Candidate, machine: Machine, *, reserve: int = 0, one_process: bool = False
) -> Forecast:
    """Follow a candidate, and return what it needs.

    Parameters
    ----------
    work : Work
        The step.
    candidate : Candidate
        Who computes what.
    machine : Machine
        On which GPUs.
    reserve : int
        Bytes of each GPU that something else takes.
    one_process : bool
        Whether one process has all GPUs.

    Returns
    -------
    Forecast
        Refused, with the reason, where it cannot run or does not fit.
    """
    try:
        with _quietly():
            traces = follow_candidate(
                work, candidate, machine.gpu, time_kernel=machine.gpu.seconds, one_process=one_process
            )
    except VolsegError as fault:
        return Forecast(candidate=candidate, refused=_tell(fault))
    except Exception as fault:  # whatever a network of the user's own runs into, that looks at values or is of its kind
        return Forecast(candidate=candidate, refused=f"{type(fault).__name__}: {_tell(fault)}")
    processes = 1 if one_process else candidate.data * candidate.spatial
    capacity = machine.gpu_bytes - reserve
    uses = [_find_memory_use(trace, capacity, find_outside(trace, processes)) for trace in traces]
    memory = max(uses, key=lambda use: use.total)
    own = -(-work.batch_size // candidate.data)
    times = find_times(
        traces,
        machine.gpu,
        machine.links,
        recorded=candidate.recorded,
        stages=candidate.pipeline > 1,
        micro_batches=-(-own // (candidate.split_size or own)),
    )
    forecast = Forecast(
        candidate=candidate,
        memory=memory,
        seconds=times.seconds,
        host_seconds=times.host,
        host_forward_seconds=times.host_forward,
    )
    return judge(forecast, capacity)


@contextmanager
def _quietly() -> Iterator[None]:
    """Let the strategies say nothing about what is only followed."""
    ours = logging.getLogger("volseg")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


def _tell(fault: Exception) -> str:
    return str(fault).strip().partition("\n")[0]


def _find_memory_use(trace: StepTrace, capacity: int, outside: int) -> MemoryUse:
    """Return the peaks of a trace; near the end of the memory torch gives back what is cached, and may still fit."""
    settings = AllocatorSettings.find()
    free = find_memory_use(trace, settings, outside=outside)
    if free.total <= capacity:
        return free
    try:
        return find_memory_use(trace, settings, capacity, outside=outside)
    except OutOfMemoryError:
        return free


def plan_work(
    work: Work,
    machine: Machine,
    free: Freedom,
    *,
    reserve: int = 0,
    notes: Sequence[str] = (),
    steps_per_epoch: int | None = None,
    resize: Resize | None = None,
    divisors: Sequence[int] = (1, 1, 1),
    times: float = 1.0,
    only: Callable[[Candidate], bool] | None = None,
    thorough: bool = False,
    beside: bool = False,
) -> StepPlan:
    """Follow what could win on a machine, and choose.

    Parameters
    ----------
    work : Work
        The step.
    machine : Machine
        Where it is to run.
    free : Freedom
        What may be chosen.
    reserve : int
        Bytes of each GPU that something else takes.
    notes : sequence of str
        What the reader must know besides.
    steps_per_epoch : int, optional
        Optimizer steps.
    resize : callable, optional
        Where nothing fits, the largest volume that does is found by it.
    divisors : sequence of int
        What its sides must be multiples of.
    times : float
        Of the followed step's time, that of an optimizer step: where it gathers more batches than are followed.
    only : callable, optional
        Which candidates may be taken.
    thorough : bool
        Whether to follow those too that cannot win.
    beside : bool
        Whether to follow several at a time; see `following_beside`.

    Raises
    ------
    ParallelError
        If nothing can be followed at all: the first reason.
    ConfigError
        If torch's allocator is told to divide memory in a way that is not modelled.
    """
    AllocatorSettings.find()  # here, before anything is followed
    listed = list_candidates(machine.num_gpus, work.batch_size, work.sides, free)
    candidates = [candidate for candidate in listed if only is None or only(candidate)]
    if not candidates:
        raise ParallelError(
            f"{machine.num_gpus} GPU(s) cannot be shared as asked (data: {free.data}, spatial: {free.spatial}, "
            f"pipeline: {free.pipeline}) on a batch of {work.batch_size}; leave one of these open, or name more GPUs"
        )

    def follow(candidate: Candidate) -> Forecast:
        forecast = _follow_best_kernels(work, candidate, machine, free, reserve)
        return _multiply(forecast, times)

    with following_beside(follow, sort_candidates(candidates)) if beside else nullcontext(follow) as ask:
        found = search(
            candidates,
            ask,
            machine.gpu_bytes - reserve,
            work.batch_size,
            lambda each: relieve(each, free),
            thorough=thorough,
        )
    if all(each.memory is None for each in found.forecasts):
        first = found.forecasts[0]
        raise ParallelError(f"{work.name} cannot be followed on {work.shape}: {first.refused}")
    remedies: tuple[str, ...] = ()
    if found.chosen is None:
        remedies = tuple(_list_remedies(work, machine, found, reserve, resize, divisors))
    return StepPlan(
        name=work.name,
        shape=work.shape,
        precision=str(work.precision).removeprefix("torch."),
        machine=machine,
        reserve=reserve,
        found=found,
        remedies=remedies,
        notes=tuple(notes),
        steps_per_epoch=steps_per_epoch,
    )


def _multiply(forecast: Forecast, times: float) -> Forecast:
    """Return the forecast of an optimizer step that takes so many times as long as what was followed."""
    if forecast.seconds is None or forecast.host_seconds is None or forecast.host_forward_seconds is None:
        return forecast
    return replace(
        forecast,
        seconds=forecast.seconds * times,
        host_seconds=forecast.host_seconds * times,
        host_forward_seconds=forecast.host_forward_seconds * times,
    )


def _follow_best_kernels(work: Work, candidate: Candidate, machine: Machine, free: Freedom, reserve: int) -> Forecast:
    """Forecast a candidate; where the kernels that it should take have no form for the network, with the others."""
    forecast = forecast_work(work, candidate, machine, reserve=reserve, one_process=free.one_process)
    uncut = candidate.spatial == candidate.pipeline == 1 and candidate.checkpoint is None
    if forecast.memory is None and uncut:
        for kernels in free.kernels[1:]:
            return forecast_work(work, replace(candidate, kernels=kernels), machine, reserve=reserve)
    return forecast


def _list_remedies(
    work: Work, machine: Machine, found: Found, reserve: int, resize: Resize | None, divisors: Sequence[int]
) -> Iterator[str]:
    """Say what would fit, with numbers."""
    measured = [each for each in found.forecasts if each.memory is not None]
    least = min(measured, key=_total)
    yield f"GPUs of {(_total(least) + reserve) / GIB:.1f} GiB: {name_candidate(least.candidate)}"
    enough = _find_number(work, machine, found, reserve)
    if enough is not None:
        name, gib = name_candidate(enough.candidate), _total(enough) / GIB
        yield f"{enough.candidate.num_gpus} such GPUs: {name} ({gib:.1f} GiB of each)"
    if resize is not None:
        largest = _find_largest(work, least.candidate, machine, resize, divisors)
        if largest is not None:
            sides = " x ".join(map(str, largest.sides))
            yield f"volumes of {sides}: {name_candidate(least.candidate)} ({largest.needed / GIB:.1f} GiB)"
        elif work.batch_size > 1:
            yield "a smaller batch: with this one the smallest volume does not fit"


def _total(forecast: Forecast) -> int:
    assert forecast.memory is not None
    return forecast.memory.total


def _find_number(work: Work, machine: Machine, found: Found, reserve: int) -> Forecast | None:
    """Return the forecast of twice, four times ... as many GPUs, for the first number of them that suffices.

    Of N GPUs each holds an N-th of what all of them hold, or more: so slabs that do not fit say which numbers of GPUs
    cannot suffice either, and these are not followed.
    """
    capacity = machine.gpu_bytes - reserve
    alike = [each for each in found.forecasts if each.candidate.spatial > 1 and each.candidate.checkpoint == "all"]
    held = max((_count_held(each) for each in alike), default=0)
    count = machine.num_gpus * 2
    while count <= min(MOST_GPUS, max(work.sides)):
        if held / count <= capacity:
            forecast = forecast_work(work, Candidate(spatial=count, checkpoint="all"), machine, reserve=reserve)
            if forecast.memory is None:
                return None  # its operators have no form on slabs
            if forecast.runs:
                return forecast
            held = max(held, _count_held(forecast))
        count *= 2
    return None


def _count_held(forecast: Forecast) -> int:
    """Return the bytes of tensors that all GPUs together hold, 0 where it is not known."""
    return 0 if forecast.memory is None else forecast.memory.used * forecast.candidate.spatial


def _find_largest(
    work: Work,
    candidate: Candidate,
    machine: Machine,
    resize: Resize,
    divisors: Sequence[int],
    aspect: Sequence[int] | None = None,
) -> Largest | None:
    def need(sides: Sides) -> int | None:
        resized, reserve = resize(sides)
        forecast = forecast_work(resized, candidate, machine, reserve=reserve)
        return None if forecast.memory is None else forecast.memory.total + reserve

    aspect = work.sides if aspect is None else aspect
    longest = max(range(3), key=lambda axis: (aspect[axis], divisors[axis]))
    first = max(1, max(work.sides) // divisors[longest])
    return find_largest(need, machine.gpu_bytes, aspect, divisors, first=first)


def list_largest(
    work: Work,
    machine: Machine,
    free: Freedom,
    *,
    resize: Resize,
    divisors: Sequence[int],
) -> list[tuple[Candidate, Sides, Largest | None]]:
    """Return the largest volume that each way of sharing the machine can train on, as a cube and with its own aspect.

    Parameters
    ----------
    work, machine, free, resize, divisors
        See `plan_work`.

    Returns
    -------
    list of tuple
        Candidate, the aspect that was kept, and the largest volume; None where none fits or runs.
    """
    listed = list_candidates(machine.num_gpus, work.batch_size, work.sides, free)
    chosen = [each for each in listed if each.split_size in (None, 1, free.split_size)]
    candidates = [way for each in chosen for way in (each, *relieve(each, free)[-1:])]
    d, h, w = work.sides
    shapes = dict.fromkeys([(1, 1, 1), (d, h, w)] if len({d, h, w}) > 1 else [(d, h, w)])
    return [
        (candidate, aspect, _find_largest(work, candidate, machine, resize, divisors, aspect))
        for candidate in candidates
        for aspect in shapes
    ]
