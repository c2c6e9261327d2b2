"""Names of cases that say which of them are of one patient. Pure.

Two kinds of rules. *Evident* ones know words: ``patient001_frame01``, ``sub-07_ses-1``, ``case_0001_t0``, a date, a
side, a phase of the heart behind what identifies the patient. ``configure`` takes them. *Possible* ones know numbers:
``MMS_003_01`` may be the first visit of patient 3 or the first patient of site 3. They are said and not taken.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

__all__ = ["GroupProposal", "describe_groups", "propose_group"]

MOST_IN_GROUP = 12
"""Cases of one patient, up to which a word is believed whatever their number; beyond, there are more patients."""

MOST_NUMBERED = 6
"""The same where numbers only suggest it, also behind the word for a patient: ``patient_2_014`` may be of site 2."""

MOST_ENDINGS = 6
"""Of one name: two endings may read the same characters in two ways, so the tries double with each."""

SEPARATOR = "[-_. ]"

DATE = r"(?:(?:19|20)\d\d[-_.]?(?:0[1-9]|1[0-2])[-_.]?(?:0[1-9]|[12]\d|3[01])|[0-3]\d[-_.][0-3]\d[-_.](?:19|20)\d\d)"

PEOPLE = "patient|participant|subject|subj|sub|pat|volunteer|proband|person|donor|animal|mouse"

PATIENT = rf"(?:sub-(?!{DATE})[A-Za-z0-9]+|(?:{PEOPLE})[-_ ]?[A-Za-z]{{0,3}}(?!{DATE})\d+)"
"""A patient who is called so: BIDS' ``sub-`` with any label, other words with a number."""

COUNTED = "run|scan|exam|acq|study|series"
"""Recordings that a site or a year has as well, more of them than there are sites."""

WORDS = (
    "frame|session|sess|ses|visit|timepoint|time|tp|followup|follow-up|fu|baseline|bl|phase|month|week|day|year"
    f"|{COUNTED}"
)
"""For one of several recordings; whatever follows belongs to it."""

ENDING = "|".join(
    [
        rf"{SEPARATOR}(?:{WORDS})(?![A-Za-z]).*",
        rf"{SEPARATOR}{DATE}(?:[-_.T ]?\d{{4,6}})?(?:-NA-.*)?(?!\d)",
        *(
            rf"{SEPARATOR}{{1,2}}{words}(?![A-Za-z\d])"
            for words in (
                r"[tvmwdy]\d{1,4}",
                r"\d{1,3}[mwdy]",
                r"(?:sa|la|sax|lax|[234]ch|ax|axial|sag|sagittal|cor|coronal|tra|transversal)",
                r"(?:ed|es|systole|diastole|sys|dia)",
                r"(?:pre|post)(?:[-_]?(?:op|treatment|contrast))?",
                r"(?:arterial|portal|venous|delayed|native|art|ven|pv|insp|exp|inspiration|expiration|inhale|exhale)",
                r"(?:left|right|lh|rh|l|r|od|os)",
                r"(?:ct|cbct|mr|mri|pt|pet|t[12](?!\d)[a-z]*(?:[-_][a-z]+)?|flair|dwi|adc|swi|pd)\d{0,2}",
                r"i\d{4,}",
            )
        ),
        r"(?<=\d)(?:[lr]|(?:frame|ses|scan|visit)\d+)(?![A-Za-z\d])",
    ]
)
"""What stands behind a patient in the names of the patient's cases: a recording, a date, a time, a phase of the heart,
of a treatment or of a contrast agent, a side, a view, a modality, the number of an image; and what follows a digit
without a separator (``P01L``)."""

BEGINNING = rf"(?:(?:{DATE}|(?:{WORDS})[-_ ]?\d*|left|right|l|r|ed|es|pre|post){SEPARATOR})+"
"""The same before the word for a patient."""

ANY = "^(.+?)"
"""How a pattern of endings begins."""

NUMBERED = re.compile(rf"(.*\d[A-Za-z]?){SEPARATOR}(\d{{1,8}}|[a-dA-D])|(.*\d)([a-dA-D])")

