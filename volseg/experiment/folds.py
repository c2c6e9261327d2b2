"""The folds of a cross-validation: which runs there are to be, and which of them are done.

Each is an ordinary run in a folder of its own. Nothing but these folders says what is done, so a cross-validation can
be stopped anywhere, its folds trained on several machines, or one of them by `volseg train`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from volseg.checkpointing.compatible import require_same_config, require_same_split
from volseg.checkpointing.file import LATEST, load_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.state import EpochRecord, TrainingState
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.readers import stem
from volseg.data.splits import Split
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.evaluation.intervals import CONFIDENCE, NUM_RESAMPLES, SEED, MeanInterval, mean_intervals
from volseg.evaluation.published import PublishedResult, published_results
from volseg.evaluation.summary import Summary, complete_summary, read_structure, read_summary, summarise
from volseg.experiment.cases import choose_split, list_given_splits
from volseg.reporting import NAME, write_brief
from volseg.workflow.hooks import Patience
from volseg.workflow.validation import read_evaluated

__all__ = [
    "CrossValidated",
    "Fold",
    "FoldResult",
    "LabelResult",
    "as_json",
    "format_cross_validation",
    "load_final_state",
    "plan_folds",
]


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    """What a finished fold left in its folder."""

    number: int
    split: Split
    folder: RunFolder
    summary: Summary
    """Of the fold's validation cases, on their original grids."""
    history: tuple[EpochRecord, ...]

    @property
    def mean_dice(self) -> float:
        """Mean over cases and foreground labels."""
        return float(self.summary["foreground_mean"]["Dice"])

    @property
    def seconds_training(self) -> float:
        """Wall-clock time of all batches, without validations and preparation."""
        return sum(record.seconds for record in self.history)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One run that a cross-validation consists of."""

    number: int
    split: Split
    config: ExperimentConfig

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.config.folder)

    def require_same(self) -> None:
        """Raise if the run was begun with another config or other cases.

        Raises
        ------
        ConfigError
            Names every key that differs.
        DataError
            If the task's cases are others than when the run was begun.
        """
        if not self.folder.exists:
            return
        require_same_config(self.folder, self.config, folds=True)
        require_same_split(self.folder, self.split)

    def result(self) -> FoldResult | None:
        """Return what the run left; None unless it was trained to its end and validated.

        Raises
        ------
        DataError
            If the run's summary is about other cases than the fold's.
        """
        if (state := load_final_state(self.folder, self.config)) is None:
            return None
        summary_file = self.folder.validation / "summary.json"
        summary = read_summary(summary_file)
        self._require_own_cases(summary, summary_file)
        return FoldResult(
            number=self.number,
            split=self.split,
            folder=self.folder,
            summary=summary,
            history=state.history,
        )

    def _require_own_cases(self, summary: Summary, path: Path) -> None:
        found = {stem(Path(case["prediction_file"])) for case in summary["metric_per_case"]}
        expected = set(self.split.validation)
        missing = set() if self.config.data.skip_bad else expected - found
        if wrong := sorted(found - expected | missing):
            raise DataError(
                f"{path} holds {len(found)} cases where fold {self.number} validates {len(expected)}; the first that "
                f"is in one of them only is {wrong[0]}. Write it anew: volseg validate {self.folder.path}"
            )


def plan_folds(config: ExperimentConfig, task: Task) -> list[Fold]:
    """Return every fold of a config's split, in ``fold_K`` of the config's folder.

    Raises
    ------
    ConfigError
        If the folds are no cross-validation: one validates nothing, or two validate the same case, which would count
        it twice.
    """
    wanted = config.split
    if wanted.validation == "none":
        raise ConfigError("a cross-validation needs cases to validate on; split.validation is none, set it to fold")
    given = list_given_splits(config, task)
    count = wanted.num_folds if given is None else len(given)
    plan = []
    for number in range(count):
        update = {
            "output": config.folder / f"fold_{number}",
            # A table may have more folds than the config counts, which is read again from each run's folder.
            "split": wanted.model_copy(update={"fold": number, "num_folds": max(wanted.num_folds, count)}),
        }
        own = config.model_copy(update=update)
        plan.append(Fold(number=number, split=choose_split(own, task), config=own))
    _require_disjoint(plan)
    return plan


def _require_disjoint(plan: Sequence[Fold]) -> None:
    validated_in: dict[str, int] = {}
    for fold in plan:
        source = fold.config.split.file or "the data set's own split"
        if not fold.split.validation:
            raise ConfigError(f"fold {fold.number} of {source} validates no case; give it some, or take it out")
        for case in fold.split.validation:
            if case in validated_in:
                raise ConfigError(
                    f"{case} validates in folds {validated_in[case]} and {fold.number} of {source}; "
                    "a cross-validation predicts each case once"
                )
            validated_in[case] = fold.number


def load_final_state(folder: RunFolder, config: ExperimentConfig) -> TrainingState | None:
    """Return the last state of a run that was validated after all epochs, or after its patience ran out; else None.

    Raises
    ------
    ConfigError
        If it has more epochs than the config asks for.
    """
    if not (folder.exists and (folder.validation / "summary.json").exists()):
        return None
    try:
        state = load_checkpoint(folder.checkpoints / LATEST)
    except CheckpointError:
        return None  # what is left of the run may still be resumed
    epochs, patience = config.training.epochs, config.training.patience
    if state.epoch > epochs:
        raise ConfigError(
            f"{config.folder} was trained for {state.epoch} epochs, the cross-validation's config asks for {epochs}: "
            "its folds would not be of one experiment. Move that folder away, or choose another --output"
        )
    has_ended = state.epoch == epochs or (patience is not None and Patience(patience).has_run_out(state.history))
    return state if has_ended else None


# What a cross-validation came to: numbers per fold and label with intervals, in values for its report.


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


def format_cross_validation(crossed: CrossValidated) -> str:
    """Return what a cross-validation ends by saying: its report in short, of which the page and report.md have more."""
    told = write_brief(crossed.folder, sections=("Look at this", "Folds", "Published results"))
    return f"\n{told}\nAll of it is in {crossed.folder}; report: {crossed.folder / NAME} and report.md"


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
