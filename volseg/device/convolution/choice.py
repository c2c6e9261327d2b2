"""Who computes which convolution, forward and backward: kernels of our own where they are the faster ones, else torch.

Every rule stands here, in tables that are searched from the top, and behind them in that of ``forms``; a kernel's own
module knows how it computes, and its limits. Kernels of our own read channels that are last in memory and are asked for
there only.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from volseg.device import fusions, pretended, triton_tiles
from volseg.device.convolution import (
    depthwise,
    few_channels,
    few_in,
    few_out,
    few_taps,
    many_taps,
    one_voxel,
    padded,
    paired,
    stacks,
)
from volseg.device.convolution.forms import Direction, Form, Groups, find_form
from volseg.device.convolution.settings import Settings
from volseg.device.layout import in_layout

__all__ = [
    "TABLES",
    "ConvolutionCall",
    "adds_bias",
    "choose",
    "compute_in_form",
    "convolve",
    "differentiate",
    "is_depthwise",
    "is_one_voxel",
    "lay_out_gradient",
]


class ConvolutionCall(NamedTuple):
    """What is convolved, or was, where the output's ``gradient`` is there."""

    slab: Tensor
    weight: Tensor
    bias: Tensor | None
    settings: Settings
    gradient: Tensor | None = None


class Kernel(NamedTuple):
    """A kernel of ours, for the convolutions that ``suits`` says."""

    name: str
    suits: Callable[[ConvolutionCall], bool]
    compute: Callable[[ConvolutionCall], Tensor]


class Chosen(NamedTuple):
    """What computes one convolution: a kernel of ours, or torch in another form than its own."""

    name: str
    compute: Callable[[], Tensor]
    adds_bias: bool
    """In its own pass."""


def _is_half(tensor: Tensor, weight: Tensor) -> bool:
    """Say whether Triton may run, and the convolution is one of half precision."""
    if not (triton_tiles.available() and pretended.on_gpu(tensor) and tensor.ndim == 5):
        return False
    if tensor.numel() > triton_tiles.MOST_VOXELS and _count_voxels(tensor) > triton_tiles.MOST_VOXELS:
        return False
    return tensor.dtype in (torch.float16, torch.bfloat16) and weight.dtype == tensor.dtype