PLACES = re.compile(
    r"(?:site|cent(?:er|re)|scanner|hospital|vendor|clinic|institution|dataset|data|cohort|batch|task|fold|group"
    r"|train|training|val|validation|test|part|set)[-_ ]?\w{0,3}",
    re.IGNORECASE,
)
"""What groups cases, and is no patient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupProposal:
    """How cases seem to be grouped by patient."""

    group: str
    """For ``split.group``."""
    reason: str
    evident: bool
    """Whether it is taken unless somebody says otherwise; else it is a guess that somebody has to judge."""
    num_patients: int
    num_cases: int


def propose_group(names: Iterable[str]) -> GroupProposal | None:
    r"""Return by which pattern names of cases seem to hold patients; None where nothing suggests several of one.

    Examples
    --------
    >>> propose_group(["patient001_frame01", "patient001_frame12", "patient002_frame01"]).group
    '^(patient[-_ ]?\\d+)'
    >>> propose_group(["hippocampus_001", "hippocampus_003"]) is None
    True
    """
    known = sorted(set(names))
    if any("\n" in name for name in known):  # where the dot of a pattern stops
        return None
    for evident, pattern in ((True, _find_called(known)), (True, _find_ended(known)), (False, _find_numbered(known))):
        if pattern is not None and (found := _describe_pattern(pattern, known, evident)) is not None:
            return _add_coarser(found, known)
    return None


def _add_coarser(found: GroupProposal, names: list[str]) -> GroupProposal:
    """Say where what ends before a modality or a side ends in a number too, which may count a patient's studies."""
    stems = sorted({match[1] for name in names if (match := re.search(found.group, name))})
    if not found.evident or not found.group.startswith(ANY) or (numbered := _find_numbered(stems)) is None:
        return found
    coarser = numbered.removesuffix("$") + found.group.removeprefix(ANY)
    if (more := _describe_pattern(coarser, names, evident=False)) is None:
        return found
    return replace(found, reason=f"{found.reason}. {more.reason[0].upper()}{more.reason[1:]} (split.group: {coarser})")


