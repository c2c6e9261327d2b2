"""Find the faults that make a case unusable, each in one sentence, and all bad cases at once.

A header can be right while the voxels are not, so files are read fully. A training prepares the volumes that the check
has read (`volseg.data.case_store.preparing`), so that no file is decompressed twice. ``volseg data check`` uses the
same rules, and also compares the cases with each other.
"""

from volseg.data.checks.kinds import KINDS, Finding
from volseg.data.checks.reading import (
    CheckedCase,
    check_case,
    check_cases,
    digest_voxels,
    inspect_cases,
    read_case,
    refuse_held_out,
    remark_on_same_images,
    require_sound,
    summarise_remarks,
)
from volseg.data.checks.repair import repair_task
from volseg.data.checks.task import TaskCheck, check_task

Problem = Finding
"""A finding that makes a case bad."""

Remark = Finding
"""A finding to look at."""

__all__ = [
    "KINDS",
    "CheckedCase",
    "Finding",
    "Problem",
    "Remark",
    "TaskCheck",
    "check_case",
    "check_cases",
    "check_task",
    "digest_voxels",
    "inspect_cases",
    "read_case",
    "refuse_held_out",
    "remark_on_same_images",
    "repair_task",
    "require_sound",
    "summarise_remarks",
]
