"""What a training step needs and how to run it: estimated memory and time of each way to share it over GPUs.

The real step runs on fake tensors (`tracing`, `candidate_trace`) and leaves a ``StepTrace``. A model of torch's caching
allocator (`allocator`) says how much memory that takes; a roofline per class of kernels, calibrated by a table of
measured ones, says how long (`roofline`, `step_time`). `search` takes the fastest candidate that fits. ``volseg.plan``
is `plan` here.
"""

from volseg.estimate.candidate import Freedom
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.network_plan import describe_network, plan
from volseg.estimate.planning import StepPlan
from volseg.estimate.report import PlanReport
from volseg.estimate.work import Work

__all__ = ["Freedom", "Machine", "PlanReport", "Planned", "StepPlan", "Work", "describe_network", "plan"]
