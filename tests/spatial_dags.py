"""Random networks for the spatial strategy, each compared with itself on one device.

A seed draws everything: the layers, the steps of the network's forward, its inputs, the shards, and how it is trained.
So a seed is all that is needed to see a failure again, and all ranks of a group draw the same network from it.
"""

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside_plain import RunLayers, attention_by_plain_forms, name_cpus
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.spatial.volume import ShardedVolume

CHANNELS = 4

TOLERANCE = 1e-7
"""Relative, in float64. Round-off grows through products and norms (eps 0.1) to some 1e-10; a wrong plane shows at
1e-4."""

TILE_ELEMENTS = 200
"""So few that small volumes are convolved in several tiles."""


# Layers: each takes and returns four channels.


def squeeze_excite(net: RunLayers, x: Tensor) -> Tensor:
    """Gate channels by the mean over all voxels."""
    return x * net.mix(F.adaptive_avg_pool3d(x, 1).flatten(1)).sigmoid().view(len(x), CHANNELS, 1, 1, 1)


def attend_to_channels(net: RunLayers, x: Tensor) -> Tensor:
    """Gate channels by mean and maximum over all voxels, by one shared perceptron."""
    gate = net.mix(x.mean((2, 3, 4))) + net.mix(x.amax(dim=(2, 3, 4)))
    return x * torch.sigmoid(gate)[..., None, None, None]


def attend_to_places(net: RunLayers, x: Tensor) -> Tensor:
    """Gate voxels by mean and maximum over channels."""
    planes = torch.cat([x.mean(1, keepdim=True), x.max(axis=1, keepdims=True).values], axis=1)
    return x * net.mix(planes).sigmoid()


def attend_to_voxels(net: RunLayers, x: Tensor) -> Tensor:
    """Let every voxel attend to all voxels of a coarser grid."""
    coarse = F.adaptive_avg_pool3d(x, 2)
    q = net.query(x).flatten(2).transpose(1, 2)
    k, v = net.key(coarse).flatten(2), net.value(coarse).flatten(2).transpose(1, 2)
    return x + (torch.softmax(q @ k, -1) @ v).transpose(1, 2).reshape(x.shape)


