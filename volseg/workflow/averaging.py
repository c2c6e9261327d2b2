"""Keep an exponential moving average of a model's weights.

``torch.optim.swa_utils.AveragedModel`` deep-copies the module, which fails for a network placed on several devices.
`WeightAverage` keeps the averaged tensors beside the module and swaps them in during a validation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Exponential moving average of a module's parameters.

    Buffers (running statistics) are averages already and stay unchanged.

    Parameters
    ----------
    module : nn.Module
        Module whose parameters are averaged, each on its own device.
    decay : float
        Weight of the past, in (0, 1). The first updates use the smaller ``(1 + t) / (10 + t)`` (t: updates so far), so
        that the random initial weights fade quickly (TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        self.decay = decay
        self.updates = 0
        self._parameters = dict(module.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        by_device: dict[torch.device, list[str]] = {}
        for name, parameter in self._parameters.items():
            if self._average[name].device != parameter.device:  # placed lazily, after the average was created
                self._average[name] = self._average[name].to(parameter.device)
            by_device.setdefault(parameter.device, []).append(name)
        for names in by_device.values():
            average = [self._average[name] for name in names]
            get_ema_multi_avg_fn(decay)(average, [self._parameters[name] for name in names], self.updates)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averaged weights into the module for the duration of the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            own = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name] = own

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of its updates."""
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved average of the same parameters."""
        average = state["average"]
        if average.keys() != self._average.keys():
            differ = sorted(average.keys() ^ self._average.keys())
            raise KeyError(f"the saved average and the network differ in {differ[:5]}")
        for name, value in average.items():
            self._average[name] = value.to(self._parameters[name].device).clone()
        self.updates = int(state["updates"])
