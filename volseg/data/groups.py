"""Group cases by patient: by a column of the data set, by DICOM's ``PatientID``, or by the names of cases.

Two frames, visits or sides of one patient resemble each other more than two patients do. If one trains and the other
validates, the Dice is higher than for a new patient, and no other number shows it.

*Evident* groups of names follow from words: in ``patient001_frame01``, ``sub-07_ses-1``, ``case_0001_t0`` and
``P3_left``, a frame, a visit, a time or a side follows the patient. ``configure`` sets such groups. *Possible*
groups follow from numbers: ``MMS_003_01`` may be the first visit of patient 3 or the first patient of site 3. They are
only reported.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from volseg.config.nearest import did_you_mean
from volseg.config.sections import compile_group
from volseg.data.cases import Split, Task
from volseg.data.dicom.elements import TAGS
from volseg.data.dicom.labels import read_image_text
from volseg.data.readers import list_files, match_suffix
from volseg.errors import ConfigError, DataError
from volseg.formatting import list_some

MOST_IN_GROUP = 12
"""Most cases of a patient if a word distinguishes them; more are allowed if there are as many patients."""

MOST_COUNTED = 3
"""Most cases of a patient if that word may count patients of a site or a year too (`COUNTED`)."""

MOST_NUMBERED = 6
"""Most cases of a patient if only numbers distinguish them: ``patient_2_014`` may be of site 2."""

SEPARATOR = "[-_. ]"

DATE = r"(?:(?:19|20)\d\d[-_.]?[01]\d[-_.]?[0-3]\d|[0-3]\d[-_.][0-3]\d[-_.](?:19|20)\d\d)"

PEOPLE = "patient|participant|subject|subj|sub|pat|volunteer"

PATIENT = rf"(?:sub-(?!{DATE})[A-Za-z0-9]+|(?:{PEOPLE})[-_ ]?[A-Za-z]{{0,3}}(?!{DATE})\d+)"
"""BIDS' ``sub-`` with any label, or another word for a person with a number."""

COUNTED = "run|scan|exam|acq|study|series"

WORDS = rf"frame|session|ses|visit|timepoint|time|tp|follow-?up|fu|baseline|bl|phase|month|week|day|year|{COUNTED}"
"""Words for one of several recordings; the rest of the name describes the recording."""

MARKS = "|".join(
    [
        r"[tvmwdy]\d{1,4}|\d{1,3}[mwdy]",  # times
        "sax?|lax?|[234]ch|ax(?:ial)?|sag(?:ittal)?|cor(?:onal)?",  # views
        "ed|es|systole|diastole|(?:pre|post)(?:[-_]?(?:op|treatment|contrast))?",
        "arterial|portal|venous|delayed|native|insp(?:iration)?|exp(?:iration)?|inhale|exhale",
        "left|right|[lr]h?|od|os",
        r"(?:(?:cb)?ct|mri?|pe?t|t[12](?!\d)[a-z]*(?:[-_][a-z]+)?|flair|dwi|adc|swi|pd)\d{0,2}",  # modalities
        r"i\d{4,}",  # numbers of images
    ]
)
"""Marks of one of several recordings, at the end of a part of the name."""

ENDING = "|".join(
    [
        rf"{SEPARATOR}(?:{WORDS})(?![A-Za-z]).*",
        rf"{SEPARATOR}{DATE}(?:[-_.T ]?\d{{4,6}})?(?:-NA-.*)?",  # TCIA writes NA and a description
        rf"{SEPARATOR}{{1,2}}(?:{MARKS})(?![A-Za-z\d])",
        r"(?<=\d)[lr]",
    ]
)
"""The part of a name after the patient."""

BEGINNING = rf"(?:(?:{DATE}|(?:{WORDS})[-_ ]?\d*|{MARKS}){SEPARATOR})*"
"""The part of a name before the patient that describes the recording, and not a site."""

NUMBERED = rf"^(.*\d[A-Za-z]?)(?:{SEPARATOR}\d+|{SEPARATOR}?[a-dA-D])$"

