"""Random voxels: drawn independently on every shard, from one seed.

The seed comes from the CPU's default generator, which all processes of a group hold in the same state during a forward
pass (see ``strategy``); elsewhere they agree on one. So one seed repeats a run, and a recomputation, which gets that
generator's state of then, repeats its numbers. They are not the numbers that torch would draw for the whole volume.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.group import ProcessGroupShards
from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.pointwise import aligned, in_place, pointwise
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["common_generator", "fill_randomly", "generators"]


def draw_seed(volume: ShardedVolume) -> int:
    """Draw a seed that every shard agrees on."""
    context = volume.context
    own = torch.randint(2**62, ())
    if isinstance(context.communicator, ProcessGroupShards) and not context.in_pass:
        # Outside of a forward pass each process has drawn what it liked: the first one's number counts.
        return int(context.communicator.stack(own.to(context.communicator.home).view(1))[0].item())
    return int(own.item())


def generators(volume: ShardedVolume) -> list[torch.Generator | None]:
    """Return a generator for each slab, to draw differently on each."""
    if _capturing(volume):
        return [volume.context.graph_generator for _ in volume.slabs]
    seed = draw_seed(volume)
    # Seeds one apart would give the CPU's Mersenne twister related streams; a large odd step does not.
    seeds = [(seed + index * 0x9E3779B97F4A7C15) % 2**63 for index in volume.context.communicator.indices]
    return [torch.Generator(slab.device).manual_seed(own) for slab, own in zip(volume.slabs, seeds, strict=True)]


def common_generator(volume: ShardedVolume) -> torch.Generator | None:
    """Return a generator on the home device that draws alike in every process."""
    if _capturing(volume):  # every process's default generator has the same state: see ``graphs``
        return None
    return torch.Generator(volume.context.communicator.home).manual_seed(draw_seed(volume))


def _capturing(volume: ShardedVolume) -> bool:
    return volume.is_cuda and torch.cuda.is_current_stream_capturing()


FILLS = ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]


@handles("Random numbers", *(f"Tensor.{name}" for name in FILLS))
def fill_randomly(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Fill a volume in place."""
    volume, *settings = args
    if not isinstance(volume, ShardedVolume):
        return unsupported(func, args, kwargs, "a probability per voxel belongs to a volume that is cut alike")
    if kwargs.get("generator") is not None:
        return _one_generator(func, args, kwargs)
    volume.context.settle()
    columns = [aligned(value, volume) for value in settings]
    named = {name: aligned(value, volume) for name, value in kwargs.items() if name != "generator"}
    for index, (slab, generator) in enumerate(zip(volume.slabs, generators(volume), strict=True)):
        own = {name: values[index] for name, values in named.items()}
        func(slab, *(values[index] for values in columns), **own, generator=generator)
    return volume


@handles("Random numbers", "bernoulli")
def bernoulli(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw zeros and ones, each voxel with its own probability, or all with ``p``."""
    given = bound("input p", args, kwargs, p=None, generator=None)
    volume, p = given["input"], given["p"]
    if given["generator"] is not None or given.get("out") is not None:
        return _one_generator(func, args, kwargs)
    if not isinstance(volume, ShardedVolume) or isinstance(p, Tensor):
        return unsupported(func, args, kwargs, "the input must be the volume, and p a number")
    chance = () if p is None else (p,)
    pairs = zip(volume.slabs, generators(volume), strict=True)
    return wrap(volume, [torch.bernoulli(slab, *chance, generator=generator) for slab, generator in pairs])


@handles("Random numbers", "torch.rand_like", "torch.randn_like", "torch.randint_like")
def random_like(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw a volume of random numbers, cut as the given one."""
    name = func.__name__
    given = bound("input low high" if name == "randint_like" else "input", args, kwargs)
    volume = given.pop("input")
    if given.pop("generator", None) is not None:
        return _one_generator(func, args, kwargs)
    if name == "randint_like":
        low, high = given.pop("low", 0), given.pop("high", None)
        limits = (0, low) if high is None else (low, high)
    device, wanted = given.pop("device", None), given.pop("requires_grad", False)
    if device is not None and torch.device(device).type != volume.device.type:
        return unsupported(func, args, kwargs, f"the volume lies on {volume.device.type} devices, not on {device}")
    slabs = []
    for slab, generator in zip(volume.slabs, generators(volume), strict=True):
        empty = torch.empty_like(slab, **given, requires_grad=False)
        if name == "randint_like":
            empty.random_(*limits, generator=generator)
        elif name == "rand_like":
            empty.uniform_(generator=generator)
        else:
            empty.normal_(generator=generator)
        slabs.append(empty.requires_grad_(wanted))
    return wrap(volume, slabs)


@handles("Activations", "F.rrelu", "torch.rrelu", "torch.rrelu_")
def rrelu(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Scale negative voxels: by the mean slope, or in training each by a slope of its own."""
    last = "inplace" if func.__module__ == "torch.nn.functional" else "generator"
    defaults = {"lower": 1 / 8, "upper": 1 / 3, "training": False, "inplace": False, "generator": None}
    given = bound(f"input lower upper training {last}", args, kwargs, **defaults)
    volume, limits = given["input"], (given["lower"], given["upper"])
    if given["generator"] is not None:
        return _one_generator(func, args, kwargs)
    changes = given["inplace"] or func.__name__.endswith("_")
    if not given["training"]:
        return (in_place if changes else pointwise)(func, args, kwargs)
    volume.context.settle()
    results = []
    for slab, generator in zip(volume.slabs, generators(volume), strict=True):
        slopes = torch.empty_like(slab, requires_grad=False).uniform_(*limits, generator=generator)
        factors = torch.where(slab <= 0, slopes, 1.0)
        results.append(slab.mul_(factors) if changes else slab * factors)
    return volume if changes else wrap(volume, results)


def _one_generator(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return unsupported(
        func, args, kwargs, "a generator= draws on one device; seed torch with torch.manual_seed instead"
    )
