"""What the validations of a run measure, from its config and its task."""

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.evaluation.scoring import Scoring, choose_scoring

__all__ = ["build_scoring"]


def build_scoring(config: ExperimentConfig, task: Task) -> Scoring:
    """Return what is measured of the task's structures.

    Raises
    ------
    ConfigError
        If the config names a label that is none.
    """
    asked = config.evaluation
    return choose_scoring(
        task.structures,
        task.name,
        distances=asked.distances,
        tolerance=asked.tolerance,
        lesions=asked.lesions,
        lesion_overlap=asked.lesion_overlap,
    )
