"""Return published results on a task, from the manifests of ``datasets/msd``, with their sources.

A result is shown only if the name of the task and the values and names of its labels are the same: Dice of merged or
renumbered labels is not comparable.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from volseg.config.catalogue import list_public_tasks
from volseg.data.cases import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """A row of a published table."""

    method: str
    evaluation: str
    """Cases of the evaluation, such as ``5-fold cross-validation`` or ``challenge test set``."""
    num_cases: int
    """Number of cases: those with labels for a cross-validation, else those of the test set."""
    dice: Mapping[int, float]
    """Label value to mean Dice."""
    source: str

    @property
    def mean_dice(self) -> float:
        """Mean over the labels."""
        return sum(self.dice.values()) / len(self.dice)


def published_results(task: Task) -> tuple[PublishedResult, ...]:
    """Return the published results of a task; none without a manifest, or if its labels differ from the manifest's.

    Labels are compared without regard to case, as tasks are often written anew by hand.
    """
    # Found among the names that there are: a task's name comes from its folder or its dataset.json, and is no path.
    manifest = next((known.manifest for known in list_public_tasks() if known.name == task.name), None)
    if manifest is None:
        return ()
    scored = {0: task.labels[0], **task.structures}  # regions are other structures, whatever their names
    if _fold_names(manifest["labels"]) != _fold_names(scored):
        logger.warning(
            "the published results of %s are about labels %s, this task has %s: they are not shown beside it",
            task.name,
            manifest["labels"],
            scored,
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


def _fold_names(labels: Mapping[Any, str]) -> dict[Any, str]:
    return {value: name.casefold() for value, name in labels.items()}