PLACES = re.compile(
    r"(?:site|cent(?:er|re)|scanner|hospital|vendor|dataset|cohort|batch|task|fold|group|train|val|test|part|set)"
    r"[-_ ]?\w{0,3}",
    re.IGNORECASE,
)
"""Groups of cases other than patients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupProposal:
    """Proposed groups of cases by patient."""

    group: str
    """Value for ``split.group``."""
    reason: str
    evident: bool
    """Whether the groups are used by default; else they are a guess, for the user to judge."""
    patients: Mapping[str, str]
    """The patient of each case."""

    @property
    def num_patients(self) -> int:
        """The number of patients."""
        return len(set(self.patients.values()))


def propose_group(names: Iterable[str]) -> GroupProposal | None:
    r"""Return the pattern that finds patients in the names of cases; None if no two cases seem to be of one patient.

    Examples
    --------
    >>> propose_group(["patient001_frame01", "patient001_frame12", "patient002_frame01"]).group
    '^(patient[-_ ]?\\d+)'
    >>> propose_group(["hippocampus_001", "hippocampus_003"]) is None
    True
    """
    known = sorted(set(names))
    return _propose_called(known) or _propose_ended(known) or _propose_numbered(known)


def describe_groups(
    groups: Mapping[str, str], group: str, source: str, *, evident: bool = True
) -> GroupProposal | None:
    """Return a proposal of ``groups``, case to patient; None if each patient has one case, or one has all."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(groups):
        cases[groups[name]].append(name)
    if not 1 < len(cases) < len(groups):
        return None
    first, second, *_ = next(same for same in cases.values() if len(same) > 1)
    are = "are" if evident else "may be"
    reason = (
        f"by {source}, {len(groups)} cases {are} of {len(cases)} patients: {first} and {second} {are} of the "
        "same one, and a patient must not both train and validate"
    )
    return GroupProposal(group=group, reason=reason, evident=evident, patients=groups)


def _propose(pattern: str, names: Sequence[str], most: float, *, evident: bool = True) -> GroupProposal | None:
    """Return the groups of a pattern; None if one has more than ``most`` cases, or is a place or a year."""
    groups = {name: match[1] for name in names if (match := re.search(pattern, name))}
    sizes = Counter(groups.values())
    several = [patient for patient, size in sizes.items() if size > 1]
    is_place = any(PLACES.fullmatch(patient) or re.fullmatch(DATE, patient) for patient in several)
    are_years = all(re.search(r"(?<!\d)(?:199|20[0-3])\d$", patient) for patient in several)
    if len(groups) < len(names) or is_place or are_years or max(sizes.values()) > most:
        return None
    return describe_groups(groups, pattern, "their names", evident=evident)


def _propose_called(names: Sequence[str]) -> GroupProposal | None:
    """Return the groups of names with a word for a person."""
    found = [match for name in names if (match := re.search(rf"(?<![A-Za-z]){PATIENT}", name, re.IGNORECASE))]
    found = [match for match in found if len(match[0]) < len(match.string)]
    if not found:
        return None
    words = {re.match(rf"sub-|{PEOPLE}", match[0], re.IGNORECASE)[0] for match in found}  # type: ignore[index]
    called = "|".join(_spell_patient(word, [match[0] for match in found]) for word in sorted(words))
    called = f"(?:{called})" if "|" in called else called
    matches = [match for name in names if (match := re.search(called, name))]
    starts = {match.string[: match.start()] for match in matches}
    # The part before it may be a site, or a recording: ses-1_sub-07.
    has_site = not all(re.fullmatch(BEGINNING, start, re.IGNORECASE) for start in starts)
    pattern = f"^({called})" if starts == {""} else f"^(.*?{called})" if has_site else f"({called})"
    ends = [match.string[match.end() :] for match in matches]
    is_known = all(not end or re.match(rf"(?:{ENDING}|_[A-Za-z]+-)", end, re.IGNORECASE) for end in ends)
    most = float("inf") if is_known else min(MOST_NUMBERED, len({match[0] for match in matches}))
    if len(matches) < len(names):  # a case without such a word is its own patient
        pattern = f"^(.*?{called}|.+)"
    return _propose(pattern, names, most)


