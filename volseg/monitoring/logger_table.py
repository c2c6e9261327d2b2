"""Which loggers a config may name under ``logging.loggers``; packages that one needs are imported when it is made."""

from collections.abc import Mapping
from typing import Any

from volseg.config.registry import Registry
from volseg.errors import ConfigError
from volseg.monitoring.loggers import History, Logger
from volseg.monitoring.mlflow_runs import MLflow
from volseg.monitoring.tensorboard import TensorBoard
from volseg.monitoring.weights_and_biases import WeightsAndBiases

__all__ = ["LOGGERS", "build_logger"]

LOGGERS = Registry(
    "logger",
    {"tensorboard": TensorBoard, "history": History, "wandb": WeightsAndBiases, "mlflow": MLflow},
    group="volseg.loggers",
)
"""What ``logging.loggers`` in a config may name."""


def build_logger(spec: Mapping[str, Any]) -> Logger:
    """Return the logger that a config names.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, a package that is not installed, or a component that makes no `Logger`.
    """
    logger = LOGGERS.build(spec)
    if not isinstance(logger, Logger):
        raise ConfigError(
            f"logger {spec['name']} must be a volseg.monitoring.loggers.Logger, got a {type(logger).__name__}; derive "
            "its class"
        )
    return logger
