"""Whole experiments: what the command line does, as functions.

The names are loaded when they are first used: who starts the processes of a training imports nothing that trains.
"""

from typing import TYPE_CHECKING, Any

from volseg.importing import import_late

if TYPE_CHECKING:
    from volseg.checkpointing.compatible import load_finished_report
    from volseg.checkpointing.folder import RunFolder
    from volseg.config.loading import load_config
    from volseg.experiment.compiled_kernels import compile_beforehand
    from volseg.experiment.configuring import configure, format_plan, is_data_set, plan_run
    from volseg.experiment.cross_validation import cross_validate
    from volseg.experiment.cross_validation_report import format_cross_validation
    from volseg.experiment.exporting import export
    from volseg.experiment.kernel_worker import serve_kernels
    from volseg.experiment.launching import count_workers, train_on
    from volseg.experiment.machines import calibrate_words, find_machine
    from volseg.experiment.own_components import REGISTRIES, list_components, load_components, register
    from volseg.experiment.plan_command import plan_training, plan_volumes, plan_words
    from volseg.experiment.postprocessing import apply_postprocessing, determine_postprocessing
    from volseg.experiment.predicting import predict, serve_predictions
    from volseg.experiment.profiling import profile_training
    from volseg.experiment.quickstarting import quickstart
    from volseg.experiment.report import format_outcome
    from volseg.experiment.searching import format_search, search
    from volseg.experiment.starting import require_weights
    from volseg.experiment.training import train
    from volseg.experiment.validating import validate, validate_and_format
    from volseg.experiment.verifying import verify
    from volseg.experiment.viewing import view
    from volseg.parallel.devices import is_main_process
    from volseg.parallel.processes.group import leave_processes

__all__ = [
    "REGISTRIES",
    "RunFolder",
    "apply_postprocessing",
    "calibrate_words",
    "compile_beforehand",
    "configure",
    "count_workers",
    "cross_validate",
    "determine_postprocessing",
    "export",
    "find_machine",
    "format_cross_validation",
    "format_outcome",
    "format_plan",
    "format_search",
    "is_data_set",
    "is_main_process",
    "leave_processes",
    "list_components",
    "load_components",
    "load_config",
    "load_finished_report",
    "plan_run",
    "plan_training",
    "plan_volumes",
    "plan_words",
    "predict",
    "profile_training",
    "quickstart",
    "register",
    "require_weights",
    "search",
    "serve_kernels",
    "serve_predictions",
    "train",
    "train_on",
    "validate",
    "validate_and_format",
    "verify",
    "view",
]

_MODULES = {
    "checkpointing.compatible": "load_finished_report",
    "checkpointing.folder": "RunFolder",
    "config.loading": "load_config",
    "experiment.compiled_kernels": "compile_beforehand",
    "experiment.configuring": "configure format_plan is_data_set plan_run",
    "experiment.cross_validation": "cross_validate",
    "experiment.cross_validation_report": "format_cross_validation",
    "experiment.exporting": "export",
    "experiment.kernel_worker": "serve_kernels",
    "experiment.launching": "count_workers train_on",
    "experiment.machines": "calibrate_words find_machine",
    "experiment.own_components": "REGISTRIES list_components load_components register",
    "experiment.plan_command": "plan_training plan_volumes plan_words",
    "experiment.postprocessing": "apply_postprocessing determine_postprocessing",
    "experiment.predicting": "predict serve_predictions",
    "experiment.profiling": "profile_training",
    "experiment.quickstarting": "quickstart",
    "experiment.report": "format_outcome",
    "experiment.searching": "format_search search",
    "experiment.starting": "require_weights",
    "experiment.training": "train",
    "experiment.validating": "validate validate_and_format",
    "experiment.verifying": "verify",
    "experiment.viewing": "view",
    "parallel.devices": "is_main_process",
    "parallel.processes.group": "leave_processes",
}
"""Names by the module that has them."""

_HOMES = {name: f"volseg.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_late(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
