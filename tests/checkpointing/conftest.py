"""The small task of tests/experiment, and configs that train on it in seconds."""

from tests.experiment.conftest import config_file, configured, task

__all__ = ["config_file", "configured", "task"]
