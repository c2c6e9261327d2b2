"""Replicas accept a loss that is a mean over samples; others are detected on random batches."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from volseg.errors import ConfigError
from volseg.experiment.rehearsing import rehearse_losses
from volseg.losses import Targets
from volseg.workflow import Named
from volseg.workflow.components import LOSSES, build_loss
from volseg.workflow.named import Objective

SLOW = {"HausdorffDTLoss", "LogHausdorffDTLoss", "SoftclDiceLoss", "SoftDiceclDiceLoss", "BoundaryLoss"}
"""They compute distance maps or skeletons: a second each."""

NO_MEAN = {"LogHausdorffDTLoss"}
"""A logarithm of the mean over the batch."""


def require(*losses, targets=None, levels=1):
    count = 3 if targets is None else targets.num_outputs
    heads = [torch.empty(1, count, *[16 >> level] * 3, device="meta") for level in range(levels)]
    made = {"logits": heads if levels > 1 else heads[0]}
    rehearse_losses(Objective(losses, targets=targets), made, 1, is_shared=True)


def built(name, **parameters):
    return build_loss({"name": name, **parameters}, inputs=["logits", "label"], output="loss")


@pytest.mark.parametrize("name", sorted({name for name, _ in LOSSES.items()} - SLOW))
def test_each_loss_is_a_mean_over_samples_by_default_and_no_sum_is(name):
    require(built(name))
    require(built(name), levels=3)
    with pytest.raises(ConfigError, match=f"{name} is not a mean over the samples of a batch"):
        require(built(name, reduction="sum"))


@pytest.mark.parametrize(
    "targets",
    [
        Targets(num_classes=4, ignores=True),
        Targets(num_classes=4, regions=((1, 2, 3), (2, 3), (3,)), ignores=True, hidden=((0, 1), (0, 2))),
        Targets(num_classes=4, hidden=((0, 1), (0, 2, 3))),
    ],
    ids=["sparse", "regions", "partial"],
)
def test_what_label_maps_know_is_a_mean_over_samples(targets):
    """However many voxels of each sample are annotated, and whatever was looked for in it."""
    for parameters in ({}, {"batch": True}):
        spec = {"name": "DiceCELoss", **parameters}
        loss = build_loss(spec, inputs=["logits", "label"], output="loss", targets=targets)
        with pytest.raises(ConfigError, match="not a mean over the samples") if parameters else nullcontext():
            require(loss, targets=targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_losses(name):
    if name not in NO_MEAN:
        require(built(name))
        return
    with pytest.raises(ConfigError, match=r"set parallel\.data to 1 and parallel\.spatial to the number of GPUs"):
        require(built(name))


def weighted(logits, label):
    return F.cross_entropy(logits, label[:, 0].long(), weight=torch.tensor([1.0, 2.0, 3.0]))


def towards_image(logits, image):
    return (logits.mean(1, keepdim=True) - image).square().mean()


def of_another_field(logits, label):
    raise KeyError("atlas")


def named(function, other="label", output="loss"):
    return Named(function, ["logits", other], [output])


WEIGHT = torch.tensor([0.2, 2.0, 1.0])
MIXES = r"is not a mean over the samples of a batch \(.* on . samples, .* separately"


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([built("DiceCELoss", batch=True)], f"DiceCELoss {MIXES}"),
        ([built("DiceLoss", batch=True)], f"DiceLoss {MIXES}"),
        ([built("GeneralizedDiceLoss", batch=True)], f"GeneralizedDiceLoss {MIXES}"),
        ([built("DiceCELoss", weight=WEIGHT)], f"DiceCELoss {MIXES}"),
        ([named(weighted)], "weighted is not a mean"),
        ([named(built("DiceLoss").module, output="dice"), named(weighted, output="entropy")], "weighted is not a mean"),
        ([named(of_another_field)], r"of_another_field cannot be computed from .*KeyError: 'atlas'"),
        ([built("FocalLoss", weight=WEIGHT)], None),  # not divided by the sum of the weights
        ([named(towards_image, "image")], None),
    ],
)
def test_losses_that_mix_samples_are_refused(losses, message):
    """Trying them draws no random numbers."""
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        require(*losses)
    assert torch.equal(torch.get_rng_state(), before)
