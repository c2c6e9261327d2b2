"""Gradients whose sums over the voxels are known to be zero.

A norm takes the mean away, so that a number added to all voxels of a channel in front of it changes nothing: the
gradient of a convolution's bias there is zero, and what torch adds up over the volume is round-off. The norm's backward
pass says so of the gradient that it returns, and the convolution's need not read it once more.
"""

from typing import Any

from torch import Tensor

from volseg.device import fusions
from volseg.device.torch_internals import get_version

__all__ = ["forget_vanishing", "note_vanishing", "sum_vanishing", "vanishes"]


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
