"""A convolution's bias that waits: a norm behind would subtract it again, so a pass over memory is saved.

A constant that is added to a channel changes neither an instance norm nor a batch norm, except for the running mean of
the batch norm, which moves by the constant. Such a norm takes the convolution's slabs without the bias. Any other
reader gets slabs with the bias, which is added in place, or to copies once a norm keeps the slabs.

The gradient of the bias does not wait: the convolution's backward pass sums the gradient of its output. In front of
such a norm this sum is zero, and torch's sum over the volume is round-off. The norm's backward pass marks its gradient
as vanishing, and the convolution's backward pass does not read that gradient again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.first_order import LinearMap, first_order
from volseg.device.gpus import on_gpu
from volseg.device.torch_internals import get_version
from volseg.parallel.spatial.pending import PLAIN, Waiting
from volseg.parallel.spatial.sources import Moment, Unchanged
from volseg.parallel.spatial.transport.halo import Halo
from volseg.parallel.spatial.volume import ShardedVolume, defer


def note_vanishing(gradient: Any, offset: Tensor) -> None:
    """Mark a gradient, in its current version: in each channel it sums to zero over the voxels of all samples.

    Parameters
    ----------
    gradient
        Gradient of a norm's input.
    offset
        Constant that the backward pass added to every voxel, ``(B, C)``: not finite where the gradient is not.
    """
    gradient._vanishes = get_version(gradient), offset


def forget_vanishing(gradient: Any) -> None:
    """Remove the mark: a reader of the gradient may change it through ``.data``, which torch does not count."""
    gradient._vanishes = None


def vanishes(gradient: Tensor) -> bool:
    """Return whether a gradient is marked and unchanged; a sum with another gradient, even in place, is not."""
    known = getattr(gradient, "_vanishes", None)
    return known is not None and known[0] == get_version(gradient) and fusions.is_on("no bias gradients")


def sum_vanishing(gradient: Any) -> Tensor:
    """Return the channels' sums of a vanishing gradient, ``(C,)``: zeros, or NaN where it is not finite."""
    _, offset = gradient._vanishes
    total = offset[0] if len(offset) == 1 else offset.sum(0)  # one launch less
    return (total * 0).to(gradient.dtype)


class WaitingBias(Waiting):
    """A convolution's result, and a bias that is still to be added.

    Parameters
    ----------
    slabs
        The convolution's results without the bias; no other code has read them.
    biases
        The bias for each slab, ``(C,)``.
    """

    refusal = (
        "the bias of a convolution was changed in place before the convolution's result was used; do that out of "
        "place, or use the result before"
    )

    def __init__(self, slabs: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.stand_ins, self.biases = list(slabs), [bias.detach() for bias in biases]
        self.moment, self.unchanged = Moment(), Unchanged(biases)
        self.is_kept = False

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> None:
        """Add the bias."""
        del halos
        self.check()
        pairs = list(zip(self.stand_ins, self.biases, strict=True))
        with self.moment.restored():
            if self.is_kept:
                volume._slabs = [_add_bias(*pair) for pair in pairs]
            else:
                with torch.no_grad():  # the convolution computes the bias's gradient
                    for slab, bias in pairs:
                        slab.add_(_over_voxels(bias, slab))
        volume.pending = PLAIN

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Keep waiting: no code holds the slabs to change them, and once a norm keeps them, writing makes copies."""


def may_wait(bias: Tensor | None, weight: Tensor, slab: Tensor, channels: int) -> bool:
    """Return whether a convolution of a slab may leave its bias to the next operator.

    Parameters
    ----------
    bias, weight
        Parameters of the convolution; a bias that torch would refuse is left to torch.
    slab
        Its input; an input without a batch is left to torch.
    channels
        Channels of its result.
    """
    if bias is None or bias.shape != (channels,) or bias.dtype != weight.dtype or slab.ndim != weight.ndim:
        return False
    return torch_adds_apart(slab) and fusions.is_on("waiting biases")


def torch_adds_apart(slab: Tensor) -> bool:
    """Return whether torch adds a bias in a separate pass: it does so after cuDNN's kernels, not on a CPU."""
    return on_gpu(slab)


def add_bias_later(volume: ShardedVolume, biases: Sequence[Tensor]) -> ShardedVolume:
    """Return a volume with a waiting bias.

    Parameters
    ----------
    volume
        A convolution's new result without its bias, unread; its backward pass also computes the bias's gradient.
    biases
        The bias for each slab.
    """
    return defer(WaitingBias(volume._slabs, biases), volume.dims, volume.shape, volume.context)


def take_without_bias(volume: ShardedVolume) -> tuple[list[Tensor], Tensor | None]:
    """Return a volume's slabs for a norm, and the bias ``(C,)`` that they lack, on the home device, or None."""
    waiting = volume.pending
    if not isinstance(waiting, WaitingBias):
        return volume.slabs, None
    if torch.is_grad_enabled():
        volume.is_bypassed = True  # the norm's gradient goes to the slabs without the bias
    waiting.check()
    waiting.is_kept = True  # from now on the bias is added to copies
    return waiting.stand_ins, waiting.biases[0].to(volume.context.communicator.home)


def with_gradient(volume: ShardedVolume, biases: Sequence[Tensor]) -> ShardedVolume:
    """Return a volume of the same values, whose backward pass also computes the biases' gradients."""
    slabs = [_WithGradient.apply(slab, bias) for slab, bias in zip(volume._slabs, biases, strict=True)]
    return ShardedVolume(slabs, volume.dims, volume.shape, volume.context)


def _over_voxels(bias: Tensor, slab: Tensor) -> Tensor:
    return bias.view(-1, *[1] * (slab.ndim - 2))


def _add_bias(slab: Tensor, bias: Tensor) -> Tensor:
    """Add a bias whose gradient the convolution computes."""
    added: Tensor = LinearMap.apply(lambda own: own + _over_voxels(bias, own), lambda gradient: gradient, slab)
    return added


class _WithGradient(torch.autograd.Function):
    """Return a slab unchanged; its backward pass also computes a bias's gradient."""

    @staticmethod
    def forward(ctx: Any, slab: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return slab.data  # not a view: the bias may be added in place

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        own = None
        if ctx.needs_input_grad[1]:
            others = [dim for dim in range(gradient.ndim) if dim != 1]
            own = (sum_vanishing(gradient) if vanishes(gradient) else gradient.sum(others)).to(ctx.dtype)
        return gradient, own
