"""The folder of a run: where everything that a training leaves behind has its place.

::

    runs/task04_unet/
        config.yaml              every value, defaults too; runs again
        planned.yaml             the plan, with reasons, of a run that was given a data set and no config
        environment.json         versions, GPUs, driver, git commit
        task.json                name, channels and labels of the task
        network.json             spacing and network as they were planned
        split.json               the cases of this run, in nnU-Net's form
        components.json          where each component came from that is not built in; components/ keeps their files
        start.json               what was taken of the weights that training.start_from names
        cases.json               a fingerprint of each, null of those that were bad
        memory.json              what the first steps took of each GPU, and what was forecast
        replanned.json           how the run goes on since a step was out of memory (parallel.on_oom: replan)
        checkpoints/             latest.pt, previous.pt (the latest one before it), best.pt
        tensorboard/
        validation/              summary.json, predictions of the validation cases
        postprocessing.json      what `volseg postprocess` found to help
        report.md
        in_use.json              who trains here, while somebody does
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.config.loading import differences, dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.json_files import read_json
from volseg.data.layouts.declared import read_modalities, read_regions
from volseg.data.names import list_some
from volseg.data.splits import Split, read_splits, write_splits
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment.network_plan import NetworkPlan
from volseg.files import remove_partials, replacing
from volseg.workflow.checkpoints import BEST, LATEST, PREVIOUS, load_checkpoint
from volseg.workflow.state import TrainingState

__all__ = ["MEMORY", "RunFolder"]

logger = logging.getLogger(__name__)

PLACES = (
    *("output", "data.root", "data.keep", "data.device_limit", "data.cache", "data.cache_limit", "split.file"),
    *("device", "parallel.", "training.kernels", "training.checkpoint_minutes", "training.spot"),
)
"""What may differ when a run goes on, and between the folds of a cross-validation: where things are, and on what is
trained; not what. A name that ends with a dot stands for a whole section. The cases are compared by id."""

LENGTH = ("training.epochs", "training.patience")
"""What may differ besides when a run goes on by itself; a longer fold would be another experiment."""

CASES = "cases.json"
"""Ids of the cases of the split that were bad when the run was begun."""

NETWORK = "network.json"
"""Which network was planned, and for which voxel sides."""

MEMORY = "memory.json"
"""What the first steps took of each GPU, and what was forecast."""

DESCRIPTION = ("environment.json", "task.json", "split.json")
"""What a training writes before the config; a config without them is somebody's own."""


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run, and the files that describe it."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of ``latest.pt``, ``previous.pt`` and ``best.pt``."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files."""
        return self.path / "tensorboard"

    @property
    def validation(self) -> Path:
        """Folder of ``summary.json`` and the predictions it is about."""
        return self.path / "validation"

    @property
    def report_file(self) -> Path:
        """What a finished training came to."""
        return self.path / "report.md"

    @property
    def postprocessing_file(self) -> Path:
        """Which postprocessing helps, once that was measured."""
        return self.path / "postprocessing.json"

    @property
    def predictions(self) -> Path:
        """Folder of predictions of cases without a label."""
        return self.path / "predictions"

    def begin(
        self,
        config: ExperimentConfig,
        task: Task,
        split: Split,
        environment: Mapping[str, Any],
        fingerprints: Mapping[str, str | None] | None = None,
        plan: NetworkPlan | None = None,
    ) -> None:
        """Describe a new run; see `PreparedCases.fingerprints`."""
        self.require_free()
        self.write_json(CASES, dict(fingerprints or {}))
        self.write_json("environment.json", environment)
        described = {
            "name": task.name,
            "modalities": task.modalities,
            "labels": task.labels,
            "regions": {name: list(values) for name, values in task.regions.items()},
            "ignore": task.ignore,
            "labelled": _list_labelled(task),
        }
        self.write_json("task.json", described)
        if plan is not None:
            self.write_json(NETWORK, plan.as_json())
        write_splits(self.path / "split.json", [split])
        dump_config(config.located(), self.config_file)  # last: a folder with a config is a whole one

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_file.exists()

    def require_free(self) -> None:
        """Raise if a run was begun here, which is left as it is, or if none can be written here.

        Raises
        ------
        ConfigError
            Names the ways on.
        """
        if self.exists:
            self._require_own_config()
            raise ConfigError(
                f"{self.path} holds a run already; go on with it by --resume, or choose another folder by --output"
            )
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(f"{parent} is no folder that can be written to; choose another one by --output")

    def _require_own_config(self) -> None:
        if self.exists and not all((self.path / name).exists() for name in DESCRIPTION):
            raise ConfigError(
                f"{self.config_file} would be replaced, but no training wrote it ({' or '.join(DESCRIPTION)} is "
                "missing); choose another folder by --output, or remove it if it is not needed"
            )

    def may_go_on(self) -> bool:
        """Return whether there is a checkpoint to go on from; a run that was lost before its first one is forgotten.

        Raises
        ------
        ConfigError
            If the folder's ``config.yaml`` is none that a training wrote.
        """
        if any((self.checkpoints / name).exists() for name in (LATEST, PREVIOUS, BEST)):
            return True
        self._require_own_config()
        logger.info("%s holds no checkpoint; the training begins at its first epoch", self.path)
        self.config_file.unlink(missing_ok=True)
        return False

    def abandon(self) -> None:
        """Make room for another attempt, as nothing was trained in this one; to be called with the folder's lock."""
        if not any(self.checkpoints.glob("*.pt")):
            self.config_file.unlink(missing_ok=True)

    def forget_validation(self) -> None:
        """Remove what was measured with weights that the training replaces."""
        for file in (*self.path.glob("validation*/summary.json"), self.report_file, self.postprocessing_file):
            file.unlink(missing_ok=True)

    def remove_partials(self) -> None:
        """Remove what a killed training was writing; only with the folder's lock."""
        for folder in (self.path, self.checkpoints):
            remove_partials(folder)

    def finished_report(self, config: ExperimentConfig) -> str | None:
        """Return the report of the run if it has been trained as far as ``config`` says, and validated; else None.

        Raises
        ------
        ConfigError
            If a run with ``config`` may not go on here.
        """
        if not (self.exists and self.report_file.exists()):
            return None
        self.require_same(config)
        if any(_is_among(line.partition(":")[0], LENGTH) for line in differences(self.config(), config.located())):
            return None
        return self.report_file.read_text(encoding="utf-8")

    def require_same_task(self, task: Task) -> None:
        """Raise unless channels and labels mean what they meant when the run was begun, if that is known still.

        Raises
        ------
        DataError
            Says what they were, and are.
        """
        if not (self.path / "task.json").exists():
            return
        begun = self.task()
        pairs: dict[str, tuple[Any, Any]] = {
            "channels": (begun.modalities, task.modalities),
            "labels": (begun.labels, task.labels),
            "regions, in their order": (list(begun.regions.items()), list(task.regions.items())),
            "value to ignore": (begun.ignore, task.ignore),
            "labels looked for": (read_json(self.path / "task.json").get("labelled", {}), _list_labelled(task)),
        }
        if changed := [f"{what} {before} -> {now}" for what, (before, now) in pairs.items() if before != now]:
            raise DataError(
                f"the data set no longer is what {self.path / 'task.json'} says: {'; '.join(changed)}. Restore its "
                "dataset.json, or start a new run with another --output"
            )

    def require_same_split(self, split: Split) -> None:
        """Raise unless ``split`` is the one with which the run was begun.

        Raises
        ------
        DataError
            Names a case that came, went or changed sides.
        """
        begun = self.split()
        sides = ((begun.training, split.training), (begun.validation, split.validation))
        if moved := sorted({name for before, now in sides for name in set(before) ^ set(now)}):
            raise DataError(
                f"the cases are no longer those of {self.path / 'split.json'}: {len(moved)} came, went or changed "
                f"between training and validation, first {moved[0]!r}. Restore the data set, or start a new run with "
                "another --output: what was trained on must not validate"
            )

    def require_same_cases(self, fingerprints: Mapping[str, str | None]) -> None:
        """Raise unless the cases are, voxel by voxel, those with which the run was begun, and the bad ones as well.

        A run of an older volseg did not write them down; it goes on with what there is.

        Raises
        ------
        DataError
            Names the cases that changed, turned bad, or were mended.
        """
        file = self.path / CASES
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
                f"{self.path} would go on with other cases than it was begun with: {'; '.join(said)}. Restore these "
                "files as they were, or start a new run with another --output"
            )

    def require_same(self, config: ExperimentConfig, *, of: str = "run") -> None:
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
        lines = differences(self.config(), config.located())
        if changed := [line for line in lines if not _is_among(line.partition(":")[0], free)]:
            raise ConfigError(
                f"{self.path} was begun with another config: {'; '.join(changed)}. "
                f"Restore these values, or start a new {of} with another --output"
            )

    def require_same_mesh(self, config: ExperimentConfig) -> None:
        """Raise if sums were to be taken in another order than before, where the run is to be the same bits anywhere.

        Raises
        ------
        ConfigError
            Says what the run was begun with.
        """
        before, now = ((of.parallel.data or 1, of.parallel.spatial or 1) for of in (self.config(), config))
        if config.training.deterministic and before != now:
            raise ConfigError(
                f"{self.path} was begun with parallel.data: {before[0]}, parallel.spatial: {before[1]} and "
                f"training.deterministic: true, which gives the same bits with these numbers only, got {now[0]} and "
                f"{now[1]}; set both to what they were (fewer processes may compute them), or begin another run"
            )

    def require_epochs(self, state: TrainingState, epochs: int) -> None:
        """Raise if the checkpoint ``state`` is beyond ``epochs``: its weights are not those of that training's end.

        Raises
        ------
        ConfigError
            Says how far the run is.
        """
        if state.progress > (epochs, 0):
            raise ConfigError(
                f"{self.path} has trained {state.epoch} epochs and {state.position} batches, training.epochs is "
                f"{epochs}; to go on set training.epochs to more, to validate as it is use volseg validate"
            )

    def go_on(self, config: ExperimentConfig) -> None:
        """Describe the run as it goes on: longer, on other devices, with its data elsewhere."""
        dump_config(config.located(), self.config_file)

    def config(self, overrides: Sequence[str] = ()) -> ExperimentConfig:
        """Read the config of the run, with some values overridden."""
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is no run folder: it has no config.yaml; name the folder `volseg train` made"
            )
        return load_config(self.config_file, overrides)

    def task(self) -> Task:
        """Read name, channels, labels and regions of the run's task; its cases are not part of the run folder."""
        file = self.path / "task.json"
        described = read_json(file)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise DataError(f"{file} should hold the name, modalities and labels of a task; restore it from a copy")
        labels = read_regions(described, file)
        return Task(
            name=described["name"],
            root=self.config().data.root,
            modalities=read_modalities(described.get("modalities"), file, "modalities"),
            labels=labels.labels,
            regions=labels.regions,
            ignore=labels.ignore,
            training=(),
            test=(),
        )

    def plan(self) -> NetworkPlan:
        """Read with which network and spacing the run was begun; a run of an older volseg took voxels for cubes."""
        file = self.path / NETWORK
        return NetworkPlan.from_json(read_json(file), file) if file.exists() else NetworkPlan()

    def split(self) -> Split:
        """Read which cases train and which validate."""
        return read_splits(self.path / "split.json")[0]

    def write_json(self, name: str, content: Any) -> Path:
        """Write ``content`` to a file of the folder, whole or not at all."""
        return self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write ``text`` to a file of the folder, whole or not at all."""
        path = self.path / name
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
        return path

    def newest_checkpoint(self) -> TrainingState:
        """Load the checkpoint that is furthest along: a best epoch may be newer than the latest timed writing.

        A damaged one is passed over and named.

        Raises
        ------
        CheckpointError
            If there is none that can be read.
        """
        found: dict[str, TrainingState] = {}
        faults: dict[str, CheckpointError] = {}
        for name in (LATEST, BEST, PREVIOUS):
            if name == PREVIOUS and LATEST in found:  # which is newer
                continue
            try:
                found[name] = load_checkpoint(self.checkpoints / name)
            except CheckpointError as fault:
                faults[name] = fault
        if not found:
            raise CheckpointError(
                f"nothing to go on from: {'; '.join(map(str, faults.values()))}. Remove {self.path} or choose another "
                "--output"
            )
        newest = max(found, key=lambda name: found[name].progress)
        epoch, batch = found[newest].progress
        for name, told in faults.items():
            if (self.checkpoints / name).exists():
                logger.warning("%s; going on from %s, after epoch %d and batch %d", told, newest, epoch, batch)
        return found[newest]


def _list_labelled(task: Task) -> dict[str, list[int]]:
    """Return what was looked for in the partially labelled training cases."""
    found = {case["case"]: task.labelled(case) for case in task.training}
    return {name: list(values) for name, values in found.items() if values is not None}


def _is_among(key: str, free: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in free)
