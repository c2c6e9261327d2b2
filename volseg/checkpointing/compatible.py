"""Check differences between a run and its continuation: a table of rules, and checks that enforce them.

`RULES` is the table; docs/interrupted.md prints it. Each check compares the run folder with the current config and
data, and raises the message of its rule. `JobFolder.claim` decides first whether a run resumes, and checks its config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from volseg.checkpointing.folder import RunFolder, list_labelled, list_weights
from volseg.checkpointing.state import TrainingState
from volseg.config.loading import differences
from volseg.config.parallel import ParallelConfig
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Split, Task
from volseg.data.json_files import read_json
from volseg.errors import ConfigError, DataError
from volseg.formatting import list_some


@dataclass(frozen=True)
class ResumeRule:
    """Rule on whether something may differ when a run resumes."""

    resume: Literal["may differ", "must be equal", "is refused", "is kept"]
    why: str
    kept_in: str = "config.yaml"
    """File of the run folder that records the former value."""
    refusal: str = ""
    """Message of the error, with the fields ``{folder}``, ``{file}`` and further fields that the check fills."""
    error: type[Exception] = ConfigError
    folds: bool = True
    """Whether the keys may also differ when a cross-validation resumes."""


RULES: Mapping[str, ResumeRule] = {
    "output": ResumeRule("may differ", "the run folder may be moved"),
    "data.root, split.file, split.group": ResumeRule("may differ", "files may be moved; cases are compared, not paths"),
    "data.keep, data.device_limit, data.cache, data.cache_limit": ResumeRule("may differ", "the cases are the same"),
    "device, parallel., training.kernels": ResumeRule("may differ", "weights agree to round-off on any devices"),
    "training.checkpoint_minutes, training.spot, logging.": ResumeRule("may differ", "they change no weights"),
    "inference.window, inference.batch": ResumeRule("may differ", "a validation that ran out of memory can use less"),
    "training.epochs, training.patience": ResumeRule("may differ", "a training may be extended", folds=False),
    "every other key": ResumeRule(
        "must be equal",
        "it decides what is trained",
        refusal="{folder} was started with another config: {changes}. Restore these values, or start a new {kind} with "
        "another --output",
    ),
    "fewer `training.epochs` than were trained": ResumeRule(
        "is refused",
        "the weights are not those of a shorter training",
        "checkpoints",
        "{folder} has trained {epoch} epochs and {batches} batches, but training.epochs is {epochs}; increase "
        "training.epochs to continue, or run volseg validate to validate these weights",
    ),
    "replicas and slabs, with `training.deterministic`": ResumeRule(
        "must be equal",
        "they determine the order of sums, and thus the bits",
        refusal="{folder} was started with {before} and training.deterministic: true, which gives the same bits only "
        "with these numbers, got {now}; restore both numbers (fewer processes may compute them), or start a new run "
        "with another --output",
    ),
    "channels, labels, regions": ResumeRule(
        "must be equal",
        "outputs of the network and scores keep their meaning",
        "task.json",
        "the data set no longer matches {file}: {changes}. Restore its dataset.json, or start a new run with "
        "another --output",
        DataError,
    ),
    "cases that train, cases that validate": ResumeRule(
        "must be equal",
        "no training case may be used for validation",
        "split.json",
        "the cases no longer match {file}: {count} were added, removed, or moved between training and validation, "
        "first {first!r}. Restore the data set, or start a new run with another --output: no training case may be "
        "used for validation",
        DataError,
    ),
    "weights of cases": ResumeRule(
        "must be equal",
        "they decide which cases are drawn",
        "task.json",
        "the weights of cases no longer match {file}: {changes}. Restore the column 'weight' of the table, or "
        "start a new run with another --output",
        DataError,
    ),
    "voxels of each case, and which cases are bad": ResumeRule(
        "must be equal",
        "the scores are for these images and labels",
        "cases.json",
        "{folder} was started with other versions of its cases: {changes}. Restore these files, "
        "or start a new run with another --output",
        DataError,
    ),
    "bytes of files of `--components`": ResumeRule(
        "must be equal",
        "a changed file may compute anything",
        "components.json",
        "{change}. Continue with {way}, or start a new run with another --output",
    ),
    "tensors of the network, groups of the optimizer": ResumeRule("must be equal", "a state must fit", "checkpoints"),
    "the GPUs": ResumeRule("may differ", "the random state of a missing GPU is skipped", "checkpoints"),
    "plan of a run from a data set": ResumeRule("is kept", "the data may have changed", "planned.yaml"),
    "network, and spacing of the data": ResumeRule("is kept", "the data may have changed", "network.json"),
    "mesh of `parallel: auto`": ResumeRule("is kept", "sums keep their order; chosen again for another number of GPUs"),
    "kernels of `training.kernels: measured`": ResumeRule("is kept", "a new measurement may differ", "kernels.json"),
    "what `parallel.on_oom: replan` changed": ResumeRule(
        "is kept", "the first way ran out of memory", "replanned.json"
    ),
}
"""Rules by keys of the config, separated by commas (a key that ends with a dot is a section), or by another subject."""


def list_keys(what: str) -> list[str]:
    """Return the keys and sections of the config that may differ by a rule; none for a rule on another subject."""
    rule = RULES[what]
    return what.split(", ") if (rule.resume, rule.kept_in) == ("may differ", "config.yaml") else []


def refuse(what: str, folder: Path, **values: object) -> NoReturn:
    """Raise the error of a rule."""
    rule = RULES[what]
    raise rule.error(rule.refusal.format(folder=folder, file=folder / rule.kept_in, **values))


def may_differ(key: str, *, folds: bool = False) -> bool:
    """Return whether a key of the config may differ on resume, or when ``folds`` of a cross-validation resume."""
    free = (name for what, rule in RULES.items() if rule.folds or not folds for name in list_keys(what))
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in free)


def require_same_config(folder: RunFolder, config: ExperimentConfig, *, folds: bool = False) -> None:
    """Raise unless a run with ``config`` may resume in this folder.

    Parameters
    ----------
    folder : RunFolder
        Folder with the config of the run's start.
    config : ExperimentConfig
        The current config.
    folds : bool
        Whether the run is a fold of a cross-validation that resumes.

    Raises
    ------
    ConfigError
        If a key that must be equal differs; the message lists all of them.
    """
    lines = differences(folder.config(), config.located())
    if changed := [line for line in lines if not may_differ(line.partition(":")[0], folds=folds)]:
        refuse("every other key", folder.path, changes="; ".join(changed), kind="cross-validation" if folds else "run")


def require_same_mesh(folder: RunFolder, config: ExperimentConfig) -> None:
    """Raise if a deterministic run would compute sums in another order than before.

    Raises
    ------
    ConfigError
        The message states the numbers of replicas and slabs, before and now.
    """
    before, now = ((of.parallel.data or 1, of.parallel.spatial or 1) for of in (folder.config(), config))
    if config.training.deterministic and before != now:
        refuse(
            "replicas and slabs, with `training.deterministic`",
            folder.path,
            before=f"parallel.data: {before[0]}, parallel.spatial: {before[1]}",
            now=f"{now[0]} and {now[1]}",
        )


def require_epochs(folder: RunFolder, state: TrainingState, epochs: int) -> None:
    """Raise if the checkpoint ``state`` is beyond ``epochs``: a shorter training would end with other weights.

    Raises
    ------
    ConfigError
        The message states the progress of the run.
    """
    if state.progress > (epochs, 0):
        refuse(
            "fewer `training.epochs` than were trained",
            folder.path,
            epoch=state.epoch,
            batches=state.position,
            epochs=epochs,
        )


def require_same_task(folder: RunFolder, task: Task, *, weights: bool = False) -> None:
    """Raise unless channels and labels are those of the run's start; skip the check without ``task.json``.

    Parameters
    ----------
    folder : RunFolder
        Folder of the run.
    task : Task
        Task that the data set describes now.
    weights : bool
        Whether cases must have the same weights as well.

    Raises
    ------
    DataError
        The message lists each change.
    """
    if not folder.task_file.exists():
        return
    begun, described = folder.read_task()
    pairs: dict[str, tuple[Any, Any]] = {
        "channels": (begun.modalities, task.modalities),
        "labels": (begun.labels, task.labels),
        "regions, in their order": (list(begun.regions.items()), list(task.regions.items())),
        "value to ignore": (begun.ignore, task.ignore),
        "labels looked for": (described.get("labelled", {}), list_labelled(task)),
    }
    if changed := [f"{what} {before} -> {now}" for what, (before, now) in pairs.items() if before != now]:
        refuse("channels, labels, regions", folder.path, changes="; ".join(changed))
    before, now = described.get("weights", {}), list_weights(task)  # a run of an older volseg has none
    names = sorted(name for name in before.keys() | now.keys() if before.get(name, 1.0) != now.get(name, 1.0))
    if weights and names:
        changed = [f"{name} {before.get(name, 1.0):g} -> {now.get(name, 1.0):g}" for name in names]
        refuse("weights of cases", folder.path, changes=list_some(changed))


def require_same_split(folder: RunFolder, split: Split) -> None:
    """Raise unless ``split`` equals the split at the start of the run.

    Raises
    ------
    DataError
        The message names a case that was added, removed or moved.
    """
    begun = folder.split()
    sides = ((begun.training, split.training), (begun.validation, split.validation))
    if moved := sorted({name for before, now in sides for name in set(before) ^ set(now)}):
        refuse("cases that train, cases that validate", folder.path, count=len(moved), first=moved[0])


def require_same_cases(folder: RunFolder, fingerprints: Mapping[str, str | None]) -> None:
    """Raise unless the cases, and the bad ones among them, equal those at the start of the run, voxel by voxel.

    A run folder of an older volseg has no fingerprints; its run resumes with the current cases.

    Raises
    ------
    DataError
        The message names the cases that changed, turned bad, or were repaired.
    """
    file = folder.path / "cases.json"
    if not file.exists():
        return
    begun = read_json(file)
    if not isinstance(begun, dict) or not all(isinstance(value, str | None) for value in begun.values()):
        raise DataError(f"{file} should contain a fingerprint of each case; restore it from a backup")
    both = begun.keys() & fingerprints.keys()  # the split covers added and removed cases
    bad, was_bad = ({name for name in both if of[name] is None} for of in (fingerprints, begun))
    changes = {
        "are bad now": bad - was_bad,
        "were bad but are valid now": was_bad - bad,
        "have other voxels": {name for name in both - bad - was_bad if begun[name] != fingerprints[name]},
    }
    if changed := [f"{list_some(sorted(names))} {what}" for what, names in changes.items() if names]:
        refuse("voxels of each case, and which cases are bad", folder.path, changes="; ".join(changed))


def load_finished_report(folder: RunFolder, config: ExperimentConfig) -> str | None:
    """Return the report of the run if it is trained to the end of ``config`` and validated; else None.

    Raises
    ------
    ConfigError
        If a run with ``config`` may not resume in this folder.
    """
    if not (folder.exists and folder.report_file.exists()):
        return None
    require_same_config(folder, config)
    changed = [line.partition(":")[0] for line in differences(folder.config(), config.located())]
    if not all(may_differ(key, folds=True) for key in changed):  # a longer training, or another patience
        return None
    return folder.report_file.read_text(encoding="utf-8")


def load_mesh(config: ExperimentConfig, num_gpus: int) -> ParallelConfig | None:
    """Return ``parallel`` of the run's start; None if the run started on another number of GPUs.

    The choice of ``parallel: auto`` may use fewer GPUs than were available. Timeout and ``on_oom`` are current values.
    """
    folder, now = RunFolder(config.folder), config.parallel
    begun = folder.config().parallel if folder.exists else now
    if num_gpus not in (begun.num_gpus, begun.chosen_for):
        return None
    return begun.model_copy(update={"timeout": now.timeout, "on_oom": now.on_oom})
