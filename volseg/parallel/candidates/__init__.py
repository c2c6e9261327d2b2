"""Ways to run a training step over devices: which there are, what each needs, and which to take.

`listing` says which candidates there are, `running` lets each be followed without a GPU by the strategy that would run
it, and `choosing` takes the fastest one that fits. ``volseg.plan`` is `plan` here.
"""

from volseg.parallel.candidates.first_batch import choose_for_first_batch, describe_network
from volseg.parallel.candidates.forecasting import Machine, Planned
from volseg.parallel.candidates.listing import Freedom
from volseg.parallel.candidates.network_plan import forecast, plan
from volseg.parallel.candidates.planning import StepPlan
from volseg.parallel.candidates.report import PlanReport
from volseg.parallel.candidates.work import Work

__all__ = [
    "Freedom",
    "Machine",
    "PlanReport",
    "Planned",
    "StepPlan",
    "Work",
    "choose_for_first_batch",
    "describe_network",
    "forecast",
    "plan",
]