def _is_plain_or_strided(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Say likewise of one without groups."""
    return settings.groups == 1 and not settings.transposed and _is_half(tensor, weight)


def _is_plain(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Say likewise of one without strides or groups."""
    return settings.stride == (1, 1, 1) and _is_plain_or_strided(tensor, weight, settings)


def _is_undilated(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    return settings.dilation == (1, 1, 1) and _is_plain(tensor, weight, settings)


def _pads_less_than_kernel(weight: Tensor, settings: Settings) -> bool:
    return all(p < k for p, k in zip(settings.padding, weight.shape[2:], strict=True))


def _count_voxels(slab: Tensor) -> int:
    """Return the voxels of all samples."""
    return slab.shape[0] * slab.shape[2:].numel()


def is_one_voxel(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Say whether ``one_voxel`` takes this convolution; ``tensor`` is its input, or the gradient of its output."""
    return weight.shape[0] <= one_voxel.MOST_CLASSES and _is_point(tensor, weight, settings)


def _is_point(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    point = weight.shape[2:] == (1, 1, 1) and settings.padding == (0, 0, 0)
    return point and weight.shape[1] <= one_voxel.MOST_FEATURES and _is_plain(tensor, weight, settings)


def _is_uneven_head(call: ConvolutionCall) -> bool:
    """Say whether this is a head of many classes, which are no multiple of eight: cuDNN's matrix kernels take eights.

    Others between features keep their channels last.
    """
    classes = call.weight.shape[0]
    fits = one_voxel.MOST_CLASSES < classes <= one_voxel.MOST_CLASSES_OF_FORWARD
    return fits and classes % 8 != 0 and _is_point(call.slab, call.weight, call.settings)


def _is_few_taps(call: ConvolutionCall) -> bool:
    channels, taps = call.weight.shape[0], prod(call.weight.shape[1:])
    fits = few_taps.FEWEST_CHANNELS <= channels <= few_taps.MOST_CHANNELS and taps <= few_taps.MOST_TAPS
    # Channels of one voxel lie side by side: that is a matrix product as it stands, and no gathering of taps.
    is_point = prod(call.weight.shape[2:]) == 1 and fusions.is_on("points")
    gathered = not is_point or call.weight.shape[1] <= few_taps.MOST_CHANNELS_OF_POINT
    if not fits or not gathered or call.settings.dilation != (1, 1, 1):
        return False
    suits = _is_plain_or_strided if _has_own_taps(call.weight) else _is_plain
    return suits(call.slab, call.weight, call.settings)


def _has_own_taps(weight: Tensor) -> bool:
    """Say whether ``few_taps`` takes strides and a bias, too: convolutions of single voxels are fast elsewhere."""
    return prod(weight.shape[2:]) > 1 and fusions.is_on("few channels")


def _has_few_in(weight: Tensor) -> bool:
    """Say whether ``few_in`` is for a kernel with so many channels out and in."""
    fits = few_in.FEWEST_CHANNELS <= weight.shape[0] <= few_in.MOST_CHANNELS and weight.shape[1] <= few_in.MOST_IN
    return fits and fusions.is_on("few channels")


def _is_few_in(call: ConvolutionCall) -> bool:
    fits = _has_few_in(call.weight) and prod(call.weight.shape[1:]) > few_in.MOST_TAPS_ONE_BY_ONE
    return fits and _is_undilated(call.slab, call.weight, call.settings) and few_in.can_read(call.slab)


def _is_few_out(call: ConvolutionCall) -> bool:
    suits = _has_few_in(call.weight.transpose(0, 1)) and prod(call.weight.shape[2:]) >= few_out.FEWEST_TAPS
    return suits and _is_undilated(call.slab, call.weight, call.settings) and call.slab.stride(1) == 1


def _computes_few_out(call: ConvolutionCall) -> bool:
    fits = call.weight.shape[1] in few_out.CHANNELS and _is_few_out(call)
    return fits and few_out.keeps_width(call.weight, call.settings.padding)


def _differentiates_few_out(call: ConvolutionCall) -> bool:
    return _is_few_out(call) and _pads_less_than_kernel(call.weight, call.settings) and few_in.can_read(_given(call))


def _is_many_taps(call: ConvolutionCall) -> bool:
    slab, weight = call.slab, call.weight
    wide = min(weight.shape[:2]) >= many_taps.FEWEST_CHANNELS and prod(weight.shape[2:]) >= many_taps.FEWEST_TAPS
    if not (wide and _is_undilated(slab, weight, call.settings) and _pads_less_than_kernel(weight, call.settings)):
        return False
    return slab.stride(1) == 1 and _count_voxels(slab) * max(weight.shape[:2]) <= stacks.LIMIT


def _is_few_channels(call: ConvolutionCall) -> bool:
    fits = max(call.weight.shape[:2]) <= few_channels.MOST_CHANNELS
    gathered = call.weight.numel() <= few_channels.MOST_PRODUCTS and prod(call.weight.shape[2:]) > 1
    return fits and gathered and fusions.is_on("few channels") and _is_undilated(call.slab, call.weight, call.settings)


def is_depthwise(tensor: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Say whether ``depthwise`` takes this convolution, transposed or not; ``tensor`` is its input, or a gradient."""
    if settings.groups == 1 or not fusions.is_on("depthwise") or not _is_half(tensor, weight):
        return False
    return tensor.numel() > 0 and depthwise.fits(weight.shape, settings)


def _differentiates_depthwise(call: ConvolutionCall) -> bool:
    return all(is_depthwise(volume, call.weight, call.settings) for volume in (call.slab, _given(call)))


def _find_form(direction: Direction, call: ConvolutionCall) -> Form | None:
    """Return the form of torch's convolution that was measured to be faster than torch's own, None where none was."""
    volume = call.slab if direction == "forward" else _given(call)
    if not _is_plain(volume, call.weight, call.settings):
        return None
    voxels, device = _count_voxels(volume), pretended.find_device(volume)
    form = find_form(direction, call.weight.shape, call.settings.dilation, voxels, device)
    return form if form is not None and fusions.is_on(_name(form)) else None


def _can_take(form: Form, direction: Direction, call: ConvolutionCall) -> bool:
    """Say whether the volumes lie in memory as a form reads them."""
    if not isinstance(form, Groups):
        return True
    volumes = (call.slab,) if direction == "forward" else (call.slab, _given(call))
    return all(paired.can_group(volume, call.weight, call.settings, form.voxels) for volume in volumes)


def _name(form: Form) -> str:
    """Return a form's name among the fusions."""
    return "pairs" if isinstance(form, Groups) else "zero channels"


def compute_in_form(form: Form, direction: Direction, call: ConvolutionCall) -> Tensor:
    """Compute the output, or a gradient, in a form that may take it."""
    module, arguments = paired if isinstance(form, Groups) else padded, form._asdict()
    if direction == "forward":
        return module.forward(call.slab, call.weight, call.bias, call.settings, **arguments)
    compute = module.input_gradient if direction == "input gradient" else module.weight_gradient
    return compute(_given(call), call.slab, call.weight, call.settings, **arguments)


TABLES: Mapping[Direction, Sequence[Kernel]] = {
    "forward": (
        Kernel(
            "depthwise",
            lambda call: is_depthwise(call.slab, call.weight, call.settings),
            lambda call: depthwise.forward(call.slab, call.weight, call.bias, call.settings),
        ),
        Kernel(
            "few channels",
            _is_few_channels,
            lambda call: few_channels.forward(call.slab, call.weight, call.bias, call.settings.padding),
        ),
        Kernel(
            "few channels in",
            _is_few_in,
            lambda call: few_in.forward(call.slab, call.weight, call.bias, call.settings.padding),
        ),
        Kernel(
            "few taps",
            lambda call: _is_few_taps(call) and (call.bias is None or _has_own_taps(call.weight)),
            lambda call: few_taps.forward(
                call.slab, call.weight, call.settings.padding, call.settings.stride, call.bias
            ),
        ),
        Kernel(
            "one voxel",
            lambda call: is_one_voxel(call.slab, call.weight, call.settings) or _is_uneven_head(call),
            lambda call: one_voxel.forward(call.slab, call.weight, call.bias),
        ),
        Kernel(
            "few channels out",
            _computes_few_out,
            lambda call: few_out.forward(call.slab, call.weight, call.bias, call.settings.padding),
        ),
        Kernel(
            "many taps",
            lambda call: _is_many_taps(call) and _count_voxels(call.slab) >= many_taps.FEWEST_VOXELS,
            lambda call: many_taps.forward(call.slab, call.weight, call.bias, call.settings.padding),
        ),
    ),
    # But for ``one_voxel``, which computes both gradients in one pass: see ``differentiate``.
    "input gradient": (
        Kernel(
            "depthwise",
            _differentiates_depthwise,
            lambda call: depthwise.input_gradient(_given(call), call.slab, call.weight, call.settings),
        ),
        Kernel(
            "few channels",
            lambda call: _is_few_channels(call) and _pads_less_than_kernel(call.weight, call.settings),
            lambda call: few_channels.input_gradient(_given(call), call.weight, call.settings.padding),
        ),
        Kernel(
            "few channels out",
            _differentiates_few_out,
            lambda call: few_out.input_gradient(_given(call), call.weight, call.settings.padding),
        ),
    ),
    "weight gradient": (
        Kernel(
            "depthwise",
            _differentiates_depthwise,
            lambda call: depthwise.weight_gradient(_given(call), call.slab, call.weight, call.settings),
        ),
        Kernel(
            "few channels in",
            lambda call: _is_few_in(call) and _given(call).stride(1) == 1,
            lambda call: few_in.weight_gradient(_given(call), call.slab, call.weight, call.settings.padding),
        ),
        Kernel(
            "few taps",
            _is_few_taps,
            lambda call: few_taps.weight_gradient(
                _given(call), call.slab, call.weight, call.settings.padding, call.settings.stride
            ),
        ),
        Kernel(
            "few channels out",
            _differentiates_few_out,
            lambda call: few_out.weight_gradient(_given(call), call.slab, call.weight, call.settings.padding),
        ),
        Kernel(
            "many taps",
            _is_many_taps,
            lambda call: many_taps.weight_gradient(_given(call), call.slab, call.weight, call.settings.padding),
        ),
    ),
}
"""By what is computed, without those of ``forms``."""


def _given(call: ConvolutionCall) -> Tensor:
    assert call.gradient is not None
    return call.gradient


def choose(direction: Direction, call: ConvolutionCall) -> Chosen | None:
    """Return who computes a convolution faster than torch does, None where nobody is known to."""
    for kernel in TABLES[direction]:
        if kernel.suits(call):
            return Chosen(kernel.name, partial(kernel.compute, call), adds_bias=True)
    form = _find_form(direction, call)
    if form is None or not _can_take(form, direction, call):
        return None
    return Chosen(_name(form), partial(compute_in_form, form, direction, call), adds_bias=False)


def adds_bias(slab: Tensor, weight: Tensor, settings: Settings, channels_last: bool) -> bool:
    """Say whether a kernel of ours adds the bias in its own pass; torch adds it in a pass behind cuDNN's.

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
        ``(B, C, D, H, W)``, or of other dims, which torch convolves; of one dtype.
    settings
        Of the convolution.
    channels_last
        Whether volumes lie, and results shall lie, with channels last.
    """
    if not channels_last:
        return stacks.convolve(slab, weight, bias, settings.arguments)
    call = ConvolutionCall(slab, weight, bias, settings)
    chosen = choose("forward", call)
    if chosen is not None:
        return chosen.compute()
    result = stacks.convolve(slab, weight, bias, settings.arguments)
    # cuDNN keeps the input's layout where the input has one channel, which every later operator would inherit.
    return in_layout(result, channels_last=True)


def lay_out_gradient(gradient: Tensor, weight: Tensor, settings: Settings, channels_last: bool) -> Tensor:
    """Return an output's gradient as ``differentiate`` reads it, itself where it lies so already."""
    if not channels_last or is_one_voxel(gradient, weight, settings):
        return gradient
    # A join's gradient may come as a slice of channels, which cuDNN's wrapper would copy at a third of the speed.
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
        Of the output, as ``lay_out_gradient`` returns it.
    slab, weight
        What was convolved.
    bias_sizes
        Shape of the bias, None where there is none.
    settings, channels_last
        As in ``convolve``.
    needed
        Whether the gradient of the input, of the weight, of the bias is asked for.
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
    if rest == [False, False, True]:  # as torch would, whose function takes its gradients for a convolution's
        found[2] = gradient.sum([dim for dim in range(gradient.ndim) if dim != 1])
    if not any(rest) or found[2] is not None:
        return found
    others = stacks.differentiate(gradient, slab, weight, bias_sizes, settings.arguments, rest)
    return [other if value is None else value for value, other in zip(found, others, strict=True)]
