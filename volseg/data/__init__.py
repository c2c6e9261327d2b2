"""Cases, the readers that fill them, and the checks before a training starts."""

from volseg.data.cases import Case, Split, Task, folds, read_splits, write_splits
from volseg.data.checks.kinds import Finding, Problem, Remark
from volseg.data.checks.reading import check_case, check_cases, require_sound, summarise_remarks
from volseg.data.checks.repair import repair_task
from volseg.data.checks.task import TaskCheck, check_task
from volseg.data.layouts import load_task
from volseg.data.readers import Read, read_volume
from volseg.data.synthetic import make_task
from volseg.data.volume import as_volume

__all__ = [
    "Case",
    "Finding",
    "Problem",
    "Read",
    "Remark",
    "Split",
    "Task",
    "TaskCheck",
    "as_volume",
    "check_case",
    "check_cases",
    "check_task",
    "folds",
    "load_task",
    "make_task",
    "read_splits",
    "read_volume",
    "repair_task",
    "require_sound",
    "summarise_remarks",
    "write_splits",
]
