"""Cross-validate: train every fold as an ordinary run, and write one page about all folds.

::

    runs/task04_unet/
        fold_0/ ... fold_4/      run folders; validation/ in each contains the out-of-fold predictions
        fold_0.yaml, fold_0.log  with --gpus: config and log of its process
        summary.json             all cases, in nnU-Net's format
        cross_validation.json    folds, times, means with intervals, published results, config, environment
        report.html, report.md   the same results as pages
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.config.loading import require_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, NonFiniteLossError, NonFinitePredictionError, ParallelError, VolsegError
from volseg.evaluation.intervals import CONFIDENCE, NUM_RESAMPLES, SEED, MeanInterval, mean_intervals
from volseg.evaluation.scoring import published_results
from volseg.evaluation.summary import Summary, complete_summary, read_structure, summarise, write_summary
from volseg.experiment.building import build_scoring, check_components
from volseg.experiment.launching import choose_gpus, count_workers
from volseg.experiment.report import attempt
from volseg.experiment.several_runs import Fold, FoldResult, plan_folds, require_own_folder, train_each
from volseg.experiment.training import train
from volseg.files import replace_nan
from volseg.monitoring.environment import environment
from volseg.monitoring.run_files import read_times
from volseg.parallel.processes.workers import Worker
from volseg.reporting import NAME, write_brief, write_report
from volseg.reporting.several_runs import RESULTS
from volseg.workflow.validation import read_evaluated

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelResult:
    """Dice of one label, or of the mean over the labels."""

    name: str
    of_folds: tuple[float, ...]
    """Mean over the cases of each fold."""
    over_cases: MeanInterval
    """Mean over all cases, with standard deviation over cases and bootstrap interval."""

    @property
    def over_folds(self) -> float:
        """Mean of the folds' means, which is usually published; NaN if one of them is NaN."""
        return fmean(self.of_folds)


@dataclass(frozen=True)
class CrossValidated:
    """All finished folds of a cross-validation."""

    config: ExperimentConfig
    task: Task
    num_folds: int
    """Number of planned folds; ``folds`` may be fewer."""
    folds: tuple[FoldResult, ...]
    failures: Mapping[int, str]
    """Error of each fold that failed in this call."""

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return self.config.folder

    @cached_property
    def summary(self) -> Summary:
        """Summary of all validated cases, by case id, in nnU-Net's format."""
        cases = [read_evaluated(case) for fold in self.folds for case in fold.summary["metric_per_case"]]
        return summarise(sorted(cases, key=lambda case: Path(case.prediction_file or "").name))

    @cached_property
    def labels(self) -> tuple[LabelResult, ...]:
        """Dice of every foreground label; the last row, ``mean``, is their mean."""
        values = [label for label in self.summary["mean"] if label != "0"]
        scores = [[case["metrics"][label]["Dice"] for label in values] for case in self.summary["metric_per_case"]]
        per_label, overall = mean_intervals(scores)
        results = [
            LabelResult(
                name=self.task.structures[read_structure(label)],
                of_folds=tuple(fold.summary["mean"][label]["Dice"] for fold in self.folds),
                over_cases=interval,
            )
            for label, interval in zip(values, per_label, strict=True)
        ]
        return (
            *results,
            LabelResult(name="mean", of_folds=tuple(fold.mean_dice for fold in self.folds), over_cases=overall),
        )

    @property
    def mean_dice(self) -> float:
        """Mean over all cases and labels."""
        return self.labels[-1].over_cases.mean


def as_json(crossed: CrossValidated) -> dict[str, Any]:
    """Return all results as plain values for JSON; NaN becomes null."""
    published = published_results(crossed.task)
    told = {
        "name": crossed.config.name,
        "task": crossed.task.name,
        "num_folds": crossed.num_folds,
        "num_cases": len(crossed.summary["metric_per_case"]),
        "mean_dice": crossed.mean_dice,
        "labels": {
            label.name: {"of_folds": label.of_folds, "mean_of_folds": label.over_folds, **asdict(label.over_cases)}
            for label in crossed.labels
        },
        "scores": _describe_scores(crossed),
        "bootstrap": {"kind": "percentile", "confidence": CONFIDENCE, "resamples": NUM_RESAMPLES, "seed": SEED},
        "folds": [_describe_fold(fold, crossed) for fold in crossed.folds],
        "failures": {str(number): message for number, message in crossed.failures.items()},
        "published": [{**row, "mean_dice": sum(row["dice"].values()) / len(row["dice"])} for row in published],
        "config": crossed.config.model_dump(mode="json"),
        "environment": environment(),
    }
    return replace_nan(told)


