"""Check that no patient trains and validates, and report names that suggest several cases of one patient."""

from collections.abc import Mapping, Sequence

from volseg.data.cases import Task
from volseg.data.checks.kinds import Finding
from volseg.data.groups import find_cut_patients, find_groups, propose_groups
from volseg.data.readers import list_files
from volseg.data.splits import Split

__all__ = ["check_patients"]


def check_patients(
    task: Task, group: str | None, splits: Sequence[Split]
) -> tuple[Mapping[str, str] | None, list[Finding]]:
    """Return the patient of each case, None if each is of its own, and findings.

    Parameters
    ----------
    group : str or None
        As ``split.group``; with None, the data set's own hints are taken, and reported.
    splits : sequence of Split
        Given splits; empty if folds will be computed.

    Raises
    ------
    ConfigError, DataError
        As `find_groups`.
    """
    groups: Mapping[str, str] | None = find_groups(task, group)
    if group is None and (proposed := propose_groups(task)) is not None:
        groups = proposed.patients if proposed.evident else None
        if groups is None or not splits:
            kind = "patients" if proposed.evident else "patients-possible"
            return groups, [Finding("", None, f"{proposed.reason} (split.group: {proposed.group})", kind)]
    files = {case["case"]: list_files(case["image"])[0] for case in task.training}
    return groups, [
        Finding(
            cut.training,
            files[cut.training],
            f"is of patient {cut.patient}, and so is {cut.validation}, which validates in fold {cut.fold}",
            "patient-cut",
        )
        for cut in find_cut_patients(splits, groups or {})
    ]
