"""Which cases an experiment trains and validates on."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case, Task
from volseg.data.checks import Problem, check_cases, require_sound
from volseg.data.msd import load_task
from volseg.data.splits import Split, folds, read_splits
from volseg.errors import ConfigError, DataError
from volseg.monitoring.progress import count_up

__all__ = ["ChosenCases", "choose_cases", "choose_split", "sound_cases"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChosenCases:
    """The cases of one run."""

    task: Task
    split: Split
    training: tuple[Case, ...]
    validation: tuple[Case, ...]
    problems: tuple[Problem, ...]
    """Of cases that were left out (``data.skip_bad``)."""


def choose_cases(config: ExperimentConfig) -> ChosenCases:
    """Read the task's description and return the cases to use; no image is read.

    Raises
    ------
    DataError
        If there is no task, or too few cases for the folds.
    """
    task = load_task(config.data.root, require_files=False)
    split = choose_split(config, [case["case"] for case in task.training])
    by_id = {case["case"]: case for case in task.training}
    training, validation = (tuple(by_id[name] for name in names) for names in (split.training, split.validation))
    return ChosenCases(task=task, split=split, training=training, validation=validation, problems=())


def sound_cases(chosen: ChosenCases, *, skip_bad: bool) -> ChosenCases:
    """Read every chosen case to its end and return those that can be used.

    The split was made before bad cases are left out, so a fold holds the same cases whatever was wrong with others.

    Raises
    ------
    DataError
        If a case is bad and ``skip_bad`` is off (all bad cases at once), or none is left.
    """
    used = [*chosen.training, *chosen.validation]
    with count_up(len(used), "checking") as count:
        problems = check_cases(used, chosen.task, progress=count)
    if not skip_bad:
        require_sound(problems)
    bad = {problem.case for problem in problems}
    for problem in problems:
        logger.warning("left out: %s", problem)
    training, validation = (
        tuple(case for case in cases if case["case"] not in bad) for cases in (chosen.training, chosen.validation)
    )
    if not training or (chosen.validation and not validation):
        raise DataError(f"no sound case is left to train or validate on; {len(bad)} of {len(used)} are bad")
    return replace(chosen, training=training, validation=validation, problems=tuple(problems))


def choose_split(config: ExperimentConfig, ids: Sequence[str]) -> Split:
    """Return the split that the config asks for.

    Raises
    ------
    ConfigError
        If the split file has no such fold.
    """
    wanted = config.split
    if wanted.validation == "none":
        return Split(training=tuple(sorted(ids)), validation=())
    if wanted.file is None:
        return folds(ids, wanted.num_folds, wanted.seed)[wanted.fold]
    splits = read_splits(wanted.file, ids)
    if wanted.fold >= len(splits):
        raise ConfigError(f"split.fold is {wanted.fold}, but {wanted.file} holds folds 0 to {len(splits) - 1}")
    return splits[wanted.fold]
