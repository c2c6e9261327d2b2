"""What the processes of a training tell each other of the cases that each has read, and what all know then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from volseg.data.cases import Case
from volseg.data.checks import Problem, Remark, refuse_held_out
from volseg.data.readers import list_files
from volseg.parallel.processes.progress_sync import describe_error

__all__ = [
    "ReadCase",
    "ToldCase",
    "add_held_out",
    "describe_found",
    "describe_read",
    "list_digests",
    "recall_remark",
    "take_told",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCase:
    """What became of one case where it was read."""

    problems: Sequence[Problem] = ()
    remarks: Sequence[Remark] = ()
    digest: str | None = None
    fingerprint: str = ""
    prepared: Case | None = None
    stored: Mapping[str, Any] | None = None
    """Where the other processes of the machine find the case: ``places`` in shared memory, field by field, or a
    ``file`` of the cache."""
    fault: Exception | None = None
    """Why a case without problems could not be preprocessed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldCase:
    """What a process told of one case."""

    teller: int
    problems: Sequence[Problem]
    remarks: Sequence[Remark]
    digest: str | None
    fingerprint: str
    fault: Sequence[str] | None


def describe_found(attempt: ReadCase, case: Case) -> dict[str, Any]:
    """Return what the check found in a sound case; of a file its place, for it may lie elsewhere next time."""
    files = _list_all_files(case)
    remarks = [[files.index(one.file) if one.file in files else None, one.message, one.kind] for one in attempt.remarks]
    return {"remarks": remarks, "digest": attempt.digest, "fingerprint": attempt.fingerprint}


def recall_remark(told: Sequence[Any], case: Case) -> Remark:
    """Return a remark that `describe_found` put down, about the files where the case lies now."""
    place, message, kind = told
    return Remark(case["case"], None if place is None else _list_all_files(case)[place], message, kind)


def _list_all_files(case: Case) -> list[Path]:
    return [file for field in ("image", "label") if field in case for file in list_files(case[field])]


def describe_read(attempt: ReadCase) -> list[Any]:
    """Return what became of a case as JSON can say it."""
    problems = [problem.as_list() for problem in attempt.problems]
    remarks = [remark.as_list() for remark in attempt.remarks]
    found = [problems, remarks, attempt.digest, attempt.fingerprint]
    return [*found, attempt.fault and describe_error(attempt.fault), attempt.stored]


def take_told(told: Sequence[Mapping[str, Any]]) -> dict[int, ToldCase]:
    """Return what is known of every case; where several machines read it, what the first told that found a fault."""
    cases: dict[int, ToldCase] = {}
    for teller, message in enumerate(told):
        for index, problems, remarks, digest, fingerprint, fault, _ in message["cases"]:
            known = cases.get(index)
            if known is None or not (known.problems or known.fault):
                cases[index] = ToldCase(
                    teller=teller,
                    problems=[Problem.from_list(problem) for problem in problems],
                    remarks=[Remark.from_list(remark) for remark in remarks],
                    digest=digest,
                    fingerprint=fingerprint,
                    fault=fault,
                )
    return cases


def list_digests(cases: Mapping[int, ToldCase], sides: Sequence[tuple[Case, bool]]) -> list[tuple[Case, str]]:
    """Return the cases that can be used, with their paths, and the digest of each one's voxels."""
    return [(sides[i][0], told.digest) for i, told in sorted(cases.items()) if told.digest and not told.problems]


def add_held_out(cases: dict[int, ToldCase], sides: Sequence[tuple[Case, bool]]) -> None:
    """Add a problem to each training case whose image validates as well."""
    validation = {case["case"] for case, validates in sides if validates}
    learnt = refuse_held_out(list_digests(cases, sides), validation)
    for index, told in cases.items():
        name = sides[index][0]["case"]
        if name in learnt and not sides[index][1]:
            cases[index] = replace(told, problems=[*told.problems, *learnt[name]])
