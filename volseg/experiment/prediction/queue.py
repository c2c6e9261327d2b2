"""Predict a queue of cases; each case has a result, also if it fails."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from volseg.commands import run_module
from volseg.config.registry import read_record
from volseg.data.case_store.preprocessed import preprocess
from volseg.data.cases import Case
from volseg.data.checks.kinds import Remark
from volseg.data.checks.reading import check_cases, read_case, require_sound, summarise_remarks
from volseg.data.readers import list_files
from volseg.errors import ConfigError, DataError, ParallelError, VolsegError
from volseg.experiment.own_components import components_arguments
from volseg.experiment.placement.alternatives import explaining_memory
from volseg.experiment.prediction.files import CaseResult, PredictionFiles, PredictionRecord, identify
from volseg.experiment.prediction.trained import Trained
from volseg.inference.original_grid import Prediction
from volseg.inference.predictor import Predictor, SharedPredictor
from volseg.inference.prefetching import overlapped, prepare_on, suits
from volseg.inference.streaming import pad_shape
from volseg.inference.writing import require_room
from volseg.monitoring.progress import count_up
from volseg.parallel.processes.workers import Worker, WorkerPool
from volseg.workflow.checks import StopRequested

logger = logging.getLogger(__name__)


# Spread the cases of a prediction over GPUs: a worker per GPU requests the next case when it has room.
#
# ::
#
#     worker                this process
#     {"asks": true}   ->
#                      <-   {"case": "ct_7", "image": ["ct_7.nii.gz"]}, or null: no case is left
#     {"case": ...}    ->   result of one case
#     {"ends": ...}    ->   error that prevents any prediction, such as a full disk
#
# A slow case does not delay others. Each worker loads the network and writes label maps by itself. The results name a
# worker that fails with the cases that it had; the other workers predict the rest.


def predict_in_processes(
    cases: Sequence[Case], gpus: Sequence[str | None], order: Mapping[str, Any], command: Sequence[str] | None = None
) -> Iterator[CaseResult]:
    """Yield the result of each case, in the order of completion.

    Closing the generator, Ctrl-C and errors end the workers; the files that they are writing are whole or absent.

    Parameters
    ----------
    cases : sequence of Case
        Cases with paths.
    gpus : sequence of str or None
        Values of CUDA_VISIBLE_DEVICES, one per worker; None for workers that share the CPU. See `choose_gpus`.
    order : mapping
        Input of `serve_predictions`, with the settings of the workers.
    command : sequence of str, optional
        Command of a worker, by default the verb that calls `serve_predictions`.

    Raises
    ------
    ConfigError
        For an error that prevents every prediction, as soon as one worker meets it.
    """
    command = command or run_module("volseg", "predict-cases", *components_arguments())
    waiting = deque(cases)
    failures: list[str] = []
    with TemporaryDirectory(prefix="volseg_predict_") as folder, WorkerPool(len(gpus)) as pool:
        held: dict[Worker, dict[str, Case]] = {}
        for number, gpu in enumerate(gpus):
            name = f"process {number} ({'CPU' if gpu is None else f'GPU {gpu}'})"
            worker = pool.start(name, command, Path(folder) / f"{number}.log", gpu=gpu, talks=True)
            held[worker] = {}
            worker.send(order)
        while pool.running and (heard := pool.hear()) is not None:
            worker, answer = heard
            if answer is None:
                yield from _fail(worker, held.pop(worker), failures)
            elif answer.get("asks"):
                case = waiting.popleft() if waiting else None
                if case is not None:
                    held[worker][case["case"]] = case
                worker.send(case and {"case": case["case"], "image": [str(path) for path in list_files(case["image"])]})
            elif "ends" in answer:
                raise ConfigError(answer["ends"])
            else:
                held[worker].pop(answer["case"], None)
                yield read_record(CaseResult, answer)
    why = "; ".join(failures) or "see the results of the other cases"
    for case in waiting:  # no worker is left to request it
        yield CaseResult(
            case=case["case"],
            state="failed",
            error="ParallelError",
            message=f"all prediction processes have failed: {why}",
        )


def _fail(worker: Worker, held: Mapping[str, Case], failures: list[str]) -> Iterator[CaseResult]:
    """Yield the cases of a worker that has ended as failures; record a failure without cases."""
    message = worker.describe_end()
    for name in held:
        yield CaseResult(case=name, state="failed", error="ParallelError", message=message)
    if worker.process.returncode and not held:
        failures.append(message)
        logger.error("%s", message)


HELD = 3
"""Predictions in memory at once: computed, waiting, written."""

ENDS = (ConfigError, ParallelError, StopRequested, torch.AcceleratorError)
"""Errors that are not specific to a case, and would fail the others too."""


class PredictionQueue:
    """The cases of a prediction that still need a label map.

    Parameters
    ----------
    trained : Trained
        Networks that predict.
    files : PredictionFiles
        Files to write.
    record : PredictionRecord
        Record of their folder.
    cases : sequence of Case
        Cases with paths.
    strict : bool
        Whether the first failure ends the prediction.
    devices : sequence of torch.device
        Devices over which every case is cut; with none or one, a case is predicted whole on the networks' device.
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
        self._remarks: dict[str, tuple[Remark, ...]] = {}

    def require_sound(self) -> None:
        """Read every file fully: once here and once for the prediction, as not all fit into memory.

        Raises
        ------
        DataError
            For every bad case.
        """
        cases = list(self._cases.values())
        with count_up(len(cases), "checking") as count:
            problems = check_cases(cases, self._trained.task, progress=count)
        require_sound(problems, "fix them, or leave them out")

    def run(
        self, count: Callable[[], object], gpus: Sequence[str | None], order: Mapping[str, Any]
    ) -> dict[str, CaseResult]:
        """Predict and write the cases; return their results.

        Parameters
        ----------
        count : callable
            Called after each case.
        gpus, order
            GPUs with a worker each, and its order (see `predict_in_processes`); without GPUs this process predicts.
        """
        cases = list(self._cases.values())
        for result in predict_in_processes(cases, gpus, order) if gpus else self.predict_each(cases):
            self._results[result.case] = self._note_of_worker(result) if gpus else result
            count()
        # In the order of the cases: processes end in any order.
        remarks = [remark for name in self._cases for remark in self._results[name].remarks]
        for line in summarise_remarks(remarks):
            logger.warning("look at %s", line)
        return self._results

    def predict_each(self, cases: Iterable[Case]) -> Iterator[CaseResult]:
        """Predict and write cases as they come; yield the result of each."""
        config = self._trained.config
        predictor: Predictor | SharedPredictor = (
            self._trained.build_shared_predictor(self._devices)
            if len(self._devices) > 1
            else self._trained.build_predictor()
        )
        device, explained = torch.device(predictor.device or "cpu"), explaining_memory(config)
        on_device = suits(self._trained.preprocessing, device)
        outcomes = overlapped(
            cases,
            explained(self._read if on_device else self._prepare),
            explained(partial(predictor.predict, also=self._files.also)),
            self._write,
            finish=explained(partial(self._finish, device)) if on_device else None,
            batch_size=1 if isinstance(predictor, SharedPredictor) else config.inference.batch,
            size_of=lambda case: pad_shape(case["image"].shape[-3:], config.inference.window),
            ends=ENDS,
        )
        for outcome in outcomes:
            name = outcome.case["case"]
            if outcome.fault is not None:
                self._fail(name, outcome.fault)
            else:
                self._results[name] = CaseResult(
                    case=name,
                    state="predicted",
                    file=outcome.file,
                    seconds=dict(outcome.seconds),
                    remarks=self._remarks.get(name, ()),
                )
            yield self._results[name]

    def _note_of_worker(self, result: CaseResult) -> CaseResult:
        """Log the failure of a case, and record a failure that its process could not record."""
        if result.state != "failed":
            return result
        is_lost = result.error == "ParallelError"
        if is_lost:
            result = replace(result, message=f"{result.message}{self._describe_earlier(result.case)}")
        if self._strict:
            raise DataError(f"case {result.case}: {result.message}")
        logger.error("%s: %s", result.case, result.message)
        if is_lost:
            self._record.add_failure(self._cases[result.case], result.error, result.message)
        return result

    def _read(self, case: Case) -> dict[str, Any]:
        """Read and check a case."""
        name = case["case"]
        self._cases[name], self._identities[name] = case, identify(case)
        self._files.require_possible(case)
        checked = read_case(case, self._trained.task, digests=False)
        self._remarks[name] = tuple(checked.remarks)
        if checked.problems:
            raise DataError("; ".join(problem.message for problem in checked.problems))
        stage = {"stage": self._files.name_stage(case)} if self._trained.task.stage_labels else {}
        return {**checked.case, **stage}

    def _prepare(self, case: Case) -> Case:
        """Read, check and preprocess a case."""
        return self._with_room(preprocess(self._read(case), case, self._trained.preprocessing, keep_reference=False))

    def _finish(self, device: torch.device, read: dict[str, Any]) -> Case:
        """Preprocess a case that was read, on the GPU."""
        return self._with_room(prepare_on(device, read, self._trained.preprocessing))

    def _with_room(self, prepared: Case) -> Case:
        if self._files.probabilities:
            require_room(prepared["image"], self._trained.task.num_outputs, held=HELD)
        return prepared

    def _write(self, case: Case, prediction: Prediction) -> Path:
        """Write the files of a case, and record it here, before the next case begins."""
        given = self._cases[case["case"]]
        try:
            path, volumes = self._files.write(given, case, prediction, self._trained)
            self._record.add(given, self._identities[case["case"]], volumes)
        except OSError as fault:
            raise ConfigError(
                f"label maps cannot be written to {self._files.folder} ({fault.strerror or fault}); free space, then "
                "continue with --resume, or name another folder with --output"
            ) from fault
        return path

    def _fail(self, name: str, fault: Exception) -> None:
        """Record and log the failure of a case.

        Raises
        ------
        Exception
            The error, if strict.
        """
        if self._strict:
            raise fault
        # An exception of another class may be a bug of volseg: its traceback helps.
        trace = None if isinstance(fault, VolsegError) else fault
        error, message = type(fault).__name__, f"{str(fault) or repr(fault)}{self._describe_earlier(name)}"
        logger.error("%s: %s", name, message, exc_info=trace)
        remarks = self._remarks.get(name, ())
        self._results[name] = CaseResult(case=name, state="failed", error=error, message=message, remarks=remarks)
        self._record.add_failure(self._cases[name], error, message)

    def _describe_earlier(self, name: str) -> str:
        """Return a note for a failure if another prediction's label map stays in its place."""
        earlier = self._files.name_label_map(self._cases[name])
        return f"; {earlier} is from an earlier prediction" if earlier.is_file() else ""
