"""Measure which memory layout of a network is faster on this GPU.

Channels-last suits the 16-bit units of a GPU, but is slower for a network whose norms copy to the contiguous layout and
back (on an H200, one step of MONAI's V-Net took 28 ms in channels-last and 40 ms contiguous; of DynUNet, 15 and 14).
"""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from volseg.device.torch_internals import tree_leaves

logger = logging.getLogger(__name__)

WARM_UP, MEASURED = 3, 5


def faster_layout(
    network: nn.Module, shape: Sequence[int], autocast: Callable[[], AbstractContextManager[None]]
) -> torch.memory_format:
    """Return the layout with the faster forward and backward pass on a batch of ``shape`` (B, C, D, H, W).

    The network is converted to that layout; its weights and buffers keep their values. Without a GPU the result is the
    contiguous layout. A layout in which the batch does not fit into the GPU's memory is not chosen. If neither fits,
    the result is the contiguous layout, and the first training step raises.
    """
    device = next(network.parameters()).device
    if device.type != "cuda":
        return torch.contiguous_format
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    mode = network.training
    with torch.random.fork_rng([device]):
        batch = torch.randn(*shape, device=device)
        layouts = (torch.contiguous_format, torch.channels_last_3d)
        milliseconds = {layout: _milliseconds_if_it_fits(network, batch, layout, autocast) for layout in layouts}
    network.train(mode)
    network.zero_grad()
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
    faster = min(layouts, key=milliseconds.__getitem__)
    network.to(memory_format=faster)  # type: ignore[call-overload]
    return faster


def _milliseconds_if_it_fits(
    network: nn.Module, batch: Tensor, layout: torch.memory_format, autocast: Callable[[], AbstractContextManager[None]]
) -> float:
    """Return ``_milliseconds``, or infinity if the batch does not fit into the GPU's memory."""
    try:
        return _milliseconds(network, batch, layout, autocast)
    except torch.OutOfMemoryError as fault:
        logger.info("%s is not measured, because it runs out of memory: %s", layout, str(fault).partition("\n")[0])
    # After the block above, whose exception keeps the tensors alive.
    network.zero_grad()
    torch.cuda.empty_cache()
    return math.inf


def _milliseconds(
    network: nn.Module, batch: Tensor, layout: torch.memory_format, autocast: Callable[[], AbstractContextManager[None]]
) -> float:
    """Return the median time of forward and backward."""
    network.to(memory_format=layout)  # type: ignore[call-overload]
    network.train()
    times = []
    for _ in range(WARM_UP + MEASURED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with autocast():
            leaves = tree_leaves(network(batch))
        # All heads, as in a training with deep supervision.
        heads = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.stack([head.float().square().mean() for head in heads]).sum().backward()
        end.record()
        end.synchronize()
        network.zero_grad()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UP:])
