"""Validate a run again: its validation cases, any of its checkpoints."""

from collections.abc import Sequence
from functools import partial

from volseg.data.cases import Case
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.errors import DataError
from volseg.experiment.building import build_metrics, build_predictor
from volseg.experiment.out_of_memory import explaining_memory
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.sources import load_trained
from volseg.experiment.trained import Trained
from volseg.monitoring.progress import progress
from volseg.workflow.validation import Validated, Validation

__all__ = ["validate"]


def validate(folder: RunFolder, *, checkpoint: str = "latest") -> Validated:
    """Predict the run's validation cases and write their label maps and ``summary.json``.

    The latest checkpoint's go to ``validation/``, the best one's to ``validation_best/``.

    Raises
    ------
    DataError
        If the run has no validation cases, or a case is gone.
    OutOfMemoryError
        If a volume does not fit its device.
    """
    trained = load_trained(folder, checkpoint)
    config, names = trained.config, set(folder.split().validation)
    if not names:
        raise DataError(
            f"{folder.path} was trained on every case (split.validation: none); predict other cases instead"
        )
    if not config.data.root.exists():
        raise DataError(
            f"{config.data.root}, the task of {folder.path}, does not exist; put it back, or write its new place as "
            f"data.root into {folder.config_file}"
        )
    cases = [case for case in load_task(config.data.root, require_files=False).training if case["case"] in names]
    if gone := sorted(names - {case["case"] for case in cases}):
        raise DataError(f"{config.data.root} no longer holds {gone[0]} and {len(gone) - 1} more validation case(s)")
    with explaining_memory(config):
        return _validate(trained, cases, checkpoint)


def _validate(trained: Trained, cases: Sequence[Case], checkpoint: str) -> Validated:
    config, folder = trained.config, RunFolder(trained.source)
    prepared = prepare_all(cases, trained.preprocessing, keep_reference=True)
    validation = Validation(
        build_predictor(config, trained.task, trained.models, mirror=config.inference.mirror),
        prepared,
        trained.task.structures,
        ignore=trained.task.ignore,
        values=trained.task.class_values,
        metrics=build_metrics(config, trained.task),
        folder=folder.validation if checkpoint == "latest" else folder.path / f"validation_{checkpoint}",
        batch_size=config.inference.batch,
        show=partial(progress, title="validating", total=len(cases)),
    )
    return validation()
