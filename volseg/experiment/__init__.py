"""Whole experiments: the functions behind the command line.

Names are loaded at first use: the process that launches a training imports nothing that trains.
"""

from typing import TYPE_CHECKING, Any

from volseg.importing import import_late

if TYPE_CHECKING:
    from volseg.checkpointing.compatible import load_finished_report as load_finished_report
    from volseg.checkpointing.folder import RunFolder as RunFolder
    from volseg.config.loading import load_config as load_config
    from volseg.experiment.configuring import configure as configure
    from volseg.experiment.configuring import format_plan as format_plan
    from volseg.experiment.configuring import is_data_set as is_data_set
    from volseg.experiment.configuring import plan_run as plan_run
    from volseg.experiment.cross_validation import cross_validate as cross_validate
    from volseg.experiment.cross_validation import format_cross_validation as format_cross_validation
    from volseg.experiment.launching import count_workers as count_workers
    from volseg.experiment.launching import train_on as train_on
    from volseg.experiment.own_components import REGISTRIES as REGISTRIES
    from volseg.experiment.own_components import list_components as list_components
    from volseg.experiment.own_components import load_components as load_components
    from volseg.experiment.own_components import register as register
    from volseg.experiment.placement.compiled_kernels import compile_beforehand as compile_beforehand
    from volseg.experiment.placement.kernel_worker import serve_kernels as serve_kernels
    from volseg.experiment.placement.plan_command import calibrate_words as calibrate_words
    from volseg.experiment.placement.plan_command import plan_training as plan_training
    from volseg.experiment.placement.plan_command import plan_volumes as plan_volumes
    from volseg.experiment.placement.plan_command import plan_words as plan_words
    from volseg.experiment.placement.plan_command import resolve_machine as resolve_machine
    from volseg.experiment.prediction.exporting import export as export
    from volseg.experiment.prediction.predicting import predict as predict
    from volseg.experiment.prediction.predicting import serve_predictions as serve_predictions
    from volseg.experiment.prediction.viewing import view as view
    from volseg.experiment.profiling import profile_training as profile_training
    from volseg.experiment.quickstarting import quickstart as quickstart
    from volseg.experiment.report import format_outcome as format_outcome
    from volseg.experiment.searching import format_search as format_search
    from volseg.experiment.searching import search as search
    from volseg.experiment.starting import require_weights as require_weights
    from volseg.experiment.training import train as train
    from volseg.experiment.validating import apply_postprocessing as apply_postprocessing
    from volseg.experiment.validating import determine_postprocessing as determine_postprocessing
    from volseg.experiment.validating import validate as validate
    from volseg.experiment.validating import validate_and_format as validate_and_format
    from volseg.experiment.verifying import verify as verify
    from volseg.parallel.devices import is_main_process as is_main_process
    from volseg.parallel.processes.group import leave_processes as leave_processes

_MODULES = {
    "checkpointing.compatible": "load_finished_report",
    "checkpointing.folder": "RunFolder",
    "config.loading": "load_config",
    "experiment.placement.compiled_kernels": "compile_beforehand",
    "experiment.configuring": "configure format_plan is_data_set plan_run",
    "experiment.cross_validation": "cross_validate format_cross_validation",
    "experiment.prediction.exporting": "export",
    "experiment.placement.kernel_worker": "serve_kernels",
    "experiment.launching": "count_workers train_on",
    "experiment.own_components": "REGISTRIES list_components load_components register",
    "experiment.placement.plan_command": "calibrate_words resolve_machine plan_training plan_volumes plan_words",
    "experiment.prediction.predicting": "predict serve_predictions",
    "experiment.profiling": "profile_training",
    "experiment.quickstarting": "quickstart",
    "experiment.report": "format_outcome",
    "experiment.searching": "format_search search",
    "experiment.starting": "require_weights",
    "experiment.training": "train",
    "experiment.validating": "apply_postprocessing determine_postprocessing validate validate_and_format",
    "experiment.verifying": "verify",
    "experiment.prediction.viewing": "view",
    "parallel.devices": "is_main_process",
    "parallel.processes.group": "leave_processes",
}
"""Names by their module."""

_HOMES = {name: f"volseg.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_late(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
