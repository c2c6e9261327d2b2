"""Group cases by patient: by a column of the data set, by DICOM's ``PatientID``, or by the names of cases.

Two frames, visits or sides of one patient resemble each other more than two patients do. If one trains and the other
validates, the Dice is higher than that of any new patient, and no other number of the training shows it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from volseg.config.data import compile_group
from volseg.config.nearest import did_you_mean
from volseg.data.cases import Task
from volseg.data.dicom.labels import read_image_text
from volseg.data.proposed_groups import GroupProposal, describe_groups, propose_group
from volseg.data.readers import list_files, match_suffix
from volseg.data.splits import Split
from volseg.errors import ConfigError, DataError
from volseg.formatting import list_some

__all__ = ["PATIENT_ID", "CutPatient", "assign_patients", "list_split_patients", "propose_groups"]

PATIENT_ID = "PatientID"
"""Value of ``split.group`` that takes the patient from the images' DICOM headers."""

PATIENT_TAG = (0x0010, 0x0020)

PATIENT_COLUMN = re.compile(r"(?:patients?|subject|subj|participant)(?:id|no|number|key)?|pid|mrn")
"""Names of columns that hold patients, as `_simplify` returns them."""

NOBODY = re.compile("|anon(?:ymous|ymi[sz]ed)?|unknown|none|nan?|null")
"""Values that mean a removed patient, as `_simplify` returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPatient:
    """A patient with one case that trains and another that validates in the same split."""

    patient: str
    training: str
    """Id of the first such case."""
    validation: str
    fold: int


def assign_patients(task: Task, group: str | None) -> dict[str, str] | None:
    """Return the patient of each training case; None if each case counts as a patient of its own.

    Parameters
    ----------
    group : str, optional
        As ``split.group``: the name of a column, ``PatientID`` of DICOM images, a regular expression with one capture
        group that is searched in the names of cases, or ``none``.

    Raises
    ------
    ConfigError
        If there is no such column, or the regular expression is invalid or does not have one group in parentheses.
    DataError
        If a case has no patient.
    """
    if group is None or group == "none":
        return None
    columns = {name.casefold(): name for name in task.columns}
    if (name := columns.get(group.casefold())) is not None:
        return _require_all(task, task.columns[name], f"the column {name!r} is empty for", "fill it in")
    if group.casefold() == PATIENT_ID.casefold():
        remedy = "set split.group to a pattern of names, or list the patients in a table (CSV)"
        return _require_all(task, _read_patient_ids(task), f"no DICOM {PATIENT_ID} is known for", remedy)
    if "(" not in group:
        known = [*task.columns, *([PATIENT_ID] if _is_dicom(task) else [])]
        raise ConfigError(
            f"split.group is {group!r}, which is no column of {task.name}; {did_you_mean(group, [*known, 'none'])}. A "
            r"pattern of names has one group in parentheses, such as ^(patient\d+)"
        )
    pattern = compile_group(group)
    found = {name: match[1] or "" for name in _list_names(task) if (match := pattern.search(name))}
    remedy = "change it so that it matches the name of every case"
    return _require_all(task, found, f"the pattern {group!r} finds no patient in", remedy)


def propose_groups(task: Task) -> GroupProposal | None:
    """Return the proposed groups of the training cases by patient, or None if nothing suggests groups.

    A column of patients comes before DICOM's ``PatientID``, and both come before names: if they give each case a
    different patient, names do not count.
    """
    names = _list_names(task)
    for column, patients in task.columns.items():
        if PATIENT_COLUMN.fullmatch(_simplify(column)) and _knows_all(patients, names):
            return describe_groups({name: patients[name] for name in names}, column, f"the column {column!r}")
    if _is_dicom(task) and _knows_all(patients := _read_patient_ids(task), names):
        return describe_groups(patients, PATIENT_ID, f"{PATIENT_ID} of their DICOM headers")
    return propose_group(names)


def list_split_patients(splits: Iterable[Split], groups: Mapping[str, str]) -> list[CutPatient]:
    """Return each patient who trains and validates in one of the splits, once, sorted by patient."""
    cut: dict[str, CutPatient] = {}
    for number, split in enumerate(splits):
        trains, validates = (  # the first case of each patient
            {groups[name]: name for name in sorted(ids, reverse=True) if name in groups}
            for ids in (split.training, split.validation)
        )
        for patient in trains.keys() & validates.keys():
            found = CutPatient(patient=patient, training=trains[patient], validation=validates[patient], fold=number)
            cut.setdefault(patient, found)
    return [cut[patient] for patient in sorted(cut)]


def _list_names(task: Task) -> list[str]:
    return [case["case"] for case in task.training]


def _require_all(task: Task, known: Mapping[str, str], what: str, remedy: str) -> dict[str, str]:
    names = _list_names(task)
    if without := [name for name in names if not known.get(name)]:
        shown = list_some([repr(name) for name in without])
        raise DataError(
            f"split.group needs the patient of each case, and {what} {len(without)} of {len(names)} cases: {shown}; "
            f"{remedy}"
        )
    return {name: known[name] for name in names}


def _simplify(text: str) -> str:
    """Return the letters and digits of a text, in lower case."""
    return re.sub(r"[\W_]", "", text.casefold())


def _knows_all(patients: Mapping[str, str], names: Iterable[str]) -> bool:
    """Return whether each case has a patient who was not removed."""
    return not any(NOBODY.fullmatch(_simplify(patients.get(name, ""))) for name in names)


def _is_dicom(task: Task) -> bool:
    """Return whether the first case's image is a DICOM file or a folder of DICOM files."""
    first = list_files(task.training[0]["image"])[0]
    return first.is_dir() or (match_suffix(first) or "").lower() in (".dcm", ".dicom")


def _read_patient_ids(task: Task) -> dict[str, str]:
    """Return DICOM's ``PatientID`` of each case, from its first file; an empty text if it has none."""
    return {case["case"]: read_image_text(list_files(case["image"])[0], PATIENT_TAG) for case in task.training}
