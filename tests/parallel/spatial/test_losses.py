"""MONAI's and torch's losses and metrics accept sharded outputs; the label may be an ordinary tensor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from monai import losses, metrics
from monai.data import decollate_batch
from monai.inferers import sliding_window_inference
from monai.networks.utils import one_hot
from monai.transforms import Activations, AsDiscrete
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel, whole
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

SHAPE = (2, 3, 7, 5, 4)


def cut(whole: Tensor) -> ShardedVolume:
    return from_whole(whole, (2,), Context(LocalDevices(["cpu"] * 3)))


def logits() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def label() -> Tensor:
    return torch.randint(0, 3, (2, 1, *SHAPE[2:]), generator=torch.Generator().manual_seed(1))


def test_probabilities_and_labels_stay_sharded() -> None:
    x = cut(logits().detach())
    for result in (x.softmax(1), x.argmax(1), torch.argmax(x, dim=1, keepdim=True)):
        assert isinstance(result, ShardedVolume)
        assert isinstance(result, Tensor)
    torch.testing.assert_close(x.argmax(1).full_tensor(), x.full_tensor().argmax(1))


LARGE = (2, 3, 8, 9, 10)
COST = np.array([[0, 1, 1], [1, 0, 0.5], [1, 0.5, 0]])
CLASSES = {"softmax": True, "to_onehot_y": True}

CORRELATION = losses.LocalNormalizedCrossCorrelationLoss(3, kernel_size=5, kernel_type="gaussian")

WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
# Each takes the logits, the label map and other logits.
LOSSES: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "Dice": lambda x, y, z: losses.DiceLoss(softmax=True, to_onehot_y=True)(x, y),
    "Dice squared without background": lambda x, y, z: losses.DiceLoss(
        softmax=True, to_onehot_y=True, squared_pred=True, include_background=False
    )(x, y),
    "Dice of batch": lambda x, y, z: losses.DiceLoss(sigmoid=True, to_onehot_y=True, batch=True)(x, y),
    "Dice CE": lambda x, y, z: losses.DiceCELoss(softmax=True, to_onehot_y=True)(x, y),
    "Dice CE weighted": lambda x, y, z: losses.DiceCELoss(softmax=True, to_onehot_y=True, weight=WEIGHT)(x, y),
    "focal": lambda x, y, z: losses.FocalLoss(to_onehot_y=True, use_softmax=True)(x, y),
    "focal sigmoid": lambda x, y, z: losses.FocalLoss(to_onehot_y=True)(x, y),
    "Dice focal": lambda x, y, z: losses.DiceFocalLoss(softmax=True, to_onehot_y=True)(x, y),
    "Tversky": lambda x, y, z: losses.TverskyLoss(softmax=True, to_onehot_y=True)(x, y),
    "cross entropy": lambda x, y, z: F.cross_entropy(x, y[:, 0]),
    "cross entropy weighted": lambda x, y, z: F.cross_entropy(x, y[:, 0], WEIGHT, ignore_index=1, label_smoothing=0.1),
    "cross entropy none": lambda x, y, z: F.cross_entropy(x, y[:, 0], reduction="none").square().mean(),
    "cross entropy sum": lambda x, y, z: F.cross_entropy(x, y[:, 0], reduction="sum"),
    "cross entropy soft": lambda x, y, z: F.cross_entropy(x, one_hot(y, 3).double(), WEIGHT),
    "nll": lambda x, y, z: F.nll_loss(x.log_softmax(1), y[:, 0]),
    "binary": lambda x, y, z: F.binary_cross_entropy_with_logits(
        x, one_hot(y, 3).double(), pos_weight=torch.tensor(2.0)
    ),
    "squared": lambda x, y, z: F.mse_loss(x, one_hot(y, 3).double()),
    "huber": lambda x, y, z: F.smooth_l1_loss(x, one_hot(y, 3).double(), beta=0.5, reduction="sum"),
    "deep supervision": lambda x, y, z: losses.DeepSupervisionLoss(losses.DiceCELoss(**CLASSES))(
        [x, F.avg_pool3d(x, 2)], y.double()
    ),
    "generalized Dice": lambda x, y, z: losses.GeneralizedDiceLoss(**CLASSES, batch=True)(x, y),
    "generalized Dice focal": lambda x, y, z: losses.GeneralizedDiceFocalLoss(**CLASSES)(x, y),
    "Wasserstein Dice": lambda x, y, z: losses.GeneralizedWassersteinDiceLoss(COST, weighting_mode="GDL")(x, y),
    "unified focal": lambda x, y, z: losses.AsymmetricUnifiedFocalLoss(to_onehot_y=True, num_classes=3)(x, y),
    "masked Dice": lambda x, y, z: losses.MaskedDiceLoss(softmax=True)(x, one_hot(y, 3), mask=y > 0),
    "soft clDice": lambda x, y, z: losses.SoftDiceclDiceLoss()(x.softmax(1), one_hot(y, 3).double()),
    "SSIM": lambda x, y, z: losses.SSIMLoss(3, win_size=5)(x.sigmoid(), z.sigmoid()),
    "NACL": lambda x, y, z: losses.NACLLoss(classes=3, dim=3)(x, y[:, 0]),
    "correlation": lambda x, y, z: CORRELATION(x, z),
    "mutual information": lambda x, y, z: losses.GlobalMutualInformationLoss()(x.sigmoid(), z.sigmoid()),
    "multi-scale": lambda x, y, z: losses.MultiScaleLoss(nn.MSELoss(), scales=[0, 1])(x, z),
    "contrastive": lambda x, y, z: losses.ContrastiveLoss()(x.flatten(1), z.flatten(1)),
    "bending energy": lambda x, y, z: losses.BendingEnergyLoss(normalize=True)(x),
    "diffusion": lambda x, y, z: losses.DiffusionLoss()(x),
    "Hausdorff": lambda x, y, z: whole(losses.HausdorffDTLoss(**CLASSES))(x, y),
    "log Hausdorff": lambda x, y, z: whole(losses.LogHausdorffDTLoss(**CLASSES))(x, y),
    "spectral": lambda x, y, z: whole(losses.JukeboxLoss(3))(x, z),
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # MONAI's spatial gradient
@pytest.mark.parametrize("sharded_label", [False, True], ids=["whole label", "sharded label"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_slabs_equals_loss_of_the_volume(name: str, sharded_label: bool) -> None:
    x, z = (torch.randn(LARGE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    y = torch.randint(0, 3, (2, 1, *LARGE[2:]), generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    expected = LOSSES[name](x, y, z)
    (wanted,) = torch.autograd.grad(expected, x)
    context = Context(LocalDevices(["cpu", "cpu:1", "cpu:2"]))
    label, other = (from_whole(t, (3,), context) if sharded_label else t for t in (y, z))
    actual = LOSSES[name](from_whole(x, (3,), context), label, other)
    assert type(actual) is Tensor
    (gradient,) = torch.autograd.grad(actual, x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradient, wanted)


def test_a_loss_that_reads_numbers_says_what_to_do() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"volseg\.parallel\.whole"):
        losses.HausdorffDTLoss(**CLASSES)(cut(logits()), label())


METRICS: dict[str, Any] = {
    "Dice": metrics.DiceMetric(reduction="mean_batch"),
    "Dice of each case": metrics.DiceMetric(reduction="none"),
    "panoptic quality": metrics.PanopticQualityMetric(num_classes=2),
    "Hausdorff distance": metrics.HausdorffDistanceMetric(percentile=95),
    "surface distance": metrics.SurfaceDistanceMetric(symmetric=True),
    "surface Dice": metrics.SurfaceDiceMetric([1.0, 1.0]),
    "confusion matrix": metrics.ConfusionMatrixMetric(),
    "intersection over union": metrics.MeanIoU(),
    "generalized Dice": metrics.GeneralizedDiceScore(),
    "structural similarity": metrics.SSIMMetric(3, win_size=5),
}


def aggregated(metric: Any, prediction: Any, truth: Any) -> Any:
    metric.reset()
    metric(prediction, truth)
    return metric.aggregate()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_monai(name: str) -> None:
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 3, (2, 1, *LARGE[2:]), generator=torch.Generator().manual_seed(2))
    context = Context(LocalDevices(["cpu", "cpu:1"]))
    prediction, truth = one_hot(x.argmax(1, keepdim=True), 3), one_hot(y, 3)
    if name == "panoptic quality":  # of numbered instances and their classes
        prediction, truth = (torch.cat([own, own], 1) for own in (x.argmax(1, keepdim=True), y))
    expected = aggregated(METRICS[name], prediction, truth)
    volume = from_whole(prediction, (2,), context)
    for other in (truth, from_whole(truth, (2,), context)):
        torch.testing.assert_close(aggregated(METRICS[name], volume, other), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_usual_validation_loop(mode: Any) -> None:
    x, y = logits(), label()
    steps = [AsDiscrete(argmax=True, to_onehot=3), AsDiscrete(to_onehot=3), Activations(softmax=True)]

    def loop(prediction: Any) -> list[Any]:
        with mode():
            found = [steps[0](case) for case in decollate_batch(prediction)]
            smooth = [steps[2](case) for case in decollate_batch(prediction)]
            truth = [steps[1](case) for case in decollate_batch(y)]
            return [*found, *smooth, aggregated(metrics.DiceMetric(include_background=False), found, truth)]

    for actual, expected in zip(loop(cut(x)), loop(x), strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.requires_grad == expected.requires_grad


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.conv(x)).relu()
        return self.head(y), y.mean(1, keepdim=True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "constant"},
        {"mode": "gaussian", "overlap": 0.5, "sw_batch_size": 3},
        {"mode": "gaussian", "sw_device": "cpu", "device": "cpu:1", "roi_size": (24, 8, 8)},
        {"buffer_steps": 2, "buffer_dim": 0},
    ],
)
def test_sliding_windows_over_a_spatial_network(settings: dict[str, Any], grad: bool) -> None:
    torch.manual_seed(0)
    net = Windowed().double()
    volume = torch.randn(1, 1, 20, 17, 18, dtype=torch.float64)
    settings = {"roi_size": (8, 8, 8), "sw_batch_size": 1, **settings}
    results = []
    with torch.set_grad_enabled(grad):
        for run in (net, ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"])):
            net.zero_grad()
            outputs = sliding_window_inference(volume, predictor=run, **settings)
            if grad:
                sum(output.cpu().square().mean() for output in outputs).backward()
            results.append([*(output.cpu() for output in outputs), *(p.grad for p in net.parameters() if grad)])
    torch.testing.assert_close(*results)
