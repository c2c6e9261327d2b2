"""Compare a pipeline with the plain network on the same micro-batches."""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import join

ROUND_OFF = {"rtol": 1e-10, "atol": 1e-10}
"""In float64; sums over samples are taken in another order."""


def conv(inputs: int = 2, outputs: int = 2) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


def volumes(batch: int = 4, side: int = 4, channels: int = 2) -> Tensor:
    return torch.randn(batch, channels, side, side, side, dtype=torch.float64)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def in_micro_batches(net: nn.Module, size: int) -> Callable[..., Any]:
    """Return what a pipeline computes, without one: the plain network on each micro-batch, in order."""

    return lambda *args: join([net(*pieces) for pieces in zip(*(x.split(size) for x in args), strict=True)])


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy, whose global generators are those that networks draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def take_step(run: Callable[..., Any], net: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return outputs, the gradients of inputs and parameters, and buffers, after one batch."""
    own = [x.clone().requires_grad_() for x in inputs]
    leaves = [leaf for leaf in tree_leaves(run(*own)) if isinstance(leaf, Tensor)]
    learnt = [leaf for leaf in leaves if leaf.requires_grad]
    sum((leaf.square().mean() * (place + 1) for place, leaf in enumerate(learnt)), torch.zeros(())).backward()
    found = {"parameters": gradients(net), "buffers": dict(net.named_buffers())}
    tensors = {name: {key: value.cpu() for key, value in values.items()} for name, values in found.items()}
    return {"outputs": leaves, "inputs": [x.grad for x in own if x.grad is not None], **tensors}


def assert_same_steps(
    net: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    split_size: int = 2,
    *,
    before: Callable[[nn.Module, int], object] = lambda net, number: None,
    refuses: Callable[[RuntimeError], bool] = lambda fault: False,
    close: dict[str, float] = ROUND_OFF,
    lr: float = 0.0,
    seed: int = 0,
    devices: Sequence[str] = ("cpu", "cpu:1", "cpu:2"),
    **options: Any,
) -> ModelParallel:
    """Compare a pipeline with the plain network, batch after batch: until the plain one refuses, where it may."""
    reference, batches = copy.deepcopy(net), list(batches)
    batched = range(len(batches[0])) if len(batches[0]) > 1 else None
    model = ModelParallel(net, strategy="pipeline", devices=devices, split_size=split_size, batched=batched, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr) for each in (reference, net)]
    for number, inputs in enumerate(batches):
        for each in (reference, net):
            before(each, number)
        seed_all(seed + number)
        try:
            expected = take_step(in_micro_batches(reference, split_size), reference, inputs)
        except RuntimeError as fault:
            if refuses(fault):
                break
            raise
        seed_all(seed + number)
        torch.testing.assert_close(take_step(model, net, inputs), expected, **close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model
