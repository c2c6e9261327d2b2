"""The same voxels under several names."""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

from volseg.data.cases import Case
from volseg.data.checks.kinds import Finding
from volseg.data.names import list_some
from volseg.data.readers import name_files
from volseg.data.splits import Split

__all__ = ["find_leaks", "find_same_images", "refuse_held_out", "remark_on_same_images"]


def find_same_images(digests: Iterable[tuple[Case, str]]) -> list[list[Case]]:
    """Return the groups of cases, of pairs of a case and its digest, that hold the same voxels."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case, digest in digests:
        cases[digest].append(case)
    return [same for same in cases.values() if len(same) > 1]


def remark_on_same_images(digests: Iterable[tuple[Case, str]]) -> list[Finding]:
    """Remark on images that stand under several names."""
    remarks = []
    for first, *rest in find_same_images(digests):
        crosses = any(("label" in first) != ("label" in case) for case in rest)
        also = f"also {list_some([case['case'] for case in rest])}"
        kind = "trains-and-tests" if crosses else "same-image"
        remarks.append(Finding.of(first, kind, also))
    return remarks


def refuse_held_out(
    digests: Iterable[tuple[Case, str]], validation: Container[str], where: str = ""
) -> dict[str, list[Finding]]:
    """Return problems of training cases whose image validates as well, so that it would be known by heart.

    Parameters
    ----------
    digests
        Each case with its digest, on both sides of the split.
    validation
        Ids of the cases that validate.
    where
        Which split that is, for the message.
    """
    refused: dict[str, list[Finding]] = {}
    for same in find_same_images(digests):
        held_out = [case["case"] for case in same if case["case"] in validation]
        for case in same if held_out else ():
            if case["case"] not in validation:
                message = (
                    f"{name_files(case['image'])} holds the same voxels as the validation case {held_out[0]}{where}; "
                    "keep one of them, or both on one side of the split"
                )
                refused[case["case"]] = [Finding.of(case, "leak", message)]
    return refused


def find_leaks(digests: Sequence[tuple[Case, str]], splits: Sequence[Split]) -> list[Finding]:
    """Return a problem of each case that trains in some fold in which its image validates."""
    found: dict[str, Finding] = {}
    for number, split in enumerate(splits):
        leaks = refuse_held_out(digests, set(split.validation), f" of fold {number}")
        for name, [leak] in leaks.items():
            found.setdefault(name, leak)
    return list(found.values())