def _spell_patient(word: str, found: Sequence[str]) -> str:
    """Return the pattern of a patient with one word, as short as possible."""
    if word.casefold() == "sub-":
        return f"{word}[A-Za-z0-9]+"
    has_letters = any(re.fullmatch(rf"{word}[-_ ]?[A-Za-z]+\d+", each) for each in found)
    return rf"{word}[-_ ]?{'[A-Za-z]{0,3}' if has_letters else ''}\d+"


def _propose_ended(names: Sequence[str]) -> GroupProposal | None:
    """Return the groups of names that end in a visit, a date, a side, a phase."""
    split = {name: _split_endings(name) for name in names}
    sizes = Counter(stem for stem, _ in split.values())
    several = {stem for stem, size in sizes.items() if size > 1}
    if not several or not all(re.search(r"\d", stem) for stem in several):
        return None
    endings = {ending for stem, found in split.values() if stem in several for ending in found}
    counted = re.compile(rf"{SEPARATOR}+(?:{COUNTED}|[a-z]\d)", re.IGNORECASE)
    most = MOST_COUNTED if any(map(counted.match, endings)) else MOST_IN_GROUP
    spelt = "|".join(sorted(set(map(_spell_ending, endings))))
    return _propose(f"^(.+?)(?:{spelt})*$", names, max(most, len(sizes)))


def _split_endings(name: str) -> tuple[str, list[str]]:
    """Return a name without its endings, and the endings."""
    found = []
    while match := re.fullmatch(f"(.+?)({ENDING})", name, re.IGNORECASE):
        name = match[1]
        found.append(match[2])
    return name, found


def _spell_ending(ending: str) -> str:
    """Return a pattern that matches an ending with other numbers too."""
    opened = re.match(rf"{SEPARATOR}(?:(?:{WORDS})|{DATE}.*?-NA-)", ending, re.IGNORECASE)
    escaped = re.escape(opened[0] if opened else ending).replace(r"\-", "-")
    # Eight digits are a date: the pattern must not match a patient's number before it.
    spelt = re.sub(r"\d+", lambda found: r"\d{8}" if len(found[0]) == 8 else r"\d+", escaped)
    behind = "" if re.match(SEPARATOR, ending) else r"(?<=\d)"
    return f"{behind}{spelt}{'.*' if opened else ''}"


def _propose_numbered(names: Sequence[str]) -> GroupProposal | None:
    """Return the groups of names with two numbers; the second may count a patient's cases."""
    stems = [match[1] for name in names if (match := re.search(NUMBERED, name))]
    num_patients = len(set(stems))
    numbers = {name[len(stem) :] for name, stem in zip(names, stems, strict=False)}
    # Visits repeat few numbers. Running numbers count only if most patients have one case.
    if len(stems) < len(names) or (len(numbers) >= num_patients and 2 * num_patients <= len(names)):
        return None
    return _propose(NUMBERED, names, min(MOST_NUMBERED, num_patients), evident=False)


PATIENT_ID = "PatientID"
"""Value of ``split.group`` that reads the patient from the images' DICOM headers."""

PATIENT_COLUMN = re.compile(r"(?:patients?|subject|subj|participant)(?:id|no|number|key)?|pid|mrn")
"""Names of columns that contain patients, as `_simplify` returns them."""

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
    """Return the patient of each training case; None if each case counts as its own patient.

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
            f"split.group is {group!r}, which is not a column of {task.name}; {did_you_mean(group, [*known, 'none'])}. "
            r"A pattern of names needs one group in parentheses, such as ^(patient\d+)"
        )
    pattern = compile_group(group)
    found = {name: match[1] or "" for name in _list_names(task) if (match := pattern.search(name))}
    remedy = "change it so that it matches the name of every case"
    return _require_all(task, found, f"the pattern {group!r} finds no patient in", remedy)


def propose_groups(task: Task) -> GroupProposal | None:
    """Return the proposed groups of the training cases by patient, or None if nothing suggests groups.

    A column of patients takes precedence over DICOM's ``PatientID``, and both over names: if they give each case a
    different patient, names are ignored.
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
            f"split.group needs the patient of each case, but {what} {len(without)} of {len(names)} cases: {shown}; "
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
    """Return DICOM's ``PatientID`` of each case, from its first file; an empty string if it has none."""
    return {case["case"]: read_image_text(list_files(case["image"])[0], TAGS["PatientID"]) for case in task.training}