class WrittenAttention(nn.Module):
    """Heads of voxels that attend to all others, or to those of their window along D, with a bias for each distance."""

    def __init__(self, window: int = 0, heads: int = 2) -> None:
        super().__init__()
        self.mix, self.bias = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Parameter(torch.randn(heads, 1, 1))
        self.window, self.heads = window, heads

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:].numel() > 800:
            return x * 0.9
        last = x.movedim(1, -1)
        planes = self.window if self.window and x.shape[2] % self.window == 0 else x.shape[2]
        tokens = last.reshape(-1, planes * x.shape[3:].numel(), CHANNELS)
        mixed = self.mix(tokens).reshape(*tokens.shape[:2], 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.linspace(-1, 1, tokens.shape[1], dtype=x.dtype)
        scores = q @ k.transpose(-2, -1) * 0.5 + self.bias * (places[:, None] - places)
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(last.shape)
        return x + found.movedim(-1, 1)


def norm_last(net: RunLayers, x: Tensor) -> Tensor:
    """Compute a layer norm and a linear layer over channels that lie last."""
    return net.mix(net.norm(x.permute(0, 2, 3, 4, 1))).permute(0, 4, 1, 2, 3)


class Counter(nn.Module):
    """Counts its calls and follows the mean of what it sees, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3, 4)), 0.1)
        return x - self.mean.view(1, CHANNELS, 1, 1, 1) / self.calls.clamp(min=1)


def remember(net: RunLayers, x: Tensor) -> Tensor:
    """Keep a volume from one forward to the next."""
    kept, net.kept = net.kept, x.detach()
    return x * 1.5 if kept is None or kept.shape != x.shape else x + kept.tanh()


def scale(net: RunLayers, x: Tensor) -> Tensor:
    """Use raw parameters: one number for each channel, and one for all."""
    return torch.addcmul(net.shift, x, net.scale) + (net.scale * x).mean() * 0.1


class Drawn(nn.Module):
    """A convolution, transposed convolution or pooling whose settings a seed draws; nothing where it does not fit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        kernel, stride, padding, dilation = rng.randint(1, 5), rng.randint(1, 3), rng.randint(0, 2), rng.randint(1, 2)
        kind, groups = rng.choice(("conv", "conv", "up", "pool")), rng.choice([1, 2])
        bias, ceil = rng.choices((False, True), k=2)
        self.grows = kind == "up"
        if self.grows:
            self.layer: nn.Module = nn.ConvTranspose3d(
                CHANNELS, CHANNELS, kernel, stride, min(padding, kernel - 1), rng.randint(0, stride - 1), groups
            )
        elif kind == "pool":
            pool = rng.choice([nn.MaxPool3d, nn.AvgPool3d])
            padding, dilation = min(padding, kernel // 2), 1
            self.layer = pool(kernel, stride, padding, ceil_mode=ceil)
        else:
            padding = min(padding, kernel)
            self.layer = nn.Conv3d(CHANNELS, CHANNELS, kernel, stride, padding, dilation, groups, bias)
        self.least = 2 if self.grows else (kernel - 1) * dilation + 1 - 2 * padding + stride

    def forward(self, x: Tensor) -> Tensor:
        fits = min(x.shape[2:]) >= self.least and not (self.grows and x.shape[2:].numel() > 800)
        return self.layer(x) if fits else x * 0.9


DRAWN = tuple(f"drawn {seed}" for seed in range(60))


def conv(kernel: int | tuple[int, ...] = 3, **options: Any) -> nn.Module:
    options = {"padding": kernel // 2 if isinstance(kernel, int) else tuple(k // 2 for k in kernel)} | options
    return nn.Conv3d(CHANNELS, CHANNELS, kernel, **options)


def block(norm: Callable[[], nn.Module], act: Callable[[], nn.Module]) -> nn.Module:
    """Return a double convolution, which ``checkpoint=`` recomputes."""
    return nn.Sequential(conv(), norm(), act(), conv(), norm(), act())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv,
    "conv 1": lambda: conv(1),
    "conv 5": lambda: conv(5),
    "conv, flat kernel": lambda: conv((1, 3, 3)),
    "conv, dilated": lambda: conv(3, dilation=2, padding=2),
    "conv, grouped": lambda: conv(3, groups=2, bias=False),
    "conv, depthwise": lambda: conv(3, groups=CHANNELS),
    "conv, strided": lambda: conv(3, stride=2),
    "conv, strided in plane": lambda: conv(3, stride=(1, 2, 2)),
    "conv, circular": lambda: conv(3, padding_mode="circular"),
    "conv, replicating": lambda: conv(3, padding_mode="replicate"),
    "conv, stride is kernel": lambda: nn.Conv3d(CHANNELS, CHANNELS, 2, 2),
    "transposed conv": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 2, 2),
    "transposed conv, overlapping": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, 2, 1, 1),
    "transposed conv, 4 by 2": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 4, 2, 1, bias=False),
    "transposed conv, 5 by 2": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 5, 2, 2, 1, groups=2),
    "transposed conv, 5 by 3": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, (5, 1, 1), (3, 1, 1), (1, 0, 0)),
    "transposed conv, same size": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 5, 1, 2),
    "transposed conv, dilated": lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, 1, 2, dilation=2, groups=CHANNELS),
    "written attention": WrittenAttention,
    "written attention, windows": lambda: WrittenAttention(2),
    "written attention, one head": lambda: WrittenAttention(heads=1),
    "batch norm": lambda: nn.BatchNorm3d(CHANNELS, eps=0.1),
    "batch norm, untracked": lambda: nn.BatchNorm3d(CHANNELS, eps=0.1, track_running_stats=False),
    "batch norm, cumulative": lambda: nn.BatchNorm3d(CHANNELS, eps=0.1, momentum=None),
    "instance norm": lambda: nn.InstanceNorm3d(CHANNELS, eps=0.1),
    "instance norm, tracked": lambda: nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS, eps=0.1),
    "norm and activation": lambda: nn.Sequential(nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True), nn.LeakyReLU()),
    "norm and activation, in place": lambda: nn.Sequential(
        nn.BatchNorm3d(CHANNELS, eps=0.1), nn.LeakyReLU(0.1, inplace=True)
    ),
    "prelu": nn.PReLU,
    "prelu of channels": lambda: nn.PReLU(CHANNELS),
    "dropout of nothing": lambda: nn.Dropout3d(0.0),
    "block": lambda: block(
        lambda: nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True), lambda: nn.LeakyReLU(inplace=True)
    ),
    "block, batch norm": lambda: block(lambda: nn.BatchNorm3d(CHANNELS, eps=0.1), nn.PReLU),
    "block, group norm": lambda: block(lambda: nn.GroupNorm(2, CHANNELS, eps=0.1), nn.GELU),
    "norm alone behind conv": lambda: nn.Sequential(conv(), nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True)),
    "batch norm alone behind conv": lambda: nn.Sequential(conv(), nn.BatchNorm3d(CHANNELS, eps=0.1)),
    "group norm alone behind conv": lambda: nn.Sequential(conv(), nn.GroupNorm(2, CHANNELS, eps=0.1)),
    "norm and prelu": lambda: nn.Sequential(nn.InstanceNorm3d(CHANNELS, eps=0.1), nn.PReLU(CHANNELS)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
    "squeeze and excite": lambda: RunLayers(squeeze_excite, mix=nn.Linear(CHANNELS, CHANNELS)),
    "channel attention": lambda: RunLayers(
        attend_to_channels, mix=nn.Sequential(nn.Linear(CHANNELS, 2), nn.ReLU(inplace=True), nn.Linear(2, CHANNELS))
    ),
    "spatial attention": lambda: RunLayers(attend_to_places, mix=nn.Conv3d(2, 1, 3, padding=1)),
    "voxel attention": lambda: RunLayers(attend_to_voxels, query=conv(1), key=conv(1), value=conv(1)),
    "layer norm, channels last": lambda: RunLayers(
        norm_last, norm=nn.LayerNorm(CHANNELS, eps=0.1), mix=nn.Linear(CHANNELS, CHANNELS)
    ),
    "counter": Counter,
    "memory": lambda: RunLayers(remember, kept=None),
    "raw parameters": lambda: RunLayers(
        scale, scale=nn.Parameter(torch.ones(CHANNELS, 1, 1, 1)), shift=nn.Parameter(torch.zeros(()))
    ),
    **{name: partial(Drawn, seed) for seed, name in enumerate(DRAWN)},
}


# Functions of one value, of two values, and changes in place, which return the value that goes on.


