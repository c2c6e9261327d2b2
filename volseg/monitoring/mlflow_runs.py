"""A training in MLflow; the package is imported when a config names the logger ``mlflow``."""

import math
from collections.abc import Mapping

from torch import Tensor

from volseg.monitoring.loggers import LoggedRun, Logger, flatten, import_package

__all__ = ["MLflow"]


class MLflow(Logger):
    """Send numbers, pictures and texts to an MLflow server, or to a folder.

    Parameters
    ----------
    experiment : str
        Under which the run is shown.
    uri : str, optional
        Of the server or the store, such as ``http://127.0.0.1:5000``; default ``$MLFLOW_TRACKING_URI``, else a local
        store of MLflow's.
    """

    def __init__(self, experiment: str = "volseg", uri: str | None = None) -> None:
        self._client = import_package("mlflow", distribution="mlflow-skinny").MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._epoch = 0

    def begin(self, run: LoggedRun) -> None:
        """Begin a run, or go on with the one of this id."""
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        before = self._client.search_runs([number], f"tags.volseg = '{run.id}'")
        begun = before or [self._client.create_run(number, run_name=run.name, tags={"volseg": run.id})]
        self._id, self._epoch = begun[0].info.run_id, run.epoch
        for key, value in {} if before else flatten(run.config).items():
            self._client.log_param(self._id, key, value)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Send the epoch's numbers; a store of tables takes no NaN."""
        self._epoch = step
        for tag, value in values.items():
            if math.isfinite(value):
                self._client.log_metric(self._id, tag, value, step=step)

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Send pictures."""
        for tag, picture in pictures.items():
            self._client.log_image(self._id, picture.permute(1, 2, 0).numpy(), f"{tag}_{step:05d}.png")

    def text(self, name: str, text: str) -> None:
        """Send a text."""
        self._client.log_text(self._id, text, f"{name}.md")

    def end(self, scores: Mapping[str, float]) -> None:
        """Send the final scores; a training without them has failed or was interrupted."""
        self.scalars(scores, self._epoch)
        self._client.set_terminated(self._id, "FINISHED" if scores else "KILLED")
