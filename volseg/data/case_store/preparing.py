"""Check and prepare the cases of a training once, by all processes together."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import randbelow
from threading import Event
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from volseg.data.case_store.case_cache import CaseCache, pack_case, take_case
from volseg.data.case_store.preprocessed import Preprocessing, SharedCases, StoredCase, preprocess
from volseg.data.case_store.reading_group import ALONE, Readers
from volseg.data.cases import Case, Task
from volseg.data.checks.kinds import Problem, Remark
from volseg.data.checks.reading import read_case, refuse_held_out, remark_on_same_images, require_sound
from volseg.data.readers import list_case_files
from volseg.data.threads import map_in_threads
from volseg.parallel.processes.progress import Rounds, describe_error, run_together, told_error


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
    stored: str | None = None
    """File of the case for the machine's other processes, in memory or of the cache."""
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
"""Turns reports into JSON and back."""


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
    """Check cases while preparing them: each machine decompresses every file that it needs once.

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
        Processes that share the work; all of their group call this function. Training case i is read by reader i mod n
        of each machine. Validation case i is read by reader i mod n of all, which keeps it.
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
        In a reading process: all training cases, and its share of the validation cases. If readers share a machine, the
        training cases have ``image`` (float32) and ``label`` (uint8) without metadata, in shared memory; cases from a
        cache are mapped. `PreparedCases.order` and `PreparedCases.problems` are the same in every process.

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
    shares = len(readers.local) > 1 and readers.number is not None
    with closing(SharedCases()) if shares else nullcontext() as store:
        own, steps = _choose_own(sides, readers), preprocessing
        reading = _Reading(
            sides=sides, own=own, task=task, preprocessing=steps, skip_bad=skip_bad, store=store, cache=cache
        )
        heard = None if progress is None else _count_heard(progress, readers)
        messages = run_together(readers.group, partial(reading.run, workers=workers), num_counts=2, heard=heard)
        reports = _merge_reports(messages, sides)
        problems = [problem for report in reports.values() for problem in report.problems]
        if not skip_bad:
            require_sound(problems)
        reading.require_prepared(reports, readers)
        shared = _map_shared(messages, sides, readers)
    sound = [index for index in reports if not reports[index].problems]
    held = [(index, shared.get(index) or reading.prepared.get(index)) for index in sound]
    return PreparedCases(
        training=[case for index, case in held if case is not None and not sides[index][1]],
        validation=[case for index, case in held if case is not None and sides[index][1]],
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
    """The share of this process in the reading."""

    sides: Sequence[tuple[Case, bool]]
    own: Sequence[int]
    task: Task
    preprocessing: Preprocessing
    skip_bad: bool
    store: SharedCases | None
    cache: CaseCache | None
    prepared: dict[int, Case] = field(default_factory=dict)
    """The cases that this process holds."""
    faults: dict[int, Exception] = field(default_factory=dict)
    is_refused: Event = field(default_factory=Event)
    """Set once a case is refused: after that, cases are checked and not prepared, since they are not needed."""

    def run(self, rounds: Rounds, workers: int | None) -> Any:
        """Read this process's cases; return the message to the other processes."""
        # Trainings that start together with one cache begin at different cases, and find each other's.
        begin = 0 if self.cache is None else randbelow(max(1, len(self.own)))
        order = [*self.own[begin:], *self.own[:begin]]
        reports = []
        with closing(map_in_threads(self.read_one, order, workers)) as found:
            for index, report in zip(order, found, strict=True):
                reports.append([index, REPORTS.dump_python(report, mode="json")])
                rounds.count(int(self.sides[index][1]))
                rounds.check()
        return reports

    def read_one(self, index: int) -> _CaseReport:
        """Read a case, or take it from the cache."""
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
        is_shared = self.store is not None and not validates
        return replace(_CaseReport.of_stored(stored, case), stored=str(stored.path) if is_shared else None)

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
            return self._note_fault(index, report, fault), None

    def _keep(self, index: int, report: _CaseReport, prepared: Case | None) -> _CaseReport:
        """Hold a prepared case in memory; return the report with its storage."""
        case, validates = self.sides[index]
        if prepared is not None and not validates:
            prepared = {name: value for name, value in prepared.items() if name not in ("reference", "reference_file")}
            if self.store is not None:
                try:
                    packed = pack_case(prepared, case, self.task.num_classes, is_sparse=self.task.ignore is not None)
                    # The types of a `VolumeCache`.
                    types = {"image": torch.float32, "label": torch.uint8}
                    packed |= {name: packed[name].as_subclass(Tensor).to(dtype) for name, dtype in types.items()}
                    return replace(report, stored=self.store.add(packed, {"case": case["case"]}))
                except Exception as fault:  # reported like those of the steps
                    return self._note_fault(index, report, fault)
        if prepared is not None:
            self.prepared[index] = prepared
        return report

    def _note_fault(self, index: int, report: _CaseReport, fault: Exception) -> _CaseReport:
        self.faults[index] = fault
        return replace(report, fault=describe_error(fault))

    def require_prepared(self, reports: Mapping[int, _CaseReport], readers: Readers) -> None:
        """Raise the error that prevented preprocessing of the first such case, in any process."""
        for index, report in reports.items():
            if report.fault is not None and not report.problems:
                if index in self.faults:
                    raise self.faults[index]
                raise told_error(report.fault, f"process {readers.rank_of(report.reader)}")


def _merge_reports(messages: Sequence[Any], sides: Sequence[tuple[Case, bool]]) -> dict[int, _CaseReport]:
    """Return the report of every case, in order. If several machines read it, the first report with a fault wins.

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


def _choose_own(sides: Sequence[tuple[Case, bool]], readers: Readers) -> list[int]:
    """Return the indices of the cases that this process reads."""
    if readers.number is None:
        return []
    num_training = sum(not validates for _, validates in sides)
    local = readers.local
    return [
        *range(local.index(readers.own), num_training, len(local)),
        *range(num_training + readers.number, len(sides), readers.count),
    ]


def _count_heard(progress: Callable[[], object], readers: Readers) -> Callable[[list[list[int]]], None]:
    """Return a callback that calls ``progress`` once for every case that any process has read."""
    heard = 0

    def hear(counts: list[list[int]]) -> None:
        nonlocal heard
        machines: Counter[int] = Counter()
        for place, (trained, _) in zip(readers.places, counts, strict=True):
            machines[place.machine] += trained
        total = max(machines.values()) + sum(validated for _, validated in counts)
        for _ in range(total - heard):
            progress()
        heard = total

    return hear


def _map_shared(messages: Sequence[Any], sides: Sequence[tuple[Case, bool]], readers: Readers) -> dict[int, Case]:
    """Return all training cases that the readers of this machine have stored, once every process has mapped them."""
    shared: dict[int, Case] = {}

    def map_all(rounds: Rounds) -> None:
        del rounds
        for reader in readers.local if readers.number is not None else ():
            for index, report in messages[reader]:
                if (file := report["stored"]) is not None:
                    shared[index] = take_case(StoredCase.open(Path(file)), sides[index][0], keep_reference=False)

    run_together(readers.group, map_all)
    return shared
