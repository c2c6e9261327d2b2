"""Cases, the readers that fill them, and the checks before a training starts."""

from volseg.data.cases import Case, Task
from volseg.data.checks import Problem, check_case, check_cases, require_sound
from volseg.data.msd import load_task
from volseg.data.readers import Read, read_volume
from volseg.data.splits import Split, folds, read_splits, write_splits
from volseg.data.synthetic import make_task

__all__ = [
    "Case",
    "Problem",
    "Read",
    "Split",
    "Task",
    "check_case",
    "check_cases",
    "folds",
    "load_task",
    "make_task",
    "read_splits",
    "read_volume",
    "require_sound",
    "write_splits",
]
