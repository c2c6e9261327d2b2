"""Trace a step once on fake GPUs, and describe the trace."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from volseg.device.fake_gpu import GpuLike
from volseg.estimate.fake_step.tracing import TracedStep, tracing
from volseg.estimate.trace import Allocate, Event, Free, KernelRun, StepTrace

Kind = TypeVar("Kind", bound=Event)


def follow(step: Callable[[TracedStep], Any], *, gpu: GpuLike, num_gpus: int = 1) -> tuple[StepTrace, ...]:
    """Return what each GPU is asked for."""
    with tracing(gpu, num_gpus) as followed:
        step(followed)
    return followed.traces()


def pick(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Return the events of a kind."""
    return [event for event in events if isinstance(event, kind)]


def count_kernels(events: Iterable[Event]) -> Counter[str]:
    """Return how often each kernel runs, by name."""
    return Counter(run.name for run in pick(events, KernelRun))


def count_held(events: Iterable[Event]) -> int:
    """Return the bytes of the blocks that are taken and not given back."""
    events = list(events)
    freed = {event.block for event in pick(events, Free)}
    return sum(event.size for event in pick(events, Allocate) if event.block not in freed)
