# ruff: noqa: F401  (imports for type checkers)
# mypy: implicit-reexport
"""Whole experiments: the functions behind the command line.

Names are loaded at first use: the process that launches a training imports no training code.
"""

from typing import TYPE_CHECKING, Any

from volseg.importing import import_late

if TYPE_CHECKING:
    from volseg.checkpointing.compatible import load_finished_report
    from volseg.checkpointing.folder import RunFolder
    from volseg.config.loading import load_config
    from volseg.experiment.configuring import configure, format_plan, is_data_set, plan_run
    from volseg.experiment.cross_validation import cross_validate, format_cross_validation
    from volseg.experiment.launching import count_workers, train_on
    from volseg.experiment.own_components import REGISTRIES, list_components, load_components, register
    from volseg.experiment.placement.compiled_kernels import compile_beforehand
    from volseg.experiment.placement.plan_command import (
        calibrate_words,
        plan_training,
        plan_volumes,
        plan_words,
        resolve_machine,
    )
    from volseg.experiment.prediction.exporting import export
    from volseg.experiment.prediction.predicting import predict, serve_predictions
    from volseg.experiment.prediction.viewing import view
    from volseg.experiment.profiling import profile_training
    from volseg.experiment.report import format_outcome
    from volseg.experiment.searching import format_search, search
    from volseg.experiment.starting import require_weights
    from volseg.experiment.training import train
    from volseg.experiment.trials import quickstart, verify
    from volseg.experiment.validating import (
        apply_postprocessing,
        determine_postprocessing,
        validate,
        validate_and_format,
    )
    from volseg.parallel.devices import is_main_process
    from volseg.parallel.processes.group import leave_processes

_MODULES = {
    "checkpointing.compatible": "load_finished_report",
    "checkpointing.folder": "RunFolder",
    "config.loading": "load_config",
    "experiment.placement.compiled_kernels": "compile_beforehand",
    "experiment.configuring": "configure format_plan is_data_set plan_run",
    "experiment.cross_validation": "cross_validate format_cross_validation",
    "experiment.prediction.exporting": "export",
    "experiment.launching": "count_workers train_on",
    "experiment.own_components": "REGISTRIES list_components load_components register",
    "experiment.placement.plan_command": "calibrate_words resolve_machine plan_training plan_volumes plan_words",
    "experiment.prediction.predicting": "predict serve_predictions",
    "experiment.profiling": "profile_training",
    "experiment.report": "format_outcome",
    "experiment.searching": "format_search search",
    "experiment.starting": "require_weights",
    "experiment.training": "train",
    "experiment.validating": "apply_postprocessing determine_postprocessing validate validate_and_format",
    "experiment.trials": "quickstart verify",
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
