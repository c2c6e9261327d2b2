"""Read and write the files of a run folder.

::

    runs/task04_unet/
        config.yaml              every value, including defaults; can be trained again
        planned.yaml             the plan with its reasons, if the run was started from a data set
        environment.json         versions, GPUs, driver, git commit
        task.json                name, channels and labels of the task
        network.json             planned spacing and network
        split.json               the cases of this run, in nnU-Net's form
        cases.json               a fingerprint of each case, null for bad cases
        components.json          the source of each component that is not built in; components/ keeps copies of files
        start.json               weights that were loaded from training.start_from
        memory.json              memory used by the first steps on each GPU, and the estimate
        kernels.json             times of kernels, and the chosen ones (training.kernels: measured)
        replanned.json           how the run continues after a step ran out of memory (parallel.on_oom: replan)
        checkpoints/             latest.pt, previous.pt (the latest one before it), best.pt
        history.jsonl            the numbers of each epoch, a line for each
        status.json              progress of the training, rewritten every few seconds
        times.json               where the time went, process by process
        tensorboard/
        validation/              summary.json, predictions of the validation cases
        postprocessing.json      steps that `volseg postprocess` chose
        validation/overlays/     pictures of the cases with the lowest and the highest Dice
        told.json                for the report: cases left out, remarks, published results
        report.html, report.md   result of the training: a page, and a summary
        in_use.json              lock: which process trains here
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.checkpointing.file import BEST, LATEST, PREVIOUS, load_checkpoint
from volseg.checkpointing.state import TrainingState
from volseg.config.loading import dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Split, Task, read_splits, write_splits
from volseg.data.json_files import read_json
from volseg.data.layouts.declared import read_modalities, read_regions
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment.network_plan import NetworkPlan
from volseg.files import remove_partials, replacing, require_text, require_writable
from volseg.monitoring import run_files
from volseg.reporting import NAME

logger = logging.getLogger(__name__)

ENVIRONMENT, TASK, SPLIT = DESCRIPTION = ("environment.json", "task.json", "split.json")
"""Files that a training writes before the config; a folder with a config but without them is not a run of volseg."""

NETWORK, CASES, MEMORY = "network.json", "cases.json", "memory.json"


class RunPath:
    """Descriptor for a file or a folder in a run folder; reading it returns the path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", kind: object = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, init=False)
