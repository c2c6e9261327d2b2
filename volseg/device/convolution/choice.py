"""Choose how a convolution is computed: by a kernel of volseg if that is faster, otherwise by torch.

Tables are searched from the top, then that of ``forms``. Rules tell which convolutions a kernel supports, and computes
faster than torch, by shapes, types and layouts; a kernel's own module contains the computation and the measured limits.
volseg's kernels read volumes with channels last, and are considered only for those.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod
from types import ModuleType
from typing import Any, NamedTuple

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
    flipped_weights,
    many_taps,
    one_voxel,
    padded,
    space_to_channels,
)
from volseg.device.convolution.forms import Direction, Form, Groups, ZeroChannels, rank_forms
from volseg.device.convolution.settings import Settings
from volseg.device.layout import in_layout


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
    """Return whether Triton may run, and the convolution has half precision and no groups."""
    return settings.groups == 1 and not settings.transposed and _is_half(tensor, weight)


def is_plain(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether a convolution has half precision, and no strides or groups, and Triton may run."""
    return settings.stride == (1, 1, 1) and _is_plain_or_strided(tensor, weight, settings)


def _is_undilated(slab: Tensor, weight: Tensor, settings: Settings) -> bool:
    plain = settings.dilation == (1, 1, 1) and is_plain(slab, weight, settings)
    return plain and _can_count_output(slab, weight, settings)


