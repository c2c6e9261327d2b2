"""Compute the results of a cross-validation: numbers per fold and label, with intervals."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.evaluation.intervals import CONFIDENCE, NUM_RESAMPLES, SEED, MeanInterval, mean_intervals
from volseg.evaluation.published import PublishedResult, published_results
from volseg.evaluation.summary import Summary, complete_summary, read_structure, summarise
from volseg.experiment.folds import FoldResult
from volseg.files import replace_nan
from volseg.reporting import NAME, write_brief
from volseg.workflow.validation import read_evaluated

__all__ = ["CrossValidated", "LabelResult", "as_json", "format_cross_validation"]


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
        """Mean of the folds' means, which is what is published as a rule; NaN if it is in one of them."""
        return fmean(self.of_folds)


@dataclass(frozen=True)
class CrossValidated:
    """Every finished fold of a cross-validation, together."""

    config: ExperimentConfig
    task: Task
    num_folds: int
    """That there are to be; ``folds`` may be fewer."""
    folds: tuple[FoldResult, ...]
    seconds: Mapping[int, float]
    """Fold to wall-clock seconds, all included, where a fold was trained in one go."""
    failures: Mapping[int, str]
    """Fold to what went wrong in it, in this call."""

    @property
    def folder(self) -> Path:
        """Where everything is."""
        return self.config.folder

    @cached_property
    def summary(self) -> Summary:
        """Of all validated cases, by case id, in nnU-Net's shape."""
        cases = [read_evaluated(case) for fold in self.folds for case in fold.summary["metric_per_case"]]
        return summarise(sorted(cases, key=lambda case: Path(case.prediction_file or "").name))

    @cached_property
    def labels(self) -> tuple[LabelResult, ...]:
        """Dice of every foreground label; last, called ``mean``, of the mean over them."""
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

    @cached_property
    def published(self) -> tuple[PublishedResult, ...]:
        """What others reached on this task."""
        return published_results(self.task)


def as_json(crossed: CrossValidated, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain values for JSON; what is not a number is null."""
    told = {
        "name": crossed.config.name,
        "task": crossed.task.name,
        "num_folds": crossed.num_folds,
        "num_cases": len(crossed.summary["metric_per_case"]),
        "mean_dice": crossed.mean_dice,
        "labels": {label.name: _describe_label(label) for label in crossed.labels},
        "scores": _describe_scores(crossed),
        "bootstrap": {"kind": "percentile", "confidence": CONFIDENCE, "resamples": NUM_RESAMPLES, "seed": SEED},
        "folds": [_describe_fold(fold, crossed) for fold in crossed.folds],
        "failures": {str(number): message for number, message in crossed.failures.items()},
        "published": [{**asdict(row), "mean_dice": row.mean_dice} for row in crossed.published],
        "config": crossed.config.model_dump(mode="json"),
        "environment": environment,
    }
    return replace_nan(told)


def _describe_scores(crossed: CrossValidated) -> dict[str, dict[str, Any]]:
    """Return each metric of every structure: mean over cases, interval, median, cases without one, means of folds."""
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
    """Return what a cross-validation ends by saying: its report in short, of which the page and report.md have more."""
    told = write_brief(crossed.folder, sections=("Look at this", "Folds", "Published results"))
    return f"\n{told}\nAll of it is in {crossed.folder}; report: {crossed.folder / NAME} and report.md"


def _describe_label(label: LabelResult) -> dict[str, Any]:
    return {"of_folds": label.of_folds, "mean_of_folds": label.over_folds, **asdict(label.over_cases)}


def _describe_fold(fold: FoldResult, crossed: CrossValidated) -> dict[str, Any]:
    return {
        "fold": fold.number,
        "folder": str(fold.folder.path),
        "num_training_cases": len(fold.split.training),
        "num_validation_cases": len(fold.summary["metric_per_case"]),
        "epochs": len(fold.history),
        "seconds": crossed.seconds.get(fold.number),
        "seconds_training": fold.seconds_training,
        "mean_dice": fold.mean_dice,
        "dice": {
            crossed.task.structures[read_structure(label)]: mean["Dice"]
            for label, mean in fold.summary["mean"].items()
            if label != "0"
        },
    }
