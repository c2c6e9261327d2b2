"""A step that runs once on GPUs that are not there."""

from collections.abc import Callable
from typing import Any

from volseg.device.fake_gpu import GpuLike
from volseg.estimate.fake_step.tracing import TracedStep, tracing
from volseg.estimate.trace import StepTrace


def follow(step: Callable[[TracedStep], Any], *, gpu: GpuLike, num_gpus: int = 1) -> tuple[StepTrace, ...]:
    """Return what each GPU is asked for."""
    with tracing(gpu, num_gpus) as followed:
        step(followed)
    return followed.traces()
