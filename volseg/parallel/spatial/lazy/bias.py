"""A convolution's bias that waits: a norm behind takes it away again, and a pass over memory is spared.

What is added to a channel everywhere changes neither a norm of instances nor one of batches, but the running mean of
the latter, which is moved by it. Such a norm takes the slabs as the convolution left them. Whatever else comes behind
gets them with the bias: added where they lie, or, once a norm keeps them, to copies.

The gradient of the bias does not wait: it is the convolution's, which sums its output's. In front of such a norm that
sum is zero, and what torch adds up over the volume is round-off. The norm's backward pass says so of the gradient that
it returns, and the convolution's need not read it once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.first_order import LinearMap, first_order
from volseg.device.gpus import on_gpu
from volseg.device.torch_internals import get_version
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Recipe
from volseg.parallel.spatial.transport.halo import Halo, Wait
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = [
    "add_bias_later",
    "forget_vanishing",
    "may_wait",
    "note_vanishing",
    "sum_vanishing",
    "take_without_bias",
    "torch_adds_apart",
    "vanishes",
    "with_gradient",
]


def note_vanishing(gradient: Any, offset: Tensor) -> None:
    """Say of a gradient, as it is now, that it sums to zero over the voxels of all samples, in each channel.

    Parameters
    ----------
    gradient
        Of a norm's input.
    offset
        What its backward pass has added to every voxel, ``(B, C)``: no number where the gradient has some.
    """
    gradient._vanishes = get_version(gradient), offset


def forget_vanishing(gradient: Any) -> None:
    """Say so no more: who has seen the gradient may change it where torch does not count, through ``.data``."""
    gradient._vanishes = None


def vanishes(gradient: Tensor) -> bool:
    """Say whether that is known: not of a sum with another gradient, new or made in place."""
    known = getattr(gradient, "_vanishes", None)
    return known is not None and known[0] == get_version(gradient) and fusions.is_on("no bias gradients")


def sum_vanishing(gradient: Any) -> Tensor:
    """Return the sums of a gradient that vanishes, ``(C,)``: zeros, and no numbers where it holds some."""
    _, offset = gradient._vanishes
    total = offset[0] if len(offset) == 1 else offset.sum(0)  # one launch less
    return (total * 0).to(gradient.dtype)


class WaitingBias(Waiting):
    """What a convolution left, and a bias that is still to be added.

    Parameters
    ----------
    slabs
        The convolution's, without the bias; nobody else has seen them.
    biases
        Of each slab, ``(C,)``.
    """

    refusal = (
        "the bias of a convolution was changed in place before the convolution's result was used; do that out of "
        "place, or use the result before"
    )

    def __init__(self, slabs: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.stand_ins, self.biases, self.room = list(slabs), [bias.detach() for bias in biases], 0
        self.moment, self.unchanged = Moment(), Unchanged(biases)
        self.is_kept = False

    def keep_slabs(self) -> list[Tensor]:
        """Return the slabs without the bias to a norm, which keeps them: from now on nothing is added to them."""
        self.check()
        self.is_kept = True
        return self.stand_ins

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Add the bias."""
        del halos
        pairs = list(zip(self.stand_ins, self.biases, strict=True))
        with self.moment.restored():
            if self.is_kept:
                return [_add_bias(*pair) for pair in pairs], None, None
            with torch.no_grad():  # the convolution knows of it
                for slab, bias in pairs:
                    slab.add_(_over_voxels(bias, slab))
        return self.stand_ins, None, None

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Go on waiting: nobody has seen the slabs to change them, and once a norm keeps them writing takes copies."""


def may_wait(bias: Tensor | None, weight: Tensor, slab: Tensor, channels: int) -> bool:
    """Say whether a convolution of a slab may leave its bias to what comes behind.

    Parameters
    ----------
    bias, weight
        Of the convolution.
    slab
        Its input; without a batch, or with a bias that torch would refuse, it is torch's.
    channels
        Of its result.
    """
    if bias is None or bias.shape != (channels,) or bias.dtype != weight.dtype or slab.ndim != weight.ndim:
        return False
    return torch_adds_apart(slab) and fusions.is_on("waiting biases")


def torch_adds_apart(slab: Tensor) -> bool:
    """Say whether torch adds a bias in a pass of its own: behind cuDNN's kernels, not in those of a CPU."""
    return on_gpu(slab)


def add_bias_later(volume: ShardedVolume, biases: Sequence[Tensor]) -> ShardedVolume:
    """Return a volume with a bias that waits.

    Parameters
    ----------
    volume
        What a convolution left without its bias, new, and seen by nobody; its gradient is the bias's, too.
    biases
        Of each slab.
    """
    return defer(WaitingBias(volume._slabs, biases), volume.dims, volume.shape, volume.context)


def take_without_bias(volume: ShardedVolume) -> tuple[list[Tensor], Tensor | None]:
    """Return a volume's slabs for a norm, and the bias ``(C,)`` that they lack, on the home device; None if none."""
    waiting = volume.pending
    if not isinstance(waiting, WaitingBias):
        return volume.slabs, None
    if torch.is_grad_enabled():
        volume.is_bypassed = True  # the norm's gradient goes to the slabs without the bias
    return waiting.keep_slabs(), waiting.biases[0].to(volume.context.communicator.home)


def with_gradient(volume: ShardedVolume, biases: Sequence[Tensor]) -> ShardedVolume:
    """Return a volume whose gradient is the biases', too, though nothing is added to it."""
    slabs = [_WithGradient.apply(slab, bias) for slab, bias in zip(volume._slabs, biases, strict=True)]
    return ShardedVolume(slabs, volume.dims, volume.shape, volume.context)


def _over_voxels(bias: Tensor, slab: Tensor) -> Tensor:
    return bias.view(-1, *[1] * (slab.ndim - 2))


def _add_bias(slab: Tensor, bias: Tensor) -> Tensor:
    """Add a bias whose gradient the convolution computes."""
    added: Tensor = LinearMap.apply(slab, lambda own: own + _over_voxels(bias, own), lambda gradient: gradient)
    return added


class _WithGradient(torch.autograd.Function):
    """A slab as it is, with a bias's gradient."""

    @staticmethod
    def forward(ctx: Any, slab: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return slab.data  # no view of it: the bias may be added where it lies

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        own = None
        if ctx.needs_input_grad[1]:
            others = [dim for dim in range(gradient.ndim) if dim != 1]
            own = (sum_vanishing(gradient) if vanishes(gradient) else gradient.sum(others)).to(ctx.dtype)
        return gradient, own
