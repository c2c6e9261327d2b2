"""A training in Weights & Biases; the package is imported when a config names the logger ``wandb``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from volseg.monitoring.loggers import LoggedRun, Logger, import_package

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases(Logger):
    """Send numbers, pictures and texts to Weights & Biases, or keep them in the run folder (``mode: offline``).

    Parameters
    ----------
    project : str
        Under which the run is shown.
    settings
        What ``wandb.init`` takes besides: ``mode``, ``entity``, ``tags``, ``group`` ...
    """

    def __init__(self, project: str = "volseg", **settings: Any) -> None:
        self._wandb = import_package("wandb", distribution="wandb")
        self._settings = {"project": project, **settings}

    def begin(self, run: LoggedRun) -> None:
        """Begin a run, or go on with the one of this id."""
        named = {"name": run.name, "id": run.id, "resume": "allow", "dir": run.folder, "config": dict(run.config)}
        self._run = self._wandb.init(**{**named, **self._settings})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Send the epoch's numbers."""
        self._run.log({**values, "epoch": step})

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Send pictures."""
        drawn = {tag: self._wandb.Image(picture.permute(1, 2, 0).numpy()) for tag, picture in pictures.items()}
        self._run.log({**drawn, "epoch": step})

    def text(self, name: str, text: str) -> None:
        """Keep a text beside the settings."""
        self._run.config.update({f"text/{name}": text}, allow_val_change=True)

    def end(self, scores: Mapping[str, float]) -> None:
        """Send the final scores, and wait until all has arrived."""
        self._run.summary.update(dict(scores))
        self._run.finish()
