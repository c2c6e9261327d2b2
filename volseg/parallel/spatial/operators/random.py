"""Random voxels and dropout: shards draw voxels independently from one seed, and drop the same whole channels.

The seed comes from the CPU's default generator, which has the same state in all processes of a group during a forward
pass (see ``strategy``); outside of a pass the processes agree on a seed. So one seed repeats a run, and a recomputation
with the restored state repeats its numbers. They are not the numbers that torch would draw for the whole volume.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import get_host_readable_device, host_values, is_recording
from volseg.parallel.spatial.table import handles, refuse_if
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.spatial.volume import ShardedVolume, wrap
from volseg.parallel.state.random import mix


def draw_seed(volume: ShardedVolume) -> int:
    """Draw a seed that is the same on every shard."""
    communicator = volume.context.communicator
    with host_values():
        own = torch.randint(2**62, ())
        if isinstance(communicator, ProcessGroupShards) and not volume.context.in_pass:
            # Outside of a forward pass the processes' generators may differ: all use the first process's number.
            own = communicator.stack(own.to(get_host_readable_device(communicator.home)).view(1))[0]
        return int(own.item())


def generators(volume: ShardedVolume) -> list[torch.Generator | None]:
    """Return a generator for each slab, each with its own seed."""
    if is_recording(volume.device):
        own = volume.context.graph_generators
        return [None] * len(volume.slabs) if own is None else [*own]
    seed = draw_seed(volume)
    seeds = [mix(seed, index) for index in volume.context.communicator.indices]
    return [torch.Generator(slab.device).manual_seed(own) for slab, own in zip(volume.slabs, seeds, strict=True)]


@handles("Dropout", "F.dropout", "torch.dropout", "torch.dropout_", rehearse=False, merged=True)
@handles("Dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d", "torch.feature_dropout", rehearse=False, merged=True)
def dropout(func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop voxels independently, or drop the same whole channels on all shards."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not isinstance(input, ShardedVolume) or not training or p == 0:
        return input
    name = func.__name__.removesuffix("_")
    masks = _draw_voxels(input, 1 - p) if name == "dropout" else _draw_channels(input, name, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    pairs = zip(input.slabs, masks, strict=True)
    if inplace or func.__name__.endswith("_"):
        input.context.change(input)
        for slab, mask in pairs:
            slab.mul_(mask * factor)
        return input
    return wrap(input, [slab * (mask * factor) for slab, mask in pairs])


def _draw_voxels(volume: ShardedVolume, keep: float) -> list[Tensor]:
    """Draw one mask per slab."""
    return [
        torch.empty_like(slab, requires_grad=False).bernoulli_(keep, generator=generator)
        for slab, generator in zip(volume.slabs, generators(volume), strict=True)
    ]


def _draw_channels(volume: ShardedVolume, name: str, keep: float) -> list[Tensor]:
    """Draw one mask for all slabs."""
    # Unbatched input (C, D, H, W): the channels come first.
    spatial = [int(letter) for letter in name if letter.isdigit()]
    leading = 1 if spatial == [volume.ndim - 1] else 2
    refuse_if(any(dim < leading for dim in volume.dims), "batch and channels must not be cut")
    shape = [*volume.shape[:leading], *([1] * (volume.ndim - leading))]
    home = volume.context.communicator.home
    # In a recorded step every process's default generator has the same state: see ``recorded_step``.
    generator = None if is_recording(volume.device) else torch.Generator(home).manual_seed(draw_seed(volume))
    empty = torch.empty(shape, dtype=volume.dtype, device=home)
    return volume.context.spread(empty.bernoulli_(keep, generator=generator))
