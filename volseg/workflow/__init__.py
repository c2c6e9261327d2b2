"""Train, validate and test with named modules; hooks observe each training."""

from volseg.checkpointing.file import load_checkpoint, save_checkpoint
from volseg.checkpointing.state import EpochRecord, TrainingState
from volseg.workflow.hooks import Checkpoints, Hook, Patience
from volseg.workflow.named import Named
from volseg.workflow.training import Training
from volseg.workflow.validation import Testing, Validated, Validation

__all__ = [
    "Checkpoints",
    "EpochRecord",
    "Hook",
    "Named",
    "Patience",
    "Testing",
    "Training",
    "TrainingState",
    "Validated",
    "Validation",
    "load_checkpoint",
    "save_checkpoint",
]
