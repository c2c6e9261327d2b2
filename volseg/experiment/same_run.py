"""Whether a run goes on as what it was begun as: the same config, data set and sums; or another one is to begin."""

from collections.abc import Mapping, Sequence
from typing import Any

from volseg.config.loading import differences
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.json_files import read_json
from volseg.data.names import list_some
from volseg.data.splits import Split
from volseg.errors import ConfigError, DataError
from volseg.experiment.run_folder import CASES, RunFolder, list_labelled
from volseg.workflow.state import TrainingState

__all__ = [
    "find_finished_report",
    "require_epochs",
    "require_same_cases",
    "require_same_config",
    "require_same_mesh",
    "require_same_split",
    "require_same_task",
]

PLACES = (
    *(
        "output",
        "data.root",
        "data.keep",
        "data.device_limit",
        "data.cache",
        "data.cache_limit",
        "split.file",
        "split.group",
    ),
    *("device", "parallel.", "training.kernels", "training.checkpoint_minutes", "training.spot", "logging."),
)
"""What may differ when a run goes on, and between the folds of a cross-validation: where things are, and on what is
trained; not what. A name that ends with a dot stands for a whole section. The cases are compared by id."""

LENGTH = ("training.epochs", "training.patience")
"""What may differ besides when a run goes on by itself; a longer fold would be another experiment."""


def find_finished_report(folder: RunFolder, config: ExperimentConfig) -> str | None:
    """Return the report of the run if it has been trained as far as ``config`` says, and validated; else None.

    Raises
    ------
    ConfigError
        If a run with ``config`` may not go on here.
    """
    if not (folder.exists and folder.report_file.exists()):
        return None
    require_same_config(folder, config)
    if any(_is_among(line.partition(":")[0], LENGTH) for line in differences(folder.config(), config.located())):
        return None
    return folder.report_file.read_text(encoding="utf-8")


def require_same_task(folder: RunFolder, task: Task) -> None:
    """Raise unless channels and labels mean what they meant when the run was begun, if that is known still.

    Raises
    ------
    DataError
        Says what they were, and are.
    """
    if not (folder.path / "task.json").exists():
        return
    begun = folder.task()
    pairs: dict[str, tuple[Any, Any]] = {
        "channels": (begun.modalities, task.modalities),
        "labels": (begun.labels, task.labels),
        "regions, in their order": (list(begun.regions.items()), list(task.regions.items())),
        "value to ignore": (begun.ignore, task.ignore),
        "labels looked for": (read_json(folder.path / "task.json").get("labelled", {}), list_labelled(task)),
    }
    if changed := [f"{what} {before} -> {now}" for what, (before, now) in pairs.items() if before != now]:
        raise DataError(
            f"the data set no longer is what {folder.path / 'task.json'} says: {'; '.join(changed)}. Restore its "
            "dataset.json, or start a new run with another --output"
        )


def require_same_split(folder: RunFolder, split: Split) -> None:
    """Raise unless ``split`` is the one with which the run was begun.

    Raises
    ------
    DataError
        Names a case that came, went or changed sides.
    """
    begun = folder.split()
    sides = ((begun.training, split.training), (begun.validation, split.validation))
    if moved := sorted({name for before, now in sides for name in set(before) ^ set(now)}):
        raise DataError(
            f"the cases are no longer those of {folder.path / 'split.json'}: {len(moved)} came, went or changed "
            f"between training and validation, first {moved[0]!r}. Restore the data set, or start a new run with "
            "another --output: what was trained on must not validate"
        )


def require_same_cases(folder: RunFolder, fingerprints: Mapping[str, str | None]) -> None:
    """Raise unless the cases are, voxel by voxel, those with which the run was begun, and the bad ones as well.

    A run of an older volseg did not write them down; it goes on with what there is.

    Raises
    ------
    DataError
        Names the cases that changed, turned bad, or were mended.
    """
    file = folder.path / CASES
    if not file.exists():
        return
    begun = read_json(file)
    if not isinstance(begun, dict) or not all(isinstance(value, str | None) for value in begun.values()):
        raise DataError(f"{file} should hold a fingerprint of each case; restore it from a copy")
    both = begun.keys() & fingerprints.keys()  # who came or went is the split's matter
    bad, was_bad = ({name for name in both if of[name] is None} for of in (fingerprints, begun))
    changed = {name for name in both - bad - was_bad if begun[name] != fingerprints[name]}
    changes = {
        "turned bad": bad - was_bad,
        "were bad and are sound now": was_bad - bad,
        "hold other voxels": changed,
    }
    if said := [f"{list_some(sorted(names))} {what}" for what, names in changes.items() if names]:
        raise DataError(
            f"{folder.path} would go on with other cases than it was begun with: {'; '.join(said)}. Restore these "
            "files as they were, or start a new run with another --output"
        )


def require_same_config(folder: RunFolder, config: ExperimentConfig, *, of: str = "run") -> None:
    """Raise unless a run with ``config`` may go on here, or stand here beside the other folds.

    Parameters
    ----------
    config : ExperimentConfig
        Of now; the one of the folder is that with which the run was begun.
    of : str
        What would be started anew: ``run``, which may be longer than it was begun, or ``cross-validation``.

    Raises
    ------
    ConfigError
        Names every key that differs and must not.
    """
    free = (*PLACES, *LENGTH) if of == "run" else PLACES
    lines = differences(folder.config(), config.located())
    if changed := [line for line in lines if not _is_among(line.partition(":")[0], free)]:
        raise ConfigError(
            f"{folder.path} was begun with another config: {'; '.join(changed)}. "
            f"Restore these values, or start a new {of} with another --output"
        )


def require_same_mesh(folder: RunFolder, config: ExperimentConfig) -> None:
    """Raise if sums were to be taken in another order than before, where the run is to be the same bits anywhere.

    Raises
    ------
    ConfigError
        Says what the run was begun with.
    """
    before, now = ((of.parallel.data or 1, of.parallel.spatial or 1) for of in (folder.config(), config))
    if config.training.deterministic and before != now:
        raise ConfigError(
            f"{folder.path} was begun with parallel.data: {before[0]}, parallel.spatial: {before[1]} and "
            f"training.deterministic: true, which gives the same bits with these numbers only, got {now[0]} and "
            f"{now[1]}; set both to what they were (fewer processes may compute them), or begin another run"
        )


def require_epochs(folder: RunFolder, state: TrainingState, epochs: int) -> None:
    """Raise if the checkpoint ``state`` is beyond ``epochs``: its weights are not those of that training's end.

    Raises
    ------
    ConfigError
        Says how far the run is.
    """
    if state.progress > (epochs, 0):
        raise ConfigError(
            f"{folder.path} has trained {state.epoch} epochs and {state.position} batches, training.epochs is "
            f"{epochs}; to go on set training.epochs to more, to validate as it is use volseg validate"
        )


def _is_among(key: str, free: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in free)
