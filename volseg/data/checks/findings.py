"""Check many cases: all faults at once, in sentences and as a table."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from volseg.data.cases import Case, Task
from volseg.data.checks.kinds import KINDS, Finding
from volseg.data.checks.reading import CheckedCase, read_case
from volseg.data.readers import name_files
from volseg.data.splits import Split
from volseg.data.threads import map_in_threads
from volseg.errors import DataError
from volseg.formatting import list_some

__all__ = [
    "Findings",
    "check_cases",
    "group_equal_images",
    "inspect_cases",
    "refuse_held_out",
    "remark_on_same_images",
    "report_leaks",
    "require_sound",
    "summarise_remarks",
]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings in many cases."""

    problems: list[Finding]
    remarks: list[Finding]


def check_cases(
    cases: Sequence[Case], task: Task, *, workers: int | None = None, progress: Callable[[], object] | None = None
) -> list[Finding]:
    """Check all cases; an empty list means that all are usable.

    Parameters
    ----------
    cases, task
        As for `check_case`.
    workers
        Threads; see `map_in_threads`.
    progress
        Called after each case, for instance ``bar.update``.
    """
    return inspect_cases(cases, task, workers=workers, progress=progress).problems


def inspect_cases(
    cases: Sequence[Case], task: Task, *, workers: int | None = None, progress: Callable[[], object] | None = None
) -> Findings:
    """Check all cases; return the problems that exclude cases, and the remarks.

    The parameters are those of `check_cases`. `check_task` finds the faults that only the whole data set shows.
    """
    problems: list[Finding] = []
    remarks: list[Finding] = []
    digests: list[tuple[Case, str]] = []

    def without_volumes(case: Case) -> CheckedCase:
        checked = read_case(case, task)
        return CheckedCase(case=case, problems=checked.problems, remarks=checked.remarks, digest=checked.digest)

    for checked in map_in_threads(without_volumes, cases, workers):
        problems.extend(checked.problems)
        remarks.extend(checked.remarks)
        if checked.digest is not None:
            digests.append((checked.case, checked.digest))
        if progress is not None:
            progress()
    return Findings(problems=problems, remarks=[*remarks, *remark_on_same_images(digests)])


def summarise_remarks(remarks: Sequence[Finding], most: int = 3) -> list[str]:
    """Return a line per kind: number of cases, description, remedy, and the first names."""
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for remark in remarks:
        by_kind[remark.kind].append(remark)
    return [summarise_kind(kind, same, most) for kind, same in by_kind.items()]


def summarise_kind(kind: str, same: Sequence[Finding], most: int = 3) -> str:
    """Return the line for the findings of one kind."""
    says = f"{KINDS[kind].says}; {KINDS[kind].remedy}"
    cases = {remark.case for remark in same if remark.case}
    who = f"{len(cases)} case(s)" if cases else "data set"
    shown = [f"{one.case} ({one.message})" if one.case and one.message else one.case or one.message for one in same]
    return f"{who}: {says}: {list_some(shown, most)}"


def require_sound(
    problems: Sequence[Finding], remedy: str = "fix them, or set data.skip_bad to leave them out of training"
) -> None:
    """Raise one error that names every bad case, and the remedy.

    Raises
    ------
    DataError
        If there is a problem; one line each.
    """
    if problems:
        cases = len({problem.case for problem in problems})
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DataError(f"{cases} case(s) cannot be used:\n{lines}\n{remedy}")


def group_equal_images(digests: Iterable[tuple[Case, str]]) -> list[list[Case]]:
    """Return the groups of cases with the same voxels, from pairs of a case and its digest."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case, digest in digests:
        cases[digest].append(case)
    return [same for same in cases.values() if len(same) > 1]


def remark_on_same_images(digests: Iterable[tuple[Case, str]]) -> list[Finding]:
    """Remark on images that exist under several names."""
    remarks = []
    for first, *rest in group_equal_images(digests):
        crosses = any(("label" in first) != ("label" in case) for case in rest)
        also = f"also {list_some([case['case'] for case in rest])}"
        kind = "trains-and-tests" if crosses else "same-image"
        remarks.append(Finding.of(first, kind, also))
    return remarks


def refuse_held_out(
    digests: Iterable[tuple[Case, str]], validation: Container[str], where: str = ""
) -> dict[str, list[Finding]]:
    """Return problems of training cases whose image also validates: the network would have memorised it.

    Parameters
    ----------
    digests
        Pairs of a case and its digest, on both sides of the split.
    validation
        Ids of the validation cases.
    where
        Name of the split, for the message.
    """
    refused: dict[str, list[Finding]] = {}
    for same in group_equal_images(digests):
        held_out = [case["case"] for case in same if case["case"] in validation]
        for case in same if held_out else ():
            if case["case"] not in validation:
                message = (
                    f"{name_files(case['image'])} holds the same voxels as the validation case {held_out[0]}{where}; "
                    "keep one of them, or both on one side of the split"
                )
                refused[case["case"]] = [Finding.of(case, "leak", message)]
    return refused


def report_leaks(digests: Sequence[tuple[Case, str]], splits: Sequence[Split]) -> list[Finding]:
    """Return a problem of each case that trains in a fold in which its image validates."""
    found: dict[str, Finding] = {}
    for number, split in enumerate(splits):
        leaks = refuse_held_out(digests, set(split.validation), f" of fold {number}")
        for name, [leak] in leaks.items():
            found.setdefault(name, leak)
    return list(found.values())
