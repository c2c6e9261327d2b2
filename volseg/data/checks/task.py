"""Check a whole data set: read each file once, in parallel, and report a verdict per case as a table and as JSON.

Only the facts of a case are kept. The size of the largest case and the free memory limit how many cases are read at
once: reading a CT of 512 x 512 x 700 voxels takes 4 GiB.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from volseg.data.cases import Case, Split, Task, folds
from volseg.data.checks.comparing import compare_cases, describe_data, report_copies
from volseg.data.checks.facts import ComparedCase, measure
from volseg.data.checks.kinds import Finding
from volseg.data.checks.placing import report_displaced_labels
from volseg.data.checks.reading import (
    CheckedCase,
    expect_bytes,
    group_equal_images,
    read_case,
    remark_on_same_images,
    report_leaks,
    summarise_kind,
)
from volseg.data.groups import assign_patients, list_split_patients, propose_groups
from volseg.data.readers import list_files
from volseg.data.threads import MOST_THREADS, map_in_threads
from volseg.files import replacing
from volseg.formatting import align_columns, list_some
from volseg.memory import available_bytes

Verdict = Literal["ok", "look", "bad"]

FOLDS = 5
"""Folds of a training with a default config."""

FIELDS = ("image", "label")
JSON_FORMAT = "volseg data check, 1"


@dataclass(frozen=True, kw_only=True)
class TaskCheck:
    """Findings and facts of a checked data set."""

    task: Task
    cases: tuple[Case, ...]
    findings: tuple[Finding, ...]
    facts: tuple[ComparedCase, ...]
    equal: tuple[tuple[str, ...], ...] = ()
    """Groups of ids of labelled cases with equal images and equal labels."""

    @property
    def problems(self) -> list[Finding]:
        """Findings that make cases unusable."""
        return [finding for finding in self.findings if finding.severity == "bad"]

    @property
    def remarks(self) -> list[Finding]:
        """Findings that may be intended, but should be checked."""
        return [finding for finding in self.findings if finding.severity == "look"]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Verdict of each case: bad if unusable, look if a finding may be intended, else ok."""
        found: dict[str, set[str]] = defaultdict(set)
        for finding in self.findings:
            found[finding.case].add(finding.severity)
        names = [case["case"] for case in self.cases]
        return {name: "bad" if "bad" in found[name] else "look" if found[name] else "ok" for name in names}

    def count(self) -> dict[Verdict, int]:
        """Return the number of cases with each verdict."""
        counts = Counter(self.verdicts.values())
        return {"ok": counts["ok"], "look": counts["look"], "bad": counts["bad"]}

    def lines(self) -> list[str]:
        """Return the table: a row per message of bad findings, a row per kind of remarks, and counts."""
        rows = [*_list_problems(self.problems)]
        by_kind: dict[str, list[Finding]] = defaultdict(list)
        for remark in self.remarks:
            by_kind[remark.kind].append(remark)
        for kind, same in by_kind.items():
            names = sorted({remark.case for remark in same if remark.case})
            who = names[0] if len(names) == 1 else f"{len(names)} cases" if names else "data set"
            rows.append(("look", who, kind, summarise_kind(kind, same).partition(": ")[2]))
        counts = self.count()
        usable = (
            f"all {len(self.cases)} cases of {self.task.name} can be used"
            if not counts["bad"]
            else f"{counts['bad']} of {len(self.cases)} cases of {self.task.name} cannot be used"
        )
        return [*align_columns(rows), f"{usable} ({counts['ok']} ok, {counts['look']} to look at, {counts['bad']} bad)"]

    def as_dict(self) -> dict[str, Any]:
        """Return all results as values for JSON; ``docs/data-check.md`` documents the format."""
        verdicts = self.verdicts
        return {
            "format": JSON_FORMAT,
            "task": self.task.name,
            "root": str(self.task.root),
            "counts": self.count(),
            "data": describe_data(self.facts, self.task),
            "cases": [
                {
                    "case": case["case"],
                    "verdict": verdicts[case["case"]],
                    "files": {name: [str(file) for file in list_files(case[name])] for name in FIELDS if name in case},
                }
                for case in self.cases
            ],
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def write(self, path: str | Path) -> None:
        """Write `as_dict` to a JSON file."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


def _list_problems(problems: Sequence[Finding]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each message, whatever its file, with the names of the first cases."""
    alike: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in problems:
        alike[finding.kind, finding.message.replace(str(finding.file), "").strip()].append(finding)
    for (kind, said), same in alike.items():
        cases = list(dict.fromkeys(finding.case for finding in same))
        if len(cases) == 1:
            yield from (("bad", finding.case, kind, finding.message) for finding in same)
        else:
            yield "bad", f"{len(cases)} cases", kind, f"each {said}: {list_some(cases)}"


def check_task(
    task: Task,
    *,
    splits: Sequence[Split] | None = None,
    group: str | None = None,
    workers: int | None = None,
    progress: Callable[[], object] | None = None,
) -> TaskCheck:
    """Read every file of a data set once; return the faults of each case and of the whole data set.

    Parameters
    ----------
    splits : sequence of Split, optional
        Splits in which no image may both train and validate; by default the data set's own, else nnU-Net's five folds,
        which keep the cases of a patient together.
    group : str, optional
        Rule for the patient of each case, as ``split.group``; by default, hints in the data set decide.
    workers, progress
        As for `check_cases`.
    """
    cases = (*task.training, *task.test)
    given = task.splits if splits is None else splits
    groups, of_patients = check_patients(task, group, given)
    ids = [case["case"] for case in task.training]
    num_patients = len(ids if groups is None else set(groups.values()))
    splits = given or (folds(ids, FOLDS, groups=groups) if num_patients >= FOLDS else [])
    largest = max(1, *map(expect_bytes, cases))
    # Half, because a file's size is only an estimate of its memory.
    fitting = max(1, available_bytes() // 2 // largest)

    def read(case: Case) -> tuple[CheckedCase, ComparedCase]:
        checked = read_case(case, task)
        facts = measure(checked, case, task)
        # Drop the volumes.
        return replace(checked, case=case), facts

    findings: list[Finding] = []
    digests: list[tuple[Case, str]] = []
    labels: dict[str, str | None] = {}
    facts: list[ComparedCase] = []
    for checked, known in map_in_threads(read, cases, min(fitting, workers or MOST_THREADS)):
        findings += [*checked.problems, *checked.remarks]
        if checked.digest is not None and known.image is not None:  # two constant images are not duplicates
            digests.append((checked.case, checked.digest))
            labels[checked.case["case"]] = checked.label_digest
        facts.append(known)
        if progress is not None:
            progress()
    trained = [(case, digest) for case, digest in digests if "label" in case]
    leaks = report_leaks(trained, splits)
    leaking = {leak.case for leak in leaks}
    doubles = [one for one in remark_on_same_images(digests) if one.kind != "same-image" or one.case not in leaking]
    findings += [*leaks, *doubles, *of_patients, *compare_cases(facts, task)]
    findings += report_copies(facts, {case["case"]: digest for case, digest in digests})
    findings += list(report_displaced_labels(facts, findings, task))
    same = [[case["case"] for case in several] for several in group_equal_images(trained)]
    return TaskCheck(
        task=task,
        cases=cases,
        findings=tuple(findings),
        facts=tuple(facts),
        equal=tuple(tuple(names) for names in same if len({labels[name] for name in names}) == 1),
    )


def check_patients(
    task: Task, group: str | None, splits: Sequence[Split]
) -> tuple[Mapping[str, str] | None, list[Finding]]:
    """Return the patient of each case, or None if each case has its own, and findings.

    Parameters
    ----------
    group : str or None
        As ``split.group``; with None, the data set's own hints are used, and reported.
    splits : sequence of Split
        Given splits; empty if folds will be computed.

    Raises
    ------
    ConfigError, DataError
        As `assign_patients`.
    """
    groups: Mapping[str, str] | None = assign_patients(task, group)
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
            f"patient {cut.patient}, like {cut.validation}, which validates in fold {cut.fold}",
            "patient-cut",
        )
        for cut in list_split_patients(splits, groups or {})
    ]
