"""Whole experiments: what the command line does, as functions."""

from volseg.config.loading import load_config
from volseg.experiment.configuring import configure, configure_words, is_data_set, plan_run
from volseg.experiment.cross_validation import cross_validate
from volseg.experiment.cross_validation_report import CrossValidated, cross_validation_words
from volseg.experiment.exporting import export
from volseg.experiment.launching import count_workers, train_on
from volseg.experiment.machines import calibrate_words, find_machine
from volseg.experiment.own_components import REGISTRIES, list_components, load_components, register
from volseg.experiment.postprocessing import apply_postprocessing, determine_postprocessing
from volseg.experiment.predicting import predict, serve_predictions
from volseg.experiment.profiling import profile_training
from volseg.experiment.quickstart import quickstart
from volseg.experiment.report import Outcome, closing_words, dice_table
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.same_run import find_finished_report
from volseg.experiment.training import train
from volseg.experiment.validating import validate, validate_words
from volseg.experiment.verifying import verify
from volseg.experiment.what_fits import plan_training, plan_volumes, plan_words
from volseg.parallel.devices import is_main_process
from volseg.parallel.processes import leave_processes

__all__ = [
    "REGISTRIES",
    "CrossValidated",
    "Outcome",
    "RunFolder",
    "apply_postprocessing",
    "calibrate_words",
    "closing_words",
    "configure",
    "configure_words",
    "count_workers",
    "cross_validate",
    "cross_validation_words",
    "determine_postprocessing",
    "dice_table",
    "export",
    "find_finished_report",
    "find_machine",
    "is_data_set",
    "is_main_process",
    "leave_processes",
    "list_components",
    "load_components",
    "load_config",
    "plan_run",
    "plan_training",
    "plan_volumes",
    "plan_words",
    "predict",
    "profile_training",
    "quickstart",
    "register",
    "serve_predictions",
    "train",
    "train_on",
    "validate",
    "validate_words",
    "verify",
]
