"""What a cross-validation came to: numbers per fold and label, with intervals, beside those that others published."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.evaluation.intervals import CONFIDENCE, NUM_RESAMPLES, SEED, MeanInterval, mean_intervals
from volseg.evaluation.published import PublishedResult, published_results
from volseg.evaluation.summary import EvaluatedCase, Summary, complete_summary, read_structure, summarise
from volseg.evaluation.tables import explain_scores, scores_table
from volseg.experiment.folds import FoldResult
from volseg.experiment.scoring import build_scoring

__all__ = ["JSON_FILE", "CrossValidated", "LabelResult", "as_json", "cross_validation_report", "cross_validation_words"]

JSON_FILE = "cross_validation.json"


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
        cases = [
            EvaluatedCase(
                metrics={read_structure(label): metrics for label, metrics in case["metrics"].items()},
                prediction_file=case["prediction_file"],
                reference_file=case["reference_file"],
            )
            for fold in self.folds
            for case in fold.summary["metric_per_case"]
        ]
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
    return {
        "name": crossed.config.name,
        "task": crossed.task.name,
        "num_folds": crossed.num_folds,
        "num_cases": len(crossed.summary["metric_per_case"]),
        "mean_dice": _drop_nan(crossed.mean_dice),
        "labels": {label.name: _describe_label(label) for label in crossed.labels},
        "scores": _describe_scores(crossed),
        "bootstrap": {"kind": "percentile", "confidence": CONFIDENCE, "resamples": NUM_RESAMPLES, "seed": SEED},
        "folds": [_describe_fold(fold, crossed) for fold in crossed.folds],
        "failures": {str(number): message for number, message in crossed.failures.items()},
        "published": [{**asdict(row), "mean_dice": row.mean_dice} for row in crossed.published],
        "config": crossed.config.model_dump(mode="json"),
        "environment": environment,
    }


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
            of[metric] = {
                name: [_drop_nan(each) for each in value] if isinstance(value, list) else _drop_nan(value)
                for name, value in one.items()
            }
    return described


def cross_validation_words(crossed: CrossValidated) -> str:
    """Return what a cross-validation ends by saying."""
    report = crossed.folder / "report.md"
    return "\n".join(["", *_tabulate_results(crossed), "", f"All of it is in {crossed.folder}; report: {report}"])


def cross_validation_report(crossed: CrossValidated) -> str:
    """Return the report in Markdown."""
    training = crossed.config.training
    lines = [
        f"# {crossed.config.name}: cross-validation on {crossed.task.name}",
        "",
        f"{crossed.config.network.name}, {training.epochs} epochs of {training.iterations} batches per fold.",
        "",
        *_tabulate_results(crossed),
        "",
        "## Scores",
        "",
        scores_table(crossed.summary, {str(key): name for key, name in crossed.task.structures.items()}),
        "",
        *explain_scores(build_scoring(crossed.config, crossed.task)),
        "",
        "## Folds",
        "",
        *_tabulate_times(crossed),
        "",
        f"`{JSON_FILE}` holds these numbers unrounded with config and environment, `summary.json` every case.",
        "",
    ]
    return "\n".join(lines)


def _tabulate_results(crossed: CrossValidated) -> list[str]:
    """Return the tables and what has to be known to read them."""
    percent = f"{100 * CONFIDENCE:.0f} %"
    header = ["Dice", *(f"fold {fold.number}" for fold in crossed.folds)]
    header += ["mean of folds", "mean of cases", "SD of cases", f"{percent} interval"]
    rows = [
        [
            label.name,
            *(f"{dice:.4f}" for dice in label.of_folds),
            f"{label.over_folds:.4f}",
            f"{label.over_cases.mean:.4f}",
            f"{label.over_cases.std:.4f}",
            f"{label.over_cases.low:.4f} to {label.over_cases.high:.4f}",
        ]
        for label in crossed.labels
    ]
    num_cases = len(crossed.summary["metric_per_case"])
    lines = [
        *_format_table(header, rows),
        "",
        f"{num_cases} cases, each predicted by the network that did not train on it, compared on its original grid. "
        f"Interval of the mean of cases: percentile bootstrap over cases, {NUM_RESAMPLES} resamples "
        "(Efron 1979, doi:10.1214/aos/1176344552); it says nothing about training again.",
    ]
    if len(crossed.folds) < crossed.num_folds:
        done = ", ".join(str(fold.number) for fold in crossed.folds)
        lines += ["", f"Incomplete: fold(s) {done} of {crossed.num_folds}."]
    for message in crossed.failures.values():
        lines += ["", "```", message, "```"]
    return [*lines, *_tabulate_published(crossed, num_cases)]


def _tabulate_published(crossed: CrossValidated, num_cases: int) -> list[str]:
    if not crossed.published:
        return []
    labels = sorted(crossed.published[0].dice)
    header = ["method", "evaluation", "cases", *(crossed.task.labels[label] for label in labels), "mean", "source"]
    own_evaluation = f"{crossed.num_folds}-fold cross-validation"
    own = ["this run", own_evaluation, str(num_cases), *(f"{label.over_folds:.4f}" for label in crossed.labels), ""]
    rows = [own, *(_format_published(row, labels) for row in crossed.published)]
    lines = ["", "Published (Dice; of cross-validations the mean of folds):", "", *_format_table(header, rows)]
    other = sorted({row.num_cases for row in crossed.published if row.is_cross_validation} - {num_cases})
    if other:
        lines += [
            "",
            f"Not the same cases: the published cross-validations trained and validated on {other[0]} cases, this one "
            f"has {num_cases}. Compare with that in mind.",
        ]
    if any(not row.is_cross_validation for row in crossed.published):
        lines += ["", "A challenge test set is of other cases, without public labels; ensembles are the rule there."]
    return lines


def _format_published(row: PublishedResult, labels: Sequence[int]) -> list[str]:
    # As many digits as the source has, and one more for a mean of its numbers.
    digits = max(2, *(len(repr(dice).partition(".")[2]) for dice in row.dice.values()))
    dice = [f"{row.dice[label]:.{digits}f}" for label in labels]
    mean = f"{row.mean_dice:.{min(digits + 1, 4)}f}"
    return [row.method, row.evaluation, str(row.num_cases), *dice, mean, row.source]


def _tabulate_times(crossed: CrossValidated) -> list[str]:
    header = ["fold", "training cases", "validation cases", "epochs", "s in all", "s of batches", "folder"]
    rows = []
    for fold in crossed.folds:
        seconds = crossed.seconds.get(fold.number)
        row = [fold.number, len(fold.split.training), len(fold.split.validation), len(fold.history)]
        times = ["" if seconds is None else f"{seconds:.0f}", f"{fold.seconds_training:.0f}"]
        rows.append([*map(str, row), *times, str(fold.folder.path)])
    return _format_table(header, rows)


def _format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    first, *rest = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    )
    return [first, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rest]


def _describe_label(label: LabelResult) -> dict[str, Any]:
    statistics = {name: _drop_nan(value) for name, value in asdict(label.over_cases).items()}
    return {
        "of_folds": [_drop_nan(dice) for dice in label.of_folds],
        "mean_of_folds": _drop_nan(label.over_folds),
        **statistics,
    }


def _describe_fold(fold: FoldResult, crossed: CrossValidated) -> dict[str, Any]:
    return {
        "fold": fold.number,
        "folder": str(fold.folder.path),
        "num_training_cases": len(fold.split.training),
        "num_validation_cases": len(fold.summary["metric_per_case"]),
        "epochs": len(fold.history),
        "seconds": crossed.seconds.get(fold.number),
        "seconds_training": fold.seconds_training,
        "mean_dice": _drop_nan(fold.mean_dice),
        "dice": {
            crossed.task.structures[read_structure(label)]: _drop_nan(mean["Dice"])
            for label, mean in fold.summary["mean"].items()
            if label != "0"
        },
    }


def _drop_nan(value: float) -> float | None:
    return value if math.isfinite(value) else None
