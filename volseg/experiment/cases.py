"""Choose the cases that an experiment trains and validates on, and prepare them for the network."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import ALONE, PreparedCases, Readers, prepare_together
from volseg.data.cases import Case, Split, Task, folds, read_splits
from volseg.data.checks.reading import summarise_remarks
from volseg.data.groups import assign_patients, list_split_patients, propose_groups
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.files import choose_cache_folder
from volseg.formatting import list_some
from volseg.monitoring.progress import count_up
from volseg.parallel.devices import is_main_process
from volseg.transforms.preprocessing import Preprocessing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PatientReport:
    """Report on the patients of a split; each should be on one side only."""

    summary: str = ""
    """Empty if each case counts as a separate patient."""
    warning: str = ""
    """Empty if no patient is known to both train and validate."""


@dataclass(frozen=True, kw_only=True)
class ChosenCases:
    """The cases of one run."""

    task: Task
    split: Split
    training: tuple[Case, ...]
    validation: tuple[Case, ...]
    patients: PatientReport = field(default_factory=PatientReport)
    """Report on the patients of both sides."""


def read_task(config: ExperimentConfig) -> Task:
    """Read the description of a config's data set, with the channels that a previous stage adds."""
    return replace(load_task(config.data.root, require_files=False), stage_labels=config.stage_labels)


def choose_cases(config: ExperimentConfig) -> ChosenCases:
    """Read the task's description and return the cases to use; no image is read.

    A training case of weight 0 is in the split, but is not used.

    Raises
    ------
    ConfigError
        If a weight's name matches no case.
    DataError
        If there is no task, too few cases for the folds, an invalid weight, or no training case with a weight above 0.
    """
    task = read_task(config)
    task = replace(task, training=_weigh(task, config.data.weights))
    split = choose_split(config, task)
    by_id = {case["case"]: case for case in task.training}
    training, validation = (tuple(by_id[name] for name in names) for names in (split.training, split.validation))
    training, validation = add_stage(config, _choose_drawn(training)), add_stage(config, validation)
    is_given = list_given_splits(config, task) is not None
    patients = describe_patients(task, config.split.group, split, is_given=is_given)
    return ChosenCases(task=task, split=split, training=training, validation=validation, patients=patients)


def find_previous_stage(config: ExperimentConfig) -> Path | None:
    """Return the folder of a cascade's first stage, if the config describes the second stage; None for other configs.

    Raises
    ------
    ConfigError
        If the folder is absent.
    """
    folder = config.data.previous_stage
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"{config.name} is the second stage of a cascade, but the folder of the first one, {folder}, does not "
            "exist; restore it, or name its new path with --set data.previous_stage=FOLDER"
        )
    return folder


