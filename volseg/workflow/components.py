"""Losses, metrics and optimizers that a config may name: MONAI's and torch's own."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import monai.losses
import monai.metrics
import torch
from monai.losses import DeepSupervisionLoss
from monai.metrics import CumulativeIterationMetric
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from volseg.config.registry import Registry
from volseg.workflow.named import Named

__all__ = ["LOSSES", "METRICS", "OPTIMIZERS", "build_loss", "build_metric", "build_optimizer"]


def _classes(module: ModuleType, base: type) -> dict[str, Callable[..., Any]]:
    """Return the public classes of ``module`` that derive from ``base``, by name."""
    members = inspect.getmembers(module, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, base) and member is not base}


LOSSES = Registry("loss", _classes(monai.losses, _Loss))
METRICS = Registry("metric", _classes(monai.metrics, CumulativeIterationMetric))
OPTIMIZERS = Registry("optimizer", _classes(torch.optim, Optimizer))

# Logits and a label map (B, 1, D, H, W) are what a segmentation loss of ours gets, so this is what it must be told.
SEGMENTATION = {"to_onehot_y": True, "softmax": True, "use_softmax": True}

FUSED = ("Adam", "AdamW", "SGD")


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
    """Return a MONAI metric of label maps ``(1, 1, D, H, W)``; it is told the number of classes where it asks."""
    METRICS.check(spec)
    known = {"num_classes": num_classes} if METRICS.accepts(spec["name"], "num_classes") else {}
    return Named(METRICS.build({**known, **spec}), list(inputs), [output])


class AnyDepth(nn.Module):
    """A loss of one volume of logits, or of the list that a network with deep supervision returns."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.plain = loss
        self.deep = DeepSupervisionLoss(loss)

    def forward(self, logits: Tensor | list[Tensor], label: Tensor) -> Tensor:
        """Return the scalar loss of ``logits`` against ``label``."""
        return self.deep(list(logits), label) if isinstance(logits, list | tuple) else self.plain(logits, label)


def build_optimizer(spec: Mapping[str, Any], network: nn.Module, *, on_gpu: bool) -> Optimizer:
    """Return an optimizer over the network's parameters, fused on a GPU where torch has it.

    A fused optimizer also skips the host's wait for the gradient scaler's verdict.
    """
    OPTIMIZERS.check(spec)
    fused = {"fused": True} if on_gpu and spec["name"] in FUSED and "fused" not in spec else {}
    optimizer = OPTIMIZERS.build({**fused, **spec}, network.parameters())
    assert isinstance(optimizer, Optimizer)
    return optimizer
