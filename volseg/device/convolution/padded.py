"""Convolutions whose channels are not multiples of 32, padded with zero channels to the next multiple.

cuDNN's fast kernels take channels in blocks: on an H200 a convolution of 48 channels to 48 took twice as long as one of
64 to 64. Zero rows in the weight give additional output channels, which a slice removes; zero columns require a copy of
the input into a volume of more channels. ``forms`` lists the convolutions.

Values that are not finite spread no further than in the plain convolution: zeros of the weight meet added channels,
which are zero, or give outputs that are dropped.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.convolution import depth_chunks
from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.layout import in_layout

MULTIPLE = 32
"""Multiple of channels, the size of cuDNN's blocks."""


def fill_up(channels: int) -> int:
    """Return the next multiple of a number of channels."""
    return -(-channels // MULTIPLE) * MULTIPLE


def _widen(volume: Tensor, wanted: bool) -> Tensor:
    """Return a volume with channels of zeros after its own, in channels-last layout; itself if it has a multiple."""
    channels, wide = volume.shape[1], fill_up(volume.shape[1])
    if not wanted or channels == wide:
        return volume
    out = new_volume(volume, wide, volume.shape[2:])
    out[:, :channels].copy_(volume)
    out[:, channels:].zero_()
    return out


def _widen_weight(weight: Tensor, inputs: bool, outputs: bool) -> Tensor:
    """Return a weight with zeros after its input or output channels, or both, in channels-last layout."""
    out, given = weight.shape[:2]
    rows, columns = (fill_up(out) - out) * outputs, (fill_up(given) - given) * inputs
    return F.pad(weight, (0, 0, 0, 0, 0, 0, 0, columns, 0, rows)).contiguous(memory_format=torch.channels_last_3d)


def forward(
    slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, *, inputs: bool, outputs: bool
) -> Tensor:
    """Return the convolution: with ``outputs`` a slice of channels, without a copy.

    Parameters
    ----------
    slab, weight, bias
        See ``choice.convolve``.
    settings
        Of a convolution without groups, not transposed.
    inputs, outputs
        Whether channels of zeros are added to the input, and to the output.
    """
    wide = _widen_weight(weight, inputs, outputs)
    filled = None if bias is None else F.pad(bias, (0, wide.shape[0] - weight.shape[0]))
    found = depth_chunks.convolve(_widen(slab, inputs), wide, filled, settings.arguments)
    return _take(found, weight.shape[0])


def input_gradient(
    gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, *, inputs: bool, outputs: bool
) -> Tensor:
    """Return the gradient of the input: with ``inputs`` a slice of channels, without a copy."""
    return _take(_differentiate(gradient, slab, weight, settings, 0, inputs, outputs), weight.shape[1])


def weight_gradient(
    gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, *, inputs: bool, outputs: bool
) -> Tensor:
    """Return the gradient of the weight, with channels last."""
    found = _differentiate(gradient, slab, weight, settings, 1, inputs, outputs)
    return found[: weight.shape[0], : weight.shape[1]].contiguous(memory_format=torch.channels_last_3d)


def _take(volume: Tensor, channels: int) -> Tensor:
    """Return the first channels, without a copy."""
    # Autograd refuses in-place changes of a function's output that is a view.
    return in_layout(volume, channels_last=True)[:, :channels].detach()


def _differentiate(
    gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, place: int, inputs: bool, outputs: bool
) -> Tensor:
    mask = [place == 0, place == 1, False]
    wide = _widen_weight(weight, inputs, outputs)
    # Only the shape of the differentiated volume is read.
    given = _widen(slab, inputs) if place == 1 else new_volume(slab, wide.shape[1], slab.shape[2:])
    found = depth_chunks.differentiate(_widen(gradient, outputs), given, wide, None, settings.arguments, mask)[place]
    assert found is not None
    return found
