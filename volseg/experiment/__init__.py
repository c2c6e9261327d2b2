"""Whole experiments: what the command line does, as functions.

The names are loaded when they are first used: who starts the processes of a training imports nothing that trains.
"""

from typing import TYPE_CHECKING, Any

from volseg.importing import import_late

if TYPE_CHECKING:
    from volseg.checkpointing.compatible import find_finished_report
    from volseg.checkpointing.folder import RunFolder
    from volseg.config.loading import load_config
    from volseg.experiment.compiled_kernels import compile_beforehand, serve_kernels
    from volseg.experiment.configuring import configure, configure_words, is_data_set, plan_run
    from volseg.experiment.cross_validation import cross_validate
    from volseg.experiment.exporting import export
    from volseg.experiment.folds import CrossValidated, cross_validation_words
    from volseg.experiment.launching import count_workers, train_on
    from volseg.experiment.machines import calibrate_words, find_machine
    from volseg.experiment.own_components import REGISTRIES, list_components, load_components, register
    from volseg.experiment.plan_command import plan_training, plan_volumes, plan_words
    from volseg.experiment.predicting import predict, serve_predictions
    from volseg.experiment.profiling import profile_training
    from volseg.experiment.quickstarting import quickstart
    from volseg.experiment.report import Outcome, closing_words, dice_table
    from volseg.experiment.starting import require_weights
    from volseg.experiment.training import train
    from volseg.experiment.validating import apply_postprocessing, determine_postprocessing, validate, validate_words
    from volseg.experiment.verifying import verify
    from volseg.parallel.devices import is_main_process
    from volseg.parallel.processes.group import leave_processes

__all__ = [
    "REGISTRIES",
    "CrossValidated",
    "Outcome",
    "RunFolder",
    "apply_postprocessing",
    "calibrate_words",
    "closing_words",
    "compile_beforehand",
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
    "require_weights",
    "serve_kernels",
    "serve_predictions",
    "train",
    "train_on",
    "validate",
    "validate_words",
    "verify",
]

_HOMES = {
    "REGISTRIES": "volseg.experiment.own_components",
    "CrossValidated": "volseg.experiment.folds",
    "Outcome": "volseg.experiment.report",
    "RunFolder": "volseg.checkpointing.folder",
    "apply_postprocessing": "volseg.experiment.validating",
    "calibrate_words": "volseg.experiment.machines",
    "closing_words": "volseg.experiment.report",
    "compile_beforehand": "volseg.experiment.compiled_kernels",
    "configure": "volseg.experiment.configuring",
    "configure_words": "volseg.experiment.configuring",
    "count_workers": "volseg.experiment.launching",
    "cross_validate": "volseg.experiment.cross_validation",
    "cross_validation_words": "volseg.experiment.folds",
    "determine_postprocessing": "volseg.experiment.validating",
    "dice_table": "volseg.experiment.report",
    "export": "volseg.experiment.exporting",
    "find_finished_report": "volseg.checkpointing.compatible",
    "find_machine": "volseg.experiment.machines",
    "is_data_set": "volseg.experiment.configuring",
    "is_main_process": "volseg.parallel.devices",
    "leave_processes": "volseg.parallel.processes.group",
    "list_components": "volseg.experiment.own_components",
    "load_components": "volseg.experiment.own_components",
    "load_config": "volseg.config.loading",
    "plan_run": "volseg.experiment.configuring",
    "plan_training": "volseg.experiment.plan_command",
    "plan_volumes": "volseg.experiment.plan_command",
    "plan_words": "volseg.experiment.plan_command",
    "predict": "volseg.experiment.predicting",
    "profile_training": "volseg.experiment.profiling",
    "quickstart": "volseg.experiment.quickstarting",
    "register": "volseg.experiment.own_components",
    "serve_kernels": "volseg.experiment.compiled_kernels",
    "serve_predictions": "volseg.experiment.predicting",
    "require_weights": "volseg.experiment.starting",
    "train": "volseg.experiment.training",
    "train_on": "volseg.experiment.launching",
    "validate": "volseg.experiment.validating",
    "validate_words": "volseg.experiment.validating",
    "verify": "volseg.experiment.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_late(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
