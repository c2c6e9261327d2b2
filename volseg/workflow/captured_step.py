"""A training step as one launch: forward, loss, backward, clipping and optimizer in a CUDA graph.

The first batches train as they are, on the stream that records later: libraries choose kernels then, and optimizers
make their state. The learning rate moves to the device, where the recorded optimizer reads it. What cannot be recorded
(a network that looks at values) trains on as it is, and says so once.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.capture import Captured, signature
from volseg.parallel import ModelParallel
from volseg.parallel.sharding import SpatialStrategy

__all__ = ["WARM_UP", "CapturedStep", "is_on_one_device", "plain_rates"]

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Batches that train before the step is recorded."""

Step = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class CapturedStep:
    """A step that records itself once it has run a few times on batches of one signature.

    Parameters
    ----------
    step : callable
        Tensors of a batch to losses; changes weights, buffers and the optimizer's state in place.
    optimizer : Optimizer
        Fused, so that it takes its learning rate from the device.
    """

    def __init__(self, step: Step, optimizer: Optimizer) -> None:
        self.step = step
        self.optimizer = optimizer
        self.captured: Captured | None = None
        self.refused = False
        self._stream = torch.cuda.Stream()
        self._seen: tuple[Any, ...] = ()
        self._times_seen = 0

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train on a batch; return its losses, which stay as they are."""
        now = signature(tensors)
        if self.captured is None and not self.refused and now == self._seen and self._times_seen >= WARM_UP:
            self._record(tensors)
        if self.captured is not None and now == self.captured.signature:
            return {name: loss.clone() for name, loss in self.captured(tensors).items()}
        self._times_seen = self._times_seen + 1 if now == self._seen else 1
        self._seen = now
        return self._warm_up(tensors)

    def _warm_up(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            losses = self.step(tensors)
        current.wait_stream(self._stream)
        for tensor in (*tensors.values(), *losses.values()):
            tensor.record_stream(self._stream)
        return losses

    def _record(self, tensors: Mapping[str, Tensor]) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(next(iter(tensors.values())).device)
            if "capturable" in group:
                group["capturable"] = True
        try:
            self.captured = Captured(lambda **batch: self.step(batch), tensors, stream=self._stream)
        except RuntimeError as fault:
            self.refused = True
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.optimizer.zero_grad()
            reason = str(fault).partition("\n")[0]
            logger.warning(
                "the training step cannot be recorded as a CUDA graph and runs kernel by kernel (%s); "
                "training.capture: false skips the attempt",
                reason,
            )


def is_on_one_device(module: nn.Module) -> bool:
    """Tell whether a module computes on one device of one process."""
    if isinstance(module, ModelParallel):
        strategy = module.strategy
        return isinstance(strategy, SpatialStrategy) and len(strategy.communicator.devices) == 1
    return len({parameter.device for parameter in module.parameters()}) == 1


def plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state whose learning rates are numbers, as another machine's optimizer takes them."""
    return {**state, "param_groups": [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]}
