"""Validate a trained run again: its validation cases, with any of its checkpoints and other settings for inference."""

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from volseg.checkpointing.compatible import require_same_task
from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.job_folder import only_process_in
from volseg.config.loading import differences
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.layouts import load_task
from volseg.data.layouts.files import list_images
from volseg.data.readers import read_volume, stem
from volseg.errors import ConfigError, DataError
from volseg.evaluation.summary import EvaluatedCase, Summary, complete_summary, scores_table, summarise, write_summary
from volseg.experiment.building import build_scoring, build_validation, preprocessing_of
from volseg.experiment.cases import ChosenCases, add_stage, open_cache, prepare_chosen, read_task
from volseg.experiment.placement.alternatives import explaining_memory
from volseg.experiment.prediction.sources import path_of, require_runs
from volseg.experiment.prediction.trained import PREDICTION_KEYS, Trained, open_run, require_keys
from volseg.experiment.report import dice_table
from volseg.files import require_new
from volseg.formatting import list_duplicates
from volseg.inference.measured_postprocessing import Judged, MeasuredPostprocessing, measure_postprocessing
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.writing import write_prediction
from volseg.monitoring.progress import count_up, progress
from volseg.workflow.validation import Validated, read_evaluated

logger = logging.getLogger(__name__)


VALIDATION_KEYS = (*PREDICTION_KEYS, "metrics", "evaluation", "data.root", "data.cache", "data.cache_limit")
"""Keys of a config that may change for another validation."""

SUMMARY = "summary.json"

BEING_MADE = ".being_made"
"""Subfolder of a validation during its computation; it remains after an interruption."""

COUNTS = ("inference", "training.precision", "metrics", "evaluation")
"""The keys that change scores by more than round-off."""


