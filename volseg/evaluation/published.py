"""What others reached on a task: the published results in the manifests of ``datasets/msd``, with their sources.

A result is set beside one's own only if it is about the same task by name and the same labels by value and name: Dice
of labels that were put together or renumbered are other numbers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from volseg.data.cases import Task
from volseg.data.manifests import list_manifests, read_manifest

__all__ = ["PublishedResult", "published_results"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """A row of somebody's table."""

    method: str
    evaluation: str
    """On which cases, such as ``5-fold cross-validation`` or ``challenge test set``."""
    num_cases: int
    """How many cases that were: the task's with labels for a cross-validation, else those of its test set."""
    dice: Mapping[int, float]
    """Label value to mean Dice."""
    source: str

    @property
    def is_cross_validation(self) -> bool:
        """Whether the cases are those with public labels, as in a cross-validation of one's own."""
        return "cross-validation" in self.evaluation

    @property
    def mean_dice(self) -> float:
        """Mean over the labels."""
        return sum(self.dice.values()) / len(self.dice)


def published_results(task: Task) -> tuple[PublishedResult, ...]:
    """Return the published results of a task; none for a task that has no manifest or other labels than its manifest.

    Labels are compared without regard to case, as tasks are often written anew by hand.
    """
    if task.name not in list_manifests():
        return ()
    manifest = read_manifest(task.name)
    if _fold_names(manifest["labels"]) != _fold_names(task.labels):
        logger.warning(
            "the published results of %s are about labels %s, this task has %s: they are not shown beside it",
            task.name,
            manifest["labels"],
            task.labels,
        )
        return ()
    return tuple(_read_result(row, manifest) for row in manifest["published"])


def _read_result(row: Mapping[str, Any], manifest: Mapping[str, Any]) -> PublishedResult:
    crossed = "cross-validation" in row["evaluation"]
    return PublishedResult(
        method=row["method"],
        evaluation=row["evaluation"],
        num_cases=manifest["num_training" if crossed else "num_test"],
        dice=dict(row["dice"]),
        source=row["source"],
    )


def _fold_names(labels: Mapping[int, str]) -> dict[int, str]:
    return {value: name.casefold() for value, name in labels.items()}
