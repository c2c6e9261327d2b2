"""Rules for the convolutions of each kernel: shapes, types and layouts that it supports and computes faster than torch.

Measured limits are in the kernel's own module; the rules here apply them.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from volseg.device import fusions, gpus, triton_tiles
from volseg.device.convolution import (
    depth_chunks,
    depthwise,
    few_channels,
    few_in,
    few_out,
    few_taps,
    many_taps,
    one_voxel,
)
from volseg.device.convolution.settings import Settings


class ConvolutionCall(NamedTuple):
    """Tensors of a convolution, or of its backward pass if the output's ``gradient`` is present."""

    slab: Tensor
    weight: Tensor
    bias: Tensor | None
    settings: Settings
    gradient: Tensor | None = None

    @property
    def given(self) -> Tensor:
        """The output's gradient, which must be present."""
        assert self.gradient is not None
        return self.gradient


def _is_half(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether Triton may run, and the convolution has half precision."""
    if not (triton_tiles.available() and gpus.on_gpu(tensor) and tensor.ndim == 5 and tensor.numel()):
        return False
    if tensor.numel() > triton_tiles.MOST_VOXELS and count_voxels(tensor) > triton_tiles.MOST_VOXELS:
        return False
    return tensor.dtype in (torch.float16, torch.bfloat16) and weight.dtype == tensor.dtype


def _is_plain_or_strided(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether this also holds, and the convolution has no groups."""
    return settings.groups == 1 and not settings.transposed and _is_half(tensor, weight)


def is_plain(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether a convolution has half precision, and no strides or groups, and Triton may run."""
    return settings.stride == (1, 1, 1) and _is_plain_or_strided(tensor, weight, settings)


def _is_undilated(slab: Tensor, weight: Tensor, settings: Settings) -> bool:
    plain = settings.dilation == (1, 1, 1) and is_plain(slab, weight, settings)
    return plain and _can_count_output(slab, weight, settings)


def _can_count_output(slab: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether 32 bits count the output's voxels: padding may make them many times the input's.

    The convolution is undilated.
    """
    return slab.shape[0] * prod(settings.compute_sides(slab, weight)) <= triton_tiles.MOST_VOXELS


def pads_less_than_kernel(weight: Tensor, settings: Settings) -> bool:
    """Return whether the padding is less than the kernel's reach, as a convolution back to the input requires."""
    along = zip(settings.padding, weight.shape[2:], settings.dilation, strict=True)
    return all(padding <= (taps - 1) * step for padding, taps, step in along)


def count_voxels(slab: Tensor) -> int:
    """Return the number of voxels of all samples."""
    return slab.shape[0] * slab.shape[2:].numel()


def is_one_voxel(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether ``one_voxel`` supports a convolution; ``tensor`` is its input, or the gradient of its output."""
    return weight.shape[0] <= one_voxel.MOST_CLASSES and _is_point(tensor, weight, settings)


def _is_point(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    point = weight.shape[2:] == (1, 1, 1) and settings.padding == (0, 0, 0)
    return point and weight.shape[1] <= one_voxel.MOST_FEATURES and is_plain(tensor, weight, settings)


def is_uneven_head(call: ConvolutionCall) -> bool:
    """Return whether a convolution is a head of many classes, no multiple of eight, as cuDNN's matrix kernels need.

    Other convolutions between features stay in channels-last layout.
    """
    classes = call.weight.shape[0]
    fits = one_voxel.MOST_CLASSES < classes <= one_voxel.MOST_CLASSES_OF_FORWARD
    return fits and classes % 8 != 0 and _is_point(call.slab, call.weight, call.settings)


def is_few_taps(call: ConvolutionCall) -> bool:
    """Return whether ``few_taps`` computes a convolution, forward or for the gradient of its weight."""
    channels, inputs = call.weight.shape[:2]
    most = few_taps.MOST_INPUTS if channels % 8 == 0 else few_taps.MOST_INPUTS_OF_UNEVEN
    fits = few_taps.FEWEST_CHANNELS <= channels <= few_taps.MOST_CHANNELS and inputs <= most
    if not fits or prod(call.weight.shape[1:]) > few_taps.MOST_TAPS or call.settings.dilation != (1, 1, 1):
        return False
    suits = _is_plain_or_strided if has_own_taps(call.weight) else is_plain
    asked = call.slab, call.weight, call.settings
    return suits(*asked) and _can_count_output(*asked)


def has_own_taps(weight: Tensor) -> bool:
    """Return whether ``few_taps`` also takes strides and a bias: convolutions of single voxels are fast elsewhere."""
    return prod(weight.shape[2:]) > 1 and fusions.is_on("few channels")


def _has_few_in(weight: Tensor, most: float = few_in.MOST_CHANNELS) -> bool:
    """Return whether ``few_in`` supports the channels of a kernel and its lines of taps."""
    fits = few_in.FEWEST_CHANNELS <= weight.shape[0] <= most and weight.shape[1] <= few_in.MOST_IN
    return fits and weight.shape[1] * weight.shape[-1] <= few_in.MOST_COLUMNS and fusions.is_on("few channels")


def is_few_in(call: ConvolutionCall) -> bool:
    """Return whether ``few_in`` computes a convolution, forward or for the gradient of its weight."""
    fits = _has_few_in(call.weight) and prod(call.weight.shape[1:]) > few_in.MOST_TAPS_ONE_BY_ONE
    return fits and _is_undilated(call.slab, call.weight, call.settings) and few_in.can_read(call.slab)


def _is_few_out(call: ConvolutionCall, most: float = few_in.MOST_CHANNELS) -> bool:
    suits = _has_few_in(call.weight.transpose(0, 1), most) and prod(call.weight.shape[2:]) >= few_out.FEWEST_TAPS
    return suits and _is_undilated(call.slab, call.weight, call.settings) and call.slab.stride(1) == 1


def computes_few_out(call: ConvolutionCall) -> bool:
    """Return whether ``few_out`` computes a convolution forward."""
    fits = call.weight.shape[1] in few_out.CHANNELS and _is_few_out(call)
    return fits and few_out.keeps_width(call.weight, call.settings.padding)


def differentiates_few_out(call: ConvolutionCall, most: float = few_in.MOST_CHANNELS) -> bool:
    """Return whether ``few_out`` computes a gradient of a convolution with at most ``most`` input channels."""
    return _is_few_out(call, most) and pads_less_than_kernel(call.weight, call.settings) and few_in.can_read(call.given)


def _is_many_taps(call: ConvolutionCall) -> bool:
    slab, weight = call.slab, call.weight
    fits = prod(weight.shape[2:]) >= many_taps.FEWEST_TAPS and pads_less_than_kernel(weight, call.settings)
    if not (fits and _is_undilated(slab, weight, call.settings)):
        return False
    return slab.stride(1) == 1 and count_voxels(slab) * max(weight.shape[:2]) <= depth_chunks.LIMIT


def turns_many_taps(call: ConvolutionCall) -> bool:
    """Return whether a convolution of many channels is computed forward with flipped weights (``flipped_weights``)."""
    fewest, voxels = min(call.weight.shape[:2]), count_voxels(call.slab)
    is_known = fewest >= many_taps.ALWAYS_TURNED or voxels >= many_taps.FEWEST_VOXELS
    return fewest >= many_taps.FEWEST_CHANNELS and is_known and _is_many_taps(call)


def differentiates_many_taps(call: ConvolutionCall) -> bool:
    """Return whether ``many_taps`` computes the gradient of a weight."""
    outputs, inputs, *taps = call.weight.shape
    if not _is_many_taps(call):
        return False
    if min(outputs, inputs) >= many_taps.FEWEST_CHANNELS:
        return many_taps.can_read(call.slab, taps)
    is_grouped = outputs == inputs and inputs in many_taps.GROUPS and taps == [5, 5, 5]
    if not is_grouped or count_voxels(call.given) < many_taps.FEWEST_VOXELS_OF_GROUPS:
        return False
    is_measured = gpus.get_capability(gpus.get_tensor_device(call.given))[0] == many_taps.WIDE
    group = many_taps.count_group(call.weight)
    return is_measured and many_taps.can_group(call.slab, taps, call.given.shape[-1], group)


def is_few_channels(call: ConvolutionCall) -> bool:
    """Return whether ``few_channels`` computes a convolution, forward or for the gradient of its input."""
    fits = max(call.weight.shape[:2]) <= few_channels.MOST_CHANNELS
    gathered = call.weight.numel() <= few_channels.MOST_PRODUCTS and prod(call.weight.shape[2:]) > 1
    return fits and gathered and fusions.is_on("few channels") and _is_undilated(call.slab, call.weight, call.settings)


def is_depthwise(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether ``depthwise`` computes a convolution, transposed or not, of an input or a gradient ``tensor``."""
    if settings.groups == 1 or not fusions.is_on("depthwise") or not _is_half(tensor, weight):
        return False
    return depthwise.fits(weight.shape, settings)