def _can_count_output(slab: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Return whether 32 bits count an undilated output's voxels: padding may make them many times the input's."""
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


class Kernel(NamedTuple):
    """A kernel of volseg, for the convolutions that ``suits`` accepts."""

    name: str
    suits: Callable[[ConvolutionCall], bool]
    compute: Callable[[ConvolutionCall], Tensor]


class Chosen(NamedTuple):
    """Implementation of one convolution: a kernel of volseg, or torch in another form."""

    name: str
    compute: Callable[[], Tensor]
    adds_bias: bool
    """Whether the kernel adds the bias in its own pass."""


def _list_forms(direction: Direction, call: ConvolutionCall) -> Sequence[Form]:
    """Return the forms of torch's convolution that are faster than the plain one, the fastest first."""
    volume = call.slab if direction == "forward" else call.given
    if not is_plain(volume, call.weight, call.settings):
        return ()
    voxels, device = count_voxels(volume), gpus.get_tensor_device(volume)
    ranked = rank_forms(direction, call.weight.shape, call.settings.dilation, voxels, device)
    return [form for form in ranked if fusions.is_on(_name(form))]


def _can_take(form: Form, direction: Direction, call: ConvolutionCall) -> bool:
    """Return whether a form supports the convolution and the volumes' memory layout."""
    if isinstance(form, ZeroChannels):
        return True
    volumes = [call.slab] if direction == "forward" else [call.slab, call.given]
    return all(space_to_channels.can_group(volume, call.weight, call.settings, form.voxels) for volume in volumes)


def _name(form: Form) -> str:
    """Return a form's name among the fusions."""
    return "pairs" if isinstance(form, Groups) else "zero channels"


def compute_by(module: ModuleType, direction: Direction, call: ConvolutionCall, **form: Any) -> Tensor:
    """Compute the output, or a gradient, by the function of a module."""
    compute: Callable[..., Tensor] = getattr(module, direction.replace(" ", "_"))
    if direction == "forward":
        return compute(call.slab, call.weight, call.bias, call.settings, **form)
    return compute(call.given, call.slab, call.weight, call.settings, **form)


def compute_in_form(form: Form, direction: Direction, call: ConvolutionCall) -> Tensor:
    """Compute the output, or a gradient, in a form."""
    return compute_by(space_to_channels if isinstance(form, Groups) else padded, direction, call, **form._asdict())


def _suits_depthwise(call: ConvolutionCall) -> bool:
    volumes = (call.slab,) if call.gradient is None else (call.slab, call.gradient)
    return all(is_depthwise(volume, call.weight, call.settings) for volume in volumes)


def _is_head(call: ConvolutionCall) -> bool:
    return is_one_voxel(call.slab, call.weight, call.settings) or is_uneven_head(call)


_ROWS: Mapping[Direction, Sequence[tuple[str, ModuleType, Callable[[ConvolutionCall], bool]]]] = {
    "forward": (
        ("depthwise", depthwise, _suits_depthwise),
        ("few channels", few_channels, is_few_channels),
        ("few channels in", few_in, is_few_in),
        ("few taps", few_taps, lambda call: is_few_taps(call) and (call.bias is None or has_own_taps(call.weight))),
        ("one voxel", one_voxel, _is_head),
        ("few channels out", few_out, computes_few_out),
        ("many taps", flipped_weights, turns_many_taps),
    ),
    # Except ``one_voxel``, which computes both gradients in one pass: see ``differentiate``.
    "input gradient": (
        ("depthwise", depthwise, _suits_depthwise),
        (
            "few channels",
            few_channels,
            lambda call: is_few_channels(call) and pads_less_than_kernel(call.weight, call.settings),
        ),
        ("few channels out", few_out, differentiates_few_out),
    ),
    "weight gradient": (
        ("depthwise", depthwise, _suits_depthwise),
        ("few channels in", few_in, lambda call: is_few_in(call) and call.given.stride(1) == 1),
        ("few taps", few_taps, is_few_taps),
        ("few channels out", few_out, partial(differentiates_few_out, most=inf)),
        ("many taps", many_taps, differentiates_many_taps),
    ),
}

TABLES: Mapping[Direction, Sequence[Kernel]] = {
    direction: [Kernel(name, suits, partial(compute_by, module, direction)) for name, module, suits in rows]
    for direction, rows in _ROWS.items()
}
"""Kernels by direction, without those of ``forms``."""


def choose(direction: Direction, call: ConvolutionCall) -> Chosen | None:
    """Return the implementation that is faster than torch for a convolution; None if none is known."""
    for kernel in TABLES[direction]:
        if kernel.suits(call):
            return Chosen(kernel.name, partial(kernel.compute, call), adds_bias=True)
    for form in _list_forms(direction, call):
        if _can_take(form, direction, call):
            return Chosen(_name(form), partial(compute_in_form, form, direction, call), adds_bias=False)
    return None


def adds_bias(slab: Tensor, weight: Tensor, settings: Settings, channels_last: bool) -> bool:
    """Return whether volseg's kernel adds the bias in its own pass; torch adds the bias in a pass after cuDNN's.

    Parameters
    ----------
    slab, weight, settings, channels_last
        See ``convolve``.
    """
    if not channels_last:
        return False
    call = ConvolutionCall(slab, weight, weight.new_empty(weight.shape[0], device="meta"), settings)
    chosen = choose("forward", call)
    return chosen is not None and chosen.adds_bias


def convolve(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, channels_last: bool) -> Tensor:
    """Return the convolution of a slab.

    Parameters
    ----------
    slab, weight, bias
        ``(B, C, D, H, W)``, or other dims, which torch convolves; of one dtype.
    settings
        Of the convolution.
    channels_last
        Whether volumes have, and results get, channels-last layout.
    """
    if not channels_last:
        return depth_chunks.convolve(slab, weight, bias, settings.arguments)
    call = ConvolutionCall(slab, weight, bias, settings)
    chosen = choose("forward", call)
    if chosen is not None:
        return chosen.compute()
    result = depth_chunks.convolve(slab, weight, bias, settings.arguments)
    # cuDNN keeps the input's layout for a single input channel; every later operator would inherit that layout.
    return in_layout(result, channels_last=True)


def lay_out_gradient(gradient: Tensor, weight: Tensor, settings: Settings, channels_last: bool) -> Tensor:
    """Return an output's gradient in the layout that ``differentiate`` reads; itself if it has that layout."""
    if not channels_last or is_one_voxel(gradient, weight, settings):
        return gradient
    # A concatenation's gradient may be a slice of channels, which cuDNN's wrapper would copy at a third of the speed.
    return in_layout(gradient, channels_last=True)


def differentiate(
    gradient: Tensor,
    slab: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    settings: Settings,
    channels_last: bool,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of input, weight and bias, None where not needed.

    Parameters
    ----------
    gradient
        Of the output, from ``lay_out_gradient``.
    slab, weight
        Inputs of the convolution.
    bias_sizes
        Shape of the bias, None without a bias.
    settings, channels_last
        As in ``convolve``.
    needed
        Whether the gradients of the input, of the weight and of the bias are required.
    """
    found: list[Tensor | None] = [None, None, None]
    if channels_last:
        if is_one_voxel(gradient, weight, settings):
            each = one_voxel.backward(gradient, slab, weight, needs_input=needed[0])
            return [value if wanted else None for value, wanted in zip(each, needed, strict=True)]
        call = ConvolutionCall(slab, weight, None, settings, gradient)
        directions: tuple[Direction, ...] = ("input gradient", "weight gradient")
        for place, direction in enumerate(directions):
            chosen = choose(direction, call) if needed[place] else None
            found[place] = None if chosen is None else chosen.compute()
    rest = [wanted and value is None for wanted, value in zip(needed, found, strict=True)]
    if rest == [False, False, True]:  # as in torch, whose function would run a convolution's backward
        found[2] = gradient.sum([dim for dim in range(gradient.ndim) if dim != 1])
    if not any(rest) or found[2] is not None:
        return found
    others = depth_chunks.differentiate(gradient, slab, weight, bias_sizes, settings.arguments, rest)
    return [other if value is None else value for value, other in zip(found, others, strict=True)]