def describe_groups(
    groups: Mapping[str, str], group: str, source: str, *, evident: bool = True
) -> GroupProposal | None:
    """Return the proposal to take ``groups``, case to patient; None where each has one case, or one has all."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(groups):
        cases[groups[name]].append(name)
    if not 1 < len(cases) < len(groups):
        return None
    first = next(same for same in cases.values() if len(same) > 1)
    are = "are" if evident else "may be"
    reason = (
        f"by {source}, {len(groups)} cases {are} of {len(cases)} patients: {first[0]} and {first[1]} {are} of one, and "
        "a patient must not train and validate"
    )
    return GroupProposal(group=group, reason=reason, evident=evident, num_patients=len(cases), num_cases=len(groups))


def _describe_pattern(pattern: str, names: list[str], evident: bool) -> GroupProposal | None:
    compiled = re.compile(pattern)
    groups = {name: match[1] for name in names if (match := compiled.search(name))}
    return describe_groups(groups, pattern, "their names", evident=evident) if len(groups) == len(names) else None


def _find_called(names: list[str]) -> str | None:
    """Return a pattern of names that call a patient so."""
    found = [
        match
        for name in names
        if (match := re.search(rf"(?<![A-Za-z]){PATIENT}", name, re.IGNORECASE)) and len(match[0]) < len(name)
    ]
    if not found:
        return None
    words = {re.match(rf"sub-|{PEOPLE}", match[0], re.IGNORECASE)[0] for match in found}  # type: ignore[index]
    called = [_spell_patient(word, [match[0] for match in found]) for word in sorted(words)]
    either = called[0] if len(called) == 1 else f"(?:{'|'.join(called)})"
    starts = {name[: match.start()] for name in names if (match := re.search(either, name))}
    # What stands before may be a site, or a recording: ses-1_sub-07.
    is_recording = all(not start or re.fullmatch(BEGINNING, start, re.IGNORECASE) for start in starts)
    pattern = f"^({either})" if starts == {""} else f"({either})" if is_recording else f"^(.*?{either})"
    sizes = Counter(match[0] for name in names if (match := re.search(either, name)))
    ends = [name[match.end() :] for name in names if (match := re.search(either, name))]
    is_known = all(not end or re.match(rf"(?:{ENDING}|_[A-Za-z]+-)", end, re.IGNORECASE) for end in ends)
    if (not is_known and max(sizes.values()) > min(MOST_NUMBERED, len(sizes))) or _are_years(sizes):
        return None
    # A case that calls no patient is one of its own.
    return pattern if all(re.search(pattern, name) for name in names) else f"^(.*?{either}|.+)"


def _spell_patient(word: str, found: list[str]) -> str:
    """Return the pattern of a patient by one word, as short as it can be."""
    if word.casefold() == "sub-":
        return f"{word}[A-Za-z0-9]+"
    has_letters = any(re.fullmatch(rf"{word}[-_ ]?[A-Za-z]+\d+", each) for each in found)
    return rf"{word}[-_ ]?{'[A-Za-z]{0,3}' if has_letters else ''}\d+"


def _find_ended(names: list[str]) -> str | None:
    """Return a pattern of names that end in a visit, a date, a side, a phase."""
    endings = {name: _find_endings(name) for name in names}
    stems = {name: name[: len(name) - sum(map(len, ends))] for name, ends in endings.items()}
    sizes = Counter(stems.values())
    several = {stem for stem, count in sizes.items() if count > 1}
    is_identity = all(any(c.isdigit() for c in stem) and not _is_no_patient(stem) for stem in several)
    counted = re.compile(rf"{SEPARATOR}+(?:{COUNTED}|[a-z]\d)", re.IGNORECASE)
    is_counted = any(counted.match(end) for ends in endings.values() for end in ends)
    most = max(3 if is_counted else MOST_IN_GROUP, len(sizes))
    if not several or not is_identity or max(sizes.values()) > most or _are_years(several):
        return None
    spelt = sorted({_spell_ending(end) for name in names if stems[name] in several for end in endings[name]})
    return f"{ANY}(?:{'|'.join(spelt)})*$"


def _find_endings(name: str) -> list[str]:
    """Return the endings of a name, each with the separator before it, from the first to the last."""
    if (whole := re.fullmatch(rf"(.+?)(?:{ENDING}){{1,{MOST_ENDINGS}}}", name, re.IGNORECASE)) is None:
        return []
    # One after the other in the whole name: what stands before an ending counts for those that follow a digit.
    one, start, found = (
        re.compile(rf"({ENDING})(?:{ENDING}){{0,{MOST_ENDINGS}}}", re.IGNORECASE),
        len(whole[1]),
        list[str](),
    )
    while (match := one.fullmatch(name, start)) is not None:
        found.append(match[1])
        start = match.end(1)
    return found


def _spell_ending(ending: str) -> str:
    """Return a pattern of an ending that takes other numbers too."""
    if (when := re.match(rf"{SEPARATOR}(?:{WORDS})", ending, re.IGNORECASE)) is not None:
        return f"{re.escape(when[0])}.*"
    is_date = re.fullmatch(rf"{SEPARATOR}{DATE}.*", ending)
    ending, described, _ = ending.partition("-NA-")
    spelt = "".join(
        re.escape(part).replace(r"\-", "-") if not part.isdigit() else rf"\d{{{len(part)}}}" if is_date else r"\d+"
        for part in re.split(r"(\d+)", ending)
    )
    spelt += f"{described}.*" if described else ""
    return spelt if re.match(SEPARATOR, ending) else rf"(?<=\d){spelt}"


def _find_numbered(names: list[str]) -> str | None:
    """Return a pattern of names with two numbers, the second of which may count the cases of a patient."""
    parts = [match for name in names if (match := NUMBERED.fullmatch(name))]
    if len(parts) < len(names) or any(re.search(DATE, name) for name in names):
        return None
    stems, numbers = ([match[first] or match[first + 2] for match in parts] for first in (1, 2))
    sizes = Counter(stems)
    # Few numbers come again and again in visits; a running number is believed where most have one case.
    is_count = len(set(numbers)) < len(sizes) or 2 * len(sizes) > len(names)
    is_plausible = is_count and max(sizes.values()) <= min(MOST_NUMBERED, len(sizes))
    if not is_plausible or any(_is_no_patient(stem) for stem in sizes) or _are_years(sizes):
        return None
    return (
        rf"^(.*\d[A-Za-z]?){SEPARATOR}\d+$"
        if all(match[2] and match[2].isdigit() for match in parts)
        else (rf"^(.*\d){SEPARATOR}?[A-Za-z0-9]{{1,3}}$")
    )


def _are_years(stems: Iterable[str]) -> bool:
    """Say whether all stems end in a year, which numbers patients from one on: ``patient_2019_001``."""
    return all(re.search(r"(?<!\d)(?:199|20[0-3])\d$", stem) for stem in stems)


def _is_no_patient(stem: str) -> bool:
    return bool(PLACES.fullmatch(stem) or re.fullmatch(DATE, stem))
