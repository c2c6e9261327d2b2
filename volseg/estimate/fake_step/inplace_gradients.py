"""What autograd does in place of plain tensors, where it makes new ones of those without values.

Where a tensor has several uses, autograd adds its gradients to what came first, if nobody else holds that
(``can_accumulate_inplace`` [1]_); what was read by indices is added to zeros in place [2]_. Both ask for plain tensors,
and a followed step would take more memory than a real one. Who is held by nobody else has as many references as a
gradient of which that is known, counted in the same place.

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

__all__ = ["IN_PLACE", "InPlace"]

ADD = torch.ops.aten.add.Tensor
IN_PLACE: dict[Any, Any] = {
    ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
ENGINE = "_engine_run_backward"
"""The Python function that autograd's own operators come from; those of a backward in Python come from that one's."""
BETWEEN = ("torch._dynamo.", "torch._compile", "volseg.estimate.")
"""Modules through which an operator comes to a mode, wherever it comes from."""


class InPlace:
    """Says what autograd does in place."""

    def __init__(self) -> None:
        self._alone: tuple[int, ...] | None = None

    def learn(self) -> None:
        """Count the references of gradients that nobody else holds: of a backward pass over two numbers.

        It comes through everything that a step's operators come through.
        """
        numbers = torch.empty(2, requires_grad=True) * 2
        (numbers.exp() * numbers.sin()).sum().backward()
        assert self._alone is not None

    def replace(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that is run on plain tensors: that which writes to its first argument, or ``func``."""
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
        return is_alone and _is_alike(*args) and _is_dense(args[0])


def _comes_from_engine() -> bool:
    """Say whether the operator that is run now was called by autograd itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_name == ENGINE


def _is_alike(first: Tensor, second: Any) -> bool:
    return isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Say whether it has a place for each of its values, and none besides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()
