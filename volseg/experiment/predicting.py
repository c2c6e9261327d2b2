"""Label maps for new images: what is to be made, by whom, and what became of it."""

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case
from volseg.data.checks import Remark, inspect_cases, read_case, remark_on_same_images, require_sound, summarise_remarks
from volseg.data.preprocessed import preprocess
from volseg.data.readers import list_files
from volseg.errors import ConfigError, DataError, OutOfMemoryError, ParallelError, VolsegError
from volseg.experiment.fold_processes import choose_gpus
from volseg.experiment.images import find_images, list_unusable
from volseg.experiment.out_of_memory import explaining_memory
from volseg.experiment.predicted import CaseResult, Predicted
from volseg.experiment.prediction_files import PredictionFiles
from volseg.experiment.prediction_processes import predict_in_processes, serve_cases
from volseg.experiment.prediction_record import PredictionRecord
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.sources import Source, load_trained
from volseg.experiment.trained import Trained
from volseg.files import replacing
from volseg.inference.overlapped import CaseOutcome, overlapped
from volseg.inference.prediction import Prediction
from volseg.monitoring.progress import count_up
from volseg.workflow.interrupts import StopRequested

__all__ = ["predict", "serve_predictions"]

logger = logging.getLogger(__name__)

ENDS = (ConfigError, ParallelError, StopRequested, torch.AcceleratorError)
"""What is no case's own fault, and would keep the others from being predicted as well."""

PREDICTING = ("predicts each case", "predict one case after another")
"""What processes do and what is done without them, for messages."""


def predict(
    source: Source | Sequence[Source],
    images: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    checkpoint: str = "latest",
    overrides: Sequence[str] = (),
    series: Sequence[str] = (),
    resume: bool = False,
    skip_existing: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    gpus: int | None = None,
    postprocessing: bool = True,
    probabilities: bool = False,
    uncertainty: bool = False,
    label_format: str = "nifti",
) -> Predicted:
    """Predict images and write each label map as ``CASE.nii.gz`` on its image's own grid.

    A case that fails (a damaged file, a volume that does not fit) is named, and the others go on.

    Parameters
    ----------
    source : path, RunFolder, or sequence of them
        What predicts; see `load_trained`.
    images : sequence of path
        Files, folders of files, DICOM folders and folders above them, or tables; see `find_images`.
    output : path, optional
        Folder for the label maps; ``predictions`` in the folder of the run or the cross-validation by default.
    checkpoint : str
        ``latest`` (the end of the training, as nnU-Net does), ``best`` or ``previous``.
    overrides : sequence of str
        Such as ``inference.mirror=false``.
    series : sequence of str
        Which DICOM series, by UID or by a part of their description; see `find_images`.
    resume : bool
        Go on with a prediction that was interrupted: label maps that it left whole are not made again.
    skip_existing : bool
        Make no label map of whose name there is a file, whatever it holds.
    overwrite : bool
        Replace label maps that are there. One of these three is needed where there are any.
    strict : bool
        Read every image before the first is predicted, and raise for what cannot be used; then for the first failure.
    gpus : int, optional
        Predict in so many processes, each on a GPU of its own, or sharing the CPU where there is none.
    postprocessing : bool
        Apply what `determine_postprocessing` measured to help, where it did.
    probabilities, uncertainty : bool
        Write these as well; see `volseg.experiment.prediction_files`.
    label_format : str
        Of label maps: ``nifti`` or ``dicom-seg``.

    Raises
    ------
    DataError
        For images that are not there or share a name; if ``strict``, for bad ones, all of them at once.
    ConfigError
        If the source cannot predict, label maps cannot be written or are there already, or those to go on with were
        made otherwise.
    """
    if sum((resume, skip_existing, overwrite)) > 1:
        raise ConfigError("--resume, --skip-existing and --overwrite say what becomes of label maps; give one of them")
    folder = _choose_folder(source, output)
    trained = load_trained(source, checkpoint, overrides)
    asked: dict[str, Any] = {"label_format": label_format, "probabilities": probabilities, "uncertainty": uncertainty}
    files = PredictionFiles(folder=folder, postprocessing=trained.postprocessing if postprocessing else None, **asked)
    cases = find_images(images, trained.task.modalities, series=series)
    _refuse_own_images(cases, files)
    _require_writable(cases, files)
    record = PredictionRecord(files, trained, checkpoint)
    done = record.find_done(cases) if resume else record.find_existing(cases)
    if done and not (resume or skip_existing or overwrite):
        raise ConfigError(
            f"{folder} holds {len(done)} of the {len(cases)} label maps, first {next(iter(done))}. Go on with the same "
            "prediction by --resume, keep them, whatever made them, by --skip-existing, replace them by --overwrite, "
            "or name another folder by --output"
        )
    done = {} if overwrite else done
    waiting = [case for case in cases if case["case"] not in done]
    devices = () if gpus is None else choose_gpus(trained.config, gpus, PREDICTING)
    job = _Waiting(trained, files, record, waiting, strict=strict)
    if strict:
        job.require_sound()
    record.begin()
    job.leave_out_unusable()
    results = {name: CaseResult(case=name, state="there before", file=path) for name, path in done.items()}
    named = [source] if isinstance(source, Source) else list(source)
    order = {
        "source": [str(one.path if isinstance(one, RunFolder) else one) for one in named],
        "output": str(folder),
        "checkpoint": checkpoint,
        "overrides": list(overrides),
        "asked": asked,
        "postprocessing": postprocessing,
    }
    with count_up(len(cases), "predicting", done=len(done)) as count:
        results |= job.run_in_processes(devices, order, count) if devices else job.run(count)
    return Predicted(folder=folder, cases=tuple(results[case["case"]] for case in cases))


