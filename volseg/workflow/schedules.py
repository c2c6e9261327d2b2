"""Update the learning rate, and an exponential moving average of a model's weights, after each optimizer step.

A schedule needs no length: the training computes its progress.

``torch.optim.swa_utils.AveragedModel`` deep-copies the module, which fails for a network placed on several devices.
`WeightAverage` keeps the averaged tensors next to the module and swaps them in during a validation.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from volseg.config.registry import Registry
from volseg.errors import ConfigError


def polynomial(progress: float, *, power: float = 0.9) -> float:
    """Return ``(1 - progress) ** power``, the schedule of DeepLab and nnU-Net (doi:10.1038/s41592-020-01008-z)."""
    return (1 - progress) ** power


def cosine(progress: float, *, floor: float = 0.0) -> float:
    """Return half a cosine from 1 to ``floor`` (SGDR without restarts, arXiv:1608.03983)."""
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def constant(progress: float) -> float:
    """Return 1."""
    del progress
    return 1.0


SCHEDULES = Registry("schedule", {"polynomial": polynomial, "cosine": cosine, "constant": constant})


class Schedule:
    """Set the learning rate of every parameter group to its peak times ``factor(progress)``.

    Torch's ``LambdaLR`` has the whole optimizer as its state, and warns if a scaled training skips its first step. A
    function of the step number has neither problem.

    Parameters
    ----------
    optimizer : Optimizer
        The initial rates of its groups are the peaks.
    factor : callable
        Maps the progress in [0, 1] after the warm-up to a factor.
    steps : int
        Optimizer steps of the whole training.
    warmup : float
        Fraction of the steps over which the rate rises linearly to its peak, in [0, 1).
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[float], float], *, steps: int, warmup: float = 0.0
    ) -> None:
        if not 0 <= warmup < 1:
            raise ConfigError(f"warmup must be a fraction of the training in [0, 1), got {warmup}")
        self.optimizer = optimizer
        self.factor = factor
        self.steps = steps
        self.warmup_steps = int(warmup * steps)
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.go_to(0)

    def step(self) -> None:
        """Advance to the next optimizer step."""
        self.go_to(self.steps_done + 1)

    def go_to(self, steps_done: int) -> None:
        """Set the rates for the step after ``steps_done`` steps."""
        self.steps_done = steps_done
        self.rates = [peak * self._factor_at(steps_done) for peak in self.peaks]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):  # a recorded step reads its rate from the device
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state with its rates as numbers, which an optimizer on any machine can load.

        The rates of a recorded step are tensors on the device; this method does not wait for them.
        """
        state = self.optimizer.state_dict()
        groups = zip(state["param_groups"], self.rates, strict=True)
        return {**state, "param_groups": [{**group, "lr": rate} for group, rate in groups]}

    def _factor_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.factor(min(1.0, (step - self.warmup_steps) / (self.steps - self.warmup_steps)))


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
            raise ValueError(f"decay must be in (0, 1), got {decay}")
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
