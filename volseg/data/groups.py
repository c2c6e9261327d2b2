"""Which cases are of one patient: by a column of the data set, by DICOM's ``PatientID``, or by their names.

Two frames, visits or sides of one patient resemble each other more than two patients do. One that trains while the
other validates gives a Dice that no new patient will have, and no other number of the training shows it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from volseg.config.data import compile_group
from volseg.config.nearest import did_you_mean
from volseg.data.cases import Task
from volseg.data.dicom_elements import read_elements
from volseg.data.names import list_some
from volseg.data.proposed_groups import GroupProposal, describe_groups, propose_group
from volseg.data.readers import find_suffix, list_files
from volseg.data.splits import Split
from volseg.errors import ConfigError, DataError, ReaderError

__all__ = ["PATIENT_ID", "CutPatient", "find_cut_patients", "find_groups", "propose_groups"]

PATIENT_ID = "PatientID"
"""Value of ``split.group`` that takes the patient from the images' DICOM headers."""

PATIENT_TAG = (0x0010, 0x0020)

PATIENT_COLUMNS = frozenset(
    {"patient", "patients", "patientid", "patientno", "patientnumber", "patientkey", "pid", "mrn", "subj", "subjid"}
    | {"subject", "subjectid", "subjectno", "subjectnumber", "participant", "participantid"}
)
"""Names of columns that hold patients, in small letters, without what is neither letter nor digit."""

NOBODY = frozenset({"anonymous", "anonymized", "anonymised", "anon", "unknown", "none", "na", "nan", "null"})
"""What stands in a patient's place when it was removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPatient:
    """A patient of whom one case trains and another one validates in the same split."""

    patient: str
    training: str
    """Id of the first such case."""
    validation: str
    fold: int


def find_groups(task: Task, group: str | None) -> dict[str, str] | None:
    """Return the patient of each training case; None where each case counts as a patient of its own.

    Parameters
    ----------
    group : str, optional
        As ``split.group``: the name of a column, ``PatientID`` of DICOM images, a regular expression with one capture
        group that is searched in the names of cases, or ``none``.

    Raises
    ------
    ConfigError
        There is no such column, or the expression is none, or has another number of groups in parentheses.
    DataError
        A case has no patient by it.
    """
    if group is None or group == "none":
        return None
    columns = {name.casefold(): name for name in task.columns}
    if (name := columns.get(group.casefold())) is not None:
        return _require_all(task, task.columns[name], f"the column {name!r} is empty for", "fill it in")
    if group.casefold() == PATIENT_ID.casefold():
        remedy = "set split.group to a pattern of names, or list the patients in a table (CSV)"
        return _require_all(task, _read_patient_ids(task), f"no DICOM {PATIENT_ID} is known of", remedy)
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
    """Return how the training cases seem to be grouped by patient; None where nothing suggests groups.

    A column of patients is taken before DICOM's ``PatientID``, and both before names: where they say that each case is
    of another patient, names are not asked.
    """
    names = _list_names(task)
    columns = [name for name in task.columns if re.sub(r"[\W_]", "", name.casefold()) in PATIENT_COLUMNS]
    for name in columns:
        if (known := _require_known(task.columns[name], names)) is not None:
            return describe_groups(known, name, f"the column {name!r}")
    if _is_dicom(task) and (known := _require_known(_read_patient_ids(task), names)) is not None:
        return describe_groups(known, PATIENT_ID, f"{PATIENT_ID} of their DICOM headers")
    return propose_group(names)


def find_cut_patients(splits: Iterable[Split], groups: Mapping[str, str]) -> list[CutPatient]:
    """Return each patient who trains and validates in one of the splits, once, in the order of their keys."""
    cut: dict[str, CutPatient] = {}
    for number, split in enumerate(splits):
        # Of the cases of a patient the first.
        trains, validates = (
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


def _require_known(known: Mapping[str, str], names: Iterable[str]) -> dict[str, str] | None:
    """Return the patient of each case; None where some have none, or one who was removed."""
    found = {name: known.get(name, "") for name in names}
    letters = (re.sub(r"[\W_]", "", patient.casefold()) for patient in found.values())
    return None if any(not each or each in NOBODY for each in letters) else found


def _is_dicom(task: Task) -> bool:
    """Say whether the images of a task are DICOM files or folders of them, by the first case."""
    first = list_files(task.training[0]["image"])[0]
    return first.is_dir() or (find_suffix(first) or "").lower() in (".dcm", ".dicom")


def _read_patient_ids(task: Task) -> dict[str, str]:
    """Return DICOM's ``PatientID`` of each case that has one, from its first file."""
    found: dict[str, str] = defaultdict(str)
    for case in task.training:
        found[case["case"]] = _read_patient_id(list_files(case["image"])[0])
    return found


def _read_patient_id(path: Path) -> str:
    try:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if (elements := read_elements(file, [PATIENT_TAG])) is not None:
                return elements.get(PATIENT_TAG, b"").decode("latin-1").strip("\0 ")
    except (OSError, ReaderError):  # what is wrong with the file is said by who reads the image
        return ""
    return ""
