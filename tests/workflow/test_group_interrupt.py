"""Ctrl-C that only the leading process gets, in the middle of its validation, ends the group together, all saved."""

import os
import signal

import torch
import torch.distributed as dist
from in_group import in_group
from torch import nn

from volseg.parallel import ModelParallel
from volseg.workflow import Hook, Named, Training
from volseg.workflow.interrupts import stop_if_requested
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation


class Batches:
    def __len__(self):
        return 2

    def epoch(self, number, start=0):
        for _ in range(start, len(self)):
            yield {"image": torch.ones(1, 1, 8, 4, 4), "label": torch.zeros(1, 1, 8, 4, 4, dtype=torch.uint8)}


class Validation:
    """Three cases; Ctrl-C comes during the second."""

    examples = ()

    def __init__(self, model):
        self.model, self.judged = FollowedModel(model), 0

    def __call__(self):
        with torch.no_grad():
            for case in range(3):
                stop_if_requested()
                self.model(torch.ones(1, 1, 8, 4, 4)).full_tensor()
                self.judged += 1
                if case == 1:
                    os.kill(os.getpid(), signal.SIGINT)


class Saved(Hook):
    at = None

    def on_interrupt(self, training):
        self.at = [training.epoch, training.position, len(training.state_dict()["losses"])]


def interrupted():
    torch.manual_seed(0)
    model = ModelParallel(nn.Conv3d(1, 2, 3, padding=1), strategy="spatial")
    leads = dist.get_rank() == 0
    validation = Validation(model) if leads else None
    saved = Saved()
    training = Training(
        Named(model, ["image"], ["logits"]),
        Named(lambda x, y: nn.functional.cross_entropy(x, y[:, 0].long()), ["logits", "label"], ["loss"]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        GroupBatches(model, Batches() if leads else None, 2),
        epochs=3,
        validation=GroupValidation(model, validation, None),
        hooks=[saved],
    )
    ended = "to its end"
    try:
        training.run()
    except KeyboardInterrupt:
        ended = "by Ctrl-C"
    return {"ended": ended, "saved": saved.at, "judged": validation.judged if validation else None}


def test_the_group_leaves_the_validation_together():
    first, second = in_group(2, interrupted)
    assert first == {"ended": "by Ctrl-C", "saved": [0, 2, 2], "judged": 2}
    assert second == {"ended": "by Ctrl-C", "saved": [0, 2, 2], "judged": None}
