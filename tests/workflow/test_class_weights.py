"""Class weights of a config reach MONAI's losses, as these compute them, on the device of the training."""

import monai.losses
import pytest
import torch

from volseg.errors import ConfigError
from volseg.experiment.rehearsing import rehearse_losses
from volseg.workflow.components import build_loss
from volseg.workflow.named import Objective

WEIGHTS = [0.5, 1.0, 3.0]


def build(name, **parameters):
    return build_loss({"name": name, **parameters}, inputs=["logits", "label"], output="loss")


def fields():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, 8, 8, generator=generator)
    return {"logits": logits, "label": torch.randint(3, (2, 1, 8, 8, 8), generator=generator)}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("DiceCELoss", {"softmax": True, "to_onehot_y": True}),
        ("DiceLoss", {"softmax": True, "to_onehot_y": True}),
        ("FocalLoss", {"use_softmax": True, "to_onehot_y": True}),
        ("DiceFocalLoss", {"softmax": True, "to_onehot_y": True}),
    ],
)
def test_they_give_what_monais_loss_gives_with_them(name, own):
    loss = build(name, weight=WEIGHTS)
    theirs = getattr(monai.losses, name)(weight=torch.tensor(WEIGHTS), **own)
    given = fields()
    torch.testing.assert_close(loss(given)["loss"], theirs(given["logits"], given["label"]))
    assert loss(given)["loss"] != build(name)(given)["loss"]


@pytest.mark.parametrize("name", ["DiceCELoss", "DiceLoss", "FocalLoss"])
def test_they_follow_the_objective_to_its_device(name):
    objective = Objective(build(name, weight=WEIGHTS))
    objective.to(torch.device("meta"))
    held = [buffer for loss in objective.losses for buffer in loss.buffers()]
    assert held
    assert all(buffer.is_meta for buffer in held)


def test_replicas_take_those_that_leave_a_mean_over_samples_and_refuse_the_others():
    focal, entropy = (Objective(build(name, weight=WEIGHTS)) for name in ("FocalLoss", "DiceCELoss"))
    made = {"logits": torch.empty(1, 3, 16, 16, 16, device="meta")}
    rehearse_losses(focal, made, 1, is_shared=True)
    with pytest.raises(ConfigError, match=r"DiceCELoss is no mean over the samples .*no class weights"):
        rehearse_losses(entropy, made, 1, is_shared=True)
