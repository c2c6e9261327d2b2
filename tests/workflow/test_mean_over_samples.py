"""Replicas share a loss that is a mean over samples; another one is found by trying it."""

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
    with pytest.raises(ConfigError, match=f"{name} is no mean over the samples of a batch"):
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
        with pytest.raises(ConfigError, match="no mean over the samples") if parameters else nullcontext():
            require(loss, targets=targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_losses(name):
    if name not in NO_MEAN:
        require(built(name))
        return
    with pytest.raises(ConfigError, match=r"set parallel\.data to 1 and parallel\.spatial to the number of GPUs"):
        require(built(name))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("DiceCELoss", {"batch": True}),
        ("DiceLoss", {"batch": True}),
        ("GeneralizedDiceLoss", {"batch": True}),
        ("DiceCELoss", {"weight": torch.tensor([0.2, 2.0, 1.0])}),
    ],
)
def test_losses_that_mix_samples_are_refused(name, parameters):
    with pytest.raises(
        ConfigError, match=rf"{name} is no mean over the samples of a batch \(.* on . samples, .* dealt"
    ):
        require(built(name, **parameters))


def test_class_weights_that_are_not_divided_by_their_sum_are_a_mean():
    require(built("FocalLoss", weight=torch.tensor([0.2, 2.0, 1.0])))


def weighted(logits, label):
    return F.cross_entropy(logits, label[:, 0].long(), weight=torch.tensor([1.0, 2.0, 3.0]))


def test_one_of_several_terms_is_enough():
    terms = [built("DiceLoss"), Named(weighted, ["logits", "label"], ["entropy"])]
    with pytest.raises(ConfigError, match="weighted is no mean"):
        require(terms[1])
    named = [Named(terms[0].module, ["logits", "label"], ["dice"]), terms[1]]
    with pytest.raises(ConfigError, match="weighted is no mean"):
        require(*named)


def test_a_loss_of_the_image_too():
    def towards_image(logits, image):
        return (logits.mean(1, keepdim=True) - image).square().mean()

    require(Named(towards_image, ["logits", "image"], ["loss"]))


def test_a_loss_that_cannot_be_tried_is_refused():
    def of_another_field(logits, label):
        raise KeyError("atlas")

    with pytest.raises(ConfigError, match=r"of_another_field cannot be computed of .*KeyError: 'atlas'"):
        require(Named(of_another_field, ["logits", "label"], ["loss"]))


def test_trying_draws_no_random_numbers():
    before = torch.get_rng_state()
    require(built("DiceCELoss"))
    assert torch.equal(torch.get_rng_state(), before)
