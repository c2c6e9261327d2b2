"""Whole experiments: what the command line does, as functions."""

from volseg.config.loading import load_config
from volseg.experiment.predicting import predict
from volseg.experiment.quickstart import quickstart
from volseg.experiment.report import Outcome, closing_words, dice_table
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.training import train
from volseg.experiment.validating import validate

__all__ = [
    "Outcome",
    "RunFolder",
    "closing_words",
    "dice_table",
    "load_config",
    "predict",
    "quickstart",
    "train",
    "validate",
]
