"""Estimate the memory and the time of a training step, for each way to share it over GPUs, and choose the best.

The real step runs on fake tensors (`tracing`, `candidate_trace`) and yields a ``StepTrace``. A model of torch's caching
allocator (`allocator`) computes its memory; a roofline per class of kernels, calibrated by a table of measured kernels,
computes its time (`roofline`, `step_time`). `search` chooses the fastest candidate that fits. ``volseg.plan`` is `plan`
here.
"""

from volseg.estimate.candidate import Freedom, Work
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.network_plan import describe_network, plan
from volseg.estimate.planning import StepPlan
from volseg.estimate.report import PlanReport

__all__ = ["Freedom", "Machine", "PlanReport", "Planned", "StepPlan", "Work", "describe_network", "plan"]