class RunFolder:
    """Paths in a run folder, and the files that describe the run."""

    path: Path

    config_file = RunPath("config.yaml")
    task_file = RunPath(TASK)
    split_file = RunPath(SPLIT)
    checkpoints = RunPath("checkpoints")
    tensorboard = RunPath("tensorboard")
    history_file = RunPath(run_files.HISTORY)
    status_file = RunPath(run_files.STATUS)
    times_file = RunPath(run_files.TIMES)
    validation = RunPath("validation")
    report_file = RunPath("report.md")
    report_page = RunPath(NAME)
    postprocessing_file = RunPath("postprocessing.json")
    predictions = RunPath("predictions")

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    def begin(self, config: ExperimentConfig, task: Task, split: Split, files: Mapping[str, Any]) -> None:
        """Describe a new run; ``files`` are the contents of JSON files by name, including `ENVIRONMENT`."""
        self.require_free()
        described = {
            "name": task.name,
            "modalities": task.modalities,
            "labels": task.labels,
            "regions": {name: list(values) for name, values in task.regions.items()},
            "ignore": task.ignore,
            "labelled": list_labelled(task),
            "weights": list_weights(task),
        }
        for name, content in {**files, TASK: described}.items():
            self.write_json(name, content)
        write_splits(self.split_file, [split])
        self.write_config(config)  # last: a config marks a complete folder

    def write_config(self, config: ExperimentConfig) -> None:
        """Write the current config of the run."""
        dump_config(config.located(), self.config_file)

    @property
    def exists(self) -> bool:
        """Whether the folder contains a run."""
        return self.config_file.exists()

    def require_free(self) -> None:
        """Raise if the folder already contains a run, or cannot be written to.

        Raises
        ------
        ConfigError
            The message lists the alternatives.
        """
        require_text(self.path.absolute(), "the path of a run folder")
        if self.exists:
            self._require_own_config()
            raise ConfigError(
                f"{self.path} already contains a run; continue it with volseg train --resume, or choose another folder "
                "with --output"
            )
        require_writable(self.path)

    def _require_own_config(self) -> None:
        if self.exists and not all((self.path / name).exists() for name in DESCRIPTION):
            raise ConfigError(
                f"{self.config_file} would be replaced, but no training wrote it ({' or '.join(DESCRIPTION)} is "
                "missing); choose another folder with --output, or remove the file if you do not need it"
            )

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint to resume from."""
        return any((self.checkpoints / name).exists() for name in (LATEST, PREVIOUS, BEST))

    def may_go_on(self) -> bool:
        """Return whether there is a checkpoint to resume from; without one, remove the config of the run.

        Raises
        ------
        ConfigError
            If no training wrote the folder's ``config.yaml``.
        """
        if self.has_checkpoint:
            return True
        self._require_own_config()
        logger.info("%s contains no checkpoint; the training starts at the first epoch", self.path)
        self.config_file.unlink(missing_ok=True)
        return False

    def abandon(self) -> None:
        """Remove the config of a run without checkpoints, to allow another attempt; needs the folder's lock."""
        if not self.has_checkpoint:
            self.config_file.unlink(missing_ok=True)

    def forget_validation(self) -> None:
        """Remove the scores and reports of weights that the training will replace."""
        measured = (self.report_file, self.report_page, self.postprocessing_file)
        for file in (*self.path.glob("validation*/summary.json"), *measured):
            file.unlink(missing_ok=True)

    def remove_partials(self) -> None:
        """Remove the temporary files of a killed training; needs the folder's lock."""
        for folder in (self.path, self.checkpoints):
            remove_partials(folder)

    def config(self, overrides: Sequence[str] = ()) -> ExperimentConfig:
        """Read the config of the run, with some values overridden."""
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder: it has no config.yaml; name the folder that `volseg train` wrote"
            )
        return load_config(self.config_file, overrides)

    def task(self) -> Task:
        """Read name, channels, labels and regions of the run's task; its cases are not part of the run folder."""
        return self.read_task()[0]

    def read_task(self) -> tuple[Task, Mapping[str, Any]]:
        """Return the run's task, and the whole content of ``task.json``."""
        file, config = self.task_file, self.config()
        described = read_json(file)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise DataError(f"{file} should contain a task's name, modalities and labels; restore it from a backup")
        labels = read_regions(described, file)
        task = Task(
            name=described["name"],
            root=config.data.root,
            modalities=read_modalities(described.get("modalities"), file, "modalities"),
            labels=labels.labels,
            regions=labels.regions,
            ignore=labels.ignore,
            training=(),
            test=(),
            stage_labels=config.stage_labels,
        )
        return task, described

    def plan(self) -> NetworkPlan:
        """Read the network and the spacing of the run; a run without this file assumed cubic voxels."""
        file = self.path / NETWORK
        return NetworkPlan.from_json(read_json(file), file) if file.exists() else NetworkPlan()

    def split(self) -> Split:
        """Read the cases that train and the cases that validate."""
        return read_splits(self.split_file)[0]

    def write_json(self, name: str, content: Any) -> Path:
        """Write ``content`` to a JSON file of the folder, atomically."""
        return self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write ``text`` to a file of the folder, atomically."""
        path = self.path / name
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
        return path

    def history(self) -> list[run_files.EpochLine]:
        """Read the numbers of each epoch; none if the file is absent."""
        return run_files.read_history(self.history_file)

    def status(self) -> run_files.RunStatus | None:
        """Read the progress of the training; None if unknown."""
        return run_files.read_status(self.status_file)

    def times(self) -> tuple[run_files.RunPart, ...]:
        """Read the times of the run's parts, process by process; none if the file is absent."""
        return run_files.read_times(self.times_file)

    def newest_checkpoint(self) -> TrainingState:
        """Load the checkpoint with the most progress: a best epoch may be newer than the latest timed checkpoint.

        Damaged checkpoints are skipped and logged.

        Raises
        ------
        CheckpointError
            If no checkpoint can be read.
        """
        found: dict[str, TrainingState] = {}
        faults: dict[str, CheckpointError] = {}
        for name in (LATEST, BEST, PREVIOUS):
            if name == PREVIOUS and LATEST in found:  # the latest one is newer
                continue
            try:
                found[name] = load_checkpoint(self.checkpoints / name)
            except CheckpointError as fault:
                faults[name] = fault
        if not found:
            raise CheckpointError(
                f"no checkpoint to continue from: {'; '.join(map(str, faults.values()))}. Remove {self.path} or choose "
                "another --output"
            )
        newest = max(found, key=lambda name: found[name].progress)
        epoch, batch = found[newest].progress
        for name, damage in faults.items():
            if (self.checkpoints / name).exists():
                logger.warning("%s; continuing from %s, after epoch %d and batch %d", damage, newest, epoch, batch)
        return found[newest]


def list_labelled(task: Task) -> dict[str, list[int]]:
    """Return the annotated labels of each partially labelled training case."""
    found = {case["case"]: task.labelled(case) for case in task.training}
    return {name: list(values) for name, values in found.items() if values is not None}


def list_weights(task: Task) -> dict[str, float]:
    """Return the weight of each training case that has one."""
    return {case["case"]: case["weight"] for case in task.training if "weight" in case}
