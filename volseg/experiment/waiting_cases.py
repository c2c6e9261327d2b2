"""The cases of a prediction on their way to label maps: each is a result, whatever goes wrong with it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case
from volseg.data.checks import (
    Remark,
    digest_voxels,
    inspect_cases,
    read_case,
    remark_on_same_images,
    require_sound,
    summarise_remarks,
)
from volseg.data.preprocessed import preprocess
from volseg.errors import ConfigError, DataError, OutOfMemoryError, ParallelError, VolsegError
from volseg.experiment.images import list_unusable
from volseg.experiment.out_of_memory import explaining_memory
from volseg.experiment.predicted import CaseResult
from volseg.experiment.prediction_files import PredictionFiles
from volseg.experiment.prediction_record import PredictionRecord, identify
from volseg.experiment.prediction_workers import FoundInCases, predict_in_processes
from volseg.experiment.trained import Trained
from volseg.inference.overlapped import CaseOutcome, overlapped
from volseg.inference.prediction import Prediction
from volseg.inference.predictor import Predictor
from volseg.inference.preparing_on_device import prepare_on, suits
from volseg.inference.shared_predictor import SharedPredictor
from volseg.monitoring.progress import count_up
from volseg.workflow.interrupts import StopRequested

__all__ = ["WaitingCases"]

logger = logging.getLogger(__name__)

ENDS = (ConfigError, ParallelError, StopRequested, torch.AcceleratorError)
"""What is no case's own fault, and would keep the others from being predicted as well."""


