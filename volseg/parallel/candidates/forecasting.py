"""What one way to run a step needs: it is followed, and its memory and its time are found."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from volseg.errors import NotRecordedError, OutOfMemoryError, VolsegError
from volseg.forecast.allocator import AllocatorSettings, find_memory_use
from volseg.forecast.candidate import Candidate, Forecast
from volseg.forecast.gpu_kinds import GpuKind
from volseg.forecast.links import Links
from volseg.forecast.memory_use import MemoryUse
from volseg.forecast.outside import find_least_outside, find_outside
from volseg.forecast.repeating import repeat_last_step
from volseg.forecast.threads import Pace
from volseg.forecast.timing import OF_STAGES, find_host_seconds, find_times
from volseg.forecast.trace import KernelRun, Sent, StepTrace
from volseg.parallel.candidates.choosing import GIB, judge
from volseg.parallel.candidates.listing import Freedom
from volseg.parallel.candidates.running import follow_candidate
from volseg.parallel.candidates.work import Work

__all__ = ["Machine", "Planned", "Resize", "Sides", "forecast_work"]

Sides = tuple[int, int, int]

MORE_STEPS = 4
"""Beside those that are followed, near the end of the memory. DynUNet, 800 x 160 x 160 in 16 GiB, was out of memory in
the third step, and so is its forecast."""

MOST_TIMES, SMALLEST = 64, 16 * 2**30
"""How often the memory of a GPU, or of such a small one, is taken before a step is given up: no number of GPUs that is
looked for where nothing fits could hold it. Losses and recomputation go through a volume piece by piece, so the larger
it is the longer it is followed: a patch of 100,000 voxels along each axis for ever."""

Resize = Callable[[Sides], tuple[Work, int]]
"""Makes the work on volumes of other sides, and says how many bytes of a GPU something else takes then."""


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
class Planned:
    """A step, and the GPUs that are to share it."""

    work: Work
    machine: Machine
    free: Freedom
    """What may be chosen."""
    reserve: int = 0
    """Bytes of each GPU that something else takes."""
    times: float = 1.0
    """Of the followed step's time, that of an optimizer step: where it gathers more batches than are followed."""
    resize: Resize | None = None
    """By which the largest volume is found."""
    divisors: tuple[int, int, int] = (1, 1, 1)
    """What the sides of a volume must be multiples of."""

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that a step may take."""
        return self.machine.gpu_bytes - self.reserve

    def forecast(self, candidate: Candidate) -> Forecast:
        """Return the forecast of a way to run an optimizer step."""
        return _multiply(self._follow_best_kernels(candidate), self.times)

    def forecast_if_fits(self, candidate: Candidate) -> Forecast:
        """Return the same, but for what is known on the way not to fit: that is given up (``Forecast.more_than``).

        One GPU's plain step is not: its time is a bound of all others'.
        """
        bounds_others = candidate.num_gpus == 1 and candidate.checkpoint is None
        return _multiply(self._follow_best_kernels(candidate, to_end=bounds_others), self.times)

    def _follow_best_kernels(self, candidate: Candidate, *, to_end: bool = True) -> Forecast:
        """Forecast a candidate; where the kernels that it should take have no form for the network, with the others."""
        work, machine, free = self.work, self.machine, self.free
        follow = partial(forecast_work, reserve=self.reserve, to_end=to_end)
        forecast = follow(work, candidate, machine, one_process=free.one_process)
        uncut = candidate.spatial == candidate.pipeline == 1 and candidate.checkpoint is None
        is_refused = forecast.memory is None and forecast.more_than is None and not forecast.too_large
        if is_refused and uncut:
            for kernels in free.kernels[1:]:
                return follow(work, replace(candidate, kernels=kernels), machine)
        return forecast


def forecast_work(
    work: Work,
    candidate: Candidate,
    machine: Machine,
    *,
    reserve: int = 0,
    one_process: bool = False,
    to_end: bool = True,
    reserved: bool = False,
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
    to_end : bool
        Whether to follow what cannot fit to its end, for its numbers. Otherwise it is given up once the tensors that
        are alive together do not fit: torch's allocator can only take more.
    reserved : bool
        Whether it is given up too once torch would run out of memory with the pieces that it keeps.

    Returns
    -------
    Forecast
        Refused, with the reason, where it cannot run or does not fit. Where it would not be recorded, of the same step
        without a recording.
    """
    capacity = machine.gpu_bytes - reserve
    limit = MOST_TIMES * max(machine.gpu_bytes, SMALLEST)
    processes = 1 if one_process else candidate.data * candidate.spatial
    gpu = replace(machine.gpu, memory=capacity)  # by which a pipeline decides how many stages it needs
    if math.prod(work.shape) > limit * candidate.num_gpus:  # torch cannot count the bytes of the largest ones
        refused = (
            f"a batch of {' x '.join(map(str, work.shape))} is larger than {MOST_TIMES} times the memory of all GPUs; "
            "take smaller patches or volumes, or a smaller batch"
        )
        return Forecast(candidate=candidate, refused=refused, too_large=True)
    try:
        with _quietly():
            traces = follow_candidate(
                work,
                candidate,
                gpu,
                time_kernel=machine.gpu.seconds,
                one_process=one_process,
                pace=_find_pace(machine),
                limit=limit,
                fits=None if to_end else capacity - find_least_outside(processes),
                reserved=reserved,
            )
    except NotRecordedError:  # then a training goes on without
        eager = replace(candidate, recorded=False)
        again = partial(forecast_work, reserve=reserve, one_process=one_process, to_end=to_end, reserved=reserved)
        return again(work, eager, machine)
    except OutOfMemoryError as fault:
        if not to_end:
            there = max(0, capacity)  # cases and batches on their way may take all
            refused = f"needs more than the {max(there, 0) / GIB:.1f} GiB that there are"
            return Forecast(candidate=candidate, refused=refused, more_than=there)
        return Forecast(candidate=candidate, refused=_tell(fault), too_large=True)
    except VolsegError as fault:
        return Forecast(candidate=candidate, refused=_tell(fault))
    except Exception as fault:  # whatever a network of the user's own runs into, that looks at values or is of its kind
        return Forecast(candidate=candidate, refused=f"{type(fault).__name__}: {_tell(fault)}")
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
        devices=_list_devices({trace.device: use for trace, use in zip(traces, uses, strict=True)}, candidate),
        seconds=times.seconds,
        host_seconds=times.host,
        host_forward_seconds=times.host_forward,
    )
    return judge(forecast, capacity)


