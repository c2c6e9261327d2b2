"""Losses, metrics and optimizers that a config may name: MONAI's and torch's own."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import monai.losses
import monai.metrics
import torch
from monai.losses import DeepSupervisionLoss
from monai.networks import one_hot
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.config.registry import Registry
from volseg.device.torch_internals import Loss
from volseg.losses.monai import DiceCELoss
from volseg.workflow.named import Named

__all__ = ["LOSSES", "METRICS", "OPTIMIZERS", "build_loss", "build_metric", "build_optimizer", "is_fused_on_gpu"]


def _classes(module: ModuleType, base: type) -> dict[str, Callable[..., Any]]:
    """Return the public classes of ``module`` that derive from ``base``, by name."""
    members = inspect.getmembers(module, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, base) and member is not base}


# Logits and a label map (B, 1, D, H, W) are what a segmentation loss of ours gets, so this is what it must be told.
SEGMENTATION = {"to_onehot_y": True, "softmax": True, "use_softmax": True}

OVERLAPS = ("DiceMetric", "GeneralizedDiceScore", "MeanIoU")
DISTANCES = ("HausdorffDistanceMetric", "SurfaceDiceMetric", "SurfaceDistanceMetric")
"""Metrics in mm: they are told the spacing."""

OTHER_LOOPS = ("LBFGS", "Muon", "SparseAdam")
"""Optimizers for closures, for matrices, and for sparse gradients."""


def _losses() -> dict[str, Callable[..., Any]]:
    """Return MONAI's losses that take logits; others (of registration, of probabilities) would be silently wrong."""
    registry = Registry("loss", _classes(monai.losses, Loss))
    taken = {
        name: loss
        for name, loss in registry.items()
        if (registry.accepts(name, "softmax") or registry.accepts(name, "use_softmax"))
        and loss.__name__ == name  # `dice_ce` and others are second names
        and not name.startswith("Masked")  # takes a mask, which no batch has
    }
    return {**taken, "DiceCELoss": DiceCELoss}


LOSSES = Registry("loss", _losses(), group="volseg.losses")
METRICS = Registry(
    "metric", {name: getattr(monai.metrics, name) for name in (*OVERLAPS, *DISTANCES)}, group="volseg.metrics"
)
OPTIMIZERS = Registry(
    "optimizer",
    {name: each for name, each in _classes(torch.optim, Optimizer).items() if name not in OTHER_LOOPS},
    group="volseg.optimizers",
)

FUSED = ("Adam", "AdamW", "SGD")


def is_fused_on_gpu(spec: Mapping[str, Any]) -> bool:
    """Tell whether `build_optimizer` makes an optimizer whose step on a GPU is one kernel, which can be recorded."""
    return bool(spec.get("fused", spec["name"] in FUSED))


def build_loss(spec: Mapping[str, Any], *, inputs: Iterable[str], output: str) -> Named:
    """Return a loss on logits ``(B, K, D, H, W)`` and a label map ``(B, 1, D, H, W)``.

    MONAI's losses are told to take the softmax and the one-hot form themselves, unless the spec says otherwise. A list
    of logits (deep supervision, full resolution first) gets `monai.losses.DeepSupervisionLoss`'s weights.

    Raises
    ------
    ConfigError
        For an unknown name or parameter.
    """
    LOSSES.check(spec)
    defaults = {key: value for key, value in SEGMENTATION.items() if LOSSES.accepts(spec["name"], key)}
    return Named(AnyDepth(LOSSES.build({**defaults, **spec})), list(inputs), [output])


def build_metric(spec: Mapping[str, Any], *, inputs: Iterable[str], output: str, num_classes: int) -> Named:
    """Return a MONAI metric of label maps ``(1, 1, D, H, W)``, over the foreground unless the spec says otherwise.

    Its inputs end with the field ``spacing`` (mm along D, H, W) where it measures distances.

    Raises
    ------
    ConfigError
        For an unknown name or parameter.
    """
    METRICS.check(spec)
    defaults = {"include_background": False} if METRICS.accepts(spec["name"], "include_background") else {}
    metric = OneHot(METRICS.build({**defaults, **spec}), num_classes)
    return Named(metric, [*inputs, *(["spacing"] if spec["name"] in DISTANCES else [])], [output])


class OneHot(nn.Module):
    """A metric of one-hot volumes, asked about label maps."""

    def __init__(self, metric: Callable[..., Any], num_classes: int) -> None:
        super().__init__()
        self.metric = metric
        self.num_classes = num_classes

    def forward(self, prediction: Tensor, label: Tensor, spacing: Sequence[float] | None = None) -> Tensor:
        """Return what the metric gives for ``(B, 1, D, H, W)`` label maps, per case and class."""
        # A label map itself would pass: MONAI's MeanIoU of one is not an error but a number above 1.
        volumes = [one_hot(volume.as_subclass(Tensor), self.num_classes) for volume in (prediction, label)]
        result = self.metric(*volumes, **({} if spacing is None else {"spacing": tuple(spacing)}))
        assert isinstance(result, Tensor)
        return result


class AnyDepth(nn.Module):
    """A loss of one volume of logits, or of the list that a network with deep supervision returns."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.plain = loss
        self.__name__ = type(loss).__name__  # of which a message speaks
        self.deep = DeepSupervisionLoss(loss)

    def forward(self, logits: Tensor | list[Tensor], label: Tensor) -> Tensor:
        """Return the scalar loss of ``logits`` against ``label``."""
        if not isinstance(logits, list | tuple):
            return self.plain(logits, label)
        weights = self.deep.get_weights(levels=len(logits))
        if isinstance(self.plain, DiceCELoss) and self.plain.is_fused:
            heads = zip(weights, logits, strict=True)
            return torch.stack([self.plain.of_head(head, label, weight) for weight, head in heads]).sum()
        # DeepSupervisionLoss.forward begins its sum with a number from the host, which a CUDA graph cannot hold.
        if label.dtype == torch.int64:  # which torch cannot resize; the values are exact in float32
            label = label.float()
        terms = [weight * self.deep.get_loss(head, label) for weight, head in zip(weights, logits, strict=True)]
        return torch.stack(terms).sum()


def build_optimizer(spec: Mapping[str, Any], network: nn.Module, *, on_gpu: bool) -> Optimizer:
    """Return an optimizer over the network's parameters, fused on a GPU where torch has it.

    A fused optimizer also skips the host's wait for the gradient scaler's verdict.
    """
    OPTIMIZERS.check(spec)
    fused = {"fused": True} if on_gpu and is_fused_on_gpu(spec) else {}
    optimizer = OPTIMIZERS.build({**fused, **spec}, network.parameters())
    assert isinstance(optimizer, Optimizer)
    return optimizer
