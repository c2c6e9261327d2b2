"""Check and prepare the cases of a training in all processes together.

Processes share cases through the cache: each case is prepared by one process, while the others that need it wait; all
map the same file. Without a cache, each process prepares and keeps its own cases.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import randbelow
from threading import Event
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from volseg.data.case_store.case_cache import CaseCache, take_case
from volseg.data.case_store.preprocessed import Preprocessing, StoredCase, preprocess
from volseg.data.cases import Case, Task
from volseg.data.checks.kinds import Problem, Remark
from volseg.data.checks.reading import read_case, refuse_held_out, remark_on_same_images, require_sound
from volseg.data.readers import list_case_files
from volseg.data.threads import map_in_threads
from volseg.parallel.processes.progress import Rounds, describe_error, exchange, run_together, told_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The processes that prepare cases together, as seen by one of them."""

    group: dist.ProcessGroup | None = None
    """Gloo group for messages; None for a single process."""
    count: int = 1
    """Number of reading processes."""
    number: int | None = 0
    """Number of this process among the readers; None if it reads nothing."""

    def order_own(self, num_training: int, num_validation: int) -> list[int]:
        """Return the cases that this process needs, in its order: all training cases, and a share of the others.

        Processes and trainings that start together begin at different cases, and find each other's cases in the cache.
        """
        if self.number is None:
            return []
        validation = range(num_training + self.number, num_training + num_validation, self.count)
        own, share = [*range(num_training), *validation], max(1, num_training // self.count)
        begin = (self.number * share + randbelow(share)) % max(1, len(own))
        return [*own[begin:], *own[:begin]]


ALONE = Readers()
"""One process that reads everything."""


def meet_readers(group: dist.ProcessGroup | None, *, reads: bool = True) -> Readers:
    """Find the readers; all processes of the group call this function.

    Parameters
    ----------
    group : ProcessGroup or None
        Gloo group; None for a single process.
    reads : bool
        Whether this process reads; others receive the problems too.
    """
    if group is None:
        return ALONE
    told = exchange(reads, group)
    return Readers(group=group, count=sum(told), number=sum(told[: dist.get_rank(group)]) if reads else None)


@dataclass(frozen=True, kw_only=True)
class PreparedCases:
    """Cases of a training, prepared for the network."""

    training: Sequence[Case] = ()
    validation: Sequence[Case] = ()
    """Each with its ``reference``; see `prepare`. With several processes, the share of this process."""
    order: Sequence[str] = ()
    """The ids of the validation cases of all processes."""
    problems: Sequence[Problem] = ()
    """Problems of cases that any process left out."""
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)
    """`CheckedCase.fingerprint` of every case of any process; None for a case that was left out."""
    remarks: Sequence[Remark] = ()
    """Remarks on all cases of all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _CaseReport:
    """Findings of one process about a case, as reported to the others."""

    problems: Sequence[Problem] = ()
    remarks: Sequence[Remark] = ()
    digest: str | None = None
    fingerprint: str = ""
    fault: Sequence[str] | None = None
    """Type and text of the error that prevented the preprocessing of a case without problems."""
    reader: int = 0
    """Number in the group of the process that read the case."""

    def describe_sound(self, case: Case) -> dict[str, Any]:
        """Return the facts for a stored case. A file is named by its index: its path may change."""
        files = list_case_files(case)
        remarks = [
            [files.index(one.file) if one.file in files else None, one.message, one.kind] for one in self.remarks
        ]
        return {"remarks": remarks, "digest": self.digest, "fingerprint": self.fingerprint}

    @classmethod
    def of_stored(cls, stored: StoredCase, case: Case) -> "_CaseReport":
        """Return the report from the output of ``describe_sound``, for the present paths of the case."""
        found, files = stored.about["found"], list_case_files(case)
        return cls(
            remarks=[
                Remark(case["case"], None if place is None else files[place], message, kind)
                for place, message, kind in found["remarks"]
            ],
            digest=found["digest"],
            fingerprint=found["fingerprint"],
        )


REPORTS = TypeAdapter(_CaseReport)
"""Converter of reports into JSON and back."""


def prepare_together(
    training: Sequence[Case],
    validation: Sequence[Case],
    task: Task,
    preprocessing: Preprocessing,
    *,
    readers: Readers = ALONE,
    skip_bad: bool = False,
    cache: CaseCache | None = None,
    workers: int | None = None,
    progress: Callable[[], object] | None = None,
) -> PreparedCases:
    """Check and prepare cases; read each file once per process, or with a cache only once.

    Every case is checked, even after problems with others, so that all bad cases are named at once, in every process.

    Parameters
    ----------
    training, validation : sequence of Case
        Cases with paths; no case is in both. The same in every process.
    task : Task
        Declares the channels and labels that the files must have.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    readers : Readers
        Processes that share the work; all of their group call this function. Each reader needs all training cases.
        Validation case i is read by reader i mod n, which keeps it.
    skip_bad : bool
        Leave bad cases out instead of raising.
    cache : CaseCache, optional
        Cache of the same task and preprocessing, which provides and stores sound cases.
    workers : int, optional
        Threads of each process; see `map_in_threads`.
    progress : callable, optional
        Called once for every case of any process; from a thread if there are several processes.

    Returns
    -------
    PreparedCases
        In a reading process: all training cases, and its share of the validation cases. Cases from a cache are mapped;
        their training cases have ``image`` and ``label`` without metadata. `PreparedCases.order` and
        `PreparedCases.problems` are the same in every process.

    Raises
    ------
    DataError
        If a case is bad and ``skip_bad`` is off: all bad cases at once.
    Exception
        If no case is bad, or bad cases are left out, and one cannot be preprocessed: the error of the first such case.
        A process that did not read the case raises a `ParallelError` that names it, unless the error is one of
        volseg's.
    """
    sides = [*((case, False) for case in training), *((case, True) for case in validation)]  # whether it validates
    if cache is None and readers.count > 1 and readers.number == 0:
        logger.warning(
            "without a cache each of %d processes prepares and keeps all training cases; set data.cache to a folder",
            readers.count,
        )
    reading = _Reading(
        sides=sides,
        own=readers.order_own(len(training), len(validation)),
        task=task,
        preprocessing=preprocessing,
        skip_bad=skip_bad,
        cache=cache,
    )
    heard = None if progress is None else _count_heard(progress)
    messages = run_together(readers.group, partial(reading.run, workers=workers), num_counts=2, heard=heard)
    reports = _merge_reports(messages, sides)
    problems = [problem for report in reports.values() for problem in report.problems]
    if not skip_bad:
        require_sound(problems)
    reading.require_prepared(reports, readers.group)
    sound = [index for index in reports if not reports[index].problems]
    held = [(index, reading.prepared[index]) for index in sound if index in reading.prepared]
    return PreparedCases(
        training=[case for index, case in held if not sides[index][1]],
        validation=[case for index, case in held if sides[index][1]],
        order=[case["case"] for case, validates in (sides[index] for index in sound) if validates],
        problems=problems,
        fingerprints={
            sides[index][0]["case"]: None if report.problems else report.fingerprint
            for index, report in reports.items()
        },
        remarks=[
            *(remark for report in reports.values() for remark in report.remarks),
            *remark_on_same_images(_list_digests(reports, sides)),
        ],
    )


@dataclass(kw_only=True)
class _Reading:
    """The cases that this process reads, and their results."""

    sides: Sequence[tuple[Case, bool]]
    own: Sequence[int]
    task: Task
    preprocessing: Preprocessing
    skip_bad: bool
    cache: CaseCache | None
    prepared: dict[int, Case] = field(default_factory=dict)
    """The prepared cases of this process, by index."""
    faults: dict[int, Exception] = field(default_factory=dict)
    is_refused: Event = field(default_factory=Event)
    """Set once a case is refused: after that, cases are checked and not prepared, since they are not needed."""

    def run(self, rounds: Rounds, workers: int | None) -> Any:
        """Read this process's cases; return the message to the other processes."""
        reports = []
        with closing(map_in_threads(self.read_one, self.own, workers)) as found:
            for index, report in zip(self.own, found, strict=True):
                reports.append([index, REPORTS.dump_python(report, mode="json")])
                rounds.count(int(self.sides[index][1]))
                rounds.check()
        return reports

    def read_one(self, index: int) -> _CaseReport:
        """Read a case, or load it from the cache."""
        case, validates = self.sides[index]
        key = None if self.cache is None else self.cache.key_of(case)
        if self.cache is None or key is None:
            return self._keep(index, *self._prepare(index))
        with self.cache.making(key) as stored:
            if stored is None:
                report, prepared = self._prepare(index)
                if prepared is not None:
                    stored = self.cache.store(key, case, prepared, report.describe_sound(case))
                if stored is None:
                    return self._keep(index, report, prepared)
        self.prepared[index] = take_case(stored, case, keep_reference=validates)
        return _CaseReport.of_stored(stored, case)

    def _prepare(self, index: int) -> tuple[_CaseReport, Case | None]:
        """Read, check and preprocess a case."""
        case, _ = self.sides[index]
        checked = read_case(case, self.task)
        report = _CaseReport(
            problems=checked.problems, remarks=checked.remarks, digest=checked.digest, fingerprint=checked.fingerprint
        )
        if checked.problems and not self.skip_bad:
            self.is_refused.set()
        if checked.problems or self.is_refused.is_set():
            return report, None
        try:
            return report, preprocess(checked.case, case, self.preprocessing, keep_reference=True, task=self.task)
        except Exception as fault:  # any error of a step is reported, unless there are bad cases
            self.faults[index] = fault
            return replace(report, fault=describe_error(fault)), None

    def _keep(self, index: int, report: _CaseReport, prepared: Case | None) -> _CaseReport:
        """Keep a prepared case in memory; return its report."""
        if prepared is not None:
            unneeded = () if self.sides[index][1] else ("reference", "reference_file")
            self.prepared[index] = {name: value for name, value in prepared.items() if name not in unneeded}
        return report

    def require_prepared(self, reports: Mapping[int, _CaseReport], group: dist.ProcessGroup | None) -> None:
        """Raise the error that prevented preprocessing of the first such case, in any process."""
        for index, report in reports.items():
            if report.fault is not None and not report.problems:
                if index in self.faults:
                    raise self.faults[index]
                assert group is not None, "a single process has its own error"
                raise told_error(report.fault, f"process {dist.get_global_rank(group, report.reader)}")