def add_stage(config: ExperimentConfig, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return cases with their label maps of the previous stage.

    Each label map is from the fold that validates the case: a network scores higher on cases that it was trained on.

    Raises
    ------
    DataError
        If cases have no label map; names these cases.
    """
    folder = config.data.previous_stage
    if folder is None:
        return tuple(cases)
    found = {
        path.name: path for path in (*folder.glob("validation/*.nii.gz"), *folder.glob("fold_*/validation/*.nii.gz"))
    }
    if missing := [case["case"] for case in cases if f"{case['case']}.nii.gz" not in found]:
        raise DataError(
            f"data.previous_stage: {folder} lacks the validated label maps of {len(missing)} of {len(cases)} cases: "
            f"{list_some(missing)}; train all folds of its config with volseg cross-validate, or name its new path "
            "with --set data.previous_stage=FOLDER"
        )
    return tuple({**case, "stage": found[f"{case['case']}.nii.gz"]} for case in cases)


def _weigh(task: Task, weights: Mapping[str, float]) -> tuple[Case, ...]:
    """Return the training cases with the weights of ``data.weights`` or of the data set's column ``weight``."""
    names = [case["case"] for case in task.training]
    fitting = {key: [key] if key in names else [name for name in names if fnmatchcase(name, key)] for key in weights}
    if unknown := [key for key, found in fitting.items() if not found]:
        raise ConfigError(
            f"data.weights: no case matches {list_some([repr(key) for key in unknown])}; "
            f"{did_you_mean(unknown[0], names)}"
        )
    column = task.columns.get("weight", {})
    weighed = {name: _read_weight(column[name], name, task) for name in names if column.get(name)}
    weighed |= {name: weights[key] for key, found in fitting.items() for name in found}
    return tuple(
        {**case, "weight": weighed[case["case"]]} if case["case"] in weighed else case for case in task.training
    )


def _read_weight(text: str, name: str, task: Task) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise DataError(
            f"{task.name}: the weight of case {name} is {text!r}, but must be a finite number of at least 0 "
            "(how often the case is drawn); rename a column 'weight' with another meaning"
        )
    return weight


def _choose_drawn(training: Sequence[Case]) -> tuple[Case, ...]:
    """Return the training cases with a weight above 0, and log the weights."""
    drawn = tuple(case for case in training if case.get("weight", 1.0) > 0)
    if training and not drawn:
        shown = list_some([case["case"] for case in training])
        raise DataError(f"all {len(training)} training cases have weight 0: {shown}; set at least one weight above 0")
    counts = Counter(case.get("weight", 1.0) for case in training)
    if len(counts) > 1 and is_main_process():
        shown = ", ".join(f"{count} of weight {weight:g}" for weight, count in sorted(counts.items()))
        logger.info("patches are drawn by the weights of cases: %s", shown)
    return drawn


def open_cache(config: ExperimentConfig, task: Task, preprocessing: Preprocessing) -> CaseCache | None:
    """Return the cache of prepared cases that the config names, or None.

    Raises
    ------
    ConfigError
        If the folder that the config names cannot be used. Without a named folder, a warning replaces the error.
    """
    folder = choose_cache_folder(config.data.cache)
    if folder is None:
        return None
    try:
        return CaseCache(folder, task, preprocessing, limit_bytes=int(config.data.cache_limit * 2**30))
    except ConfigError as fault:
        if config.data.cache != "auto":
            raise
        logger.warning("prepared cases are kept only in memory: %s", fault)
        return None


def prepare_chosen(
    chosen: ChosenCases,
    preprocessing: Preprocessing,
    *,
    skip_bad: bool,
    readers: Readers = ALONE,
    cache: CaseCache | None = None,
) -> PreparedCases:
    """Read every chosen case; return the usable cases, prepared for the network.

    All processes of the readers' group call this function, including those that read nothing.

    Bad cases are removed after the split, so a fold has the same cases no matter which others are bad.

    Raises
    ------
    DataError
        If a case is bad and ``skip_bad`` is off (all bad cases at once), or no case remains.
    """
    num_chosen = len(chosen.training) + len(chosen.validation)
    leads = is_main_process()  # every process receives the facts of all cases
    with count_up(num_chosen, "checking and preparing") if leads else nullcontext() as count:
        prepared = prepare_together(
            chosen.training,
            chosen.validation,
            chosen.task,
            preprocessing,
            readers=readers,
            skip_bad=skip_bad,
            cache=cache,
            progress=count,
        )
    if leads and cache is not None:
        logger.info("%s", cache.describe())
    for problem in prepared.problems if leads else ():
        logger.warning("left out: %s", problem)
    for line in summarise_remarks(prepared.remarks) if leads else ():
        logger.warning("look at %s", line)
    bad = {problem.case for problem in prepared.problems}
    no_training = chosen.training and all(case["case"] in bad for case in chosen.training)
    if no_training or (chosen.validation and not prepared.order):
        raise DataError(f"no valid case is left to train or validate on: {len(bad)} of {num_chosen} are bad")
    return prepared


def choose_split(config: ExperimentConfig, task: Task) -> Split:
    """Return the split that the config names: from its file, else from the data set, else nnU-Net's.

    Given splits are used unchanged; `ChosenCases.patients` reports whether they cut a patient.

    Raises
    ------
    ConfigError
        If there is no such fold, or ``split.group`` is neither a column nor a pattern.
    DataError
        If there are fewer cases or patients than folds, or a case without a patient.
    """
    wanted = config.split
    ids = [case["case"] for case in task.training]
    groups = assign_patients(task, wanted.group)  # an invalid group is refused for any split
    if wanted.validation == "none":
        return Split(training=tuple(sorted(ids)), validation=())
    if (splits := list_given_splits(config, task)) is None:
        return folds(ids, wanted.num_folds, wanted.seed, groups=groups)[wanted.fold]
    if wanted.fold >= len(splits):
        source = wanted.file or f"the table of {task.name}"
        raise ConfigError(f"split.fold is {wanted.fold}, but {source} has folds 0 to {len(splits) - 1}")
    return splits[wanted.fold]


def list_given_splits(config: ExperimentConfig, task: Task) -> Sequence[Split] | None:
    """Return the splits from a file or from the data set, or None if they are computed."""
    if config.split.file is not None:
        return read_splits(config.split.file, [case["case"] for case in task.training])
    return task.splits or None


def describe_patients(task: Task, group: str | None, split: Split, *, is_given: bool) -> PatientReport:
    """Return the report about the patients of a training.

    A split that cuts a patient is still used: published folds do so, and results on them are compared.

    Parameters
    ----------
    group : str or None
        As ``split.group``; with None, evident patients count.
    split : Split
        The split of the training.
    is_given : bool
        Whether the split comes from a file; else it was computed.

    Raises
    ------
    ConfigError, DataError
        As `assign_patients`.
    """
    groups: Mapping[str, str] | None = assign_patients(task, group)
    source = f"split.group: {group}"
    if group is None and (proposed := propose_groups(task)) is not None and proposed.evident:
        groups, source = proposed.patients, f"evident groups of the data set (split.group: {proposed.group})"
    if groups is None:
        return PatientReport()
    names = [*split.training, *split.validation]
    counted = f"{len({groups[name] for name in names})} patients of {len(names)} cases, by {source}"
    if not split.validation:
        return PatientReport(summary=counted)
    if not (cut := list_split_patients([split], groups)):
        return PatientReport(summary=f"{counted}; no patient both trains and validates")
    if is_given:
        remedy = "the split is given and used unchanged; make another one if results need not be comparable"
    else:
        remedy = "set split.group to this, or to none if each case is a separate patient"
    return PatientReport(
        summary=f"{counted}; {len(cut)} both train and validate",
        warning=f"{len(cut)} patient(s) both train and validate, of {counted}: {cut[0].training} trains and "
        f"{cut[0].validation} validates, so the validation Dice is too high; {remedy}",
    )