def fitted(y: Tensor, like: Tensor) -> Tensor:
    """Resample a value to another one's grid."""
    if y.shape[2:] == like.shape[2:]:
        return y
    # Corners aligned: otherwise half the size is the mean of two voxels, as of a pooling, and a comparison undecided.
    return F.interpolate(y, size=like.shape[2:], mode="trilinear", align_corners=True)


def attended(x: Tensor) -> Tensor:
    """Mean over the voxels, weighted by a softmax over all of them."""
    flat = x.flatten(2)
    return x + (flat.softmax(-1) * flat).sum(-1)[..., None, None, None]


def shrunk(x: Tensor, small: Callable[[Tensor], Tensor], least: int = 2) -> Tensor:
    """Apply a function that makes volumes smaller, where it leaves something."""
    return small(x) if min(x.shape[2:]) >= least else x * 0.9


def grown(x: Tensor, large: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that makes volumes larger, as long as they are small."""
    return large(x) if x.shape[2:].numel() <= 800 else x * 0.9


Unary = Callable[[Tensor], Tensor]

UNARY: dict[str, Unary] = {
    "relu": F.relu,
    "leaky, falling": lambda x: F.leaky_relu(x, -0.3),
    "elu": lambda x: F.elu(x, 1.7),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": lambda x: F.silu(input=x),
    "tanh and sigmoid": lambda x: torch.tanh(x) * x.sigmoid(),
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(min=-1.0, max=torch.tensor(1.5, dtype=x.dtype)),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x: x * (x > 0.1),
    "masked fill": lambda x: x.masked_fill(x < -1, -1.0),
    "softmax of channels": lambda x: torch.softmax(x, axis=1),
    "softmax along the cut": lambda x: x * F.softmax(x, dim=2),
    "log softmax of voxels": attended,
    "standardised": lambda x: (x - x.mean((2, 3, 4), keepdim=True)) / (x.std(axis=(2, 3, 4), keepdims=True) + 1),
    "less the maximum": lambda x: x - x.amax((2, 3, 4), keepdim=True),
    "by its norm": lambda x: x / (1 + torch.linalg.vector_norm(x, dim=(1, 2, 3, 4), keepdim=True)),
    "plus a sum over D": lambda x: x + 0.1 * x.sum(axis=2, keepdims=True),
    "plus a maximum over H": lambda x: x + 0.1 * x.max(dim=3, keepdim=True)[0],
    "plus the mean": lambda x: x + torch.mean(x),
    "cumulative": lambda x: torch.cumsum(x, 3) * 0.3,
    "pow and sqrt": lambda x: (x.pow(2) + 0.1).sqrt(),
    "narrow D": lambda x: x.narrow(2, 1, x.shape[2] - 1) if x.shape[2] > 2 else x,
    "narrow W": lambda x: x[..., :-1] if x.shape[4] > 2 else x,
    "every second plane": lambda x: x[:, :, ::2],
    "first half along D": lambda x: x.chunk(2, 2)[0],
    "halves swapped along D": lambda x: torch.cat(x.tensor_split(2, 2)[::-1], axis=2),
    "halves swapped along C": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    "flipped": lambda x: x.flip(2, 4),
    "rolled": lambda x: x.roll(1, 2),
    "transposed": lambda x: x.transpose(3, 4),
    "cut dim transposed": lambda x: x.transpose(2, 3),
    "moved": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1).contiguous(),
    "flattened": lambda x: x.flatten(3).unflatten(3, tuple(x.shape[3:])),
    "flat voxels": lambda x: x.flatten(2).sigmoid().view(x.shape),
    "reshaped channels": lambda x: x.reshape(x.shape[0], 2, -1, *x.shape[2:]).flip(1).flatten(1, 2),
    "batch folded": lambda x: F.relu(x.reshape(-1, 1, *x.shape[2:])).view(x.shape),
    "planes one by one": lambda x: torch.stack([plane * 1.1 for plane in x.unbind(3)], 3),
    "index of channels": lambda x: x[:, [2, 0, 3, 1]],
    "index select": lambda x: x.index_select(1, torch.tensor([3, 2, 1, 0])),
    "repeated and summed": lambda x: x.repeat(1, 2, 1, 1, 1).unflatten(1, (2, -1)).sum(1) * 0.5,
    "expanded": lambda x: x[:, :1].expand_as(x) + x,
    "einsum of channels": lambda x: torch.einsum("bcdhw,ec->bedhw", x, torch.eye(CHANNELS, dtype=x.dtype).flip(0)),
    "padded": lambda x: F.pad(x, (0, 1, 1, 0, 2, 0)) if max(x.shape) < 20 else x,
    "padded, reflecting": lambda x: shrunk(x, lambda v: F.pad(v, (1, 1, 0, 0, 1, 1), mode="reflect"), 3),
    "pooled": lambda x: shrunk(x, lambda v: F.max_pool3d(v, 2)),
    "pooled, ceiling": lambda x: shrunk(x, lambda v: F.avg_pool3d(v, 2, ceil_mode=True)),
    "pooled, overlapping": lambda x: shrunk(x, lambda v: F.max_pool3d(v, 3, stride=1, padding=1)),
    "pooled along D": lambda x: shrunk(x, lambda v: F.avg_pool3d(v, (2, 1, 1))),
    "pooled to one": lambda x: x * (1 + F.adaptive_avg_pool3d(x, 1)),
    "pooled, adaptive": lambda x: F.adaptive_max_pool3d(x, 3),
    "unpooled": lambda x: shrunk(
        x, lambda v: F.max_unpool3d(*F.max_pool3d(v, 2, return_indices=True), 2, output_size=v.shape[2:])
    ),
    "upsampled": lambda x: grown(x, lambda v: F.interpolate(v, scale_factor=2)),
    "upsampled, trilinear": lambda x: grown(x, lambda v: F.interpolate(v, scale_factor=1.5, mode="trilinear")),
    "upsampled, aligned": lambda x: grown(
        x, lambda v: F.interpolate(v, scale_factor=(2, 1, 1), mode="trilinear", align_corners=True)
    ),
    "resampled to odd sizes": lambda x: F.interpolate(x, size=(5, 7, 3), mode="trilinear"),
    "resampled, area": lambda x: F.interpolate(x, size=(4, 3, 5), mode="area"),
    "detached part": lambda x: x + x.detach().tanh(),
    "same dtype": lambda x: x.to(x.dtype),
    "float32 and back": lambda x: x.float().double(),
    "contiguous": lambda x: x.contiguous(),
    "cloned": lambda x: x.clone(),
    "through a mask of integers": lambda x: x * (x > 0).long().sum(1, keepdim=True),
    "argmax as weight": lambda x: x * (1 + x.argmax(1, keepdim=True)),
    "gathered": lambda x: torch.gather(x, 1, x.argsort(dim=1)),
    "sorted channels": lambda x: x.sort(dim=1, descending=True)[0],
    "plus ones": lambda x: x + torch.ones_like(x) * 0.1,
    "plus positions": lambda x: x + torch.linspace(-1, 1, x.shape[2], dtype=x.dtype).view(-1, 1, 1),
    "statistics beside": lambda x: x + torch.stack(torch.var_mean(x, (2, 3, 4)), 0).sum(0)[..., None, None, None] * 0.1,
}


def affinity(x: Tensor, y: Tensor) -> Tensor:
    """Add products of channels, summed over the voxels.

    Of pairs, not of all with all: of a batch of one, that gives a gradient of odd strides, with which torch 2.13's own
    norms are wrong on the CPU, or read beyond memory.
    """
    return x + torch.einsum("bcdhw,bcdhw->bc", x, y.flip(1))[..., None, None, None] * 0.01


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: torch.add(x, y, alpha=0.5),
    "sum": lambda x, y: x + y,
    "sum and relu": lambda x, y: F.relu(x + y),
    "sum and gelu": lambda x, y: F.gelu(y + x),
    "sub": lambda x, y: torch.sub(x1=x, x2=y * 0.5),
    "mul": lambda x, y: x * y.tanh(),
    "div": lambda x, y: torch.div(x, y.abs() + 1),
    "maximum": torch.maximum,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "concatenate and mix": lambda x, y: torch.cat([x, y], 1).unflatten(1, (2, -1)).mean(1),
    "concatenate channels": lambda x, y: torch.cat((x[:, :1], y[:, 1:]), dim=1),
    "concatenate along D": lambda x, y: torch.cat([x, y], 2) if max(x.shape) < 20 else x + y,
    "stack": lambda x, y: torch.stack((x, y), dim=2).amax(2) * 1.0,
    "gate by a mean": lambda x, y: x * y.mean((2, 3, 4), keepdim=True).sigmoid(),
    "affinity": affinity,
    "cosine": lambda x, y: x * F.cosine_similarity(x, y, dim=1).unsqueeze(1),
    "one channel broadcast": lambda x, y: x + y[:, :1],
    "one plane broadcast": lambda x, y: x + y[:, :, :1] * 0.5,
}


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


HALF = (slice(None), slice(0, 2))
"""Two of the channels."""

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu_": lambda x, y: F.relu(x, inplace=True),
    "leaky_relu_": lambda x, y: F.leaky_relu_(x, 0.2),
    "mul_": lambda x, y: x.mul_(0.8),
    "+=": lambda x, y: x.__iadd__(0.3),
    "+= the other": lambda x, y: x.__iadd__(y),
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "sub_ itself": lambda x, y: x.sub_(x * 0.5),
    "clamp_": lambda x, y: x.clamp_(-1.5, 1.5),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(x > 1, 1.0),
    "zero_ a channel": lambda x, y: x[:, 1].zero_(),
    "mul_ two channels": lambda x, y: x[:, :2].mul_(1.2),
    "add_ to narrow": lambda x, y: x.narrow(1, 1, 2).add_(y[:, 1:3]),
    "mul_ a chunk": lambda x, y: x.chunk(2, 1)[1].mul_(0.7),
    "mul_ a transposed": lambda x, y: x.transpose(1, 4).mul_(0.9),
    "mul_ a view": lambda x, y: x.view(x.shape[0], -1).mul_(0.9),
    "mul_ a reshape": lambda x, y: x.reshape(x.shape[0], 2, 2, *x.shape[2:]).mul_(0.9),
    "mul_ contiguous": lambda x, y: x.contiguous().mul_(0.9),
    "mul_ flat": lambda x, y: x.flatten(2).mul_(0.9),
    "mul_ detached": lambda x, y: x.detach().mul_(0.9),
    "mul_ data": lambda x, y: x.data.mul_(0.9),
    "mul_ of the same dtype": lambda x, y: x.to(x.dtype).mul_(0.9),
    "mul_ double": lambda x, y: x.double().mul_(0.9),
    "mul_ positive": lambda x, y: (+x).mul_(0.9),
    "mul_ after dropout that is off": lambda x, y: F.dropout(x, 0.5, False).mul_(0.9),
    "mul_ unbound": lambda x, y: x.unbind(1)[0].mul_(0.9),
    "mul_ selected": lambda x, y: x.select(1, -1).mul_(0.9),
    "mul_ a copy": lambda x, y: x.flip(1).mul_(0.9),
    "set channels": lambda x, y: _set(x, HALF, y[:, 2:]),
    "set channels to a number": lambda x, y: _set(x, HALF, 0.5),
    "set planes": lambda x, y: _set(x, (slice(None), slice(None), slice(1, 3)), 0.1),
    "set planes to planes": lambda x, y: _set(x, (slice(None), slice(None), slice(0, 1)), y[:, :, -1:]),
    "set every second plane": lambda x, y: _set(x, (..., slice(None, None, 2), slice(None), slice(None)), 0.2),
    "zero_ a plane": lambda x, y: x[:, :, 0].zero_(),
    "mul_ planes": lambda x, y: x[:, :, 1:3].mul_(0.5),
    "mul_ columns": lambda x, y: x[..., 1:].mul_(0.5),
    "add into zeros": lambda x, y: torch.zeros_like(x).add_(x).mul_(1.1),
    "set into zeros": lambda x, y: _set(torch.zeros_like(x), (slice(None), slice(1, None)), x[:, 1:]),
    "set into new zeros": lambda x, y: _set(x.new_zeros(x.shape), (slice(None), slice(1, None)), x[:, 1:]),
    "where_ by index": lambda x, y: _set(x, x < -1, -1.0),
}

AROUND = ("", "", "", "", "", "", "no_grad first", "no_grad", "checkpoint", "relu behind", "cat behind")

BEHIND = ("hook", "hook behind", "change behind", "change the second behind")
"""What may be done with a step's result, and with its inputs once it has run."""


@dataclass(frozen=True)
class Step:
    """One node of the network: what it does, to which earlier values (counted back from the latest), and around it."""

    kind: str
    name: str
    first: int
    second: int
    around: str = ""

    def __str__(self) -> str:
        around = f" [{self.around}]" if self.around else ""
        return f"{self.kind} {self.name!r} of -{self.first}, -{self.second}{around}"


@dataclass(frozen=True)
class Plan:
    """Everything about one comparison; drawn from a seed, or written by hand."""

    seed: int
    layers: tuple[str, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    second: str
    """The second input: "same", "another", "coarse", "vector", "label"."""
    outputs: str = "all"
    loss: str = "volume"
    needs_gradient: bool = True
    steps_of_training: int = 2
    shards: int = 2
    grid: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"  layer {number}: {name}" for number, name in enumerate(self.layers)]
        lines += [f"  v{number + 2} = {step}" for number, step in enumerate(self.steps)]
        rest = {k: v for k, v in vars(self).items() if k not in ("layers", "steps")}
        return "\n".join([f"  {rest}", *lines])


FUSED: dict[str, tuple[str, ...]] = {
    "layer": (
        *("norm alone behind conv", "batch norm alone behind conv", "group norm alone behind conv", "norm and prelu"),
        *("norm and activation", "prelu of channels", "conv", "block", "transposed conv"),
    ),
    "unary": ("leaky, falling", "elu", "gelu", "gelu, tanh", "sigmoid", "relu", "detached part"),
    "binary": ("sum", "sum", "sum and relu", "sum and gelu", "concatenate and mix"),
    "in place": ("+= the other", "relu_", "mul_", "leaky_relu_"),
}
"""What one kernel does instead of several, and what comes between."""

OF_SLABS = (
    *("transposed conv, 4 by 2", "transposed conv, 5 by 2", "transposed conv, 5 by 3", "transposed conv, same size"),
    *("transposed conv, dilated", "written attention", "written attention, windows", "written attention, one head"),
)
"""What exchanges planes, or keys, in ways of its own; ``draw_slabs`` alone draws it."""

OTHERS = tuple(name for name in LAYERS if name not in (*OF_SLABS, *DRAWN))

TABLES: dict[str, dict[str, Any]] = {"unary": UNARY, "binary": BINARY, "in place": IN_PLACE}


def _draw_kind(rng: random.Random, *weights: int) -> str:
    return rng.choices(("layer", *TABLES), weights)[0]


def _draw_step(rng: random.Random, kind: str, name: str, behind: float = 0.0) -> Step:
    """Draw what a step reads, and what is around it or, with some probability, behind it."""
    first = 1 if rng.random() < 0.7 else rng.randint(1, 4)
    around = rng.choices(BEHIND, (6, 2, 1, 1))[0] if rng.random() < behind else rng.choice(AROUND)
    return Step(kind, name, first, rng.randint(1, 5), around)


def draw_fused(seed: int) -> Plan:
    """Draw a network of norms, activations and sums in close succession, often recomputed, or in tiles."""
    return _draw_fused(random.Random(seed), seed, 0, (3, 8), 1.0, 0.0)


def draw_deep(seed: int) -> Plan:
    """Draw a network of many fused operators among others, with hooks and changes before and behind each."""
    return _draw_fused(random.Random(seed), seed, 2, (10, 24), 0.8, 0.15)


def _draw_fused(
    rng: random.Random, seed: int, others: int, count: tuple[int, int], share: float, behind: float
) -> Plan:
    layers = (*rng.choices(FUSED["layer"], k=4 - others // 2), *rng.choices(OTHERS, k=others))
    steps = []
    for _ in range(rng.randint(*count)):
        kind = _draw_kind(rng, 6, 3, 4, 1)
        names = FUSED[kind] if rng.random() < share else tuple(TABLES.get(kind, FUSED[kind]))
        name = str(rng.randrange(len(layers))) if kind == "layer" else rng.choice(names)
        steps.append(_draw_step(rng, kind, name, behind))
    checkpoint = rng.choice([None, None, "all", "tiled", 1])
    return replace(
        draw(seed),
        layers=layers,
        steps=tuple(steps),
        options={} if checkpoint is None else {"checkpoint": checkpoint},
        grid=None,
        shards=rng.choice([1, 2, 2, 3]),
        outputs=rng.choice(["last", "all"]),
    )


def draw_stack(seed: int) -> Plan:
    """Draw convolutions and poolings of any settings, and norms, on slabs down to a plane."""
    rng = random.Random(seed)
    norms = ("batch norm", "instance norm", "instance norm, tracked", "group norm")
    steps = []
    for _ in range(rng.randint(1, 6)):
        kind = _draw_kind(rng, 6, 2, 2, 0)
        name = str(rng.randrange(4)) if kind == "layer" else rng.choice(list(TABLES[kind]))
        steps.append(_draw_step(rng, kind, name))
    return replace(
        draw(seed),
        layers=(*rng.choices(DRAWN, k=3), rng.choice(norms)),
        steps=tuple(steps),
        shape=(rng.randint(1, 2), CHANNELS, rng.randint(3, 17), rng.randint(3, 9), rng.randint(3, 7)),
        options={"axes": rng.choice(["D", "D", "H", None]), "channels_last": rng.random() < 0.5},
        grid=None,
        shards=rng.choice([1, 2, 3, 4, 8]),
    )


def draw_slabs(seed: int, shards: int | None = None) -> Plan:
    """Draw a network of transposed convolutions, attention and sums, with hooks and changes before and behind each."""
    rng = random.Random(seed)
    others = ("conv", "conv 5", "conv, strided", "norm and activation", "group norm", "batch norm alone behind conv")
    layers = (*rng.choices(OF_SLABS, k=2), *rng.choices((*OF_SLABS, "transposed conv, overlapping", *others), k=2))
    steps = []
    for _ in range(rng.randint(2, 8)):
        kind = _draw_kind(rng, 7, 2, 3, 1)
        name = str(rng.randrange(4)) if kind == "layer" else rng.choice(list(TABLES[kind]))
        steps.append(_draw_step(rng, kind, name, 0.2))
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["checkpoint"] = rng.choice(["all", 1, "tiled"])
    if rng.random() < 0.25:
        options["channels_last"] = True
    if shards is None and rng.random() < 0.6:
        options["fixed_order"] = True  # which goes the way of processes
    sizes = rng.choice([(12, 5, 4), (9, 6, 5), (16, 4, 4), (5, 4, 3), (8, 4, 4), (6, 4, 4), (13, 3, 4), (24, 2, 2)])
    return replace(
        draw(seed),
        layers=layers,
        steps=tuple(steps),
        shape=(rng.choice([1, 1, 2, 3]), CHANNELS, *sizes),
        second=rng.choice(["same", "another"]),
        options=options,
        grid=None,
        shards=rng.choice([2, 2, 3]) if shards is None else shards,
    )


def draw(seed: int, shards: int | None = None) -> Plan:
    """Draw a network; with ``shards``, for so many along one axis."""
    rng = random.Random(seed)
    layers = tuple(rng.choices(OTHERS, k=rng.randint(1, 4)))
    steps = []
    for _ in range(rng.randint(2, 10)):
        kind = _draw_kind(rng, 5, 4, 3, rng.choice((0, 1, 3)))
        name = str(rng.randrange(len(layers))) if kind == "layer" else rng.choice(list(TABLES[kind]))
        steps.append(_draw_step(rng, kind, name))
    sizes = rng.choice([(12, 5, 4), (9, 6, 5), (7, 9, 6), (16, 8, 8), (5, 4, 3), (8, 4, 4), (3, 6, 5), (11, 7, 3)])
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["checkpoint"] = rng.choice(["all", 1])
    if rng.random() < 0.2:
        options["channels_last"] = True
    if rng.random() < 0.1:
        options["on_unsupported"] = "gather"
    grid = None
    if shards is None:
        shards = rng.choice([1, 2, 2, 2, 2, 3, 3])
        if rng.random() < 0.15:
            shards, grid = 4, (2, 2)
            options["axes"] = rng.choice([("D", "H"), ("H", "W"), ("D", "W")])
    if grid is None and rng.random() < 0.4:
        options["axes"] = rng.choice("DHW")
    return Plan(
        seed,
        layers,
        tuple(steps),
        (rng.choice([1, 1, 2]), CHANNELS, *sizes),
        rng.choice(["same", "another", "another", "coarse", "vector", "label"]),
        rng.choice(["all", "last", "dict", "nested", "statistics"]),
        rng.choice(["volume", "whole"]),
        rng.random() < 0.8,
        2,
        shards,
        grid,
        options,
    )


class Dag(nn.Module):
    """Runs the steps of a plan; every value stays available to all later ones."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(LAYERS[name]() for name in plan.layers)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        values = [x * 1.0, self._second(x, other)]
        for step in self.plan.steps:
            first = values[-min(step.first, len(values))]
            values.append(self._around(step, first, values[-min(step.second, len(values))]))
        return self._outputs(values)

    def _second(self, x: Tensor, other: Tensor) -> Tensor:
        kind = self.plan.second
        if kind == "vector":
            return x * other[:, :, None, None, None]
        if kind == "label":
            return (
                torch.eye(CHANNELS, dtype=x.dtype)[other].movedim(-1, 1)
                if other.ndim == 4
                else (other == 1).to(x.dtype) * x
            )
        return other + 0.5

    def _around(self, step: Step, first: Tensor, second: Tensor) -> Tensor:
        if step.around == "no_grad first":
            with torch.no_grad():
                before = self._run(step, first * 1.0, second)
            after = self._run(step, first, second)
            return after + before.tanh() if before.shape == after.shape else after
        if step.around == "no_grad":
            with torch.no_grad():
                return self._run(step, first, second)
        if step.around == "checkpoint" and step.kind != "in place":
            return checkpoint(self._run, step, first, second, use_reentrant=False)
        result = self._run(step, first, second)
        # torch may crash where one of several views that was changed in place is hooked.
        hooked = not any(earlier.kind == "in place" for earlier in self.plan.steps)
        if step.around == "hook" and hooked and result.requires_grad:
            result.register_hook(lambda gradient: gradient * 1.5)
        if step.around == "hook behind" and hooked and first.requires_grad:
            first.register_hook(lambda gradient: gradient * 1.5)
        if step.around == "change behind":
            first.mul_(0.9)
        if step.around == "change the second behind":
            second.mul_(0.9)
        if step.around == "relu behind":
            return F.relu(result, inplace=step.kind != "in place")
        if step.around == "cat behind":
            return torch.cat([result, result * 0.5], 1)[:, 1:5]
        return result

    def _run(self, step: Step, first: Tensor, second: Tensor) -> Tensor:
        if step.kind == "layer":
            layer = self.layers[int(step.name)]
            strided = "stride" in self.plan.layers[int(step.name)]
            if strided and min(first.shape[2:]) < 3:
                return first * 0.9
            if "transposed" in self.plan.layers[int(step.name)]:
                return grown(first, layer)
            return layer(first)
        if step.kind == "unary":
            return UNARY[step.name](first)
        second = fitted(second, first)
        if step.kind == "binary":
            return BINARY[step.name](first, second)
        result = IN_PLACE[step.name](first, second)
        # What was changed goes on: itself, or what a function returned that has its shape.
        return result if isinstance(result, Tensor) and result.shape == first.shape else first

    def _outputs(self, values: list[Tensor]) -> Any:
        kind, last = self.plan.outputs, values[-1]
        if kind == "last":
            return last
        if kind == "dict":
            return {"logits": last, "earlier": [values[len(values) // 2]], "none": None}
        if kind == "nested":
            return (last, (values[1], {"mean": last.mean((2, 3, 4))}), 3)
        if kind == "statistics":
            return last, last.var((0, 2, 3, 4)), last.argmax(1), (last > 0).sum()
        return values


# The comparison.


NUDGE = 1e-12
"""Change of inputs and parameters that tells what depends on round-off: the slope of a ReLU behind the norm of a
constant, the largest of channels that are alike."""


def inputs_of(plan: Plan, nudge: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(plan.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = normal(*plan.shape)
    x = x * (1 + nudge * normal(*plan.shape))
    batch, channels, *sizes = plan.shape
    second = {
        "same": lambda: x,
        "another": lambda: normal(*plan.shape),
        "coarse": lambda: normal(batch, channels, *(max(2, size // 2) for size in sizes)),
        "vector": lambda: normal(batch, channels),
        "label": lambda: torch.randint(0, CHANNELS, (batch, 1, *sizes), generator=generator),
    }[plan.second]()
    return [x, second]


def weighted(output: Tensor, whole: bool) -> Tensor:
    """Return a number that depends on every voxel, on each otherwise."""
    if whole and isinstance(output, ShardedVolume):
        output = output.full_tensor()
    weights = torch.linspace(-1, 1, output.shape.numel(), dtype=torch.float64).view(output.shape).sin()
    return (output * weights.to(output.device)).sum() / max(1, output.shape.numel()) + output.square().mean() * 0.1


def observed(net: nn.Module, plan: Plan, nudge: float = 0.0) -> Iterator[tuple[str, Tensor | Any]]:
    """Train, then evaluate; yield everything that training touches, by name."""
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), 0.05, momentum=0.9) if parameters else None
    for number in range(plan.steps_of_training):
        x, other = inputs_of(plan, nudge)
        same = other is x
        x.requires_grad_(plan.needs_gradient)
        other = x if same else other.requires_grad_(plan.needs_gradient and other.is_floating_point())
        outputs = net(x, other=other)
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        wholes = [leaf.full_tensor() if isinstance(leaf, ShardedVolume) else leaf for leaf in leaves]
        for place, whole in enumerate(wholes):
            yield f"output {place}, step {number}", whole.detach().clone()
        learnt = [leaf for leaf in leaves if leaf.is_floating_point()]
        loss = sum((weighted(leaf, plan.loss == "whole") * (1 + n) for n, leaf in enumerate(learnt)), torch.zeros(()))
        yield f"loss, step {number}", loss.detach().clone()
        if loss.requires_grad:
            loss.backward()
        yield f"gradient of x, step {number}", x.grad
        yield f"gradient of the second input, step {number}", other.grad
        for name, parameter in parameters.items():
            yield f"gradient of {name}, step {number}", None if parameter.grad is None else parameter.grad.clone()
        for name, buffer in net.named_buffers():
            yield f"buffer {name}, step {number}", buffer.clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        for name, parameter in parameters.items():
            yield f"{name}, step {number}", parameter.detach().clone()
    net.eval()
    with torch.no_grad():
        outputs = net(*inputs_of(plan, nudge))
    for place, leaf in enumerate(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
        yield f"evaluated output {place}", leaf.full_tensor() if isinstance(leaf, ShardedVolume) else leaf
    for name, buffer in net.named_buffers():
        yield f"buffer {name} after evaluation", buffer.clone()


@contextmanager
def as_if_large(plan: Plan) -> Iterator[None]:
    """Let small volumes on a CPU go the ways of large ones on a GPU: tiles, sums, gradients, attention."""
    spatial = "volseg.parallel.spatial"
    with (
        patch(f"{spatial}.convolution.plan.TILE_ELEMENTS", TILE_ELEMENTS),
        patch(f"{spatial}.convolution.around.LARGE", (0, 0, 3000, 2**26)[plan.seed % 4]),
        # Only sums of two element types are written by tiles, which float64 has none of.
        patch(f"{spatial}.lazy.addition.has_fewer_digits", lambda *types: all(t.is_floating_point for t in types)),
        attention_by_plain_forms(),
    ):
        yield


@dataclass(frozen=True)
class Outcome:
    """What came of one comparison: "equal", "refused", "torch refuses" (the plain network too), "WRONG" or "CRASH"."""

    verdict: str
    what: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in ("WRONG", "CRASH")


def differences(found: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> dict[str, str]:
    """Return what differs by more than round-off."""
    if [name for name, _ in found] != [name for name, _ in expected]:
        return {"names": f"{sorted({n for n, _ in found} ^ {n for n, _ in expected})}"}
    tensors = [b for _, b in expected if isinstance(b, Tensor) and b.numel()]
    scale = max((float(b.double().abs().max()) for b in tensors), default=0.0)
    wrong = {}
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            # A parameter that took no part has no gradient, or zeros.
            one = next((t for t in (ours, theirs) if isinstance(t, Tensor)), None)
            if one is not None and bool(one.any()):
                wrong[name] = f"{ours} instead of {theirs}"
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            wrong[name] = f"{tuple(ours.shape)} {ours.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}"
            continue
        a, b = ours.detach().double(), theirs.detach().double()
        error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale, 1e-30) if b.numel() else 0.0
        if not error <= TOLERANCE:
            wrong[name] = f"relative error {error:.1e}"
    return wrong


class _LaidOut(torch.autograd.Function):
    """Nothing, whose gradient comes in torch's own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone(memory_format=torch.contiguous_format)


NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def lay_gradients_out(net: nn.Module) -> nn.Module:
    """Give the norms of a plain network gradients in torch's own order.

    On a CPU torch 2.13's own norms of a batch of one return wrong gradients for one with other strides: by finite
    differences ours were right where the plain network's were not (seeds 4296 and 4954).
    """
    for module in net.modules():
        if isinstance(module, NORMS):
            module.register_forward_hook(lambda _, __, output: _LaidOut.apply(output).clone())
    return net


def compared(plan: Plan, **where: Any) -> Outcome:
    """Compare the plan's network with itself on shards."""
    torch.manual_seed(plan.seed)
    plain = Dag(plan).double()
    other, nudged = copy.deepcopy(plain), copy.deepcopy(plain)
    lay_gradients_out(plain), lay_gradients_out(nudged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = list(observed(plain, plan))
        except (RuntimeError, ValueError, IndexError, TypeError) as fault:
            return Outcome("torch refuses", f"{type(fault).__name__}: {fault}"[:300])
        if not all(t.isfinite().all() for _, t in expected if isinstance(t, Tensor) and t.is_floating_point()):
            return Outcome("torch refuses", "not finite")
        try:
            with as_if_large(plan):
                model = ModelParallel(other, strategy="spatial", **where, **plan.options)
                found = list(observed(model, plan))
        except (UnsupportedOperatorError, ParallelError) as fault:
            return Outcome("refused", str(fault))
        except Exception:
            return Outcome("CRASH", traceback.format_exc())
    wrong = differences(found, expected)
    if wrong:
        with torch.no_grad():
            for parameter in nudged.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NUDGE)
        undetermined = differences(list(observed(nudged, plan, NUDGE)), expected)
        wrong = {name: what for name, what in wrong.items() if name not in undetermined}
    return Outcome("WRONG", "; ".join(f"{k}: {v}" for k, v in list(wrong.items())[:6])) if wrong else Outcome("equal")


def devices_of(plan: Plan) -> dict[str, Any]:
    """Return the devices of one process."""
    return {"devices": name_cpus(plan.shards), "grid": plan.grid}


def compared_on_processes(first: int, count: int, kind: str = "draw") -> dict[int, tuple[str, str]]:
    """Compare the networks that ``kind`` draws of a range of seeds, where each process of a group holds one slab."""
    outcomes = {}
    for seed in range(first, first + count):
        shards = dist.get_world_size()
        plan = draw_deep(seed) if kind == "draw_deep" else {"draw": draw, "draw_slabs": draw_slabs}[kind](seed, shards)
        outcome = compared(plan)
        outcomes[seed] = outcome.verdict, outcome.what if outcome.ok else f"{outcome.what}\n{plan}"
        if outcome.verdict == "CRASH":  # the processes may have parted
            break
    return outcomes
