"""Named modules, the workflows that run them, and the hooks that watch."""

from volseg.workflow.checkpoints import Checkpoints, load_checkpoint, save_checkpoint
from volseg.workflow.hooks import Hook, Patience
from volseg.workflow.named import Named
from volseg.workflow.records import EpochRecord
from volseg.workflow.training import Training

__all__ = [
    "Checkpoints",
    "EpochRecord",
    "Hook",
    "Named",
    "Patience",
    "Training",
    "load_checkpoint",
    "save_checkpoint",
]
