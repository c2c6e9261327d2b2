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
from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.operators.operands import aligned
from volseg.parallel.spatial.operators.pointwise import in_place, pointwise
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
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


FILLS = ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]


@handles("Random numbers", *(f"Tensor.{name}" for name in FILLS), rehearse=False, merged=True)
def fill_randomly(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Fill a volume in place."""
    volume, *settings = args
    refuse_if(not isinstance(volume, ShardedVolume), "a probability per voxel belongs to a volume of the same cut")
    _refuse_generator(kwargs.get("generator"))
    volume.context.change(volume)
    columns = [aligned(value, volume) for value in settings]
    named = {name: aligned(value, volume) for name, value in kwargs.items() if name != "generator"}
    for index, (slab, generator) in enumerate(zip(volume.slabs, generators(volume), strict=True)):
        own = {name: values[index] for name, values in named.items()}
        func(slab, *(values[index] for values in columns), **own, generator=generator)
    return volume


@handles("Random numbers", "bernoulli", merged=True)
def bernoulli(func: Callable, input: Any, p: float | None = None, generator: torch.Generator | None = None) -> Any:
    """Draw zeros and ones, each voxel with its own probability, or all with ``p``."""
    _refuse_generator(generator)
    if not isinstance(input, ShardedVolume) or isinstance(p, Tensor):
        refuse("the input must be the volume, and p a number")
    chance = () if p is None else (p,)
    pairs = zip(input.slabs, generators(input), strict=True)
    return wrap(input, [torch.bernoulli(slab, *chance, generator=own) for slab, own in pairs])


FILLED: dict[str, Any] = {"rand_like": Tensor.uniform_, "randn_like": Tensor.normal_, "randint_like": Tensor.random_}


@handles("Random numbers", "torch.rand_like", "torch.randn_like", "torch.randint_like", rehearse=False, merged=True)
def random_like(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw a volume of random numbers, cut like the given one."""
    settings = dict(kwargs)
    volume, *limits = args or (settings.pop("input"),)
    limits += [settings.pop(name) for name in ("low", "high") if name in settings]
    if len(limits) == 1:  # only the upper limit
        limits = [0, *limits]
    device, wanted = settings.pop("device", None), settings.pop("requires_grad", False)
    _refuse_generator(settings.pop("generator", None))
    if device is not None and torch.device(device).type != volume.device.type:
        refuse(f"the volume lies on {volume.device.type} devices, not on {device}")
    slabs = []
    for slab, generator in zip(volume.slabs, generators(volume), strict=True):
        slabs.append(torch.empty_like(slab, **settings, requires_grad=False))
        FILLED[func.__name__](slabs[-1], *limits, generator=generator)
    return wrap(volume, [slab.requires_grad_(wanted) for slab in slabs])


LEAKED = "input lower upper training inplace generator"


@handles("Activations", "F.rrelu", "torch.rrelu", "torch.rrelu_", merged=True, treats=LEAKED)
def rrelu(func: Callable, given: Any) -> Any:
    """Scale negative voxels by the mean slope, or in training each by its own random slope."""
    _refuse_generator(getattr(given, "generator", None))
    volume, lower, upper = given.input, given.lower, given.upper
    inplace = getattr(given, "inplace", False) or func.__name__.endswith("_")
    if not given.training:
        return (in_place if inplace else pointwise)(
            torch.rrelu_ if inplace else torch.rrelu, (volume, lower, upper), {}
        )
    with with_overrides():
        slopes = torch.empty_like(volume, requires_grad=False).uniform_(lower, upper)
        factors = torch.where(volume <= 0, slopes, 1.0)
        return volume.mul_(factors) if inplace else volume * factors


def _refuse_generator(generator: torch.Generator | None) -> None:
    refuse_if(generator is not None, "a generator= draws on one device; seed torch with torch.manual_seed instead")


@handles("Dropout", "F.alpha_dropout", "torch.alpha_dropout", "F.feature_alpha_dropout", rehearse=False, merged=True)
def alpha_dropout(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the volume unchanged in eval mode; refuse training."""
    named = bind(func, args, kwargs)
    refuse_if(named.get("training", False) and named.get("p", 0.5) != 0, "alpha dropout has no sharded form")
    return named["input"]


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