def _merge_reports(messages: Sequence[Any], sides: Sequence[tuple[Case, bool]]) -> dict[int, _CaseReport]:
    """Return the report of every case, in order. If several processes read it, the first report with a fault wins.

    A training case whose image also validates gets a further problem.
    """
    reports: dict[int, _CaseReport] = {}
    for reader, message in enumerate(messages):
        for index, content in message:
            known = reports.get(index)
            if known is None or not (known.problems or known.fault):
                reports[index] = replace(REPORTS.validate_python(content), reader=reader)
    reports = dict(sorted(reports.items()))
    validation = {case["case"] for case, validates in sides if validates}
    leaks = refuse_held_out(_list_digests(reports, sides), validation)
    for index, report in reports.items():
        case, validates = sides[index]
        if case["case"] in leaks and not validates:
            reports[index] = replace(report, problems=[*report.problems, *leaks[case["case"]]])
    return reports


def _list_digests(reports: Mapping[int, _CaseReport], sides: Sequence[tuple[Case, bool]]) -> list[tuple[Case, str]]:
    """Return the usable cases, with their paths, and the digest of each one's voxels."""
    return [(sides[i][0], report.digest) for i, report in reports.items() if report.digest and not report.problems]


def _count_heard(progress: Callable[[], object]) -> Callable[[list[list[int]]], None]:
    """Return a callback that calls ``progress`` once for every case that any process has read."""
    heard = 0

    def hear(counts: list[list[int]]) -> None:
        nonlocal heard
        total = max(trained for trained, _ in counts) + sum(validated for _, validated in counts)
        for _ in range(total - heard):
            progress()
        heard = total

    return hear
