"""Convolve tensors above 2**31 elements in chunks of planes along D.

cuDNN's fast kernels count elements in 32 bits; above that torch uses others, tens of times slower. Planes of a volume
in channels-last layout are contiguous, so a chunk of planes is convolved without a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.layout import DIM, layout_of

LIMIT = 2**31 - 1
"""Limit of elements of a tensor that is convolved at once."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """Output planes, the input planes that they need inside the volume, and planes of zeros before and after these."""

    outputs: tuple[int, int]
    inputs: tuple[int, int]
    zeros: tuple[int, int]

    def cut(self, slab: Tensor) -> Tensor:
        """Return the input planes, zeros included."""
        start, stop = self.inputs
        planes = slab.narrow(DIM, start, stop - start)
        return F.pad(planes, (0, 0, 0, 0, *self.zeros)) if any(self.zeros) else planes

    def cut_output(self, whole: Tensor) -> Tensor:
        """Return the output planes of a whole tensor."""
        return whole.narrow(DIM, self.outputs[0], self.outputs[1] - self.outputs[0])


def _cut_stacks(slab: Tensor, weight: Tensor, arguments: Sequence[Any], limit: int) -> list[_Stack]:
    """Return the stacks, one if no tensor is large; ``arguments`` are those of ``torch.ops.aten.convolution``."""
    stride, padding, dilation, transposed = arguments[:4]
    elements = slab.shape[0] * slab.shape[2:].numel() * max(slab.shape[1], weight.shape[0])
    if elements <= limit or slab.ndim != 5 or transposed:
        return []
    planes, reach = slab.shape[DIM], (weight.shape[DIM] - 1) * dilation[0] + 1
    outputs = (planes + 2 * padding[0] - reach) // stride[0] + 1
    # Half of the limit leaves space for the halo, and for a stride that does not divide.
    count = min(outputs, -(-2 * elements // limit))
    found = []
    for index in range(count):
        first, last = index * outputs // count, (index + 1) * outputs // count
        start, stop = first * stride[0] - padding[0], (last - 1) * stride[0] - padding[0] + reach
        # If the padding is as wide as the kernel, a whole stack may be in it, and needs no plane of the volume.
        begin = min(max(start, 0), planes)
        end = max(begin, min(stop, planes))
        front = min(max(-start, 0), stop - start)
        found.append(_Stack((first, last), (begin, end), (front, stop - start - front - (end - begin))))
    return found


def _drop_depth_padding(arguments: Sequence[Any]) -> list[Any]:
    stride, padding, *rest = arguments
    return [stride, [0, *padding[1:]], *rest]


def convolve(slab: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any], limit: int = LIMIT) -> Tensor:
    """Return ``torch.ops.aten.convolution`` of these arguments.

    Parameters
    ----------
    slab, weight, bias
        See ``torch.nn.functional.conv3d``.
    arguments
        Arguments of ``torch.ops.aten.convolution`` after its tensors.
    limit
        Limit of elements of a tensor that is convolved at once.
    """
    stacks = _cut_stacks(slab, weight, arguments, limit)
    if not stacks:
        return torch.ops.aten.convolution(slab, weight, bias, *arguments)
    whole = None
    for stack in stacks:
        part = torch.ops.aten.convolution(stack.cut(slab), weight, bias, *_drop_depth_padding(arguments))
        if whole is None:
            shape = list(part.shape)
            shape[DIM] = stacks[-1].outputs[1]
            whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout_of(part))
        stack.cut_output(whole).copy_(part)
    assert whole is not None
    return whole


def differentiate(
    gradient: Tensor,
    slab: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    arguments: Sequence[Any],
    mask: list[bool],
    limit: int = LIMIT,
) -> Sequence[Tensor | None]:
    """Return ``torch.ops.aten.convolution_backward`` of these arguments; the weights' parts add up in float32.

    Parameters
    ----------
    gradient
        Gradient of the output.
    slab, weight, arguments, limit
        See ``convolve``.
    bias_sizes
        Shape of the bias, None without a bias.
    mask
        Whether the gradients of the input, of the weight and of the bias are needed.
    """
    backward = torch.ops.aten.convolution_backward
    stacks = _cut_stacks(slab, weight, arguments, limit)
    if not stacks:
        found: Sequence[Tensor | None] = backward(gradient, slab, weight, bias_sizes, *arguments, mask)
        return found
    inputs = torch.zeros_like(slab) if mask[0] else None
    weights: list[Tensor | None] = [None, None]
    for stack in stacks:
        parts = backward(
            stack.cut_output(gradient), stack.cut(slab), weight, bias_sizes, *_drop_depth_padding(arguments), mask
        )
        if inputs is not None:
            start, stop = stack.inputs
            # Neighbouring chunks share the planes of their halo.
            inputs.narrow(DIM, start, stop - start).add_(parts[0].narrow(DIM, stack.zeros[0], stop - start))
        for number, part in enumerate(parts[1:]):
            if part is not None:
                wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
                before = weights[number]
                weights[number] = wide if before is None else before + wide
    narrow = [None if part is None else part.to(gradient.dtype) for part in weights]
    return inputs, *narrow
