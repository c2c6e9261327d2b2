"""MONAI's and torch's losses and metrics take sharded outputs as they are; the label may be an ordinary tensor."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from monai.losses import DeepSupervisionLoss, DiceCELoss, DiceFocalLoss, DiceLoss, FocalLoss, TverskyLoss
from monai.metrics import DiceMetric, compute_dice
from monai.networks.utils import one_hot
from torch import Tensor

from volseg.parallel.sharding import ShardedVolume
from volseg.parallel.sharding.context import Context
from volseg.parallel.sharding.local import LocalDevices
from volseg.parallel.sharding.volume import from_whole

SHAPE = (2, 3, 7, 5, 4)


def cut(whole: Tensor) -> ShardedVolume:
    return from_whole(whole, (2,), Context(LocalDevices(["cpu"] * 3)))


def logits() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def label() -> Tensor:
    return torch.randint(0, 3, (2, 1, *SHAPE[2:]), generator=torch.Generator().manual_seed(1))


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "Dice": DiceLoss(softmax=True, to_onehot_y=True),
    "Dice squared without background": DiceLoss(
        softmax=True, to_onehot_y=True, squared_pred=True, include_background=False
    ),
    "Dice of batch": DiceLoss(sigmoid=True, to_onehot_y=True, batch=True),
    "Dice CE": DiceCELoss(softmax=True, to_onehot_y=True),
    "Dice CE weighted": DiceCELoss(softmax=True, to_onehot_y=True, weight=WEIGHT),
    "focal": FocalLoss(to_onehot_y=True, use_softmax=True),
    "focal sigmoid": FocalLoss(to_onehot_y=True),
    "Dice focal": DiceFocalLoss(softmax=True, to_onehot_y=True),
    "Tversky": TverskyLoss(softmax=True, to_onehot_y=True),
    "cross entropy": lambda x, y: F.cross_entropy(x, y[:, 0]),
    "cross entropy weighted": lambda x, y: F.cross_entropy(x, y[:, 0], WEIGHT, ignore_index=1, label_smoothing=0.1),
    "cross entropy none": lambda x, y: F.cross_entropy(x, y[:, 0], reduction="none").square().mean(),
    "cross entropy sum": lambda x, y: F.cross_entropy(x, y[:, 0], reduction="sum"),
    "cross entropy soft": lambda x, y: F.cross_entropy(x, one_hot(y, 3).double(), WEIGHT),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y[:, 0]),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, one_hot(y, 3).double(), pos_weight=torch.tensor(2.0)),
    "squared": lambda x, y: F.mse_loss(x, one_hot(y, 3).double()),
    "huber": lambda x, y: F.smooth_l1_loss(x, one_hot(y, 3).double(), beta=0.5, reduction="sum"),
}


@pytest.mark.parametrize("sharded_label", [False, True], ids=["whole label", "sharded label"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_slabs_equals_loss_of_the_volume(name: str, sharded_label: bool) -> None:
    loss = LOSSES[name]
    x, y = logits(), label()
    expected = loss(x, y)
    (wanted,) = torch.autograd.grad(expected, x)
    actual = loss(cut(x), cut(y) if sharded_label else y)
    assert type(actual) is Tensor
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual, x)
    torch.testing.assert_close(gradient, wanted)


def test_deep_supervision_loss() -> None:
    loss = DeepSupervisionLoss(DiceCELoss(softmax=True, to_onehot_y=True))
    x = torch.randn(2, 3, 8, 8, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (2, 1, 8, 8, 4)).double()
    heads = [x, F.avg_pool3d(x, 2)]
    torch.testing.assert_close(loss([cut(head) for head in heads], y), loss(heads, y))


def test_dice_metric() -> None:
    prediction, truth = one_hot(logits().argmax(1, keepdim=True), 3), one_hot(label(), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = compute_dice(prediction, truth)
        torch.testing.assert_close(compute_dice(cut(prediction), truth), expected)
        metric = DiceMetric(reduction="none")
        metric(cut(prediction), cut(truth))
        torch.testing.assert_close(metric.aggregate(), expected)


def test_probabilities_and_labels_stay_sharded() -> None:
    x = cut(logits().detach())
    for result in (x.softmax(1), x.argmax(1), torch.argmax(x, dim=1, keepdim=True)):
        assert isinstance(result, ShardedVolume)
        assert isinstance(result, Tensor)
    torch.testing.assert_close(x.argmax(1).full_tensor(), x.full_tensor().argmax(1))
