"""Train 3D medical segmentation networks; several GPUs behave as one large one.

The public names are loaded when they are first used, so that ``import volseg`` and the command line answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from volseg.version import __version__

if TYPE_CHECKING:
    from volseg.experiment.own_components import load_components, register
    from volseg.inference.predictor import Predictor
    from volseg.parallel import FastKernels, ModelParallel
    from volseg.parallel.candidates import plan
    from volseg.workflow import Checkpoints, Hook, Named, Patience, Testing, Training, Validation

__all__ = [
    "Checkpoints",
    "FastKernels",
    "Hook",
    "ModelParallel",
    "Named",
    "Patience",
    "Predictor",
    "Testing",
    "Training",
    "Validation",
    "__version__",
    "load_components",
    "plan",
    "register",
]

_HOMES = {
    "FastKernels": "volseg.parallel",
    "ModelParallel": "volseg.parallel",
    "Predictor": "volseg.inference.predictor",
    "load_components": "volseg.experiment.own_components",
    "plan": "volseg.parallel.candidates",
    "register": "volseg.experiment.own_components",
}


def __getattr__(name: str) -> Any:
    if name in ("experiment", "parallel"):  # volseg.experiment.train; volseg.parallel.verify, whole
        return import_module(f"volseg.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'volseg' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "volseg.workflow")), name)
