"""Convolutions of few channels, computed over groups of voxels along W whose channels are joined: pairs or fours.

In channels-last layout, the memory of ``(B, C, D, H, W)`` is also that of ``(B, f C, D, H, W / f)``, and channel
``a C + c`` is channel ``c`` of a group's voxel ``a``: a view, no copy. The convolution becomes one of ``f`` times as
many channels, which fill the tiles of cuDNN's kernels, with an expanded weight::

    V[b O + o, a I + i, d, h, t + T] = w[o, i, d, h, k]    where  f t + a - b = k dilation - reach  for a tap k, else 0

    w of 3 taps, f = 2:            voxels  (-2 -1)  (0 1)  (2 3)
        output voxel b = 0                   .  w0   w1 w2   . .
        output voxel b = 1                   .  .    w0 w1  w2 .

``T`` groups on each side hold the kernel's reach. Half of the products or more are with zeros, but cuDNN takes as long
for 16 channels as for 32: ``forms`` lists the convolutions that gain by measurement.

The weight's gradient sums the ``f`` entries of ``V``'s gradient for each tap of ``w``: no sum has a term that torch's
sum lacks. Forward, and in the input's gradient, the zeros of ``V`` are products: an infinite voxel times zero is NaN,
so non-finite values reach up to ``f T + f - 1`` voxels along W, beyond the kernel's reach.

Not supported: strides and groups, transposed convolutions, widths that a group does not divide, and padding along W
other than the kernel's reach. Along D and H nothing changes: slabs between the planes of their halo are supported.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from volseg.device.convolution import depth_chunks
from volseg.device.convolution.settings import Settings
from volseg.device.gpus import keeping
from volseg.device.layout import in_layout


def _compute_reach(kernel: Sequence[int], settings: Settings) -> int:
    """Return the voxels that a kernel of these sides needs before and behind its own along W."""
    return (kernel[-1] - 1) // 2 * settings.dilation[-1]


def can_group(volume: Tensor, weight: Tensor, settings: Settings, voxels: int) -> bool:
    """Return whether a convolution may be computed over groups of this number of voxels.

    Parameters
    ----------
    volume : Tensor
        The input, or the gradient of the output, ``(B, C, D, H, W)``.
    weight : Tensor
        ``(O, I, kD, kH, kW)``.
    settings : Settings
        Settings of the convolution.
    voxels : int
        Voxels of a group: 2 or more.
    """
    plain = settings.stride == (1, 1, 1) and settings.groups == 1 and not settings.transposed
    if volume.ndim != 5 or not plain or weight.shape[-1] % 2 == 0 or volume.numel() == 0:
        return False
    if settings.padding[-1] != _compute_reach(weight.shape[2:], settings) or volume.shape[-1] % voxels:
        return False
    # One row is dense; how rows, planes and samples follow each other is free.
    return volume.stride(1) == 1 and volume.stride(4) == volume.shape[1]


def view_groups(volume: Tensor, voxels: int) -> Tensor:
    """Return a volume as ``(B, voxels C, D, H, W / voxels)`` in its own memory; see ``can_group``."""
    samples, channels, *sides, width = volume.shape
    before, _, *along, _ = volume.stride()
    wide = voxels * channels
    return volume.as_strided((samples, wide, *sides, width // voxels), (before, 1, *along, wide))


def _view_voxels(groups: Tensor, voxels: int) -> Tensor:
    """Return a dense channels-last volume of groups as a volume of voxels."""
    samples, wide, *sides, width = groups.shape
    before, _, *along, _ = groups.stride()
    channels = wide // voxels
    # Autograd refuses in-place changes of a function's output that is a view.
    return groups.as_strided((samples, channels, *sides, width * voxels), (before, 1, *along, channels)).detach()


Shape = tuple[int, ...]


def _list_taps(shape: Shape, dilation: int, voxels: int) -> list[tuple[int, int, int, int]]:
    """List the entries of ``V`` that are taps of ``w``: voxel of the output, voxel of the input, group, tap along W."""
    reach = (shape[-1] - 1) // 2 * dilation
    found = []
    for out, tap in product(range(voxels), range(shape[-1])):
        group, given = divmod(out + tap * dilation - reach, voxels)
        found.append((out, given, group + count_groups(reach, voxels), tap))
    return found


def count_groups(reach: int, voxels: int) -> int:
    """Return the groups on each side that hold a reach."""
    return (reach + voxels - 1) // voxels


@keeping()  # without a limit: recorded steps read these tensors at their addresses
def _index_expansion(shape: Shape, dilation: int, voxels: int, last: bool, device: torch.device) -> Tensor:
    """Return the index of each entry of ``V`` in the memory of ``w``, which ends with a zero.

    Parameters
    ----------
    shape
        Shape of ``w``.
    dilation
        Dilation along W.
    voxels
        Voxels of a group.
    last
        Whether ``w`` is in channels-last layout, as ``V`` is.
    device
        Device of the index.
    """
    out, given, *taps = shape
    with torch.inference_mode(False):
        numbers = _number_entries(shape, last)
        groups = 2 * count_groups((taps[2] - 1) // 2 * dilation, voxels) + 1
        index = torch.full((voxels, out, voxels, given, taps[0], taps[1], groups), prod(shape), dtype=torch.int32)
        for one, other, group, tap in _list_taps(shape, dilation, voxels):
            index[one, :, other, :, :, :, group] = numbers[..., tap]
        wide = index.reshape(voxels * out, voxels * given, *taps[:2], groups)
        return wide.permute(0, 2, 3, 4, 1).reshape(-1).to(device)


@keeping()
def _index_folding(shape: Shape, dilation: int, voxels: int, last: bool, device: torch.device) -> Tensor:
    """Return the indices of the ``voxels`` entries of each tap of ``w``, channels last, in the memory of ``V``."""
    out, given, *taps = shape
    with torch.inference_mode(False):
        groups = 2 * count_groups((taps[2] - 1) // 2 * dilation, voxels) + 1
        wide = (voxels * out, voxels * given, *taps[:2], groups)
        numbers = _number_entries(wide, last).view(voxels, out, voxels, given, *taps[:2], groups)
        index = torch.empty((voxels, *shape), dtype=torch.int32)
        for one, other, group, tap in _list_taps(shape, dilation, voxels):
            index[one, ..., tap] = numbers[one, :, other, :, :, :, group]
        return index.permute(0, 1, 3, 4, 5, 2).reshape(-1).to(device)


@keeping()
def _make_zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=dtype, device=device)


def _number_entries(shape: Shape, last: bool) -> Tensor:
    """Return the index of each entry of a dense weight in memory."""
    numbers = torch.arange(prod(shape), dtype=torch.int32)
    if not last:
        return numbers.view(shape)
    out, given, *taps = shape
    return numbers.view(out, *taps, given).permute(0, 4, 1, 2, 3)


def _flatten(weight: Tensor) -> tuple[Tensor, bool]:
    """Return a weight in memory order, and whether its channels are last."""
    if weight.is_contiguous(memory_format=torch.channels_last_3d):
        return weight.permute(0, 2, 3, 4, 1).reshape(-1), True
    return weight.contiguous().view(-1), False


def expand(weight: Tensor, settings: Settings, voxels: int) -> Tensor:
    """Return ``V``, ``(voxels O, voxels I, kD, kH, 2 T + 1)`` in channels-last layout: zero except for the taps."""
    (out, given, *taps), dilation = weight.shape, settings.dilation[-1]
    flat, last = _flatten(weight)
    index = _index_expansion(tuple(weight.shape), dilation, voxels, last, weight.device)
    groups = 2 * count_groups(_compute_reach(taps, settings), voxels) + 1
    wide = torch.cat([flat, _make_zero(weight.dtype, weight.device)]).index_select(0, index)
    return wide.view(voxels * out, *taps[:2], groups, voxels * given).permute(0, 4, 1, 2, 3)


def _fold(gradient: Tensor, weight: Tensor, settings: Settings, voxels: int) -> Tensor:
    """Return the gradient of a weight, channels last, from that of ``V``: sums of ``voxels`` entries, in float32."""
    out, given, *taps = weight.shape
    flat, last = _flatten(gradient)
    index = _index_folding(tuple(weight.shape), settings.dilation[-1], voxels, last, weight.device)
    entries = flat.index_select(0, index).view(voxels, out, *taps, given)
    # torch adds half precision in float32, and rounds once.
    return entries.sum(0).permute(0, 4, 1, 2, 3)


def _settle(weight: Tensor, settings: Settings, voxels: int) -> Settings:
    """Return the settings of the convolution of groups."""
    groups = count_groups(_compute_reach(weight.shape[2:], settings), voxels)
    return replace(settings, padding=(*settings.padding[:2], groups), dilation=(*settings.dilation[:2], 1))


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, voxels: int) -> Tensor:
    """Return the convolution, ``(B, O, D, H, W)``, dense with channels last.

    Parameters
    ----------
    slab, weight, settings, voxels
        See ``can_group``.
    bias
        ``(O,)``, or None.
    """
    wide = None if bias is None else bias.repeat(voxels)
    arguments = _settle(weight, settings, voxels).arguments
    found = depth_chunks.convolve(view_groups(slab, voxels), expand(weight, settings, voxels), wide, arguments)
    return _view_voxels(in_layout(found, channels_last=True), voxels)


def input_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, voxels: int) -> Tensor:
    """Return the gradient of the input, like the result of ``forward``; both volumes may be grouped."""
    found = _differentiate(gradient, slab, expand(weight, settings, voxels), weight, settings, voxels, 0)
    return _view_voxels(in_layout(found, channels_last=True), voxels)


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, voxels: int) -> Tensor:
    """Return the gradient of the weight, with channels last; both volumes may be grouped."""
    groups = 2 * count_groups(_compute_reach(weight.shape[2:], settings), voxels) + 1
    out, given, *taps = weight.shape
    # Only the shape is used.
    wide = weight.new_empty((voxels * out, *taps[:2], groups, voxels * given)).permute(0, 4, 1, 2, 3)
    return _fold(_differentiate(gradient, slab, wide, weight, settings, voxels, 1), weight, settings, voxels)


def _differentiate(
    gradient: Tensor, slab: Tensor, wide: Tensor, weight: Tensor, settings: Settings, voxels: int, place: int
) -> Tensor:
    mask = [place == 0, place == 1, False]
    volumes = view_groups(gradient, voxels), view_groups(slab, voxels)
    arguments = _settle(weight, settings, voxels).arguments
    found = depth_chunks.differentiate(*volumes, wide, None, arguments, mask)[place]
    assert found is not None
    return found
