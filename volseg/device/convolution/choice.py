"""Choose how a convolution is computed: by a kernel of volseg if that is faster, otherwise by torch.

Tables are searched from the top, then that of ``forms``. ``rules`` decides which convolutions a kernel supports; a
kernel's own module contains the computation and its limits. volseg's kernels read volumes with channels last, and are
considered only for those.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from volseg.device import fusions, gpus
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
    rules,
    space_to_channels,
)
from volseg.device.convolution.forms import Direction, Form, Groups, ZeroChannels, rank_forms
from volseg.device.convolution.rules import ConvolutionCall
from volseg.device.convolution.settings import Settings
from volseg.device.layout import in_layout


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
    if not rules.is_plain(volume, call.weight, call.settings):
        return ()
    voxels, device = rules.count_voxels(volume), gpus.get_tensor_device(volume)
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
    return all(rules.is_depthwise(volume, call.weight, call.settings) for volume in volumes)


def _is_head(call: ConvolutionCall) -> bool:
    return rules.is_one_voxel(call.slab, call.weight, call.settings) or rules.is_uneven_head(call)


_ROWS: Mapping[Direction, Sequence[tuple[str, ModuleType, Callable[[ConvolutionCall], bool]]]] = {
    "forward": (
        ("depthwise", depthwise, _suits_depthwise),
        ("few channels", few_channels, rules.is_few_channels),
        ("few channels in", few_in, rules.is_few_in),
        (
            "few taps",
            few_taps,
            lambda call: rules.is_few_taps(call) and (call.bias is None or rules.has_own_taps(call.weight)),
        ),
        ("one voxel", one_voxel, _is_head),
        ("few channels out", few_out, rules.computes_few_out),
        ("many taps", flipped_weights, rules.turns_many_taps),
    ),
    # Except ``one_voxel``, which computes both gradients in one pass: see ``differentiate``.
    "input gradient": (
        ("depthwise", depthwise, _suits_depthwise),
        (
            "few channels",
            few_channels,
            lambda call: rules.is_few_channels(call) and rules.pads_less_than_kernel(call.weight, call.settings),
        ),
        ("few channels out", few_out, rules.differentiates_few_out),
    ),
    "weight gradient": (
        ("depthwise", depthwise, _suits_depthwise),
        ("few channels in", few_in, lambda call: rules.is_few_in(call) and call.given.stride(1) == 1),
        ("few taps", few_taps, rules.is_few_taps),
        ("few channels out", few_out, partial(rules.differentiates_few_out, most=inf)),
        ("many taps", many_taps, rules.differentiates_many_taps),
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
    if not channels_last or rules.is_one_voxel(gradient, weight, settings):
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
        if rules.is_one_voxel(gradient, weight, settings):
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
