"""Start a training again: the same command begins it, goes on with it, or finds it finished."""

import os

from volseg.config.schema import ExperimentConfig
from volseg.experiment.run_folder import RunFolder

__all__ = ["finished_report", "is_started_again"]


def is_started_again() -> bool:
    """Tell whether an elastic launcher has started this process again after a failure.

    Then it goes on, whatever its command says: the first attempt was told to begin.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def finished_report(config: ExperimentConfig) -> str | None:
    """Return the report of the config's run if that is finished; None if there is something left to train.

    Raises
    ------
    ConfigError
        If the folder holds a run of another config.
    """
    return RunFolder(config.folder).finished_report(config)