def _list_devices(followed: Mapping[int, MemoryUse], candidate: Candidate) -> tuple[MemoryUse, ...]:
    """Return the memory of every GPU, of those that were not followed that of one that has as much to do, or more.

    >>> use = lambda gib: MemoryUse(used=gib, reserved=gib, outside=0, peak_in="")
    >>> [each.used for each in _list_devices({0: use(3), 1: use(4)}, Candidate(spatial=4))]
    [3, 4, 4, 3]
    """
    if len(followed) == candidate.num_gpus:
        return tuple(followed[number] for number in range(candidate.num_gpus))
    if candidate.spatial == 1:  # each replica takes what the one does that was followed, stage by stage
        return tuple(followed[number % candidate.pipeline] for number in range(candidate.num_gpus))
    inner = followed.get(1, next(iter(followed.values())))
    outer = followed.get(0, inner)  # an outermost slab has one neighbour less
    shards = [outer, *[inner] * (candidate.spatial - 2), outer]
    return tuple(shards * candidate.data)


def _find_pace(machine: Machine) -> Pace:
    """Return how fast a pipeline's GPUs, links and Python are."""
    rates = machine.gpu.host_rates()

    def find_host_seconds_of(event: KernelRun | Sent, part: str) -> float:
        return find_host_seconds(event, part, rates, on_slabs=False) * (OF_STAGES if part == "forward" else 1.0)

    return Pace(kernel=machine.gpu.seconds, message=machine.links.seconds, host=find_host_seconds_of)


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
    # What tensors hold at a time fits into no less, whatever is given back.
    if free.total <= capacity or free.used + outside > capacity:
        return free
    try:
        # It may do so again in every step, and find other pieces: what trained once need not go on.
        return find_memory_use(repeat_last_step(trace, MORE_STEPS), settings, capacity, outside=outside)
    except OutOfMemoryError:
        return free


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
