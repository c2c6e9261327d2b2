"""Start a training again: the same command begins it, goes on with it, or finds it finished."""

from volseg.config.schema import ExperimentConfig
from volseg.experiment.run_folder import RunFolder

__all__ = ["finished_report"]


def finished_report(config: ExperimentConfig) -> str | None:
    """Return the report of the config's run if that is finished; None if there is something left to train.

    Raises
    ------
    ConfigError
        If the folder holds a run of another config.
    """
    return RunFolder(config.folder).finished_report(config)