def serve_predictions() -> None:
    """Predict the cases that the process which started this one names; see `prediction_processes`."""
    serve_cases(_predict_ordered)


def _predict_ordered(order: Mapping[str, Any], cases: Iterator[Case]) -> Iterator[CaseResult]:
    trained = load_trained(order["source"], order["checkpoint"], order["overrides"])
    files = PredictionFiles(
        folder=Path(order["output"]),
        postprocessing=trained.postprocessing if order["postprocessing"] else None,
        **order["asked"],
    )
    record = PredictionRecord(files, trained, order["checkpoint"])
    return _Waiting(trained, files, record, (), strict=False).predict_each(cases)


class _Waiting:
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
    """

    def __init__(
        self, trained: Trained, files: PredictionFiles, record: PredictionRecord, cases: Sequence[Case], *, strict: bool
    ) -> None:
        self._trained = trained
        self._files = files
        self._record = record
        self._cases = {case["case"]: case for case in cases}
        self._strict = strict
        self._results: dict[str, CaseResult] = {}
        self._remarks: list[Remark] = []
        self._digests: list[tuple[Case, str]] = []

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
        return self._results

    def predict_each(self, cases: Iterable[Case]) -> Iterator[CaseResult]:
        """Predict and write cases as they come; yield what became of each."""
        config = self._trained.config
        predictor = self._trained.build_predictor()
        stream = partial(predictor.stream, batch_size=config.inference.batch, also=self._files.also)
        for outcome in overlapped(self._noted(cases), self._prepare, stream, self._write, ends=ENDS):
            self._note(outcome, config)
            yield self._results[outcome.case["case"]]
        for line in summarise_remarks([*self._remarks, *remark_on_same_images(self._digests)]):
            logger.warning("look at %s", line)

    def run_in_processes(
        self, gpus: Sequence[str | None], order: Mapping[str, Any], count: Callable[[], object]
    ) -> dict[str, CaseResult]:
        """Have the cases predicted and written by processes; return what became of each."""
        for _ in self._results:
            count()
        waiting = [case for name, case in self._cases.items() if name not in self._results]
        for result in predict_in_processes(waiting, gpus, order):
            if result.state == "failed" and self._strict:
                raise DataError(f"case {result.case}: {result.message}")
            if result.state == "failed":
                logger.error("%s: %s", result.case, result.message)
                if result.error == "ParallelError":  # its process could not record that any more
                    self._record.add_failure(self._cases[result.case], result.error, result.message)
            self._results[result.case] = result
            count()
        return self._results

    def _noted(self, cases: Iterable[Case]) -> Iterator[Case]:
        for case in cases:
            self._cases[case["case"]] = case
            yield case

    def _prepare(self, case: Case) -> Case:
        """Read, check and preprocess a case."""
        checked = read_case(case, self._trained.task)
        self._remarks.extend(checked.remarks)
        if checked.digest is not None:
            self._digests.append((case, checked.digest))
        if checked.problems:
            raise DataError("; ".join(problem.message for problem in checked.problems))
        prepared = preprocess(checked.case, case, self._trained.preprocessing, keep_reference=False)
        self._files.require_room(prepared, self._trained)
        return prepared

    def _write(self, case: Case, prediction: Prediction) -> Path:
        """Write the files of a case, and record it: here, so that it is done before another one is begun."""
        given = self._cases[case["case"]]
        try:
            path = self._files.write(given, case, prediction, self._trained)
            self._record.add(given)
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
        error, message = type(fault).__name__, str(fault) or repr(fault)
        logger.error("%s: %s", name, message, exc_info=trace)
        self._results[name] = CaseResult(case=name, state="failed", error=error, message=message)
        self._record.add_failure(self._cases[name], error, message)


def _explain(fault: Exception, config: ExperimentConfig) -> Exception:
    """Return the fault of a case in words that help, where it is an allocator's."""
    try:
        with explaining_memory(config):
            raise fault
    except OutOfMemoryError as explained:
        return explained
    except Exception:
        return fault


def _choose_folder(source: Source | Sequence[Source], output: str | Path | None) -> Path:
    """Return where label maps are written."""
    if output is not None:
        return Path(output)
    named = [source] if isinstance(source, Source) else list(source)
    path = named[0].path if isinstance(named[0], RunFolder) else Path(named[0])
    if len(named) == 1 and path.is_dir():
        return RunFolder(path).predictions
    raise ConfigError("where the label maps are to go is not clear from what predicts; name a folder by --output")


class _Tried(Exception):  # noqa: N818  (no error: it leaves a block that would keep what was written)
    pass


def _require_writable(cases: Sequence[Case], files: PredictionFiles) -> None:
    """Raise unless a label map of the longest name can be written, before hours of work."""
    output, case = files.folder, max(cases, key=lambda case: len(os.fsencode(case["case"])))
    longest = case["case"]
    try:
        with suppress(_Tried), replacing(files.name_label_map(case)) as partial:
            partial.touch()
            raise _Tried
    except OSError as fault:
        remedy = (
            f"rename {longest[:40]}..., of {len(longest)} characters, to a shorter name"
            if fault.errno == errno.ENAMETOOLONG
            else "name another folder by --output"
        )
        raise ConfigError(f"label maps cannot be written to {output} ({fault.strerror or fault}); {remedy}") from fault


def _refuse_own_images(cases: Sequence[Case], files: PredictionFiles) -> None:
    # Resolved, because a relative path, an absolute one and a link may mean one file.
    written = {file.resolve() for case in cases for file in files.name_all(case)}
    images = [image for case in cases for image in list_files(case["image"])]
    if overwritten := [image for image in images if image.resolve() in written]:
        raise DataError(
            f"{files.folder} holds the image {overwritten[0]} itself; choose another folder for the predictions"
        )
