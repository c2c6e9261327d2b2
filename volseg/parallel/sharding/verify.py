"""Compare a network on N devices with the same network on one: outputs, gradients, buffers, one optimizer step.

The comparison runs in float64, where an error of the method shows and round-off does not.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.sharding.volume import ShardedVolume

__all__ = ["Report", "compare", "default_objective", "verify"]

TOLERANCE = 1e-9
"""Largest relative error in float64. Round-off through twenty layers stays below 1e-11; a wrong plane or a gradient
counted twice is
above 1e-4."""


@dataclass(frozen=True)
class Report:
    """Largest relative error by name: ``output``, ``input``, ``gradient of ...``, ``buffer ...``, ``step of ...``."""

    shape: tuple[int, ...]
    shards: int
    errors: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance (NaN is not)."""
        return all(error <= self.tolerance for error in self.errors.values())

    def __str__(self) -> str:
        verdict = "equal to round-off" if self.ok else "DIFFERENT"
        lines = [f"{self.shards} shards and one device are {verdict} on a volume of {self.shape} (float64):"]
        worst = sorted(self.errors.items(), key=lambda item: -item[1] if item[1] == item[1] else float("-inf"))
        lines += [f"  {error:9.1e}  {name}" for name, error in worst[:10]]
        hidden = len(worst) - 10
        return "\n".join([*lines, *([f"  ... and {hidden} more, all smaller"] if hidden > 0 else [])])


def default_objective(outputs: Any) -> Tensor:
    """Return a number that depends on every voxel of every output, not symmetrically."""
    total = torch.zeros((), dtype=torch.float64)
    for output in tree_leaves(outputs):
        if isinstance(output, Tensor) and output.is_floating_point():
            total = total.to(output.device) + output.square().mean() + output.sin().mean()
    return total


def compare(
    plain: nn.Module,
    sharded: nn.Module,
    inputs: Sequence[Tensor],
    objective: Callable[[Any], Tensor] = default_objective,
    steps: int = 1,
) -> dict[str, float]:
    """Return the largest relative error of everything that training touches, by name.

    ``plain`` and ``sharded`` hold the same values at the start; both are changed by ``steps`` steps of gradient
    descent.
    """
    errors: dict[str, float] = {}
    ours, theirs = [_leaf(value) for value in inputs], [_leaf(value) for value in inputs]
    pairs = [(plain, theirs), (sharded, ours)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model, _ in pairs if list(model.parameters())]
    for step in range(steps):
        outputs = []
        for model, arguments in pairs:
            for argument in arguments:
                argument.grad = None
            outputs.append(model(*arguments))
            objective(outputs[-1]).backward()
        suffix = "" if steps == 1 else f", step {step + 1}"
        _record_outputs(errors, outputs[0], outputs[1], suffix)
        found = {f"input {index}": (b.grad, a.grad) for index, (a, b) in enumerate(zip(theirs, ours, strict=True))}
        names = dict(plain.named_parameters())
        own = dict(sharded.named_parameters())
        found |= {f"gradient of {name}": (own[name].grad, names[name].grad) for name in names}
        _record(errors, found, suffix)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        buffers = dict(sharded.named_buffers())
        _record(errors, {f"buffer {name}": (buffers[name], b) for name, b in plain.named_buffers()}, suffix)
        _record(errors, {f"step of {name}": (own[name].detach(), p.detach()) for name, p in names.items()}, suffix)
    return errors


def _leaf(value: Tensor) -> Tensor:
    copied = value.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() else copied


def _record_outputs(errors: dict[str, float], plain: Any, sharded: Any, suffix: str) -> None:
    theirs, ours = tree_leaves(plain), tree_leaves(sharded)
    if len(theirs) != len(ours):
        errors["output" + suffix] = float("nan")
        return
    found = {}
    for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        found[f"output {index}"] = (b.full_tensor() if isinstance(b, ShardedVolume) else b, a)
    _record(errors, found, suffix)


def _record(errors: dict[str, float], found: Mapping[str, tuple[Any, Any]], suffix: str) -> None:
    """Store relative errors; a tensor much smaller than its peers (a bias before a norm) is measured on their scale."""
    tensors = [b for _, b in found.values() if isinstance(b, Tensor) and b.numel()]
    scale = max((float(b.detach().abs().max()) for b in tensors), default=0.0)
    for name, (ours, theirs) in found.items():
        errors[name + suffix] = _difference(ours, theirs, scale)


def _difference(ours: Any, theirs: Any, scale: float) -> float:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return 0.0 if ours is theirs or ours == theirs else float("nan")
    if ours.shape != theirs.shape:
        return float("nan")
    a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if not b.numel():
        return 0.0
    size = max(float(b.abs().max()), 1e-3 * scale, 1e-30)
    return float((a - b).abs().max()) / size


def verify(
    net: nn.Module,
    shape: Sequence[int],
    devices: Sequence[str | int | torch.device] | None = None,
    objective: Callable[[Any], Tensor] = default_objective,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Report:
    """Compare ``net`` on ``devices`` with ``net`` on one of them, in float64, on a random volume.

    Dropout is turned off (the two would draw different masks); batch norm stays in training mode. The network itself
    is not changed: copies are compared.

    Parameters
    ----------
    net
        The network.
    shape
        Input shape ``(B, C, D, H, W)``; small is enough.
    devices
        Shards of this process; by default all visible GPUs, or four shards on the CPU. Under ``torchrun``, leave it
        out.
    objective
        From outputs to a loss.
    options
        For ``ModelParallel``.

    Examples
    --------
    >>> report = verify(nn.Conv3d(1, 2, 3, padding=1), (1, 1, 8, 6, 6), devices=["cpu"] * 2)
    >>> report.ok
    True
    """
    if devices is None and not dist.is_initialized() and torch.cuda.device_count() < 2:
        devices = ["cuda:0" if torch.cuda.is_available() else "cpu"] * 4
    plain = copy.deepcopy(net).double().train()
    for module in plain.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices, **options)
    strategy: Any = model.strategy
    home = strategy.communicator.home
    generator = torch.Generator().manual_seed(0)
    volume = torch.randn(tuple(shape), dtype=torch.float64, generator=generator).to(home)
    errors = compare(plain.to(home), model, [volume], objective)
    return Report(tuple(shape), strategy.communicator.shards, errors, tolerance)
