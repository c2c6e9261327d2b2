"""The folder of a run: where everything that a training leaves behind has its place.

::

    runs/task04_unet/
        config.yaml              every value, defaults too; runs again
        environment.json         versions, GPUs, driver, git commit
        task.json                name, channels and labels of the task
        split.json               the cases of this run, in nnU-Net's form
        checkpoints/             latest.pt, best.pt
        tensorboard/
        validation/              summary.json, predictions of the validation cases
        report.md
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.config.loading import differences, dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.splits import Split, read_splits, write_splits
from volseg.errors import CheckpointError, ConfigError
from volseg.files import replacing
from volseg.workflow.checkpoints import BEST, LATEST, load_checkpoint

__all__ = ["RunFolder"]

EXTENDABLE = ("training.epochs", "training.patience", "training.checkpoint_minutes", "output", "data.keep", "device")
"""What may differ when a run goes on: how long, where, on what; not what is trained."""


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
        """Folder of ``latest.pt`` and ``best.pt``."""
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
    def predictions(self) -> Path:
        """Folder of predictions of cases without a label."""
        return self.path / "predictions"

    def begin(self, config: ExperimentConfig, task: Task, split: Split, environment: Mapping[str, Any]) -> None:
        """Describe a new run."""
        self.require_free()
        self.write_json("environment.json", environment)
        described = {"name": task.name, "modalities": task.modalities, "labels": task.labels}
        self.write_json("task.json", described)
        write_splits(self.path / "split.json", [split])
        dump_config(config, self.config_file)  # last: a folder with a config is a whole one

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_file.exists()

    def require_free(self) -> None:
        """Raise if a run was begun here; it is left as it is.

        Raises
        ------
        ConfigError
            Names the two ways on.
        """
        if self.exists:
            raise ConfigError(
                f"{self.path} holds a run already; go on with it by --resume, or choose another folder by --output"
            )

    def require_same(self, config: ExperimentConfig) -> None:
        """Raise unless a run with ``config`` may go on here.

        Raises
        ------
        ConfigError
            Names every key that differs and must not.
        """
        lines = differences(self.config(), config)
        if changed := [line for line in lines if not line.startswith(EXTENDABLE)]:
            raise ConfigError(
                f"{self.path} was begun with another config: {'; '.join(changed)}. "
                "Restore these values, or start a new run with another --output"
            )

    def config(self) -> ExperimentConfig:
        """Read the config of the run."""
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is no run folder: it has no config.yaml; name the folder `volseg train` made"
            )
        return load_config(self.config_file)

    def task(self) -> Task:
        """Read name, channels and labels of the run's task; its cases are not part of the run folder."""
        described = json.loads((self.path / "task.json").read_text(encoding="utf-8"))
        return Task(
            name=described["name"],
            root=self.config().data.root,
            modalities=tuple(described["modalities"]),
            labels={int(value): name for value, name in described["labels"].items()},
            training=(),
            test=(),
        )

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

    def newest_checkpoint(self) -> dict[str, Any]:
        """Load the checkpoint that is furthest along: a best epoch may be newer than the latest timed writing.

        Raises
        ------
        CheckpointError
            If there is none that can be read.
        """
        found: list[dict[str, Any]] = []
        faults: list[str] = []
        for name in (LATEST, BEST):
            try:
                found.append(load_checkpoint(self.checkpoints / name))
            except CheckpointError as fault:
                faults.append(str(fault))
        if not found:
            raise CheckpointError("nothing to go on from: " + "; ".join(faults))
        return max(found, key=lambda state: (state["epoch"], state["position"]))