def _describe_scores(crossed: CrossValidated) -> dict[str, dict[str, Any]]:
    """Return each metric of every structure: mean over cases, interval, median, undefined cases, means of folds."""
    full = complete_summary(crossed.summary)
    described: dict[str, dict[str, Any]] = {}
    for key, means in full["mean"].items():
        of = described[crossed.task.structures.get(read_structure(key), key)] = {}
        for metric, mean in means.items():
            one: dict[str, Any] = {
                "mean": mean,
                "of_folds": [fold.summary["mean"][key][metric] for fold in crossed.folds],
            }
            if (interval := full["intervals"]["mean"][key].get(metric)) is not None:
                one["low"], one["high"] = interval
            for name in ("median", "undefined"):
                if metric in full[name][key]:
                    one[name] = full[name][key][metric]
            of[metric] = one
    return described


def format_cross_validation(crossed: CrossValidated) -> str:
    """Return the final message of a cross-validation: a summary of the longer report page and report.md."""
    told = write_brief(crossed.folder, sections=("Look at this", "Folds", "Published results"))
    return f"\n{told}\nAll results are in {crossed.folder}; report: {crossed.folder / NAME} and report.md"


def _describe_fold(fold: FoldResult, crossed: CrossValidated) -> dict[str, Any]:
    return {
        "fold": fold.number,
        "folder": str(fold.folder.path),
        "num_training_cases": len(fold.split.training),
        "num_validation_cases": len(fold.summary["metric_per_case"]),
        "epochs": len(fold.history),
        "seconds": sum(part.seconds for part in read_times(fold.folder.times_file)) or None,
        "seconds_training": fold.seconds_training,
        "mean_dice": fold.mean_dice,
        "dice": {
            crossed.task.structures[read_structure(label)]: mean["Dice"]
            for label, mean in fold.summary["mean"].items()
            if label != "0"
        },
    }


def cross_validate(
    config: ExperimentConfig | str | Path, *, folds: Sequence[int] | None = None, gpus: int = 1, resume: bool = False
) -> CrossValidated:
    """Train the folds of a config's split, gather their out-of-fold results, and write them.

    A finished fold is not trained again. The results cover every finished fold in the folder, including folds of other
    calls, and are rewritten after each fold.

    Parameters
    ----------
    config : ExperimentConfig or path
        Config of any fold, or its YAML file; ``split.fold`` and ``output`` are set for each (``OUTPUT/fold_K``).
    folds : sequence of int, optional
        Folds to train; all by default.
    gpus : int
        With 1, one fold after another in this process. With more, a process for each fold, that many at a time.
    resume : bool
        Resume started folds.

    Raises
    ------
    ConfigError, DataError
        Before any training, if the config cannot be run, or if a fold in the folder has another config or other cases,
        or is unfinished and ``resume`` is off.
    ParallelError, NonFiniteLossError, NonFinitePredictionError
        If folds failed and none is finished. Otherwise failures are part of the result.
    """
    config = require_config(config)
    check_components(config)
    require_own_folder(config, "cross-validation", "train each fold there with `volseg train --set split.fold=K`")
    task = load_task(config.data.root, require_files=False)
    plan = plan_folds(config, task)
    chosen = _choose_folds(plan, folds)
    for fold in plan:
        fold.require_same()
    results: dict[int, FoldResult] = {}

    def gather() -> None:
        for fold in plan:
            if fold.number not in results and (result := fold.result()):
                results[fold.number] = result

    gather()
    waiting = [fold for fold in chosen if fold.number not in results]
    _require_may_begin(waiting, resume)
    for fold in chosen:
        if fold.number in results:
            logger.info("fold %d is already finished: %s", fold.number, fold.folder.path)

    def keep_result(fold: Fold) -> None:
        gather()  # includes folds that other machines have finished
        assert fold.number in results, f"{fold.folder.path} ended without an error but is not finished"
        RunFolder(config.folder).postprocessing_file.unlink(missing_ok=True)  # it was measured without this fold
        logger.info("fold %d: Dice %.4f", fold.number, results[fold.number].mean_dice)
        if len(results) < len(plan):
            write({})

    def write(failures: Mapping[int, VolsegError]) -> CrossValidated:
        crossed = CrossValidated(
            config=config,
            task=task,
            num_folds=len(plan),
            folds=tuple(results[number] for number in sorted(results)),
            failures={number: _tell(number, fault) for number, fault in sorted(failures.items())},
        )
        _write(crossed)
        return crossed

    places: Sequence[str | None] | None = None
    if gpus > 1:
        places = choose_gpus(config, gpus)
    elif count_workers(config) > 1:  # a fold on several GPUs starts its own processes
        places = [None]
    failures = _train_folds(waiting, places, keep_result)
    if not results:
        raise next(iter(failures.values()))
    return write(failures)


