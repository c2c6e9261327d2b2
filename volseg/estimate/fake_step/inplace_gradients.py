"""Let autograd accumulate gradients of fake tensors in place, as it does with plain tensors.

If a tensor has several uses, autograd adds its later gradients to the first in place, if that has no other reference
(``can_accumulate_inplace`` [1]_). It adds gradients of indexed reads to zeros in place [2]_. Autograd does both
for plain tensors only, so a traced step would take more memory than a real step. A gradient has no other reference if
its reference count equals that of a gradient known to have none, counted at the same place.

References
----------
.. [1] ``torch/csrc/autograd/input_buffer.cpp``
.. [2] ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``
"""

import sys
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import count_references

ADD = torch.ops.aten.add.Tensor
IN_PLACE: dict[Any, Any] = {
    ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
ENGINE = "_engine_run_backward"
"""The Python function that calls autograd's own operators; a backward in Python calls its operators itself."""
BETWEEN = ("torch._dynamo.", "torch._compile", "volseg.estimate.")
"""Modules on the call stack between an operator's caller and a mode."""


class InPlace:
    """Replaces autograd's operators with their in-place forms, where autograd would use these on plain tensors."""

    def __init__(self) -> None:
        self._alone: tuple[int, ...] | None = None

    def learn(self) -> None:
        """Count the references of a gradient without other holders, in a backward pass over two numbers.

        The pass goes through the same modes as the operators of a step.
        """
        numbers = torch.empty(2, requires_grad=True) * 2
        (numbers.exp() * numbers.sin()).sum().backward()
        assert self._alone is not None

    def replace(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that autograd runs on plain tensors: the in-place form of ``func``, or ``func``."""
        if torch.is_grad_enabled() or not _comes_from_engine():
            return func
        return IN_PLACE[func] if func is not ADD or self._adds_in_place(args) else func

    def _adds_in_place(self, args: tuple[Any, ...]) -> bool:
        if len(args) != 2:
            return False
        if self._alone is None:
            self._alone = count_references(args, 0)
        counts = count_references(args, 0)
        is_alone = all(count <= alone for count, alone in zip(counts, self._alone, strict=True))
        first, second = args
        is_alike = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
        return is_alone and is_alike and _is_dense(first)


def _comes_from_engine() -> bool:
    """Return whether autograd itself called the current operator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_name == ENGINE


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's memory has exactly one element per value."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()
