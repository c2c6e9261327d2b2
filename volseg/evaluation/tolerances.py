"""Within how many mm two surfaces count as one: the tolerance of a task's NSD, where its manifest has one.

No task without a manifest gets one: how exactly a structure can be outlined is known to those who outlined it, and an
NSD at another tolerance is another number.
"""

from volseg.data.catalogue import list_public_tasks

__all__ = ["find_tolerance"]


def find_tolerance(task_name: str) -> float | None:
    """Return the tolerance in mm of a public task's NSD, by the task's name; None for another task.

    >>> find_tolerance("Task04_Hippocampus"), find_tolerance("mine")
    (1.0, None)
    """
    known = {task.name: task.manifest for task in list_public_tasks()}
    return float(known[task_name]["nsd_tolerance"]["mm"]) if task_name in known else None