class WaitingCases:
    """The cases of a prediction that are not there yet.

    Parameters
    ----------
    trained : Trained
        What predicts.
    files : PredictionFiles
        What is written.
    record : PredictionRecord
        Of their folder.
    cases : sequence of Case
        With paths.
    strict : bool
        Whether the first failure ends everything.
    devices : sequence of torch.device
        Over which every case is cut; none, or one: each is predicted whole where the networks lie.
    """

    def __init__(
        self,
        trained: Trained,
        files: PredictionFiles,
        record: PredictionRecord,
        cases: Sequence[Case],
        *,
        strict: bool,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._devices = devices
        self._trained = trained
        self._files = files
        self._record = record
        self._cases = {case["case"]: case for case in cases}
        self._identities: dict[str, list[Any] | None] = {}
        self._strict = strict
        self._results: dict[str, CaseResult] = {}
        self._remarks: list[Remark] = []
        self._digests: list[tuple[Case, Future[str]]] = []
        self._digesting = ThreadPoolExecutor(1, "digest")

    def require_sound(self) -> None:
        """Read every file to its end: once here and once when it is predicted, as not all fit into memory.

        Raises
        ------
        DataError
            For every bad case.
        """
        cases = list(self._cases.values())
        with count_up(len(cases), "checking") as count:
            problems = inspect_cases(cases, self._trained.task, progress=count).problems
        require_sound(problems, "mend them, or leave them out")

    def leave_out_unusable(self) -> None:
        """Set aside, before anything is predicted, what its paths or first bytes show to be of no use."""
        unusable: dict[str, DataError] = dict(list_unusable(list(self._cases.values())))
        for name, case in self._cases.items():
            try:
                self._files.require_possible(case)
            except DataError as unfit:
                unusable.setdefault(name, unfit)
        if unusable:
            logger.error("%d of %d case(s) cannot be used and are left out:", len(unusable), len(self._cases))
        for name, fault in unusable.items():
            self._fail(name, fault)

    def run(self, count: Callable[[], object]) -> dict[str, CaseResult]:
        """Predict and write the cases; return what became of each."""
        for _ in self._results:
            count()
        for _ in self.predict_each([case for name, case in self._cases.items() if name not in self._results]):
            count()
        self._tell([(self._cases[name], digest) for name, digest in self.found().digests])
        return self._results

    def predict_each(self, cases: Iterable[Case]) -> Iterator[CaseResult]:
        """Predict and write cases as they come; yield what became of each."""
        config = self._trained.config
        predictor: Predictor | SharedPredictor = (
            self._trained.build_shared_predictor(self._devices)
            if len(self._devices) > 1
            else self._trained.build_predictor()
        )
        stream = partial(predictor.stream, batch_size=config.inference.batch, also=self._files.also)
        device = torch.device(predictor.device or "cpu")
        on_device = suits(self._trained.preprocessing, device)
        prepare, finish = (self._read, partial(self._finish, device)) if on_device else (self._prepare, None)
        with self._digesting:
            outcomes = overlapped(self._noted(cases), prepare, stream, self._write, finish=finish, ends=ENDS)
            for outcome in outcomes:
                self._note(outcome, config)
                yield self._results[outcome.case["case"]]

    def found(self) -> FoundInCases:
        """Return what was found in the cases that were predicted, beside their label maps."""
        digests = [(case["case"], digest.result()) for case, digest in self._digests]
        return FoundInCases(remarks=tuple(self._remarks), digests=tuple(digests))

    def _tell(self, digests: Sequence[tuple[Case, str]]) -> None:
        """Say what is to be looked at, in the order of the cases: processes end them in any."""
        number = {name: number for number, name in enumerate(self._cases)}
        remarks = sorted(self._remarks, key=lambda remark: number[remark.case])
        same = remark_on_same_images(sorted(digests, key=lambda pair: number[pair[0]["case"]]))
        for line in summarise_remarks([*remarks, *same]):
            logger.warning("look at %s", line)

    def run_in_processes(
        self, gpus: Sequence[str | None], order: Mapping[str, Any], count: Callable[[], object]
    ) -> dict[str, CaseResult]:
        """Have the cases predicted and written by processes; return what became of each."""
        for _ in self._results:
            count()
        waiting = [case for name, case in self._cases.items() if name not in self._results]
        digests: list[tuple[Case, str]] = []
        for result in predict_in_processes(waiting, gpus, order):
            if isinstance(result, FoundInCases):
                self._remarks.extend(result.remarks)
                digests.extend(((self._cases[name], digest) for name, digest in result.digests))
                continue
            if result.error == "ParallelError":
                result = replace(result, message=f"{result.message}{self._tell_of_earlier(result.case)}")
            if result.state == "failed" and self._strict:
                raise DataError(f"case {result.case}: {result.message}")
            if result.state == "failed":
                logger.error("%s: %s", result.case, result.message)
                if result.error == "ParallelError":  # its process could not record that any more
                    self._record.add_failure(self._cases[result.case], result.error, result.message)
            self._results[result.case] = result
            count()
        self._tell(digests)
        return self._results

    def _noted(self, cases: Iterable[Case]) -> Iterator[Case]:
        for case in cases:
            self._cases[case["case"]] = case
            yield case

    def _read(self, case: Case) -> dict[str, Any]:
        """Read and check a case."""
        self._identities[case["case"]] = identify(case)
        checked = read_case(case, self._trained.task, digests=False)
        self._remarks.extend(checked.remarks)
        if checked.problems:
            raise DataError("; ".join(problem.message for problem in checked.problems))
        # Beside what follows: of a large image it takes as long as reading it.
        self._digests.append((case, self._digesting.submit(digest_voxels, checked.case["image"])))
        return dict(checked.case)

    def _prepare(self, case: Case) -> Case:
        """Read, check and preprocess a case."""
        read = self._read(case)
        return self._with_room(preprocess(read, case, self._trained.preprocessing, keep_reference=False))

    def _finish(self, device: torch.device, read: dict[str, Any]) -> Case:
        """Preprocess a case that was read, on the GPU."""
        return self._with_room(prepare_on(device, read, self._trained.preprocessing))

    def _with_room(self, prepared: Case) -> Case:
        self._files.require_room(prepared, self._trained)
        return prepared

    def _write(self, case: Case, prediction: Prediction) -> Path:
        """Write the files of a case, and record it: here, so that it is done before another one is begun."""
        given = self._cases[case["case"]]
        try:
            path = self._files.write(given, case, prediction, self._trained)
            self._record.add(given, self._identities[case["case"]])
        except OSError as fault:
            raise ConfigError(
                f"label maps cannot be written to {self._files.folder} ({fault.strerror or fault}); free space, then "
                "go on by --resume, or name another folder by --output"
            ) from fault
        return path

    def _note(self, outcome: CaseOutcome, config: ExperimentConfig) -> None:
        name = outcome.case["case"]
        if outcome.fault is None:
            self._results[name] = CaseResult(
                case=name, state="predicted", file=outcome.file, seconds=dict(outcome.seconds)
            )
        else:
            self._fail(name, _explain(outcome.fault, config))

    def _fail(self, name: str, fault: Exception) -> None:
        """Note that a case failed, and say so at once.

        Raises
        ------
        Exception
            The fault, if strict.
        """
        if self._strict:
            raise fault
        # What volseg did not raise on purpose may be a fault of its own, which its place helps to find.
        trace = None if isinstance(fault, VolsegError) else fault
        error, message = type(fault).__name__, f"{str(fault) or repr(fault)}{self._tell_of_earlier(name)}"
        logger.error("%s: %s", name, message, exc_info=trace)
        self._results[name] = CaseResult(case=name, state="failed", error=error, message=message)
        self._record.add_failure(self._cases[name], error, message)

    def _tell_of_earlier(self, name: str) -> str:
        """Return what to add to the words of a failure where another prediction's label map stays in its place."""
        earlier = self._files.name_label_map(self._cases[name])
        return f"; {earlier} is there, of an earlier prediction" if earlier.is_file() else ""


def _explain(fault: Exception, config: ExperimentConfig) -> Exception:
    """Return the fault of a case in words that help, where it is an allocator's."""
    try:
        with explaining_memory(config):
            raise fault
    except OutOfMemoryError as explained:
        return explained
    except Exception:
        return fault
