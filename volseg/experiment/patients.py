"""What a training reports about its patients: their number, and those that both train and validate."""

from collections.abc import Mapping
from dataclasses import dataclass

from volseg.data.cases import Task
from volseg.data.groups import find_cut_patients, find_groups, propose_groups
from volseg.data.splits import Split

__all__ = ["PatientWords", "describe_patients"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatientWords:
    """Report on the patients of a split; each should be on one side only."""

    summary: str = ""
    """Empty if each case counts as a patient of its own."""
    warning: str = ""
    """Empty if no patient is known to both train and validate."""


def describe_patients(task: Task, group: str | None, split: Split, *, is_given: bool) -> PatientWords:
    """Return what to report about the patients of a training.

    A split that cuts a patient is used nevertheless: published folds do so, and results on them are compared.

    Parameters
    ----------
    group : str or None
        As ``split.group``; with None, evident patients count.
    split : Split
        Of the training.
    is_given : bool
        Whether the split comes from a file; else it was computed.

    Raises
    ------
    ConfigError, DataError
        As `find_groups`.
    """
    groups: Mapping[str, str] | None = find_groups(task, group)
    source = f"split.group: {group}"
    if group is None and (proposed := propose_groups(task)) is not None and proposed.evident:
        groups, source = proposed.patients, f"evident groups of the data set (split.group: {proposed.group})"
    if groups is None:
        return PatientWords()
    names = [*split.training, *split.validation]
    counted = f"{len({groups[name] for name in names})} patients of {len(names)} cases, by {source}"
    if not split.validation:
        return PatientWords(summary=counted)
    if not (cut := find_cut_patients([split], groups)):
        return PatientWords(summary=f"{counted}; none trains and validates")
    if is_given:
        remedy = "the split is given and used unchanged; make another one if results need not be comparable"
    else:
        remedy = "set split.group so, or to none if each case is of a patient of its own"
    return PatientWords(
        summary=f"{counted}; {len(cut)} train and validate",
        warning=f"{len(cut)} patient(s) train and validate, of {counted}: {cut[0].training} trains and "
        f"{cut[0].validation} validates, so the Dice of the validation is too high; {remedy}",
    )