def _train_folds(
    waiting: Sequence[Fold], gpus: Sequence[str | None] | None, on_finished: Callable[[Fold], None]
) -> dict[int, VolsegError]:
    """Train folds; return the errors of single folds, and raise an error that stops all of them.

    Parameters
    ----------
    waiting
        Folds in the order of their start.
    gpus
        See `choose_gpus`; None to train in this process.
    on_finished
        Called with a fold that has succeeded.
    """
    failures: dict[int, VolsegError] = {}

    def take(fold: Fold, worker: Worker) -> None:
        if worker.process.returncode == 0:
            on_finished(fold)
        else:
            failures[fold.number] = ParallelError(worker.describe_end(str(worker.log)))
            logger.error("%s", failures[fold.number])

    if gpus is not None:
        train_each(waiting, gpus, take)
        return failures
    for place, fold in enumerate(waiting, start=1):
        logger.info("fold %d (%d of %d): %s", fold.number, place, len(waiting), fold.folder.path)
        try:
            train(fold.config, resume=fold.folder.exists)
        except (NonFiniteLossError, NonFinitePredictionError) as fault:
            logger.error("%s", _tell(fold.number, fault))
            failures[fold.number] = fault
        else:
            on_finished(fold)
    return failures


def _tell(number: int, fault: VolsegError) -> str:
    # The error of a process names its fold.
    return str(fault) if isinstance(fault, ParallelError) else f"fold {number} failed: {fault}"


def _write(gathered: CrossValidated) -> None:
    folder = RunFolder(gathered.folder)
    scoring = build_scoring(gathered.config, gathered.task)
    summary = complete_summary(gathered.summary, scoring, gathered.task.structures)
    write_summary(summary, gathered.folder / "summary.json")
    folder.write_json(RESULTS, as_json(gathered))
    attempt("report.md was not written", lambda: folder.write_text("report.md", write_brief(gathered.folder)))
    attempt("report.html was not written", lambda: write_report(gathered.folder))


def _choose_folds(plan: Sequence[Fold], numbers: Sequence[int] | None) -> list[Fold]:
    if numbers is None:
        return list(plan)
    if unknown := sorted(set(numbers) - set(range(len(plan)))):
        raise ConfigError(f"the split has folds 0 to {len(plan) - 1}, got {unknown[0]}")
    return [plan[number] for number in dict.fromkeys(numbers)]


def _require_may_begin(waiting: Sequence[Fold], resume: bool) -> None:
    begun = [str(fold.folder.path) for fold in waiting if fold.folder.exists]
    if begun and not resume:
        raise ConfigError(
            f"{', '.join(begun)} {'was' if len(begun) == 1 else 'were'} started but not finished; continue with "
            "--resume, or choose another folder with --output"
        )
