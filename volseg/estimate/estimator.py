"""Estimate the memory and the time of one candidate: trace its step, then model the allocator and the kernels."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from volseg.errors import NotRecordedError, OutOfMemoryError, VolsegError
from volseg.estimate.candidate import Candidate, Estimate, Freedom, Work
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.fake_step.tracing import shorten
from volseg.estimate.instances import Machine
from volseg.estimate.largest_volume import Sides
from volseg.estimate.search import GIB, judge
from volseg.estimate.step_memory import estimate_cuda_overhead, estimate_least_cuda_overhead, estimate_memory_use
from volseg.estimate.step_time import estimate_times
from volseg.estimate.trace import StepTrace

__all__ = ["Machine", "Planned", "Resize", "Sides"]

MOST_TIMES, SMALLEST = 64, 16 * 2**30
"""A trace stops at ``MOST_TIMES`` times the memory of a GPU, counted as at least ``SMALLEST`` bytes: no number of GPUs
that the remedies try could hold the step. Losses and recomputation process a volume piece by piece, so the time of a
trace grows with the volume: a patch of 100,000 voxels along each axis would never end."""

MARGINS = {"recorded": 1.02, "spatial": 1.04, "recomputed": 1.065}
"""Factors on reserved memory, by how a step runs. On H200s and H100s, estimates without them were up to 7, 8 and 11 %
below the measured memory; with them, up to 5 % below."""

Resize = Callable[[Sides], tuple[Work, int]]
"""Returns the work on volumes of other sides, and the bytes of a GPU that something else takes with them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A training step, and the GPUs that share it."""

    work: Work
    machine: Machine
    free: Freedom = field(default_factory=Freedom)
    """Open and fixed settings of the candidates."""
    reserve: int = 0
    """Bytes of each GPU that something else takes."""
    times: float = 1.0
    """Time of an optimizer step over the time of the traced step: above 1 if only some of its batches are traced."""
    resize: Resize | None = None
    """Used to find the largest volume."""
    divisors: tuple[int, int, int] = (1, 1, 1)
    """The sides of a volume must be multiples of these."""

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that a step may take."""
        return self.machine.gpu_bytes - self.reserve

    def estimate(self, candidate: Candidate, to_end: bool = True) -> Estimate:
        """Return the estimate of an optimizer step of a candidate.

        If the preferred kernels do not support the network, the estimate uses the fallback. Without ``to_end``, a trace
        stops as soon as the step cannot fit (``Estimate.more_than``), except that of the plain step on one GPU: its
        time bounds the times of all others.
        """
        uncut = candidate.spatial == candidate.pipeline == 1 and candidate.checkpoint is None
        to_end = to_end or (uncut and candidate.data == 1)
        forecast = self.follow(candidate, to_end=to_end)
        if forecast.memory is None and forecast.more_than is None and uncut and self.free.kernels[1:]:
            forecast = self.follow(replace(candidate, kernels=self.free.kernels[1]), to_end=to_end)
        if forecast.seconds is None:
            return forecast
        # An optimizer step accumulates more batches than are traced.
        names = ("seconds", "host_forward_seconds")
        return replace(forecast, **{name: self.times * getattr(forecast, name) for name in names})

    def follow(self, candidate: Candidate, *, to_end: bool = True) -> Estimate:
        """Trace a candidate, and return its estimate; the traced step may be a part of an optimizer step.

        Parameters
        ----------
        candidate : Candidate
            How to share and run the step.
        to_end : bool
            Whether to trace a step that cannot fit to its end, for its numbers. Otherwise the trace stops once the live
            tensors do not fit: torch's allocator can only take more.

        Returns
        -------
        Estimate
            Refused, with the reason, if the candidate cannot run or does not fit. If the step cannot be recorded, the
            estimate is that of the same step without a recording.
        """
        work, gpu, one_process = self.work, self.machine.gpu, self.free.one_process
        limit = MOST_TIMES * max(self.machine.gpu_bytes, SMALLEST)
        processes = 1 if one_process else candidate.data * candidate.spatial
        refuse = partial(Estimate, candidate=candidate)
        if math.prod(work.shape) > limit * candidate.num_gpus:  # torch cannot count the bytes of the largest batches
            refused = (
                f"a batch of {' x '.join(map(str, work.shape))} is larger than {MOST_TIMES} times the memory of all "
                "GPUs; take smaller patches or volumes, or a smaller batch"
            )
            return refuse(refused=refused, more_than=limit)
        try:
            with _quietly():
                traces = trace_candidate(
                    work,
                    candidate,
                    replace(gpu, memory=self.capacity),  # a pipeline chooses its number of stages by this
                    time_kernel=gpu.seconds if candidate.pipeline > 1 else None,
                    one_process=one_process,
                    limit=limit if to_end else self.capacity - estimate_least_cuda_overhead(processes),
                )
        except NotRecordedError:  # a training then continues without a recording
            return self.follow(replace(candidate, recorded=False), to_end=to_end)
        except OutOfMemoryError as fault:
            there = max(0, self.capacity)  # cached cases and prefetched batches may take everything
            short = f"needs more than the {there / GIB:.1f} GiB that there are"
            return refuse(refused=shorten(fault) if to_end else short, more_than=limit if to_end else there)
        except VolsegError as fault:
            return refuse(refused=shorten(fault))
        except Exception as fault:  # any error of the user's own network, which may read values
            return refuse(refused=f"{type(fault).__name__}: {shorten(fault)}")
        return judge(self._measure(traces, candidate, processes), self.capacity)

    def _measure(self, traces: tuple[StepTrace, ...], candidate: Candidate, processes: int) -> Estimate:
        """Return the memory and the time of traces."""
        is_so = {
            "recorded": candidate.recorded,
            "spatial": candidate.spatial > 1,
            "recomputed": candidate.checkpoint is not None,
        }
        margin = max([1.0, *(MARGINS[name] for name in MARGINS if is_so[name])])
        own = -(-self.work.batch_size // candidate.data)
        times = estimate_times(
            traces,
            self.machine.gpu,
            self.machine.links,
            recorded=candidate.recorded,
            stages=candidate.pipeline > 1,
            micro_batches=-(-own // (candidate.split_size or own)),
        )
        is_ahead = candidate.pipeline > 1 and times.seconds > times.host
        uses = [
            estimate_memory_use(trace, self.capacity, estimate_cuda_overhead(trace, processes), margin, is_ahead)
            for trace in traces
        ]
        return Estimate(
            candidate=candidate,
            memory=max(uses, key=lambda use: use.total),
            stages=tuple(uses) if candidate.pipeline > 1 else (),
            seconds=times.seconds,
            host_forward_seconds=times.host_forward,
        )

    def need(self, candidate: Candidate, sides: Sides) -> float | None:
        """Return the bytes of the fullest GPU on volumes of other sides; None if the candidate cannot run on them.

        They are infinite if the trace stopped early because the candidate does not fit.
        """
        assert self.resize is not None
        work, reserve = self.resize(sides)
        forecast = replace(self, work=work, reserve=reserve).follow(candidate, to_end=False)
        if forecast.more_than is not None:
            return math.inf
        return None if forecast.memory is None else forecast.needed + reserve


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence volseg's warnings while a step is traced."""
    ours = logging.getLogger("volseg")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)