def validate(
    folder: RunFolder | str | Path,
    *,
    checkpoint: str = "latest",
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Validated:
    """Predict the run's validation cases and write their label maps and ``summary.json``.

    Label maps of the latest checkpoint go to ``validation/``, those of the best to ``validation_best/``. Those of
    changed settings go to a folder named after them, such as ``validation_inference.mirror=true/``.

    Parameters
    ----------
    folder : RunFolder or path
        Folder of the training.
    checkpoint : str
        ``latest``, ``best`` or ``previous``.
    overrides : sequence of str
        Such as ``inference.mirror=true``; see `VALIDATION_KEYS`.
    output : path, optional
        Another folder.
    overwrite : bool
        Replace an existing validation.

    Raises
    ------
    ConfigError
        If the validation exists, or a key cannot be set.
    DataError
        If the run has no validation cases, or a case is missing or bad.
    OutOfMemoryError
        If a volume does not fit its device.
    """
    require_keys(overrides, VALIDATION_KEYS)
    folder = RunFolder(path_of(folder))
    trained = open_run(folder, checkpoint, overrides).build()
    target = Path(output) if output is not None else folder.path / _name(folder, checkpoint, overrides)
    chosen = choose_validated(folder, trained.config)
    with only_process_in(target), explaining_memory(trained.config):
        _require_new(target, overwrite=overwrite, is_named=output is not None)
        validated = _validate(trained, chosen, target)
    logger.info("label maps and summary.json are in %s", target)
    return validated


def validate_folds(
    folder: str | Path,
    *,
    checkpoint: str = "latest",
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
) -> tuple[Summary, Task]:
    """Validate each finished fold of a cross-validation on its own cases, and summarise all of them.

    The results of a fold go to its run folder, or to ``OUTPUT/fold_K``. The summary of all folds goes to a folder of
    the same name next to the folds, or to ``OUTPUT``. The parameters are those of `validate`.

    Raises
    ------
    ConfigError
        If the folder is not a cross-validation, no fold is finished, or the validation exists.
    """
    require_keys(overrides, VALIDATION_KEYS)
    folds = require_runs(folder)
    name = _name(folds[0], checkpoint, overrides)
    target = Path(output) if output is not None else Path(folder) / name
    targets = [target / fold.path.name if output is not None else fold.path / name for fold in folds]
    for one in (target, *targets):
        _require_new(one, overwrite=overwrite, is_named=output is not None)
    evaluated: list[EvaluatedCase] = []
    for fold, place in zip(folds, targets, strict=True):
        validated = validate(fold, checkpoint=checkpoint, overrides=overrides, output=place, overwrite=True)
        logger.info("%s: Dice %.4f", fold.path, validated.score)
        evaluated.extend(map(read_evaluated, validated.summary["metric_per_case"]))
    summary, task = summarise(evaluated), folds[0].task()
    full = complete_summary(summary, build_scoring(folds[0].config(overrides), task), task.structures)
    logger.info("the summary of all folds is %s", write_summary(full, target / SUMMARY))
    return summary, task


def validate_and_format(source: str | Path, **settings: Any) -> str:
    """Validate a run or a cross-validation, and return its tables; the settings are those of `validate`."""
    folder = RunFolder(source)
    if folder.exists:
        summary, task = validate(folder, **settings).summary, folder.task()
    else:
        summary, task = validate_folds(source, **settings)
    names = {str(key): name for key, name in task.structures.items()}
    return f"{dice_table(summary, task)}\n\n{scores_table(summary, names)}"


def _name(folder: RunFolder, checkpoint: str, overrides: Sequence[str]) -> str:
    """Return the folder name of a validation with these settings."""
    lines = differences(folder.config(), folder.config(overrides))
    changed = [line for line in lines if any(line.startswith((f"{key}.", f"{key}:")) for key in COUNTS)]
    parts = [] if checkpoint == "latest" else [checkpoint]
    parts += [f"{line.partition(':')[0]}={_shorten(line.rpartition(' -> ')[2])}" for line in changed]
    return "_".join(["validation", *parts])


def _shorten(value: str) -> str:
    """Return a value in a form for file names: the sides of a window become 64x64x64."""
    return "x".join(re.findall(r"[\w.-]+", value.lower()))[:60]


def _require_new(target: Path, *, overwrite: bool, is_named: bool) -> None:
    """Raise if a validation, or label maps in a folder that the user named, would be replaced."""
    there = [target / SUMMARY] if (target / SUMMARY).exists() else []
    there += sorted(target.glob("*.nii.gz"))[:1] if is_named else []
    if there and not overwrite:
        raise ConfigError(f"{there[0]} exists; use --overwrite to replace it, or name another folder with --output")


def choose_validated(folder: RunFolder, config: ExperimentConfig) -> ChosenCases:
    """Return only the validation cases of the run.

    Raises
    ------
    DataError
        If there are no cases, a case is missing, or the meaning of the labels has changed.
    """
    split, root = folder.split(), config.data.root
    if not split.validation:
        raise DataError(
            f"{folder.path} was trained on every case (split.validation: none); predict other cases instead"
        )
    if not root.exists():
        raise DataError(
            f"{root}, the data set of {folder.path}, does not exist; restore it, or name its new path with "
            f"--set data.root=FOLDER, or permanently as data.root in {folder.config_file}"
        )
    task = read_task(config)
    require_same_task(folder, task)
    by_id = {case["case"]: case for case in task.training}
    if gone := sorted(set(split.validation) - by_id.keys()):
        raise DataError(f"{root} no longer contains {gone[0]} and {len(gone) - 1} more validation case(s)")
    validation = add_stage(config, [by_id[name] for name in split.validation])
    return ChosenCases(task=task, split=split, training=(), validation=validation)


def _validate(trained: Trained, chosen: ChosenCases, target: Path) -> Validated:
    """Validate in a subfolder, and replace the old validation at the end: an interruption leaves the old one intact."""
    made = target / BEING_MADE
    shutil.rmtree(made, ignore_errors=True)
    config, preprocessing = trained.config, preprocessing_of(trained.config)
    cache = open_cache(config, chosen.task, preprocessing)
    prepared = prepare_chosen(chosen, preprocessing, skip_bad=config.data.skip_bad, cache=cache).validation
    predictor = trained.build_predictor()
    validated = build_validation(config, trained.task, predictor, prepared, folder=made, show=True)()
    # The summary is removed first and written last, so that it never describes other label maps.
    (target / SUMMARY).unlink(missing_ok=True)
    for file in sorted(made.iterdir()):
        if file.name != SUMMARY:
            os.replace(file, target / file.name)
    summary = json.loads((made / SUMMARY).read_text(encoding="utf-8"))
    for case in (*summary["metric_per_case"], *validated.summary["metric_per_case"]):
        case["prediction_file"] = str(target / Path(case["prediction_file"]).name)
    write_summary(summary, target / SUMMARY)
    shutil.rmtree(made)
    return validated


# Measure which postprocessing helps a run or a cross-validation, and apply it to a folder of label maps.


def determine_postprocessing(source: str | Path) -> MeasuredPostprocessing:
    """Try every step on the validation predictions of a run, or the out-of-fold predictions of a cross-validation.

    Write ``postprocessing.json`` into ``source``.

    Parameters
    ----------
    source : path
        A run folder, or the folder of a cross-validation.

    Raises
    ------
    ConfigError
        If ``source`` is neither.
    DataError
        If a validation case has no prediction, or its label is missing.
    """
    runs = require_runs(source)
    judged = [case for run in runs for case in _list_judged(run)]
    if doubled := list_duplicates(case.case for case in judged):
        raise DataError(f"{doubled[0]} is a validation case of two folds of {source} and would count twice")
    task = runs[0].task()
    for run in runs[1:]:
        require_same_task(run, task)
    measured = measure_postprocessing(judged, task, show=partial(progress, title="trying steps"))
    measured.save(RunFolder(Path(source)).postprocessing_file)
    return measured


def apply_postprocessing(
    source: str | Path, folder: str | Path, output: str | Path, *, overwrite: bool = False
) -> list[Path]:
    """Write every label map of ``folder`` to ``output`` after the steps of ``source``; return the files.

    Parameters
    ----------
    source : path
        The folder of ``postprocessing.json``, or the file.
    folder : path
        Folder of label maps of the same task, predicted by any program.
    output : path
        Another folder.
    overwrite : bool
        Whether to replace existing label maps.

    Raises
    ------
    ConfigError
        If the two folders are the same, or a label map exists and ``overwrite`` is off.
    DataError
        If there is no label map, or one has values of another task.
    """
    source, folder, output = Path(source), Path(folder), Path(output)
    order = Postprocessing.load(RunFolder(source).postprocessing_file if source.is_dir() else source)
    if folder.resolve() == output.resolve():
        raise ConfigError(f"{output} contains the original label maps; name another folder with --output")
    files = list_images(folder) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is not a folder of label maps; name the one that `volseg predict` wrote")
    if doubled := list_duplicates(stem(file) for file in files):
        raise DataError(f"two label maps of {folder} would be written as {doubled[0]}.nii.gz; rename one")
    require_new(*(output / f"{stem(file)}.nii.gz" for file in files), overwrite=overwrite)
    written = []
    with count_up(len(files), "postprocessing") as count:
        for file in files:
            label_map = read_volume(file)
            try:
                changed = order(label_map)
            except DataError as fault:
                raise DataError(f"{file}: {fault}") from fault
            written.append(write_prediction(changed, label_map, output / f"{stem(file)}.nii.gz"))
            count()
    return written


def _list_judged(run: RunFolder) -> list[Judged]:
    """Return the predictions of a run's validation cases, with their labels."""
    config, wanted = run.config(), run.split().validation
    if not wanted:
        raise DataError(f"{run.path} was trained on every case (split.validation: none), so nothing can be measured")
    task = load_task(config.data.root, require_files=False)
    require_same_task(run, task)
    cases = {case["case"]: case for case in task.training}
    judged = []
    for name in wanted:
        prediction = run.validation / f"{name}.nii.gz"
        if prediction.is_file() and name in cases:
            case = cases[name]
            judged.append(
                Judged(case=name, prediction=prediction, reference=Path(case["label"]), labelled=task.labelled(case))
            )
        elif not config.data.skip_bad:
            missing = prediction if name in cases else f"{name} in {config.data.root}"
            raise DataError(f"{run.path} lacks {missing}; write it again: volseg validate {run.path} --overwrite")
    return judged
