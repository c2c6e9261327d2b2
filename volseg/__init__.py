"""Train 3D medical segmentation networks; several GPUs behave as one large one.

Whole experiments, from a YAML file: `load_config`, `train`, `cross_validate`, `validate`, `predict`.
A trained model that stays in memory: `load`.
Data: `load_task`, `make_task`, `read_volume`. Scores of existing label maps: `evaluate_folders`.
Your own training loop: `Training`, `Validation`, `Testing`, `Predictor`, `Named`, `build_network`, and the hooks
`Hook`, `Checkpoints`, `Patience`, `Progress` and `TrainingLog`, which passes values to loggers such as `TensorBoard`.
Networks over several GPUs: `ModelParallel`, `FastKernels`, `plan`. Your components in configs: `register`,
`load_components`. Every exception that volseg raises on purpose is a `VolsegError`.

Names are imported at their first use, so that ``import volseg`` and the command line respond at once.
"""

from volseg.importing import import_late, name_user
from volseg.version import __version__ as __version__

TYPE_CHECKING = False  # typing is not imported: it takes longer to import than this package
if TYPE_CHECKING:  # type checkers export a name that is imported under its own name
    from volseg import experiment as experiment
    from volseg import parallel as parallel
    from volseg.config.loading import load_config as load_config
    from volseg.data.layouts import load_task as load_task
    from volseg.data.readers import read_volume as read_volume
    from volseg.data.synthetic import make_task as make_task
    from volseg.errors import VolsegError as VolsegError
    from volseg.estimate import plan as plan
    from volseg.evaluation.folders import evaluate_folders as evaluate_folders
    from volseg.experiment.cross_validation import cross_validate as cross_validate
    from volseg.experiment.own_components import load_components as load_components
    from volseg.experiment.own_components import register as register
    from volseg.experiment.prediction.loaded import load as load
    from volseg.experiment.prediction.predicting import predict as predict
    from volseg.experiment.training import train as train
    from volseg.experiment.validating import validate as validate
    from volseg.inference.predictor import Predictor as Predictor
    from volseg.models.networks import build_network as build_network
    from volseg.monitoring.loggers import TensorBoard as TensorBoard
    from volseg.monitoring.progress import Progress as Progress
    from volseg.monitoring.training_log import TrainingLog as TrainingLog
    from volseg.parallel import FastKernels as FastKernels
    from volseg.parallel import ModelParallel as ModelParallel
    from volseg.workflow import Checkpoints as Checkpoints
    from volseg.workflow import Hook as Hook
    from volseg.workflow import Named as Named
    from volseg.workflow import Patience as Patience
    from volseg.workflow import Testing as Testing
    from volseg.workflow import Training as Training
    from volseg.workflow import Validation as Validation

_MODULES = {
    "config.loading": "load_config",
    "data.layouts": "load_task",
    "data.readers": "read_volume",
    "data.synthetic": "make_task",
    "errors": "VolsegError",
    "estimate": "plan",
    "evaluation.folders": "evaluate_folders",
    "experiment.cross_validation": "cross_validate",
    "experiment.own_components": "load_components register",
    "experiment.prediction.loaded": "load",
    "experiment.prediction.predicting": "predict",
    "experiment.training": "train",
    "experiment.validating": "validate",
    "inference.predictor": "Predictor",
    "models.networks": "build_network",
    "monitoring.loggers": "TensorBoard",
    "monitoring.progress": "Progress",
    "monitoring.training_log": "TrainingLog",
    "parallel": "FastKernels ModelParallel",
    "workflow": "Checkpoints Hook Named Patience Testing Training Validation",
}
"""Public names by their module."""

_HOMES = {name: f"volseg.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])

name_user()

_PACKAGES = ("experiment", "parallel")
"""Subpackages available after ``import volseg``: volseg.experiment.configure; volseg.parallel.verify."""


if not TYPE_CHECKING:  # else a type checker would accept any name as an attribute of the package

    def __getattr__(name):
        if name in _PACKAGES:
            return import_late(f"volseg.{name}")
        if name not in _HOMES:
            raise AttributeError(_explain_absence(name))
        return getattr(import_late(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})


def _explain_absence(name: str) -> str:
    from difflib import get_close_matches  # imported here because it is rarely needed

    near = "" if name.startswith("_") else "".join(get_close_matches(name, __all__, n=1))
    return f"module 'volseg' has no attribute {name!r}" + (f"; did you mean {near!r}?" if near else "")
