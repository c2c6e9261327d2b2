"""Measure which postprocessing helps a run or a cross-validation, and apply it to a folder of label maps."""

from functools import partial
from pathlib import Path

from volseg.checkpointing.compatible import require_same_task
from volseg.checkpointing.folder import RunFolder
from volseg.data.layouts import load_task
from volseg.data.layouts.files import list_images
from volseg.data.names import find_doubled
from volseg.data.readers import read_volume, stem
from volseg.errors import ConfigError, DataError
from volseg.experiment.sources import require_runs
from volseg.files import require_new
from volseg.inference.measured_postprocessing import Judged, MeasuredPostprocessing, measure_postprocessing
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.writing import write_prediction
from volseg.monitoring.progress import count_up, progress

__all__ = ["apply_postprocessing", "determine_postprocessing"]


def determine_postprocessing(source: str | Path) -> MeasuredPostprocessing:
    """Try every step on the validation predictions of a run, or the out-of-fold ones of a cross-validation.

    Writes ``postprocessing.json`` into ``source``.

    Parameters
    ----------
    source : path
        A run folder, or the folder of a cross-validation.

    Raises
    ------
    ConfigError
        If ``source`` is neither.
    DataError
        If a validation case was not predicted, or its label is gone.
    """
    runs = require_runs(source)
    judged = [case for run in runs for case in _list_judged(run)]
    if doubled := find_doubled(case.case for case in judged):
        raise DataError(f"{doubled[0]} validates in two folds of {source}; it would count twice")
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
        Holds ``postprocessing.json``, or is that file.
    folder : path
        Of label maps of the same task, predicted by any program.
    output : path
        Another folder.
    overwrite : bool
        Whether label maps that are there are replaced.

    Raises
    ------
    ConfigError
        If the two folders are one, or a label map is there and ``overwrite`` is off.
    DataError
        If there is no label map, or one has values of another task.
    """
    source, folder, output = Path(source), Path(folder), Path(output)
    order = Postprocessing.load(RunFolder(source).postprocessing_file if source.is_dir() else source)
    if folder.resolve() == output.resolve():
        raise ConfigError(f"{output} holds the label maps as they are; name another folder by --output")
    files = list_images(folder) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is no folder of label maps; name the one that `volseg predict` wrote")
    if doubled := find_doubled(stem(file) for file in files):
        raise DataError(f"two label maps of {folder} would be written as {doubled[0]}.nii.gz; put them apart")
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
        raise DataError(f"{run.path} was trained on every case (split.validation: none), and nothing can be measured")
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
            raise DataError(f"{run.path} lacks {missing}; write its predictions anew: volseg validate {run.path}")
    return judged
