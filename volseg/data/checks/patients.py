"""Patients who train and validate, and names that tell of several cases of one patient."""

from collections.abc import Sequence

from volseg.data.cases import Task
from volseg.data.checks.kinds import Finding
from volseg.data.groups import find_cut_patients, find_groups, propose_groups
from volseg.data.readers import list_files
from volseg.data.splits import Split

__all__ = ["check_patients"]


def check_patients(
    task: Task, group: str | None, splits: Sequence[Split]
) -> tuple[dict[str, str] | None, list[Finding]]:
    """Return the patient of each case, None where each is of one of its own, and what is to be looked at.

    Parameters
    ----------
    group : str or None
        As ``split.group``; with None, patients are looked for, and one who is found is remarked on.
    splits : sequence of Split
        That somebody wrote down; none where folds will be computed.

    Raises
    ------
    ConfigError, DataError
        As `find_groups`.
    """
    if group is not None:
        groups = find_groups(task, group)
        return groups, _find_cut(task, groups, splits)
    if (proposed := propose_groups(task)) is None:
        return None, []
    groups = find_groups(task, proposed.group)
    if not proposed.evident:
        return None, [Finding("", None, f"{proposed.reason} (split.group: {proposed.group})", "patients-possible")]
    if splits:
        return groups, _find_cut(task, groups, splits)
    return groups, [Finding("", None, f"{proposed.reason} (split.group: {proposed.group})", "patients")]


def _find_cut(task: Task, groups: dict[str, str] | None, splits: Sequence[Split]) -> list[Finding]:
    files = {case["case"]: list_files(case["image"])[0] for case in task.training}
    return [
        Finding(
            cut.training,
            files[cut.training],
            f"is of {cut.patient}, as {cut.validation}, which validates in fold {cut.fold}",
            "patient-cut",
        )
        for cut in find_cut_patients(splits, groups or {})
    ]
